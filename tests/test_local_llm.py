"""A local model as LlamaIndex's LLM, and a gate that judges it by its own states."""

import asyncio

import numpy as np
import pytest
from llama_index.core.base.llms.types import ChatMessage, ImageBlock
from llama_index.core.query_engine import CustomQueryEngine

from rgate_integrations.answering.answer_first import AnswerFirst
from rgate_integrations.errors import ConfigurationError
from rgate_integrations.llama_index import GatedQueryEngine
from rgate_integrations.llama_index.local_llm import LocalLLM
from rgate_integrations.models.local import LocalProxy
from rgate_integrations.prompts import ANSWER
from tests.llama_index_parts import ask, every_style
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


def test_streams_grow_to_the_whole_answer(proxy):
    llm = LocalLLM(proxy=proxy, max_tokens=6)

    async def streamed():
        chats = [r async for r in await llm.astream_chat(TURNS)]
        return chats, [r async for r in await llm.astream_complete(QUESTION)]

    chats, completions = asyncio.run(streamed())
    whole, completed = llm.chat(TURNS).message.content, llm.complete(QUESTION).text
    for responses in (list(llm.stream_chat(TURNS)), chats):
        assert "".join(r.delta for r in responses) == whole
        assert responses[-1].message.content == whole
    for responses in (list(llm.stream_complete(QUESTION)), completions):
        assert "".join(r.delta for r in responses) == completed
        assert responses[-1].text == completed
    assert asyncio.run(llm.acomplete(QUESTION)).text == completed


def test_what_it_does_not_take(proxy):
    llm = LocalLLM(proxy=proxy)
    with pytest.raises(ConfigurationError, match="'top_p'"):
        llm.complete(QUESTION, top_p=0.5)
    picture = ChatMessage(role="user", blocks=[ImageBlock(url="https://example.org/a.png")])
    with pytest.raises(ConfigurationError, match="text only"):
        llm.chat([picture])


class Passages(CustomQueryEngine):
    def custom_query(self, query_str):
        return "from passages"


def engine(proxy, gate, style):
    llm = LocalLLM(proxy=proxy, max_tokens=8, system_prompt=ANSWER.system)
    return GatedQueryEngine.from_defaults(
        Passages(),
        llm=llm,
        gate=gate,
        streaming="stream" in style,
        answer_first=AnswerFirst(tokens=4, question_gate=None),
    )


@every_style
def test_a_known_answer_goes_on_with_no_token_computed_twice(style, proxy, draft, counted, tmp_path):  # noqa: F811
    gate = self_gate(proxy, tmp_path / "gate", 0.9)
    counted.clear()
    text, _ = ask(engine(proxy, gate, style), QUESTION, style)
    assert text.strip() == draft.text
    assert counted == [draft.prompt_tokens] + [1] * 7


@pytest.mark.parametrize("style", ["query", "aquery"])
def test_an_unknown_answer_is_dropped_where_it_was_held(style, proxy, draft, counted, tmp_path):  # noqa: F811
    gate = self_gate(proxy, tmp_path / "gate", 0.1)
    counted.clear()
    text, _ = ask(engine(proxy, gate, style), QUESTION, style)
    assert text == "from passages"
    assert counted == [draft.prompt_tokens] + [1] * 4
