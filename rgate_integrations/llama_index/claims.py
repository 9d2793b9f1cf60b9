"""Retrieves by the claims of a draft: one search per claim or, in a query transform, one averaged vector."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Sequence
from typing import Any

from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.base.response.schema import RESPONSE_TYPE
from llama_index.core.indices.query.query_transform.base import BaseQueryTransform
from llama_index.core.llms import LLM
from llama_index.core.query_engine import TransformQueryEngine
from llama_index.core.schema import NodeWithScore, QueryBundle

from rgate_integrations.answering.query_plan import plan_queries_flow
from rgate_integrations.decision import valid_count, valid_flag
from rgate_integrations.engine.own_gate import GateLike
from rgate_integrations.errors import ConfigurationError
from rgate_integrations.index.hybrid import fuse
from rgate_integrations.llama_index.decider import QueryDecider, WithoutPrompts, bundle_for, check_part
from rgate_integrations.llama_index.retriever import FlowRetriever, node_hash
from rgate_integrations.runtime.flow import Call, Flow, Gather, run


class ClaimFusionRetriever(FlowRetriever):
    """Searches for a question and the claims of its draft with every retriever; fuses the results by reciprocal rank.

    It always retrieves: it decides what to search for, not whether. Inside a `GatedQueryEngine`,
    `GatedRetriever` or `GatedTool`, or behind a `RetrievalGateSelector`, it uses the draft that was judged
    there. If there is none, or ``draft_llm`` is another LLM, it has a new one written. Without any draft, it
    searches only for the question.

    Args:
        retrievers: The retrievers, of any kind.
        gate: The gate that drafts the answer. The default gate, used when None, writes no draft: pass ``draft_llm``.
        draft_llm: Drafts the answer instead of the gate's proxy model; a better model makes better claims.
        tokens: Maximum number of tokens of the LLM's draft, at least 1.
        similarity_top_k: Maximum number of nodes, at least 1.
        max_queries: Maximum number of queries per question, at least 1.
        filter_claims: Whether the gate judges each claim and drops the known ones.

    Raises:
        ConfigurationError: The gate, ``draft_llm`` or an option is invalid, or one of ``retrievers`` is not a
            retriever.
        UnknownNameError: No gate has that name.
        ModelLoadError: A trained gate cannot be read or downloaded.
        MissingDependencyError: The gate is a URL, and the extra ``openai`` is not installed.
    """

    def __init__(
        self,
        retrievers: Sequence[BaseRetriever],
        gate: GateLike | str | None = None,
        *,
        draft_llm: LLM | None = None,
        tokens: int = 64,
        similarity_top_k: int = 5,
        max_queries: int = 6,
        filter_claims: bool = False,
    ) -> None:
        if not isinstance(retrievers, Sequence) or not retrievers:
            raise ConfigurationError(
                "The retrievers must be a list with at least one.",
                hint="For example, ClaimFusionRetriever([index.as_retriever()], draft_llm=llm).",
            )
        self.retrievers = list(retrievers)
        for retriever in self.retrievers:
            check_part(retriever, "retrieve")
        self.decider = QueryDecider(gate, draft_llm, tokens)
        self.similarity_top_k = valid_count(similarity_top_k, "similarity_top_k")
        self.max_queries = valid_count(max_queries, "max_queries")
        self.filter_claims = valid_flag(filter_claims, "filter_claims")
        super().__init__()

    def find(self, bundle: QueryBundle) -> Flow[list[NodeWithScore]]:
        """Search for the question and the claims of its draft in parallel, and return the fused nodes, best first."""
        searches = []
        for query in (yield from _plan_queries(self, bundle)):
            for retriever in self.retrievers:
                # A new bundle for each search, because LlamaIndex's vector retriever writes the embedding into it.
                searches.append(Call(retriever.retrieve, retriever.aretrieve, bundle_for(query, bundle)))
        rankings: list[list[NodeWithScore]] = yield Gather(searches)
        return fuse(rankings, key=node_hash, k=self.similarity_top_k)


class ClaimQueryTransform(WithoutPrompts, BaseQueryTransform):
    """Sets a query's embedding texts to the question and the claims of its draft, for query-transform pipelines.

    LlamaIndex averages these texts into one vector (a warning says so), and keyword retrievers ignore them.
    `ClaimFusionRetriever` searches for each claim, which finds more.
    LlamaIndex's own `TransformQueryEngine` blocks the event loop during a transform; `ClaimQueryEngine` does
    not.

    Args:
        gate: The gate that drafts the answer. The default gate, used when None, writes no draft: pass ``draft_llm``.
        draft_llm: Drafts the answer instead of the gate's proxy model.
        max_queries: Maximum number of queries per question, at least 1.
        filter_claims: Whether the gate judges each claim and drops the known ones.

    Raises:
        ConfigurationError: The gate, ``draft_llm``, ``max_queries`` or ``filter_claims`` is invalid.
        UnknownNameError: No gate has that name.
        ModelLoadError: A trained gate cannot be read or downloaded.
        MissingDependencyError: The gate is a URL, and the extra ``openai`` is not installed.
    """

    def __init__(
        self,
        gate: GateLike | str | None = None,
        *,
        draft_llm: LLM | None = None,
        max_queries: int = 6,
        filter_claims: bool = False,
    ) -> None:
        # 64 tokens are two or three sentences, which are the claims.
        self.decider = QueryDecider(gate, draft_llm, tokens=64)
        self.max_queries = valid_count(max_queries, "max_queries")
        self.filter_claims = valid_flag(filter_claims, "filter_claims")
        super().__init__()

    def _run(self, query_bundle: QueryBundle, metadata: dict[str, Any]) -> QueryBundle:
        queries = run(_plan_queries(self, query_bundle))
        if len(queries) > 1:
            warnings.warn(
                "LlamaIndex averages claims into one query vector; ClaimFusionRetriever searches for each of them.",
                stacklevel=2,
            )
        return QueryBundle(query_str=query_bundle.query_str, custom_embedding_strs=queries)


class ClaimQueryEngine(TransformQueryEngine):
    """LlamaIndex's `TransformQueryEngine`, with an ``aquery`` that does not block the event loop."""

    async def _aquery(self, query_bundle: QueryBundle) -> RESPONSE_TYPE:
        transformed = await asyncio.to_thread(
            self._query_transform.run, query_bundle, metadata=self._transform_metadata
        )
        return await self._query_engine.aquery(transformed)


def _plan_queries(part: ClaimFusionRetriever | ClaimQueryTransform, bundle: QueryBundle) -> Flow[list[str]]:
    """Return the queries for a question and the claims of its draft.

    The draft is the one that came with the request, see `QueryDecider.inherited`, or else that of the decision by
    `QueryDecider.decide`. If that has none either, the only query is the question.
    """
    inherited = part.decider.inherited(bundle, part.decider.draft_llm)
    if inherited is not None and inherited.decision.draft is not None:
        decision = inherited.decision
    else:
        decision = yield from part.decider.decide(bundle)
    judge = part.decider.gate if part.filter_claims else None
    # A known or empty question has an empty plan, but these parts always search.
    (plan,) = yield from plan_queries_flow(
        [decision.with_retrieve(True)],
        gate=judge,
        max_queries=part.max_queries,
    )
    return plan.texts or [bundle.query_str]
