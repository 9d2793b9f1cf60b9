"""What to retrieve: claims of the draft, their queries, and the filter."""

from rgate_integrations.answering.claims.plan import QueryPlan, plan_queries
from rgate_integrations.answering.claims.rewriter import ModelRewriter

__all__ = ["ModelRewriter", "QueryPlan", "plan_queries"]
