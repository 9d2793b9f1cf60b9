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
from dataclasses import dataclass
from typing import Any, TypeAlias

from rgate_integrations.answering.answer_first import AnswerFirst
from rgate_integrations.answering.look_first import LookFirst, decide_early, decide_with_passages
from rgate_integrations.answering.partial_answer import BufferedAnswer
from rgate_integrations.decision import Cost, Decision, Draft, PartialAnswerInfo
from rgate_integrations.engine.fallback import fallback_decision
from rgate_integrations.engine.follow_ups import is_unread
from rgate_integrations.engine.gate_like import decide_messages
from rgate_integrations.gates.passage_utility import FoundPassage
from rgate_integrations.runtime.flow import Call, Flow, Gather, Start, Step, Task, arun, run

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
        return self.look_first is not None or (self.answer_first is not None and self.answer_first.prefetch)


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


class RoutedCall(ABC):
    """One call of a router.

    Args:
        strategy: What is looked at.
        thresholds: The threshold that the caller gave for each input; None for the gate's own.

    Attributes:
        screened: What the gate that screens says of each input; empty where nobody was asked.
        answers: The answers that were begun, by place.
        found: What was searched, one result or exception an input; None before.
        searching: The search, once it is under way.
    """

    def __init__(self, strategy: Strategy, thresholds: Sequence[float | None]) -> None:
        self.strategy = strategy
        self.thresholds = thresholds
        self.screened: Outcomes = {}
        self.answers: dict[int, BufferedAnswer] = {}
        self.found: list[Any] | None = None
        self.searching: Task | None = None
        self._began = time.perf_counter()
        self._screening = 0.0  # milliseconds

    # --- what a framework adds -----------------------------------------------------------------------------------

    @abstractmethod
    def decide(self) -> Flow[list[Decision | Exception]]:
        """Ask the gate about every input, by the question alone; only without answer first."""

    @abstractmethod
    def ask(self, gate: Any, drafts: dict[int, Draft | None] | None = None) -> Flow[Outcomes]:
        """Ask a gate once: about every question alone, or about begun answers; without text it reads the question."""

    @abstractmethod
    def begin(self, place: int) -> BufferedAnswer:
        """Let the direct arm begin an answer that is to be judged."""

    @abstractmethod
    def search(self) -> Step:
        """Return the step that searches for every input; its result is one result or exception an input."""

    @abstractmethod
    def passages(self, place: int, found: Any) -> Sequence[FoundPassage]:
        """Return what a search found for an input as it is judged."""

    def announce(self, place: int, decision: Decision) -> Flow[None]:
        """Tell listeners what was decided; without any, nobody."""
        yield from ()

    def question(self, place: int) -> str:
        """Return the question, as far as it is known."""
        screened = self.screened.get(place)
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
                asked = yield from self.decide()
                decided = yield from self._compare(dict(enumerate(asked)))
            routed = []
            for place in range(len(self.thresholds)):
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
        """Screen the questions, begin to answer those that are not clear by that, and judge the answers."""
        if self.strategy.question_gate is not None:
            self.screened = yield from self.ask(self.strategy.question_gate)
        yield from self._wait_for_search()
        if self.screened:
            self._screening = _milliseconds(self._began)
        decided: Outcomes = {}
        waiting = []
        for place in range(len(self.thresholds)):
            early = self.screened.get(place)
            if isinstance(early, Decision):
                early = yield from self._settle_early(place, early, options)
            if early is None:
                waiting.append(place)
                self.answers[place] = self.begin(place)
            else:
                decided[place] = early
        if options.prefetch and self.searching is None and waiting and len(self.thresholds) == 1:
            self.searching = yield Start(self.search())
        return decided | (yield from self._judge_answers(waiting, options.tokens))

    def _settle_early(self, place: int, screened: Decision, options: AnswerFirst) -> Flow[Decision | None]:
        """Return the decision of a question that is clearly unknown or clearly known; None if it is neither."""
        unknown_below = min(options.retrieve_below, screened.threshold)
        known_from = max(options.answer_above, screened.threshold)
        retrieve = screened.error is not None or is_unread(screened) or screened.p_known < unknown_below
        changed = {
            "retrieve": screened.retrieve if screened.override else retrieve,
            "threshold": unknown_below,
            "partial_answer": PartialAnswerInfo(first_look=self._screening),
        }
        early = screened.model_copy(update=changed)
        look = self.strategy.look_first
        if look is not None:  # reading what was found takes a while: not on the event loop
            passages = self._passages(place)
            settled: Decision | None = yield Call(
                decide_early, None, early, passages, look, known_from=known_from
            )
            return settled
        return early if early.retrieve or early.override or early.p_known >= known_from else None

    def _judge_answers(self, places: list[int], tokens: int) -> Flow[Outcomes]:
        """Hold answers back until so many tokens are written, judge all in one call, and stop those that retrieve."""
        yield Gather([Call(run, arun, self.answers[place].buffer(tokens)) for place in places])
        began = time.perf_counter()
        outcomes: Outcomes = {}
        drafts: dict[int, Draft | None] = {}
        for place in places:
            screened = self.screened.get(place)
            try:
                draft = self.answers[place].draft()
            except Exception as error:  # whatever the application's arm raised: the question is retrieved for
                # Without its message, which the decision has: it may quote anything that the arm was asked.
                _log.warning("The direct arm wrote no answer: %s", type(error).__name__)
                outcomes[place] = fallback_decision(error, question=self.question(place))
                continue
            if draft is None and isinstance(screened, Decision):
                reason = "The direct arm calls a tool or fills in a form, so the question decides."
                changed = {"reason": f"{screened.reason} {reason}".strip(), "cost": Cost()}  # counted once
                outcomes[place] = screened.model_copy(update=changed)
            else:
                drafts[place] = draft
        if drafts:
            outcomes |= yield from self.ask(self.strategy.judge, drafts)
        outcomes = yield from self._compare(outcomes)
        judging = _milliseconds(began)
        for place, decision in outcomes.items():
            if isinstance(decision, Decision):
                outcomes[place] = decision = self._record(place, decision, drafts.get(place), judging)
            if isinstance(decision, Exception) or decision.retrieve:
                yield from self.answers[place].cancel()
        return outcomes

    def _compare(self, decided: Outcomes) -> Flow[Outcomes]:
        """Compare what the gate says with what was found, if that is looked at."""
        look = self.strategy.look_first
        if look is None:
            return decided
        yield from self._wait_for_search()
        compared: Outcomes = {}
        for place, decision in decided.items():
            if isinstance(decision, Decision):
                # A threshold that the caller gave is enough, whatever was found.
                known_from = None if self.thresholds[place] is None else decision.threshold
                passages = self._passages(place)
                decision = yield Call(
                    decide_with_passages, None, decision, passages, look, known_from=known_from
                )
            compared[place] = decision
        return compared

    def _record(self, place: int, decision: Decision, draft: Draft | None, judging: float) -> Decision:
        """Add to a decision what became of the begun answer, and what was spent and thrown away for it."""
        partial = self.answers[place].partial
        screened = self.screened.get(place)
        count = partial.count
        info = PartialAnswerInfo(
            tokens_held=count,
            tokens_dropped=count if decision.retrieve else 0,
            first_look=self._screening,
            judging=judging,
            first_token=None if decision.retrieve else _milliseconds(self._began),
        )
        cost, warnings = decision.cost, decision.warnings
        if decision.retrieve:  # an answer that goes on is the caller's, and no cost of deciding
            cost += Cost(model_calls=1, tokens_in=partial.prompt_tokens, tokens_out=count)
        if isinstance(screened, Decision):
            cost += screened.cost
            warnings = tuple(dict.fromkeys((*screened.warnings, *warnings)))
        drafted = decision.draft or draft
        changed = {"partial_answer": info, "cost": cost, "warnings": warnings, "draft": drafted}
        return decision.model_copy(update=changed)

    def _routed(self, place: int, decision: Decision | Exception) -> Flow[Routed | Exception]:
        """Tell what was decided, and return what is left to run."""
        if isinstance(decision, Exception):
            return decision
        yield from self.announce(place, decision)
        if not decision.retrieve:
            return Routed(decision, self.answers.get(place))
        yield from self._wait_for_search()
        if self.found is None:
            return Routed(decision)
        found = self.found[place]
        if isinstance(found, Exception):
            return found
        return Routed(decision, searched=True, found=found)

    def _wait_for_search(self) -> Flow[None]:
        if self.searching is None or self.found is not None:
            return
        try:
            self.found = yield self.searching
        except Exception as error:  # raised for those questions alone that are to be retrieved for
            self.found = [error] * len(self.thresholds)

    def _passages(self, place: int) -> Sequence[FoundPassage] | Exception:
        found = None if self.found is None else self.found[place]
        if isinstance(found, Exception):
            return found
        try:
            return self.passages(place, found)
        except Exception as error:  # a retriever may return anything; the arm gets it as without a look
            _log.warning("What was found cannot be judged: %s", type(error).__name__)
            return []


class QuestionCall(RoutedCall):
    """One question, about which gates are asked as they are.

    Args:
        strategy: What is looked at.
        question: The question.
        history: The turns before it.
        threshold: The threshold that the caller gave; None for the gate's own.
        timeout: How long a gate may take, in seconds; None for its own.
    """

    def __init__(
        self,
        strategy: Strategy,
        question: str,
        history: Sequence[str] = (),
        *,
        threshold: float | None = None,
        timeout: float | None = None,
    ) -> None:
        super().__init__(strategy, [threshold])
        self._question = question
        self._history = history
        self._timeout = timeout

    def decide(self) -> Flow[list[Decision | Exception]]:
        """Ask the gate about the question."""
        return list((yield from self.ask(self.strategy.question_gate)).values())

    def ask(self, gate: Any, drafts: dict[int, Draft | None] | None = None) -> Flow[Outcomes]:
        """Ask a gate about the question, or about what was begun."""
        found = yield from decide_messages(
            gate,
            [self._question],
            [self._history],
            drafts=None if drafts is None else list(drafts.values()),
            threshold=self.thresholds[0],
            timeout=self._timeout,
        )
        return dict(enumerate(found))

    def question(self, place: int) -> str:
        """Return the question."""
        return self._question


def _milliseconds(began: float) -> float:
    return (time.perf_counter() - began) * 1_000
