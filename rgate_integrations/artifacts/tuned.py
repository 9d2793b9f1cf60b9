"""A saved tuned gate: a correction of another gate's logit, with that gate beside it in the same folder."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rgate_integrations.artifacts.config import CONFIG, FORMAT
from rgate_integrations.artifacts.folder import (
    TUNED,
    prompt_facts,
    saved_folder,
)
from rgate_integrations.artifacts.trained import Tensors, read_trained, tensor_bytes
from rgate_integrations.errors import ConfigurationError
from rgate_integrations.models.base import PooledLayer
from rgate_integrations.prompts import ANSWER
from rgate_integrations.runtime.arrays import Float32Array
from rgate_integrations.runtime.files import json_text

PRIOR = "prior"
"""Sub-folder of the gate whose logit is corrected."""

ANSWER_FIRST = "answer-first"
"""Sub-folder of the gate that judges begun answers."""


@dataclass(frozen=True)
class TunedArtifact:
    """A correction of another gate, the prior: ``slope * prior + weight · states + head · features + bias``.

    Attributes:
        slope: Of the prior's logit.
        bias: Added.
        weight: Of the hidden states of the question, shape (layers, hidden size), float32.
        head: Of the features of a begun answer's log-probabilities, float32; empty for the question alone.
        layers: Which hidden states: (layer, span, pooling) each.
        tokens: How many tokens of the begun answer are read; 0 for the question alone.
        base_model: The proxy: catalogue name, folder or Hub id.
        fingerprint: `rgate_integrations.models.base.Proxy.fingerprint` of it; empty if unknown.
        llm: The LLM whose knowledge the labels are about.
        threshold: Retrieve iff P(known) is below it.
        provenance: Where it comes from; JSON values.
    """

    slope: float
    bias: float
    weight: Float32Array = field(repr=False, compare=False)
    head: Float32Array = field(repr=False, compare=False)
    layers: tuple[PooledLayer, ...]
    tokens: int
    base_model: str
    fingerprint: str
    llm: str
    threshold: float
    provenance: dict[str, Any] = field(default_factory=dict)


def tuned_files(artifact: TunedArtifact, prior: str | Path) -> dict[str, bytes | str]:
    """Return the files of a tuned gate's folder, by name; the prior's are copied, so that it stays what it is.

    Args:
        artifact: The correction.
        prior: The gate that is corrected: a folder, or the name of a shipped gate.

    Raises:
        ConfigurationError: A number is not finite, or there is not one vector a layer.
        ModelLoadError: There is no such prior.
    """
    _check(artifact)
    weights = tensor_bytes({"weight": artifact.weight, "head": artifact.head})
    config = {
        "format": FORMAT,
        "method": "tuned",
        "base_model": artifact.base_model,
        "fingerprint": artifact.fingerprint,
        "llm": artifact.llm,
        "prompt": prompt_facts(ANSWER),
        "layers": artifact.layers,
        "tokens": artifact.tokens,
        "slope": artifact.slope,
        "bias": artifact.bias,
        "threshold": artifact.threshold,
        "weights_sha256": hashlib.sha256(weights).hexdigest(),
        "provenance": artifact.provenance,
    }
    files: dict[str, bytes | str] = {TUNED: weights, CONFIG: json_text(config)}
    for file in sorted(saved_folder(prior).iterdir()):
        if file.is_file():
            files[f"{PRIOR}/{file.name}"] = file.read_bytes()
    return files


def read_tuned(name: str | Path) -> TunedArtifact:
    """Read and check a saved tuned gate.

    Args:
        name: A local folder, or a Hub id.

    Raises:
        ModelLoadError: There is none, a file is damaged, or it was trained with another prompt or format.
    """
    return read_trained(name, "tuned", _artifact)


def _artifact(config: dict[str, Any], tensors: Tensors) -> TunedArtifact:
    artifact = TunedArtifact(
        slope=config["slope"],
        bias=config["bias"],
        weight=tensors["weight"],
        head=tensors["head"],
        layers=tuple(PooledLayer(*layer) for layer in config["layers"]),
        tokens=config["tokens"],
        base_model=config["base_model"],
        fingerprint=config["fingerprint"],
        llm=config["llm"],
        threshold=config["threshold"],
        provenance=config["provenance"],
    )
    _check(artifact)
    return artifact


def _check(artifact: TunedArtifact) -> None:
    """Refuse what is not one finite float32 vector a layer.

    Raises:
        ConfigurationError: It is something else.
    """
    weight, head = artifact.weight, artifact.head
    right_shape = weight.ndim == 2 and len(weight) == len(artifact.layers) and head.ndim == 1
    if not right_shape or weight.dtype != np.float32 or head.dtype != np.float32:
        raise ConfigurationError("The weights of the tuned gate do not match its layers.")
    finite = np.isfinite(weight).all() and np.isfinite(head).all()
    if not finite or not np.isfinite((artifact.slope, artifact.bias, artifact.threshold)).all():
        raise ConfigurationError("A number of the tuned gate is not finite.")
