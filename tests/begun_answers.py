"""What the tests of answer first share: a chat model that writes token by token, and a gate that reads it."""

import asyncio
from typing import Any

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessageChunk
from langchain_core.outputs import ChatGenerationChunk
from langchain_core.tracers.base import BaseTracer
from pydantic import Field

from rgate_integrations import Decision

KNOWN = "It is surely the one that you think of ."
UNSURE = "Perhaps it is this one , or that other one ."


class Writer(BaseChatModel):
    """Writes an answer token by token: `UNSURE` for questions with "unknown" in them, else `KNOWN`.

    Attributes:
        calls: Arguments of each call.
        written: Tokens that it was asked for so far.
        ended: What became of each stream: "whole" or "closed".
        fails_at: Token before which it fails; None never.
        refuses: Arguments that it does not take.
        pace: Called before each token with its number; what it returns is awaited.
    """

    calls: list = Field(default_factory=list)
    written: list = Field(default_factory=list)
    ended: list = Field(default_factory=list)
    fails_at: int | None = None
    refuses: tuple[str, ...] = ()
    pace: Any = None

    @property
    def _llm_type(self):
        return "writer"

    def _generate(self, messages, stop=None, run_manager=None, **kwargs):
        raise AssertionError("the direct arm is to be streamed")

    def _tokens(self, messages, kwargs):
        self.calls.append(kwargs)
        for name in self.refuses:
            if name in kwargs:
                raise ValueError(f"unknown parameter {name}")
        text = UNSURE if "unknown" in messages[-1].text else KNOWN
        for number, token in enumerate(text.split(" ")):
            if number == self.fails_at:
                raise OSError("connection lost")
            self.written.append(token)
            metadata = {}
            if kwargs.get("logprobs"):
                metadata["logprobs"] = {"content": [{"token": f"{token} ", "logprob": -0.25 * number}]}
            message = AIMessageChunk(f"{token} ")
            yield ChatGenerationChunk(message=message, generation_info=metadata or None)

    def _stream(self, messages, stop=None, run_manager=None, **kwargs):
        try:
            for number, chunk in enumerate(self._tokens(messages, kwargs)):
                if self.pace is not None:
                    self.pace(number)
                yield chunk
        except GeneratorExit:
            self.ended.append("closed")
            raise
        self.ended.append("whole")

    async def _astream(self, messages, stop=None, run_manager=None, **kwargs):
        try:
            for number, chunk in enumerate(self._tokens(messages, kwargs)):
                if self.pace is not None:
                    waited = self.pace(number)
                    if waited is not None:
                        await waited
                yield chunk
        except (GeneratorExit, asyncio.CancelledError):
            self.ended.append("closed")
            raise
        self.ended.append("whole")


class Knowing(Writer):
    """A writer that can tell log-probabilities."""

    logprobs: bool | None = None


class Reader:
    """A gate that reads begun answers: one with "Perhaps" in it is unknown. Without a draft it says 0.5.

    Attributes:
        calls: The questions of each call.
        drafts: The drafts of each call.
    """

    on_error = "retrieve"

    def __init__(self, scores=None, before=None):
        self.calls, self.drafts = [], []
        self.scores = scores or {}
        self.before = before or (lambda: None)

    def decide_batch(self, questions, *, threshold=None, drafts=None):
        self.before()
        self.calls.append(list(questions))
        self.drafts.append(list(drafts or []))
        if any("RAISE" in question for question in questions):
            raise RuntimeError("gate down")
        thresholds = threshold or [None] * len(questions)
        given = drafts or [None] * len(questions)
        return [self._decision(*each) for each in zip(questions, thresholds, given, strict=True)]

    async def adecide_batch(self, questions, **options):
        return self.decide_batch(questions, **options)

    def _decision(self, question, threshold, draft):
        threshold = 0.5 if threshold is None else threshold
        if draft is None:
            known = self.scores.get(question, 0.5)
        else:
            known = self.scores.get(draft.text, 0.2 if "Perhaps" in draft.text else 0.9)
        retrieve = known < threshold
        return Decision(question=question, retrieve=retrieve, p_known=known, threshold=threshold, draft=draft)


class TurnReader(Reader):
    """Reads the turns before a question, too.

    Attributes:
        histories: The turns that it was given, of all calls.
    """

    def __init__(self, *given):
        super().__init__(*given)
        self.histories = []

    def decide_batch(self, questions, *, histories=None, **options):
        self.histories += histories or []
        return super().decide_batch(questions, **options)


WHOLE = KNOWN + " "


class Runs(BaseTracer):
    """Every run that ended, by name."""

    def __init__(self):
        super().__init__()
        self.ended = []

    def _persist_run(self, run):
        pass

    def _end_trace(self, run):
        self.ended.append(run)
        super()._end_trace(run)

    def named(self, name):
        return [run for run in self.ended if run.name == name]
