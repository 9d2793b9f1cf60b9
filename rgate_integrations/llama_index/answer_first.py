"""The direct engine begins to answer, and goes on or is stopped once that is judged."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from typing import Any, Final

from llama_index.core.base.base_query_engine import BaseQueryEngine
from llama_index.core.base.response.schema import (
    RESPONSE_TYPE,
    AsyncStreamingResponse,
    PydanticResponse,
    Response,
    StreamingResponse,
)
from llama_index.core.llms import LLM
from llama_index.core.schema import QueryBundle

from rgate_integrations.answering.answer_first import (
    END,
    AnswerFirst,
    Attempt,
    Chunks,
    Clock,
    Written,
    by_question,
    first_token,
    judging,
)
from rgate_integrations.decision import Decision, Draft
from rgate_integrations.engine.gate_like import GateLike, answer_first_gates, decide_messages, for_llm
from rgate_integrations.llama_index.decider import KNOWN_BY
from rgate_integrations.llama_index.decision_context import copy_bundle
from rgate_integrations.llama_index.events import announce
from rgate_integrations.llama_index.watching import Notes, noting
from rgate_integrations.runtime.flow import Call, Flow, Start, Task

_LATER: Final = object()


class Ahead:
    """What runs ahead of the decision; here nothing does."""

    def settling(self, look: Decision | None, known_from: float) -> Flow[Decision | None]:
        """Return the decision of a first look that settles it; None where the answer is to be begun.

        Args:
            look: The first look, which retrieves for what is clearly unknown.
            known_from: The P(known) from which it is clearly known.
        """
        yield from ()
        return look if look is not None and (look.retrieve or look.p_known >= known_from) else None

    def begun(self) -> Flow[None]:
        """Do what is to be done while an answer is begun and judged."""
        yield from ()

    def judged(self, decision: Decision) -> Decision:
        """Return what is decided for a begun answer, by what the gate says of it."""
        return decision


class SearchedMeanwhile(Ahead):
    """A search that runs while an answer is begun and judged.

    Args:
        search: The step that searches.

    Attributes:
        job: Where it runs; None before it is begun.
    """

    def __init__(self, search: Call) -> None:
        self.job: Task | None = None
        self._search = search

    def begun(self) -> Flow[None]:
        """Begin it."""
        self.job = yield Start(self._search)


class DirectFirst:
    """Lets a direct engine answer first.

    The engine is asked once. If it streams, its first tokens are judged; if not, its whole answer is.

    Args:
        direct: The engine for known questions.
        gate: Judges what was begun, or the gate for begun answers that belongs to it.
        options: How much is held back, and how it is judged.
        streaming: Whether the response streams; if not, a stream is read to its end.
        llm_name: Name of the engine's LLM, whose knowledge both looks judge; empty if unknown.

    Attributes:
        telling: The engine's LLM, if it is asked for log-probabilities; one that refuses is asked without from then
            on, so it is to be a copy of the user's.
    """

    def __init__(
        self,
        direct: BaseQueryEngine,
        gate: GateLike,
        options: AnswerFirst,
        *,
        streaming: bool,
        llm_name: str = "",
    ) -> None:
        self.direct = direct
        judge, look = answer_first_gates(gate, options.question_gate)
        self.gate = for_llm(judge, llm_name, KNOWN_BY)
        self.first_look = None if look is None else for_llm(look, llm_name, KNOWN_BY)
        self.options = options
        self.streaming = streaming
        self.telling: LLM | None = None

    def answering(
        self, bundle: QueryBundle, threshold: float | None, ahead: Ahead
    ) -> Flow[tuple[Decision, RESPONSE_TYPE | None]]:
        """Begin to answer, and judge it.

        Args:
            bundle: The question.
            threshold: Used instead of the gate's own.
            ahead: What runs ahead of the decision.

        Returns:
            The decision, and the response where the direct engine answers; None where it does not.
        """
        question, clock = bundle.query_str, Clock()
        look: Decision | None = None
        if self.first_look is not None:
            low = self.options.retrieve_below
            low = low if threshold is None else min(low, threshold)
            (look,) = yield from decide_messages(self.first_look, [question], [()], threshold=low)
        judged_from = getattr(self.gate, "threshold", None) if threshold is None else threshold
        settled = yield from ahead.settling(look, self.options.known_from(judged_from))
        if self.first_look is not None:
            clock.looked()
        if settled is not None:
            return (yield from self._at_once(clock.at_once(settled), bundle))
        yield from ahead.begun()
        attempt = _DirectAnswer(self, bundle)
        decide = partial(self._judging, question, threshold, ahead, look)
        (judged,) = yield from judging([attempt], self.options, decide, clock)
        if isinstance(judged, Exception):
            raise judged
        decision = judged if look is None else judged.model_copy(update={"cost": look.cost + judged.cost})
        announce(decision)
        if decision.retrieve:
            return decision, None
        response = yield from attempt.response(streaming=self.streaming)
        return decision, response

    def asking(self, bundle: QueryBundle) -> Flow[RESPONSE_TYPE]:
        """Answer directly; there is nothing left to judge."""
        attempt = _DirectAnswer(self, bundle)
        yield from attempt.holding(1)
        if attempt.error is not None:
            raise attempt.error
        return (yield from attempt.response(streaming=self.streaming))

    def _at_once(
        self, decision: Decision, bundle: QueryBundle
    ) -> Flow[tuple[Decision, RESPONSE_TYPE | None]]:
        """Answer what is clearly known; if the engine fails before its first token, it is retrieved for."""
        attempt = _DirectAnswer(self, bundle)
        if not decision.retrieve:
            decision = yield from first_token(attempt, decision)
        announce(decision)
        if decision.retrieve:
            return decision, None
        return decision, (yield from attempt.response(streaming=self.streaming))

    def _judging(
        self,
        question: str,
        threshold: float | None,
        ahead: Ahead,
        look: Decision | None,
        places: list[int],
        drafts: list[Draft | None],
    ) -> Flow[list[Decision | Exception]]:
        if drafts == [None] and look is not None:
            given = getattr(self.first_look, "threshold", None) if threshold is None else threshold
            return [ahead.judged(by_question(look, given))]
        found = yield from decide_messages(self.gate, [question], [()], drafts=drafts, threshold=threshold)
        return [ahead.judged(decision) for decision in found]


class _DirectAnswer(Attempt):
    """One answer of a direct engine; its chunks are texts, or one response that does not stream."""

    def __init__(self, first: DirectFirst, bundle: QueryBundle) -> None:
        self._first = first
        self._given: Any = _LATER
        self._ask: Callable[[], Any] = partial(first.direct.query, copy_bundle(bundle))
        self._aask: Callable[[], Any] = partial(first.direct.aquery, copy_bundle(bundle))
        written = Written()
        forms = [_Watched(self._opened, self._aopened, written)]
        if first.telling is not None and getattr(first.telling, "logprobs", None):
            forms.append(_Watched(self._opened, self._aopened, written))
        super().__init__(bundle.query_str, written, *forms)

    def refused(self) -> None:
        """Ask the LLM for no log-probabilities from now on."""
        vars(self._first.telling)["logprobs"] = None

    def read(self, chunk: Any) -> bool:
        """Note the text of a chunk; returns False for a parsed object."""
        if isinstance(chunk, PydanticResponse):
            return False
        text = chunk if isinstance(chunk, str) else str(chunk.response or "")
        if text:
            self.written.pieces.append(text)
        return True

    def response(self, *, streaming: bool) -> Flow[RESPONSE_TYPE]:
        """Release the answer as a response of the kind that the caller wants."""
        given = self._given
        if not isinstance(given, StreamingResponse | AsyncStreamingResponse):
            whole: RESPONSE_TYPE = given
            return whole
        if not streaming:
            chunks = yield from self.finishing()
            return Response("".join(chunks), given.source_nodes, given.metadata)
        if isinstance(given, AsyncStreamingResponse):
            return AsyncStreamingResponse(self.arest(), given.source_nodes, given.metadata)  # type: ignore[arg-type]
        return StreamingResponse(self.rest(), given.source_nodes, given.metadata)  # type: ignore[arg-type]

    def _opened(self) -> Iterator[Any]:
        self._given = self._ask()
        if isinstance(self._given, StreamingResponse):
            return iter(self._given.response_gen)
        return iter([self._given])

    async def _aopened(self) -> AsyncIterator[Any]:
        self._given = await self._aask()
        if isinstance(self._given, AsyncStreamingResponse):
            return aiter(self._given.response_gen)
        if isinstance(self._given, StreamingResponse):  # some engines stream in their own threads only
            return _in_threads(iter(self._given.response_gen))
        return _in_threads(iter([self._given]))


class _Watched(Chunks):
    """Chunks of which is noted what the LLM tells beside them."""

    def __init__(
        self, blocking: Callable[[], Iterator[Any]], awaitable: Callable[[], Any], written: Written
    ) -> None:
        super().__init__(blocking, awaitable)
        self._notes = Notes(written)

    def _next(self) -> Any:
        with noting(self._notes):
            return super()._next()

    async def _anext(self) -> Any:
        with noting(self._notes):
            return await super()._anext()


async def _in_threads(chunks: Iterator[Any]) -> AsyncIterator[Any]:
    while (chunk := await asyncio.to_thread(next, chunks, END)) is not END:
        yield chunk
