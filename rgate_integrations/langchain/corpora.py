"""Runnables over several corpora, of which a decision names those to search; and how documents are read and fused."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from langchain_core.documents import Document
from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.runnables.base import RunnableLike
from langchain_core.runnables.config import ensure_config
from langchain_core.runnables.utils import Input, Output

from rgate_integrations.answering.corpora import check_corpora, chosen_corpora, unknown_corpus
from rgate_integrations.corpus.profile import CorpusProfile, missing_passages, profile_index
from rgate_integrations.errors import ConfigurationError
from rgate_integrations.gates.passage_utility import FoundPassage
from rgate_integrations.index import BM25Index, HybridIndex, PassageIndex
from rgate_integrations.index.hybrid import fuse
from rgate_integrations.langchain.chat_models import as_runnable, list_parts, runnables_in
from rgate_integrations.langchain.decisions import read_bound
from rgate_integrations.langchain.runnable import (
    FlowRetriever,
    FlowRunnable,
    Run,
    TypedByPart,
    run_batch,
    run_batches,
)
from rgate_integrations.prompts import format_passages
from rgate_integrations.runtime.flow import Flow


class PerCorpus(FlowRunnable[Input, Output]):
    """One runnable per corpus; the decision of the surrounding router or `GatedRetriever` chooses among them.

    Args:
        parts: The runnables, by the names of their corpora.

    Raises:
        ConfigurationError: ``parts`` is empty, or a part is not a runnable, function or mapping.
    """

    parts: dict[str, Runnable[Any, Any]]

    def __init__(self, *, parts: Mapping[str, RunnableLike[Any, Any]], **fields: Any) -> None:
        check_corpora((), parts)
        super().__init__(
            parts={name: as_runnable(part, f"{name!r}") for name, part in parts.items()}, **fields
        )

    def choose(self, config: RunnableConfig) -> tuple[str, ...]:
        """Return the names of the parts that run for an input, best first.

        Args:
            config: The input's config. A surrounding router or `GatedRetriever` has bound its decision to it; without
                a decision, all parts run.
        """
        bound = read_bound(config)
        return chosen_corpora(None if bound is None else bound.decision, list(self.parts))

    @abstractmethod
    def merge(self, results: Mapping[str, Any]) -> Any:
        """Return the output for one input, or its exception.

        Args:
            results: What each runnable returned or raised, by the name of its corpus; the best corpus comes first.
        """

    def flow(self, runs: list[Run]) -> Flow[list[Any]]:
        """Run each part on its share of a batch, and return the merged result of each input."""
        corpora = [self.choose(single.config) for single in runs]
        # The keys are set now, so that results keep this order, best first, whichever part finishes first. A corpus
        # without a part keeps the error.
        results: list[dict[str, Any]] = [
            {name: unknown_corpus(name, self.parts) for name in names} for names in corpora
        ]
        shares, batches = {}, []
        for name, part in self.parts.items():
            share = [index for index, names in enumerate(corpora) if name in names]
            if share:
                shares[name] = share
                inputs = [runs[index].input for index in share]
                configs = [runs[index].child(name) for index in share]
                batches.append(run_batch(part, inputs, configs, **runs[0].options))
        outputs = yield from run_batches(batches, runs[0].config)
        for (name, share), share_outputs in zip(shares.items(), outputs, strict=True):
            for index, output in zip(share, share_outputs, strict=True):
                results[index][name] = output
        return list(map(self.merge, results))


class CorpusChain(TypedByPart, PerCorpus[Input, Output]):
    """Runs the chain of the best corpus that the decision names, or the first chain if it names none.

    `RetrievalGate.route` makes one from ``retrieve={"docs": chain, "hr": chain}``. It may also be part of an arm.

    Raises:
        ConfigurationError: Raised by a call: the decision names only corpora without a chain, for example because the
            call's config has replaced the gate.
    """

    @property
    def typed_part(self) -> Runnable[Any, Any]:
        """The first chain."""
        return next(iter(self.parts.values()))

    def choose(self, config: RunnableConfig) -> tuple[str, ...]:
        """Return the corpus whose chain runs; it has none if the decision names only corpora without one."""
        bound = read_bound(config)
        named = () if bound is None else bound.decision.corpora
        # Any other chain would answer from the wrong corpus.
        return named[:1] if named and self.parts.keys().isdisjoint(named) else super().choose(config)[:1]

    def merge(self, results: Mapping[str, Any]) -> Any:
        """Return the result of the chain that ran."""
        return next(iter(results.values()))

    def stream(self, input: Input, config: RunnableConfig | None = None, **kwargs: Any) -> Iterator[Output]:
        """Stream the output of the chosen corpus's chain."""
        return self._chain(config).stream(input, config, **kwargs)

    def astream(
        self, input: Input, config: RunnableConfig | None = None, **kwargs: Any
    ) -> AsyncIterator[Output]:
        """Stream the output of the chosen corpus's chain."""
        return self._chain(config).astream(input, config, **kwargs)

    def _chain(self, config: RunnableConfig | None) -> Runnable[Any, Any]:
        (name,) = self.choose(ensure_config(config))
        if name not in self.parts:
            raise unknown_corpus(name, self.parts)
        return self.parts[name]


class CorpusRetriever(PerCorpus[str, list[Document]], FlowRetriever):
    """Searches the corpora that the decision names, or all corpora if the decision names none of them.

    Results are fused by reciprocal rank, without duplicates; ``rgate_corpus`` in a document's metadata names its
    corpus.
    `RetrievalGate.guard` makes one from ``{"docs": retriever, "hr": retriever}``. It may also be part of an arm.
    """

    run_type: ClassVar[str] = "retriever"

    def merge(self, results: Mapping[str, Any]) -> Any:
        """Return the fused documents, best first, or the exception of a retriever that failed."""
        return fuse_documents([{"rgate_corpus": name} for name in results], list(results.values()))


def as_searched(
    value: Any, kind: type[Any], corpora: Sequence[str], *, any_corpora: bool
) -> Runnable[Any, Any]:
    """Convert a retriever or a retrieve arm to a runnable.

    Args:
        value: A runnable, anything that LangChain coerces to one, or a mapping from the names of corpora to these.
            If the gate has no corpora, every entry of a mapping runs: retrievers in a `CorpusRetriever`, arms in a
            `RunnableParallel`.
        kind: The class that combines the values of a mapping: `CorpusChain` or `CorpusRetriever`.
        corpora: Names of the gate's corpora.
        any_corpora: Whether the gate has no corpora yet, but will take those in ``value``, as with ``corpus=True``.

    Raises:
        ConfigurationError: The value cannot be converted, the names differ from those of the gate's corpora, or the
            mapping is empty.
    """
    # Without corpora, a mapping of arms means what it does elsewhere in LangChain: runnables in parallel.
    if isinstance(value, Mapping) and (
        kind is CorpusRetriever or any_corpora or len(corpora) > 1 or set(corpora) == set(value)
    ):
        value = kind(parts=value)
    searched = as_runnable(value, "retriever" if kind is CorpusRetriever else "retrieve")
    for per_corpus in runnables_in(searched, PerCorpus):
        check_corpora(corpora, per_corpus.parts)
    return searched


def profile_searched(searched: Runnable[Any, Any]) -> dict[str, CorpusProfile]:
    """Return a profile of each corpus that a runnable searches, by name; an unnamed corpus is ``"corpus"``.

    Raises:
        ConfigurationError: The passages of a corpus cannot be read, are in several indexes, or are filtered.
        ModelLoadError: The encoder cannot be loaded.
        DownloadError: The encoder could not be downloaded.
        ProfileError: A corpus has no passages.
    """
    parts = next((inner.parts for inner in runnables_in(searched, PerCorpus)), {"corpus": searched})
    profiles = {}
    for name, part in parts.items():
        indexes = list(_indexes_in(part))
        if len(indexes) != 1:
            found = "searches several indexes" if indexes else "has no PassageIndex, BM25Index or HybridIndex"
            raise missing_passages(f"{type(part).__name__}, which {found}")
        profiles[name] = profile_index(indexes[0], name)
    return profiles


def _indexes_in(runnable: Any, around: Sequence[Any] = ()) -> Iterator[Any]:
    """Yield the indexes of this package that a runnable searches, directly or through a vector store.

    Raises:
        ConfigurationError: The runnable filters the passages of its store, so that others would count as its own.
    """
    if (getattr(runnable, "search_kwargs", None) or {}).get("filter") is not None:
        raise missing_passages(f"{type(runnable).__name__}, which filters them")
    for holder in (runnable, getattr(runnable, "vectorstore", None)):
        index = getattr(holder, "index", None)
        if isinstance(index, PassageIndex | HybridIndex | BM25Index):
            yield index
    for part in list_parts(runnable, around):
        yield from _indexes_in(part, [*around, runnable])


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
