"""The claim filter and its result: which queries to search for a question, and why."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, islice

from rgate_integrations.answering.claims.format import Claim
from rgate_integrations.answering.claims.rewriter import Rewriter, rewrite_by_sentence
from rgate_integrations.decision import Decision, Draft, Frozen
from rgate_integrations.engine.gate_like import GateLike, decide
from rgate_integrations.runtime.flow import Call, Flow, run
from rgate_integrations.runtime.text import normalise


class Query(Frozen):
    """A search query.

    Attributes:
        text: What to search for.
        claim: The claim or sub-question it is for; None for the question itself.
    """

    text: str
    claim: str | None = None


class JudgedClaim(Frozen):
    """A claim and what became of it.

    Attributes:
        claim: The claim.
        kept: Whether its query is searched.
        reason: Why, in one sentence.
        p_known: The gate's probability for (claim, query), if it was asked.
    """

    claim: Claim
    kept: bool
    reason: str
    p_known: float | None = None


class QueryPlan(Frozen):
    """What to search for a question; empty when the question is known.

    Attributes:
        question: The question.
        queries: The queries, in order of importance: the question first, if it is included.
        claims: Every claim of the draft with its fate.
    """

    question: str
    queries: tuple[Query, ...] = ()
    claims: tuple[JudgedClaim, ...] = ()


def plan_queries(
    decisions: Sequence[Decision],
    *,
    gate: GateLike | None = None,
    rewriter: Rewriter | None = None,
    always_include_question: bool = True,
    max_queries: int = 6,
) -> list[QueryPlan]:
    """Turn decisions into queries: the question and, where there is a draft, its claims.

    SlimPLM, section 3.3. With ``gate``, the claims are filtered: it judges each with its query in the place of the
    question and the claim in the place of the draft, and known claims are not searched. All claims of all questions
    are judged in one call. The paper searches claim queries only, its published code adds the question: that is the
    default.

    Args:
        decisions: Decisions of a gate; those that do not retrieve get an empty plan.
        gate: Judges claims; None keeps them all.
        rewriter: Makes the claims; by default sentence by sentence, without a model.
        always_include_question: Whether the question itself is always a query. Even when False it is one if
            nothing else is left: a question that needs retrieval is never left without a query.
        max_queries: Maximum number of queries a question, at least 1.

    Returns:
        One plan a decision, in order.
    """
    return run(
        planning(
            decisions,
            gate=gate,
            rewriter=rewriter,
            always_include_question=always_include_question,
            max_queries=max_queries,
        )
    )


def planning(
    decisions: Sequence[Decision],
    *,
    gate: GateLike | None = None,
    rewriter: Rewriter | None = None,
    always_include_question: bool = True,
    max_queries: int = 6,
) -> Flow[list[QueryPlan]]:
    """Plan as a flow, for callers on an event loop; see `plan_queries`."""
    plans = [QueryPlan(question=decision.question) for decision in decisions]
    unknown = [place for place, decision in enumerate(decisions) if decision.retrieve]
    if not unknown:
        return plans
    questions = [decisions[place].question for place in unknown]
    drafts = [decisions[place].draft for place in unknown]
    rewritten: list[list[Claim]] = yield Call(rewriter or rewrite_by_sentence, None, questions, drafts)
    # The claims of all questions in one list: the gate judges them in one call.
    judged = iter((yield from _judge(list(chain(*rewritten)), gate)))
    for place, claims in zip(unknown, rewritten, strict=True):
        own = list(islice(judged, len(claims)))
        plans[place] = _plan(decisions[place].question, own, always_include_question, max(max_queries, 1))
    return plans


def _judge(claims: Sequence[Claim], gate: GateLike | None) -> Flow[list[JudgedClaim]]:
    """Say of each claim whether it is searched, and why."""
    judged: list[JudgedClaim] = []
    asked: list[int] = []  # places of claims that the gate judges
    for claim in claims:
        kept, reason = True, "Claims are not filtered."
        if not claim.query:
            kept, reason = False, "It has no query."
        elif claim.needs_search is False:
            kept, reason = False, "The rewriter says that it needs no search."
        elif claim.kind == "question":
            reason = "It is part of the question."
        elif gate is not None:
            asked.append(len(judged))
        judged.append(JudgedClaim(claim=claim, kept=kept, reason=reason))
    if gate is None or not asked:
        return judged
    # The claim takes the place of the draft, and its query that of the question.
    queries = [str(claims[place].query) for place in asked]
    drafts = [Draft(text=claims[place].text, source="recorded") for place in asked]
    decisions = yield from decide(gate, queries, drafts=drafts)
    for place, decision in zip(asked, decisions, strict=True):
        changes = {"kept": decision.retrieve, "reason": f"Judged known: {decision.reason}"}
        if decision.retrieve:
            changes["reason"] = f"Judged unknown: {decision.reason}"
        if decision.error is None:
            changes["p_known"] = decision.p_known
        judged[place] = judged[place].model_copy(update=changes)
    return judged


def _plan(
    question: str, claims: Sequence[JudgedClaim], include_question: bool, max_queries: int
) -> QueryPlan:
    """Take the queries of the claims that are kept, without near duplicates, up to the maximum."""
    queries = [Query(text=question)] if include_question else []
    judged = []
    for claim in claims:
        text = claim.claim.query
        if claim.kept and text is not None:
            twin = next((query.text for query in queries if _alike(query.text, text)), None)
            problem = ""
            if twin is not None:
                problem = f"Much the same as {twin!r}."
            elif len(queries) >= max_queries:
                problem = f"There are {max_queries} queries already."
            if problem:
                claim = claim.model_copy(update={"kept": False, "reason": problem})
            else:
                queries.append(Query(text=text, claim=claim.claim.text))
        judged.append(claim)
    if not queries:  # a question that needs retrieval is never left without a query
        queries.append(Query(text=question))
    return QueryPlan(question=question, queries=tuple(queries), claims=tuple(judged))


def _alike(first: str, second: str) -> bool:
    """Whether two queries have at least four fifths of their words in common."""
    words, others = set(normalise(first).split()), set(normalise(second).split())
    return first == second or len(words & others) >= 0.8 * len(words | others) > 0
