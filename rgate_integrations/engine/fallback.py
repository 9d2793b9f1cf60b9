"""The one place where a failure becomes a decision: to retrieve, and to say why."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

from rgate_integrations.decision import Decision, Failure
from rgate_integrations.errors import InvalidQuestionError
from rgate_integrations.runtime.text import redact

_log = logging.getLogger("rgate_integrations")


def fallback_decision(
    error: Exception, *, question: str = "", threshold: float = 0.5, gate: str = ""
) -> Decision:
    """Return the safe decision for a question that could not be judged.

    Args:
        error: What went wrong.
        question: The question, as far as it could be read.
        threshold: What P(known) would have been compared with.
        gate: Name of the gate.
    """
    failure = Failure.of(error)
    problem = "The gate failed"
    if isinstance(error, InvalidQuestionError):
        problem = "There is nothing to judge"
    return Decision(
        question=question,
        retrieve=True,
        p_known=0.0,
        threshold=threshold,
        reason=f"{problem}, so it retrieves: {failure.message}",
        gate=gate,
        error=failure,
    )


def explain_threshold(reason: str, p_known: float, threshold: float, *, is_turned: bool) -> str:
    """Return a gate's reason, and what the caller's threshold makes of it if that turns the decision.

    Args:
        reason: The gate's reason, for its own threshold.
        p_known: P(known).
        threshold: The caller's threshold.
        is_turned: Whether the gate alone would have decided otherwise.
    """
    if not is_turned:
        return reason
    turned = f"But P(known) is {p_known:.2f}, and the caller's threshold {threshold:.2f}."
    return f"{reason} {turned}".strip()


def log_failures(decisions: Sequence[Decision], gate: str, texts: Iterable[str] = ()) -> None:
    """Log once for a call how many of its decisions are such, and what the first one's error is.

    Args:
        decisions: The decisions; their questions are not logged.
        gate: Name of the gate.
        texts: What else came with the questions and is not logged, such as the turns before them.
    """
    failures = []
    for decision in decisions:
        # A question that is none is the caller's error, and no failure of the gate.
        if decision.error is not None and decision.error.type != InvalidQuestionError.__name__:
            failures.append(decision.error)
    if failures:
        _log.warning(
            "The gate %r failed for %d of %d questions and retrieves: %s: %s",
            gate,
            len(failures),
            len(decisions),
            failures[0].type,
            redact(failures[0].message, *(decision.question for decision in decisions), *texts),
        )
