"""Converts LangChain's documents to passages and to the context of a prompt, and fuses the results of searches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from langchain_core.documents import Document

from rgate_integrations.errors import ConfigurationError
from rgate_integrations.gates.passage_utility import FoundPassage
from rgate_integrations.index.hybrid import fuse
from rgate_integrations.prompts import format_passages


def as_passage(document: Document) -> FoundPassage:
    """Convert a document to a passage."""
    return FoundPassage.from_metadata(document.page_content, document.metadata)


def rankings_in(value: Any) -> Iterator[list[Document]]:
    """Yield the documents in a value, such as the output of a search.

    Each list, tuple or mapping in the value, at any depth, yields one list: the documents that are directly in it,
    perhaps none. A document by itself yields a list of one; any other object yields nothing.
    """
    if isinstance(value, Document):
        value = [value]
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        yield [each for each in value if isinstance(each, Document)]
        for each in value:
            if not isinstance(each, Document):
                yield from rankings_in(each)


def check_documents(found: Any) -> Sequence[Document]:
    """Return what a search found as a sequence of documents.

    Raises:
        ConfigurationError: It is anything but documents.
    """
    documents = found if isinstance(found, Sequence) else [found]
    for document in documents:
        if not isinstance(document, Document):
            raise ConfigurationError(
                f"The retriever returned {type(document).__name__} instead of documents.",
                hint="Use the retriever itself, not a chain that converts its documents.",
            )
    return documents


def format_documents(documents: Any) -> str:
    """Join documents into the context of a prompt: numbered, each with its title if it has one.

    Raises:
        ConfigurationError: They are anything but documents.
    """
    return format_passages(map(as_passage, check_documents(documents)))


def longest(results: Sequence[Any]) -> int:
    """Return the number of documents of the search that found the most, at least 1."""
    return max([1, *(len(result) for result in results if isinstance(result, Sequence))])


def fuse_documents(
    origins: Sequence[Mapping[str, Any]], results: Sequence[Any], k: int | None = None
) -> list[Document] | Exception:
    """Return the documents of one question's searches, best first; several searches are fused by reciprocal rank.

    The documents are copies. Their metadata also has the origin of their search, and their rank in it as
    ``rgate_rank``, from 1; existing keys keep their values.

    Errors are returned, not raised: the exception of a search that failed, or a `ConfigurationError` if a search
    returned anything but documents.

    Args:
        origins: Metadata to add to the documents of each search.
        results: The documents of each search, best first, or its exception.
        k: Maximum number of documents; None for no limit.
    """
    rankings = []
    for origin, result in zip(origins, results, strict=True):
        if isinstance(result, Exception):
            return result
        try:
            documents = check_documents(result)
        except ConfigurationError as error:
            return error
        ranking = []
        for rank, document in enumerate(documents, start=1):
            # Some stores return documents whose metadata is None.
            # The document's own metadata comes last, so that our keys never overwrite it.
            metadata = {**origin, "rgate_rank": rank, **(document.metadata or {})}
            ranking.append(document.model_copy(update={"metadata": metadata}))
        rankings.append(ranking)
    if len(rankings) == 1:  # nothing to fuse: texts and ids may be repeated
        return rankings[0][:k]
    # A passage may be in several corpora, under different ids. A document without text may be an image.
    return fuse(
        rankings,
        key=lambda document: as_passage(document) if document.page_content else document.id,
        k=k,
    )
