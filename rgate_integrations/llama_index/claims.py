"""Claims as queries: searched separately and fused, or as one mean vector for transform pipelines."""

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
from rgate_integrations.engine.own_gate import GateLike
from rgate_integrations.index.hybrid import fuse
from rgate_integrations.llama_index.decider import QueryDecider, WithoutPrompts
from rgate_integrations.llama_index.retriever import FlowRetriever
from rgate_integrations.runtime.flow import Call, Flow, Gather, run


class ClaimFusionRetriever(FlowRetriever):
    """Searches every query of the plan with every retriever, and fuses the results by reciprocal rank.

    It always retrieves: what to search is the question here, whether to search is the query engine's. Inside of a
    `GatedQueryEngine`, or behind a `RetrievalGateSelector`, the draft that they judged is used, and none is written.

    Args:
        retrievers: The retrievers, of any kind.
        gate: Drafts the answer whose claims are searched; the default when None.
        draft_llm: Drafts the answer instead of the gate's proxy model; a better model has better claims.
        tokens: Maximum number of tokens of its draft, at least 1.
        similarity_top_k: Maximum number of nodes, at least 1.
        max_queries: Maximum number of queries a question, at least 1.
        filter_claims: Whether the gate judges each claim and drops the known ones.
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
        self.retrievers = list(retrievers)
        self.decider = QueryDecider(gate, draft_llm, tokens)
        self.similarity_top_k = similarity_top_k
        self.max_queries = max_queries
        self.filter_claims = filter_claims
        super().__init__()

    def find(self, bundle: QueryBundle) -> Flow[list[NodeWithScore]]:
        """Search for the question and for the claims of its draft, side by side."""
        searches = []
        for query in (yield from _queries_of(self, bundle)):
            for retriever in self.retrievers:
                # A bundle for each search: LlamaIndex's vector retriever writes the embedding into it.
                searches.append(Call(retriever.retrieve, retriever.aretrieve, QueryBundle(query)))
        rankings: list[list[NodeWithScore]] = yield Gather(searches)
        return fuse(rankings, key=lambda node: node.node.node_id, k=self.similarity_top_k)


class ClaimQueryTransform(WithoutPrompts, BaseQueryTransform):
    """Adds the claims of a draft to the query's embedding texts, for pipelines built on query transforms.

    LlamaIndex averages these texts into one vector, and keyword retrievers ignore them. To search claims separately,
    which finds more, use `ClaimFusionRetriever`. Where several claims are averaged, a warning says so.
    LlamaIndex's own `TransformQueryEngine` runs transforms on the event loop, which stands still meanwhile; in
    `ClaimQueryEngine` it goes on.

    Args:
        gate: Drafts the answer; the default gate when None.
        draft_llm: Drafts the answer instead of the gate's proxy model.
        max_queries: Maximum number of queries a question, at least 1.
        filter_claims: Whether the gate judges each claim and drops the known ones.
    """

    def __init__(
        self,
        gate: GateLike | str | None = None,
        *,
        draft_llm: LLM | None = None,
        max_queries: int = 6,
        filter_claims: bool = False,
    ) -> None:
        self.decider = QueryDecider(gate, draft_llm, tokens=64)
        self.max_queries = max_queries
        self.filter_claims = filter_claims
        super().__init__()

    def _run(self, query_bundle: QueryBundle, metadata: dict[str, Any]) -> QueryBundle:
        queries = run(_queries_of(self, query_bundle))
        if len(queries) > 1:
            warnings.warn(
                "LlamaIndex averages claims into one query vector; ClaimFusionRetriever searches them separately.",
                stacklevel=2,
            )
        return QueryBundle(query_str=query_bundle.query_str, custom_embedding_strs=queries)


class ClaimQueryEngine(TransformQueryEngine):
    """LlamaIndex's `TransformQueryEngine`, whose ``aquery`` leaves the event loop free while the transform runs."""

    async def _aquery(self, query_bundle: QueryBundle) -> RESPONSE_TYPE:
        transform = self._query_transform.run
        transformed = await asyncio.to_thread(transform, query_bundle, metadata=self._transform_metadata)
        return await self._query_engine.aquery(transformed)


def _queries_of(part: ClaimFusionRetriever | ClaimQueryTransform, bundle: QueryBundle) -> Flow[list[str]]:
    """Draft an answer and return the queries for its claims, the question itself first."""
    inherited = part.decider.inherited(bundle)
    if inherited is not None and inherited.decision.draft is not None:
        decision = inherited.decision
    else:
        decision = yield from part.decider.decide(bundle)
    # A known question would get an empty plan, but here there is a search in any case.
    unknown = decision.with_retrieve(True)
    judge = part.decider.gate if part.filter_claims else None
    (plan,) = yield from plan_queries_flow([unknown], gate=judge, max_queries=part.max_queries)
    return plan.texts
