"""What the LlamaIndex tests share: a scripted gate, LLMs that write and draft, shelves, and calls in every style."""

import asyncio
import functools
from contextlib import contextmanager
from types import SimpleNamespace

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
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.llms import MockLLM
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.query_engine import CustomQueryEngine, RetrieverQueryEngine
from llama_index.core.response_synthesizers import get_response_synthesizer
from llama_index.core.retrievers import BaseRetriever
from llama_index.core.schema import NodeWithScore, TextNode
from pydantic import Field

from rgate_integrations import Decision, Draft
from rgate_integrations.llama_index import RetrievalGateEvent
from tests.begun_answers import TEXT, answer_to
from tests.test_hybrid import TEXTS

CLAIMS = Draft(text="Oulu lies far up north. Jupiter has many moons.")


# --- calls and what is heard of them -----------------------------------------------------------------------


def blocking(owner, name, *arguments):
    """Call a method of an object."""
    return getattr(owner, name)(*arguments)


def awaiting(owner, name, *arguments):
    """Await the asynchronous twin of a method of an object, on an event loop of its own."""
    return asyncio.run(getattr(owner, f"a{name}")(*arguments))


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


class Handler(BaseEventHandler):
    found: list = Field(default_factory=list)

    def handle(self, event, **kwargs):
        self.found.append(event)


@contextmanager
def hearing():
    """The events of LlamaIndex that are sent inside."""
    handler, dispatcher = Handler(), get_dispatcher()
    dispatcher.add_event_handler(handler)
    try:
        yield handler.found
    finally:
        dispatcher.event_handlers.remove(handler)


def decisions_in(events):
    return [event.decision for event in events if isinstance(event, RetrievalGateEvent)]


# --- gates and retrievers ----------------------------------------------------------------------------------


class ScriptedGate:
    """Retrieves for questions with "unknown" in them, raises for "RAISE"; keeps what it was given.

    Args:
        before: Called before each decision.
    """

    def __init__(self, before=lambda: None):
        self.questions, self.drafts = [], []
        self.before = before

    def decide_batch(self, questions, *, drafts=None):
        self.before()
        self.questions.append(list(questions))
        if "RAISE" in questions:
            raise RuntimeError("gate down")
        drafts = drafts or [None] * len(questions)
        self.drafts += drafts
        return [self._decision(q, d) for q, d in zip(questions, drafts, strict=True)]

    async def adecide_batch(self, questions, **options):
        return await asyncio.to_thread(self.decide_batch, questions, **options)

    def _decision(self, question, draft):
        facts = {"p_known": 0.5, "reason": "because", "draft": draft or CLAIMS}
        return Decision(question=question, retrieve="unknown" in question, **facts)


@functools.cache
def vector_index():
    documents = [Document(text=text) for text in TEXTS.values()]
    return VectorStoreIndex.from_documents(documents, embed_model=MockEmbedding(8))


class Shelf(BaseRetriever):
    """Finds its texts for every query, and keeps the queries; fails for "broken", finds nothing for "empty"."""

    def __init__(self, *texts):
        self.texts = texts or (TEXT,)
        self.queries = []
        super().__init__()

    def _retrieve(self, query_bundle):
        self.queries.append(query_bundle.query_str)
        query_bundle.embedding = [1.0]  # as LlamaIndex's vector retriever does
        if "broken" in query_bundle.query_str:
            raise TimeoutError("index gone")
        texts = [] if "empty" in query_bundle.query_str else self.texts
        return [NodeWithScore(node=TextNode(id_=text, text=text), score=1.0) for text in texts]


def over(retriever, *, streaming=False):
    """Return an engine that reads what a retriever finds."""
    return RetrieverQueryEngine(retriever, get_response_synthesizer(llm=MockLLM(), streaming=streaming))


class Rag(CustomQueryEngine):
    """An engine of one step, with passages."""

    def custom_query(self, query_str):
        return f"read about {query_str}"


# --- LLMs --------------------------------------------------------------------------------------------------


class ScriptedLLM(MockLLM):
    """Answers "It is me.", with log-probabilities if it is asked for them. It completes, or chats.

    Attributes:
        fails: Maps the options of a call to the error that it raises, or None.
        asked: The options of each call, sorted.
        chats: Whether it is a chat model.
    """

    fails: object = None
    asked: list = Field(default_factory=list)
    chats: bool = False

    def __init__(self, fails=lambda options: None, *, chats=False):
        super().__init__()
        self.fails = fails
        self.chats = chats

    @property
    def metadata(self):
        return LLMMetadata(model_name="scripted", is_chat_model=self.chats)

    @llm_completion_callback()
    def complete(self, prompt, formatted=False, **options):
        tokens, logprobs = self._tokens(options)
        return CompletionResponse(text="".join(tokens), logprobs=logprobs)

    @llm_completion_callback()
    async def acomplete(self, prompt, formatted=False, **options):
        tokens, logprobs = self._tokens(options)
        return CompletionResponse(text="".join(tokens), logprobs=logprobs)

    @llm_chat_callback()
    def chat(self, messages, **options):
        return self._chat(options)

    @llm_chat_callback()
    async def achat(self, messages, **options):
        return self._chat(options)

    def _chat(self, options):
        tokens, logprobs = self._tokens(options)
        message = ChatMessage(role="assistant", content="".join(tokens))
        return ChatResponse(message=message, logprobs=logprobs)

    def _tokens(self, options):
        self.asked.append(sorted(options))
        error = self.fails(options)
        if error is not None:
            raise error
        tokens = ["It ", "is ", "me."][: options.get("max_tokens", 9)]
        logprobs = [[LogProb(token=token, logprob=-0.5)] for token in tokens]
        return tokens, logprobs if options.get("logprobs") else None


class Writer(MockLLM):
    """Writes an answer token by token: `UNSURE` for prompts with "unknown" in them, else `KNOWN`.

    Attributes:
        calls: What it was asked for at each call: log-probabilities or not.
        ended: What became of each stream: "whole" or "closed".
        fails_at: Token before which it fails; None never.
        pace: Called before each token with its number; what it returns is awaited.
        usage: What its server says that it has read; None if it does not say.
        logprobs: Whether it is asked for log-probabilities.
        top_logprobs: How many of the likeliest tokens it is asked for; without any, it tells nothing.
        refuses: Whether its server refuses log-probabilities.
        form: How they are told: as a server's chats or completions do, or in LlamaIndex's own form.
    """

    calls: list = Field(default_factory=list)
    ended: list = Field(default_factory=list)
    fails_at: int | None = None
    pace: object = lambda number: None
    usage: int | None = None
    logprobs: bool | None = None
    top_logprobs: int = 0
    refuses: bool = False
    form: str = "own"

    def __init__(self, **fields):
        super().__init__()
        for name, value in fields.items():
            setattr(self, name, value)

    @property
    def metadata(self):
        return LLMMetadata(model_name="writer", is_chat_model=False)

    def complete(self, prompt, formatted=False, **options):
        self.calls.append(self.logprobs)
        return CompletionResponse(text=answer_to(prompt))

    async def acomplete(self, prompt, formatted=False, **options):
        return self.complete(prompt, formatted, **options)

    @llm_completion_callback()
    def stream_complete(self, prompt, formatted=False, **options):
        def written():
            with self._ending():
                yield from self._chunks(prompt)

        return written()

    @llm_completion_callback()
    async def astream_complete(self, prompt, formatted=False, **options):
        async def written():
            with self._ending():
                for number, chunk in enumerate(self._chunks(prompt)):
                    waited = self.pace(number)
                    if waited is not None:
                        await waited
                    yield chunk

        return written()

    @contextmanager
    def _ending(self):
        try:
            yield
        except (GeneratorExit, asyncio.CancelledError):
            self.ended.append("closed")
            raise
        self.ended.append("whole")

    def _chunks(self, prompt):
        self.calls.append(self.logprobs)
        if self.logprobs and self.refuses:
            raise ValueError("unknown parameter logprobs")
        text = ""
        for number, word in enumerate(answer_to(prompt).split()):
            if number == self.fails_at:
                raise OSError("connection lost")
            delta = word if number == 0 else f" {word}"
            text += delta
            yield CompletionResponse(text=text, delta=delta, **self._told(delta, -0.25 * number))

    def _told(self, delta, value):
        raw = {} if self.usage is None else {"usage": {"prompt_tokens": self.usage}}
        if not self.logprobs or not self.top_logprobs:
            return {"raw": raw}
        if self.form == "own":
            listed = [LogProb(token=delta, logprob=value), LogProb(logprob=-9.0)]
            return {"raw": raw, "logprobs": [listed]}
        told = SimpleNamespace(tokens=[delta], token_logprobs=[value], top_logprobs=[{delta: value}])
        if self.form == "chat":
            told = SimpleNamespace(content=[SimpleNamespace(token=delta, logprob=value)])
        return {"raw": SimpleNamespace(choices=[SimpleNamespace(logprobs=told)])}
