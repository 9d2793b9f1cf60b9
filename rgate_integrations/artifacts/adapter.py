"""A saved gate whose weights are a LoRA adapter of the proxy."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rgate_integrations.artifacts.card import ModelCard
from rgate_integrations.artifacts.config import CONFIG, FORMAT
from rgate_integrations.artifacts.folder import ADAPTER, CARD, prompt_facts
from rgate_integrations.prompts import PromptTemplate
from rgate_integrations.runtime.files import json_text, write_atomically


@dataclass(frozen=True)
class AdapterArtifact:
    """What is saved beside a LoRA adapter, so that it is a gate.

    Attributes:
        method: Name of the gate.
        prompt: The prompt it was trained under.
        parameters: Parameters of the gate.
        base_model: Catalogue name, folder or Hub id of the base model.
        fingerprint: `rgate_integrations.models.LocalProxy.fingerprint` of the base model.
        llm: The LLM whose knowledge the labels are about.
        provenance: Data, label, seed, recipe, metrics, versions, licence; JSON values.
        threshold: Default threshold.
    """

    method: str
    prompt: PromptTemplate
    parameters: dict[str, Any]
    base_model: str
    fingerprint: str
    llm: str
    provenance: dict[str, Any]
    threshold: float = 0.5


def save_adapter(artifact: AdapterArtifact, folder: str | Path) -> Path:
    """Make a folder that holds a LoRA adapter a gate that `load_gate` takes.

    Args:
        artifact: The gate.
        folder: Where the adapter is.

    Returns:
        The folder.
    """
    root = Path(folder)
    config = {
        "format": FORMAT,
        "method": artifact.method,
        "base_model": artifact.base_model,
        "fingerprint": artifact.fingerprint,
        "llm": artifact.llm,
        "prompt": prompt_facts(artifact.prompt),
        "parameters": artifact.parameters,
        "threshold": artifact.threshold,
        "weights_sha256": hashlib.sha256((root / ADAPTER).read_bytes()).hexdigest(),
        "provenance": artifact.provenance,
    }
    write_atomically(root / CARD, _card(artifact, root.name).text())
    write_atomically(root / CONFIG, json_text(config))  # last: with it the folder is a gate
    return root


def _card(artifact: AdapterArtifact, name: str) -> ModelCard:
    tokens = artifact.parameters.get("tokens")
    activated = "activated " if artifact.parameters.get("follow_up") else ""
    return ModelCard(
        name=name,
        base_model=artifact.base_model,
        reads=f"{tokens} tokens of a draft" if tokens else "nothing else",
        llm=artifact.llm,
        threshold=artifact.threshold,
        method=[f"- **Method**: `{artifact.method}`, {activated}LoRA adapter."],
        provenance=artifact.provenance,
    )
