"""`GatedRetriever`: a retriever that finds nothing when the LLM knows, and searches claims when it does not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias

from langchain_core.documents import Document
from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.runnables.utils import ConfigurableFieldSpec, get_unique_config_specs
from pydantic import Field, field_validator
from typing_extensions import TypedDict

from rgate_integrations.claims import QueryPlan
from rgate_integrations.claims.plan import Query, planning
from rgate_integrations.decision import Decision
from rgate_integrations.engine.gate_like import GateLike
from rgate_integrations.errors import ConfigurationError, InvalidQuestionError
from rgate_integrations.index.fusion import fuse
from rgate_integrations.langchain.flow_retriever import FlowRetriever
from rgate_integrations.langchain.gate_runnable import QuestionInput, as_gate_runnable, telling
from rgate_integrations.langchain.questions import question_of
from rgate_integrations.langchain.runnable import BatchCall, FlowRunnable, RunBatch
from rgate_integrations.runtime.flow import Flow

WhenKnown: TypeAlias = Literal["nothing", "note"]

NOTE = "No passages were needed for this question: answer it from what you know."


class DecidedDocuments(TypedDict):
    """What `GatedRetriever.with_decision` returns for a question."""

    documents: list[Document]
    """What the guarded retriever returns: nothing or a note when the question is known."""

    decision: Decision
    """Why."""


class GatedRetriever(FlowRetriever):
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
        when_known: What a known question finds: ``"nothing"``, that is ``[]``; or ``"note"``, one document that tells
            the LLM to answer from what it knows, with ``rgate_note`` in its metadata.
        always_include_question: Whether the question itself is always searched.
        max_queries: Maximum number of queries a question.
        filter_claims: Whether the gate judges each claim and drops the known ones. A runnable that is not a
            `RetrievalGate` judges no claims: then all are searched.

    Raises:
        ConfigurationError: What is guarded does not return documents.
    """

    retriever: Runnable[Any, Any]
    gate: Any = Field(default=None, validate_default=True)
    k: int | None = Field(default=None, ge=1)
    when_known: WhenKnown = "nothing"
    always_include_question: bool = True
    max_queries: int = Field(default=6, ge=1)
    filter_claims: bool = False

    @field_validator("gate", mode="before")
    @classmethod
    def _runnable(cls, gate: Any) -> Runnable[Any, Decision]:
        return as_gate_runnable(gate)

    @classmethod
    def is_lc_serializable(cls) -> bool:
        """Whether ``langchain_core.load.dumpd`` writes its fields: it does."""
        return True

    @property
    def config_specs(self) -> list[ConfigurableFieldSpec]:
        """The specs of the gate and of what is guarded."""
        return get_unique_config_specs([*self.gate.config_specs, *self.retriever.config_specs])

    def with_decision(self) -> Runnable[QuestionInput, DecidedDocuments]:
        """Return a runnable that returns both, ``{"documents": [...], "decision": Decision(...)}``."""
        return DecidingRetriever(guarded=self)

    def flow(self, batch: RunBatch) -> Flow[list[list[Document] | Exception]]:
        """Retrieve for a batch; see `decide`."""
        found = yield from self.decide(batch)
        return [each if isinstance(each, Exception) else each["documents"] for each in found]

    def decide(self, batch: RunBatch) -> Flow[list[DecidedDocuments | Exception]]:
        """Decide for a batch in one call of the gate, and search for its unknown questions in one batch."""
        found = [_asked(each) for each in (yield from telling(self.gate, batch))]
        decisions = {place: each for place, each in enumerate(found) if isinstance(each, Decision)}
        plans = yield from planning(
            list(decisions.values()),
            gate=self._claim_gate() if self.filter_claims else None,
            always_include_question=self.always_include_question,
            max_queries=self.max_queries,
        )
        searched = yield from self._searching(dict(zip(decisions, plans, strict=True)), batch)
        results: list[DecidedDocuments | Exception] = []
        for place, decision in enumerate(found):
            if isinstance(decision, Exception):
                results.append(decision)
                continue
            documents = searched[place] if decision.retrieve else self._known(decision)
            if isinstance(documents, Exception):
                results.append(documents)
            else:
                results.append({"documents": documents, "decision": decision})
        return results

    def shown(self, value: Any) -> str:
        """Return the question, or an input without one as text."""
        try:
            return question_of(value, getattr(self.gate, "input_key", None))
        except InvalidQuestionError:
            return str(value)

    def _searching(
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

    def _known(self, decision: Decision) -> list[Document]:
        """Return what a known question finds."""
        if self.when_known == "nothing":
            return []
        metadata = {"rgate_note": True, "rgate_p_known": decision.p_known, "rgate_reason": decision.reason}
        return [Document(page_content=NOTE, metadata=metadata)]

    def _claim_gate(self) -> GateLike | None:
        """Return what judges claims: it is asked with drafts, which a runnable cannot be."""
        gate = getattr(self.gate, "gate", None)
        return gate if isinstance(gate, GateLike) else None


class DecidingRetriever(FlowRunnable[QuestionInput, DecidedDocuments]):
    """A guarded retriever that returns its decision beside the documents; `GatedRetriever.with_decision` makes it."""

    guarded: GatedRetriever

    @property
    def InputType(self) -> Any:
        """The input type of the gate."""
        return self.guarded.gate.InputType

    @property
    def OutputType(self) -> type[DecidedDocuments]:
        """The type of the output."""
        return DecidedDocuments

    @property
    def config_specs(self) -> list[ConfigurableFieldSpec]:
        """The specs of the guarded retriever."""
        return self.guarded.config_specs

    def flow(self, batch: RunBatch) -> Flow[list[DecidedDocuments | Exception]]:
        """Decide and retrieve for a batch."""
        return (yield from self.guarded.decide(batch))


def _asked(decision: Decision | Exception) -> Decision | Exception:
    """Return the error of an empty question, as of an input without one: there is nothing to search for."""
    if isinstance(decision, Exception) or decision.question.strip():
        return decision
    return InvalidQuestionError("The question is empty.", hint="Pass at least one word.")


def _fused(queries: Sequence[Query], results: Sequence[Any], k: int | None) -> list[Document] | Exception:
    """Fuse what the queries of one question found; returns the exception of a search that failed."""
    marked = []
    for query, result in zip(queries, results, strict=True):
        if isinstance(result, Exception):
            return result
        if not _are_documents(result):
            return ConfigurationError(
                f"What is guarded returned {type(result).__name__} and no list of documents.",
                hint="Guard the retriever, and not the chain around it.",
            )
        marked.append(_marked(query, result))
    return fuse(marked, key=_identity, k=k)


def _are_documents(found: Any) -> bool:
    return isinstance(found, Sequence) and all(isinstance(each, Document) for each in found)


def _marked(query: Query, documents: Sequence[Document]) -> list[Document]:
    """Return copies of the documents that say which query found them, and at which rank."""
    copies = []
    for rank, document in enumerate(documents, start=1):
        found_by = {"rgate_query": query.text, "rgate_claim": query.claim, "rgate_rank": rank}
        copies.append(document.model_copy(update={"metadata": {**found_by, **(document.metadata or {})}}))
    return copies


def _identity(document: Document) -> str:
    return document.id or document.page_content
