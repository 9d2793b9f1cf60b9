"""`Decider`: what every adapter asks. Requests in, decisions out, whatever goes wrong on the way."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self, TypeAlias, Unpack

from rgate_integrations.decision import Decision, Failure, Override, Request, RequestFields
from rgate_integrations.engine.follow_ups import MIN_P_KNOWN_IF_REFERS_BACK, missing_context
from rgate_integrations.errors import ConfigurationError, InvalidQuestionError, RGateError
from rgate_integrations.gates.rules import RuleOptions, Rules
from rgate_integrations.runtime.flow import Flow, arun, run
from rgate_integrations.runtime.text import redact

_log = logging.getLogger("rgate_integrations")

OnError: TypeAlias = Literal["retrieve", "raise"]


@dataclass(frozen=True)
class Failed:
    """A question that cannot be judged, and why; it stands for a request among others.

    Attributes:
        error: What went wrong.
        question: The question, as far as it is known.
        threshold: The threshold that the caller gave; None for the gate's own.
    """

    error: Exception
    question: str = ""
    threshold: float | None = None


class Decider(ABC):
    """Decides for each request whether to retrieve.

    There are two: `DecisionEngine` for the gates of this package, and `OwnGate` around an object of the user's.

    Attributes:
        on_error: ``"retrieve"``: a failure yields a decision that retrieves and says why; ``"raise"``: it is raised.
    """

    on_error: OnError = "retrieve"

    @property
    @abstractmethod
    def name(self) -> str:
        """Name of the gate, for decisions and logs."""

    @property
    @abstractmethod
    def threshold(self) -> float:
        """The gate's threshold: retrieve iff p_known is below it."""

    @property
    @abstractmethod
    def reads_history(self) -> bool:
        """Whether the gate judges a question in the light of the turns before it."""

    @property
    def knows_follow_ups(self) -> bool:
        """Whether the gate was trained on turns, so that its P(known) of a follow-up alone is low."""
        return False

    @property
    def corpora(self) -> tuple[str, ...]:
        """Names of the corpora that its decisions choose among, as far as they are known here."""
        return ()

    @abstractmethod
    def judge(self, requests: Sequence[Request]) -> Flow[Sequence[Decision | Exception]]:
        """Return a decision for each request, in order, or why there is none; may raise what concerns all."""

    @abstractmethod
    def answer_gate(self) -> Decider | None:
        """Return what judges begun answers: itself, or what belongs to it; None if it reads questions alone."""

    @abstractmethod
    def question_gate(self) -> Decider | None:
        """Return what reads the question alone and belongs to it; None without one."""

    @abstractmethod
    def decides_like(self, other: Decider) -> bool:
        """Return whether another one would decide the same, so that its decision may be reused."""

    def for_llm(self, name: str, name_source: str = "") -> Self:
        """Return a copy that judges what an LLM knows; itself where that changes nothing.

        Args:
            name: Name of the LLM; empty for none.
            name_source: Where the name was found; empty if the user gave it. A given name overrides a found one.
        """
        return self

    def with_rules(self, **rules: Unpack[RuleOptions]) -> Self:
        """Return a copy with rules in place of its own ``always=`` or ``never=``; itself without any.

        Raises:
            ConfigurationError: It takes no rules, or a rule is none.
        """
        if Rules.coerce(**rules) != Rules():
            raise ConfigurationError(
                f"{self.name} takes no rules.", hint="Apply them in its own decide_batch."
            )
        return self

    def decide(self, question: str | Request, **fields: Unpack[RequestFields]) -> Decision:
        """Decide for one question.

        Args:
            question: The question, or a `Request`.
            **fields: What is known beside the question: ``history``, ``draft``, ``metadata``, ``threshold``,
                ``popularity`` and ``timeout``; see `Request`.

        Raises:
            InvalidQuestionError: The question is empty, not a string, or holds NUL bytes.
            EvidenceError: A field has the wrong type.
            ConfigurationError: The threshold is not a number of at least 0, or the timeout not one above 0.
        """
        return run(self.flow([Request.coerce(question, **fields)]))[0]

    async def adecide(self, question: str | Request, **fields: Unpack[RequestFields]) -> Decision:
        """Decide for one question without blocking the event loop; see `decide`."""
        return (await arun(self.flow([Request.coerce(question, **fields)])))[0]

    def decide_batch(self, requests: Iterable[str | Request]) -> list[Decision]:
        """Decide for a batch of questions.

        A bad question or a failing model affects its own item alone: that decision retrieves and carries
        the `error` (with ``on_error="raise"`` the first such error is raised).

        Args:
            requests: The questions, each a string or a `Request`.

        Returns:
            One decision a question, in order.
        """
        return run(self.flow(_as_list(requests)))

    async def adecide_batch(self, requests: Iterable[str | Request]) -> list[Decision]:
        """Decide for a batch without blocking the event loop; see `decide_batch`."""
        return await arun(self.flow(_as_list(requests)))

    def flow(self, items: Sequence[str | Request | Failed]) -> Flow[list[Decision]]:
        """Decide for questions of which some may have failed already.

        The one place where a failure of any kind becomes a decision to retrieve.
        """
        checked = [read_item(item) for item in items]
        requests = [each for each in checked if isinstance(each, Request)]
        outcomes: Sequence[Decision | Exception]
        try:
            outcomes = (yield from self.judge(requests)) if requests else []
            if len(outcomes) != len(requests):
                raise ConfigurationError(
                    f"The gate {self.name!r} returned {len(outcomes)} decisions for {len(requests)} questions."
                )
        except Exception as error:  # a gate may be any user's code, so any error may come
            outcomes = [error] * len(requests)
        remaining = iter(outcomes)
        decisions, judged = [], []
        for each in checked:
            decision = each.error if isinstance(each, Failed) else next(remaining)
            if isinstance(decision, Exception):
                if self.on_error == "raise":
                    raise decision
                threshold = self.threshold if each.threshold is None else each.threshold
                decision = fallback_decision(
                    decision, question=each.question, threshold=threshold, gate=self.name
                )
            if isinstance(each, Request):  # what failed before is not the gate's failure
                decision = self._check_context(each, decision)
                judged.append(decision)
            decisions.append(decision)
        self._log_failures(requests, judged)
        return decisions

    def _check_context(self, request: Request, decision: Decision) -> Decision:
        """Retrieve for a question that cannot be understood without turns that the gate does not read."""
        missing = missing_context(request, reads_history=self.reads_history)
        is_retrieved = decision.override is not None and decision.override.retrieve
        # "Thanks for that!" rests on no earlier turn; its words alone do not say so.
        is_understood = self.knows_follow_ups and decision.override is None
        is_understood = is_understood and decision.p_known >= MIN_P_KNOWN_IF_REFERS_BACK
        if not missing or is_retrieved or is_understood or decision.error is not None:
            return decision
        override = Override(retrieve=True, reason=missing)
        reason = f"{missing} {decision.reason}".strip()
        return decision.with_retrieve(True, override=override, reason=reason)

    def _log_failures(self, requests: Sequence[Request], decisions: Sequence[Decision]) -> None:
        """Log once for a call how many of its decisions failed, and the first error without the users' words."""
        failures = [each.error for each in decisions if each.error is not None]
        if not failures:
            return
        private: list[str] = []
        for request in requests:
            private += [request.question, *request.history]
            if request.draft is not None:
                private.append(request.draft.text)
        _log.warning(
            "The gate %r failed for %d of %d questions and retrieves: %s: %s",
            self.name,
            len(failures),
            len(decisions),
            failures[0].type,
            redact(failures[0].message, *private),
        )


def fallback_decision(
    error: Exception, *, question: str = "", threshold: float = 0.5, gate: str = ""
) -> Decision:
    """Return the safe decision for a question that could not be judged: to retrieve, and to say why.

    Args:
        error: What went wrong.
        question: The question, as far as it could be read.
        threshold: What P(known) would have been compared with.
        gate: Name of the gate.
    """
    failure = Failure.from_error(error)
    problem = "There is nothing to judge" if isinstance(error, InvalidQuestionError) else "The gate failed"
    return Decision(
        question=question,
        retrieve=True,
        p_known=0.0,
        threshold=threshold,
        reason=f"{problem}, so it retrieves: {failure.message}",
        gate=gate,
        error=failure,
    )


def _as_list(requests: Iterable[str | Request]) -> list[str | Request]:
    if isinstance(requests, str | Request):
        raise ConfigurationError("decide_batch takes a list of questions.", hint="Use decide() for one.")
    return list(requests)


def read_item(question: str | Request | Failed, **fields: Unpack[RequestFields]) -> Request | Failed:
    """Return a question as a request; what is not one is an error of its own, not of its batch."""
    if isinstance(question, Failed):
        return question
    try:
        return Request.coerce(question, **fields)
    except RGateError as error:
        return Failed(error)


@dataclass(frozen=True)
class BoundDecision:
    """A decision that travels with a request, so that nothing in the request decides it again.

    Attributes:
        question: The question as the user put it; the decision has it as it was judged, perhaps condensed.
        decision: What was decided.
        gate: What decided, as the user gave it.
        llm: The LLM that writes drafts for that gate; None without one.
        threshold: The threshold that the caller gave; None for the gate's own.
    """

    question: str
    decision: Decision
    gate: Any
    llm: Any = None
    threshold: float | None = None

    def concerns(self, question: str, llm: Any) -> bool:
        """Return whether it is about this question, with a draft by this LLM; by any LLM, or none, when None."""
        if llm is not None and llm is not self.llm:
            return False
        return question.strip() in (self.question.strip(), self.decision.question.strip())

    def repeats(self, gate: Decider, threshold: float | None) -> bool:
        """Return whether this gate would only repeat it, at the threshold that its caller gave."""
        return threshold in (None, self.threshold) and gate.decides_like(self.gate)
