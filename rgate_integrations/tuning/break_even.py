"""From which retrieval rate on a gate costs more time than it saves."""

from __future__ import annotations

from dataclasses import dataclass

from rgate_integrations.errors import ConfigurationError


@dataclass(frozen=True)
class StageTimes:
    """Milliseconds a question of each stage.

    Attributes:
        gate: The decision, with all evidence.
        direct: An answer without retrieval.
        rag: An answer with passages, without the search itself.
        search: The search.
    """

    gate: float
    direct: float
    rag: float
    search: float = 0.0

    def __post_init__(self) -> None:
        if min(self.gate, self.direct, self.rag, self.search) < 0:
            raise ConfigurationError("A stage cannot take less than 0 milliseconds.")

    def always(self) -> float:
        """Return the mean time without a gate: every question is retrieved for."""
        return self.search + self.rag

    def gated(self, rate: float) -> float:
        """Return the mean time with the gate, when a share ``rate`` in [0, 1] of the questions is retrieved for."""
        if not 0 <= rate <= 1:
            raise ConfigurationError(f"A retrieval rate lies in [0, 1], {rate} does not.")
        return self.gate + rate * (self.search + self.rag) + (1 - rate) * self.direct

    def break_even(self) -> float:
        """Return the retrieval rate from which on the gate no longer pays, clipped to [0, 1].

        The IK paper's stage times (table 6: 3.7 ms for the score, 8.3 for 32 tokens, 18.2 without and 78.4 with
        retrieval) give 0.80 when the score reads 32 tokens and 0.94 when it reads the question alone.
        """
        at_none, at_all = self.gated(0.0), self.gated(1.0)
        if at_all <= at_none:  # more retrieval does not cost more: the gate pays everywhere or nowhere
            return 1.0 if at_none <= self.always() else 0.0
        return min(max((self.always() - at_none) / (at_all - at_none), 0.0), 1.0)
