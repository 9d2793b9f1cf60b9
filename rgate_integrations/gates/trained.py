"""Base classes of gates that can be trained on a model, and only work with that model; the linear probe is one."""

from __future__ import annotations

import os
from typing import Any, ClassVar, Self

import numpy as np
from pydantic import Field, PrivateAttr, SkipValidation, model_validator

from rgate_integrations.errors import ModelLoadError
from rgate_integrations.gates.artifacts import ProbeArtifact, SavedGate
from rgate_integrations.gates.base import Gate, GateInfo, Score, Specs
from rgate_integrations.gates.evidence.base import Evidence, expand_specs
from rgate_integrations.gates.evidence.model_outputs import DraftSpec, HiddenSpec
from rgate_integrations.gates.folder import CONFIG, read_gate
from rgate_integrations.gates.probability import sigmoid
from rgate_integrations.prompts import answer_prompt
from rgate_integrations.runtime.arrays import Float32Array
from rgate_integrations.runtime.files import find_folder


class TrainedGate(Gate):
    """A gate whose weights are in a folder.

    Attributes:
        artifact: Folder or Hub id of a saved gate, or the name of a shipped one.
        trained: Content of the artefact, read once.
        threshold: The threshold; by default the artefact's.
        proxy: The model that reads the question; by default the one that the gate was trained on. Set it if that
            model has another name or path here.
        kind: The class that `trained` must have.

    Raises:
        ModelLoadError: The artefact cannot be read, is for another kind of gate, or was trained with other
            prompts.
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
                f"The gate in {values['artifact']!r} was trained with the method {trained.method[:40]!r}, so it "
                f"cannot be loaded as {cls.info.name!r}.",
                hint=f"Use load_gate({values['artifact']!r}).",
            )
        return {"threshold": trained.threshold, "proxy": trained.base_model, **values, "trained": trained}

    @model_validator(mode="after")
    def _check_prompts(self) -> Self:
        check_prompts(self, self.trained, self.artifact)
        return self

    def replace(self, **parameters: Any) -> Self:
        """Return a copy with other parameters, or itself if there are none.

        A new ``artifact`` is loaded, and brings its own threshold and proxy.
        """
        if "artifact" not in parameters:
            return super().replace(**parameters)
        kept = self.__dict__.keys() - {"trained", "threshold", "proxy"}
        return self.from_parameters({name: self.__dict__[name] for name in kept} | parameters)

    def check_states(self, states: Float32Array, size: int) -> None:
        """Raise an error unless hidden states have the size that they have in the model the gate was trained on.

        Args:
            states: The states, shape (..., hidden size).
            size: The hidden size of that model.

        Raises:
            ModelLoadError: The sizes differ, so the states come from another model.
        """
        if states.shape[-1] != size:
            base = self.trained.base_model
            raise ModelLoadError(
                f"The gate {self.artifact!r} was trained on {base!r}, whose hidden states have the size {size}, but "
                f"now uses a model whose hidden states have the size {states.shape[-1]}.",
                hint=f"Load the gate with proxy={base!r}, or train a gate on the model that it uses now.",
            )


class AdapterGate(Gate):
    """A gate whose model may have an adapter.

    Attributes:
        adapter: Folder or Hub id of a LoRA adapter of the proxy, or its name on the proxy's server; None for
            zero-shot. A folder made by ``rgate train`` records the model that it was trained on; a decision fails if
            the proxy has other weights.

    Raises:
        ModelLoadError: The folder has a saved gate that cannot be read.
    """

    adapter: str | None = None

    _trained: SavedGate | None = PrivateAttr(default=None)

    def model_post_init(self, context: Any) -> None:
        """Read the saved gate in the adapter's folder, if any."""
        if self.adapter is not None and os.path.isfile(find_folder(self.adapter) / CONFIG):
            self._trained = read_gate(find_folder(self.adapter))

    @property
    def trained(self) -> SavedGate | None:
        """The saved gate in the adapter's folder, if any."""
        return self._trained


def check_prompts(gate: Gate, saved: SavedGate, name: str) -> None:
    """Reject a gate that was trained with other versions of its prompts.

    Raises:
        ModelLoadError: A prompt has changed since the training.
    """
    current = prompt_hashes(gate)
    for prompt, trained_hash in saved.prompts.items():
        if current.get(prompt) != trained_hash:
            raise ModelLoadError(
                f"The gate {name!r} was made with another version of the prompt {prompt!r} than this package has, so "
                "its scores would be meaningless.",
                hint="Train or calibrate it again, or install the version of rgate-integrations that made it.",
            )


def prompt_hashes(gate: Gate) -> dict[str, str]:
    """Return the hash of every prompt that a gate's evidence uses, by name."""
    prompts = [getattr(spec, "prompt", None) for spec in expand_specs(gate.specs)]
    return {prompt.name: prompt.hash for prompt in prompts if prompt is not None}


class ProbeGate(TrainedGate):
    """A trained linear probe on pooled hidden states of a few layers (compare Azaria & Mitchell 2023).

    P(known) is ``sigmoid(slope * (w · h + b) + intercept)``, where h are the pooled states of the artefact's layers;
    ``rgate train --gate probe`` trains w and b. Some probes then combine this logit with the draft's
    log-probabilities, if it has any; the reason says what was read.

    Attributes:
        artifact: Folder or Hub id of a trained probe, or the name of a shipped one.
        trained: Content of the artefact, read once.
        threshold: The threshold; by default the artefact's.
        proxy: The model that reads the question; by default the one that the gate was trained on. Set it if that
            model has another name or path here.
    """

    info: ClassVar[GateInfo] = GateInfo(
        "probe",
        "linear probe (Azaria & Mitchell 2023)",
        "hidden states of question and draft",
        "yes",
        "draft",
    )
    kind = ProbeArtifact

    trained: SkipValidation[ProbeArtifact] = Field(exclude=True, repr=False)

    @property
    def specs(self) -> Specs:
        """Specs of the pooled hidden states and of the draft that is read after the question, if any."""
        trained, prompt = self.trained, answer_prompt(self.trained.system)
        if not trained.tokens:
            return (HiddenSpec(trained.layers, None, prompt, self.proxy),)
        draft = DraftSpec(trained.tokens, trained.source, prompt, self.proxy)
        return (HiddenSpec(trained.layers, draft, prompt, self.proxy), draft)

    def score(self, evidence: Evidence) -> Score:
        """Score by the calibrated probe and, if it uses them, the draft's log-probabilities.

        Raises:
            ModelLoadError: The states are not from the model that the gate was trained on.
        """
        trained = self.trained
        states, *drafts = [evidence[spec] for spec in self.specs]
        self.check_states(states, trained.weight.shape[-1])
        logit = float(np.sum(trained.weight * states)) + trained.bias
        logit = trained.slope * logit + trained.intercept
        draft, inputs = (drafts[0], "question and draft") if drafts else (None, "question")
        if draft is not None and trained.logprobs is not None and draft.logprobs:
            logit = trained.logprobs.logit(logit, draft.logprobs)
            inputs = "question, draft and its log-probabilities"
        p = sigmoid(logit)
        reason = f"A probe trained on {trained.llm} reads {inputs}: known with probability {p:.2f}."
        return Score(p, reason, draft)
