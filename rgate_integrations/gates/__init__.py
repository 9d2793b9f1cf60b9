"""Gates: evidence in, P(known) out. Subclass `Gate` to write your own."""

from rgate_integrations.gates.base import Gate, GateInfo, Score

__all__ = ["Gate", "GateInfo", "Score"]
