"""`QueryPlanner` turns a gate's decisions into search queries, for runnables that use claims as queries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import Field

from rgate_integrations.answering.claims import Rewriter
from rgate_integrations.answering.query_plan import QueryPlan, plan_queries_flow
from rgate_integrations.decision import Decision, Options
from rgate_integrations.engine.decider import Decider
from rgate_integrations.errors import ConfigurationError, InvalidQuestionError
from rgate_integrations.langchain.questions import parse_question
from rgate_integrations.runtime.flow import Flow


class QueryPlanner(Options):
    """A gate, and the options for turning its decisions into queries.

    Attributes:
        gate: A `RetrievalGate`, or any runnable from a question to a `Decision`.
        always_include_question: Whether the question is always a query; if not, it is one only if there is no
            claim to search for.
        max_queries: Maximum number of queries per question, at least 1.
        filter_claims: Whether the gate judges each claim and drops the known ones. Only a `RetrievalGate` can do
            that; with any other runnable, no claim counts as known. The threshold is that of the `RetrievalGate`,
            not the one of a call's config.
    """

    gate: Any
    always_include_question: bool = True
    max_queries: int = Field(default=6, ge=1)
    filter_claims: bool = False

    def plan(
        self, inputs: Sequence[Any], decisions: Sequence[Decision], rewriter: Rewriter | None = None
    ) -> Flow[list[QueryPlan]]:
        """Return the query plan of each decision; see `plan_queries`.

        Args:
            inputs: The input of each decision; its earlier turns are searched for with a follow-up.
            decisions: The decisions.
            rewriter: Turns drafts into claims; when None, each sentence is a claim.
        """
        decider = getattr(self.gate, "gate", None)
        return plan_queries_flow(
            decisions,
            histories=list(map(self._read_history, inputs, decisions)),
            gate=decider if self.filter_claims and isinstance(decider, Decider) else None,
            threshold=getattr(self.gate, "threshold", None),
            rewriter=rewriter,
            always_include_question=self.always_include_question,
            max_queries=self.max_queries,
        )

    def _read_history(self, value: Any, decision: Decision) -> tuple[str, ...]:
        """Return the turns before a decision's question; none if it is not in the input, because it was condensed."""
        try:
            turn = parse_question(value, getattr(self.gate, "input_key", None))
        except (
            InvalidQuestionError
        ):  # the gate may be the user's own runnable, which reads inputs in its own way
            return ()
        return turn.lines if turn.question == decision.question else ()


def check_decision(result: Any) -> Decision | Exception:
    """Return a gate's result for an input, if it is a decision or an exception.

    Raises:
        ConfigurationError: It is something else.
    """
    if isinstance(result, Decision | Exception):
        return result
    raise ConfigurationError(
        f"The gate returned {type(result).__name__} instead of a Decision.",
        hint="Make it return a Decision, or pass a RetrievalGate or anything that RetrievalGate(gate=...) accepts.",
    )
