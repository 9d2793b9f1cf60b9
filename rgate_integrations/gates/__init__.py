"""Gates: each declares its evidence and scores it. One file a method."""

from rgate_integrations.gates.base import GateInfo, Score

__all__ = ["GateInfo", "Score"]
