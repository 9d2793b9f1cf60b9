"""``--llm openai:NAME`` and the like: LangChain's chat models over loopback, with LLMs that think and not."""

import json
from typing import ClassVar

import pytest

from rgate_integrations import load_gate
from rgate_integrations.answering.answer_first import AnswerFirst
from rgate_integrations.errors import ConfigurationError, EvidenceError, NoAnswerError, ServerError
from rgate_integrations.models.request_options import RequestOptions
from rgate_integrations.prompts import ANSWER
from tests.begun_answers import TEXT, Shelf
from tests.commands import rgate
from tests.fake_server import Fake
from tests.http_servers import Words
from tests.langchain_fakes import INVOKES, SINGLES, each
from tests.provider_servers import THINKING, Anthropic, Chat, Gemini, Ollama, Responses, Tags, Uncounted
from tests.scripted_proxy import ScriptedProxy
from tests.test_ability_measured import flat  # noqa: F401  a fixture

pytest.importorskip("langchain", reason="comes with the langchain-agents extra")
from langchain.chat_models import init_chat_model

from rgate_integrations.langchain import RetrievalGate
from rgate_integrations.langchain.provider_model import ProviderModel

PROVIDERS = (Chat, Tags, Responses, Anthropic, Gemini, Ollama)


@pytest.fixture(params=PROVIDERS, ids=lambda provider: provider.__name__)
def provider(request, monkeypatch):
    pytest.importorskip(request.param.package)
    for name in ("OPENAI", "ANTHROPIC", "GOOGLE"):
        monkeypatch.setenv(f"{name}_API_KEY", "sk-none")
    return request.param


@pytest.fixture
def settings_of(fake):
    """Starts a provider's server; returns the settings of a chat model that asks it."""

    def start(server):
        return server.settings_for(fake(server).url.removesuffix("/v1"))

    return start


@pytest.fixture
def model(settings_of):
    """Makes the model of a provider's server: ``model(server, thinking_tokens)``."""

    def make(server, thinking_tokens=2048):
        return ProviderModel(
            *server.name.split(":"), RequestOptions("as-is", thinking_tokens, settings_of(server))
        )

    return make


@pytest.fixture
def ask(settings_of):
    """Runs a command on a provider: ``ask(run, server, *options)``."""

    def start(run, server, *options):
        return run(*options, "--llm", server.name, "--extra-body", json.dumps(settings_of(server)))

    return start


@pytest.fixture
def ability(flat, ask, tmp_path):  # noqa: F811
    """Runs ``rgate ability`` on a provider."""

    def run(server, *options):
        return ask(rgate, server, "ability", "--out", tmp_path / "mine", *options)

    return run


def test_the_ability_is_that_of_the_answers_and_nothing_is_measured_where_all_are_cut_off(
    ability, provider, tmp_path
):
    done = ability(provider(), "--thinking-tokens", 20)
    assert isinstance(done.exception, NoAnswerError), done.output
    assert "Giving up" in str(done.exception)
    assert not (tmp_path / "mine").exists()
    Fake.seen.clear()
    done = ability(provider())
    assert "measured: 50 of 100 anchor questions answered correctly, thinking first" in done.stdout
    assert 101 <= len(Fake.seen) <= 104  # a parameter is refused, or the first answer cut off


def test_without_thoughts_each_question_is_asked_once(ability, provider):
    done = ability(provider(thinks=0))
    assert "measured: 50 of 100 anchor questions answered correctly." in done.stdout
    assert "thinks" not in done.stdout
    assert len(Fake.seen) == 100


VALUES = [{"question": "Who wrote Hamlet?"}]
thinks = pytest.mark.parametrize("thinks", [THINKING, 0], ids=["thinks", "does not think"])


def test_an_answer_of_many_words_is_cut_and_is_one(model, provider):
    for thinks in (THINKING, 0):
        (draft,) = model(provider(thinks)).generate(ANSWER, VALUES, tokens=2)
        assert (draft.text, draft.finished, draft.is_cut_off) == ("Nobody knows", False, False)
        assert bool(draft.thinking_tokens) == bool(thinks)


# What is tuned on is no more the provider's where it does not think.
@pytest.fixture
def chat(settings_of):
    """Makes the chat model that an application would ask a provider's server with."""

    def make(server):
        provider, name = server.name.split(":")
        return init_chat_model(name, model_provider=provider, **settings_of(server))

    return make


@thinks
@each(INVOKES)
def test_a_draft_is_of_the_answer(call, chat, provider, thinks):
    """Two tokens of an LLM that thinks are thoughts alone, which nothing judges."""
    gate = load_gate("ik", source="recorded", proxy=ScriptedProxy())
    decision = call(RetrievalGate(gate, llm=chat(provider(thinks)), tokens=2), "Who wrote Hamlet?")
    if thinks:
        assert (decision.retrieve, decision.error.type) == (True, "NoAnswerError")
    else:
        assert (decision.draft.text, decision.draft.finished) == ("Nobody knows", False)


class ByQuestion(Words):
    """Judges questions, which are neither clear, and what an answer begins with."""

    fields: ClassVar = {"reason": "So."}

    def p_known(self, request):
        return 0.6 if "known" in request.question else 0.4


@thinks
@each({name: SINGLES[name] for name in ("invoke", "astream")})
def test_answer_first_judges_no_thoughts(call, chat, provider, thinks):
    gate = ByQuestion()
    router = RetrievalGate(gate).route(
        retrieve=Shelf() | str,
        direct=chat(provider(thinks)),
        answer_first=AnswerFirst(tokens=2, question_gate=gate),
    )
    assert TEXT in call(router, "An open one, not?")
    assert call(router, "An open one, known?").text.endswith("Nobody knows .")
    judged = [request.draft.text for requests in gate.asked for request in requests if request.draft]
    is_shown = thinks and provider is not Chat
    assert judged == ([] if is_shown else ["Nobody knows ."] * 2)


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
