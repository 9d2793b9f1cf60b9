"""Retrievers: one that a gate guards, one of an index, and the queries of a question that are worth searching."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from langchain_core.callbacks import AsyncCallbackManagerForRetrieverRun, CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.runnables.utils import ConfigurableFieldSpec, get_unique_config_specs
from pydantic import ConfigDict, Field, SkipValidation, field_validator

from rgate_integrations.answering.claims import QueryPlan
from rgate_integrations.answering.claims.plan import Query, planning
from rgate_integrations.answering.claims.rewriter import Rewriter
from rgate_integrations.decision import Decision
from rgate_integrations.engine.gate_like import GateLike
from rgate_integrations.errors import ConfigurationError, InvalidQuestionError
from rgate_integrations.index.hybrid import fuse
from rgate_integrations.index.retriever import Retriever
from rgate_integrations.langchain.decision_context import announcing, is_bound
from rgate_integrations.langchain.gate_runnable import QuestionInput, as_gate_runnable
from rgate_integrations.langchain.runnable import BatchCall, FlowRunnable, RunBatch
from rgate_integrations.runtime.flow import Call, Flow, arun, run


class GatedRetriever(FlowRunnable[QuestionInput, list[Document]], BaseRetriever):
    """Guards a retriever: ``[]`` for known questions; for the others its results for every query of the plan.

    The question is a string, a dict, messages or a prompt value. A batch makes one call of the gate and one batch of
    the guarded retriever. Each decision is a child run in traces and a custom event, ``retrieval_gate``.
    ``config["configurable"]["retrieval_threshold"]`` is the threshold of one call, or of one item of a batch. Keyword
    arguments of a call, such as ``filter=``, reach the guarded retriever.

    The results of the queries are fused by reciprocal rank and freed of duplicates. Each document's metadata says
    what found it: ``rgate_query``, ``rgate_claim`` and ``rgate_rank``. A key that a document has already is kept.

    Attributes:
        retriever: What is guarded: a retriever, or any runnable from a query to a list of documents.
        gate: A `RetrievalGate`, what its ``gate`` takes, or any runnable from a question to a `Decision`.
        k: Maximum number of documents; None for no limit. ``invoke(..., k=)`` overrides it, and reaches the guarded
            retriever, too.
        always_include_question: Whether the question itself is always searched.
        max_queries: Maximum number of queries a question.
        filter_claims: Whether the gate judges each claim and drops the known ones. A runnable that is not a
            `RetrievalGate` judges no claims: then all are searched.
        when_known: Text of the one document that a known question finds, for a tool whose output an agent reads; by
            default it finds none.

    Raises:
        ConfigurationError: What is guarded does not return documents.
        InvalidQuestionError: An input holds no question, or an empty one.
    """

    model_config = ConfigDict(extra="forbid")
    run_type: ClassVar[str] = "retriever"

    retriever: Runnable[Any, Any]
    gate: Any = Field(default=None, validate_default=True)
    k: int | None = Field(default=None, ge=1)
    always_include_question: bool = True
    max_queries: int = Field(default=6, ge=1)
    filter_claims: bool = False
    when_known: str = ""

    @field_validator("gate", mode="before")
    @classmethod
    def _runnable(cls, gate: Any) -> Runnable[Any, Decision]:
        return as_gate_runnable(gate)

    @property
    def config_specs(self) -> list[ConfigurableFieldSpec]:
        """The specs of the gate and of what is guarded."""
        return get_unique_config_specs([*self.gate.config_specs, *self.retriever.config_specs])

    @property
    def own_config(self) -> RunnableConfig:
        """A retriever's own tags and metadata."""
        return {"tags": self.tags or [], "metadata": self.metadata or {}}

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun, **options: Any
    ) -> list[Document]:
        # A retriever must have this, and old code calls it.
        return self.invoke(query, {"callbacks": run_manager.get_child()}, **options)

    def flow(self, batch: RunBatch) -> Flow[list[list[Document] | Exception]]:
        """Decide for a batch in one call of the gate, and search for its unknown questions in one batch."""
        decisions: dict[int, Decision] = {}
        results: list[Any] = yield BatchCall(self.gate, batch.inputs, batch.children("gate"))
        for place, config in enumerate(batch.children()):
            decision = results[place]
            if isinstance(decision, Exception):
                continue
            if not isinstance(decision, Decision):
                raise ConfigurationError(
                    f"The gate returned {type(decision).__name__} and no Decision.",
                    hint="Pass a RetrievalGate, or what its gate= takes.",
                )
            if not is_bound(batch.configs[place], decision):  # else a router above has told them
                yield from announcing(decision, config)
            if decision.question.strip():
                decisions[place] = decision
            else:  # as of an input without a question: there is nothing to search for
                hint = "Pass at least one word."
                results[place] = InvalidQuestionError("The question is empty.", hint=hint)
        plans = yield from planning(
            list(decisions.values()),
            gate=_claim_gate(self.gate) if self.filter_claims else None,
            always_include_question=self.always_include_question,
            max_queries=self.max_queries,
        )
        searched = yield from self._search(dict(zip(decisions, plans, strict=True)), batch)
        for place, decision in decisions.items():
            if decision.retrieve:
                results[place] = searched[place]
            else:
                results[place] = [Document(self.when_known)] if self.when_known else []
        return results

    def _search(
        self, plans: Mapping[int, QueryPlan], batch: RunBatch
    ) -> Flow[dict[int, list[Document] | Exception]]:
        """Search the queries of all plans as one batch.

        Returns:
            For each place with a plan its documents, or the exception of one of its searches.
        """
        configs = batch.children()
        queries: list[str] = []
        query_configs: list[RunnableConfig] = []
        for place, plan in plans.items():
            queries += [query.text for query in plan.queries]
            query_configs += [configs[place]] * len(plan.queries)
        results: Iterator[Any] = iter(())
        if queries:
            results = iter((yield BatchCall(self.retriever, queries, query_configs, **batch.options)))
        limit = batch.options.get("k", self.k)
        found: dict[int, list[Document] | Exception] = {}
        for place, plan in plans.items():
            found[place] = _fused(plan.queries, [next(results) for _ in plan.queries], limit)
        return found


def _claim_gate(gate: Runnable[Any, Decision]) -> GateLike | None:
    """Return what judges claims: it is asked with drafts, which a runnable of the user's own cannot be."""
    inner = getattr(gate, "gate", None)
    return inner if isinstance(inner, GateLike) else None


def _fused(queries: Sequence[Query], results: Sequence[Any], k: int | None) -> list[Document] | Exception:
    """Fuse what the queries of one question found; returns the exception of a search that failed.

    The documents are copies that say which query found them, and at which rank.
    """
    rankings = []
    for query, result in zip(queries, results, strict=True):
        if isinstance(result, Exception):
            return result
        ranking = []
        for rank, document in enumerate(result if isinstance(result, Sequence) else [result], start=1):
            if not isinstance(document, Document):
                return ConfigurationError(
                    f"What is guarded returned {type(result).__name__} and no list of documents.",
                    hint="Guard the retriever, and not the chain around it.",
                )
            found_by = {"rgate_query": query.text, "rgate_claim": query.claim, "rgate_rank": rank}
            metadata = {**found_by, **(document.metadata or {})}
            ranking.append(document.model_copy(update={"metadata": metadata}))
        rankings.append(ranking)
    return fuse(rankings, key=lambda document: document.id or document.page_content, k=k)


class IndexRetriever(BaseRetriever):
    """An index of this package as a LangChain retriever.

    Args:
        index: Anything with ``search(queries, k)``: a `PassageIndex`, `BM25Index`, `HybridIndex`, or your own.

    Attributes:
        k: Documents a query, 4 unless given; ``invoke(..., k=)`` overrides it.

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
        return run(self._searching(query, k))

    async def _aget_relevant_documents(
        self, query: str, *, run_manager: AsyncCallbackManagerForRetrieverRun, k: int | None = None
    ) -> list[Document]:
        return await arun(self._searching(query, k))

    def _searching(self, query: str, k: int | None) -> Flow[list[Document]]:
        (hits,) = yield Call(self.index.search, None, [query], self.k if k is None else k)
        documents = []
        for hit in hits:
            # The passage's own metadata last: what it says of itself is not overwritten.
            metadata = {"title": hit.passage.title, "rgate_score": hit.score, **hit.passage.metadata}
            documents.append(Document(id=hit.passage.id, page_content=hit.passage.text, metadata=metadata))
        return documents


class ClaimQueryRewriter(FlowRunnable[QuestionInput, Any]):
    """A runnable from a question to search queries: the question and the claims of the draft.

    ``ClaimQueryRewriter() | retriever.map()`` searches each query. A known question has no queries. A batch makes one
    call of the gate for the questions and, if the claims are filtered, one for all of them.

    Args:
        gate: A `RetrievalGate`, or its ``gate`` argument.
        rewriter: Makes the claims; sentence by sentence when None.
        plan: Return the `QueryPlan`, which says why each claim was kept or dropped, instead of a list of strings.
        always_include_question: Whether the question itself is always a query.
        max_queries: Maximum number of queries a question, at least 1.
        filter_claims: Whether the gate judges each claim and drops the known ones.

    Example:
        >>> ClaimQueryRewriter("constant:always").invoke("Who wrote Hamlet?")
        ['Who wrote Hamlet?']
    """

    gate: Runnable[Any, Decision]
    rewriter: SkipValidation[Rewriter] | None = None
    plan: bool = False
    always_include_question: bool = True
    max_queries: int = Field(default=6, ge=1)
    filter_claims: bool = False

    def __init__(
        self,
        gate: Runnable[Any, Decision] | GateLike | str | None = None,
        *,
        rewriter: Rewriter | None = None,
        plan: bool = False,
        always_include_question: bool = True,
        max_queries: int = 6,
        filter_claims: bool = False,
        name: str | None = None,
    ) -> None:
        super().__init__(
            gate=as_gate_runnable(gate),
            rewriter=rewriter,
            plan=plan,
            always_include_question=always_include_question,
            max_queries=max_queries,
            filter_claims=filter_claims,
            name=name,
        )

    @property
    def OutputType(self) -> Any:
        """The type of the output."""
        return QueryPlan if self.plan else list[str]

    def flow(self, batch: RunBatch) -> Flow[list[Any]]:
        """Decide for a batch, then plan the queries of the unknown questions."""
        decisions: list[Decision | Exception]
        decisions = yield BatchCall(self.gate, batch.inputs, batch.children("gate"))
        decided = {place: found for place, found in enumerate(decisions) if isinstance(found, Decision)}
        plans = yield from planning(
            list(decided.values()),
            gate=_claim_gate(self.gate) if self.filter_claims else None,
            rewriter=self.rewriter,
            always_include_question=self.always_include_question,
            max_queries=self.max_queries,
        )
        results: list[Any] = list(decisions)  # an input without a question keeps its exception
        for place, plan in zip(decided, plans, strict=True):
            results[place] = plan if self.plan else [query.text for query in plan.queries]
        return results
