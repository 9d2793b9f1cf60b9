"""The manifest of a saved index: which files are current, and what they are checked against."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rgate_integrations.errors import IndexCorruptError, IndexMismatchError, IndexNotFoundError
from rgate_integrations.index.vectors import METRICS, Metric
from rgate_integrations.runtime.files import json_text, write_atomically

FORMAT = 2  # 1 had no metric, and was always cosine
MANIFEST = "index.json"
VECTORS, PASSAGES = "vectors.faiss", "passages.sqlite"
_VERSION = re.compile(r"v-[0-9a-f]{12}")
_MOST_ROWS = 2**62
_BUILD = "rgate index build --corpus FILE.jsonl --out DIR"


@dataclass(frozen=True)
class Manifest:
    """What a saved index is.

    Attributes:
        version: Name of the folder with its files.
        passages: How many there are.
        next_row: Number of the row that is added next.
        dimension: Length of a vector; 1 if there never was one.
        metric: By what it is searched.
        approximation: See `PassageIndex.approximation`.
        embedder: ``name`` and ``identity``.
        files: Size and checksum by name.
    """

    version: str
    passages: int
    next_row: int
    dimension: int
    metric: Metric
    approximation: dict[str, Any] | None
    embedder: Mapping[str, str]
    files: Mapping[str, Mapping[str, Any]]


def is_version(path: Path) -> bool:
    """Whether a path has the name of a folder with an index's files."""
    return _VERSION.fullmatch(path.name) is not None


def write_manifest(root: Path, manifest: Manifest) -> None:
    """Make a saved version the current one, in one step."""
    write_atomically(root / MANIFEST, json_text({"format": FORMAT, **asdict(manifest)}))


def read_manifest(root: Path) -> Manifest:
    """Read the manifest of an index. The files that it names are for `check_files`.

    Args:
        root: Folder of the index.

    Raises:
        IndexNotFoundError: There is no index in the folder.
        IndexCorruptError: The manifest cannot be read, or says what cannot be.
        IndexMismatchError: The format is newer than this version of the package.
    """
    path = root / MANIFEST
    if not path.is_file():
        raise IndexNotFoundError(f"There is no index in {str(root)!r}.", hint=_BUILD)
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise _corrupt(root, "cannot be read") from error
    if not isinstance(record, dict) or not _is_count(record.get("format"), least=1):
        raise _corrupt(root, "is no manifest")
    if record["format"] > FORMAT:
        raise IndexMismatchError(
            f"The index {str(root)!r} has format {record['format']}, newer than {FORMAT}.",
            hint="Upgrade rgate-integrations.",
        )
    wrong = [name for name, fits in _fitting(record).items() if not fits]
    if wrong:
        raise _corrupt(root, f"has no usable {', '.join(wrong)}")
    return Manifest(
        version=record["version"],
        passages=record["passages"],
        next_row=record["next_row"],
        dimension=record["dimension"],
        metric=record.get("metric", "cosine"),
        approximation=record.get("approximation"),
        embedder=record["embedder"],
        files=record["files"],
    )


def check_files(root: Path, manifest: Manifest) -> None:
    """Check every file that a manifest names.

    Raises:
        IndexCorruptError: One is missing, truncated or changed.
    """
    for name, expected in manifest.files.items():
        try:
            intact = describe_file(root / manifest.version / name) == expected
        except OSError:
            intact = False
        if not intact:
            raise IndexCorruptError(
                f"The file {name} of the index {str(root)!r} is missing, truncated or changed.",
                hint=f"Build the index again: {_BUILD}",
            )


def describe_file(path: Path) -> dict[str, Any]:
    """Return size and checksum of a file, by which a later `check_files` knows it again."""
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _fitting(record: dict[str, Any]) -> dict[str, bool]:
    """Return for each entry of a manifest whether it can be used. It may come from anywhere."""
    version, embedder = record.get("version"), record.get("embedder")
    files, approximation = record.get("files"), record.get("approximation")
    return {
        "version": isinstance(version, str) and _VERSION.fullmatch(version) is not None,
        "passages": _is_count(record.get("passages")),
        "next_row": _is_count(record.get("next_row")),
        "dimension": _is_count(record.get("dimension"), least=1),
        "metric": record.get("metric", "cosine") in METRICS,
        "approximation": approximation is None or isinstance(approximation, dict),
        "embedder": isinstance(embedder, dict)
        and isinstance(embedder.get("name"), str)
        and isinstance(embedder.get("identity"), str),
        "files": isinstance(files, dict)
        and files.keys() == {VECTORS, PASSAGES}
        and all(isinstance(each, dict) for each in files.values()),
    }


def _is_count(value: Any, *, least: int = 0) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value < _MOST_ROWS


def _corrupt(root: Path, why: str) -> IndexCorruptError:
    return IndexCorruptError(
        f"The file {MANIFEST} of the index {str(root)!r} {why}.", hint="Build the index again."
    )
