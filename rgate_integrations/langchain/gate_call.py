"""One input of a `RetrievalGate` on its way to a decision."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rgate_integrations.decision import Draft, Request
from rgate_integrations.engine.decider import Failed, read_item
from rgate_integrations.langchain.questions import UserTurn
from rgate_integrations.langchain.runnable import Run


@dataclass
class GateCall:
    """One input of a `RetrievalGate`, and what is known of it so far.

    Attributes:
        run: The input and its run.
        threshold: The threshold that the caller gave.
        turn: The question; read first.
        draft: What is judged beside the question, or the error of what should have written it.
        error: Why the follow-up could not be condensed.
        result: The decision, or the exception that concerns this input.
    """

    run: Run
    threshold: float | None = None
    turn: UserTurn = field(default_factory=lambda: UserTurn(""))
    draft: Draft | Exception | None = None
    error: Exception | None = None
    result: Any = None

    def item(self) -> Request | Failed:
        """Return the request that the gate is asked about."""
        for error in (self.error, self.draft):
            if isinstance(error, Exception):
                return Failed(error, self.turn.question)
        return read_item(
            self.turn.question,
            history=self.turn.lines,
            draft=self.draft,  # type: ignore[arg-type]  # no exception
            metadata=self.run.config.get("metadata"),
            threshold=self.threshold,
        )
