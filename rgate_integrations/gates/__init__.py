"""Gates: evidence in, P(known) out. `Gate` is what a gate of one's own is made from."""

from rgate_integrations.gates.base import Gate, GateInfo, Score

__all__ = ["Gate", "GateInfo", "Score"]
