"""Evidence: what gates look at. A new kind is one frozen dataclass with a ``compute`` method."""

from rgate_integrations.gates.evidence.base import Context, Evidence, EvidenceSpec, Piece
from rgate_integrations.gates.evidence.draft import DraftSpec

__all__ = ["Context", "DraftSpec", "Evidence", "EvidenceSpec", "Piece"]
