"""What a trained gate is saved as: ``gate.json``, the weights as safetensors, and a model card."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import numpy as np
import numpy.typing as npt

from rgate_integrations.decision import DraftSource
from rgate_integrations.errors import ConfigurationError, ModelLoadError, missing_dependency
from rgate_integrations.evidence import Pooling, Span
from rgate_integrations.prompts import ANSWER

_FORMAT = 1
_CONFIG, _WEIGHTS, _CARD = "gate.json", "probe.safetensors", "README.md"
SHIPPED = Path(__file__).parent.parent / "weights"


@dataclass(frozen=True)
class EarlyExit:
    """A probe of the question alone, asked first: what it is sure to be known needs no draft.

    Attributes:
        weight: Shape (question blocks, hidden size), float32, calibrated: P(known) is the sigmoid of the logit.
        bias: Added to the sum of ``weight * states``.
        p_known: From this probability on the question is known without a draft.
    """

    weight: npt.NDArray[np.float32] = field(repr=False)
    bias: float
    p_known: float


@dataclass(frozen=True)
class ProbeArtifact:
    """A trained linear probe.

    Attributes:
        weight: Shape (blocks, hidden size), float32; standardisation and projection are folded in.
        bias: Added to the sum of ``weight * states``.
        blocks: Which hidden states: (layer, span, pooling) each.
        tokens: Draft tokens that are read; 0 for the question alone.
        source: Who writes the draft.
        base_model: The proxy: catalogue name, folder or Hub id.
        llm: The LLM whose knowledge the labels are about.
        slope: Platt calibration of the logit, with `intercept`.
        intercept: See `slope`.
        threshold: Default threshold.
        early_exit: The first look, at the question alone, or None.
        provenance: Where it comes from: data, label, seed, recipe, metrics, versions, licence; JSON values.
    """

    weight: npt.NDArray[np.float32] = field(repr=False)
    bias: float
    blocks: tuple[tuple[int, Span, Pooling], ...]
    tokens: int
    source: DraftSource
    base_model: str
    llm: str
    slope: float = 1.0
    intercept: float = 0.0
    threshold: float = 0.5
    early_exit: EarlyExit | None = None
    provenance: dict[str, Any] = field(default_factory=dict)

    @property
    def question_blocks(self) -> tuple[tuple[int, Span, Pooling], ...]:
        """The blocks that need no draft."""
        return tuple(block for block in self.blocks if block[1] == "question")


def save_artifact(artifact: ProbeArtifact, folder: str | Path) -> Path:
    """Save a probe; the folder appears whole or not at all, and replaces one that was there.

    Args:
        artifact: The probe.
        folder: Where to.

    Returns:
        The folder.
    """
    try:
        from safetensors.numpy import save
    except ImportError as error:
        raise missing_dependency("safetensors", "local") from error
    target = Path(folder)
    target.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        early = artifact.early_exit
        tensors = {"weight": artifact.weight} | ({"early_exit": early.weight} if early else {})
        weights = save({name: np.ascontiguousarray(w, dtype=np.float32) for name, w in tensors.items()})
        (made / _WEIGHTS).write_bytes(weights)
        config = {
            "format": _FORMAT,
            "method": "probe",
            "base_model": artifact.base_model,
            "llm": artifact.llm,
            "prompt": {"name": ANSWER.name, "version": ANSWER.version, "hash": ANSWER.hash},
            "evidence": {"tokens": artifact.tokens, "source": artifact.source, "blocks": artifact.blocks},
            "bias": artifact.bias,
            "calibration": {"slope": artifact.slope, "intercept": artifact.intercept},
            "threshold": artifact.threshold,
            "early_exit": {"bias": early.bias, "p_known": early.p_known} if early else None,
            "weights_sha256": hashlib.sha256(weights).hexdigest(),
            "provenance": artifact.provenance,
        }
        (made / _CONFIG).write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
        (made / _CARD).write_text(model_card(artifact, target.name), encoding="utf-8")
        made.chmod(0o755)
        if target.exists():
            old = Path(tempfile.mkdtemp(prefix=f".{target.name}-old-", dir=target.parent)) / "old"
            target.rename(old)
            made.rename(target)
            shutil.rmtree(old.parent)
        else:
            made.rename(target)
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise
    return target


def artifact_folder(name: str) -> Path:
    """Return the folder of a trained gate: a local folder, a shipped gate's name, or a Hub id.

    Raises:
        ModelLoadError: There is none of these.
    """
    for folder in (Path(name).expanduser(), SHIPPED / name):
        if (folder / _CONFIG).is_file():
            return folder
    if name.count("/") == 1 and not name.startswith((".", "~", "/")):
        return _from_hub(name)
    raise ModelLoadError(
        f"There is no trained gate in {name!r}.",
        hint=f"Give a folder that `rgate train` made, or a shipped gate: {', '.join(shipped()) or 'none'}.",
    )


def _from_hub(name: str) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise missing_dependency("huggingface_hub", "local") from error
    try:
        return Path(snapshot_download(name, allow_patterns=[_CONFIG, _WEIGHTS, _CARD]))
    except Exception as error:  # the Hub client raises errors of several libraries
        raise ModelLoadError(
            f"The gate {name!r} could not be fetched from the Hub: {str(error).splitlines()[0]}",
            hint="Check the name and the network, or give a local folder.",
        ) from error


def shipped() -> list[str]:
    """Return the names of the gates that come with the package."""
    return sorted(p.parent.name for p in SHIPPED.glob(f"*/{_CONFIG}"))


def read_artifact(name: str) -> ProbeArtifact:
    """Load a trained probe, checked, once until its files change.

    Raises:
        ModelLoadError: There is none, a file is damaged, or it was trained with another prompt or format.
    """
    folder = artifact_folder(name)
    return _read(str(folder), os.stat(folder / _CONFIG).st_mtime_ns)


@functools.lru_cache(maxsize=32)
def _read(folder: str, changed: int) -> ProbeArtifact:
    root = Path(folder)
    try:
        from safetensors.numpy import load
    except ImportError as error:
        raise missing_dependency("safetensors", "local") from error
    try:
        config = json.loads((root / _CONFIG).read_text(encoding="utf-8"))
        weights = (root / _WEIGHTS).read_bytes()
        if config["format"] > _FORMAT:
            raise ModelLoadError(
                f"The gate in {folder!r} has format {config['format']}, newer than {_FORMAT}.",
                hint="Upgrade rgate-integrations.",
            )
        if hashlib.sha256(weights).hexdigest() != config["weights_sha256"]:
            raise ModelLoadError(
                f"{_WEIGHTS} in {folder!r} is damaged: its checksum is not the recorded one."
            )
        if config["prompt"]["hash"] != ANSWER.hash:
            raise ModelLoadError(
                f"The gate in {folder!r} was trained with version {config['prompt']['version']} of the prompt "
                f"{config['prompt']['name']!r}, not the current one.",
                hint="Train it again: its scores would mean nothing.",
            )
        evidence = config["evidence"]
        if evidence["source"] not in get_args(DraftSource):
            raise ConfigurationError(f"The draft source {evidence['source']!r} is not known.")
        tensors, early = load(weights), config.get("early_exit")
        return ProbeArtifact(
            weight=tensors["weight"],
            bias=float(config["bias"]),
            blocks=tuple((int(layer), span, pooling) for layer, span, pooling in evidence["blocks"]),
            tokens=int(evidence["tokens"]),
            source=evidence["source"],
            base_model=config["base_model"],
            llm=config["llm"],
            slope=float(config["calibration"]["slope"]),
            intercept=float(config["calibration"]["intercept"]),
            threshold=float(config["threshold"]),
            early_exit=EarlyExit(tensors["early_exit"], float(early["bias"]), float(early["p_known"]))
            if early
            else None,
            provenance=config["provenance"],
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, ConfigurationError):
            raise
        raise ModelLoadError(
            f"The gate in {folder!r} cannot be read: {type(error).__name__}: {error}.", hint="Train it again."
        ) from error


def model_card(artifact: ProbeArtifact, name: str) -> str:
    """Return the model card, in Markdown."""
    facts = artifact.provenance
    draft = (
        f"the first {artifact.tokens} tokens of a draft ({artifact.source})"
        if artifact.tokens
        else "no draft"
    )
    layers = sorted({layer for layer, _, _ in artifact.blocks})
    lines = [
        f"# {name}",
        "",
        "A retrieval gate of `rgate-integrations`: P(the LLM answers rightly without retrieval).",
        "",
        f"- **Base model**: {artifact.base_model}; reads the question and {draft}.",
        f"- **Judges**: {artifact.llm}.",
        f"- **Method**: linear probe on mean hidden states of layers {', '.join(map(str, layers))}.",
        f"- **Label**: {facts.get('label', 'unknown')}. **Seed**: {facts.get('seed')}.",
        f"- **Recipe**: {facts.get('recipe', 'unknown')}",
        f"- **Licence of the weights**: {facts.get('licence', 'that of the training data')}.",
        f"- **Default threshold**: {artifact.threshold:.3f}.",
        *(
            [
                f"- **Early exit**: no draft from P(known) {artifact.early_exit.p_known:.2f} of the question alone."
            ]
            if artifact.early_exit
            else []
        ),
        "",
        "## Training data",
        "",
        *(
            f"- {d['name']}: {d['n']} questions, {d['known']:.1%} known, sha256 `{d['sha256'][:16]}`"
            for d in facts["data"]
        ),
        "",
        f"## Quality ({facts.get('folds')}-fold cross-validation, AUC of P(known) for the label)",
        "",
        "| set | AUC |",
        "|---|---|",
        *(f"| {name} | {value:.3f} |" for name, value in facts["metrics"]["auc"].items()),
        f"| **mean of the sets** | **{facts['metrics']['auc_mean']:.3f}** |",
        f"| pooled | {facts['metrics']['auc_pooled']:.3f} |",
        "",
        'Use it as `load_gate("'
        + name
        + '")`. Scores for another LLM are a guess: calibrate on your own data.',
        "",
    ]
    return "\n".join(lines)
