"""`ClaimQueryRewriter`: from a question to the queries that are worth searching."""

from __future__ import annotations

from typing import Any

from pydantic import Field, SkipValidation

from rgate_integrations.claims import QueryPlan
from rgate_integrations.claims.plan import planning
from rgate_integrations.claims.rewriter import Rewriter
from rgate_integrations.decision import Decision
from rgate_integrations.engine.gate_like import GateLike
from rgate_integrations.langchain.gate import RetrievalGate, as_retrieval_gate
from rgate_integrations.langchain.gate_runnable import QuestionInput
from rgate_integrations.langchain.runnable import BatchCall, FlowRunnable, RunBatch
from rgate_integrations.runtime.flow import Flow


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

    gate: RetrievalGate
    rewriter: SkipValidation[Rewriter] | None = None
    plan: bool = False
    always_include_question: bool = True
    max_queries: int = Field(default=6, ge=1)
    filter_claims: bool = False

    def __init__(
        self,
        gate: RetrievalGate | GateLike | str | None = None,
        *,
        rewriter: Rewriter | None = None,
        plan: bool = False,
        always_include_question: bool = True,
        max_queries: int = 6,
        filter_claims: bool = False,
        name: str | None = None,
    ) -> None:
        super().__init__(
            gate=as_retrieval_gate(gate),
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
            gate=self.gate.gate if self.filter_claims else None,
            rewriter=self.rewriter,
            always_include_question=self.always_include_question,
            max_queries=self.max_queries,
        )
        results: list[Any] = list(decisions)  # an input without a question keeps its exception
        for place, plan in zip(decided, plans, strict=True):
            results[place] = plan if self.plan else [query.text for query in plan.queries]
        return results
