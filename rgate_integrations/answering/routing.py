"""How a call of a router goes, in every framework: screen, search, begin, compare, and run one of the arms.

    the question alone    decide                                                     -> run
    look first            decide and search -> compare                               -> run
    answer first          screen            -> begin (and search) -> judge           -> run
    both                  screen and search -> begin -> judge     -> compare         -> run

Where a gate chooses among several corpora, the search waits for the first decision, which says where to search.

`RoutedCall` is that flow over the inputs of one call; each carries what is known of it, a `RoutedInput`. A framework
adds how a gate is asked, how the retrieve arm searches, and how the direct arm begins to write. Which questions need
no begun answer is a table: `rgate_integrations.answering.answer_first`.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

from rgate_integrations.answering.answer_first import AnswerFirst, settle
from rgate_integrations.answering.look_first import LookFirst, decide_with_passages
from rgate_integrations.answering.partial_answer import BufferedAnswer
from rgate_integrations.decision import Cost, Decision, Draft, PartialAnswerInfo, Request
from rgate_integrations.engine.decider import Decider, Failed
from rgate_integrations.errors import no_answer
from rgate_integrations.gates.passage_utility import FoundPassage
from rgate_integrations.runtime.flow import Call, Flow, Gather, Start, Step, Task, arun, run
from rgate_integrations.runtime.replies import THINKING_OFF

_log = logging.getLogger("rgate_integrations")

_THINKS = "The LLM thinks before it answers: what it begins with is not judged, and the question decides."
_NO_TEXT = "The direct arm calls a tool or fills in a form, so the question decides."
_MEASURED_OFF = "The LLM thinks before it answers; it was measured with its thinking off."


@dataclass
class ArmMemory:
    """What is remembered of a direct arm from call to call.

    Attributes:
        thinks: Whether its LLM sends thoughts before an answer: then none is begun.
    """

    thinks: bool = False


@dataclass(frozen=True)
class Strategy:
    """What a router looks at before it decides; by default the question alone.

    Attributes:
        answer_first: Also at what the direct arm begins to answer.
        look_first: Also at what a search finds.
        judge: The gate that judges begun answers, as the framework has gates; None without any.
        question_gate: The gate that screens questions before an answer is begun; None begins every answer.
        chooses_corpus: Whether a decision says where to search, so that no search begins before there is one.
        memory: What is remembered of the direct arm.
    """

    answer_first: AnswerFirst | None = None
    look_first: LookFirst | None = None
    judge: Any = None
    question_gate: Any = None
    chooses_corpus: bool = False
    memory: ArmMemory = field(default_factory=ArmMemory, compare=False)

    def __bool__(self) -> bool:
        # LangChain writes no field that is false: a plain router can be written and read.
        return self.answer_first is not None or self.look_first is not None

    @property
    def searches_ahead(self) -> bool:
        """Whether the retrieve arm searches before there is a decision."""
        return self.look_first is not None or (self.answer_first is not None and self.answer_first.prefetch)


@dataclass
class RoutedInput:
    """One input of a router's call, and what is known of it so far.

    Attributes:
        question: The question, as far as it is known.
        threshold: The threshold that the caller gave; None for the gate's own.
        screened: What the gate says of the question alone, where the direct arm answers first.
        answer: What the direct arm has begun.
        draft: The text of that, as it is judged; None for a tool call or a form, or why there is none.
        found: What the retrieve arm's search returned or raised; None before.
        searched: Whether the retrieve arm has searched.
        outcome: What is decided, or why it is no question; None before.
    """

    question: str = ""
    threshold: float | None = None
    screened: Decision | None = None
    answer: BufferedAnswer | None = None
    draft: Draft | Exception | None = None
    found: Any = None
    searched: bool = False
    outcome: Decision | Exception | None = None

    @property
    def decided(self) -> Decision | None:
        """What is decided so far."""
        return self.outcome if isinstance(self.outcome, Decision) else self.screened


@dataclass(frozen=True)
class RouteResult:
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


_Input = TypeVar("_Input", bound=RoutedInput)


class RoutedCall(ABC, Generic[_Input]):
    """One call of a router.

    Args:
        strategy: What is looked at.
        inputs: The inputs.

    Attributes:
        searching: The search, once it is under way.
        searched_for: The inputs that it is for.
    """

    def __init__(self, strategy: Strategy, inputs: Sequence[_Input]) -> None:
        self.strategy = strategy
        self.inputs = inputs
        self.searching: Task | None = None
        self.searched_for: Sequence[_Input] = ()
        self._began = time.perf_counter()
        self._screening = 0.0  # milliseconds

    # --- what a framework adds -----------------------------------------------------------------------------------

    @abstractmethod
    def decide(self) -> Flow[Sequence[Decision | Exception]]:
        """Ask the gate about every input, by the question alone; only without answer first."""

    @abstractmethod
    def screen(self, gate: Any) -> Flow[Sequence[Decision | Exception]]:
        """Ask the gate that screens about every input, before an answer is begun."""

    @abstractmethod
    def judge(self, gate: Any, inputs: Sequence[_Input]) -> Flow[Sequence[Decision | Exception]]:
        """Ask the gate for begun answers about some inputs; of one without a draft it reads the question."""

    @abstractmethod
    def begin(self, each: _Input) -> BufferedAnswer:
        """Let the direct arm begin an answer that is to be judged."""

    @abstractmethod
    def search(self, inputs: Sequence[_Input]) -> Step:
        """Return the step that searches for some inputs; its result is one result or exception for each of them."""

    @abstractmethod
    def passages(self, each: _Input) -> Sequence[FoundPassage]:
        """Return what a search found for an input as it is judged."""

    def announce(self, each: _Input, decision: Decision) -> Flow[None]:
        """Emit what was decided to listeners."""
        yield from ()

    # --- the flow ------------------------------------------------------------------------------------------------

    def route(self) -> Flow[list[RouteResult | Exception]]:
        """Decide for every input; whatever fails retrieves. What was begun and is not needed is stopped.

        Returns:
            For each input what is left to run, or the exception that concerns it: it is no question, or it is to be
            retrieved for and its search failed.
        """
        try:
            if self.strategy.look_first is not None and not self.strategy.chooses_corpus:
                yield from self._begin_search(self.inputs)
            if self.strategy.answer_first is not None:
                yield from self._answer_first(self.strategy.answer_first)
            else:
                outcomes = yield from self.decide()
                for each, outcome in zip(self.inputs, outcomes, strict=True):
                    each.outcome = outcome
                yield from self._compare(self.inputs)
            results = []
            for each in self.inputs:
                results.append((yield from self._finish(each)))
            return results
        except BaseException as error:
            if not isinstance(error, GeneratorExit):  # then nobody drives another step
                for each in self.inputs:
                    if each.answer is not None:
                        yield from each.answer.close()
            raise
        finally:
            self.drop_search()

    def drop_search(self) -> None:
        """Drop a search that is not needed; one that is done is left alone."""
        if self.searching is not None:
            self.searching.drop()

    def _answer_first(self, options: AnswerFirst) -> Flow[None]:
        """Screen the questions, begin to answer those that are not clear by that, and judge the answers."""
        gate = self.strategy.question_gate
        if gate is not None:
            for each, outcome in zip(self.inputs, (yield from self.screen(gate)), strict=True):
                if isinstance(outcome, Exception):  # it is no question
                    each.outcome = outcome
                else:
                    each.screened = outcome
        yield from self._wait_for_search()
        if gate is not None:
            self._screening = _milliseconds(self._began)
        begun, thinking = [], []
        for each in self.inputs:
            if each.screened is not None:
                each.outcome = yield from self._settle(each, each.screened, options)
            if each.outcome is None and each.screened is not None and self.strategy.memory.thinks:
                info = PartialAnswerInfo(first_look=self._screening)
                each.outcome = _decide_by_question(each.screened, _THINKS, partial_answer=info)
                thinking.append(each)
            elif each.outcome is None:
                each.answer = self.begin(each)
                begun.append(each)
        yield from self._compare(thinking)
        if options.prefetch and self.searching is None and begun and len(self.inputs) == 1:
            yield from self._begin_search(begun)
        if begun:
            yield from self._judge_answers(begun, options.tokens)

    def _settle(self, each: _Input, screened: Decision, options: AnswerFirst) -> Flow[Decision | None]:
        """Return what is decided without a begun answer; None if the LLM is to begin."""
        look = self.strategy.look_first
        settled: Decision | None
        if look is None or not each.searched:
            settled = settle(screened, (), options, None)
        else:  # judging passages takes a while: not on the event loop
            settled = yield Call(settle, None, screened, self._passages(each), options, look)
        if settled is None:
            return None
        info = PartialAnswerInfo(first_look=self._screening)
        return settled.model_copy(update={"partial_answer": info})

    def _judge_answers(self, begun: Sequence[_Input], tokens: int) -> Flow[None]:
        """Hold answers back until so many tokens are written, judge all in one call, and stop those that retrieve."""
        buffering = []
        for each in begun:
            assert each.answer is not None  # noqa: S101  it was begun
            buffering.append(Call(run, arun, each.answer.buffer(tokens)))
        yield Gather(buffering)
        began = time.perf_counter()
        unjudged = []
        for each in begun:
            assert each.answer is not None  # noqa: S101  it was begun
            try:
                each.draft = each.answer.draft()
            except Exception as error:  # any error may come from an arm: the question is retrieved for
                _log.warning("The direct arm wrote no answer: %s", type(error).__name__)
                each.draft = error
            thinks = each.draft is None and each.answer.partial.thinks
            # Not where tags in the text say so: a question could ask for them.
            self.strategy.memory.thinks |= thinks and each.answer.partial.has_thoughts
            if each.draft is None and each.screened is not None:
                reason = _THINKS if thinks else _NO_TEXT
                each.outcome = _decide_by_question(each.screened, reason, cost=Cost())  # counted once
            else:
                if thinks:
                    each.draft = no_answer("thoughts")
                unjudged.append(each)
        if unjudged:
            judged = yield from self.judge(self.strategy.judge, unjudged)
            for each, outcome in zip(unjudged, judged, strict=True):
                each.outcome = outcome
        yield from self._compare(begun)
        judging = _milliseconds(began)
        for each in begun:
            goes_on = False
            if isinstance(each.outcome, Decision):
                each.outcome = self._record(each, each.outcome, judging)
                goes_on = not each.outcome.retrieve
            if each.answer is not None and not goes_on:
                yield from each.answer.cancel()

    def _compare(self, inputs: Sequence[_Input]) -> Flow[None]:
        """Compare what the gate says with what was found, if that is looked at."""
        look = self.strategy.look_first
        if look is None:
            return
        yield from self._wait_for_search()
        for each in inputs:
            if isinstance(each.outcome, Decision) and each.searched:
                # A threshold that the caller gave is enough, whatever was found.
                enough = None if each.threshold is None else each.outcome.threshold
                each.outcome = yield Call(
                    decide_with_passages,
                    None,
                    each.outcome,
                    self._passages(each),
                    look,
                    direct_threshold=enough,
                )

    def _record(self, each: _Input, decision: Decision, judging: float) -> Decision:
        """Add to a decision what became of the begun answer, and what was spent and thrown away for it."""
        assert each.answer is not None  # noqa: S101  it was begun
        partial = each.answer.partial
        count = partial.count
        info = PartialAnswerInfo(
            tokens_held=count,
            tokens_dropped=count if decision.retrieve else 0,
            first_look=self._screening,
            judging=judging,
            first_token=None if decision.retrieve else _milliseconds(self._began),
        )
        cost, warnings, corpora = decision.cost, decision.warnings, decision.corpora
        if decision.retrieve:  # an answer that goes on is the caller's, and no cost of deciding
            cost += Cost(model_calls=1, tokens_in=partial.prompt_tokens, tokens_out=count)
        if each.screened is not None:
            cost += each.screened.cost
            warnings = tuple(dict.fromkeys((*each.screened.warnings, *warnings)))
            if self.strategy.chooses_corpus and self.searching is not None:
                corpora = each.screened.corpora  # where it was searched
        draft = decision.draft
        if draft is None and isinstance(each.draft, Draft):
            draft = each.draft
        where = decision.model_copy(update={"corpora": corpora})
        return where.with_retrieve(
            decision.retrieve, partial_answer=info, cost=cost, warnings=warnings, draft=draft
        )

    def _finish(self, each: _Input) -> Flow[RouteResult | Exception]:
        """Announce what was decided, and return what is left to run."""
        decision = each.outcome
        assert decision is not None  # noqa: S101  every input has one by now
        if isinstance(decision, Exception):
            return decision
        yield from self.announce(each, decision)
        if not decision.retrieve:
            return RouteResult(decision, each.answer)
        yield from self._wait_for_search()
        if not each.searched:
            return RouteResult(decision)
        if isinstance(each.found, Exception):
            return each.found
        return RouteResult(decision, searched=True, found=each.found)

    def _begin_search(self, inputs: Sequence[_Input]) -> Flow[None]:
        """Begin to search, once in a call; where decisions say where, for those inputs that have one."""
        if self.strategy.chooses_corpus:
            inputs = [each for each in inputs if each.decided is not None]
        if self.searching is None and inputs:
            self.searched_for = inputs
            self.searching = yield Start(self.search(inputs))

    def _wait_for_search(self) -> Flow[None]:
        """Wait for the search, which begins now at the latest if there is to be a look at what it finds."""
        if self.strategy.look_first is not None:
            yield from self._begin_search(self.inputs)
        if self.searching is None or any(each.searched for each in self.searched_for):
            return
        try:
            results: Sequence[Any] = yield self.searching
        except Exception as error:  # raised for those questions alone that are to be retrieved for
            results = [error] * len(self.searched_for)
        for each, found in zip(self.searched_for, results, strict=True):
            each.found, each.searched = found, True

    def _passages(self, each: _Input) -> Sequence[FoundPassage] | Exception:
        if isinstance(each.found, Exception):
            return each.found
        try:
            return self.passages(each)
        except Exception as error:  # a retriever may return anything; the arm gets it as without a look
            _log.warning("What was found cannot be judged: %s", type(error).__name__)
            return []


class QuestionCall(RoutedCall[RoutedInput]):
    """One question, about which the gates of a strategy are asked directly.

    Args:
        strategy: What is looked at; its gates are `Decider` objects.
        request: The question.
    """

    def __init__(self, strategy: Strategy, request: Request | Failed) -> None:
        super().__init__(strategy, [RoutedInput(request.question, request.threshold)])
        self.request = request

    def decide(self) -> Flow[Sequence[Decision | Exception]]:
        """Ask the gate about the question."""
        return (yield from self.screen(self.strategy.question_gate))

    def screen(self, gate: Decider) -> Flow[Sequence[Decision | Exception]]:
        """Ask a gate about the question."""
        return (yield from gate.flow([self.request]))

    def judge(self, gate: Decider, inputs: Sequence[RoutedInput]) -> Flow[Sequence[Decision | Exception]]:
        """Ask a gate about what was begun."""
        items: list[Request | Failed] = []
        for each in inputs:
            if isinstance(each.draft, Exception):
                items.append(Failed(each.draft, each.question, each.threshold))
            elif isinstance(self.request, Request):
                items.append(replace(self.request, draft=each.draft))
            else:
                items.append(self.request)
        return (yield from gate.flow(items))


def _decide_by_question(screened: Decision, reason: str, **changes: Any) -> Decision:
    """Return what the question alone decides, and why there is no begun answer beside it."""
    warnings = screened.warnings
    if reason == _THINKS and THINKING_OFF in screened.llm:
        warnings = (*warnings, _MEASURED_OFF)
    changes |= {"reason": f"{screened.reason} {reason}".strip(), "warnings": warnings}
    return screened.model_copy(update=changes)


def _milliseconds(began: float) -> float:
    return (time.perf_counter() - began) * 1_000
