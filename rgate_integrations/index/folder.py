"""An index in a folder: written so that a process that dies leaves the old one or the new one, and read with checks.

The files of each save have a folder of their own, ``v-…``. A small manifest, replaced in one step, says which is
current; then those before it are removed.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import uuid
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from rgate_integrations.errors import (
    ConfigurationError,
    IndexCorruptError,
    IndexMismatchError,
    IndexNotFoundError,
    RGateError,
    WriteError,
)
from rgate_integrations.index.passages import PassageStore
from rgate_integrations.index.vectors import Metric, VectorTable
from rgate_integrations.runtime.files import locked, write_atomically

FORMAT = 3
MANIFEST = "index.json"
VECTORS, PASSAGES = "vectors.faiss", "passages.jsonl"
_VERSION = r"^v-[0-9a-f]{12}$"
_BUILD = "rgate index build --corpus FILE.jsonl --out DIR"
_STRICT = ConfigDict(strict=True, frozen=True)  # 1.0 or true is no number of rows
_Rows = Annotated[int, Field(ge=0, lt=2**62)]


class EmbedderId(BaseModel):
    """What an index was built with.

    Attributes:
        name: What the embedder is opened with.
        identity: Changes when its vectors would.
    """

    model_config = _STRICT

    name: str
    identity: str


class Manifest(BaseModel):
    """What a saved index is. It may come from anywhere.

    Attributes:
        format: Of the folder.
        version: Name of the folder with its files.
        passages: How many there are.
        next_row: Number of the row that is added next.
        dimension: Length of a vector; 1 if there never was one.
        metric: By what it is searched.
        approximation: See `PassageIndex.approximation`.
        embedder: What it was built with.
        files: Size and checksum by name.
    """

    model_config = _STRICT

    format: int = Field(ge=1)
    version: str = Field(pattern=_VERSION)
    passages: _Rows
    next_row: _Rows
    dimension: int = Field(ge=1)
    metric: Metric
    approximation: str | None = None
    embedder: EmbedderId
    files: dict[str, Any]

    @field_validator("format")
    @classmethod
    def _is_current(cls, value: int) -> int:
        if value != FORMAT:
            raise IndexMismatchError(
                f"The index has format {value}, not {FORMAT}.",
                hint=f"Build it again ({_BUILD}), or upgrade rgate-integrations if the format is newer.",
            )
        return value


def write_index(
    root: Path,
    vectors: VectorTable,
    passages: PassageStore,
    *,
    next_row: int,
    approximation: str | None,
    embedder: EmbedderId,
) -> None:
    """Write an index into a folder. One that was there stays loadable until the new one is complete.

    Raises:
        ConfigurationError: A file has that name.
        WriteError: It could not be written, such as on a full disk; an index that was there is as it was.
    """
    if root.is_file():
        raise ConfigurationError(f"{str(root)!r} is a file.", hint="Give the name of a folder.")
    # One process or thread at a time: each removes what it takes for leftovers. Another is waited for.
    with locked(root / MANIFEST, waiting=lambda: None):
        version = root / f"v-{uuid.uuid4().hex[:12]}"
        try:
            version.mkdir()
            vectors.write(version / VECTORS)
            passages.save(version / PASSAGES)
            for name in (VECTORS, PASSAGES):
                _to_disk(
                    version / name
                )  # before the manifest is: it must not outlive a power cut that they do not
            manifest = Manifest(
                format=FORMAT,
                version=version.name,
                passages=len(vectors),
                next_row=next_row,
                dimension=vectors.dimension or 1,
                metric=vectors.metric,
                approximation=approximation,
                embedder=embedder,
                files={name: describe_file(version / name) for name in (VECTORS, PASSAGES)},
            )
            write_atomically(root / MANIFEST, manifest.model_dump_json(indent=1))
        except WriteError:
            raise
        except (OSError, RuntimeError) as error:  # FAISS says it by a RuntimeError
            raise WriteError(
                f"The index {str(root)!r} could not be written: {error}.",
                hint="Free some space, or save it elsewhere. What was there is as it was.",
            ) from error
        finally:
            _remove_others(root)


def read_index(root: Path) -> tuple[Manifest, VectorTable, PassageStore]:
    """Read an index from a folder.

    Raises:
        IndexNotFoundError: There is no index in the folder.
        IndexCorruptError: A file is missing, truncated, changed, or does not fit to the others.
        IndexMismatchError: The format is newer than this version of the package.
    """
    while True:
        manifest = read_manifest(root)
        version = root / manifest.version
        try:
            check_files(root, manifest)
            vectors = VectorTable(manifest.metric)
            if manifest.passages:  # what is saved of an empty index has no dimension
                vectors = VectorTable.read(version / VECTORS, manifest.metric)
            passages = PassageStore.read(version / PASSAGES)
            _check_fit(root, manifest, vectors, passages)
            return manifest, vectors, passages
        except IndexCorruptError:
            # Another process may have saved meanwhile, and removed what we were about to read.
            if read_manifest(root).version == manifest.version:
                raise


def read_manifest(root: Path) -> Manifest:
    """Read the manifest of an index. The files that it names are for `check_files`.

    Raises:
        IndexNotFoundError: There is no index in the folder.
        IndexCorruptError: The manifest cannot be read, or says what cannot be.
        IndexMismatchError: The format is newer than this version of the package.
    """
    path = root / MANIFEST
    if not path.is_file():
        raise IndexNotFoundError(f"There is no index in {str(root)!r}.", hint=_BUILD)
    try:
        return Manifest.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        raise _corrupt(
            f"The file {MANIFEST} of the index {str(root)!r} cannot be read, or says what cannot be."
        ) from error


def check_files(root: Path, manifest: Manifest) -> None:
    """Check the files that a manifest names.

    Raises:
        IndexCorruptError: One is missing, truncated or changed.
    """
    for name in (VECTORS, PASSAGES):
        try:
            intact = describe_file(root / manifest.version / name) == manifest.files.get(name)
        except OSError:
            intact = False
        if not intact:
            raise _corrupt(f"The file {name} of the index {str(root)!r} is missing, truncated or changed.")


def describe_file(path: Path) -> dict[str, Any]:
    """Return size and checksum of a file, by which a later `check_files` knows it again."""
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _check_fit(root: Path, manifest: Manifest, vectors: VectorTable, passages: PassageStore) -> None:
    """Refuse parts that are of different indexes: a passage would be found under the vector of another one."""
    rows = passages.rows()
    if not len(vectors) == len(rows) == manifest.passages:
        counts = f"{len(vectors)} vectors for {len(rows)} passages"
        raise _corrupt(f"The index {str(root)!r} has {counts}, and should have {manifest.passages}.")
    fits = np.array_equal(vectors.rows(), rows) and vectors.exact == (manifest.approximation is None)
    if len(rows):
        fits = fits and rows[0] >= 0 and rows[-1] < manifest.next_row
        fits = fits and vectors.dimension == manifest.dimension
    if not fits:
        raise _corrupt(f"The index {str(root)!r} has vectors that are not those of its passages.")


def _corrupt(message: str) -> IndexCorruptError:
    return IndexCorruptError(message, hint=f"Build the index again: {_BUILD}")


def _remove_others(root: Path) -> None:
    """Remove the versions that the manifest does not name: earlier ones, and what was not written to its end."""
    try:
        current = read_manifest(root).version
    except IndexNotFoundError:
        current = ""
    except RGateError:  # nobody knows which version is meant
        return
    for other in root.glob("v-*"):
        if re.fullmatch(_VERSION, other.name) and other.name != current:
            shutil.rmtree(other, ignore_errors=True)
    for unfinished in root.glob(f".{MANIFEST}-*"):
        unfinished.unlink(missing_ok=True)


def _to_disk(path: Path) -> None:
    with path.open("rb+") as file:
        os.fsync(file.fileno())
