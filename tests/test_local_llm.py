"""A local model as LlamaIndex's LLM, and a gate that judges it by its own states."""

import numpy as np
import pytest
from llama_index.core.base.llms.types import ChatMessage, ImageBlock

from rgate_integrations.errors import ConfigurationError
from rgate_integrations.llama_index import GatedQueryEngine
from rgate_integrations.llama_index.local_llm import LocalLLM
from rgate_integrations.prompts import ANSWER
from tests.llama_index_parts import Rag, ask
from tests.test_local_chat import FIRST, QUESTION, counted, draft, proxy, self_gate  # noqa: F401  fixtures

pytestmark = pytest.mark.model

TURNS = [ChatMessage(role="system", content=ANSWER.system), ChatMessage(role="user", content=QUESTION)]


def test_an_llm_tells_what_openais_tell(proxy, draft):  # noqa: F811
    llm = LocalLLM(proxy=proxy, max_tokens=8, logprobs=True)
    answer = llm.chat(TURNS)
    assert answer.message.content.strip() == draft.text
    assert [position[0].token for position in answer.logprobs] == list(draft.tokens)
    np.testing.assert_allclose([p[0].logprob for p in answer.logprobs], draft.logprobs, atol=1e-4)
    assert answer.raw["usage"] == {"prompt_tokens": draft.prompt_tokens, "completion_tokens": 8}
    assert answer.raw["finish_reason"] == "length"
    assert llm.chat(TURNS, max_tokens=2, logprobs=False).logprobs is None
    assert llm.metadata.model_name == proxy.name
    assert (llm.metadata.context_window, llm.metadata.num_output) == (2048, 8)
    with pytest.raises(ConfigurationError, match="only read text"):
        llm.chat([ChatMessage(role="user", blocks=[ImageBlock(url="https://example.org/a.png")])])
    with pytest.raises(ConfigurationError, match="'top_p'"):
        llm.complete(QUESTION, top_p=0.5)


async def test_streams_grow_to_the_whole_answer(proxy):  # noqa: F811
    llm = LocalLLM(proxy=proxy, max_tokens=6)
    whole, completed = llm.chat(TURNS).message.content, llm.complete(QUESTION).text
    assert (await llm.achat(TURNS)).message.content == whole
    assert (await llm.acomplete(QUESTION)).text == completed
    for responses in (list(llm.stream_chat(TURNS)), [r async for r in await llm.astream_chat(TURNS)]):
        assert "".join(r.delta for r in responses) == responses[-1].message.content == whole
    streamed = [r async for r in await llm.astream_complete(QUESTION)]
    for responses in (list(llm.stream_complete(QUESTION)), streamed):
        assert "".join(r.delta for r in responses) == responses[-1].text == completed


@pytest.mark.parametrize(
    ("style", "p_known"),
    [("query", 0.9), ("query", 0.1), ("aquery", 0.9), ("aquery", 0.1), ("stream", 0.9), ("astream", 0.9)],
)
def test_an_answer_goes_on_or_is_dropped_with_no_token_computed_twice(
    style,
    p_known,
    proxy,  # noqa: F811
    draft,  # noqa: F811
    counted,  # noqa: F811
    tmp_path,
):
    engine = GatedQueryEngine.from_defaults(
        Rag(),
        llm=LocalLLM(proxy=proxy, max_tokens=8, system_prompt=ANSWER.system),
        gate=self_gate(proxy, tmp_path / "gate", p_known),
        streaming="stream" in style,
        answer_first=FIRST,
    )
    assert ask(engine, QUESTION, style)[0].strip() == (
        draft.text if p_known > 0.5 else f"read about {QUESTION}"
    )
    assert counted == [draft.prompt_tokens] + [1] * (7 if p_known > 0.5 else 4)
