"""The manifest of a saved index: which files are current, and what they are checked against."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from rgate_integrations.errors import IndexCorruptError, IndexMismatchError, IndexNotFoundError

FORMAT = 1
MANIFEST = "index.json"
_BUILD = "rgate index build --corpus FILE.jsonl --out DIR"


def read_manifest(root: Path) -> dict[str, Any]:
    """Read the manifest of an index, and check every file that it names.

    Args:
        root: Folder of the index.

    Raises:
        IndexNotFoundError: There is no index in the folder.
        IndexCorruptError: The manifest or a file is missing, truncated or changed.
        IndexMismatchError: The format is newer than this version of the package.
    """
    path = root / MANIFEST
    if not path.is_file():
        raise IndexNotFoundError(f"There is no index in {str(root)!r}.", hint=_BUILD)
    try:
        manifest: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        newer = manifest["format"] > FORMAT
    except (ValueError, KeyError, TypeError) as error:
        raise IndexCorruptError(
            f"The file {MANIFEST} of the index {str(root)!r} cannot be read.", hint="Build the index again."
        ) from error
    if newer:
        raise IndexMismatchError(
            f"The index {str(root)!r} has format {manifest['format']}, newer than {FORMAT}.",
            hint="Upgrade rgate-integrations.",
        )
    for name, expected in manifest["files"].items():
        file = root / manifest["version"] / name
        if not file.is_file() or describe_file(file) != expected:
            raise IndexCorruptError(
                f"The file {name} of the index {str(root)!r} is missing, truncated or changed.",
                hint=f"Build the index again: {_BUILD}",
            )
    return manifest


def describe_file(path: Path) -> dict[str, Any]:
    """Return size and checksum of a file, by which a later `read_manifest` knows it again."""
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}
