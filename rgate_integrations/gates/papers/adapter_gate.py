"""What gates with a LoRA adapter share: they refuse evidence that another model made than the adapter's own."""

from __future__ import annotations

import os
from typing import Any, Self

from pydantic import PrivateAttr

from rgate_integrations.artifacts.folder import CONFIG, read_gate
from rgate_integrations.artifacts.gate_file import SavedGate
from rgate_integrations.evidence.base import Evidence, EvidenceSpec
from rgate_integrations.gates.base import Gate
from rgate_integrations.gates.trained import check_model
from rgate_integrations.runtime.files import existing_folder


class AdapterGate(Gate):
    """A gate whose model may have an adapter.

    Attributes:
        adapter: Folder or Hub id of a LoRA adapter of the proxy, or None for zero-shot. What ``rgate train`` made
            says on which model, and a decision on another one fails.
    """

    adapter: str | None = None

    _saved: SavedGate | None = PrivateAttr(default=None)

    def model_post_init(self, context: Any) -> None:
        """Read once what the adapter was trained on; one from elsewhere does not say it."""
        if self.adapter is not None:
            folder = existing_folder(self.adapter)
            self._saved = read_gate(folder) if os.path.isfile(folder / CONFIG) else None

    def changed(self, **parameters: Any) -> Self:
        """Return a copy with other parameters; what the same adapter was trained on is known already."""
        copy = super().changed(**parameters)
        if copy.adapter == self.adapter:
            copy._saved = self._saved
        return copy

    def check_model(self, evidence: Evidence, spec: EvidenceSpec[Any]) -> tuple[str, ...]:
        """Check that a piece was computed with the model that the adapter was trained on; returns warnings.

        Raises:
            ModelLoadError: It was another model.
        """
        saved = self._saved
        if self.adapter is None or saved is None:
            return ()
        return check_model(self.adapter, saved.base_model, saved.fingerprint, evidence.made_by(spec))
