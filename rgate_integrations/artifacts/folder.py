"""The folder of a saved gate: where it is, what its ``gate.json`` says, and whether its weights are whole.

Every saved gate has a ``gate.json`` with ``format``, ``method`` and ``provenance``. A method that has weights names
their checksum there; a calibrated gate has none.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rgate_integrations.artifacts.config import CONFIG, parsed_config
from rgate_integrations.errors import ModelLoadError, missing_dependency
from rgate_integrations.prompts import PromptTemplate
from rgate_integrations.runtime.files import existing_folder

CARD = "README.md"
PROBE, HEADS, ADAPTER = "probe.safetensors", "heads.safetensors", "adapter_model.safetensors"
TUNED = "tuned.safetensors"
_WEIGHTS = {"probe": PROBE, "heads": HEADS, "tuned": TUNED}  # every other method has an adapter
_SHIPPED = Path(__file__).parent.parent / "weights"


def saved_folder(name: str | Path) -> Path:
    """Return the folder of a saved gate.

    Args:
        name: A local folder, the name of a shipped gate, or a Hub id, which is fetched.

    Raises:
        ModelLoadError: There is none of these.
    """
    for folder in (existing_folder(name), _SHIPPED / name):
        if os.path.isfile(folder / CONFIG):
            return folder
    name = str(name)
    if name.count("/") == 1 and not name.startswith((".", "~", "/")):
        return _from_hub(name)
    raise ModelLoadError(
        f"There is no trained gate in {name!r}.",
        hint=f"Give a folder that `rgate train` made, or a shipped gate: {', '.join(shipped()) or 'none'}.",
    )


def shipped() -> list[str]:
    """Return the names of the gates that come with the package."""
    return sorted(path.parent.name for path in _SHIPPED.glob(f"*/{CONFIG}"))


def read_config(name: str | Path) -> dict[str, Any]:
    """Return ``gate.json`` of a saved gate, with its folder as ``"folder"``; its weights are checked.

    Args:
        name: What `saved_folder` takes.

    Raises:
        ModelLoadError: There is no gate, a file is damaged or missing, or it is from a newer version.
    """
    folder = saved_folder(name)
    try:
        config = parsed_config(folder)
        if config["method"] != "calibrated":
            checked_weights(folder, config)
    except (OSError, ValueError) as error:
        raise unreadable(folder, error) from error
    return config | {"folder": str(folder)}


def checked_weights(folder: Path, config: dict[str, Any]) -> bytes:
    """Return the weights of a gate that has some.

    Raises:
        ModelLoadError: They are not what was saved.
        OSError: They cannot be read.
    """
    file = folder / _WEIGHTS.get(config["method"], ADAPTER)
    weights = file.read_bytes()
    if hashlib.sha256(weights).hexdigest() != config["weights_sha256"]:
        raise ModelLoadError(
            f"{file.name} in {str(folder)!r} is damaged: its checksum is not the recorded one."
        )
    return weights


def prompt_facts(prompt: PromptTemplate) -> dict[str, Any]:
    """Return what ``gate.json`` keeps of the prompt that a gate was trained under."""
    return {"name": prompt.name, "version": prompt.version, "hash": prompt.hash}


def check_prompt(folder: Path, trained: dict[str, Any], prompt: PromptTemplate) -> None:
    """Refuse a gate that was trained under another version of a prompt than the current one.

    Args:
        folder: The gate's, for the message.
        trained: What `prompt_facts` returned when it was saved.
        prompt: The prompt as it is now.

    Raises:
        ModelLoadError: They differ.
    """
    if trained["hash"] != prompt.hash:
        raise ModelLoadError(
            f"The gate in {str(folder)!r} was trained with version {trained['version']} of the prompt "
            f"{trained['name']!r}, not the current one.",
            hint="Train it again: its scores would mean nothing.",
        )


def unreadable(folder: Path, error: Exception) -> ModelLoadError:
    """Return the error for a gate of whose files one is missing or makes no sense."""
    reason = f"{type(error).__name__}: {error}"
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False)[0]
        reason = f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']}"
    return ModelLoadError(
        f"The gate in {str(folder)!r} cannot be read: {reason}.", hint="Train it again, or copy it again."
    )


@dataclass(frozen=True)
class TrainedOn:
    """The model that a gate was trained on.

    Attributes:
        base_model: Catalogue name, folder or Hub id.
        fingerprint: `rgate_integrations.models.LocalProxy.fingerprint` of it; empty if unknown.
    """

    base_model: str
    fingerprint: str


def trained_on(folder: str | Path) -> TrainedOn | None:
    """Return which model a gate was trained on; None if the folder does not say so, as of an adapter from elsewhere.

    Raises:
        ModelLoadError: Its ``gate.json`` cannot be read.
    """
    path = existing_folder(folder)
    if not os.path.isfile(path / CONFIG):
        return None
    try:
        config = parsed_config(path)
        return TrainedOn(config.get("base_model", "another model"), config.get("fingerprint", ""))
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from error


def check_fingerprint(gate: str, trained: TrainedOn, model: str, found: str) -> tuple[str, ...]:
    """Refuse a gate that was trained on another model than the one that is used.

    Args:
        gate: Name or folder of the gate, for the message.
        trained: What it was trained on; without a fingerprint nothing can be checked.
        model: What the used model is called.
        found: The used model's fingerprint; empty if unknown.

    Returns:
        A warning for the decision if the used model's weights are unknown: that does not make them the same.

    Raises:
        ModelLoadError: The fingerprints differ.
    """
    if not trained.fingerprint or trained.fingerprint == found:
        return ()
    if not found:
        return (f"Whether {model!r} is the model that the gate {gate!r} was trained on cannot be checked.",)
    raise ModelLoadError(
        f"The gate {gate!r} was trained on {trained.base_model!r} (weights {trained.fingerprint}), but {model!r} "
        f"has the weights {found}.",
        hint=f"Load it with proxy={trained.base_model!r}, or train a gate for this model.",
    )


def _from_hub(name: str) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise missing_dependency("huggingface_hub", "local") from error
    files = [CONFIG, PROBE, HEADS, CARD, ADAPTER, "adapter_config.json", TUNED, "prior/*"]
    try:
        return Path(snapshot_download(name, allow_patterns=files))
    except Exception as error:  # the Hub client raises errors of several libraries
        raise ModelLoadError(
            f"The gate {name!r} could not be fetched from the Hub: {str(error).splitlines()[0]}",
            hint="Check the name and the network, or give a local folder.",
        ) from error
