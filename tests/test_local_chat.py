"""A local model as the answering LLM: chat model, LLM, and a gate that judges it by its own states."""

import itertools

import numpy as np
import pytest
from langchain_core.messages import AIMessage, AIMessageChunk, FunctionMessage, HumanMessage, SystemMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_tests.integration_tests import ChatModelIntegrationTests
from langchain_tests.unit_tests import ChatModelUnitTests

from rgate_integrations import load_gate
from rgate_integrations.answering.answer_first import AnswerFirst
from rgate_integrations.errors import ConfigurationError
from rgate_integrations.gates.artifacts import ProbeArtifact
from rgate_integrations.gates.folder import save_gate
from rgate_integrations.langchain import RetrievalGate
from rgate_integrations.langchain.local_chat import LocalChat
from rgate_integrations.models.base import PooledLayer
from rgate_integrations.models.local import TransformersProxy
from rgate_integrations.models.streamed_answer import GenerationOptions, find_answer
from rgate_integrations.prompts import ANSWER
from rgate_integrations.runtime.records import read_choice_logprobs
from tests.langchain_fakes import SINGLES, each

pytestmark = pytest.mark.model
QUESTION = "Who wrote Hamlet?"
ASKED = ANSWER.messages(question=QUESTION)
LAYERS = (PooledLayer(1, "draft", "mean"), PooledLayer(1, "question", "mean"))


@pytest.fixture
def proxy(tiny) -> TransformersProxy:
    return TransformersProxy(tiny, dtype="float32")


@pytest.fixture
def draft(proxy):
    """What the model answers, greedily."""
    return proxy.generate(ANSWER, [{"question": QUESTION}], tokens=8)[0]


@pytest.fixture
def counted(proxy, draft):
    """How many tokens the model has read, pass by pass."""
    passes: list[int] = []
    embedding = proxy.runner.model.get_input_embeddings()
    with embedding.register_forward_pre_hook(lambda layer, given: passes.append(given[0].numel())):
        yield passes


def written(proxy, **options):
    return proxy.answer(ASKED, GenerationOptions(**{"max_tokens": 8, **options}))


def text_of(answer):
    return "".join(chunk.text for chunk in answer.chunks())


# --- one answer --------------------------------------------------------------------------------------------


def test_an_answer_is_the_greedy_draft_and_each_token_is_computed_once(proxy, draft, counted):
    answer = written(proxy)
    chunks = list(answer.chunks())
    assert "".join(chunk.text for chunk in chunks).strip() == draft.text
    assert tuple(answer.ids) == draft.token_ids
    logprobs = [token.logprob for chunk in chunks for token in chunk.tokens]
    np.testing.assert_allclose(logprobs, draft.logprobs, atol=1e-4)
    # The last token is not read, because no further one was requested.
    assert counted == [len(answer.prompt)] + [1] * 7
    assert answer.finish_reason == "length"


def test_the_states_that_were_kept_are_those_of_reading_it(proxy, counted):
    answer = written(proxy, layers=(1,))
    chunks = answer.chunks()
    list(itertools.islice(chunks, 5))
    assert len(counted) == 5, "nothing is written ahead"
    row = proxy.encoder.encode(ANSWER, {"question": QUESTION})
    for tokens in (2, 5):  # the fifth token has not been read yet
        kept = answer.states(row.question, LAYERS, tokens)
        (draft,) = proxy.generate(ANSWER, [{"question": QUESTION}], tokens=tokens)
        (read,) = proxy.hidden(ANSWER, [{"question": QUESTION}], [draft], LAYERS)
        np.testing.assert_allclose(kept, read.states, atol=1e-5)
    counted.clear()
    assert len(list(chunks)) == 4  # three more tokens and the end
    assert counted == [1, 1], "the fifth token was read for its states, and is not read again"


def test_what_is_read_between_two_tokens_changes_neither_the_text_nor_what_is_read(proxy, draft):
    asked = (ANSWER, [{"question": "Where is Oulu?"}, {"question": "Why?"}], None, LAYERS)
    alone = [each.states for each in proxy.hidden(*asked)]
    text = ""
    for chunk in written(proxy).chunks():
        text += chunk.text
        np.testing.assert_array_equal([each.states for each in proxy.hidden(*asked)], alone)
    assert text.strip() == draft.text


def test_a_stop_sequence_ends_the_answer_and_is_no_part_of_it(proxy):
    whole = text_of(written(proxy, max_tokens=12))
    for start in range(2, len(whole) - 4, 5):
        stop = whole[start : start + 4]
        answer = written(proxy, max_tokens=12, stop=("nowhere", stop))
        assert text_of(answer) == whole[: whole.find(stop)]
        assert answer.finish_reason == "stop"
    assert text_of(written(proxy, max_tokens=12, stop=(f"{whole[-2:]}!",))) == whole


def test_drawn_answers_depend_on_the_seed(proxy):
    drawn = [text_of(written(proxy, temperature=1.0, seed=seed)) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_what_cannot_be_written(proxy):
    with pytest.raises(ConfigurationError, match="context holds 2048"):
        proxy.answer([{"role": "user", "content": "word " * 3_000}], GenerationOptions())
    with pytest.raises(ConfigurationError, match="between 0 and 2"):
        written(proxy, layers=(3,))


# --- the chat model ----------------------------------------------------------------------------------------


class TestStandardUnit(ChatModelUnitTests):
    chat_model_class = LocalChat


class TestStandardIntegration(ChatModelIntegrationTests):
    chat_model_class = LocalChat

    @pytest.fixture
    def model(self, tiny, request):
        return LocalChat(**{"model": tiny, "max_tokens": 8, **getattr(request, "param", {})})


def test_a_chat_model_tells_what_openais_tell(proxy, draft):
    chat = LocalChat(proxy=proxy, max_tokens=8, logprobs=True)
    messages = [SystemMessage(ANSWER.system), HumanMessage(QUESTION)]
    answer = chat.invoke(messages)
    assert answer.content.strip() == draft.text
    tokens, logprobs = read_choice_logprobs(answer.response_metadata)
    assert tokens == draft.tokens
    np.testing.assert_allclose(logprobs, draft.logprobs, atol=1e-4)
    expected = {"finish_reason": "length", "model_name": proxy.name}
    assert answer.response_metadata.items() >= expected.items()
    usage = {"input_tokens": draft.prompt_tokens, "output_tokens": 8}
    assert answer.usage_metadata.items() >= usage.items()
    plain = chat.invoke(messages, logprobs=False, max_tokens=2)
    assert ("logprobs" in plain.response_metadata, plain.usage_metadata["output_tokens"]) == (False, 2)


CONVERSATION = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello!"},
    {"role": "user", "content": "Who?"},
]
WHO = HumanMessage([{"type": "text", "text": "Who?"}])
WITH_OTHER_BLOCKS = AIMessage(
    [
        {"type": "thinking", "thinking": "Hm."},
        {"type": "web_search_call", "status": "completed"},
        {"type": "text", "text": "Hello!"},
    ],
    response_metadata={"model_provider": "openai"},
    tool_calls=[{"name": "add", "args": {}, "id": "1"}],
)


@pytest.mark.parametrize(
    ("later", "expected"),
    [
        ([AIMessage("Hello!"), WHO], CONVERSATION[1:]),
        ([AIMessageChunk("Hello!"), WHO], CONVERSATION[1:]),  # regression: of an unknown type
        ([WITH_OTHER_BLOCKS, WHO], CONVERSATION[1:]),  # regression: a bare KeyError, as was the next
        ([FunctionMessage("12", name="add")], [{"role": "function", "content": "12"}]),
    ],
    ids=["plain", "streamed", "with blocks that LangChain cannot read", "of an old agent"],
)
def test_a_conversation_goes_through_the_models_template(proxy, later, expected):
    answer = LocalChat(proxy=proxy, max_tokens=2).invoke([HumanMessage("Hi"), *later])
    tokens = len(proxy.encoder.encode_chat([CONVERSATION[0], *expected]))
    assert answer.usage_metadata["input_tokens"] == tokens


def test_tokens_are_counted_in_the_models_own_vocabulary(proxy):
    """Regression: LangChain asked the Hub for GPT-2's, and counted none where that failed."""
    chat = LocalChat(proxy=proxy)
    assert chat.get_num_tokens("Hello there") == len(proxy.runner.encoder.ids("Hello there")) > 0


# Regression: of the assistant's, the image was left out without a word.
@pytest.mark.parametrize("kind", [HumanMessage, AIMessage])
def test_an_image_or_an_unknown_option_is_refused(proxy, kind):
    chat = LocalChat(proxy=proxy, max_tokens=2)
    with pytest.raises(ConfigurationError, match="only read text"):
        chat.invoke([kind([{"type": "image", "url": "https://example.org/a.png"}]), HumanMessage("Who?")])
    with pytest.raises(ConfigurationError, match="'top_p'"):
        chat.invoke("Hi", top_p=0.5)


# --- the self gate -----------------------------------------------------------------------------------------


def self_gate(proxy, folder, p_known, scale=0.0):
    """A probe of the model's own states; without a scale it gives one probability to every answer."""
    weight = np.random.default_rng(0).normal(size=(len(LAYERS), proxy.runner.model.config.hidden_size))
    artifact = ProbeArtifact(
        weight=scale * weight.astype(np.float32),
        bias=float(np.log(p_known / (1 - p_known))),
        layers=LAYERS,
        tokens=4,
        source="proxy",
        base_model=proxy.name,
        llm=proxy.name,
        fingerprint=proxy.fingerprint,
        provenance={"data": []},
    )
    save_gate(artifact, folder)
    return load_gate(str(folder), proxy=proxy)


FIRST = AnswerFirst(tokens=4, question_gate=None)


@each({name: SINGLES[name] for name in ("invoke", "ainvoke", "stream", "abatch")})
@pytest.mark.parametrize("p_known", [0.9, 0.1])
def test_an_answer_goes_on_or_is_dropped_with_no_token_computed_twice(
    call, p_known, proxy, draft, counted, tmp_path
):
    prompt = ChatPromptTemplate([("system", ANSWER.system), ("human", "{question}")])
    chain = RetrievalGate(self_gate(proxy, tmp_path / "gate", p_known)).route(
        retrieve=lambda value: "from passages",
        direct=prompt | LocalChat(proxy=proxy, max_tokens=8) | StrOutputParser(),
        answer_first=FIRST,
    )
    assert call(chain, {"question": QUESTION}).strip() == (draft.text if p_known > 0.5 else "from passages")
    # Of a known answer the prompt and all tokens but the last are read, once each. Of an unknown one four tokens were
    # judged; a synchronous chain is stopped at the next one, which reads the fourth no second time.
    assert counted == [draft.prompt_tokens] + [1] * (7 if p_known > 0.5 else 4)


@pytest.mark.parametrize("change", [None, "prompt", "layers", "gone"])
def test_the_judge_takes_the_states_that_were_kept_and_reads_what_was_not(change, proxy, tmp_path):
    """A probe with weights gives the same probability to the kept states as to those of reading the draft anew."""
    gate = self_gate(proxy, tmp_path / "gate", 0.5, scale=1.0)
    messages = [{"role": "user", "content": QUESTION}] if change == "prompt" else ASKED
    layers = (0,) if change == "layers" else (1,)
    answer = proxy.answer(messages, GenerationOptions(max_tokens=8, layers=layers))
    list(itertools.islice(answer.chunks(), 4))
    (draft,) = proxy.generate(ANSWER, [{"question": QUESTION}], tokens=4)
    kept = draft.model_copy(update={"token_ids": (), "source": "llm", "response_id": answer.id})
    if change == "gone":
        del answer
        assert find_answer(kept.response_id) is None
    decided = gate.decide(QUESTION, draft=kept)
    assert decided.p_known == pytest.approx(gate.decide(QUESTION, draft=draft).p_known, abs=1e-4)
    assert (decided.cost.model_calls, decided.cost.tokens_in > 0) == (change is not None, change is not None)
