"""The folder of a saved gate: where it is, how it is written, and what is in it, checked."""

from __future__ import annotations

import hashlib
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rgate_integrations.errors import ModelLoadError
from rgate_integrations.gates.artifacts.card import model_card
from rgate_integrations.gates.artifacts.gate_file import (
    SavedGate,
    put_arrays,
    read_tensors,
    tensor_bytes,
    without_arrays,
)
from rgate_integrations.gates.artifacts.heads import HeadsArtifact
from rgate_integrations.gates.artifacts.probe import ProbeArtifact
from rgate_integrations.gates.artifacts.tuned import PRIOR, TunedArtifact
from rgate_integrations.runtime.files import (
    existing_folder,
    json_text,
    parse_json,
    write_atomically,
    write_folder,
)

FORMAT = 1
CONFIG, CARD, WEIGHTS = "gate.json", "README.md", "weights.safetensors"
ADAPTER = "adapter_model.safetensors"
"""The file of a LoRA adapter, as peft names it."""

_SHIPPED = Path(__file__).parents[2] / "weights"
_WITH_WEIGHTS: dict[Any, type[SavedGate]] = {
    "heads": HeadsArtifact,
    "probe": ProbeArtifact,
    "tuned": TunedArtifact,
}


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
        hint=f"Give a folder that `rgate train` made, or a shipped gate: {', '.join(shipped())}.",
    )


def shipped() -> list[str]:
    """Return the names of the gates that come with the package."""
    return sorted(path.parent.name for path in _SHIPPED.glob(f"*/{CONFIG}"))


def save_gate(gate: SavedGate, folder: str | Path) -> Path:
    """Save a gate; the folder appears whole or not at all, and replaces one that was there.

    Args:
        gate: The gate.
        folder: Where to.

    Returns:
        The folder.

    Raises:
        WriteError: It could not be written.
    """
    return write_folder(folder, gate_files(gate, Path(folder).name))


def save_adapter(gate: SavedGate, folder: str | Path) -> Path:
    """Make a folder that holds a LoRA adapter a gate that `load_gate` takes.

    Args:
        gate: The gate.
        folder: Where the adapter is.

    Returns:
        The folder.
    """
    root = Path(folder)
    files = gate_files(gate, root.name, (root / ADAPTER).read_bytes())
    for name in (CARD, CONFIG):  # with the last one the folder is a gate
        write_atomically(root / name, files[name])
    return root


def gate_files(gate: SavedGate, name: str, adapter: bytes = b"") -> dict[str, bytes | str]:
    """Return the files of a saved gate's folder, by name.

    Args:
        gate: The gate.
        name: What its card calls it.
        adapter: The content of its adapter's file, which is there already.
    """
    arrays: dict[str, Any] = {}
    content = without_arrays(asdict(gate), arrays)
    weights = tensor_bytes(arrays) if arrays else adapter
    digest = hashlib.sha256(weights).hexdigest() if weights else ""
    config = {"format": FORMAT, **content, "weights_sha256": digest}
    files: dict[str, bytes | str] = {CONFIG: json_text(config), CARD: model_card(gate, name)}
    if arrays:
        files[WEIGHTS] = weights
    return files


def tuned_files(gate: TunedArtifact, prior: str | Path, name: str = "tuned") -> dict[str, bytes | str]:
    """Return the files of a tuned gate's folder; the prior's are copied, so that it stays what it is.

    Args:
        gate: The correction.
        prior: The gate that is corrected: a folder, or the name of a shipped gate.
        name: What its card calls it.

    Raises:
        ModelLoadError: There is no such prior.
    """
    files = gate_files(gate, name)
    for file in sorted(saved_folder(prior).iterdir()):
        if file.is_file():
            files[f"{PRIOR}/{file.name}"] = file.read_bytes()
    return files


def read_gate(name: str | Path) -> SavedGate:
    """Read and check a saved gate; every call does so anew.

    Args:
        name: A local folder, the name of a shipped gate, or a Hub id.

    Raises:
        ModelLoadError: There is none, a file is damaged or missing, or it is from a newer version.
    """
    folder = saved_folder(name)
    try:
        content = parse_json((folder / CONFIG).read_bytes())
        if not isinstance(content, dict):
            raise ValueError(f"{CONFIG} is no JSON object")
        version, digest = content.pop("format", None), content.pop("weights_sha256", "")
        if isinstance(version, int) and version > FORMAT:
            raise ModelLoadError(
                f"The gate in {str(folder)!r} has format {version}, newer than {FORMAT}.",
                hint="Upgrade rgate-integrations.",
            )
        method = content.get("method")
        kind = _WITH_WEIGHTS.get(method, SavedGate) if isinstance(method, str) else SavedGate
        file = folder / (ADAPTER if kind is SavedGate else WEIGHTS)
        if digest or os.path.isfile(file):
            weights = _checked(file, digest)
            if kind is not SavedGate:
                put_arrays(content, read_tensors(weights))
        return kind(**content)
    except (OSError, ValueError) as error:
        raise unreadable(folder, error) from error


def _checked(file: Path, digest: Any) -> bytes:
    weights = file.read_bytes()
    if hashlib.sha256(weights).hexdigest() != digest:
        raise ModelLoadError(
            f"{file.name} in {str(file.parent)!r} is damaged: its checksum is not the recorded one.",
            hint="Copy it again.",
        )
    return weights


def unreadable(folder: Path, error: Exception) -> ModelLoadError:
    """Return the error for a gate of whose files one is missing or makes no sense."""
    reason = f"{type(error).__name__}: {error}"
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False)[0]
        reason = f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']}"
    return ModelLoadError(
        f"The gate in {str(folder)!r} cannot be read: {reason}.", hint="Train it again, or copy it again."
    )


def _from_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download  # slow to import

    files = [CONFIG, CARD, WEIGHTS, ADAPTER, "adapter_config.json", f"{PRIOR}/*"]
    try:
        return Path(snapshot_download(name, allow_patterns=files))
    except Exception as error:  # the Hub client raises errors of several libraries
        raise ModelLoadError(
            f"The gate {name!r} could not be fetched from the Hub: {str(error).splitlines()[0]}",
            hint="Check the name and the network, or give a local folder.",
        ) from error


def push_to_hub(folder: str | Path, repo_id: str, *, private: bool = False, token: str | None = None) -> str:
    """Upload a saved gate's folder to the Hugging Face Hub; ``load_gate(repo_id)`` takes it from there.

    Args:
        folder: A folder that `load_gate` takes; it is checked first.
        repo_id: Such as ``"you/my-gate"``; made if it does not exist.
        private: Whether a new repository is private.
        token: Access token; by default the one of ``hf auth login``.

    Returns:
        The address of the commit.

    Raises:
        ModelLoadError: The folder holds no saved gate, or a damaged one.
    """
    read_gate(folder)
    from huggingface_hub import HfApi  # slow to import

    api = HfApi(token=token)
    api.create_repo(repo_id, private=private, exist_ok=True)
    commit = api.upload_folder(repo_id=repo_id, folder_path=str(folder))
    return str(commit.commit_url)
