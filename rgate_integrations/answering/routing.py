"""Routes the inputs of one call, in every framework: screen, search, start an answer, compare, then run one arm.

    the question alone    decide                                                     -> run
    look first            decide and search -> compare                               -> run
    answer first          screen            -> begin (and search) -> judge           -> run
    both                  screen and search -> begin -> judge     -> compare         -> run

*Decide* and *screen* judge the question alone, and *judge* the beginning of the answer; *compare* weighs the passages
against what the LLM knows. If a gate chooses among several corpora, the search waits for the first decision, which
says where to search.

A `Strategy` says what to consider, and `RoutedCall` is the flow. A framework's subclass asks the gates, searches with
the retrieve arm, and starts the direct arm's answer. `rgate_integrations.answering.answer_first` says which questions
need no partial answer.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Self, TypeVar

from rgate_integrations.answering.answer_first import AnswerFirst, is_clear, settle
from rgate_integrations.answering.drafting import attach_draft
from rgate_integrations.answering.look_first import LookFirst, decide_with_passages, needs_passages
from rgate_integrations.answering.partial_answer import BufferedAnswer
from rgate_integrations.decision import Cost, Decision, Draft, PartialAnswerInfo, Request
from rgate_integrations.engine.decider import Decider, Failed
from rgate_integrations.engine.loading import answer_first_gates
from rgate_integrations.errors import no_answer
from rgate_integrations.gates.passage_utility import FoundPassage
from rgate_integrations.runtime.flow import Call, Flow, Gather, Start, Step, Task, arun, is_interrupt, run
from rgate_integrations.runtime.text import logger


@dataclass
class Strategy:
    """What a router considers before it decides; by default only the question.

    Attributes:
        answer_first: Options for judging the beginning of the LLM's answer without passages; None to skip that.
        look_first: Options for judging the passages that a search finds; None to skip that.
        judge: The gate that judges partial answers: a `Decider`, or in LangChain a runnable; unused if
            ``answer_first`` is None.
        question_gate: The gate that judges the question alone. With ``answer_first``, it does so before the LLM
            starts to answer; if None, the LLM starts to answer every question.
        made_for: The gate for which ``judge`` and ``question_gate`` were made; None if they fit any.
        chooses_corpus: Whether a decision says where to search, so that a search must wait for it.
        llm_thinks: Whether the direct arm's LLM has sent thoughts before an answer since this strategy was made. If
            so, and if there is a ``question_gate``, no partial answer is judged any more.
    """

    answer_first: AnswerFirst | None = None
    look_first: LookFirst | None = None
    judge: Any = None
    question_gate: Any = None
    made_for: Any = field(default=None, compare=False)
    chooses_corpus: bool = False
    llm_thinks: bool = field(default=False, compare=False)

    @classmethod
    def from_options(
        cls,
        gate: Decider,
        adapt: Callable[[Decider], Any],
        *,
        answer_first: bool | AnswerFirst,
        look_first: bool | LookFirst,
        chooses_corpus: bool,
    ) -> Self:
        """Return the strategy for the options of a router or query engine.

        Args:
            gate: The gate of the router or query engine.
            adapt: Called with each gate that answer first needs; returns the gate adjusted to the answering LLM, in
                LangChain as a runnable.
            answer_first: See `AnswerFirst`.
            look_first: See `LookFirst`.
            chooses_corpus: See `Strategy`.

        Raises:
            ConfigurationError: An option is neither a bool nor an object of its class. With ``answer_first``: the
                gate cannot judge a partial answer.
            RGateError: `AnswerFirst.question_gate` is invalid or cannot be loaded; see `resolve_gate`.
        """
        strategy = cls(
            AnswerFirst.coerce(answer_first), LookFirst.coerce(look_first), chooses_corpus=chooses_corpus
        )
        if strategy.answer_first is not None:
            judge, question_gate = answer_first_gates(gate, strategy.answer_first.question_gate)
            strategy.judge = adapt(judge)
            strategy.question_gate = None if question_gate is None else adapt(question_gate)
        return strategy

    def __bool__(self) -> bool:
        # LangChain does not serialise false fields, so a plain router can be dumped and loaded again.
        return self.answer_first is not None or self.look_first is not None

    @property
    def searches_ahead(self) -> bool:
        """Whether the search may start before the final decision, as with look first or `AnswerFirst.prefetch`."""
        return self.look_first is not None or (self.answer_first is not None and self.answer_first.prefetch)


_THINKS = "The LLM thinks before it answers, so only the question was judged."
_NO_TEXT = "The direct arm returns something other than text, so only the question was judged."


@dataclass
class RoutedInput:
    """One input of a router's call, and the results so far.

    A router has two arms: direct, the LLM alone, and retrieve, the LLM with passages.

    Attributes:
        question: The question; empty if it is unknown here, as in LangChain's router.
        threshold: The caller's threshold; None for the gate's own.
        screening: With answer first, the question gate's decision; None without that gate, or if it raised.
        answer: The direct arm's answer; None if it has not started, or the decision is to retrieve.
        draft: The partial answer to judge, or the exception if the arm wrote none; None before the arm has
            written, and if only the question is judged.
        searched: Whether the retrieve arm has searched, so that only the rest of it remains to run.
        passages: What the search returned or raised; None without a search.
        outcome: The decision, or this input's exception; None until there is one.
    """

    question: str = ""
    threshold: float | None = None
    screening: Decision | None = None
    answer: BufferedAnswer | None = None
    draft: Draft | Exception | None = None
    searched: bool = False
    passages: Any = None
    outcome: Decision | Exception | None = None

    @property
    def latest_decision(self) -> Decision | None:
        """The latest decision; None before the first."""
        return self.outcome if isinstance(self.outcome, Decision) else self.screening

    @property
    def decision(self) -> Decision:
        """The final decision.

        Raises:
            Exception: The input has no question, the gate raised, or the input retrieves and its search
                failed.
        """
        if isinstance(self.outcome, Exception):
            raise self.outcome
        assert self.outcome is not None  # noqa: S101  only read after the call
        return self.outcome


_Input = TypeVar("_Input", bound=RoutedInput)


class RoutedCall(ABC, Generic[_Input]):
    """One call of a router: its inputs, and the search that they share.

    Args:
        strategy: What to consider before deciding.
        inputs: The inputs.

    Attributes:
        in_batch: Whether the call is part of a batch, for which no search is prefetched.
        search_task: The search; None until it starts.
    """

    in_batch = False

    def __init__(self, strategy: Strategy, inputs: Sequence[_Input]) -> None:
        self.strategy = strategy
        self.inputs = inputs
        self.search_task: Task | None = None
        self._search_inputs: Sequence[_Input] = ()
        # Users wait from here on, so the time to the first token includes the decision.
        self._start = time.perf_counter()
        self._screening_time = 0.0  # milliseconds

    # --- what a framework adds -----------------------------------------------------------------------------------

    def decide(self) -> Flow[Sequence[Decision | Exception]]:
        """Return the gate's decision or error for the question of every input; not used with answer first.

        By default it is what `screen` returns: the same gate judges the question with and without answer first.
        """
        return (yield from self.screen())

    @abstractmethod
    def screen(self) -> Flow[Sequence[Decision | Exception]]:
        """Return the question gate's decision or error for every input, before any answer starts."""

    @abstractmethod
    def judge(self, inputs: Sequence[_Input]) -> Flow[Sequence[Decision | Exception]]:
        """Return, for each of these inputs, what `Strategy.judge` decides about its partial answer, or the error."""

    @abstractmethod
    def begin(self, item: _Input) -> BufferedAnswer:
        """Return the direct arm's answer, which starts when its first chunk is requested."""

    @abstractmethod
    def search(self, inputs: Sequence[_Input]) -> Step:
        """Return the step that searches for these inputs; its result is a list, one result or exception per input."""

    @abstractmethod
    def read_passages(self, item: _Input) -> Sequence[FoundPassage]:
        """Return the passages that the search of an input found."""

    def emit(self, item: _Input, decision: Decision) -> Flow[None]:
        """Emit a decision to listeners; does nothing by default."""
        yield from ()

    # --- the flow ------------------------------------------------------------------------------------------------

    def route(self) -> Flow[Sequence[_Input]]:
        """Decide about every input. Answers and searches that are not needed are cancelled.

        If the gate fails on an input, that input retrieves. With ``on_error="raise"``, the error becomes the input's
        outcome or is raised, depending on the framework.

        Returns:
            The inputs, each with its outcome, and with its answer or passages if its arm has begun.
        """
        try:
            # The search runs in parallel with the gate, unless the decision has to say where to search.
            if self.strategy.look_first is not None and not self.strategy.chooses_corpus:
                yield from self._begin_search(self.inputs)
            if self.strategy.answer_first is not None:
                yield from self._answer_first(self.strategy.answer_first)
            else:
                for item, outcome in zip(self.inputs, (yield from self.decide()), strict=True):
                    item.outcome = outcome
                yield from self._compare(self.inputs)
            for item in self.inputs:
                yield from self._finish(item)
            return self.inputs
        except GeneratorExit:  # the caller has gone, so no further step would run
            raise
        except BaseException:
            for item in self.inputs:
                if item.answer is not None:
                    yield from item.answer.close()
            raise
        finally:
            self.drop_search()

    def drop_search(self) -> None:
        """Drop the search if it is still running, because nothing needs its result."""
        if self.search_task is not None:
            self.search_task.drop()

    def _answer_first(self, options: AnswerFirst) -> Flow[None]:
        """Screen the questions, start to answer the unclear ones, and judge the answers."""
        screens = self.strategy.question_gate is not None
        if screens:
            for item, outcome in zip(self.inputs, (yield from self.screen()), strict=True):
                if isinstance(outcome, Exception):  # there is no question, or the gate raises its failures
                    item.outcome = outcome
                else:
                    item.screening = outcome
        if any(needs_passages(item.screening) for item in self.inputs):
            yield from self._wait_for_search()
        if screens:
            self._screening_time = _milliseconds_since(self._start)
        answers: list[tuple[_Input, BufferedAnswer]] = []
        thinking = []
        for item in self.inputs:
            if item.screening is not None:
                item.outcome = yield from self._settle(item, item.screening, options)
                if item.outcome is None and self.strategy.llm_thinks:
                    info = PartialAnswerInfo(screening=self._screening_time)
                    item.outcome = _decide_by_question(item.screening, _THINKS, partial_answer=info)
                    thinking.append(item)
            if item.outcome is None:
                item.answer = self.begin(item)
                answers.append((item, item.answer))
        # The other inputs are compared in `_judge_answers`, once P(known) is based on the LLM's own words.
        yield from self._compare(thinking)
        if answers:
            if options.prefetch and not self.in_batch:
                yield from self._begin_search(self.inputs)
            yield from self._judge_answers(answers, options.tokens)

    def _settle(self, item: _Input, screening: Decision, options: AnswerFirst) -> Flow[Decision | None]:
        """Return the decision about an input; None if a partial answer must be judged first."""
        look = self.strategy.look_first
        settled = screening if is_clear(screening, options) else None
        if look is not None and item.searched:
            # A `Call`, because judging passages would block the event loop.
            settled = yield Call(
                settle,
                None,
                screening,
                self._passages(item),
                options,
                look,
                # That of the decision, because a user's own gate may apply another, or call something else so.
                direct_threshold=None if item.threshold is None else screening.threshold,
            )
        if settled is None:
            return None
        return settled.model_copy(
            update={"partial_answer": PartialAnswerInfo(screening=self._screening_time)}
        )

    def _judge_answers(self, answers: Sequence[tuple[_Input, BufferedAnswer]], tokens: int) -> Flow[None]:
        """Hold back ``tokens`` tokens of each answer, judge all in one call, and cancel those that retrieve."""
        # In parallel, since each waits for the LLM; then one call of the judge for all.
        yield Gather([Call(run, arun, answer.buffer(tokens)) for _, answer in answers])
        start = time.perf_counter()
        to_judge = []
        for item, answer in answers:
            try:
                item.draft = answer.draft()
            except Exception as error:  # an arm may raise anything; the judge then retrieves
                logger.warning("The direct arm wrote no answer: %s", type(error).__name__)
                item.draft = error
            thinks = item.draft is None and answer.partial.thinks
            # Tags in the text do not count here, because a user could ask for text with such tags.
            self.strategy.llm_thinks |= thinks and answer.partial.has_thoughts
            if item.draft is None and item.screening is not None:
                # Zero here: `_record` adds the screening's cost.
                reason = _THINKS if thinks else _NO_TEXT
                item.outcome = _decide_by_question(item.screening, reason, cost=Cost())
            else:
                if thinks:
                    item.draft = no_answer("thoughts")
                to_judge.append(item)
        if to_judge:
            for item, outcome in zip(to_judge, (yield from self.judge(to_judge)), strict=True):
                item.outcome = outcome
        yield from self._compare([item for item, _ in answers])
        judging = _milliseconds_since(start)
        for item, answer in answers:
            if isinstance(item.outcome, Decision):
                item.outcome = self._record(item, answer, item.outcome, judging)
            if not (isinstance(item.outcome, Decision) and not item.outcome.retrieve):
                yield from answer.cancel()

    def _compare(self, inputs: Sequence[_Input]) -> Flow[None]:
        """With look first, revise the decisions that passages may change."""
        look = self.strategy.look_first
        for item in inputs:
            if look is None or not needs_passages(item.outcome):
                continue
            yield from self._wait_for_search()
            if item.searched:
                item.outcome = yield Call(
                    decide_with_passages,
                    None,
                    item.outcome,
                    self._passages(item),
                    look,
                    direct_threshold=None if item.threshold is None else item.outcome.threshold,
                )

    def _record(self, item: _Input, answer: BufferedAnswer, decision: Decision, judging: float) -> Decision:
        """Return a decision with the tokens, times and costs of screening and partial answer, and with the draft.

        ``judging`` is the time of judging the partial answer, in milliseconds.
        """
        count = answer.partial.count
        info = PartialAnswerInfo(
            tokens_held=count,
            tokens_dropped=count if decision.retrieve else 0,
            screening=self._screening_time,
            judging=judging,
            first_token=None if decision.retrieve else _milliseconds_since(self._start),
        )
        changes: dict[str, Any] = {"partial_answer": info, "cost": decision.cost}
        if decision.retrieve:  # only a cancelled answer is a cost of the decision
            changes["cost"] += Cost(model_calls=1, tokens_in=answer.partial.prompt_tokens, tokens_out=count)
        if item.screening is not None:
            changes["cost"] += item.screening.cost
            changes["warnings"] = tuple(dict.fromkeys((*item.screening.warnings, *decision.warnings)))
            if self.strategy.chooses_corpus and (self.search_task is not None or not decision.corpora):
                # The search has already used the corpora of the screening, or judging the answer failed.
                decision = decision.model_copy(update={"corpora": item.screening.corpora})
        # The retrieve arm may search for the draft's claims, but not every gate returns the draft.
        if decision.draft is None and isinstance(item.draft, Draft):
            changes["draft"] = item.draft
        return decision.with_retrieve(decision.retrieve, **changes)

    def _finish(self, item: _Input) -> Flow[None]:
        """Emit an input's decision. If it is to retrieve, wait for any search, whose error becomes the outcome."""
        if not isinstance(item.outcome, Decision):
            return
        yield from self.emit(item, item.outcome)
        if item.outcome.retrieve:
            item.answer = None  # it was cancelled
            if self.search_task is not None:
                yield from self._wait_for_search()
            if isinstance(item.passages, Exception):
                item.outcome = item.passages

    def _begin_search(self, inputs: Sequence[_Input]) -> Flow[None]:
        """Start the search unless it has started. If decisions choose the corpora, leave out undecided inputs."""
        if self.strategy.chooses_corpus:
            inputs = [item for item in inputs if item.latest_decision is not None]
        if self.search_task is None and inputs:
            self._search_inputs = inputs
            self.search_task = yield Start(self.search(inputs))

    def _wait_for_search(self) -> Flow[None]:
        """Wait for the search; with look first, start it if that has not happened yet."""
        if self.strategy.look_first is not None:
            yield from self._begin_search(self.inputs)
        if self.search_task is None or any(item.searched for item in self._search_inputs):
            return
        try:
            results: Sequence[Any] = yield self.search_task
        except Exception as error:  # only inputs that retrieve raise it
            if is_interrupt(error):
                raise
            results = [error] * len(self._search_inputs)
        for item, result in zip(self._search_inputs, results, strict=True):
            item.passages, item.searched = result, True

    def _passages(self, item: _Input) -> Sequence[FoundPassage] | Exception:
        if isinstance(item.passages, Exception):
            return item.passages
        try:
            return self.read_passages(item)
        except Exception as error:  # a retriever may return anything, and the arm may still be able to use it
            logger.warning("The passages could not be judged: %s", type(error).__name__)
            return []


class QuestionCall(RoutedCall[RoutedInput]):
    """A call with one question, whose gates are `Decider` objects.

    Args:
        strategy: What to consider before deciding.
        request: The question, or why it cannot be judged.
    """

    def __init__(self, strategy: Strategy, request: Request | Failed) -> None:
        super().__init__(strategy, [RoutedInput(request.question, request.threshold)])
        self.request = request

    def screen(self) -> Flow[Sequence[Decision | Exception]]:
        """Return a list with the question gate's decision about the only input."""
        gate: Decider = self.strategy.question_gate
        return (yield from gate.flow([self.request]))

    def judge(self, inputs: Sequence[RoutedInput]) -> Flow[Sequence[Decision | Exception]]:
        """Return a list with the decision that `Strategy.judge` makes about the question and its partial answer."""
        judge: Decider = self.strategy.judge
        return (yield from judge.flow([attach_draft(self.request, item.draft) for item in inputs]))


def _decide_by_question(screening: Decision, reason: str, **changes: Any) -> Decision:
    """Return the decision by the question alone; its reason also says why no partial answer was judged."""
    changes["reason"] = f"{screening.reason} {reason}".strip()
    return screening.model_copy(update=changes)


def _milliseconds_since(start: float) -> float:
    return (time.perf_counter() - start) * 1_000
