"""How a call of a router goes, in every framework: screen, search, begin, compare, and run one of the arms.

    the question alone    decide                                                     -> run
    look first            decide and search -> compare                               -> run
    answer first          screen            -> begin (and search) -> judge           -> run
    both                  screen and search -> begin -> judge     -> compare         -> run

`RoutedCall` is that flow over a batch of questions. A framework adds how a gate is asked, how the retrieve arm
searches, and how the direct arm begins to write.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from rgate_integrations.answering.answer_first import AnswerFirst
from rgate_integrations.answering.look_first import LookFirst, decide_early, decide_with_passages
from rgate_integrations.answering.partial_answer import BufferedAnswer
from rgate_integrations.decision import Cost, Decision, Draft, PartialAnswerInfo
from rgate_integrations.engine.fallback import fallback_decision
from rgate_integrations.gates.evidence.search import FoundPassage
from rgate_integrations.runtime.flow import Call, Flow, Gather, RunFlow, Start, Step, Task

_log = logging.getLogger("rgate_integrations")

Outcomes: TypeAlias = dict[int, Decision | Exception]
"""By the place of an input in its batch: what was decided, or why it is no question."""


@dataclass(frozen=True)
class Strategy:
    """What a router looks at before it decides; by default the question alone.

    Attributes:
        answer_first: Also at what the direct arm begins to answer.
        look_first: Also at what a search finds.
        judge: The gate that judges begun answers, as the framework has gates; None without any.
        question_gate: The gate that screens questions before an answer is begun; None begins every answer.
    """

    answer_first: AnswerFirst | None = None
    look_first: LookFirst | None = None
    judge: Any = None
    question_gate: Any = None

    def __bool__(self) -> bool:
        # LangChain writes no field that is false: a plain router can be written and read.
        return self.answer_first is not None or self.look_first is not None

    @property
    def searches_ahead(self) -> bool:
        """Whether the retrieve arm searches before there is a decision."""
        if self.look_first is not None:
            return True
        return self.answer_first is not None and self.answer_first.prefetch


@dataclass(frozen=True)
class Routed:
    """What was decided for an input, and what is there already of its answer.

    Attributes:
        decision: The decision.
        answer: What the direct arm has begun; None if it has not, or was stopped.
        searched: Whether the retrieve arm has searched, so that only the rest of it is left to run.
        found: What its search has found.
    """

    decision: Decision
    answer: BufferedAnswer | None = None
    searched: bool = False
    found: Any = None


@dataclass
class _Clock:
    """When a call began, and how long it took to look at the questions and to judge answers, in milliseconds."""

    began: float = field(default_factory=time.perf_counter)
    screening: float = 0.0
    judging: float = 0.0


class RoutedCall(ABC):
    """One call of a router.

    Args:
        strategy: What is looked at.
        thresholds: The threshold that the caller gave for each input; None for the gate's own.
        judge_threshold: That of the gate that judges begun answers; None if it is not known.
        question_threshold: That of the gate that screens questions; None if there is none, or it is not known.

    Attributes:
        screened: What the gate that screens says of each input; None where nobody was asked.
        answers: The answers that were begun, by place.
        found: What was searched, one result or exception an input; None before.
    """

    def __init__(
        self,
        strategy: Strategy,
        thresholds: Sequence[float | None],
        *,
        judge_threshold: float | None = None,
        question_threshold: float | None = None,
    ) -> None:
        self.strategy = strategy
        self.thresholds = thresholds
        self.judge_threshold = judge_threshold
        self.question_threshold = question_threshold
        self.screened: list[Decision | Exception | None] = [None] * len(thresholds)
        self.answers: dict[int, BufferedAnswer] = {}
        self.found: list[Any] | None = None
        self.searching: Task | None = None
        self._clock = _Clock()

    # --- what a framework adds -----------------------------------------------------------------------------------

    def decide(self) -> Flow[list[Decision | Exception]]:
        """Ask the gate about every input, by the question alone; only without answer first."""
        raise NotImplementedError

    @abstractmethod
    def screen(self, retrieve_below: float) -> Flow[list[Decision | Exception | None]]:
        """Ask the gate that screens questions, at a threshold of at most this; None an input without such a gate."""

    @abstractmethod
    def begin(self, place: int, *, judged: bool) -> BufferedAnswer:
        """Let the direct arm begin to answer; one that is not judged needs no log-probabilities."""

    @abstractmethod
    def judge(self, drafts: dict[int, Draft | None]) -> Flow[Outcomes]:
        """Ask the gate once about several begun answers; of those without text it reads the question."""

    @abstractmethod
    def announce(self, place: int, decision: Decision) -> Flow[None]:
        """Tell listeners what was decided."""

    def search(self) -> Step:
        """Return the step that searches for every input; its result is one result or exception an input."""
        raise NotImplementedError

    def passages(self, place: int) -> Sequence[FoundPassage] | Exception:
        """Return what was found for an input as it is judged, or what its search raised."""
        raise NotImplementedError

    def question(self, place: int) -> str:
        """Return the question, as far as it is known."""
        screened = self.screened[place]
        return screened.question if isinstance(screened, Decision) else ""

    # --- the flow ------------------------------------------------------------------------------------------------

    def route(self) -> Flow[list[Routed | Exception]]:
        """Decide for every input; whatever fails retrieves. What was begun and is not needed is stopped.

        Returns:
            For each input what is left to run, or the exception that concerns it: it is no question, or it is to be
            retrieved for and its search failed.
        """
        try:
            if self.strategy.look_first is not None:
                self.searching = yield Start(self.search())
            if self.strategy.answer_first is not None:
                decided = yield from self._answer_first(self.strategy.answer_first)
            else:
                decided = dict(enumerate((yield from self.decide())))
                decided = yield from self._compare(decided)
            routed = []
            for place in range(len(decided)):
                routed.append((yield from self._routed(place, decided[place])))
            return routed
        except BaseException as error:
            if not isinstance(error, GeneratorExit):  # then there is nobody to do another step
                for answer in self.answers.values():
                    yield from answer.close()
            raise
        finally:
            self.drop_search()

    def drop_search(self) -> None:
        """Let go of a search that nobody needs; one that is done is left alone."""
        if self.searching is not None:
            self.searching.drop()

    def _answer_first(self, options: AnswerFirst) -> Flow[Outcomes]:
        """Screen the questions, begin to answer those that are not settled by that, and judge the answers."""
        self.screened = yield from self.screen(options.retrieve_below)
        decided = yield from self._resolve_early(options)
        unclear = [place for place in range(len(self.screened)) if place not in decided]
        for place in unclear:
            self.answers[place] = self.begin(place, judged=True)
        if options.prefetch and self.searching is None and unclear and len(self.screened) == 1:
            self.searching = yield Start(self.search())
        decided |= yield from self._judge_answers(options, unclear)
        return decided

    def _resolve_early(self, options: AnswerFirst) -> Flow[Outcomes]:
        """Return the decisions that are clear before anything is written; of what is known the answer has begun."""
        yield from self._wait_for_search()
        if (
            self.strategy.look_first is not None
        ):  # reading what was found takes a while: not on the event loop
            decided: Outcomes = yield Call(self._decide_early, None, options)
        else:
            decided = self._decide_early(options)
        if self.screened != [None] * len(self.screened):
            self._clock.screening = _milliseconds(self._clock.began)
        known: dict[int, Decision] = {}
        for place, decision in decided.items():
            if isinstance(decision, Decision):
                info = PartialAnswerInfo(first_look=self._clock.screening)
                decided[place] = early = decision.model_copy(update={"partial_answer": info})
                if not early.retrieve:
                    known[place] = early
                    self.answers[place] = self.begin(place, judged=False)
        # An arm that fails before its first token is retrieved for, however known the question is.
        yield from _side_by_side([self.answers[place].buffer(1) for place in known])
        for place, early in known.items():
            error = self.answers[place].error
            if error is not None:
                kept = {name: getattr(early, name) for name in ("cost", "warnings", "partial_answer")}
                decided[place] = _failed(error, early.question).model_copy(update=kept)
        return decided

    def _decide_early(self, options: AnswerFirst) -> Outcomes:
        decided: Outcomes = {}
        for place, decision in enumerate(self.screened):
            if decision is None:
                continue
            if isinstance(decision, Exception):
                decided[place] = decision
                continue
            known_from = options.known_from(self._threshold(place, self.judge_threshold))
            if self.strategy.look_first is not None:
                early = decide_early(
                    decision, self.passages(place), self.strategy.look_first, known_from=known_from
                )
                if early is not None:
                    decided[place] = early
            elif decision.retrieve or decision.p_known >= known_from:
                decided[place] = decision
        return decided

    def _judge_answers(self, options: AnswerFirst, waiting: list[int]) -> Flow[Outcomes]:
        """Hold begun answers back side by side, and judge them in one call of the gate a checkpoint."""
        decided: Outcomes = {}
        for tokens in options.checkpoints:
            yield from _side_by_side([self.answers[place].buffer(tokens) for place in waiting])
            drafts: dict[int, Draft | None] = {}
            outcomes: Outcomes = {}
            for place in waiting:
                try:
                    drafts[place] = self.answers[place].draft()
                except Exception as error:
                    outcomes[place] = _failed(error, self.question(place))
            began = time.perf_counter()
            judged = yield from self.judge_drafts(drafts)
            self._clock.judging += _milliseconds(began)
            for place, decision in judged.items():
                answer = self.answers[place]
                is_last = tokens == options.checkpoints[-1] or answer.ended or not answer.has_text
                if is_last or isinstance(decision, Exception) or _is_clear(decision, options):
                    outcomes[place] = decision
            for place, decision in outcomes.items():
                decided[place] = self._record(place, decision, drafts.get(place))
                if isinstance(decision, Exception) or decision.retrieve:
                    yield from self.answers[place].cancel()
            waiting = [place for place in waiting if place not in decided]
        return decided

    def judge_drafts(self, drafts: dict[int, Draft | None]) -> Flow[Outcomes]:
        """Judge drafts; where there is no text, what screened the question decides."""
        judged: Outcomes = {}
        asked: dict[int, Draft | None] = {}
        for place, draft in drafts.items():
            screened = self.screened[place]
            if draft is None and isinstance(screened, Decision):
                judged[place] = _by_question(screened, self._threshold(place, self.question_threshold))
            else:
                asked[place] = draft
        if asked:
            judged |= yield from self.judge(asked)
        return (yield from self._compare(judged))

    def _compare(self, decided: Outcomes) -> Flow[Outcomes]:
        """Compare what the gate says with what was found, if that is looked at."""
        if self.strategy.look_first is None or not decided:
            return decided
        yield from self._wait_for_search()
        compared: Outcomes = yield Call(self._with_passages, None, decided, self.strategy.look_first)
        return compared

    def _with_passages(self, decided: Outcomes, look: LookFirst) -> Outcomes:
        compared: Outcomes = {}
        for place, decision in decided.items():
            if isinstance(decision, Decision):
                # A threshold that the caller gave is enough, whatever was found.
                known_from = None if self.thresholds[place] is None else decision.threshold
                decision = decide_with_passages(decision, self.passages(place), look, known_from=known_from)
            compared[place] = decision
        return compared

    def _record(
        self, place: int, decision: Decision | Exception, draft: Draft | None
    ) -> Decision | Exception:
        """Add to a decision what became of the begun answer, and what was spent and thrown away for it."""
        if isinstance(decision, Exception):
            return decision
        answer, screened = self.answers[place], self.screened[place]
        count = answer.partial.count
        info = PartialAnswerInfo(
            tokens_held=count,
            tokens_dropped=count if decision.retrieve else 0,
            first_look=self._clock.screening,
            judging=self._clock.judging,
            first_token=None if decision.retrieve else _milliseconds(self._clock.began),
        )
        cost, warnings = decision.cost, decision.warnings
        if decision.retrieve:  # an answer that goes on is the caller's, and no cost of deciding
            cost += Cost(model_calls=1, tokens_in=answer.partial.prompt_tokens, tokens_out=count)
        if isinstance(screened, Decision):
            cost += screened.cost
            warnings = tuple(dict.fromkeys((*screened.warnings, *warnings)))
        update = {
            "partial_answer": info,
            "cost": cost,
            "warnings": warnings,
            "draft": decision.draft or draft,
        }
        return decision.model_copy(update=update)

    def _routed(self, place: int, decision: Decision | Exception) -> Flow[Routed | Exception]:
        if isinstance(decision, Exception):
            return decision
        yield from self.announce(place, decision)
        if not decision.retrieve:
            return Routed(decision, self.answers.get(place))
        yield from self._wait_for_search()
        if self.found is None:
            return Routed(decision)
        found = self.found[place]
        return found if isinstance(found, Exception) else Routed(decision, searched=True, found=found)

    def _wait_for_search(self) -> Flow[None]:
        if self.searching is None or self.found is not None:
            return
        try:
            self.found = yield self.searching
        except Exception as error:
            self.found = [error] * len(self.screened)

    def _threshold(self, place: int, own: float | None) -> float | None:
        given = self.thresholds[place]
        return own if given is None else given


def _side_by_side(flows: Sequence[Flow[Any]]) -> Flow[None]:
    """Run flows side by side, with threads or on the event loop."""
    if len(flows) == 1:
        yield from flows[0]
    elif flows:
        yield Gather([RunFlow(flow) for flow in flows])


def _by_question(screened: Decision, threshold: float | None) -> Decision:
    """Return the decision by the question alone, of an answer without text; its cost is not counted twice."""
    compared = 0.5 if threshold is None else threshold
    reason = "The direct arm calls a tool or fills in a form, so the question decides."
    changed = {
        "threshold": compared,
        "retrieve": screened.p_known < compared,
        "reason": f"{screened.reason} {reason}".strip(),
        "cost": Cost(),
    }
    return screened.model_copy(update=changed)


def _is_clear(decision: Decision, options: AnswerFirst) -> bool:
    return not options.retrieve_below <= decision.p_known < options.answer_above


def _failed(error: Exception, question: str) -> Decision:
    _log.warning("The direct arm wrote no answer: %s: %s", type(error).__name__, error)
    return fallback_decision(error, question=question)


def _milliseconds(began: float) -> float:
    return (time.perf_counter() - began) * 1_000
