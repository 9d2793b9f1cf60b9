"""A saved linear probe: a weight vector for each hidden state that it reads."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rgate_integrations.artifacts.card import ModelCard
from rgate_integrations.artifacts.config import CONFIG, FORMAT
from rgate_integrations.artifacts.folder import (
    CARD,
    PROBE,
    prompt_facts,
)
from rgate_integrations.artifacts.trained import Tensors, read_trained, tensor_bytes
from rgate_integrations.decision import DraftSource
from rgate_integrations.errors import ConfigurationError
from rgate_integrations.models.base import PooledLayer
from rgate_integrations.prompts import ANSWER
from rgate_integrations.runtime.arrays import Float32Array
from rgate_integrations.runtime.files import json_text, write_folder

_LEAST_LOGPROB = -20.0  # some servers write -9999 for "never"


@dataclass(frozen=True)
class EarlyExit:
    """A probe of the question alone, asked first: what it is sure to be known needs no draft.

    Attributes:
        weight: Shape (question layers, hidden size), float32, calibrated: P(known) is the sigmoid of the logit.
        bias: Added to the sum of ``weight * states``.
        p_known: From this probability on the question is known without a draft.
    """

    weight: Float32Array = field(repr=False, compare=False)
    bias: float
    p_known: float


@dataclass(frozen=True)
class LogprobHead:
    """Weighs an LLM's own token log-probabilities against a probe of its words; P(known) is the sigmoid of the sum.

    Attributes:
        text: Weight of the probe's calibrated logit.
        total: Weight of the sum of the log-probabilities.
        least: That of the lowest.
        mean: That of their mean.
        bias: Added to the sum.
    """

    text: float
    total: float
    least: float
    mean: float
    bias: float

    def logit(self, text: float, logprobs: Sequence[float]) -> float:
        """Return the logit of P(known).

        Args:
            text: The probe's calibrated logit.
            logprobs: Natural log-probability of each token that is read, at least one; below -20 they count as -20.
        """
        values = [max(value, _LEAST_LOGPROB) for value in logprobs]
        total = sum(values)
        read = self.total * total + self.least * min(values) + self.mean * total / len(values)
        return self.text * text + read + self.bias


@dataclass(frozen=True)
class ProbeArtifact:
    """A trained linear probe.

    Attributes:
        weight: Shape (layers, hidden size), float32; standardisation and projection are folded in.
        bias: Added to the sum of ``weight * states``.
        layers: Which hidden states: (layer, span, pooling) each.
        tokens: Draft tokens that are read; 0 for the question alone.
        source: Who writes the draft.
        base_model: The proxy: catalogue name, folder or Hub id.
        llm: The LLM whose knowledge the labels are about.
        slope: Platt calibration of the logit, with `intercept`.
        intercept: See `slope`.
        threshold: Default threshold.
        early_exit: The first look, at the question alone, or None.
        logprobs: Reads the draft's log-probabilities too, where its writer gives them; None reads the words alone.
        system: System turn of the prompt that question and draft stand in; None is that of `ANSWER`.
        fingerprint: `rgate_integrations.models.LocalProxy.fingerprint` of the base model; empty if unknown.
        provenance: Where it comes from: data, label, seed, recipe, metrics, versions, licence; JSON values.
    """

    weight: Float32Array = field(repr=False, compare=False)
    bias: float
    layers: tuple[PooledLayer, ...]
    tokens: int
    source: DraftSource
    base_model: str
    llm: str
    slope: float = 1.0
    intercept: float = 0.0
    threshold: float = 0.5
    early_exit: EarlyExit | None = None
    logprobs: LogprobHead | None = None
    system: str | None = None
    fingerprint: str = ""
    provenance: dict[str, Any] = field(default_factory=dict)

    @property
    def question_layers(self) -> tuple[PooledLayer, ...]:
        """The hidden states that need no draft."""
        return tuple(layer for layer in self.layers if layer[1] == "question")


def save_probe(artifact: ProbeArtifact, folder: str | Path) -> Path:
    """Save a probe; the folder appears whole or not at all, and replaces one that was there.

    Args:
        artifact: The probe.
        folder: Where to.

    Returns:
        The folder.

    Raises:
        ConfigurationError: A weight is not finite, or they are not one vector a layer.
        WriteError: It could not be written.
    """
    _check_weights(artifact)
    tensors = {"weight": artifact.weight}
    early = artifact.early_exit
    if early is not None:
        tensors["early_exit"] = early.weight
    weights = tensor_bytes(tensors)
    config = {
        "format": FORMAT,
        "method": "probe",
        "base_model": artifact.base_model,
        "fingerprint": artifact.fingerprint,
        "llm": artifact.llm,
        "prompt": prompt_facts(ANSWER),
        # The layers are called blocks in the file, so that gates that were saved before they were renamed load.
        "evidence": {"tokens": artifact.tokens, "source": artifact.source, "blocks": artifact.layers},
        "system": artifact.system,
        "bias": artifact.bias,
        "calibration": {"slope": artifact.slope, "intercept": artifact.intercept},
        "threshold": artifact.threshold,
        "early_exit": {"bias": early.bias, "p_known": early.p_known} if early else None,
        "logprobs": asdict(artifact.logprobs) if artifact.logprobs else None,
        "weights_sha256": hashlib.sha256(weights).hexdigest(),
        "provenance": artifact.provenance,
    }
    card = _card(artifact, Path(folder).name)
    return write_folder(folder, {PROBE: weights, CONFIG: json_text(config), CARD: card.text()})


def read_probe(name: str | Path) -> ProbeArtifact:
    """Read and check a saved probe; every call does so anew.

    Args:
        name: A local folder, the name of a shipped gate, or a Hub id.

    Raises:
        ModelLoadError: There is none, a file is damaged, or it was trained with another prompt or format.
    """
    return read_trained(name, "probe", _probe)


def _probe(config: dict[str, Any], tensors: Tensors) -> ProbeArtifact:
    evidence, calibration, early = config["evidence"], config["calibration"], config["early_exit"]
    early_exit = None
    if early is not None:
        early_exit = EarlyExit(tensors["early_exit"], early["bias"], early["p_known"])
    logprobs = config.get("logprobs")  # gates that were saved before there was one have none
    artifact = ProbeArtifact(
        weight=tensors["weight"],
        bias=config["bias"],
        layers=tuple(PooledLayer(*layer) for layer in evidence["blocks"]),
        tokens=evidence["tokens"],
        source=evidence["source"],
        base_model=config["base_model"],
        llm=config["llm"],
        slope=calibration["slope"],
        intercept=calibration["intercept"],
        threshold=config["threshold"],
        early_exit=early_exit,
        logprobs=None if logprobs is None else LogprobHead(**logprobs),
        system=config["system"],
        fingerprint=config["fingerprint"],
        provenance=config["provenance"],
    )
    _check_weights(artifact)
    return artifact


def _check_weights(artifact: ProbeArtifact) -> None:
    """Refuse weights that are not one finite vector a layer.

    Raises:
        ConfigurationError: They are something else.
    """
    given = {"weight": (artifact.weight, artifact.layers)}
    if artifact.early_exit is not None:
        given["early_exit"] = (artifact.early_exit.weight, artifact.question_layers)
    for name, (weight, layers) in given.items():
        if weight.dtype != np.float32 or weight.ndim != 2 or len(weight) != len(layers) or not weight.size:
            raise ConfigurationError(
                f"The weights {name!r} have the type {weight.dtype} and the shape {weight.shape}, "
                f"not float32 and a row for each of {len(layers)} layers."
            )
        if not np.isfinite(weight).all():
            raise ConfigurationError(
                f"The weights {name!r} are not finite.",
                hint="Train the probe again; look for NaN in its states.",
            )
    numbers = [artifact.bias, artifact.slope, artifact.intercept, artifact.threshold]
    if artifact.logprobs is not None:
        numbers += asdict(artifact.logprobs).values()
    if not np.isfinite(numbers).all():
        raise ConfigurationError("Bias, calibration, threshold or a weight of the probe is not finite.")


def _card(artifact: ProbeArtifact, name: str) -> ModelCard:
    reads = "no draft"
    if artifact.tokens:
        reads = f"the first {artifact.tokens} tokens of a draft ({artifact.source})"
    numbers = ", ".join(str(n) for n in sorted({layer for layer, _, _ in artifact.layers}))
    poolings = " and ".join(dict.fromkeys(pooling for _, _, pooling in artifact.layers))
    method = [f"- **Method**: linear probe on {poolings} hidden states of layers {numbers}."]
    if artifact.early_exit is not None:
        sure = artifact.early_exit.p_known
        method.append(f"- **Early exit**: no draft from P(known) {sure:.2f} of the question alone.")
    if artifact.logprobs is not None:
        method.append(
            "- **Log-probabilities** of the draft's tokens are read, too, where its writer gives them."
        )
    return ModelCard(
        name=name,
        base_model=artifact.base_model,
        reads=reads,
        llm=artifact.llm,
        threshold=artifact.threshold,
        method=method,
        provenance=artifact.provenance,
    )
