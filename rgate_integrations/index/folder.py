"""An index in a folder: written so that a process that dies leaves the old one or the new one, and read with checks.

The files of each save have a folder of their own, ``v-…``. A small manifest, replaced in one step, says which is
current; then those before it are removed.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rgate_integrations.errors import ConfigurationError, IndexCorruptError, WriteError
from rgate_integrations.index.manifest import (
    MANIFEST,
    PASSAGES,
    VECTORS,
    Manifest,
    check_files,
    describe_file,
    is_version,
    read_manifest,
    write_manifest,
)
from rgate_integrations.index.passages import PassageStore
from rgate_integrations.index.vectors import Metric, VectorTable
from rgate_integrations.runtime.locks import locked


@dataclass(frozen=True)
class Contents:
    """All that an index consists of.

    Attributes:
        vectors: The vectors.
        passages: The passages.
        next_row: Number of the row that is added next.
        metric: By what the vectors are searched.
        approximation: See `PassageIndex.approximation`.
        embedder: ``name`` and ``identity`` of the embedder.
    """

    vectors: VectorTable
    passages: PassageStore
    next_row: int
    metric: Metric
    approximation: dict[str, Any] | None
    embedder: Mapping[str, str]


def write_index(root: Path, contents: Contents) -> None:
    """Write an index into a folder. One that was there stays loadable until the new one is complete.

    Raises:
        ConfigurationError: A file has that name.
        WriteError: It could not be written, such as on a full disk; an index that was there is as it was.
    """
    if root.is_file():
        raise ConfigurationError(f"{str(root)!r} is a file.", hint="Give the name of a folder.")
    # One process or thread at a time: each removes what it takes for leftovers.
    with locked(root / MANIFEST, waiting=_wait):
        version = root / f"v-{uuid.uuid4().hex[:12]}"
        try:
            version.mkdir()
            _write_version(version, contents)
            write_manifest(root, _manifest(version, contents))
        except BaseException as error:
            # The manifest may have been replaced for all that, as by Ctrl-C right after it.
            if not _is_current(root, version):
                shutil.rmtree(version, ignore_errors=True)
            # FAISS says it in words of its own, and not by an OSError.
            if isinstance(error, OSError | RuntimeError | sqlite3.Error):
                raise _not_written(root, error) from error
            raise
        _remove_others(root, version)


def _wait() -> None:
    """Wait for another process that saves into the same folder; it takes seconds."""


def _write_version(version: Path, contents: Contents) -> None:
    contents.vectors.write(version / VECTORS)
    contents.passages.save(version / PASSAGES)
    for name in (VECTORS, PASSAGES):
        _to_disk(version / name)  # before the manifest is: it must not outlive a power cut that they do not


def _not_written(root: Path, error: Exception) -> WriteError:
    if isinstance(error, WriteError):
        return error
    return WriteError(
        f"The index {str(root)!r} could not be written: {error}.",
        hint="Free some space, or save it elsewhere. What was there is as it was.",
    )


def read_index(root: Path, *, mmap: bool = False) -> Contents:
    """Read an index from a folder.

    Args:
        root: The folder.
        mmap: Leave the vectors on disk and map them into memory.

    Raises:
        IndexNotFoundError: There is no index in the folder.
        IndexCorruptError: A file is missing, truncated, changed, or does not fit to the others.
        IndexMismatchError: The format is newer than this version of the package.
    """
    while True:
        manifest = read_manifest(root)
        try:
            check_files(root, manifest)
            return _opened(root, manifest, mmap)
        except IndexCorruptError:
            # Another process may have saved meanwhile, and removed what we were about to read.
            if read_manifest(root).version == manifest.version:
                raise


def _opened(root: Path, manifest: Manifest, mmap: bool) -> Contents:
    version = root / manifest.version
    vectors = VectorTable(metric=manifest.metric)
    if manifest.passages:  # what is saved of an empty index has no dimension
        vectors = VectorTable.read(version / VECTORS, manifest.metric, mmap=mmap)
    passages = PassageStore.read(version / PASSAGES)
    _check_fit(root, manifest, vectors, passages)
    return Contents(
        vectors, passages, manifest.next_row, manifest.metric, manifest.approximation, manifest.embedder
    )


def _check_fit(root: Path, manifest: Manifest, vectors: VectorTable, passages: PassageStore) -> None:
    """Refuse parts that are of different indexes: a passage would be found under the vector of another one."""
    rows = passages.rows()
    if not len(vectors) == len(rows) == manifest.passages:
        raise _misfit(
            root, f"{len(vectors)} vectors for {len(rows)} passages, and should have {manifest.passages}"
        )
    if not np.array_equal(vectors.rows(), rows):
        raise _misfit(root, "vectors that are not those of its passages")
    if len(rows) and (rows[0] < 0 or rows[-1] >= manifest.next_row):
        raise _misfit(root, "rows that its manifest does not know")
    if len(rows) and vectors.dimension != manifest.dimension:
        raise _misfit(root, f"vectors of dimension {vectors.dimension}, not {manifest.dimension}")
    if vectors.exact != (manifest.approximation is None):
        raise _misfit(root, "vectors of another kind than its manifest says")


def _misfit(root: Path, what: str) -> IndexCorruptError:
    return IndexCorruptError(f"The index {str(root)!r} has {what}.", hint="Build the index again.")


def _manifest(version: Path, contents: Contents) -> Manifest:
    return Manifest(
        version=version.name,
        passages=len(contents.vectors),
        next_row=contents.next_row,
        dimension=contents.vectors.dimension or 1,
        metric=contents.metric,
        approximation=contents.approximation,
        embedder=dict(contents.embedder),
        files={name: describe_file(version / name) for name in (VECTORS, PASSAGES)},
    )


def _is_current(root: Path, version: Path) -> bool:
    try:
        return read_manifest(root).version == version.name
    except Exception:
        return False


def _remove_others(root: Path, version: Path) -> None:
    for old in root.glob("v-*"):
        if is_version(old) and old.name != version.name:
            shutil.rmtree(old)
    for unfinished in root.glob(f".{MANIFEST}-*"):
        unfinished.unlink()


def _to_disk(path: Path) -> None:
    with path.open("rb+") as file:
        os.fsync(file.fileno())
