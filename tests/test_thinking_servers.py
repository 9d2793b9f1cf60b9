"""Servers whose LLM thinks before it answers, or takes other parameters: what is asked, measured, and saved."""

import json

import pytest
from langchain_core.messages import AIMessage

from rgate_integrations import load_gate
from rgate_integrations.errors import ConfigurationError, EvidenceError, NoAnswerError
from rgate_integrations.gates.folder import read_gate
from rgate_integrations.models.request_options import RequestOptions
from rgate_integrations.prompts import ANSWER
from rgate_integrations.runtime.replies import THINKING_OFF
from rgate_integrations.tuning import collect
from rgate_integrations.tuning.ability import measure_ability
from rgate_integrations.tuning.arms import ModelArm, read_answer
from rgate_integrations.tuning.collection import STOP_AFTER
from rgate_integrations.tuning.questions import read_examples
from tests.commands import rgate
from tests.fake_server import Fake, answer
from tests.test_ability_measured import EASY, GOLD, KINDS, flat  # noqa: F401  a fixture
from tests.tuning_parts import Reader, known, says_what_it_knows, tuned

THOUGHT = [f"{word} " for word in ("Let", "me", "see", "what", "I", "know", "of", "that", "name", ".")] * 12
VALUES = [{"question": "What is the capital of France?"}]


def say(asked):
    """Answer easy anchors rightly, and judge that every answer is right."""
    if "Answer to judge" in asked:
        return "Yes"
    said = [text for text in GOLD if text in asked]
    return f"It is {GOLD[said[0]]}." if said and KINDS[said[0]] in EASY else "Nobody knows ."


class ThinkingServer:
    """A server of a dialect, whose LLM answers easy anchors rightly; each word is a token.

    Args:
        dialect: How thoughts are shown; None for an LLM that does not think.
        thinks: How many tokens it thinks.
        refuses: The parameters that it refuses, with what it says of each.
        logprobs: Whether it gives log-probabilities, of thoughts and answer.
    """

    def __init__(self, dialect, *, thinks=120, refuses=None, logprobs=False):
        self.dialect = dialect
        self.thinks = thinks if dialect else 0
        self.refuses = refuses or {}
        self.logprobs = logprobs
        self.refused = 0

    def answer(self, body):
        return say(body["messages"][-1]["content"])

    def __call__(self, body):
        for name, said in self.refuses.items():
            if name in body:
                self.refused += 1
                return 400, json.dumps(
                    {"error": {"message": said, "param": name, "code": "unsupported_value"}}
                )
        answer = self.answer(body)
        limit = body.get("max_tokens", body.get("max_completion_tokens"))
        is_off = body.get("chat_template_kwargs") == {"enable_thinking": False, "thinking": False}
        thoughts = THOUGHT[: 0 if is_off else self.thinks]
        words = [f"{word} " for word in answer.split()]
        thought, written = thoughts[:limit], words[: max(limit - len(thoughts), 0)]
        is_cut = len(thought) + len(written) < len(thoughts) + len(words)
        message = {"role": "assistant", "content": "".join(written)}
        usage = {"prompt_tokens": 7, "completion_tokens": len(thought) + len(written)}
        text = "".join(thought)
        if text and self.dialect in ("reasoning_content", "reasoning", "thinking"):
            message[self.dialect] = text
        elif text and self.dialect == "hidden":
            usage["completion_tokens_details"] = {"reasoning_tokens": len(thought)}
        elif text and self.dialect:
            opening, closing = self.dialect
            ended = closing if len(thought) == len(thoughts) else ""
            message["content"] = f"{opening}{text}{ended}{message['content']}"
        choice = {"message": message, "finish_reason": "length" if is_cut else "stop"}
        if self.logprobs:
            choice["logprobs"] = {
                "content": [{"token": token, "logprob": -0.5} for token in thought + written]
            }
        return {"choices": [choice], "usage": usage}


DIALECTS = {
    "vLLM, SGLang, llama.cpp": "reasoning_content",
    "vLLM's new name": "reasoning",
    "Ollama": "thinking",
    "OpenAI's chat": "hidden",
    "tags": ("<think>\n", "</think>\n\n"),
    "a tag that the prompt opens": ("", "</think>\n\n"),
    "harmony": ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant<|channel|>final<|message|>"),
}
dialects = pytest.mark.parametrize("dialect", DIALECTS.values(), ids=DIALECTS)
LONG = RequestOptions(thinking_tokens=500)


@pytest.fixture
def ability(flat, fake, tmp_path):  # noqa: F811
    """Runs ``rgate ability`` on a server: ``ability(server, *options)``."""
    fixed = ["ability", "--out", tmp_path / "mine", "--model", "m"]
    return lambda server, *options: rgate(*fixed, "--llm", fake(server).url, *options)


@pytest.mark.parametrize("dialect", [None, *DIALECTS.values()], ids=["does not think", *DIALECTS])
def test_the_ability_is_that_of_the_answers(ability, dialect):
    done = ability(ThinkingServer(dialect))
    assert done.exit_code == 0, done.output
    assert "measured: 50 of 100 anchor questions answered correctly" in done.stdout
    assert ("thinking first (120 tokens)" in done.stdout) == (dialect is not None)
    # Found out by the first call, which was cut off.
    assert [body["max_tokens"] for _, body, _ in Fake.seen[:2]] == ([64, 2112] if dialect else [64, 64])
    assert len(Fake.seen) == 100 + (dialect is not None)


@dialects
def test_where_every_answer_is_cut_off_nothing_is_measured(ability, dialect, tmp_path):
    """Where nothing shows that it thinks, that is known by the end."""
    done = ability(ThinkingServer(dialect), "--thinking-tokens", 20)
    assert isinstance(done.exception, NoAnswerError)
    is_shown = dialect != DIALECTS["a tag that the prompt opens"]
    assert ("Giving up" in str(done.exception)) == is_shown
    assert "thinking" in done.exception.hint
    assert not (tmp_path / "mine").exists()
    assert not is_shown or len(Fake.seen) <= 2 * (STOP_AFTER + 4)


def test_thinking_that_is_turned_off_costs_no_tokens(ability):
    assert "measured: 50 of 100" in ability(ThinkingServer("reasoning_content"), "--think", "off").stdout
    kwargs = {"enable_thinking": False, "thinking": False}
    assert [body["chat_template_kwargs"] for _, body, _ in Fake.seen] == [kwargs] * 100


OPENAI = {
    "max_tokens": "Unsupported parameter: 'max_tokens' is not supported with this model.",
    "temperature": "Unsupported value: 'temperature' does not support 0 with this model.",
    "logprobs": "You are not allowed to request logprobs from this model.",
}


def test_what_is_refused_is_asked_for_once(ability):
    server = ThinkingServer("hidden", refuses=OPENAI)
    assert "measured: 50 of 100" in ability(server).stdout
    assert (server.refused, len(Fake.seen)) == (3, 3 + 1 + 100)
    assert Fake.seen[-1][1].keys() == {"model", "messages", "max_completion_tokens"}


def test_less_effort_is_asked_for_where_none_is_refused(fake):
    def reply(body):
        effort = body["reasoning_effort"]
        if effort in ("none", "minimal"):
            return 400, f"Unsupported value: 'reasoning_effort' does not support {effort!r} with this model."
        return answer()

    proxy = fake(reply, options=RequestOptions("off", extra={"top_p": 0.9}))
    for _ in range(2):
        proxy.generate(ANSWER, VALUES, tokens=9)
    assert [body["reasoning_effort"] for _, body, _ in Fake.seen] == ["none", "minimal", "low", "low"]
    assert Fake.seen[-1][1]["top_p"] == 0.9


def test_a_question_about_a_parameter_is_not_taken_for_its_refusal(fake):
    """A server that quotes it refuses it for another reason; the next question is asked as ever."""
    asked = "How is temperature measured?"
    proxy = fake(lambda body: (400, f"too long: {asked}") if asked in str(body) else answer())
    with pytest.raises(EvidenceError, match="too long"):
        proxy.generate(ANSWER, [{"question": asked}], tokens=9)
    proxy.generate(ANSWER, VALUES, tokens=9)
    assert Fake.seen[-1][1]["temperature"] == 0.0


@pytest.mark.parametrize("refusal", [(500, "slow"), (400, "max_tokens is too large: the context has 99")])
def test_a_wordy_first_answer_is_kept_where_no_longer_one_can_be_had(fake, refusal):
    def reply(body):
        limit = body.get("max_tokens") or body["max_completion_tokens"]
        return refusal if limit > 64 else answer("It is a long story", reason="length")

    proxy = fake(reply, options=LONG)
    for _ in range(2):
        (draft,) = proxy.generate(ANSWER, VALUES, tokens=64)
        assert (draft.text, draft.thinking_tokens) == ("It is a long story", 0)
    assert Fake.seen[-1][1]["max_tokens"] == 64
    assert (proxy.habits.thinks, proxy.habits.refused) == (False, [])


@pytest.mark.parametrize("extra", ["[1]", "{", '"x"', "[" * 100_000])
def test_what_is_no_object_is_no_body(ability, extra):
    error = ability(ThinkingServer(None), "--extra-body", extra).exception
    assert isinstance(error, ConfigurationError)
    assert error.message.startswith("--extra-body ")
    assert str(error).count("Hint:") == 1


@dialects
def test_a_draft_is_the_answer_with_its_tokens(fake, dialect):
    server = ThinkingServer(dialect, logprobs=True)
    (draft,) = fake(server, options=LONG).generate(ANSWER, VALUES, tokens=2)
    assert (draft.text, draft.tokens, draft.logprobs) == ("Nobody knows", ("Nobody ", "knows "), (-0.5, -0.5))
    assert (draft.thinking_tokens, draft.finished) == (len(THOUGHT), False)
    gate = load_gate("token_probability", proxy=fake(server, options=LONG), threshold=0.0)
    assert not gate.decide("Who wrote Hamlet?").retrieve
    # Cut off, it is none, and nothing skips.
    cut = load_gate("token_probability", proxy=fake(server), threshold=0.0).decide("Who wrote Hamlet?")
    if dialect == DIALECTS["a tag that the prompt opens"]:
        pytest.skip("nothing shows that it thinks")
    assert (cut.retrieve, cut.error.type) == (True, "NoAnswerError")


ASKED = [{"question": text, "gold_answers": [GOLD[text]]} for text in list(GOLD)[:12]]


@dialects
def test_collect_labels_answers_and_nothing_that_was_cut_off(fake, dialect, tmp_path, monkeypatch):
    class Hard(ThinkingServer):
        def __call__(self, body):
            self.thinks = 1_200 if ASKED[3]["question"] in str(body) else 120
            return super().__call__(body)

    monkeypatch.setattr(f"{__name__}.THOUGHT", THOUGHT * 10)
    server, out = Hard(dialect), tmp_path / "out.jsonl"
    (file,) = read_examples(
        [collect(ASKED, fake(server, options=LONG), out, judge=fake(server, options=LONG))]
    )
    assert [example.known for example in file.examples] == [True] * (len(ASKED) - 1)  # as the judge says
    assert "Let me" not in out.read_text()
    # What was cut off is asked again, with more, and nothing else is.
    Fake.seen.clear()
    more = fake(server, options=RequestOptions(thinking_tokens=2000))
    (file,) = read_examples([collect(ASKED, more, out)])
    assert len(file.examples) == len(ASKED)
    assert len({body["messages"][-1]["content"] for _, body, _ in Fake.seen}) == 1


def test_where_every_answer_or_verdict_is_cut_off_collect_keeps_nothing_of_them(fake, tmp_path):
    server, out = ThinkingServer("reasoning_content"), tmp_path / "out.jsonl"
    cut, whole = (fake(server, options=RequestOptions(thinking_tokens=tokens)) for tokens in (20, 500))
    with pytest.raises(NoAnswerError, match="Giving up"):
        collect(ASKED, cut, out)
    assert not out.exists()
    unjudged = collect(ASKED, whole, out).read_text()
    with pytest.raises(NoAnswerError, match="Giving up"):
        collect(ASKED, whole, out, judge=cut)
    assert out.read_text() == unjudged


def test_what_was_measured_says_how(flat, fake, tmp_path):  # noqa: F811
    off = fake(ThinkingServer("reasoning_content"), options=RequestOptions(think="off"))
    measured = measure_ability(ModelArm(off), tmp_path / "off")
    assert measured.ability.source.endswith("answered correctly, thinking off")
    with pytest.raises(ConfigurationError, match="were made with"):
        measure_ability(ModelArm(fake(ThinkingServer(None))), tmp_path / "off")


class Numbers(ThinkingServer):
    """Knows the even ones; see `tests.tuning_parts`."""

    def answer(self, body):
        return says_what_it_knows(body["messages"][-1]["content"].partition("?")[0]).text


# How a dialect shows its thoughts is read of each answer; here are those that show them apart, as a number, and not.
@pytest.mark.parametrize("dialect", ["reasoning_content", "hidden", DIALECTS["a tag that the prompt opens"]])
def test_a_tuned_gate_says_how_its_llm_thought_and_none_is_made_of_thoughts(fake, dialect, tmp_path, prior):
    server = Numbers(dialect)
    found = tuned(tmp_path / "first", prior, direct=fake(server, options=LONG))
    assert list(found.labels.known) == [known(each.question.text) for each in found.labels.answered]
    assert read_gate(found.folder).llm == "m, thinking first (120 tokens)"
    off = tuned(tmp_path / "off", prior, direct=fake(server, options=RequestOptions(think="off")))
    decision = load_gate(str(off.folder), proxy=Reader()).decide("what is number 4?")
    assert decision.llm == f"m, {THINKING_OFF} (the gate was tuned on it)"
    with pytest.raises(NoAnswerError, match="cut off"):
        tuned(tmp_path / "cut", prior, direct=fake(server))
    assert not (tmp_path / "cut" / "my gate").exists()


@pytest.mark.parametrize(
    ("message", "cut"),
    [
        (AIMessage("<think>Let me", response_metadata={"finish_reason": "length"}), True),
        (AIMessage([{"type": "thinking", "thinking": "Let me"}]), True),
        ({"answer": AIMessage("", additional_kwargs={"reasoning_content": "Let me"})}, True),
        (AIMessage([{"type": "thinking", "thinking": "Let me"}, {"type": "text", "text": "n2"}]), False),
    ],
)
def test_what_an_applications_object_gave_is_read_without_its_thoughts(message, cut, tmp_path, prior):
    if cut:
        with pytest.raises(NoAnswerError, match="Giving up"):
            tuned(tmp_path, prior, direct=lambda question: message)
    assert read_answer(message).text == ("" if cut else "n2")
    assert read_answer(message).thinking_tokens == 2
