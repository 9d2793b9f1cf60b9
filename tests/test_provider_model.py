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
from rgate_integrations.langchain.provider_model import ProviderModel

# --- servers of providers, as LangChain's chat models speak to them ---------------------------------------------

THOUGHT = "Let me see what I know of that name . "
THINKING = 120
MODEL = {"model": "m"}


class Provider:
    """What a provider's server answers: how it is asked for a length, and what its answers look like.

    Attributes:
        thinks: How many tokens its LLM thinks.
        say: Called with a request's body as text, returns the answer.
    """

    package = "langchain_openai"

    def __init__(self, thinks=THINKING, say=say):
        self.thinks = thinks
        self.say = say

    def __call__(self, body):
        limit = self.limit(body)
        answer = self.say(json.dumps(body, ensure_ascii=False))
        written = answer.split()[: max((limit or 9_999) - self.thinks, 0)]
        is_cut = len(written) < len(answer.split())
        thought = THOUGHT if self.thinks else ""
        return self.reply(thought, " ".join(written), is_cut, self.thinks + len(written))

    def settings_for(self, url):
        return {"base_url": f"{url}/v1", "max_retries": 0}


class Chat(Provider):
    name = "openai:gpt-5"

    def limit(self, body):
        return body.get("max_completion_tokens")

    def reply(self, thought, answer, is_cut, tokens):
        message = {"role": "assistant", "content": answer}
        reason = "length" if is_cut else "stop"
        details = {"reasoning_tokens": self.thinks}
        usage = {"prompt_tokens": 7, "completion_tokens": tokens, "total_tokens": 7 + tokens}
        usage["completion_tokens_details"] = details
        choice = {"index": 0, "message": message, "finish_reason": reason}
        return {
            "id": "x",
            "object": "chat.completion",
            "created": 0,
            **MODEL,
            "choices": [choice],
            "usage": usage,
        }


class Tags(Chat):
    """A served model that is asked as OpenAI's, with its thoughts in the text."""

    def reply(self, thought, answer, is_cut, tokens):
        text = f"<think>{thought}{'</think>' * bool(answer)}{answer}" if thought else answer
        reply = super().reply(thought, text, is_cut, tokens)
        del reply["usage"]["completion_tokens_details"]
        return reply


class Uncounted(Chat):
    """A served model that is asked as OpenAI's: LangChain hides its ``reasoning_content`` and does not count it."""

    def reply(self, thought, answer, is_cut, tokens):
        reply = super().reply(thought, answer, is_cut, tokens)
        reply["choices"][0]["message"]["reasoning_content"] = thought
        del reply["usage"]["completion_tokens_details"]
        return reply


class Anthropic(Provider):
    name, package = "anthropic:claude-opus-4-5", "langchain_anthropic"

    def limit(self, body):
        return body["max_tokens"]

    def reply(self, thought, answer, is_cut, tokens):
        content = [{"type": "thinking", "thinking": thought, "signature": "s"}] if thought else []
        if answer:
            content.append({"type": "text", "text": answer})
        reason = {"stop_reason": "max_tokens" if is_cut else "end_turn", "stop_sequence": None}
        usage = {"input_tokens": 7, "output_tokens": tokens}
        return {
            "id": "x",
            "type": "message",
            "role": "assistant",
            **MODEL,
            "content": content,
            **reason,
            "usage": usage,
        }

    def settings_for(self, url):
        return {"base_url": url, "max_retries": 0}


class Gemini(Provider):
    name, package = "google_genai:gemini-3-pro", "langchain_google_genai"

    def limit(self, body):
        assert "logprobs" not in body["generationConfig"], "it is only valid with responseLogprobs"
        return body["generationConfig"].get("maxOutputTokens")

    def reply(self, thought, answer, is_cut, tokens):
        parts = [{"text": thought, "thought": True}] if thought else []
        parts += [{"text": answer}] if answer else []
        candidate = {"content": {"role": "model", "parts": parts}, "index": 0}
        candidate["finishReason"] = "MAX_TOKENS" if is_cut else "STOP"
        usage = {
            "promptTokenCount": 7,
            "candidatesTokenCount": tokens - self.thinks,
            "totalTokenCount": 7 + tokens,
        }
        if self.thinks:
            usage["thoughtsTokenCount"] = self.thinks
        return {"candidates": [candidate], "usageMetadata": usage, "modelVersion": "m"}

    def settings_for(self, url):
        return {"base_url": url, "max_retries": 1, "include_thoughts": True}


class Ollama(Provider):
    name, package = "ollama:qwen3", "langchain_ollama"

    def limit(self, body):
        return body["options"].get("num_predict")

    def reply(self, thought, answer, is_cut, tokens):
        shared = {**MODEL, "created_at": "2026-01-01T00:00:00Z"}
        thinking = {"message": {"role": "assistant", "content": "", "thinking": thought}, "done": False}
        end = {"done": True, "done_reason": "length" if is_cut else "stop", "prompt_eval_count": 7}
        last = {"message": {"role": "assistant", "content": answer}, "eval_count": tokens, **end}
        lines = [thinking, last] if thought else [last]
        return 200, "".join(f"{json.dumps({**shared, **line})}\n" for line in lines)

    def settings_for(self, url):
        return {"base_url": url, "reasoning": True}


# --- what is asked --------------------------------------------------------------------------------------------

PROVIDERS = (Chat, Tags, Anthropic, Gemini, Ollama)


@pytest.fixture
def key(monkeypatch):
    for name in ("OPENAI", "ANTHROPIC", "GOOGLE"):
        monkeypatch.setenv(f"{name}_API_KEY", "sk-none")


@pytest.fixture(params=PROVIDERS, ids=lambda provider: provider.__name__)
def provider(request, key):
    pytest.importorskip(request.param.package)
    return request.param


@pytest.fixture
def settings_of(fake):
    """Starts a provider's server; returns the settings of a chat model that asks it."""

    def start(server):
        return server.settings_for(fake(server).url.removesuffix("/v1"))

    return start


@pytest.fixture
def ability(flat, settings_of, tmp_path):  # noqa: F811
    """Runs ``rgate ability`` on a provider."""

    def run(server, *options):
        options += ("--llm", server.name, "--extra-body", json.dumps(settings_of(server)))
        return rgate("ability", "--out", tmp_path / "mine", *options)

    return run


@pytest.mark.usefixtures("key")
@pytest.mark.parametrize(
    ("thinks", "said", "most"),
    [(THINKING, ", thinking first", 104), (0, ".", 100)],  # the first answer is cut off
    ids=["thinks", "does not think"],
)
def test_the_ability_is_that_of_the_answers(ability, thinks, said, most):
    done = ability(Chat(thinks))
    assert f"measured: 50 of 100 anchor questions answered correctly{said}" in done.stdout
    assert 100 <= len(Fake.seen) <= most


@pytest.mark.usefixtures("key")
def test_nothing_is_measured_where_all_are_cut_off(ability, tmp_path):
    done = ability(Chat(), "--thinking-tokens", 20)
    assert isinstance(done.exception, NoAnswerError), done.output
    assert "Giving up" in str(done.exception)
    assert not (tmp_path / "mine").exists()


VALUES = [{"question": "Who wrote Hamlet?"}]
thinks = pytest.mark.parametrize("thinks", [THINKING, 0], ids=["thinks", "does not think"])


@thinks
def test_an_answer_of_many_words_is_cut_and_is_one(settings_of, provider, thinks):
    options = RequestOptions("as-is", 2048, settings_of(provider(thinks)))
    model = ProviderModel(*provider.name.split(":"), options)
    (draft,) = model.generate(ANSWER, VALUES, tokens=2)
    assert (draft.text, draft.finished, draft.is_cut_off) == ("Nobody knows", False, False)
    assert bool(draft.thinking_tokens) == bool(thinks)


@thinks
@each(INVOKES)
def test_a_draft_is_of_the_answer(call, settings_of, provider, thinks):
    """Two tokens of an LLM that thinks are thoughts alone, which nothing judges."""
    kind, name = provider.name.split(":")
    llm = init_chat_model(name, model_provider=kind, **settings_of(provider(thinks)))
    gate = load_gate("ik", source="recorded", proxy=ScriptedProxy())
    decision = call(RetrievalGate(gate, llm=llm, tokens=2), "Who wrote Hamlet?")
    if thinks:
        assert (decision.retrieve, decision.error.type) == (True, "NoAnswerError")
    else:
        assert (decision.draft.text, decision.draft.finished) == ("Nobody knows", False)


# --- OpenAI's rules ------------------------------------------------------------------------------------------------


@pytest.fixture
def openai(fake, key):
    """Makes the model: ``openai(reply, think)``."""
    pytest.importorskip("langchain_openai")

    def make(reply, think="as-is"):
        url = fake(reply).url
        return ProviderModel(
            "openai", "gpt-5", RequestOptions(think, 2048, {"base_url": url, "max_retries": 0})
        )

    return make


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
