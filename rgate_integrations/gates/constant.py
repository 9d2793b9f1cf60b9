"""Constant policies: always retrieve, never, or at random. The lines that every gate is compared with."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, ClassVar, Literal, Self

from pydantic import Field

from rgate_integrations.gates.base import Gate, GateInfo, Score, Specs
from rgate_integrations.gates.evidence.base import Evidence


class ConstantGate(Gate):
    """Always retrieve, never retrieve, or retrieve at random at a given rate, whatever the question.

    Attributes:
        policy: Which of the three.
        rate: Share of the questions to retrieve for, with ``policy="random"`` and the threshold 0.5.
        seed: Seed; the draw depends on it and on the question, so it is the same in any batch.
    """

    info: ClassVar[GateInfo] = GateInfo(
        "constant", "baseline: always, never, random", "nothing", "no", "none"
    )

    policy: Literal["always", "never", "random"] = "always"
    rate: float = Field(default=0.5, ge=0, le=1)
    seed: int = 0

    @classmethod
    def from_argument(cls, argument: str, load: Callable[[str], Gate], **options: Any) -> Self:
        """Read ``constant:always``, ``constant:never``, ``constant:random`` or ``constant:random:RATE``."""
        policy, _, rate = argument.partition(":")
        given = {"policy": policy, "rate": rate} if rate else {"policy": policy}
        return cls.model_validate({**given, **options})

    @property
    def specs(self) -> Specs:
        """Nothing."""
        return ()

    def score(self, evidence: Evidence) -> Score:
        """Score 0, 1, or a draw that is below 0.5 with the given rate."""
        if self.policy != "random":
            return Score(float(self.policy == "never"), f"This gate {self.policy} retrieves.")
        digest = hashlib.sha256(f"{self.seed}|{evidence.question}".encode()).digest()
        draw = int.from_bytes(digest[:7], "big") / 2**56
        reason = f"Drawn at random: retrieves for {self.rate:.0%} of the questions."
        if draw < self.rate:
            return Score(0.5 * draw / self.rate, reason)
        return Score(0.5 + 0.5 * (draw - self.rate) / (1 - self.rate), reason)
