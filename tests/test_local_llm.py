"""A local model as LlamaIndex's LLM, and a gate that judges it by its own states."""

import asyncio

import numpy as np
import pytest
from llama_index.core.base.llms.types import ChatMessage, ImageBlock

from rgate_integrations.answering.answer_first import AnswerFirst
from rgate_integrations.errors import ConfigurationError
from rgate_integrations.llama_index import GatedQueryEngine
from rgate_integrations.llama_index.local_llm import LocalLLM
from rgate_integrations.models.local import LocalProxy
from rgate_integrations.prompts import ANSWER
from tests.llama_index_parts import Rag, ask, every_style
from tests.test_local_chat import QUESTION, counted, self_gate  # noqa: F401  a fixture

pytestmark = pytest.mark.model

TURNS = [ChatMessage(role="system", content=ANSWER.system), ChatMessage(role="user", content=QUESTION)]


@pytest.fixture
def proxy(tiny) -> LocalProxy:
    return LocalProxy(tiny).load()


@pytest.fixture
def draft(proxy):
    (found,) = proxy.generate(ANSWER, [{"question": QUESTION}], tokens=8)
    return found


def test_an_llm_tells_what_openais_tell(proxy, draft):
    llm = LocalLLM(proxy=proxy, max_tokens=8, logprobs=True, top_logprobs=1)
    answer = llm.chat(TURNS)
    assert answer.message.content.strip() == draft.text
    assert [position[0].token for position in answer.logprobs] == list(draft.tokens)
    np.testing.assert_allclose([p[0].logprob for p in answer.logprobs], draft.logprobs, atol=1e-4)
    assert all(len(position) == 2 for position in answer.logprobs)
    assert answer.raw["usage"] == {"prompt_tokens": draft.prompt_tokens, "completion_tokens": 8}
    assert answer.raw["finish_reason"] == "length"
    assert asyncio.run(llm.achat(TURNS)).message.content == answer.message.content
    assert llm.chat(TURNS, max_tokens=2, logprobs=False).logprobs is None
    assert llm.metadata.model_name == proxy.name
    assert llm.metadata.context_window == 2048


async def test_streams_grow_to_the_whole_answer(proxy):
    llm = LocalLLM(proxy=proxy, max_tokens=6)
    whole, completed = llm.chat(TURNS).message.content, llm.complete(QUESTION).text
    for responses in (list(llm.stream_chat(TURNS)), [r async for r in await llm.astream_chat(TURNS)]):
        assert "".join(r.delta for r in responses) == responses[-1].message.content == whole
    streamed = [r async for r in await llm.astream_complete(QUESTION)]
    for responses in (list(llm.stream_complete(QUESTION)), streamed):
        assert "".join(r.delta for r in responses) == responses[-1].text == completed
    assert (await llm.acomplete(QUESTION)).text == completed


def test_what_it_does_not_take(proxy):
    llm = LocalLLM(proxy=proxy)
    with pytest.raises(ConfigurationError, match="'top_p'"):
        llm.complete(QUESTION, top_p=0.5)
    picture = ChatMessage(role="user", blocks=[ImageBlock(url="https://example.org/a.png")])
    with pytest.raises(ConfigurationError, match="text only"):
        llm.chat([picture])


def engine(proxy, gate, style):
    llm = LocalLLM(proxy=proxy, max_tokens=8, system_prompt=ANSWER.system)
    return GatedQueryEngine.from_defaults(
        Rag(),
        llm=llm,
        gate=gate,
        streaming="stream" in style,
        answer_first=AnswerFirst(tokens=4, question_gate=None),
    )


@every_style
@pytest.mark.parametrize(("p_known", "more"), [(0.9, 7), (0.1, 4)], ids=["known", "unknown"])
def test_an_answer_goes_on_or_is_dropped_with_no_token_computed_twice(
    style,
    p_known,
    more,
    proxy,
    draft,
    counted,  # noqa: F811
    tmp_path,
):
    gate = self_gate(proxy, tmp_path / "gate", p_known)
    if "stream" in style and p_known < 0.5:
        pytest.skip("the engine for unknown questions does not stream")
    counted.clear()
    text, _ = ask(engine(proxy, gate, style), QUESTION, style)
    assert text.strip() == (draft.text if p_known > 0.5 else f"read about {QUESTION}")
    assert counted == [draft.prompt_tokens] + [1] * more
