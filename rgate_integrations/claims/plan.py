"""The claim filter and its result: which queries to search for a question, and why."""

from __future__ import annotations

from collections.abc import Sequence

from rgate_integrations.claims.format import Claim
from rgate_integrations.claims.rewriter import Rewriter, SentenceRewriter
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
    unknown = [i for i, d in enumerate(decisions) if d.retrieve]
    plans = [QueryPlan(question=d.question) for d in decisions]
    if not unknown:
        return plans
    questions = [decisions[i].question for i in unknown]
    drafts = [decisions[i].draft for i in unknown]
    rewritten = yield Call(rewriter or SentenceRewriter(), None, questions, drafts)
    judged = yield from _judging(rewritten, gate)
    for i, claims in zip(unknown, judged, strict=True):
        plans[i] = _plan(decisions[i].question, claims, always_include_question, max(max_queries, 1))
    return plans


def _judging(rewritten: Sequence[Sequence[Claim]], gate: GateLike | None) -> Flow[list[list[JudgedClaim]]]:
    """Let the gate judge the claims of all questions, in one call."""
    asked: list[Claim] = []
    if gate is not None:
        for claims in rewritten:
            asked += [claim for claim in claims if _is_for_the_gate(claim)]
    # A claim is known by its identity: two claims with the same words may belong to different questions.
    decisions: dict[int, Decision] = {}
    if gate is not None and asked:
        drafts = [Draft(text=claim.text, source="recorded") for claim in asked]
        found = yield from decide(gate, [claim.query or claim.text for claim in asked], drafts=drafts)
        for claim, decision in zip(asked, found, strict=True):
            decisions[id(claim)] = decision
    judged = []
    for claims in rewritten:
        judged.append([_judged(claim, decisions.get(id(claim))) for claim in claims])
    return judged


def _is_for_the_gate(claim: Claim) -> bool:
    return claim.kind == "claim" and bool(claim.query) and claim.needs_search is not False


def _judged(claim: Claim, decision: Decision | None) -> JudgedClaim:
    if not claim.query:
        return JudgedClaim(claim=claim, kept=False, reason="It has no query.")
    if claim.needs_search is False:
        return JudgedClaim(claim=claim, kept=False, reason="The rewriter says that it needs no search.")
    if decision is None:
        reason = "It is part of the question." if claim.kind == "question" else "Claims are not filtered."
        return JudgedClaim(claim=claim, kept=True, reason=reason)
    word = "unknown" if decision.retrieve else "known"
    return JudgedClaim(
        claim=claim,
        kept=decision.retrieve,
        reason=f"Judged {word}: {decision.reason}",
        p_known=None if decision.error else decision.p_known,
    )


def _plan(
    question: str, claims: Sequence[JudgedClaim], include_question: bool, max_queries: int
) -> QueryPlan:
    """Take the queries of the claims that are kept, without near duplicates, up to the maximum."""
    queries: list[Query] = []
    if include_question:
        queries.append(Query(text=question))
    judged = []
    for claim in claims:
        text = claim.claim.query
        if not claim.kept or text is None:
            judged.append(claim)
            continue
        twin = next((query for query in queries if _alike(query.text, text)), None)
        if twin is not None:
            judged.append(_dropped(claim, f"Much the same as {twin.text!r}."))
        elif len(queries) >= max_queries:
            judged.append(_dropped(claim, f"There are {max_queries} queries already."))
        else:
            judged.append(claim)
            queries.append(Query(text=text, claim=claim.claim.text))
    if not queries:  # a question that needs retrieval is never left without a query
        queries.append(Query(text=question))
    return QueryPlan(question=question, queries=tuple(queries), claims=tuple(judged))


def _dropped(claim: JudgedClaim, reason: str) -> JudgedClaim:
    return claim.model_copy(update={"kept": False, "reason": reason})


def _alike(first: str, second: str) -> bool:
    """Whether two queries have at least four fifths of their words in common."""
    if first == second:
        return True
    words = set(normalise(first).split())
    others = set(normalise(second).split())
    together = words | others
    return bool(together) and len(words & others) / len(together) >= 0.8
