"""Retrievers: one with a gate, one for several corpora, and one for this package's indexes."""

from __future__ import annotations

import uuid
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Unpack
from weakref import finalize

from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.data_structs.data_structs import IndexDict
from llama_index.core.instrumentation.span_handlers import NullSpanHandler
from llama_index.core.memory.types import BaseMemory
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.prompts.mixin import PromptMixinType
from llama_index.core.schema import NodeWithScore, QueryBundle, QueryType, TextNode

from rgate_integrations.answering.corpora import check_corpora, chosen_corpora
from rgate_integrations.corpus.profile import CorpusProfile, missing_passages, profile_index, profile_texts
from rgate_integrations.decision import Decision, valid_count
from rgate_integrations.engine.follow_ups import list_search_texts
from rgate_integrations.engine.loading import GateOptions
from rgate_integrations.engine.own_gate import GateLike
from rgate_integrations.index.hybrid import fuse
from rgate_integrations.index.retriever import Retriever
from rgate_integrations.llama_index.answer_first import listen
from rgate_integrations.llama_index.decider import (
    Gated,
    QueryDecider,
    bundle_for,
    check_part,
    copy_bundle,
    read_bound,
    read_question,
)
from rgate_integrations.runtime.flow import Call, Flow, Gather, arun, run

NO_PASSAGES_NEEDED = "No passages were needed for this question: answer it from what you know."
NOTE_SCORE = 1e9  # above any cutoff, even for BM25 and inner products, but finite, for JSON
_MARK = uuid.uuid4().hex  # marks notes and their copies in the metadata; random, so no document can have it


def node_hash(node: NodeWithScore) -> str:
    """Return a hash of a node's text and metadata; its id is unique only within a corpus."""
    return node.node.hash


class FlowRetriever(BaseRetriever):
    """A retriever that implements its search once, in `find`, for both sync and async callers."""

    @abstractmethod
    def find(self, bundle: QueryBundle) -> Flow[list[NodeWithScore]]:
        """Return the nodes for a query."""

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return run(self.find(_as_bundle(query_bundle)))

    async def _aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return await arun(self.find(_as_bundle(query_bundle)))


class CorpusRetriever(FlowRetriever):
    """Searches the corpora that the query's decision names, or all corpora if none are named.

    Results are fused by reciprocal rank. `GatedRetriever` makes one from ``{"docs": retriever, "hr": other}``. It may
    also be the retriever of an engine inside a `GatedQueryEngine`.

    Args:
        parts: The retrievers, by the names of their corpora.

    Raises:
        ConfigurationError: ``parts`` is empty, or one of them is not a retriever.
    """

    def __init__(self, parts: Mapping[str, BaseRetriever]) -> None:
        check_corpora((), parts)
        for part in parts.values():
            check_part(part, "retrieve")
        self.parts = dict(parts)
        super().__init__(callback_manager=next(iter(parts.values())).callback_manager)

    def find(self, bundle: QueryBundle) -> Flow[list[NodeWithScore]]:
        """Search the chosen corpora in parallel, and return the fused nodes, best first."""
        bound = read_bound(bundle)
        names = chosen_corpora(None if bound is None else bound.decision, list(self.parts))
        parts = [self.parts[name] for name in names]
        rankings = yield Gather([Call(part.retrieve, part.aretrieve, copy_bundle(bundle)) for part in parts])
        return fuse(rankings, key=node_hash)

    def _get_prompt_modules(self) -> PromptMixinType:
        return dict(self.parts)


def profile_searched(retriever: BaseRetriever) -> dict[str, CorpusProfile]:
    """Return a profile of each corpus that a retriever searches, by name; an unnamed corpus is ``"corpus"``.

    Raises:
        ConfigurationError: The passages cannot be read, for example because they are in a database, or the retriever
            filters them.
        ModelLoadError: The encoder cannot be loaded.
        DownloadError: The encoder could not be downloaded.
        ProfileError: A corpus has no passages.
    """
    parts = retriever.parts if isinstance(retriever, CorpusRetriever) else {"corpus": retriever}
    profiles = {}
    for name, part in parts.items():
        if isinstance(part, IndexRetriever):
            profiles[name] = profile_index(part.index, name)
        else:
            if getattr(part, "_filters", None) or getattr(part, "_doc_ids", None):
                raise missing_passages(f"{type(part).__name__}, which filters them")
            index: Any = getattr(part, "_index", None)
            struct = getattr(index, "index_struct", None)
            # Only an index in memory lists the ids of its nodes.
            ids = list(struct.nodes_dict.values()) if isinstance(struct, IndexDict) else []
            searched = {*(getattr(part, "_node_ids", None) or ids)}
            ids = [node_id for node_id in ids if node_id in searched]
            if not ids:
                raise missing_passages(type(part).__name__)
            texts = [node.get_content() for node in index.docstore.get_nodes(ids)]
            profiles[name] = profile_texts(texts, name)
    return profiles


class GatedRetriever(Gated, FlowRetriever):
    """Searches only if a question is unknown; meant for engines that cannot be wrapped, such as chat engines.

    LlamaIndex's engines answer "Empty Response" when a retriever finds nothing. So for a known question, this one
    returns a single note that tells the LLM to answer from its own knowledge. The note is not a source: responses do
    not list it, but have the decision in ``metadata["rgate"]``. So has a response all of whose sources were found by
    this retriever. If an engine can be wrapped, prefer `GatedQueryEngine`: its direct arm has its own prompt.

    The note survives postprocessors that filter by score or position: its score is above any cutoff. One that judges
    the text or the metadata, such as ``KeywordNodePostprocessor``, a reranker or a filter by date, may drop it or
    fail. Pass those to this retriever instead of the engine, so that they only see passages.

    Args:
        retriever: The guarded retriever. With several corpora, it may be a mapping from their names to retrievers: at
            most ``top`` of them run, or all if the gate fails or has no corpora.
        gate: A gate, or an argument for `load_gate`, such as ``load_gate(llm_name=…)`` with the name of your LLM; the
            default gate when None.
        memory: The memory of a chat engine that does not condense follow-ups, such as ``ContextChatEngine``, from
            which the gate reads the earlier turns. The question is searched for alone, unless it is very short or an
            English follow-up, and together with the user's last turn.
        known_message: Text of the note; when None, a known question returns an empty list.
        node_postprocessors: Applied to the passages, never to the note.
        **options: ``always=`` and ``never=``: rules as in `load_gate`, instead of the gate's own. ``corpus=``, with
            ``prefer=``, ``when_uncovered=`` and ``top=``: the corpus, as in `load_gate`; ``corpus=True`` makes a
            profile of the passages in your index.

    Raises:
        ConfigurationError: The gate or an option is invalid, ``retriever`` is not a retriever, the names of
            retrievers and corpora differ, or with ``corpus=True`` the passages cannot be read.
        UnknownNameError: No gate has that name.
        ModelLoadError: A trained gate or, with ``corpus=True``, the encoder cannot be loaded.
        MissingDependencyError: The gate is a URL, and the extra ``openai`` is not installed.
        DownloadError: With ``corpus=True``, the encoder could not be downloaded.
        ProfileError: The profile of a corpus cannot be read, or a corpus has no passages.
    """

    def __init__(
        self,
        retriever: BaseRetriever | Mapping[str, BaseRetriever],
        gate: GateLike | str | None = None,
        *,
        memory: BaseMemory | None = None,
        known_message: str | None = NO_PASSAGES_NEEDED,
        node_postprocessors: Sequence[BaseNodePostprocessor] | None = None,
        **options: Unpack[GateOptions],
    ) -> None:
        if isinstance(retriever, Mapping):
            retriever = CorpusRetriever(retriever)
        check_part(retriever, "retrieve")
        if options.get("corpus") is True:
            options["corpus"] = profile_searched(retriever)
        self.retriever = retriever
        self.decider = QueryDecider(gate, memory=memory, adapter=type(self), **options)
        if isinstance(retriever, CorpusRetriever):
            check_corpora(self.decider.gate.corpora, retriever.parts)
        self.known_message = known_message
        self.node_postprocessors = list(node_postprocessors or [])
        super().__init__(callback_manager=retriever.callback_manager)
        for postprocessor in self.node_postprocessors:
            check_part(postprocessor, "postprocess_nodes")
            postprocessor.callback_manager = self.callback_manager  # as LlamaIndex's engines do

    # LlamaIndex's own two methods emit a retrieval event before the decision. Here the guarded retriever emits it,
    # and only for questions that reach it.

    def retrieve(self, str_or_query_bundle: QueryType) -> list[NodeWithScore]:
        """Return the passages; for a known question, the note, or ``[]`` if ``known_message`` is None."""
        return run(self.find(_as_bundle(str_or_query_bundle)))

    async def aretrieve(self, str_or_query_bundle: QueryType) -> list[NodeWithScore]:
        """Return the passages; for a known question, the note, or ``[]`` if ``known_message`` is None."""
        return await arun(self.find(_as_bundle(str_or_query_bundle)))

    def find(self, bundle: QueryBundle) -> Flow[list[NodeWithScore]]:
        """Decide, then search and postprocess; for a known question, return what `retrieve` does."""
        decision = yield from self.decider.decide(bundle)
        if not decision.retrieve:
            return [] if self.known_message is None else _note(decision, self.known_message)
        history = yield from self.decider.read_history(bundle.query_str)
        texts = list_search_texts(bundle.query_str, history)
        bundles = [bundle_for(text, bundle) for text in texts]
        rankings: list[list[NodeWithScore]] = []
        for searched in bundles:
            with self.decider.bind(decision, searched):
                found = yield Call(self.retriever.retrieve, self.retriever.aretrieve, copy_bundle(searched))
            rankings.append(found)
        nodes = rankings[0]
        if len(rankings) > 1:
            # No more nodes than one search finds.
            nodes = fuse(rankings, key=node_hash, k=max(1, *map(len, rankings)))
        # A new bundle for each, because a postprocessor may write into it.
        for processor in self.node_postprocessors:
            nodes = yield Call(
                processor.postprocess_nodes, processor.apostprocess_nodes, nodes, copy_bundle(bundles[0])
            )
        listen(_ResponseListener)  # here, since an unpickled retriever was not constructed in this process
        # Copies, because a retriever may return the same nodes to several searches.
        copies = []
        for node in nodes:
            try:
                copied = node.model_copy()
            except Exception:  # a node of a user's class may have no copy; it goes without the decision
                copies.append(node)
                continue
            _decisions[id(copied)] = decision
            finalize(copied, _decisions.pop, id(copied))
            copies.append(copied)
        return copies

    def _get_prompt_modules(self) -> PromptMixinType:
        return {"retriever": self.retriever}


def _note(decision: Decision, text: str) -> list[NodeWithScore]:
    """Return the nodes for a known question: one note, with the decision in its ``metadata["rgate"]``."""
    listen(_ResponseListener)
    metadata = {"rgate": decision.model_dump(mode="json"), "rgate_note": _MARK}
    keys = list(metadata)
    note = _Note(text=text, excluded_llm_metadata_keys=keys, excluded_embed_metadata_keys=keys)
    note.metadata = metadata
    return [NodeWithScore(node=note, score=NOTE_SCORE)]


class _Note(TextNode):
    """A note for a known question. Retrievers that fuse results see equal notes as one, whatever the decisions."""

    @property
    def hash(self) -> str:
        """The hash of the text."""
        return TextNode(text=self.text).hash


_decisions: dict[int, Decision] = {}
"""The decision about each node that a `GatedRetriever` has found, by the node's `id`, as long as the node exists."""


class _ResponseListener(NullSpanHandler):
    """Puts a `GatedRetriever`'s decision into a response's metadata, and removes the note from its sources.

    LlamaIndex calls `span_exit` with the response of each synthesizer, and again with the response of each engine,
    which has a list of sources of its own.
    """

    def span_exit(self, *arguments: Any, result: Any = None, **options: Any) -> None:
        sources = getattr(result, "source_nodes", None)
        if not sources:
            return
        metadata = {**(result.metadata or {})} if hasattr(result, "metadata") else {}
        # By identity, because a search without a gate may find equal nodes.
        decision, *others = [_decisions.get(id(source)) for source in sources]
        if decision is not None and all(other is decision for other in others):
            metadata.setdefault("rgate", decision.model_dump(mode="json"))
        for source in list(sources):
            if source.node.metadata.get("rgate_note") == _MARK:
                sources.remove(source)
                metadata["rgate"] = source.node.metadata["rgate"]
                metadata.pop(source.node.node_id, None)
        if "rgate" in metadata:
            result.metadata = metadata


class IndexRetriever(FlowRetriever):
    """A LlamaIndex retriever for a `PassageIndex`, a `HybridIndex`, or any object with ``search(queries, k)``.

    Args:
        index: The index. The nodes have its scores, which are cosines for a `PassageIndex`.
        similarity_top_k: Maximum number of nodes, at least 1.

    Raises:
        ConfigurationError: ``index`` has no method ``search``, or ``similarity_top_k`` is not a whole number of at
            least 1.
    """

    def __init__(self, index: Retriever, *, similarity_top_k: int = 5) -> None:
        check_part(index, "search")
        self.index = index
        self.similarity_top_k = valid_count(similarity_top_k, "similarity_top_k")
        super().__init__()

    def find(self, bundle: QueryBundle) -> Flow[list[NodeWithScore]]:
        """Search the index; for async callers, in a thread, so that the event loop is not blocked."""
        (hits,) = yield Call(self.index.search, None, [bundle.query_str], self.similarity_top_k)
        nodes = []
        for hit in hits:
            passage = hit.passage
            node = TextNode(id_=passage.id, text=passage.text, metadata=passage.titled_metadata)
            nodes.append(NodeWithScore(node=node, score=hit.score))
        return nodes


def _as_bundle(query: QueryType) -> QueryBundle:
    """Return a query as a bundle; an agent's question in its own words, so that the decision about it is found."""
    bundle = QueryBundle(query) if isinstance(query, str) else query
    question = read_question(bundle)
    return bundle if question == bundle.query_str else replace(bundle, query_str=question)
