"""Checkpoints of a training run: which run they are of, and which of them can be gone on from.

A checkpoint is sealed with the checksums of its files when it is complete. What a kill left half written has no seal,
and what was damaged later does not match it.
"""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

from rgate_integrations.errors import ConfigurationError
from rgate_integrations.runtime.files import json_text, parse_json, write_atomically

_SEAL = "checksums.json"
_RUN = "run.json"


def prepare(checkpoints: Path, identity: str, resume: bool) -> bool:
    """Return whether there are checkpoints of this very run to go on from; else make an empty folder for them.

    Raises:
        ConfigurationError: The checkpoints are of a run with other data, options or weights.
    """
    marker = checkpoints / _RUN
    if resume and _keep_whole(checkpoints):
        if marker.is_file() and marker.read_text(encoding="utf-8") == identity:
            return True
        raise ConfigurationError(
            "The run that was stopped had other data, options or another base model.",
            hint="Leave out --resume to begin anew, or train into another folder.",
        )
    shutil.rmtree(checkpoints, ignore_errors=True)
    write_atomically(marker, identity)
    return False


def seal(checkpoint: Path) -> None:
    """Write the checksums of a complete checkpoint's files into it.

    Raises:
        WriteError: They could not be written, such as on a full disk.
    """
    write_atomically(checkpoint / _SEAL, json_text(_checksums(checkpoint)))


def _keep_whole(checkpoints: Path) -> bool:
    """Remove the checkpoints that are not as they were sealed; returns whether one is left."""
    left = False
    for folder in checkpoints.glob("checkpoint-*"):
        if _is_whole(folder):
            left = True
        else:
            shutil.rmtree(folder, ignore_errors=True)
    return left


def _is_whole(checkpoint: Path) -> bool:
    try:
        sealed = parse_json((checkpoint / _SEAL).read_bytes())
        found = _checksums(checkpoint)
    except (OSError, ValueError):
        return False
    # Other processes of the run may add files of their own after the seal.
    return isinstance(sealed, dict) and bool(sealed) and sealed.items() <= found.items()


def _checksums(checkpoint: Path) -> dict[str, str]:
    found = {}
    for path in sorted(checkpoint.iterdir()):
        if path.is_file() and path.name != _SEAL:
            with path.open("rb") as file:
                found[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return found
