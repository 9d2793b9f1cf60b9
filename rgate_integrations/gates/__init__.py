"""Gates: each declares its evidence and scores it. One file a method."""

from rgate_integrations.gates.base import Gate, GateInfo, Score
from rgate_integrations.gates.registry import list_gates

__all__ = ["Gate", "GateInfo", "Score", "list_gates"]
