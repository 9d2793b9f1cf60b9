"""What the LlamaIndex tests share: a scripted gate, LLMs that write and draft, shelves, and calls in every style."""

import asyncio
import functools
from contextlib import contextmanager
from types import SimpleNamespace
from unittest.mock import patch

import pytest
from llama_index.core import Document, VectorStoreIndex
from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    CompletionResponse,
    LLMMetadata,
    LogProb,
)
from llama_index.core.embeddings import MockEmbedding
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.llms import CustomLLM, MockLLM
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.query_engine import CustomQueryEngine, RetrieverQueryEngine
from llama_index.core.response_synthesizers import get_response_synthesizer
from llama_index.core.retrievers import BaseRetriever
from llama_index.core.schema import IndexNode, NodeWithScore
from pydantic import Field

from rgate_integrations.llama_index import RetrievalGateEvent
from tests.begun_answers import TEXT, answer_to, ending
from tests.langchain_fakes import Judge
from tests.test_hybrid import TEXTS

CLAIMS = "Oulu lies far up north. Jupiter has many moons."


# --- calls and what is heard of them -----------------------------------------------------------------------


def blocking(owner, name, *arguments, **named):
    """Call a method of an object."""
    return getattr(owner, name)(*arguments, **named)


def awaiting(owner, name, *arguments, **named):
    """Await the asynchronous twin of a method of an object, on an event loop of its own."""
    return asyncio.run(getattr(owner, f"a{name}")(*arguments, **named))


both_ways = pytest.mark.parametrize("call", [blocking, awaiting], ids=["sync", "async"])
every_style = pytest.mark.parametrize("style", ["query", "aquery", "stream", "astream"])


def ask(engine, question, style):
    """Ask an engine, or chat with it, in some style; returns the answer's text and the response."""
    if style.startswith("a"):
        return asyncio.run(aask(engine, question, style))
    response = method_of(engine, style)(question)
    return ("".join(response.response_gen) if style == "stream" else str(response)), response


async def aask(engine, question, style):
    """Ask on the running event loop."""
    if not style.startswith("a"):
        return ask(engine, question, style)
    response = await method_of(engine, style)(question)
    if style == "aquery":
        return str(response), response
    tokens = response.async_response_gen() if hasattr(engine, "chat") else response.response_gen
    return "".join([token async for token in tokens]), response


def method_of(engine, style):
    chats = {"query": "chat", "aquery": "achat", "stream": "stream_chat", "astream": "astream_chat"}
    return getattr(engine, chats[style] if hasattr(engine, "chat") else style.replace("stream", "query"))


@contextmanager
def hearing():
    """The events of LlamaIndex that are sent inside."""
    found, dispatcher = [], get_dispatcher()
    handler = SimpleNamespace(handle=lambda event, **options: found.append(event))
    with patch.object(dispatcher, "event_handlers", [*dispatcher.event_handlers, handler]):
        yield found


def decisions_in(events):
    return [event.decision for event in events if isinstance(event, RetrievalGateEvent)]


# --- gates and retrievers ----------------------------------------------------------------------------------


ScriptedGate = functools.partial(Judge, draft=CLAIMS)
"""Retrieves for questions with "unknown" in them, raises for "RAISE", and drafts claims of its own."""


@functools.cache
def vector_index():
    documents = [Document(text=text) for text in TEXTS.values()]
    return VectorStoreIndex.from_documents(documents, embed_model=MockEmbedding(8))


class Shelf(BaseRetriever):
    """Finds its texts for every query, and keeps what it was asked; fails for "broken", finds nothing for "empty"."""

    def __init__(self, *texts):
        self.texts = texts or (TEXT,)
        self.queries = []
        self.embeddings = []
        super().__init__()

    def _retrieve(self, query_bundle):
        self.queries.append(query_bundle.query_str)
        self.embeddings.append(query_bundle.embedding)
        query_bundle.embedding = [1.0]  # as LlamaIndex's vector retriever does
        if "broken" in query_bundle.query_str:
            raise TimeoutError("index gone")
        texts = [] if "empty" in query_bundle.query_str else self.texts
        return [
            NodeWithScore(node=IndexNode(id_=text, index_id=text, text=text), score=1.0) for text in texts
        ]


def over(retriever, *, streaming=False):
    """Return an engine that reads what a retriever finds."""
    return RetrieverQueryEngine(retriever, get_response_synthesizer(llm=MockLLM(), streaming=streaming))


class Rag(CustomQueryEngine):
    """An engine of one step: what it was given is its answer, or that it has read."""

    answer: object = None

    def custom_query(self, query_str):
        return self.answer or f"read about {query_str}"


# --- LLMs --------------------------------------------------------------------------------------------------


class Writer(CustomLLM):
    """Writes an answer token by token: `UNSURE` for prompts with "unknown" in them, else `KNOWN`.

    Attributes:
        calls: The options of each call, sorted.
        ended: What became of each stream: "whole" or "closed".
        fails: Called with the options of each call; what it raises is the error of the call.
        fails_at: Token before which it fails; None never.
        chats: Whether it is a chat model.
        pace: Awaited before each token of an asynchronous stream, with its number.
        logprobs: Whether it is asked for log-probabilities. With them it says that it has read 17 tokens.
    """

    calls: list = Field(default_factory=list)
    ended: list = Field(default_factory=list)
    fails: object = lambda options: None
    fails_at: int | None = None
    chats: bool = False
    pace: object = lambda number: asyncio.sleep(0)
    logprobs: bool | None = None

    @property
    def metadata(self):
        return LLMMetadata(model_name="writer", is_chat_model=self.chats)

    @llm_completion_callback()
    def complete(self, prompt, formatted=False, **options):
        return self._whole(prompt, options)

    @llm_completion_callback()
    async def acomplete(self, prompt, formatted=False, **options):
        return self._whole(prompt, options)

    @llm_chat_callback()
    def chat(self, messages, **options):
        return self._chat(messages, options)

    @llm_chat_callback()
    async def achat(self, messages, **options):
        return self._chat(messages, options)

    @llm_completion_callback()
    def stream_complete(self, prompt, formatted=False, **options):
        with ending(self.ended):
            yield from self._chunks(prompt, options)

    @llm_completion_callback()
    async def astream_complete(self, prompt, formatted=False, **options):
        async def written():
            with ending(self.ended):
                for number, chunk in enumerate(self._chunks(prompt, options)):
                    await self.pace(number)
                    yield chunk

        return written()

    def _chat(self, messages, options):
        whole = self._whole(messages[-1].content, options)
        return ChatResponse(
            message=ChatMessage(role="assistant", content=whole.text), logprobs=whole.logprobs
        )

    def _whole(self, prompt, options):
        chunks = list(self._chunks(prompt, options))
        logprobs = [position for chunk in chunks for position in chunk.logprobs or []]
        return CompletionResponse(text=chunks[-1].text, logprobs=logprobs or None)

    def _chunks(self, prompt, options):
        if self.logprobs:
            options = options | {"logprobs": True}
        self.calls.append(sorted(options))
        self.fails(options)
        text = ""
        for number, word in enumerate(answer_to(prompt).split()[: options.get("max_tokens")]):
            if number == self.fails_at:
                raise OSError("connection lost")
            delta = word if number == 0 else f" {word}"
            text += delta
            extra = {}
            if options.get("logprobs"):
                listed = [LogProb(token=delta, logprob=-0.25 * number), LogProb(logprob=-9.0)]
                extra = {"logprobs": [listed], "raw": {"usage": {"prompt_tokens": 17}}}
            yield CompletionResponse(text=text, delta=delta, **extra)
