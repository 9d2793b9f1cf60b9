"""What to retrieve: claims of the draft, their queries, and the filter."""

from rgate_integrations.claims.format import Claim, parse_claims, print_claims
from rgate_integrations.claims.plan import JudgedClaim, Query, QueryPlan, plan_queries
from rgate_integrations.claims.rewriter import ModelRewriter, Rewriter, SentenceRewriter

__all__ = [
    "Claim",
    "JudgedClaim",
    "ModelRewriter",
    "Query",
    "QueryPlan",
    "Rewriter",
    "SentenceRewriter",
    "parse_claims",
    "plan_queries",
    "print_claims",
]
