"""Builds an index from a corpus file so that a build that was stopped continues where it was."""

from __future__ import annotations

import hashlib
import io
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path

import numpy as np

from rgate_integrations.errors import DataFormatError
from rgate_integrations.index.embedder import Embedder
from rgate_integrations.index.passage_index import PassageIndex
from rgate_integrations.index.passages import Passage, read_passages
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
    with locked(root):  # the parts are of one build
        return _built(corpus, root, embedder, report)


def _built(
    corpus: str | Path, root: Path, embedder: Embedder, report: Callable[[int], None] | None
) -> PassageIndex:
    parts = root / ".building"
    _prepare(parts, {"corpus": _digest(Path(corpus)), "embedder": embedder.identity, "part": _PART})
    index = PassageIndex(embedder)
    for number, passages in enumerate(_chunks(read_passages(corpus))):
        index.add_vectors(passages, _part(parts / f"{number:06d}.npy", passages, embedder))
        if report is not None:
            report(len(index))
    if not len(index):
        raise DataFormatError(f"The corpus {str(corpus)!r} holds no passages.")
    index.optimise()
    index.save(root)
    shutil.rmtree(parts)
    return index


def _part(file: Path, passages: Sequence[Passage], embedder: Embedder) -> Float32Array:
    """Return the vectors of a part of the corpus: those of an earlier run, or new ones, which are kept."""
    kept = _kept(file)
    if kept is not None and kept.ndim == 2 and len(kept) == len(passages):
        return kept
    vectors = embedder.embed([passage.searchable for passage in passages])
    content = io.BytesIO()
    np.save(content, vectors, allow_pickle=False)
    write_atomically(file, content.getvalue())
    return vectors


def _kept(file: Path) -> Float32Array | None:
    """Return the vectors in a file; None if there are none that can be read."""
    if not file.is_file():
        return None
    try:
        found: Float32Array = np.load(file, allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None
    return found


def _prepare(parts: Path, made_of: dict[str, object]) -> None:
    """Keep the parts of an earlier run if they are of the same corpus and embedder, else begin anew."""
    about, text = parts / "about.json", json.dumps(made_of, sort_keys=True)
    if about.is_file() and about.read_bytes() == text.encode():
        return
    shutil.rmtree(parts, ignore_errors=True)
    parts.mkdir(parents=True)
    write_atomically(about, text)


def _digest(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise DataFormatError(
            f"The corpus {str(path)!r} cannot be read: {error.strerror or error}."
        ) from error


def _chunks(passages: Iterator[Passage]) -> Iterator[Sequence[Passage]]:
    while chunk := list(islice(passages, _PART)):
        yield chunk
