"""What gates with a LoRA adapter share: they refuse evidence that another model made than the adapter's own."""

from __future__ import annotations

from typing import Any, Self

from pydantic import PrivateAttr

from rgate_integrations.artifacts.folder import TrainedOn, check_fingerprint, trained_on
from rgate_integrations.evidence.base import Evidence, EvidenceSpec
from rgate_integrations.gates.base import Gate


class AdapterGate(Gate):
    """A gate whose model may have an adapter.

    Attributes:
        adapter: Folder or Hub id of a LoRA adapter of the proxy, or None for zero-shot. What ``rgate train`` made
            says on which model, and a decision on another one fails.
    """

    adapter: str | None = None

    _trained_on: TrainedOn | None = PrivateAttr(default=None)

    def model_post_init(self, context: Any) -> None:
        """Read once what the adapter was trained on."""
        if self.adapter is not None:
            self._trained_on = trained_on(self.adapter)

    def changed(self, **parameters: Any) -> Self:
        """Return a copy with other parameters; what the same adapter was trained on is known already."""
        copy = super().changed(**parameters)
        if copy.adapter == self.adapter:
            copy._trained_on = self._trained_on
        return copy

    def check_model(self, evidence: Evidence, spec: EvidenceSpec[Any]) -> tuple[str, ...]:
        """Check that a piece was computed with the model that the adapter was trained on; returns warnings.

        Raises:
            ModelLoadError: It was another model.
        """
        if self.adapter is None or self._trained_on is None:
            return ()
        used = evidence.made_by(spec)
        return check_fingerprint(self.adapter, self._trained_on, used.model, used.fingerprint)
