"""``--llm openai:NAME`` and the like: LangChain's chat models over loopback, with LLMs that think and not."""

import json

import pytest

from rgate_integrations import load_gate
from rgate_integrations.errors import ConfigurationError, EvidenceError, NoAnswerError, ServerError
from rgate_integrations.models.request_options import RequestOptions
from rgate_integrations.prompts import ANSWER
from tests.commands import rgate
from tests.fake_server import Fake
from tests.langchain_fakes import INVOKES, each
from tests.scripted_proxy import ScriptedProxy
from tests.test_ability_measured import flat  # noqa: F401  a fixture
from tests.test_thinking_servers import say
from tests.test_tuning_command import command  # noqa: F401  a fixture

pytest.importorskip("langchain", reason="comes with the langchain-agents extra")
from langchain.chat_models import init_chat_model

from rgate_integrations.langchain import RetrievalGate
from rgate_integrations.langchain.chat_models import length_field
from rgate_integrations.langchain.provider_model import ProviderModel

THOUGHT = "Let me see what I know of that name . "
THINKING = 120


class Chat:
    """What OpenAI's server answers.

    Attributes:
        thinks: How many tokens its LLM thinks.
    """

    def __init__(self, thinks=THINKING):
        self.thinks = thinks

    def __call__(self, body):
        words = say(json.dumps(body, ensure_ascii=False)).split()
        limit = body.get("max_completion_tokens") or 9_999
        written = words[: max(limit - self.thinks, 0)]
        tokens = self.thinks + len(written)
        usage = {"prompt_tokens": 7, "completion_tokens": tokens, "total_tokens": 7 + tokens}
        usage["completion_tokens_details"] = {"reasoning_tokens": self.thinks}
        message = {"role": "assistant", "content": " ".join(written)}
        self.show(message, usage, THOUGHT if self.thinks else "")
        reason = "length" if len(written) < len(words) else "stop"
        choice = {"index": 0, "message": message, "finish_reason": reason}
        shared = {"id": "x", "object": "chat.completion", "created": 0, "model": "m"}
        return {**shared, "choices": [choice], "usage": usage}

    def show(self, message, usage, thought):
        """Put the thought into the answer: OpenAI only counts it."""


class Tags(Chat):
    """A served model that is asked as OpenAI's, with its thoughts in the text."""

    def show(self, message, usage, thought):
        del usage["completion_tokens_details"]
        if thought:
            answer = message["content"]
            message["content"] = f"<think>{thought}{'</think>' * bool(answer)}{answer}"


class Uncounted(Chat):
    """A served model that is asked as OpenAI's: LangChain hides its ``reasoning_content`` and does not count it."""

    def show(self, message, usage, thought):
        del usage["completion_tokens_details"]
        message["reasoning_content"] = thought


@pytest.fixture
def settings_of(fake, monkeypatch):
    """Starts a server; returns the settings of a chat model that asks it."""
    pytest.importorskip("langchain_openai")
    monkeypatch.setenv("OPENAI_API_KEY", "sk-none")
    return lambda reply: {"base_url": fake(reply).url, "max_retries": 0}


@pytest.fixture
def openai(settings_of):
    """Makes the model: ``openai(reply, think)``."""
    return lambda reply, think="as-is": ProviderModel(
        "openai", "gpt-5", RequestOptions(think, 2048, settings_of(reply))
    )


@pytest.fixture
def ability(flat, settings_of, tmp_path):  # noqa: F811
    """Runs ``rgate ability`` on a server: ``ability(server, *options)``."""
    fixed = ["ability", "--out", tmp_path / "mine", "--llm", "openai:gpt-5"]
    return lambda server, *options: rgate(*fixed, "--extra-body", json.dumps(settings_of(server)), *options)


@pytest.mark.parametrize(
    ("thinks", "said", "most"),
    [(THINKING, ", thinking first", 104), (0, ".", 100)],  # the first answer is cut off
    ids=["thinks", "does not think"],
)
def test_the_ability_is_that_of_the_answers(ability, thinks, said, most):
    done = ability(Chat(thinks))
    assert f"measured: 50 of 100 anchor questions answered correctly{said}" in done.stdout
    assert 100 <= len(Fake.seen) <= most


def test_nothing_is_measured_where_all_are_cut_off(ability, tmp_path):
    done = ability(Chat(), "--thinking-tokens", 20)
    assert isinstance(done.exception, NoAnswerError), done.output
    assert "Giving up" in str(done.exception)
    assert not (tmp_path / "mine").exists()


VALUES = [{"question": "Who wrote Hamlet?"}]
thinks = pytest.mark.parametrize("thinks", [THINKING, 0], ids=["thinks", "does not think"])


kinds = pytest.mark.parametrize("kind", [Chat, Tags])


@thinks
@kinds
def test_an_answer_of_many_words_is_cut_and_is_one(openai, kind, thinks):
    (draft,) = openai(kind(thinks)).generate(ANSWER, VALUES, tokens=2)
    assert (draft.text, draft.finished, draft.is_cut_off) == ("Nobody knows", False, False)
    assert bool(draft.thinking_tokens) == bool(thinks)


@thinks
@kinds
@each(INVOKES)
def test_a_draft_is_of_the_answer(call, settings_of, kind, thinks):
    """Two tokens of an LLM that thinks are thoughts alone, which nothing judges."""
    llm = init_chat_model("gpt-5", model_provider="openai", **settings_of(kind(thinks)))
    gate = load_gate("ik", source="recorded", proxy=ScriptedProxy())
    decision = call(RetrievalGate(gate, llm=llm, tokens=2), "Who wrote Hamlet?")
    if thinks:
        assert (decision.retrieve, decision.error.type) == (True, "NoAnswerError")
    else:
        assert (decision.draft.text, decision.draft.finished) == ("Nobody knows", False)


@pytest.mark.parametrize(
    ("package", "name", "field"),
    [
        ("langchain_openai", "ChatOpenAI", "max_tokens"),
        ("langchain_anthropic", "ChatAnthropic", "max_tokens"),
        ("langchain_google_genai", "ChatGoogleGenerativeAI", "max_output_tokens"),
        ("langchain_ollama", "ChatOllama", "num_predict"),
    ],
)
def test_the_class_of_each_provider_has_a_field_for_the_length(package, name, field):
    kind = getattr(pytest.importorskip(package), name)
    assert length_field(kind.model_construct()) == field


def test_thoughts_that_are_neither_shown_nor_counted_are_known_by_the_missing_answer(openai):
    model = openai(Uncounted())
    for _ in range(3):
        (draft,) = model.generate(ANSWER, VALUES, tokens=9)
        assert draft.text == "Nobody knows ."
    assert model.habits.thinks
    assert len(Fake.seen) == 1 + 3


def test_what_is_refused_is_not_sent_again(openai):
    def strict(body):
        for name in {"temperature", "logprobs"} & body.keys():
            return 400, json.dumps({"error": {"message": f"Unsupported value: '{name}'", "param": name}})
        return Chat()(body)

    model = openai(strict, "low")
    for _ in range(2):
        (draft,) = model.generate(ANSWER, VALUES, tokens=2)
        assert (draft.text, draft.thinking_tokens, draft.prompt_tokens) == ("Nobody knows", THINKING, 7)
    assert len(Fake.seen) == 2 + 1 + 2
    sent = Fake.seen[-1][1]
    assert (sent["max_completion_tokens"], sent["reasoning_effort"]) == (2050, "low")
    assert not {"temperature", "logprobs"} & sent.keys()
    assert (model.habits.thinks, model.habits.refused) == (True, ["logprobs", "temperature"])
    (samples,) = model.sample(ANSWER, VALUES, n=2, tokens=2, temperature=1.0, seed=0)
    assert [draft.text for draft in samples] == ["Nobody knows"] * 2
    with pytest.raises(EvidenceError, match="cannot give the probability"):
        model.score(ANSWER, VALUES, ("Yes", "No"))


@pytest.mark.parametrize(
    ("reply", "error", "said"),
    [
        ((401, '{"error": {"message": "wrong key"}}'), ServerError, "wrong key"),
        ((400, '{"error": {"message": "I break"}}'), Exception, "I break"),
    ],
)
def test_what_cannot_be_asked_says_so(openai, reply, error, said):
    with pytest.raises(error, match=said):
        openai(reply).generate(ANSWER, VALUES, tokens=2)


@pytest.mark.parametrize(
    ("provider", "options", "said"),
    [
        ("groq_or_so", RequestOptions(), "groq_or_so"),
        ("mistralai", RequestOptions(think="off"), "Cannot set thinking"),
    ],
)
def test_what_is_not_known_is_a_typed_error(provider, options, said):
    with pytest.raises(ConfigurationError, match=said):
        ProviderModel(provider, "x", options)


def test_a_local_model_takes_no_options():
    done = rgate("ability", "--llm", "smollm2-135m-instruct", "--think", "off", "--out", "mine")
    assert "A local model accepts neither --think nor --extra-body" in str(done.exception)
