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
from llama_index.core.prompts.mixin import PromptDictType
from llama_index.core.query_engine import TransformQueryEngine
from llama_index.core.schema import NodeWithScore, QueryBundle

from rgate_integrations.calling import DecidesBatches
from rgate_integrations.claims import QueryPlan, plan_queries
from rgate_integrations.decision import Decision
from rgate_integrations.index.fusion import fuse
from rgate_integrations.llama_index.deciding import Decider


class ClaimFusionRetriever(BaseRetriever):
    """Searches every query of the plan with every retriever, and fuses the results by reciprocal rank.

    It always retrieves: what to search is the question here, whether to search is the query engine's.

    Args:
        retrievers: The retrievers, of any kind.
        gate: Drafts the answer whose claims are searched, and drops the known ones; the default when None.
        llm: Drafts the answer in place of the gate's proxy model; a better model has better claims.
        tokens: Length of the LLM's draft.
        similarity_top_k: Greatest number of nodes.
        max_queries: Greatest number of queries a question.
    """

    def __init__(
        self,
        retrievers: Sequence[BaseRetriever],
        gate: DecidesBatches | str | None = None,
        *,
        llm: LLM | None = None,
        tokens: int = 64,
        similarity_top_k: int = 5,
        max_queries: int = 6,
    ) -> None:
        self.retrievers = list(retrievers)
        self.decide = Decider(gate, llm, tokens)
        self.similarity_top_k = similarity_top_k
        self.max_queries = max_queries
        super().__init__()

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        decision = self.decide(query_bundle.query_str)
        queries = _queries(self.decide.gate, decision, self.max_queries)
        return self._fused([r.retrieve(QueryBundle(q)) for q in queries for r in self.retrievers])

    async def _aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        decision = await self.decide.decide(query_bundle.query_str)
        queries = await asyncio.to_thread(_queries, self.decide.gate, decision, self.max_queries)
        found = await asyncio.gather(*(r.aretrieve(QueryBundle(q)) for q in queries for r in self.retrievers))
        return self._fused(found)

    def _fused(self, rankings: Sequence[Sequence[NodeWithScore]]) -> list[NodeWithScore]:
        return fuse(rankings, key=lambda n: n.node.node_id, k=self.similarity_top_k)


class ClaimQueryTransform(BaseQueryTransform):
    """Adds the claims of a draft to the query's embedding texts, for pipelines built on query transforms.

    LlamaIndex averages these texts into one vector and keyword retrievers ignore them. To search claims
    separately, which finds more, use `ClaimFusionRetriever`: a warning says so when a transform is made.
    LlamaIndex's own `TransformQueryEngine` runs transforms on the event loop, which stands still meanwhile; in
    `ClaimQueryEngine` it goes on.

    Args:
        gate: Drafts the answer and drops known claims; the default gate when None.
        llm: Drafts the answer in place of the gate's proxy model.
        max_queries: Greatest number of queries a question.
    """

    def __init__(
        self, gate: DecidesBatches | str | None = None, *, llm: LLM | None = None, max_queries: int = 6
    ) -> None:
        warnings.warn(
            "LlamaIndex averages the claims into one query vector; ClaimFusionRetriever searches them separately.",
            stacklevel=2,
        )
        self.decide = Decider(gate, llm, 64)
        self.max_queries = max_queries
        super().__init__()

    def _run(self, query_bundle: QueryBundle, metadata: dict[str, Any]) -> QueryBundle:
        decision = self.decide(query_bundle.query_str)
        queries = _queries(self.decide.gate, decision, self.max_queries)
        return QueryBundle(query_str=query_bundle.query_str, custom_embedding_strs=queries)

    def _get_prompts(self) -> PromptDictType:
        return {}

    def _update_prompts(self, prompts: PromptDictType) -> None:
        pass


class ClaimQueryEngine(TransformQueryEngine):
    """LlamaIndex's `TransformQueryEngine`, whose ``aquery`` leaves the event loop free while the transform runs."""

    async def _aquery(self, query_bundle: QueryBundle) -> RESPONSE_TYPE:
        bundle = await asyncio.to_thread(
            self._query_transform.run, query_bundle, metadata=self._transform_metadata
        )
        return await self._query_engine.aquery(bundle)


def _queries(gate: DecidesBatches, decision: Decision, most: int) -> list[str]:
    unknown = decision.model_copy(update={"retrieve": True})
    plan: QueryPlan = plan_queries([unknown], gate=gate, max_queries=most)[0]
    return [q.text for q in plan.queries]
