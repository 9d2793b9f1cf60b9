"""An index in a folder: written so that a process that dies leaves the old one or the new one, and read with checks.

The files of each save have a folder of their own, ``v-…``. A small manifest, replaced in one step, says which is
current; then those before it are removed.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rgate_integrations.errors import ConfigurationError, IndexCorruptError
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
    """
    if root.is_file():
        raise ConfigurationError(f"{str(root)!r} is a file.", hint="Give the name of a folder.")
    root.mkdir(parents=True, exist_ok=True)
    with _only_writer(root):
        version = root / f"v-{uuid.uuid4().hex[:12]}"
        version.mkdir()
        try:
            contents.vectors.write(version / VECTORS)
            contents.passages.save(version / PASSAGES)
            for name in (VECTORS, PASSAGES):
                _to_disk(
                    version / name
                )  # before the manifest is: it must not outlive a power cut that they do not
            write_manifest(root, _manifest(version, contents))
        except BaseException:
            # The manifest may have been replaced for all that, as by Ctrl-C right after it.
            if not _is_current(root, version):
                shutil.rmtree(version, ignore_errors=True)
            raise
        _remove_others(root, version)


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


@contextmanager
def _only_writer(root: Path) -> Iterator[None]:
    """Let one process or thread at a time write into a folder: each removes what it takes for leftovers.

    The lock is the system's, so a process that is killed does not keep it.
    """
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    with (root / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
