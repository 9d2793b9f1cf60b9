"""`Decider`, which every adapter uses: a decision for each request, even if something fails."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self, TypeAlias, Unpack

from rgate_integrations.decision import Decision, Failure, Override, Request, RequestFields
from rgate_integrations.engine.follow_ups import MIN_P_KNOWN_IF_REFERS_BACK, missing_context
from rgate_integrations.errors import ConfigurationError, InvalidQuestionError, RefusalError, RGateError
from rgate_integrations.gates.rules import RuleOptions, Rules
from rgate_integrations.runtime.flow import Flow, arun, run
from rgate_integrations.runtime.text import logger, redact

OnError: TypeAlias = Literal["retrieve", "raise"]


@dataclass(frozen=True)
class Failed:
    """Takes the place of a request that has failed before it reaches the gate, such as an invalid question.

    Attributes:
        error: What went wrong.
        question: The question, if known.
        threshold: The caller's threshold; None for the gate's.
    """

    error: Exception
    question: str = ""
    threshold: float | None = None


class Decider(ABC):
    """Decides whether to retrieve for each request.

    `DecisionEngine` runs a `Gate`, and `OwnGate` wraps any other object of a user.

    Attributes:
        on_error: ``"retrieve"`` turns a failure into a decision to retrieve; ``"raise"`` raises it.
        knows_follow_ups: Whether a gate that reads history was trained on conversations, so that an incomplete
            follow-up gets a low P(known).
    """

    on_error: OnError = "retrieve"
    knows_follow_ups: ClassVar[bool] = False

    @property
    @abstractmethod
    def name(self) -> str:
        """Name of the gate, as decisions and logs show it."""

    @property
    @abstractmethod
    def threshold(self) -> float:
        """The gate's threshold: retrieve iff p_known is below it."""

    @property
    @abstractmethod
    def reads_history(self) -> bool:
        """Whether the gate reads the turns before a question."""

    @property
    def corpora(self) -> tuple[str, ...]:
        """Names of the corpora among which its decisions choose; empty if there are none, or they are unknown."""
        return ()

    @abstractmethod
    def judge(self, requests: Sequence[Request]) -> Flow[Sequence[Decision | Exception]]:
        """Return a flow whose result is one decision or exception per request, in order; `outcomes` runs it.

        If the flow itself raises, all requests fail with that exception.
        """

    @abstractmethod
    def answer_gate(self) -> Decider | None:
        """Return the decider that judges partial answers: this one or another; None if there is none."""

    def question_gate(self) -> Decider | None:
        """Return the decider that, with answer first, judges the question before the LLM starts; None for none."""
        return None

    @abstractmethod
    def decides_like(self, other: Decider) -> bool:
        """Return whether another decider would decide the same, so that its decisions can be reused."""

    def for_llm(self, name: str, name_source: str = "") -> Self:
        """Return a copy that judges what this LLM knows, or itself if that changes nothing.

        Args:
            name: Name of the LLM, or folder of its measured ability; may be empty.
            name_source: Where the name was detected; empty if the user gave it. A name that the user gave is never
                replaced by a detected one.

        Raises:
            ConfigurationError: The name is a path that does not exist.
            ModelLoadError: The measured ability cannot be read.
        """
        return self

    def with_rules(self, **rules: Unpack[RuleOptions]) -> Self:
        """Return a copy with other rules, or itself if they change nothing.

        Each of ``always=`` and ``never=`` replaces the gate's rules of that name, unless it is missing or empty.

        Raises:
            ConfigurationError: The gate accepts no rules, or a rule is invalid.
        """
        if Rules.coerce(**rules) != Rules():
            raise ConfigurationError(
                f"The gate {self.name!r} accepts no rules (always=, never=).",
                hint="Omit always= and never=, or apply your rules in the decide_batch of your gate.",
            )
        return self

    def without_rules(self) -> Self:
        """Return a copy without rules, or itself if it has none."""
        return self

    def decide(self, question: str | Request, **fields: Unpack[RequestFields]) -> Decision:
        """Return the decision for one question.

        Args:
            question: The question, or a `Request`.
            **fields: ``history``, ``draft``, ``metadata``, ``threshold``, ``popularity`` and ``timeout`` of the
                `Request`.

        Raises:
            InvalidQuestionError: The question is empty, or not a string.
            EvidenceError: The draft, history, metadata or popularity has the wrong type.
            ConfigurationError: The threshold is not a finite number of at least 0, or the timeout is not above 0.
            Exception: The gate failed, and ``on_error`` is ``"raise"``.
        """
        return run(self.flow([Request.coerce(question, **fields)]))[0]

    async def adecide(self, question: str | Request, **fields: Unpack[RequestFields]) -> Decision:
        """Return the decision for one question without blocking the event loop; see `decide`."""
        return (await arun(self.flow([Request.coerce(question, **fields)])))[0]

    def decide_batch(self, requests: Iterable[str | Request]) -> list[Decision]:
        """Return the decisions for a batch of questions.

        If a question is invalid, or the gate fails on it, its decision retrieves and has an ``error``. The other
        questions are decided as usual, unless the gate fails altogether, for example because it cannot load a model.

        Args:
            requests: The questions, each a string or a `Request`.

        Returns:
            One decision per question, in order.

        Raises:
            ConfigurationError: ``requests`` is a single question, not a list.
            Exception: The first failure, if ``on_error`` is ``"raise"``.
        """
        return run(self.flow(requests))

    async def adecide_batch(self, requests: Iterable[str | Request]) -> list[Decision]:
        """Decide for a batch without blocking the event loop; see `decide_batch`."""
        return await arun(self.flow(requests))

    def flow(self, items: Iterable[str | Request | Failed]) -> Flow[list[Decision]]:
        """Return a decision for each item, in order. A `Failed` stands for a request that failed earlier.

        A failure becomes a decision to retrieve, unless ``on_error`` is ``"raise"``; then the first one is raised.

        Raises:
            ConfigurationError: ``items`` is a single question, not a list.
        """
        outcomes: list[Any] = yield from self.outcomes(items)
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                raise outcome
        return outcomes

    def outcomes(self, items: Iterable[str | Request | Failed]) -> Flow[list[Decision | Exception]]:
        """Return what `flow` returns. An error that `flow` would raise takes the place of its question's decision.

        Raises:
            ConfigurationError: ``items`` is a single question, not a list.
        """
        # A string is iterable, so each of its characters would be judged as a question.
        if isinstance(items, str | Request):
            raise ConfigurationError(
                f"decide_batch takes a list of questions, not {type(items).__name__}.",
                hint="Use decide() for one question.",
            )
        checked = [read_item(item) for item in items]
        requests = [item for item in checked if isinstance(item, Request)]
        outcomes: Sequence[Decision | Exception] = []
        try:
            if requests:
                found = yield from self.judge(requests)
                # If their number is wrong, it is not known which outcome belongs to which request.
                outcomes = [outcome for _, outcome in zip(requests, found, strict=True)]
        except Exception as error:  # a gate may be a user's code, which may raise anything
            outcomes = [error] * len(requests)
        # Merge the outcomes with the items that had already failed, in the caller's order.
        remaining = iter(outcomes)
        merged: list[Decision | Exception] = []
        judged = []
        for item in checked:
            decision = item.error if isinstance(item, Failed) else next(remaining)
            if isinstance(decision, RefusalError) or (
                isinstance(decision, Exception) and self.on_error != "raise"
            ):
                threshold = self.threshold if item.threshold is None else item.threshold
                decision = fallback_decision(
                    decision, question=item.question, threshold=threshold, gate=self.name
                )
            # An item that failed earlier is not the gate's failure.
            if isinstance(item, Request) and isinstance(decision, Decision):
                decision = self._check_context(item, decision)
                judged.append(decision)
            merged.append(decision)
        self._log_failures(requests, judged)
        return merged

    def _check_context(self, request: Request, decision: Decision) -> Decision:
        """Return the decision, changed to retrieve if the question needs earlier turns that the gate did not read."""
        if decision.error is not None:  # it retrieves; a gate that failed may not even know what it reads
            return decision
        missing = missing_context(request, reads_history=self.reads_history)
        override = decision.override
        # "Thanks for that!" refers back, but needs no earlier turn. A gate trained on conversations can tell.
        is_sure = (
            self.knows_follow_ups and self.reads_history and decision.p_known >= MIN_P_KNOWN_IF_REFERS_BACK
        )
        is_settled = is_sure if override is None else override.retrieve
        if not missing or is_settled:
            return decision
        return decision.with_retrieve(
            True,
            outcome=None,
            override=Override(retrieve=True, reason=missing),
            reason=f"{missing} {decision.reason}".strip(),
        )

    def _log_failures(self, requests: Sequence[Request], decisions: Sequence[Decision]) -> None:
        """Log once per call how many decisions failed, and the first error without the users' text."""
        failures = [decision.error for decision in decisions if decision.error is not None]
        if not failures:
            return
        # Libraries quote their input in errors, and questions do not belong in a log.
        private: list[str] = []
        for request in requests:
            private += [request.question, *request.history, *_list_texts(request.metadata)]
            if request.draft is not None:
                private.append(request.draft.text)
        logger.warning(
            "The gate %r failed for %d of %d questions, so it retrieves for them: %s: %s",
            self.name,
            len(failures),
            len(decisions),
            failures[0].type,
            redact(RGateError(failures[0].message, hint=failures[0].hint), *private),
        )


def _list_texts(value: object) -> list[str]:
    """Return what objects in nested mappings and collections say as text, as far as they can be printed."""
    texts: list[str] = []
    rest, seen = [value], dict[int, object]()  # the objects are kept, so that no other gets the same id
    while rest:
        value = rest.pop()
        with suppress(Exception):  # an application's object may raise anything
            if isinstance(value, Mapping | list | tuple | set | frozenset):
                if id(value) not in seen:  # it may contain itself
                    seen[id(value)] = value
                    rest += [*value.keys(), *value.values()] if isinstance(value, Mapping) else value
                continue
        for write in (str, repr):
            with suppress(Exception):
                texts.append(write(value))
    return texts


def fallback_decision(
    error: Exception, *, question: str = "", threshold: float = 0.5, gate: str = ""
) -> Decision:
    """Return the fallback decision for a question that could not be judged: retrieve, and say why.

    If the LLM does not know, by its own words, nothing has failed: an override says so.

    Args:
        error: What went wrong.
        question: The question, if it could be read.
        threshold: The threshold that would have applied, if known.
        gate: Name of the gate.
    """
    failure = Failure.from_error(error)
    decision = Decision(question=question, retrieve=True, p_known=0.0, threshold=threshold, gate=gate)
    if isinstance(error, RefusalError):
        override = Override(retrieve=True, reason=failure.message)
        return decision.model_copy(update={"override": override, "reason": failure.message})
    problem = "The question is invalid" if isinstance(error, InvalidQuestionError) else "The gate failed"
    reason = f"{problem}, so it retrieves: {failure.message}"
    return decision.model_copy(update={"error": failure, "reason": reason})


def read_item(question: str | Request | Failed, **fields: Unpack[RequestFields]) -> Request | Failed:
    """Return a question as a request, or as `Failed` if it is invalid, so that it does not fail its batch."""
    try:
        return question if isinstance(question, Failed) else Request.coerce(question, **fields)
    except InvalidQuestionError as error:
        return Failed(error)
    except RGateError as error:  # the question can still be searched for
        return Failed(error, question.question if isinstance(question, Request) else str(question))


@dataclass(frozen=True)
class BoundDecision:
    """A decision that travels with a request, so that no component decides again.

    Attributes:
        question: The question in the user's words, which the decision's question may rephrase; None if the decision
            applies to any question.
        decision: The decision.
        gate: The gate that decided, without its adjustment to an LLM.
        llm: The LLM that writes drafts for that gate, if any.
        threshold: The caller's threshold; None for the gate's.
        search_texts: The texts that are searched for instead of the question; see `list_search_texts`.
        for_any: Whether the decision also applies to other questions, such as the question in other words.
    """

    question: str | None
    decision: Decision
    gate: Any
    llm: Any = None
    threshold: float | None = None
    search_texts: Sequence[str] = ()
    for_any: bool = False

    def concerns(self, question: str, llm: Any) -> bool:
        """Return whether the decision applies to this question, and was made with the drafts of this LLM.

        If ``llm`` is None, only the questions are compared.
        """
        if llm is not None and llm is not self.llm:
            return False
        if self.question is None or self.for_any:
            return True
        forms = (self.question, self.decision.question, *self.search_texts)
        return any(form.strip() == question.strip() for form in forms)

    def about(self, question: str) -> Decision:
        """Return the decision for this question, for which `concerns` must be True.

        If it was made about the question in other words, the result is a copy with this question. If `question` is
        None, it may have been made about another question. Then the copy has no draft, because that answers the other
        question.
        """
        if question.strip() in (self.decision.question.strip(), (self.question or "").strip()):
            return self.decision
        draft = None if self.question is None else self.decision.draft
        return self.decision.model_copy(update={"question": question, "draft": draft})

    def repeats(self, threshold: float | None, *gates: Decider) -> bool:
        """Return whether one of these gates would decide the same again at this threshold, or with less evidence.

        Args:
            threshold: The threshold; None ignores it.
            *gates: A gate without and with its adjustment to an LLM. The latter may be like a gate that the user
                adjusted to that LLM by name.
        """
        if threshold not in (None, self.threshold):
            return False
        if any(gate.decides_like(self.gate) for gate in gates):
            return True
        # A gate that has judged a draft has seen more than the gate that reads its questions.
        question_gate = self.gate.question_gate() if isinstance(self.gate, Decider) else None
        return question_gate is not None and any(gate.decides_like(question_gate) for gate in gates)
