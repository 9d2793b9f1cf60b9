"""Evidence: what gates look at. A new kind is one subclass of `EvidenceSpec`, a frozen dataclass."""

from rgate_integrations.gates.evidence.base import Context, Evidence, EvidenceSpec, Piece
from rgate_integrations.gates.evidence.model_outputs import DraftSpec

__all__ = ["Context", "DraftSpec", "Evidence", "EvidenceSpec", "Piece"]
