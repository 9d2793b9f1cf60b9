"""An index of this package as a LangChain retriever, and a runnable that turns a question into search queries."""

from __future__ import annotations

from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForRetrieverRun, CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import Runnable, run_in_executor
from pydantic import Field, SkipValidation

from rgate_integrations.answering.claims import Rewriter
from rgate_integrations.decision import Decision, Options
from rgate_integrations.engine.own_gate import GateLike
from rgate_integrations.index.retriever import Retriever
from rgate_integrations.langchain.decisions import QueryPlanner
from rgate_integrations.langchain.gate import as_gate_runnable
from rgate_integrations.langchain.questions import QuestionInput
from rgate_integrations.langchain.runnable import FlowRunnable, Run
from rgate_integrations.runtime.flow import Flow


class IndexRetriever(Options, BaseRetriever):
    """An index of this package as a LangChain retriever.

    Attributes:
        index: Any object with ``search(queries, k)``: a `PassageIndex`, `BM25Index`, `HybridIndex`, or your own.
        k: Maximum number of documents per query, at least 1; ``invoke(..., k=)`` overrides it.

    Raises:
        pydantic.ValidationError: ``index`` has no method ``search``, or ``k`` is below 1.
        ConfigurationError: Raised by a call: its ``k`` is below 1. Your own index may accept that.
        RGateError: Raised by a call: the model that embeds the query cannot be loaded.
    """

    index: Retriever
    k: int = Field(default=4, ge=1)

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun, k: int | None = None
    ) -> list[Document]:
        (hits,) = self.index.search([query], self.k if k is None else k)
        documents = []
        for hit in hits:
            # The passage's own metadata comes last, so our keys never overwrite it.
            metadata = {"title": hit.passage.title, "rgate_score": hit.score, **hit.passage.metadata}
            documents.append(Document(id=hit.passage.id, page_content=hit.passage.text, metadata=metadata))
        return documents

    async def _aget_relevant_documents(
        self, query: str, *, run_manager: AsyncCallbackManagerForRetrieverRun, k: int | None = None
    ) -> list[Document]:
        # Embedding takes milliseconds of CPU time, which would block the event loop.
        return await run_in_executor(
            None, self._get_relevant_documents, query, run_manager=run_manager.get_sync(), k=k
        )


class ClaimQueryRewriter(FlowRunnable[QuestionInput, list[str]], QueryPlanner):
    """A runnable from a question to search queries, which are the question and the claims of its draft.

    A known or empty question gets ``[]``. ``ClaimQueryRewriter() | retriever.map()`` searches for each query. A batch
    calls the gate once for the questions and, if the claims are filtered, once for all claims. If a surrounding
    router has the same gate and searches before it decides, every question is a query, without a decision.

    Args:
        gate: A `RetrievalGate`, a ``gate`` argument for one, or any runnable from a question to a `Decision`; the
            default gate when None. Claims need a gate that drafts, such as ``RetrievalGate(llm=...)``.
        rewriter: Turns drafts into claims; when None, each sentence is a claim.
        always_include_question: Whether the question is always a query; if not, it is one only if there is no
            claim to search for.
        max_queries: Maximum number of queries per question, at least 1.
        filter_claims: Whether the gate judges each claim and drops the known ones; see `QueryPlanner`.
        name: The name of its runs in traces.

    Raises:
        RGateError: The gate is invalid; see `RetrievalGate`.
        pydantic.ValidationError: ``max_queries`` is below 1.
        InvalidQuestionError: Raised by a call: the input has no question.
        ConfigurationError: Raised by a call: its threshold is invalid, or the gate does not return a `Decision`.

    Examples:
        >>> ClaimQueryRewriter("constant:always").invoke("Who wrote Hamlet?")
        ['Who wrote Hamlet?']
    """

    rewriter: SkipValidation[Rewriter] | None = None

    def __init__(
        self,
        gate: Runnable[Any, Decision] | GateLike | str | None = None,
        *,
        rewriter: Rewriter | None = None,
        always_include_question: bool = True,
        max_queries: int = 6,
        filter_claims: bool = False,
        name: str | None = None,
    ) -> None:
        super().__init__(
            # Not in a validator: pydantic would wrap our errors in its own.
            gate=as_gate_runnable(gate),
            rewriter=rewriter,
            always_include_question=always_include_question,
            max_queries=max_queries,
            filter_claims=filter_claims,
            name=name,
        )

    def flow(self, runs: list[Run]) -> Flow[list[list[str] | Exception]]:
        """Decide for a batch, then return the queries of each question, or the exception if that input failed."""
        results = yield from self.decide_and_plan(runs, self.rewriter)
        return [result if isinstance(result, Exception) else result[1].texts for result in results]
