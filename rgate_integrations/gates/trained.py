"""What gates share that were trained on a model: they are read once, and refuse what another model made."""

from __future__ import annotations

from typing import Any, ClassVar, Self

from pydantic import Field, SkipValidation, model_validator

from rgate_integrations.errors import ModelLoadError
from rgate_integrations.gates.artifacts.folder import read_gate
from rgate_integrations.gates.artifacts.gate_file import SavedGate
from rgate_integrations.gates.base import Gate
from rgate_integrations.gates.evidence.base import Evidence, EvidenceSpec, MadeBy, expand_specs
from rgate_integrations.runtime.arrays import Float32Array


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
        trained = values.get("trained")
        if not isinstance(trained, SavedGate):
            trained = read_gate(values["artifact"])
        if not isinstance(trained, cls.kind):
            raise ModelLoadError(
                f"The gate in {values['artifact']!r} cannot be read: its method is {trained.method[:40]!r}, not "
                f"{cls.info.name!r}.",
                hint=f"Load it by its folder alone: load_gate({values['artifact']!r}).",
            )
        given = {"threshold": trained.threshold, "proxy": trained.base_model, **values}
        return cls.complete({**given, "trained": trained})

    @classmethod
    def complete(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Return the parameters with what else is to be read; by default as they are."""
        return values

    @model_validator(mode="after")
    def _under_the_same_prompts(self) -> Self:
        check_prompts(self, self.trained, self.artifact)
        return self

    def changed(self, **parameters: Any) -> Self:
        """Return a copy with other parameters; one with another artefact reads it."""
        if "artifact" in parameters:
            parameters = {"trained": None, **parameters}
        return super().changed(**parameters)

    def check_states(
        self, evidence: Evidence, spec: EvidenceSpec[Any], states: Float32Array, shape: tuple[int, ...]
    ) -> tuple[str, ...]:
        """Check that hidden states are of the model that the gate was trained on; returns warnings.

        Args:
            evidence: What the states are a part of.
            spec: By which they were asked for.
            states: The states.
            shape: The shape of the weights that they meet.

        Raises:
            ModelLoadError: They are of another model.
        """
        used = evidence.made_by(spec)
        base, fingerprint = self.trained.base_model, self.trained.fingerprint
        warnings = check_model(self.artifact, base, fingerprint, used)
        if states.shape != shape:
            raise ModelLoadError(
                f"The gate {self.artifact!r} was trained on {base!r} (states of shape {shape}), but {used.model!r} "
                f"gives {states.shape}.",
                hint=f"Load it with proxy={base!r}, or train a gate for this model.",
            )
        return warnings


def check_model(gate: str, base_model: str, fingerprint: str, used: MadeBy) -> tuple[str, ...]:
    """Refuse evidence of another model than the one that a gate was trained on.

    Args:
        gate: Name or folder of the gate, for the message.
        base_model: What it was trained on.
        fingerprint: That model's fingerprint; empty if unknown, and then nothing can be checked.
        used: The model that made the evidence.

    Returns:
        A warning for the decision if the used model's weights are unknown: that does not make them the same.

    Raises:
        ModelLoadError: The fingerprints differ.
    """
    if not fingerprint or fingerprint == used.fingerprint:
        return ()
    if not used.fingerprint:
        return (
            f"Whether {used.model!r} is the model that the gate {gate!r} was trained on cannot be checked.",
        )
    raise ModelLoadError(
        f"The gate {gate!r} was trained on {base_model!r} (weights {fingerprint}), but {used.model!r} has the "
        f"weights {used.fingerprint}.",
        hint=f"Load it with proxy={base_model!r}, or train a gate for this model.",
    )


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
