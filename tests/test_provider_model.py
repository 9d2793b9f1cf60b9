"""``--llm openai:NAME`` and the like: LangChain's chat models over loopback, with LLMs that think and not."""

import json

import pytest

from rgate_integrations.errors import ConfigurationError, EvidenceError, NoAnswerError, ServerError
from rgate_integrations.models.request_options import RequestOptions
from rgate_integrations.prompts import ANSWER
from tests.commands import rgate
from tests.fake_server import Fake
from tests.test_ability_measured import EASY, GOLD, KINDS, flat  # noqa: F401  a fixture

pytest.importorskip("langchain", reason="comes with the langchain-agents extra")
from rgate_integrations.langchain.provider_model import ProviderModel

THOUGHT = "Let me see what I know of that name . "
THINKING = 120
MODEL = {"model": "m"}


class Provider:
    """What a provider's server answers: how it is asked for a length, and what its answers look like.

    Attributes:
        thinks: How many tokens its LLM thinks.
    """

    package = "langchain_openai"
    settings: dict = {}  # noqa: RUF012

    def __init__(self, thinks=THINKING):
        self.thinks = thinks

    def __call__(self, body):
        limit = self.limit(body)
        known = [text for text in GOLD if text in json.dumps(body, ensure_ascii=False)]
        answer = f"It is {GOLD[known[0]]}." if known and KINDS[known[0]] in EASY else "Nobody knows ."
        written = answer.split()[: max((limit or 9_999) - self.thinks, 0)]
        is_cut = len(written) < len(answer.split())
        thought = THOUGHT if self.thinks else ""
        return self.reply(thought, " ".join(written), is_cut, self.thinks + len(written))

    def settings_for(self, url):
        return {"base_url": f"{url}/v1", "max_retries": 0, **self.settings}


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


class Responses(Provider):
    name = "openai:gpt-5"
    settings = {"use_responses_api": True}  # noqa: RUF012

    def limit(self, body):
        return body.get("max_output_tokens")

    def reply(self, thought, answer, is_cut, tokens):
        output = []
        if thought:
            summary = [{"type": "summary_text", "text": thought}]
            output.append({"type": "reasoning", "id": "rs", "summary": summary})
        if answer:
            text = {"type": "output_text", "text": answer, "annotations": []}
            output.append(
                {"type": "message", "id": "m", "role": "assistant", "status": "completed", "content": [text]}
            )
        usage = {"input_tokens": 7, "output_tokens": tokens, "total_tokens": 7 + tokens}
        usage["input_tokens_details"] = {"cached_tokens": 0}
        usage["output_tokens_details"] = {"reasoning_tokens": self.thinks}
        ended = {"status": "completed", "incomplete_details": None}
        if is_cut:
            ended = {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
        fixed = {"parallel_tool_calls": True, "tool_choice": "auto", "tools": [], "metadata": {}}
        return {
            "id": "r",
            "object": "response",
            "created_at": 0,
            **MODEL,
            **fixed,
            **ended,
            "output": output,
            "usage": usage,
        }


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
        return body["generationConfig"].get("maxOutputTokens")

    def reply(self, thought, answer, is_cut, tokens):
        parts = [{"text": answer}] if answer else []
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
        return {"base_url": url, "max_retries": 1}


class Ollama(Provider):
    name, package = "ollama:qwen3", "langchain_ollama"

    def limit(self, body):
        return body["options"].get("num_predict")

    def reply(self, thought, answer, is_cut, tokens):
        message = {"role": "assistant", "content": answer, "thinking": thought}
        end = {"done": True, "done_reason": "length" if is_cut else "stop", "prompt_eval_count": 7}
        line = {
            **MODEL,
            "created_at": "2026-01-01T00:00:00Z",
            "message": message,
            "eval_count": tokens,
            **end,
        }
        return 200, json.dumps(line) + "\n"

    def settings_for(self, url):
        return {"base_url": url, "reasoning": True}


PROVIDERS = (Chat, Responses, Anthropic, Gemini, Ollama)


@pytest.fixture(params=PROVIDERS, ids=lambda provider: provider.__name__)
def provider(request, monkeypatch):
    pytest.importorskip(request.param.package)
    for name in ("OPENAI", "ANTHROPIC", "GOOGLE"):
        monkeypatch.setenv(f"{name}_API_KEY", "sk-none")
    return request.param


@pytest.fixture
def ability(flat, fake, tmp_path):  # noqa: F811
    """Runs ``rgate ability`` on a provider."""

    def run(server, *options):
        settings = server.settings_for(fake(server).url.removesuffix("/v1"))
        given = ("--llm", server.name, "--extra-body", json.dumps(settings), "--out", tmp_path / "mine")
        return rgate("ability", *given, *options)

    return run


def test_the_ability_is_that_of_the_answers_and_nothing_is_measured_where_all_are_cut_off(
    ability, provider, tmp_path
):
    done = ability(provider(), "--thinking-tokens", 20)
    assert isinstance(done.exception, NoAnswerError), done.output
    assert "3 answers were cut off before they began" in str(done.exception)
    assert not (tmp_path / "mine").exists()
    Fake.seen.clear()
    done = ability(provider())
    assert "measured: 50 of 100 anchor questions answered rightly, thinking first" in done.stdout
    assert "thinks before it answers" in done.stdout
    assert 101 <= len(Fake.seen) <= 104  # a parameter is refused, or the first answer cut off


def test_without_thoughts_each_question_is_asked_once(ability, provider):
    done = ability(provider(thinks=0))
    assert "measured: 50 of 100 anchor questions answered rightly." in done.stdout
    assert "thinks" not in done.stdout
    assert len(Fake.seen) == 100


# --- OpenAI's rules ------------------------------------------------------------------------------------------------


@pytest.fixture
def openai(fake, monkeypatch):
    """Makes the model: ``openai(reply, think)``."""
    pytest.importorskip("langchain_openai")
    monkeypatch.setenv("OPENAI_API_KEY", "sk-none")

    def make(reply, think="as-is"):
        url = fake(reply).url
        return ProviderModel(
            "openai", "gpt-5", RequestOptions(think, 2048, {"base_url": url, "max_retries": 0})
        )

    return make


VALUES = [{"question": "Who wrote Hamlet?"}]


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
    assert str(model.habits) == "thinks before it answers and does not take temperature, logprobs" or (
        str(model.habits) == "thinks before it answers and does not take logprobs, temperature"
    )
    (samples,) = model.sample(ANSWER, VALUES, n=2, tokens=2, temperature=1.0, seed=0)
    assert [draft.text for draft in samples] == ["Nobody knows"] * 2
    with pytest.raises(EvidenceError, match="scores no text"):
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
        ("mistralai", RequestOptions(think="off"), "not known"),
    ],
)
def test_what_is_not_known_is_a_typed_error(provider, options, said):
    with pytest.raises(ConfigurationError, match=said):
        ProviderModel(provider, "x", options)


def test_a_local_model_takes_no_options():
    done = rgate("ability", "--llm", "smollm2-135m-instruct", "--think", "off")
    assert "A local model takes neither --think nor --extra-body" in str(done.exception)
