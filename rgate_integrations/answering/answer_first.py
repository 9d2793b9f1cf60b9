"""Answer first: the direct arm begins to answer, what it has written is judged, and it goes on or is stopped.

Framework-free. `Chunks` are an answer that is being written, `Written` is what can be read of it, an `Attempt` holds
it back, and `judging` decides for several of them at once.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, TypeAlias

from rgate_integrations.answering.drafting import says_unsupported
from rgate_integrations.decision import Cost, Decision, Draft, PartialAnswerInfo
from rgate_integrations.engine.fallback import fallback_decision
from rgate_integrations.engine.gate_like import OWN, GateLike
from rgate_integrations.errors import ConfigurationError, EvidenceError
from rgate_integrations.models.generated import LiveAnswer, find_answer
from rgate_integrations.runtime.flow import Call, Flow, Gather, Step, arun, run

_log = logging.getLogger("rgate_integrations")

MOST_HELD = 4_096
"""Chunks of a begun answer that are held back: an LLM that has written no text by then is retrieved for."""
END: Final = object()
"""What `Chunks.next` gives when there are no more chunks."""


@dataclass(frozen=True)
class AnswerFirst:
    """How an answer is begun and judged; ``answer_first=True`` in an adapter stands for these defaults.

    Attributes:
        tokens: How many tokens are held back and judged, at least 1. Several numbers, in rising order, are
            checkpoints: the answer is judged at each of them until its score is clear.
        retrieve_below: P(known) below it is clearly unknown: of a question alone, and of a begun answer at a
            checkpoint before the last.
        answer_above: P(known) from it on is clearly known.
        question_gate: Reads the question alone: a gate, or what `load_gate` takes. What is clearly unknown goes to
            the retrieve arm, and the LLM is not asked; what is clearly known is answered, and nothing of it is held
            back. None begins every answer, and judges it. ``"own"`` is the gate of the same family as the one that
            judges: the shipped one beside the default, the one for the question beside a tuned one; and none beside
            any other gate, which nobody then overrules.
        prefetch: Whether the search of a single question starts when its answer is begun. That pays where searching
            takes long. Where the answer goes on, the search is cancelled or its result dropped, and what it raises is
            logged only. The retrieve arm must be one whose search can be told from the rest, as for looking first;
            with looking first, all is searched before, and this changes nothing. Nor does it in agents, whose tools
            search.

    Raises:
        ConfigurationError: The numbers are out of their range or order.
    """

    tokens: int | tuple[int, ...] = 32
    retrieve_below: float = 0.3
    answer_above: float = 0.9
    question_gate: GateLike | str | None = OWN
    prefetch: bool = False

    def __post_init__(self) -> None:
        points = self.checkpoints
        if not points or points[0] < 1 or list(points) != sorted(set(points)):
            raise ConfigurationError(
                f"Tokens must be rising numbers of at least 1, not {self.tokens}.", hint="tokens=(8, 16, 32)"
            )
        if self.retrieve_below > self.answer_above:
            raise ConfigurationError(
                f"retrieve_below is {self.retrieve_below}, and answer_above is less: {self.answer_above}."
            )

    @property
    def checkpoints(self) -> tuple[int, ...]:
        """After how many tokens the begun answer is judged."""
        return (self.tokens,) if isinstance(self.tokens, int) else tuple(self.tokens)

    def known_from(self, threshold: float | None = None) -> float:
        """Return the P(known) from which an answer is not judged: at least the judge's threshold, if it is known."""
        return max(self.answer_above, threshold or 0.0)

    @classmethod
    def of(cls, value: bool | AnswerFirst) -> AnswerFirst | None:
        """Return what an adapter's ``answer_first=`` stands for; None for False."""
        if isinstance(value, cls):
            return value
        return cls() if value else None


# --- an answer that is being written -------------------------------------------------------------------------


class Chunks:
    """An answer as it comes, chunk by chunk, for both worlds. Nothing is asked before the first chunk is wanted.

    Args:
        blocking: Returns the iterator.
        awaitable: Returns the asynchronous iterator, or an awaitable of it.
    """

    def __init__(self, blocking: Callable[[], Iterator[Any]], awaitable: Callable[[], Any]) -> None:
        self.blocking = blocking
        self.awaitable = awaitable
        self._iterator: Any = None

    def next(self) -> Step:
        """Return the step that waits for the next chunk; its result is `END` after the last."""
        return Call(self._next, self._anext)

    def close(self) -> Step:
        """Return the step that ends it early, which also ends the request to the LLM."""
        return Call(self._close, self._aclose)

    def __iter__(self) -> Iterator[Any]:
        while (chunk := self._next()) is not END:
            yield chunk

    async def __aiter__(self) -> AsyncIterator[Any]:
        while (chunk := await self._anext()) is not END:
            yield chunk

    def _next(self) -> Any:
        if self._iterator is None:
            self._iterator = iter(self.blocking())
        return next(self._iterator, END)

    async def _anext(self) -> Any:
        if self._iterator is None:
            found = self.awaitable()
            self._iterator = aiter(await found if hasattr(found, "__await__") else found)
        return await anext(self._iterator, END)

    def _close(self) -> None:
        if hasattr(self._iterator, "close"):
            self._iterator.close()

    async def _aclose(self) -> None:
        if hasattr(self._iterator, "aclose"):
            await self._iterator.aclose()


@dataclass
class Written:
    """What can be read of an answer so far.

    Attributes:
        pieces: The text of each chunk that had some.
        tokens: The text of each token, where the LLM gives log-probabilities.
        logprobs: Their natural log-probabilities.
        model: Name of the LLM; empty when unknown.
        prompt_tokens: Length of what the LLM has read, in tokens; 0 while it does not tell.
        response_id: Id of the response, if a local LLM keeps the states of what it writes.
        kept: What it keeps; held here until the answer is judged.
    """

    pieces: list[str] = field(default_factory=list)
    tokens: list[str] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    model: str = ""
    prompt_tokens: int = 0
    response_id: str = ""
    kept: LiveAnswer | None = None

    def belongs_to(self, response_id: str | None) -> None:
        """Note the id of the response, and hold what a local LLM keeps of it."""
        if response_id and self.kept is None:
            self.kept = find_answer(response_id)
            self.response_id = response_id if self.kept is not None else ""

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self.pieces)

    @property
    def count(self) -> int:
        """How many tokens there are; where the LLM does not tell, chunks or words, whichever are more."""
        return len(self.tokens) or max(len(self.pieces), len(self.text.split()))

    def draft(self, *, finished: bool) -> Draft:
        """Return it as the LLM's draft; its tokens are in it if the text is made of them."""
        text = self.text.strip()
        told = bool(self.tokens) and "".join(self.tokens).strip().startswith(text)
        kept = self.kept if told else None
        return Draft(
            text=text,
            tokens=tuple(self.tokens) if told else (),
            logprobs=tuple(self.logprobs) if told else None,
            entropies=None if kept is None else tuple(kept.entropies[: len(self.tokens)]),
            margins=None if kept is None else tuple(kept.margins[: len(self.tokens)]),
            finished=finished,
            source="llm",
            model=self.model,
            prompt_tokens=self.prompt_tokens,
            response_id="" if kept is None else self.response_id,
        )


class Attempt(ABC):
    """One answer of the direct arm, held back until it is judged.

    Args:
        question: What is answered, as far as it is known.
        written: Gets what can be read of the answer.
        chunks: The answer.
        plainly: The same answer, asked for without log-probabilities; it is taken if the LLM says that it does not
            take the first form. None if nothing was asked for.

    Attributes:
        held: The chunks that came so far.
        ended: Whether the answer is whole.
        judgeable: Whether there is text to judge: of a tool call or a parsed object the question decides.
        error: What the arm raised.
    """

    def __init__(
        self, question: str, written: Written, chunks: Chunks, plainly: Chunks | None = None
    ) -> None:
        self.question = question
        self.written = written
        self.chunks = chunks
        self.plainly = plainly
        self.held: list[Any] = []
        self.ended = False
        self.judgeable = True
        self.error: Exception | None = None

    @abstractmethod
    def read(self, chunk: Any) -> bool:
        """Note what a chunk says in ``written``; returns False if it is something that cannot be judged."""

    def refused(self) -> None:  # noqa: B027  # most have nothing to remember
        """Remember that the LLM does not take what it was asked with."""

    def telling(self) -> Flow[None]:
        """Tell listeners of the released answer what came since the last time; most have nobody to tell."""
        yield from ()

    def holding(self, tokens: int) -> Flow[None]:
        """Hold the answer back until so many tokens are written, it ends, fails, or cannot be judged."""
        while self._goes_on() and self.written.count < tokens and len(self.held) < MOST_HELD:
            try:
                chunk = yield self.chunks.next()
                if chunk is END:
                    self.ended = True
                else:
                    self.held.append(chunk)
                    self.judgeable = self.read(chunk)
            except Exception as error:
                if self.plainly is None or self.held or not says_unsupported(error):
                    self.error = error
                    return
                self.chunks, self.plainly = self.plainly, None
                self.refused()

    def _goes_on(self) -> bool:
        return not self.ended and self.judgeable and self.error is None

    def stopping(self) -> Flow[None]:
        """End the answer early, which ends the request to the LLM, too."""
        try:
            yield self.chunks.close()
        except Exception as error:  # nobody wants this answer any more
            _log.info("An answer that was stopped failed: %s: %s", type(error).__name__, error)

    def dropping(self) -> Flow[None]:
        """End the answer early since the gate says so."""
        yield from self.stopping()

    def following(self) -> Flow[Any]:
        """Return the next chunk of a released answer, or `END`."""
        chunk = END if self.ended else (yield self.chunks.next())
        self.ended = chunk is END
        yield from self.telling()
        return chunk

    def finishing(self) -> Flow[list[Any]]:
        """Release the answer, and return all its chunks."""
        yield from self.telling()
        chunks = list(self.held)
        try:
            while (chunk := (yield from self.following())) is not END:
                chunks.append(chunk)
        except BaseException as error:
            if not isinstance(error, GeneratorExit):  # then there is nobody to do another step
                yield from self.stopping()
            raise
        return chunks

    def rest(self) -> Iterator[Any]:
        """Release the answer chunk by chunk: those that were held, then those that come."""
        try:
            run(self.telling())
            yield from self.held
            while (chunk := run(self.following())) is not END:
                yield chunk
        finally:
            run(self.stopping())

    async def arest(self) -> AsyncIterator[Any]:
        """Release the answer chunk by chunk: those that were held, then those that come."""
        try:
            await arun(self.telling())
            for chunk in self.held:
                yield chunk
            while (chunk := await arun(self.following())) is not END:
                yield chunk
        finally:
            await arun(self.stopping())

    def draft(self) -> Draft:
        """Return what has been written.

        Raises:
            EvidenceError: There is no text in it.
        """
        if not self.written.text.strip():
            raise EvidenceError("The direct arm wrote nothing that could be judged.")
        return self.written.draft(finished=self.ended)


# --- judging -------------------------------------------------------------------------------------------------

Deciding: TypeAlias = Callable[[list[int], list[Draft | None]], Flow[list[Decision | Exception]]]
"""Decides for some attempts, by their places, and their drafts; an adapter's call of its gate.

A draft is None where there is no text to judge, since the arm calls a tool or fills in a form: the question decides.
"""


def judging(
    attempts: Sequence[Attempt], options: AnswerFirst, decide: Deciding, clock: Clock
) -> Flow[list[Decision | Exception]]:
    """Hold answers back side by side and decide for all of them in one call of the gate a checkpoint.

    Args:
        attempts: The answers.
        options: How they are judged.
        decide: Calls the gate.
        clock: Times it.

    Returns:
        For each attempt its decision, or the exception of an input that is no question. Whatever fails retrieves.
    """
    try:
        return (yield from _judging(attempts, options, decide, clock))
    except BaseException as error:
        if not isinstance(error, GeneratorExit):  # then there is nobody to do another step
            for attempt in attempts:
                yield from attempt.stopping()
        raise


def _judging(
    attempts: Sequence[Attempt], options: AnswerFirst, decide: Deciding, clock: Clock
) -> Flow[list[Decision | Exception]]:
    found: dict[int, Decision | Exception] = {}
    for tokens in options.checkpoints:
        waiting = [place for place in range(len(attempts)) if place not in found]
        yield from together([attempts[place].holding(tokens) for place in waiting])
        decided: dict[int, Decision | Exception] = {}
        drafts: dict[int, Draft | None] = {}
        for place in waiting:
            readable = _readable(attempts[place])
            if isinstance(readable, Decision):
                decided[place] = readable
            else:
                drafts[place] = readable
        if drafts:
            began = time.perf_counter()
            decisions = yield from decide(list(drafts), list(drafts.values()))
            clock.judging += _milliseconds(began)
            last = tokens == options.checkpoints[-1]
            for place, decision in zip(drafts, decisions, strict=True):
                written = attempts[place]
                if last or written.ended or not written.judgeable or _is_clear(decision, options):
                    decided[place] = _with_draft(decision, drafts[place])
        for place, outcome in decided.items():
            found[place] = _told(outcome, attempts[place], clock)
            if isinstance(outcome, Exception) or outcome.retrieve:
                yield from attempts[place].dropping()
    return [found[place] for place in range(len(attempts))]


@dataclass
class Clock:
    """The times of a call that answers first, in milliseconds.

    Attributes:
        began: When the call began.
        first_look: Time of the first look.
        judging: Time of the judging so far.
    """

    began: float = field(default_factory=time.perf_counter)
    first_look: float = 0.0
    judging: float = 0.0

    def looked(self) -> None:
        """Note that the first look is over."""
        self.first_look = _milliseconds(self.began)

    def at_once(self, decision: Decision) -> Decision:
        """Return the decision of a first look that was clear: no answer was begun."""
        return decision.model_copy(update={"partial_answer": PartialAnswerInfo(first_look=self.first_look)})


def together(flows: Sequence[Flow[Any]]) -> Flow[list[Any]]:
    """Run flows side by side, with threads or on the event loop."""
    if len(flows) == 1:
        return [(yield from flows[0])]
    found: list[Any] = yield Gather([Call(partial(run, flow), partial(arun, flow)) for flow in flows])
    return found


def _readable(attempt: Attempt) -> Draft | Decision | None:
    """Return what there is to judge, None where there is no text; or the decision of an arm that failed."""
    if not attempt.judgeable:
        return None
    try:
        if attempt.error is not None:
            raise attempt.error
        return attempt.draft()
    except Exception as error:
        return _failed(error, attempt.question)


def _failed(error: Exception, question: str) -> Decision:
    _log.warning("The direct arm wrote no answer: %s: %s", type(error).__name__, error)
    return fallback_decision(error, question=question)


def first_token(attempt: Attempt, decision: Decision) -> Flow[Decision]:
    """Wait for the first token of an answer that is not judged, since its question is clearly known.

    Returns:
        The decision as it is; or one that retrieves, if the direct arm failed before.
    """
    yield from attempt.holding(1)
    if attempt.error is None:
        return decision
    changed = {
        "cost": decision.cost,
        "warnings": decision.warnings,
        "partial_answer": decision.partial_answer,
    }
    return _failed(attempt.error, decision.question).model_copy(update=changed)


def by_question(look: Decision, threshold: float | None) -> Decision:
    """Return the decision by the question alone, of an answer without text to judge; its cost is not counted again.

    Args:
        look: The first look, which only retrieves for what is clearly unknown.
        threshold: The one of the call, or else that of the gate of the first look; None if it is not known.
    """
    compared = 0.5 if threshold is None else threshold
    reason = f"{look.reason} The direct arm calls a tool or fills in a form, so the question decides.".strip()
    retrieve = look.p_known < compared
    changed = {"threshold": compared, "retrieve": retrieve, "reason": reason, "cost": Cost()}
    return look.model_copy(update=changed)


def _is_clear(decision: Decision | Exception, options: AnswerFirst) -> bool:
    if isinstance(decision, Exception):
        return True
    return not options.retrieve_below <= decision.p_known < options.answer_above


def _with_draft(decision: Decision | Exception, draft: Draft | None) -> Decision | Exception:
    if isinstance(decision, Exception) or draft is None or decision.draft is not None:
        return decision
    return decision.model_copy(update={"draft": draft})


def _told(decision: Decision | Exception, attempt: Attempt, clock: Clock) -> Decision | Exception:
    """Add what became of the begun answer, and what was thrown away of it."""
    if isinstance(decision, Exception):
        return decision
    held = attempt.written.count
    dropped = held if decision.retrieve else 0
    told = PartialAnswerInfo(
        tokens_held=held,
        tokens_dropped=dropped,
        first_look=clock.first_look,
        judging=clock.judging,
        first_token=None if decision.retrieve else _milliseconds(clock.began),
    )
    # An answer that goes on is the caller's: what was asked for and thrown away is a cost of deciding.
    spent = Cost()
    if decision.retrieve:
        spent = Cost(model_calls=1, tokens_in=attempt.written.prompt_tokens, tokens_out=dropped)
    return decision.model_copy(update={"partial_answer": told, "cost": decision.cost + spent})


def _milliseconds(began: float) -> float:
    return (time.perf_counter() - began) * 1_000
