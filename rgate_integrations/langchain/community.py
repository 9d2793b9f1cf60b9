"""Reads the folders that ``langchain_community``'s FAISS store saved, and runs nothing of what is in them.

Such a folder holds vectors in ``index.faiss`` and documents in ``index.pkl``. A pickle names the classes and
functions that it is made of, and whoever made it chose them. Here the names that such a folder needs lead to
stand-ins without behaviour, and any other name is an error. So nothing that the pickle chose is imported or called.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from langchain_core.documents import Document

from rgate_integrations.errors import DataFormatError, IndexNotFoundError
from rgate_integrations.index.vectors import Metric, read_vectors
from rgate_integrations.runtime.arrays import Float32Array

_HINT = "Load the store with langchain_community, and give its documents to FaissVectorStore.from_community_index."


@dataclass(frozen=True)
class CommunityStore:
    """What a folder of ``langchain_community``'s FAISS store holds.

    Attributes:
        documents: The documents, each with its id.
        vectors: Their vectors, shape (documents, dimension).
        metric: By what the store searched.
    """

    documents: list[Document]
    vectors: Float32Array
    metric: Metric


def read_community_folder(folder: str | Path, index_name: str = "index") -> CommunityStore:
    """Read such a folder.

    Args:
        folder: The folder.
        index_name: Name of its two files.

    Raises:
        IndexNotFoundError: There are no such files in it.
        IndexCorruptError: The vectors cannot be read.
        DataFormatError: The pickle holds anything but documents with plain metadata, or does not fit the vectors.
    """
    root = Path(folder)
    vectors_file, pickle_file = root / f"{index_name}.faiss", root / f"{index_name}.pkl"
    for file in (vectors_file, pickle_file):
        if not file.is_file():
            raise IndexNotFoundError(f"There is no {file.name} in {str(root)!r}.")
    vectors, metric = read_vectors(vectors_file)
    names, documents = _unpickled(pickle_file)
    # Row numbers without a gap: the store numbers them anew after each deletion.
    if sorted(names) != list(range(len(vectors))):
        raise DataFormatError(
            f"{str(pickle_file)!r} does not fit the {len(vectors)} vectors beside it.", hint=_HINT
        )
    ordered = [_named(documents, names[row], pickle_file) for row in range(len(vectors))]
    return CommunityStore(ordered, np.asarray(vectors), metric)


def has_community_folder(folder: str | Path, index_name: str = "index") -> bool:
    """Whether a folder looks like one that ``langchain_community`` saved."""
    return (Path(folder) / f"{index_name}.pkl").is_file()


class _StandIn:
    """Takes the place of a class in a pickle, and keeps the state that it is given."""

    state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Docstore(_StandIn):
    pass


class _Document(_StandIn):
    pass


_ALLOWED: dict[str, Callable[..., Any]] = {"InMemoryDocstore": _Docstore, "Document": _Document, "set": set}
_HOMES = (
    "langchain",
    "langchain_community",
    "langchain_core",
    "builtins",
    "__builtin__",
)  # the last in old protocols


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Return a stand-in for what is allowed; never import anything."""
        if module.partition(".")[0] not in _HOMES or name not in _ALLOWED:
            raise pickle.UnpicklingError(f"it holds a {module}.{name}")
        return _ALLOWED[name]


def _unpickled(file: Path) -> tuple[dict[int, str], dict[str, Any]]:
    """Return the ids by row, and what stands for the documents by id."""
    try:
        with file.open("rb") as content:
            docstore, names = _Unpickler(content).load()
        documents = docstore.state["_dict"]
    except Exception as error:  # a pickle that is damaged or made up raises whatever it likes
        raise DataFormatError(f"{str(file)!r} cannot be read without risk: {error}.", hint=_HINT) from error
    if not isinstance(names, dict) or not isinstance(documents, dict):
        raise DataFormatError(f"{str(file)!r} does not hold documents.", hint=_HINT)
    if not all(type(row) is int for row in names):
        raise DataFormatError(f"{str(file)!r} numbers its documents with something else.", hint=_HINT)
    return names, documents


def _named(documents: dict[str, Any], name: str, file: Path) -> Document:
    """Return the document of an id."""
    try:
        fields = documents[name].state["__dict__"]
        return Document(id=str(name), page_content=fields["page_content"], metadata=dict(fields["metadata"]))
    except Exception as error:
        raise DataFormatError(f"{str(file)!r} has no usable document {name!r}.", hint=_HINT) from error
