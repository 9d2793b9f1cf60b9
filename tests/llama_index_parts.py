"""What the LlamaIndex tests share: a scripted gate and LLM, a small index, and calls in every style."""

import asyncio
import functools
import threading
from contextlib import contextmanager

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
from pydantic import Field

from rgate_integrations import Decision, Draft
from rgate_integrations.llama_index import RetrievalGateEvent
from tests.patience import PATIENCE
from tests.test_hybrid import TEXTS

CLAIMS = Draft(text="Oulu lies far up north. Jupiter has many moons.")


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
    if not hasattr(engine, "chat"):
        response = engine.query(question)
    else:
        response = engine.chat(question) if style == "query" else engine.stream_chat(question)
    if style == "query":
        return str(response), response
    return "".join(response.response_gen), response


async def aask(engine, question, style):
    """Ask in one of the two asynchronous styles, on the running event loop."""
    chats = hasattr(engine, "chat")
    if not chats:
        response = await engine.aquery(question)
    else:
        response = await (engine.achat(question) if style == "aquery" else engine.astream_chat(question))
    if style == "aquery":
        return str(response), response
    tokens = response.async_response_gen() if chats else response.response_gen
    return "".join([token async for token in tokens]), response


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


def names_of(events):
    return [event.class_name() for event in events]


def runs_meanwhile(loop):
    """Whether an event loop runs while the caller blocks its own thread."""
    ran = threading.Event()
    loop.call_soon_threadsafe(ran.set)
    return ran.wait(PATIENCE)


@functools.cache
def vector_index():
    documents = [Document(text=text) for text in TEXTS.values()]
    return VectorStoreIndex.from_documents(documents, embed_model=MockEmbedding(8))


class ScriptedGate:
    """Retrieves for questions with "unknown" in them, raises for "RAISE"; keeps what it was given.

    Args:
        before: Called before each decision.
    """

    def __init__(self, before=None):
        self.questions = []
        self.drafts = []
        self.before = before

    def decide_batch(self, questions, *, drafts=None):
        if self.before is not None:
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
        return Decision(
            question=question,
            retrieve="unknown" in question,
            p_known=0.5,
            reason="because",
            draft=draft or CLAIMS,
        )


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

    def __init__(self, fails=None, *, chats=False):
        super().__init__()
        self.fails = fails
        self.chats = chats

    @property
    def metadata(self):
        return LLMMetadata(model_name="scripted", is_chat_model=self.chats)

    def complete(self, prompt, formatted=False, **options):
        tokens, logprobs = self._tokens(options)
        return CompletionResponse(text="".join(tokens), logprobs=logprobs)

    async def acomplete(self, prompt, formatted=False, **options):
        return self.complete(prompt, formatted, **options)

    def chat(self, messages, **options):
        tokens, logprobs = self._tokens(options)
        message = ChatMessage(role="assistant", content="".join(tokens))
        return ChatResponse(message=message, logprobs=logprobs)

    async def achat(self, messages, **options):
        return self.chat(messages, **options)

    def _tokens(self, options):
        self.asked.append(sorted(options))
        error = self.fails(options) if self.fails is not None else None
        if error is not None:
            raise error
        tokens = ["It ", "is ", "me."][: options.get("max_tokens", 9)]
        logprobs = [[LogProb(token=token, logprob=-0.5)] for token in tokens]
        return tokens, logprobs if options.get("logprobs") else None
