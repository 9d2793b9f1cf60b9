"""What gates share that were trained on a model: they are read once, and refuse what another model made."""

from __future__ import annotations

import os
from typing import Any, ClassVar, Self

from pydantic import Field, PrivateAttr, SkipValidation, model_validator

from rgate_integrations.errors import ModelLoadError
from rgate_integrations.gates.artifacts import SavedGate
from rgate_integrations.gates.base import Gate
from rgate_integrations.gates.evidence.base import expand_specs
from rgate_integrations.gates.folder import CONFIG, read_gate
from rgate_integrations.runtime.arrays import Float32Array
from rgate_integrations.runtime.files import find_folder


class TrainedGate(Gate):
    """A gate whose weights are in a folder.

    Attributes:
        artifact: Folder or Hub id of a saved gate, or the name of a shipped one.
        trained: What is in it; read once, when the gate is made.
        threshold: The saved gate's, unless given.
        proxy: The model it was trained on, unless given: the same model may have another name or folder here.
        kind: What the folder must hold.
    """

    kind: ClassVar[type[SavedGate]]
    argument: ClassVar[str] = "artifact"

    artifact: str
    trained: SkipValidation[SavedGate] = Field(exclude=True, repr=False)

    @model_validator(mode="before")
    @classmethod
    def _read(cls, values: Any) -> Any:
        if not isinstance(values, dict) or not isinstance(values.get("artifact"), str):
            return values
        trained = values.get("trained") or read_gate(values["artifact"])
        if not isinstance(trained, cls.kind):
            raise ModelLoadError(
                f"The gate in {values['artifact']!r} cannot be read: its method is {trained.method[:40]!r}, not "
                f"{cls.info.name!r}.",
                hint=f"Load it by its folder alone: load_gate({values['artifact']!r}).",
            )
        return {"threshold": trained.threshold, "proxy": trained.base_model, **values, "trained": trained}

    @model_validator(mode="after")
    def _under_the_same_prompts(self) -> Self:
        check_prompts(self, self.trained, self.artifact)
        return self

    def replace(self, **parameters: Any) -> Self:
        """Return a copy with other parameters; one with another artefact reads it."""
        if "artifact" in parameters:
            parameters = {"trained": None, **parameters}
        return super().replace(**parameters)

    def check_states(self, states: Float32Array, shape: tuple[int, ...], base_model: str = "") -> None:
        """Refuse hidden states of another shape than the weights that they meet.

        Args:
            states: The states.
            shape: That of the weights.
            base_model: The model that they were trained on; the gate's own unless given.

        Raises:
            ModelLoadError: They are of another model.
        """
        if states.shape != shape:
            base = base_model or self.trained.base_model
            raise ModelLoadError(
                f"The gate {self.artifact!r} was trained on {base!r} (states of shape {shape}), but this model "
                f"gives {states.shape}.",
                hint=f"Load it with proxy={base!r}, or train a gate for this model.",
            )


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
            folder = find_folder(self.adapter)
            if os.path.isfile(folder / CONFIG):
                self._saved = read_gate(folder)

    @property
    def trained(self) -> SavedGate | None:
        """What the adapter's folder says, if it says something."""
        return self._saved


def check_prompts(gate: Gate, saved: SavedGate, name: str) -> None:
    """Refuse a gate that was saved under other prompts than it reads now.

    Raises:
        ModelLoadError: A prompt has changed since.
    """
    current = prompt_hashes(gate)
    for prompt, found in saved.prompts.items():
        if current.get(prompt) != found:
            raise ModelLoadError(
                f"The gate {name!r} was trained with another version of the prompt {prompt!r}, not the current one.",
                hint="Train or calibrate it again: its scores would mean nothing.",
            )


def prompt_hashes(gate: Gate) -> dict[str, str]:
    """Return name and hash of every prompt that a gate's evidence comes from."""
    found = {}
    for spec in expand_specs(gate.specs):
        prompt = getattr(spec, "prompt", None)
        if prompt is not None:
            found[prompt.name] = prompt.hash
    return found
