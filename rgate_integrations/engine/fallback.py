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
