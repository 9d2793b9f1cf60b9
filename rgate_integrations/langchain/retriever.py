"""`GatedRetriever`: a retriever that finds nothing when the LLM knows, and searches claims when it does not."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForRetrieverRun, CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import RunnableConfig
from pydantic import ConfigDict, Field, field_validator

from rgate_integrations import speculative as searching
from rgate_integrations.calling import DecidesBatches, adecide_safely, as_gate, decide_safely
from rgate_integrations.claims import QueryPlan, plan_queries
from rgate_integrations.decision import Decision
from rgate_integrations.index import PassageIndex
from rgate_integrations.index.fusion import fuse


class IndexRetriever(BaseRetriever):
    """A `PassageIndex` as a LangChain retriever.

    Attributes:
        index: The index.
        k: Documents a query; ``invoke(..., k=)`` overrides it.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    index: PassageIndex
    k: int = Field(default=4, ge=1)

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun, k: int | None = None
    ) -> list[Document]:
        return [
            Document(
                id=hit.passage.id,
                page_content=hit.passage.text,
                metadata={**hit.passage.metadata, "title": hit.passage.title, "score": hit.score},
            )
            for hit in self.index.search([query], k or self.k)[0]
        ]


class GatedRetriever(BaseRetriever):
    """Guards a retriever: ``[]`` for known questions; for the others its results for every query of the plan.

    The results of the queries are fused by reciprocal rank and freed of duplicates. Each document carries
    ``metadata["rgate"]``: the query and claim that found it and its rank.

    Attributes:
        retriever: The guarded retriever; all queries of a question are searched as one batch.
        gate: A gate, or what `load_gate` takes.
        k: Greatest number of documents; None for no limit. ``invoke(..., k=)`` overrides it.
        always_include_question: Whether the question itself is always searched.
        max_queries: Greatest number of queries a question.
        filter_claims: Whether the gate judges each claim and drops the known ones.
        speculative: Start searching the question while the gate decides. When it is known the search is
            cancelled or its result dropped, and what it raises is logged only.
        drafter: Lets the answering LLM write the drafts; `RetrievalGate.guard` sets it.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    retriever: BaseRetriever
    gate: Any = None
    k: int | None = Field(default=None, ge=1)
    always_include_question: bool = True
    max_queries: int = Field(default=6, ge=1)
    filter_claims: bool = True
    speculative: bool = False
    drafter: Any = None

    @field_validator("gate", mode="before")
    @classmethod
    def _loaded(cls, gate: DecidesBatches | str | None) -> DecidesBatches:
        return as_gate(gate)

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun, k: int | None = None
    ) -> list[Document]:
        config: RunnableConfig = {"callbacks": run_manager.get_child()}
        if not self.speculative:
            plan = self._plan(self._decide(query, config))
            found = self.retriever.batch([q.text for q in plan.queries], config) if plan.queries else []
            return self._fused(plan, found, k)
        search = searching.start(self.retriever.invoke, query, config)
        plan = self._plan(self._decide(query, config))
        early = next((i for i, q in enumerate(plan.queries) if q.text == query), None)
        if early is None:
            searching.drop(search)
            queries = [q.text for q in plan.queries]
            return self._fused(plan, self.retriever.batch(queries, config) if queries else [], k)
        others = [q.text for q in plan.queries if q.text != query]
        rest = self.retriever.batch(others, config) if others else []
        return self._fused(plan, [*rest[:early], search.result(), *rest[early:]], k)

    async def _aget_relevant_documents(
        self, query: str, *, run_manager: AsyncCallbackManagerForRetrieverRun, k: int | None = None
    ) -> list[Document]:
        config: RunnableConfig = {"callbacks": run_manager.get_child()}
        search = asyncio.ensure_future(self.retriever.ainvoke(query, config)) if self.speculative else None
        try:
            drafts = None
            if self.drafter is not None:
                drafts = await self.drafter.adraft([query], config)
            decision = (await adecide_safely(self.gate, [query], drafts=drafts))[0]
            plan = await asyncio.to_thread(self._plan, decision)
            early = next((i for i, q in enumerate(plan.queries) if q.text == query and search), None)
            others = [q.text for i, q in enumerate(plan.queries) if i != early]
            found = await self.retriever.abatch(others, config) if others else []
            if early is not None and search is not None:
                found = [*found[:early], await search, *found[early:]]
            return self._fused(plan, found, k)
        finally:
            if search is not None:
                searching.drop(search)

    def _decide(self, query: str, config: RunnableConfig) -> Decision:
        drafts = self.drafter.draft([query], config) if self.drafter is not None else None
        return decide_safely(self.gate, [query], drafts=drafts)[0]

    def _plan(self, decision: Decision) -> QueryPlan:
        return plan_queries(
            [decision],
            gate=self.gate if self.filter_claims else None,
            always_include_question=self.always_include_question,
            max_queries=self.max_queries,
        )[0]

    def _fused(self, plan: QueryPlan, found: Sequence[Sequence[Document]], k: int | None) -> list[Document]:
        marked = [
            [
                document.model_copy(
                    update={
                        "metadata": {
                            **document.metadata,
                            "rgate": {"query": query.text, "claim": query.claim, "rank": rank},
                        }
                    }
                )
                for rank, document in enumerate(documents, start=1)
            ]
            for query, documents in zip(plan.queries, found, strict=True)
        ]
        return fuse(marked, key=lambda d: d.id or d.page_content, k=k or self.k)
