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
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
import numpy.typing as npt

from rgate_integrations.decision import DraftSource
from rgate_integrations.errors import ConfigurationError, ModelLoadError, missing_dependency
from rgate_integrations.prompts import ANSWER, PromptTemplate
from rgate_integrations.proxy.base import PooledLayer
from rgate_integrations.training.card import adapter_card, probe_card

if TYPE_CHECKING:
    from rgate_integrations.gates.base import Gate

_FORMAT = 1
_CONFIG, _WEIGHTS, _CARD = "gate.json", "probe.safetensors", "README.md"
ADAPTER = "adapter_model.safetensors"
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
        fingerprint: `LocalProxy.fingerprint` of the base model; empty if unknown.
        provenance: Where it comes from: data, label, seed, recipe, metrics, versions, licence; JSON values.
    """

    weight: npt.NDArray[np.float32] = field(repr=False)
    bias: float
    blocks: tuple[PooledLayer, ...]
    tokens: int
    source: DraftSource
    base_model: str
    llm: str
    slope: float = 1.0
    intercept: float = 0.0
    threshold: float = 0.5
    early_exit: EarlyExit | None = None
    fingerprint: str = ""
    provenance: dict[str, Any] = field(default_factory=dict)

    @property
    def question_blocks(self) -> tuple[PooledLayer, ...]:
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
    early = artifact.early_exit
    tensors = {"weight": artifact.weight} | ({"early_exit": early.weight} if early else {})
    weights = save({name: np.ascontiguousarray(w, dtype=np.float32) for name, w in tensors.items()})
    config = {
        "format": _FORMAT,
        "method": "probe",
        "base_model": artifact.base_model,
        "fingerprint": artifact.fingerprint,
        "llm": artifact.llm,
        "prompt": _prompt(ANSWER),
        "evidence": {"tokens": artifact.tokens, "source": artifact.source, "blocks": artifact.blocks},
        "bias": artifact.bias,
        "calibration": {"slope": artifact.slope, "intercept": artifact.intercept},
        "threshold": artifact.threshold,
        "early_exit": {"bias": early.bias, "p_known": early.p_known} if early else None,
        "weights_sha256": hashlib.sha256(weights).hexdigest(),
        "provenance": artifact.provenance,
    }
    return write_folder(
        folder,
        {
            _WEIGHTS: weights,
            _CONFIG: _json(config),
            _CARD: probe_card(artifact, Path(folder).name).encode(),
        },
    )


def save_calibrated(gate: Gate, provenance: dict[str, Any], folder: str | Path) -> Path:
    """Save a calibrated gate: its parameters, threshold, probability map, and how they came about.

    Args:
        gate: The gate.
        provenance: What `rgate_integrations.calibration.calibrate` returned with it.
        folder: Where to.
    """
    config = {
        "format": _FORMAT,
        "method": "calibrated",
        "threshold": gate.threshold,
        "prompts": {s.prompt.name: s.prompt.hash for s in gate.all_specs if hasattr(s, "prompt")},
        "config": gate.config(),
        "provenance": provenance,
    }
    return write_folder(folder, {_CONFIG: _json(config)})


def _json(values: Any) -> bytes:
    return (json.dumps(values, indent=1, ensure_ascii=False) + "\n").encode()


def write_folder(folder: str | Path, files: dict[str, bytes]) -> Path:
    """Write a folder that appears whole or not at all, and replaces one that was there.

    Args:
        folder: Where to.
        files: Contents by name.

    Returns:
        The folder.
    """
    target = Path(folder)
    target.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        for name, content in files.items():
            (made / name).write_bytes(content)
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


def save_adapter(
    folder: str | Path,
    *,
    method: str,
    prompt: PromptTemplate,
    parameters: dict[str, Any],
    base_model: str,
    fingerprint: str,
    llm: str,
    provenance: dict[str, Any],
    threshold: float = 0.5,
) -> None:
    """Make a folder that holds a LoRA adapter a gate that `load_gate` takes; ``gate.json`` comes last.

    Args:
        folder: Where the adapter is.
        method: Name of the gate.
        prompt: The prompt it was trained under.
        parameters: Parameters of the gate.
        base_model: Catalogue name, folder or Hub id of the base model.
        fingerprint: The base model's `LocalProxy.fingerprint`.
        llm: The LLM whose knowledge the labels are about.
        provenance: Data, label, seed, recipe, metrics, versions, licence; JSON values.
        threshold: Default threshold.
    """
    root = Path(folder)
    config = {
        "format": _FORMAT,
        "method": method,
        "base_model": base_model,
        "fingerprint": fingerprint,
        "llm": llm,
        "prompt": _prompt(prompt),
        "parameters": parameters,
        "threshold": threshold,
        "weights_sha256": hashlib.sha256((root / ADAPTER).read_bytes()).hexdigest(),
        "provenance": provenance,
    }
    card = adapter_card(root.name, method, config)
    (root / _CARD).write_text(card, encoding="utf-8")
    temporary = root / f".{_CONFIG}"
    temporary.write_bytes(_json(config))
    temporary.rename(root / _CONFIG)


def read_config(name: str) -> dict[str, Any]:
    """Return ``gate.json`` of a trained gate; its folder is added as ``"folder"``, and an adapter is checked.

    Raises:
        ModelLoadError: A file is damaged or missing, or it is from a newer version.
    """
    folder = artifact_folder(name)
    try:
        config: dict[str, Any] = json.loads((folder / _CONFIG).read_text(encoding="utf-8"))
        if config["format"] > _FORMAT:
            raise ModelLoadError(
                f"The gate in {str(folder)!r} has format {config['format']}, newer than {_FORMAT}.",
                hint="Upgrade rgate-integrations.",
            )
        if config["method"] not in ("probe", "calibrated"):
            digest = hashlib.sha256((folder / ADAPTER).read_bytes()).hexdigest()
            if digest != config["weights_sha256"]:
                raise ModelLoadError(
                    f"{ADAPTER} in {str(folder)!r} is damaged: its checksum is not the recorded one."
                )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelLoadError(
            f"The gate in {str(folder)!r} cannot be read: {type(error).__name__}: {error}.",
            hint="Train it again.",
        ) from error
    return config | {"folder": str(folder)}


def _prompt(prompt: PromptTemplate) -> dict[str, Any]:
    return {"name": prompt.name, "version": prompt.version, "hash": prompt.hash}


def push_to_hub(folder: str | Path, repo_id: str, *, private: bool = False, token: str | None = None) -> str:
    """Upload a trained gate's folder to the Hugging Face Hub; ``load_gate(repo_id)`` takes it from there.

    Args:
        folder: A folder that `load_gate` takes; it is checked first.
        repo_id: Such as ``"you/my-gate"``; made if it does not exist.
        private: Whether a new repository is private.
        token: Access token; by default the one of ``hf auth login``.

    Returns:
        The address of the commit.

    Raises:
        ModelLoadError: The folder holds no trained gate, or a damaged one.
    """
    config = read_config(str(folder))
    if config["method"] == "probe":
        read_artifact(str(folder))
    try:
        from huggingface_hub import HfApi
    except ImportError as error:
        raise missing_dependency("huggingface_hub", "local") from error
    api = HfApi(token=token)
    api.create_repo(repo_id, private=private, exist_ok=True)
    return str(api.upload_folder(repo_id=repo_id, folder_path=str(folder)).commit_url)


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
        return Path(
            snapshot_download(name, allow_patterns=[_CONFIG, _WEIGHTS, _CARD, ADAPTER, "adapter_config.json"])
        )
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
            blocks=tuple(
                PooledLayer(int(layer), span, pooling) for layer, span, pooling in evidence["blocks"]
            ),
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
            fingerprint=str(config.get("fingerprint", "")),
            provenance=config["provenance"],
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, ConfigurationError):
            raise
        raise ModelLoadError(
            f"The gate in {folder!r} cannot be read: {type(error).__name__}: {error}.", hint="Train it again."
        ) from error
