"""Builds an index from a corpus file so that a build that was stopped continues where it was."""

from __future__ import annotations

import hashlib
import io
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from rgate_integrations.errors import DataFormatError
from rgate_integrations.index.embedder import Embedder
from rgate_integrations.index.passage_index import PassageIndex
from rgate_integrations.index.passages import Passage, in_batches, read_passages
from rgate_integrations.runtime.arrays import Float32Array
from rgate_integrations.runtime.files import write_atomically
from rgate_integrations.runtime.locks import locked

_PART = 1_024


def build_resumable(
    corpus: str | Path, out: str | Path, embedder: Embedder, report: Callable[[int], None] | None = None
) -> PassageIndex:
    """Embed the passages of a corpus file and save the index; vectors are kept in parts until it is complete.

    Parts of another corpus or another embedder are not used. An index that is in ``out`` already stays loadable
    until the new one is complete.

    Args:
        corpus: See `rgate_integrations.index.read_passages`.
        out: Folder for the index.
        embedder: Embeds the passages.
        report: Told how many passages are embedded.

    Raises:
        DataFormatError: The corpus cannot be read or is empty, an id occurs twice, or a text is empty.
        LockedError: Another process is building the index.
    """
    root = Path(out)
    parts = root / ".building"
    with locked(root):  # the parts are of one build
        _prepare(parts, Path(corpus), embedder)
        index = PassageIndex(embedder)
        for number, passages in enumerate(in_batches(read_passages(corpus), _PART)):
            index.add(passages, _embedded(parts / f"{number:06d}.npy", passages, embedder))
            if report is not None:
                report(len(index))
        if not len(index):
            raise DataFormatError(f"The corpus {str(corpus)!r} holds no passages.")
        index.optimise()
        index.save(root)
        shutil.rmtree(parts)
    return index


def _prepare(parts: Path, corpus: Path, embedder: Embedder) -> None:
    """Keep the parts of an earlier run if they are of the same corpus and embedder, else begin anew."""
    try:
        with corpus.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise DataFormatError(
            f"The corpus {str(corpus)!r} cannot be read: {error.strerror or error}."
        ) from error
    about = parts / "about.json"
    made_of = json.dumps({"corpus": digest, "embedder": embedder.identity, "part": _PART}, sort_keys=True)
    if not about.is_file() or about.read_bytes() != made_of.encode():
        shutil.rmtree(parts, ignore_errors=True)
        write_atomically(about, made_of)


def _embedded(file: Path, passages: Sequence[Passage], embedder: Embedder) -> Float32Array:
    """Return the vectors of a part of the corpus: those of an earlier run, or new ones, which are kept."""
    try:
        kept: Float32Array = np.load(file, allow_pickle=False)
        if kept.ndim == 2 and len(kept) == len(passages):
            return kept
    except (OSError, ValueError, EOFError):
        pass  # there are none, or a run was killed while it wrote them
    vectors = embedder.embed([passage.searchable for passage in passages])
    content = io.BytesIO()
    np.save(content, vectors, allow_pickle=False)
    write_atomically(file, content.getvalue())
    return vectors
