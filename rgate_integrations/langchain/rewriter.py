"""`ClaimQueryRewriter`: from a question to the queries that are worth searching."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from langchain_core.runnables import Runnable, RunnableConfig

from rgate_integrations.claims import QueryPlan, plan_queries
from rgate_integrations.claims.rewriter import Rewriter
from rgate_integrations.langchain.gate import RetrievalGate


class ClaimQueryRewriter(Runnable[Any, Any]):
    """A runnable from a question to search queries: the question and the unknown claims of the draft.

    ``ClaimQueryRewriter() | retriever.map()`` searches each query. A known question has no queries.

    Args:
        gate: A `RetrievalGate`, or its ``gate`` argument.
        rewriter: Makes the claims; sentence by sentence when None.
        plan: Return the `QueryPlan`, which says why each claim was kept or dropped, instead of a list of strings.
        always_include_question: Whether the question itself is always a query.
        max_queries: Greatest number of queries a question.
        filter_claims: Whether the gate judges each claim and drops the known ones.

    Example:
        >>> ClaimQueryRewriter("constant:always").invoke("Who wrote Hamlet?")
        ['Who wrote Hamlet?']
    """

    def __init__(
        self,
        gate: RetrievalGate | Any = None,
        *,
        rewriter: Rewriter | None = None,
        plan: bool = False,
        always_include_question: bool = True,
        max_queries: int = 6,
        filter_claims: bool = True,
    ) -> None:
        self.gate = gate if isinstance(gate, RetrievalGate) else RetrievalGate(gate)
        self.rewriter = rewriter
        self.plan = plan
        self.options = {"always_include_question": always_include_question, "max_queries": max_queries}
        self.filter_claims = filter_claims

    @property
    def OutputType(self) -> Any:
        """The type of the output."""
        return QueryPlan if self.plan else list[str]

    def invoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:
        """Rewrite one question."""
        return self._call_with_config(
            lambda value, config: self._plans([self.gate.invoke(value, config)])[0], input, config
        )

    async def ainvoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:
        """Rewrite one question without blocking the event loop."""

        async def run(value: Any, run_manager: Any, config: RunnableConfig) -> Any:
            import asyncio

            decision = await self.gate.ainvoke(value, config)
            return (await asyncio.to_thread(self._plans, [decision]))[0]

        return await self._acall_with_config(run, input, config)

    def batch(
        self,
        inputs: list[Any],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any | None,
    ) -> list[Any]:
        """Rewrite a batch: one call of the gate for the questions, and one for all their claims."""
        decisions: Sequence[Any] = self.gate.batch(inputs, config, return_exceptions=return_exceptions)
        plans = iter(self._plans([d for d in decisions if not isinstance(d, Exception)]))
        return [d if isinstance(d, Exception) else next(plans) for d in decisions]

    def _plans(self, decisions: Sequence[Any]) -> list[Any]:
        judge = self.gate.gate if self.filter_claims else None
        plans = plan_queries(decisions, gate=judge, rewriter=self.rewriter, **self.options)  # type: ignore[arg-type]
        return list(plans) if self.plan else [[q.text for q in plan.queries] for plan in plans]
