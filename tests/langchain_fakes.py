"""What the LangChain tests share: ways of calling a runnable, and a scripted gate, retriever and chat model."""

import asyncio
import functools
import operator
import threading

import pytest
from langchain_core.documents import Document
from langchain_core.language_models import GenericFakeChatModel
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.runnables import RunnableLambda
from pydantic import Field

from rgate_integrations.decision import Draft
from tests.begun_answers import Reader, Shelf, TurnReader

# --- ways of calling ---------------------------------------------------------------------------------------


async def as_stream(value):
    yield value


async def gathered(chunks):
    return [chunk async for chunk in chunks]


STREAMS = {
    "stream": lambda chain, value, config=None, **options: list(chain.stream(value, config, **options)),
    "astream": lambda chain, value, config=None, **options: asyncio.run(
        gathered(chain.astream(value, config, **options))
    ),
    "transform": lambda chain, value, config=None: list(chain.transform(iter([value]), config)),
    "atransform": lambda chain, value, config=None: asyncio.run(
        gathered(chain.atransform(as_stream(value), config))
    ),
}


def whole(stream):
    """Return a way of calling that adds up the chunks of a stream."""
    return lambda chain, value, config=None: functools.reduce(
        operator.add, STREAMS[stream](chain, value, config)
    )


INVOKES = {
    "invoke": lambda chain, value, config=None: chain.invoke(value, config),
    "ainvoke": lambda chain, value, config=None: asyncio.run(chain.ainvoke(value, config)),
}
SINGLES = {
    **INVOKES,
    "batch": lambda chain, value, config=None: chain.batch([value], config)[0],
    "abatch": lambda chain, value, config=None: asyncio.run(chain.abatch([value], config))[0],
    **{name: whole(name) for name in STREAMS},
}
BATCHES = {
    "batch": lambda chain, values, config=None, **options: chain.batch(values, config, **options),
    "abatch": lambda chain, values, config=None, **options: asyncio.run(
        chain.abatch(values, config, **options)
    ),
}


def each(ways):
    """Run a test with each of the ways of calling, as its argument ``call``."""
    return pytest.mark.parametrize("call", ways.values(), ids=list(ways))


def texts(documents):
    """Return the texts of documents."""
    return [document.page_content for document in documents]


def runs_named(name, runs):
    """Yield the runs of a name among runs and those inside of them."""
    for run in runs:
        if run.name == name:
            yield run
        yield from runs_named(name, run.child_runs)


# --- scripted parts ----------------------------------------------------------------------------------------

EARLIER = [HumanMessage("Who wrote Hamlet?"), AIMessage("Shakespeare.")]
LLM = RunnableLambda(lambda prompt: AIMessage(prompt.to_string()))
"""Answers with its prompt."""


class Judge(Reader):
    """A gate that retrieves for questions with "unknown" in them; it makes a draft of its own, or none.

    Attributes:
        before: Called before each decision.
        draft: The text of its drafts.
    """

    def __init__(self, *, draft=None, before=lambda: None):
        super().__init__()
        self.draft, self.before = draft, before

    @property
    def questions(self):
        return [question for call in self.calls for question in call]

    def decide_batch(self, requests):
        self.before()
        return super().decide_batch(requests)

    async def adecide_batch(self, requests):
        return await asyncio.to_thread(self.decide_batch, requests)

    def _decision(self, request):
        return super()._decision(request, None if self.draft is None else Draft(text=self.draft))

    def p_known(self, question, draft):
        return 0.2 if "unknown" in question else 0.8


class ReadsHistory(TurnReader, Judge):
    """A gate that reads the turns before a question."""


class Search(Shelf):
    """Finds two documents a query; fails for "broken".

    Attributes:
        began: Set when a search begins.
    """

    began: object = Field(default_factory=threading.Event)

    def _get_relevant_documents(self, query, *, run_manager):
        self.began.set()
        super()._get_relevant_documents(query, run_manager=run_manager)
        return [Document(page_content=f"about {query}"), Document(page_content="shared", id="shared")]


class Chat(GenericFakeChatModel):
    """Answers "It is me." in OpenAI's style, with log-probabilities if it is asked for them.

    Attributes:
        error: Called with each question; what it returns is raised.
        seen: The arguments of each call.
        prompts: The messages of each call.
    """

    messages: object = Field(default_factory=lambda: iter(()))
    error: object = lambda question: None
    seen: list = Field(default_factory=list)
    prompts: list = Field(default_factory=list)

    def _generate(self, messages, stop=None, run_manager=None, **kwargs):
        self.seen.append(kwargs)
        self.prompts.append(messages)
        error = self.error(messages[-1].text)
        if error is not None:
            raise error
        tokens = ["It ", "is ", "me."][: kwargs.get("max_tokens", 9)]
        metadata = {"finish_reason": "stop" if len(tokens) == 3 else "length", "model_name": "chat"}
        if kwargs.get("logprobs"):
            metadata["logprobs"] = {"content": [{"token": token, "logprob": -0.5} for token in tokens]}
        message = AIMessage("".join(tokens), response_metadata=metadata)
        return ChatResult(generations=[ChatGeneration(message=message)])
