"""Between LangChain's documents and the passages of an index."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence
from typing import Any

from langchain_core.documents import Document

from rgate_integrations.errors import ConfigurationError
from rgate_integrations.index import Passage


def documents_of(texts: Iterable[str], metadatas: Sequence[dict[str, Any]] | None) -> list[Document]:
    """Return texts with their metadata as documents.

    Raises:
        ConfigurationError: There are not as many of these as of those.
    """
    given = list(texts)
    if metadatas is not None and len(metadatas) != len(given):
        raise ConfigurationError(f"{len(metadatas)} metadatas do not match {len(given)} texts.")
    described = metadatas or [{} for _ in given]
    pairs = zip(given, described, strict=True)
    return [Document(page_content=text, metadata=metadata) for text, metadata in pairs]


def ids_of(documents: Sequence[Document], ids: Sequence[Any] | None) -> list[str]:
    """Return the ids that are given beside the documents or in them, and new ones where there are none.

    Raises:
        ConfigurationError: There are not as many ids as documents.
    """
    if ids is not None and len(ids) != len(documents):
        raise ConfigurationError(f"{len(ids)} ids do not match {len(documents)} documents.")
    given = ids if ids is not None else [document.id for document in documents]
    return [uuid.uuid4().hex if name is None else str(name) for name in given]  # 0 and "" are ids


def last_of_each(names: Sequence[str]) -> list[int]:
    """Return the positions of what is stored: of equal ids in one call the last one counts."""
    return sorted({name: position for position, name in enumerate(names)}.values())


def as_names(ids: Sequence[Any]) -> list[str]:
    """Return ids as they are stored: as text.

    Raises:
        ConfigurationError: It is one string.
    """
    if isinstance(ids, str):
        raise ConfigurationError(f"This takes a list of ids, not {ids!r}.", hint=f"Give [{ids!r}].")
    return [str(name) for name in ids if name is not None]


def as_passage(name: str, document: Document) -> Passage:
    """Return a document as a passage of that id."""
    return Passage(id=name, text=document.page_content, metadata=document.metadata)


def as_document(passage: Passage) -> Document:
    """Return a passage as a document; its title is part of the metadata."""
    title = {"title": passage.title} if passage.title else {}
    return Document(id=passage.id, page_content=passage.text, metadata={**passage.metadata, **title})
