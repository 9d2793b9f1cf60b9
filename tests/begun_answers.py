"""What the tests of answer first and look first share: models that write token by token, gates, and shelves."""

import asyncio
from contextlib import contextmanager
from typing import Any

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import Document
from langchain_core.language_models import BaseChatModel
from langchain_core.language_models.chat_models import generate_from_stream
from langchain_core.messages import AIMessageChunk
from langchain_core.messages.ai import UsageMetadata
from langchain_core.outputs import ChatGenerationChunk
from langchain_core.retrievers import BaseRetriever
from pydantic import Field

from rgate_integrations import Decision
from rgate_integrations.answering.look_first import LookFirst
from rgate_integrations.gates.passage_utility import SEARCH_FEATURES, PassageUtilityModel

KNOWN = "It is surely the one that you think of ."
UNSURE = "Perhaps it is this one , or that other one ."
WHOLE = KNOWN + " "
TEXT = "The unknown Zorba wrote the quartet."


def answer_to(question):
    """What the LLMs write: `UNSURE` for questions with "unknown" in them, else `KNOWN`."""
    return UNSURE if "unknown" in question else KNOWN


# P(the passages hold the answer) is near 1 where they have all words of a question, and near 0 where they have none.
COVERED = PassageUtilityModel(
    weights=tuple(20.0 if name == "cover_best" else 0.0 for name in SEARCH_FEATURES),
    bias=-10.0,
    reading=0.9,
    distraction=0.25,
)
LOOK = LookFirst(model=COVERED)


@contextmanager
def ending(ended):
    """Note what becomes of a stream: "whole" or "closed"; nothing of one that fails."""
    try:
        yield
    except (GeneratorExit, asyncio.CancelledError):
        ended.append("closed")
        raise
    ended.append("whole")


class Writer(BaseChatModel):
    """Writes an answer token by token: `UNSURE` for questions with "unknown" in them, else `KNOWN`.

    Attributes:
        calls: Arguments of each call.
        ended: What became of each stream: "whole" or "closed".
        fails_at: Token before which it fails; None never.
        fails_for: What questions that it fails for have in them.
        fails: Called with the arguments of each call; what it raises is the error of the call.
        pace: Called before each token with its number; what it returns is awaited.
    """

    calls: list = Field(default_factory=list)
    ended: list = Field(default_factory=list)
    fails_at: int | None = None
    fails_for: str = ""
    fails: Any = lambda kwargs: None
    pace: Any = lambda number: None

    @property
    def _llm_type(self):
        return "writer"

    def _generate(self, messages, stop=None, run_manager=None, **kwargs):
        return generate_from_stream(self._stream(messages, stop, run_manager, **kwargs))

    def _tokens(self, messages, kwargs):
        self.calls.append(kwargs)
        self.fails(kwargs)
        question = messages[-1].text
        for number, token in enumerate(answer_to(question).split(" ")):
            if number == self.fails_at and self.fails_for in question:
                raise OSError("connection lost")
            yield ChatGenerationChunk(message=self._message(number, token, kwargs))

    def _message(self, number, token, kwargs):
        return AIMessageChunk(f"{token} ")

    def _stream(self, messages, stop=None, run_manager=None, **kwargs):
        with ending(self.ended):
            for number, chunk in enumerate(self._tokens(messages, kwargs)):
                self.pace(number)
                yield chunk

    async def _astream(self, messages, stop=None, run_manager=None, **kwargs):
        with ending(self.ended):
            for number, chunk in enumerate(self._tokens(messages, kwargs)):
                waited = self.pace(number)
                if waited is not None:
                    await waited
                yield chunk


class Knowing(Writer):
    """A writer that can tell log-probabilities, and how many tokens it has read: 17."""

    logprobs: bool | None = None

    def _message(self, number, token, kwargs):
        if "logprobs" not in kwargs:
            return super()._message(number, token, kwargs)
        logprobs = {"content": [{"token": f"{token} ", "logprob": -0.25 * number}]}
        usage = UsageMetadata(input_tokens=17, output_tokens=1, total_tokens=18)
        return AIMessageChunk(f"{token} ", response_metadata={"logprobs": logprobs}, usage_metadata=usage)


class Reader:
    """A gate that reads partial answers: one with "Perhaps" in it is unknown. Without a draft it says 0.5.

    It fails for questions with "RAISE" in them.

    Attributes:
        calls: The questions of each call.
        drafts: The drafts of each call.
        histories: The turns before each question that it was given, of all calls; see `TurnReader`.
        scores: What it says of some questions and answers.
        on_error: Read by adapters, as of the gates of this package.
    """

    on_error = "retrieve"
    reads_drafts = True

    def __init__(self, scores=None):
        self.calls, self.drafts, self.histories = [], [], []
        self.scores = scores or {}

    def decide_batch(self, requests):
        self.calls.append([request.question for request in requests])
        self.drafts.append([request.draft for request in requests])
        self.histories += [request.history or None for request in requests]
        if any("RAISE" in request.question for request in requests):
            raise RuntimeError("gate down")
        return list(map(self._decision, requests))

    async def adecide_batch(self, requests):
        return self.decide_batch(requests)

    def _decision(self, request, draft=None):
        threshold = 0.5 if request.threshold is None else request.threshold
        draft = request.draft or draft
        known = self.p_known(request.question, draft)
        fields = {"p_known": known, "threshold": threshold, "draft": draft, "reason": "because"}
        return Decision(question=request.question, retrieve=known < threshold, **fields)

    def p_known(self, question, draft):
        if draft is None:
            return self.scores.get(question, 0.5)
        return self.scores.get(draft.text, 0.2 if "Perhaps" in draft.text else 0.9)


class Librarian(Reader):
    """Its decisions name the corpora whose names are in a question, in that order, and of others the last one."""

    corpora = ("docs", "hr", "web")

    def _decision(self, request, draft=None):
        decision = super()._decision(request, draft)
        named = sorted((n for n in self.corpora if n in request.question), key=request.question.index)
        where = {"corpora": tuple(named) or self.corpora[-1:], "p_covered": 0.9 if named else 0.1}
        return decision.model_copy(update=where).with_retrieve(decision.retrieve)


class TurnReader(Reader):
    """Reads the turns before a question, too."""

    reads_history = True


class Broken(Reader):
    """Fails for every draft."""

    def decide_batch(self, requests):
        raise RuntimeError("gate down")


class Shelf(BaseRetriever):
    """Finds what is on the shelf for every query; fails for "broken", and finds nothing for "empty"."""

    texts: list = Field(default_factory=lambda: [TEXT])
    queries: list = Field(default_factory=list)

    def _get_relevant_documents(self, query, *, run_manager):
        self.queries.append(query)
        if "broken" in query:
            raise TimeoutError("index gone")
        return [] if "empty" in query else [Document(page_content=text) for text in self.texts]


class EventRecorder(BaseCallbackHandler):
    """Tokens and events as a user's screen would show them."""

    run_inline = True

    def __init__(self):
        self.tokens, self.events = [], []

    def on_llm_new_token(self, token, **kwargs):
        self.tokens.append(token)

    def on_custom_event(self, name, data, **kwargs):
        self.events.append(data)


async def nothing_left(ended=lambda: True):
    """Let the loop go on until nothing runs on it and all has ended; generators end one within another."""
    for _ in range(10_000):
        if ended() and asyncio.all_tasks() == {asyncio.current_task()}:
            return True
        await asyncio.sleep(0)
    return False


class Stuck:
    """A pace at which every answer waits at its fourth token, until it is let go."""

    def __init__(self):
        self.event, self.waiting = asyncio.Event(), 0

    async def __call__(self, number):
        if number == 3:
            self.waiting += 1
            await self.event.wait()

    async def leave(self, calls, leaving):
        """Start calls, cancel the first of them once all wait, and let the others go on; returns their results."""
        tasks = [asyncio.ensure_future(call) for call in calls]
        while self.waiting < len(tasks):
            await asyncio.sleep(0)
        for task in tasks[:leaving]:
            task.cancel()
        self.event.set()
        found = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(each, asyncio.CancelledError) for each in found[:leaving])
        return found[leaving:]
