"""`GatedRetriever`: a retriever that finds nothing when the LLM knows, and searches claims when it does not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForRetrieverRun, CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import ensure_config, patch_config
from pydantic import ConfigDict, Field, SkipValidation, field_validator

from rgate_integrations.calling import DecidesBatches, as_gate, deciding
from rgate_integrations.claims import QueryPlan
from rgate_integrations.claims.plan import Query, planning
from rgate_integrations.decision import Decision
from rgate_integrations.errors import ConfigurationError
from rgate_integrations.flow import Background, Call, Flow, Start, arun, run
from rgate_integrations.index.fusion import fuse
from rgate_integrations.index.retriever import Retriever
from rgate_integrations.langchain.carried import carried_decision
from rgate_integrations.langchain.drafts import ChatDrafter


class GatedRetriever(BaseRetriever):
    """Guards a retriever: ``[]`` for known questions; for the others its results for every query of the plan.

    The results of the queries are fused by reciprocal rank and freed of duplicates. Each document carries
    ``metadata["rgate"]``: the query and claim that found it and its rank.

    Attributes:
        retriever: The guarded retriever; all queries of a question are searched as one batch.
        gate: A gate, what `load_gate` takes, or None for the default gate.
        k: Maximum number of documents; None for no limit. ``invoke(..., k=)`` overrides it.
        always_include_question: Whether the question itself is always searched.
        max_queries: Maximum number of queries a question.
        filter_claims: Whether the gate judges each claim and drops the known ones.
        speculative: Start searching the question while the gate decides. When it is known the search is
            cancelled or its result dropped, and what it raises is logged only.
        drafter: Lets the answering LLM write the drafts; `RetrievalGate.guard` sets it.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    retriever: BaseRetriever
    gate: Any = Field(default=None, validate_default=True)
    k: int | None = Field(default=None, ge=1)
    always_include_question: bool = True
    max_queries: int = Field(default=6, ge=1)
    filter_claims: bool = True
    speculative: bool = False
    drafter: ChatDrafter | None = None

    @field_validator("gate", mode="before")
    @classmethod
    def _loaded(cls, gate: DecidesBatches | str | None) -> DecidesBatches:
        return as_gate(gate)

    def invoke(self, input: str, config: RunnableConfig | None = None, **kwargs: Any) -> list[Document]:
        """Retrieve for one question."""
        return super().invoke(input, config, request=ensure_config(config), **kwargs)

    async def ainvoke(
        self, input: str, config: RunnableConfig | None = None, **kwargs: Any
    ) -> list[Document]:
        """Retrieve for one question without blocking the event loop."""
        return await super().ainvoke(input, config, request=ensure_config(config), **kwargs)

    def _get_relevant_documents(
        self,
        query: str,
        *,
        run_manager: CallbackManagerForRetrieverRun,
        k: int | None = None,
        request: RunnableConfig | None = None,
    ) -> list[Document]:
        config = patch_config(request, callbacks=run_manager.get_child())
        return run(self._retrieving(query, config, k))

    async def _aget_relevant_documents(
        self,
        query: str,
        *,
        run_manager: AsyncCallbackManagerForRetrieverRun,
        k: int | None = None,
        request: RunnableConfig | None = None,
    ) -> list[Document]:
        config = patch_config(request, callbacks=run_manager.get_child())
        return await arun(self._retrieving(query, config, k))

    def _retrieving(self, question: str, config: RunnableConfig, k: int | None) -> Flow[list[Document]]:
        search = None
        if self.speculative:
            search = yield Start(Call(self.retriever.invoke, self.retriever.ainvoke, question, config))
        try:
            decisions = yield from self._deciding(question, config)
            (plan,) = yield from planning(
                decisions,
                gate=self.gate if self.filter_claims else None,
                always_include_question=self.always_include_question,
                max_queries=self.max_queries,
            )
            results = yield from self._searching(plan, question, search, config)
        finally:
            if search is not None:
                search.drop()
        return _fused(plan, results, k or self.k)

    def _deciding(self, question: str, config: RunnableConfig) -> Flow[list[Decision]]:
        """Decide for a question, unless a router above has."""
        llm = None if self.drafter is None else self.drafter.llm
        decision = carried_decision(config, question, gate=self.gate, llm=llm)
        if decision is not None:
            return [decision]
        drafting = None
        if self.drafter is not None:
            drafting = self.drafter.drafting([question], [config])
        return (yield from deciding(self.gate, [question], drafting=drafting))

    def _searching(
        self, plan: QueryPlan, question: str, search: Background | None, config: RunnableConfig
    ) -> Flow[list[list[Document]]]:
        """Return what each query of the plan finds; the search that is under way already is not made again."""
        queries = [query.text for query in plan.queries]
        under_way = None
        if search is not None and question in queries:
            under_way = queries.index(question)
            del queries[under_way]
        results: list[list[Document]] = []
        if queries:
            results = yield Call(self.retriever.batch, self.retriever.abatch, queries, config)
        if search is not None and under_way is not None:
            found = yield search
            results = [*results[:under_way], found, *results[under_way:]]
        return results


class IndexRetriever(BaseRetriever):
    """An index of this package as a LangChain retriever.

    Args:
        index: Anything with ``search(queries, k)``: a `PassageIndex`, `BM25Index`, `HybridIndex`, or your own.
        k: Documents a query; ``invoke(..., k=)`` overrides it.

    Raises:
        ConfigurationError: The index has no such method.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    index: SkipValidation[Retriever]
    k: int = Field(default=4, ge=1)

    def __init__(self, *, index: Retriever, **fields: Any) -> None:
        # Not in a validator: pydantic would turn the error into one of its own.
        if not callable(getattr(index, "search", None)):
            raise ConfigurationError(
                f"An index needs the method search(queries, k); {type(index).__name__} has none.",
                hint="Pass a PassageIndex, BM25Index or HybridIndex, or an object with that method.",
            )
        fields["index"] = index
        super().__init__(**fields)

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun, k: int | None = None
    ) -> list[Document]:
        (hits,) = self.index.search([query], k or self.k)
        return [
            Document(
                id=hit.passage.id,
                page_content=hit.passage.text,
                metadata={**hit.passage.metadata, "title": hit.passage.title, "score": hit.score},
            )
            for hit in hits
        ]


def _fused(plan: QueryPlan, results: Sequence[Sequence[Document]], k: int | None) -> list[Document]:
    marked = [_marked(query, documents) for query, documents in zip(plan.queries, results, strict=True)]
    return fuse(marked, key=_identity, k=k)


def _marked(query: Query, documents: Sequence[Document]) -> list[Document]:
    """Return copies of the documents that say which query found them, and at which rank."""
    copies = []
    for rank, document in enumerate(documents, start=1):
        found_by = {"query": query.text, "claim": query.claim, "rank": rank}
        metadata = {**document.metadata, "rgate": found_by}
        copies.append(document.model_copy(update={"metadata": metadata}))
    return copies


def _identity(document: Document) -> str:
    return document.id or document.page_content
