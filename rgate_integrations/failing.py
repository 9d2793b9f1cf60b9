"""The one place where a failure becomes a decision: to retrieve, and to say why."""

from __future__ import annotations

import logging

from rgate_integrations.decision import Decision, Failure
from rgate_integrations.errors import InvalidQuestionError

_log = logging.getLogger("rgate_integrations")


def retrieve_instead(
    error: Exception, *, question: str = "", threshold: float = 0.5, gate: str = ""
) -> Decision:
    """Return the safe decision for a question that could not be judged, and log why.

    Args:
        error: What went wrong.
        question: The question, as far as it could be read.
        threshold: What P(known) would have been compared with.
        gate: Name of the gate.
    """
    failure = Failure.of(error)
    if isinstance(error, InvalidQuestionError):
        problem = "There is nothing to judge"
    else:
        problem = "The gate failed"
        _log.warning("%s %r retrieves: %s: %s", problem, gate, failure.type, failure.message)
    return Decision(
        question=question,
        retrieve=True,
        p_known=0.0,
        threshold=threshold,
        reason=f"{problem}, so it retrieves: {failure.message}",
        gate=gate,
        error=failure,
    )
