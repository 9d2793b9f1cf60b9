"""Plans what to search for: the question, and the unknown claims of its draft (SlimPLM, section 3.3).

A rewriter turns question and draft into claims, and a gate may drop those that the LLM knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, islice

from rgate_integrations.answering.claims import Claim, Rewriter, rewrite_by_sentence, subject
from rgate_integrations.decision import Decision, Draft, Frozen, Request, Text
from rgate_integrations.engine.decider import Decider
from rgate_integrations.engine.follow_ups import list_search_texts
from rgate_integrations.engine.loading import resolve_gate
from rgate_integrations.engine.own_gate import GateLike
from rgate_integrations.errors import ConfigurationError
from rgate_integrations.runtime.flow import Call, Flow, run
from rgate_integrations.runtime.text import normalise


class Query(Frozen):
    """A search query.

    Attributes:
        text: What to search for.
        claim: The claim or sub-question that it searches for; None for the question itself.
    """

    text: Text
    claim: Text | None = None


class JudgedClaim(Frozen):
    """A claim, and whether the plan searches for it.

    Attributes:
        claim: The claim.
        kept: Whether its query is in the plan.
        reason: Why it is kept or not, in a few sentences.
        p_known: The gate's P(known) for claim and query; None if the gate did not judge them, or failed.
    """

    claim: Claim
    kept: bool
    reason: Text
    p_known: float | None = None


class QueryPlan(Frozen):
    """The queries for a question; empty if it needs no retrieval, or there is no question.

    Attributes:
        question: The question.
        queries: The queries, in order of importance: the question first, if it is included.
        claims: Every claim and sub-question, whether kept or not.
    """

    question: Text
    queries: tuple[Query, ...] = ()
    claims: tuple[JudgedClaim, ...] = ()

    @property
    def texts(self) -> list[str]:
        """The texts of the queries, in their order."""
        return [query.text for query in self.queries]


def plan_queries(
    decisions: Sequence[Decision],
    *,
    gate: GateLike | None = None,
    threshold: float | None = None,
    rewriter: Rewriter | None = None,
    always_include_question: bool = True,
    max_queries: int = 6,
) -> list[QueryPlan]:
    """Turn decisions into queries: the question and the claims of its draft, if it has one.

    This is section 3.3 of the SlimPLM paper. ``gate`` filters the claims: it judges each claim's query as a question
    and the claim as its draft, and known claims are dropped. All claims of all questions are judged in one call. The
    paper searches only for claims; its published code adds the question, which is the default here.

    Args:
        decisions: Decisions of a gate; those that do not retrieve, or have no question, get an empty plan.
        gate: Judges the claims that the rewriter keeps, except sub-questions. With None, none is dropped as known.
        threshold: Claims with a P(known) below this are searched for; the gate's own threshold when None.
        rewriter: Turns drafts into claims; by default, each sentence is a claim.
        always_include_question: Whether the question itself is always a query. If not, it is one only if no claim
            is searched for, because a question that needs retrieval always gets a query.
        max_queries: Maximum number of queries per question, at least 1.

    Returns:
        One plan per decision, in order.

    Raises:
        ConfigurationError: ``gate`` is not a gate, the threshold is not a finite number of at least 0, or the
            rewriter returned more or fewer lists of claims than there are decisions, or claims that are no `Claim`.
        Exception: The rewriter raised it, or ``gate`` failed and has ``on_error="raise"``.
    """
    return run(
        plan_queries_flow(
            decisions,
            gate=None if gate is None else resolve_gate(gate),
            threshold=threshold,
            rewriter=rewriter,
            always_include_question=always_include_question,
            max_queries=max_queries,
        )
    )


def plan_queries_flow(
    decisions: Sequence[Decision],
    *,
    histories: Sequence[Sequence[str]] | None = None,
    gate: Decider | None = None,
    threshold: float | None = None,
    rewriter: Rewriter | None = None,
    always_include_question: bool = True,
    max_queries: int = 6,
) -> Flow[list[QueryPlan]]:
    """Return what `plan_queries` returns, as a `Flow`: for other flows or, with `arun`, for an event loop.

    ``histories`` has the turns before each question, in the format of `Request.history`; None stands for no turns. A
    follow-up is searched for by `list_search_texts`, and the rewriter gets it after the user's turn before it.
    """
    plans = [QueryPlan(question=decision.question) for decision in decisions]
    # Known questions are left out, because a rewriter that is a model costs time for each draft.
    unknown = [index for index, decision in enumerate(decisions) if decision.retrieve and decision.question]
    texts = {
        index: list_search_texts(decisions[index].question, () if histories is None else histories[index])
        for index in unknown
    }
    rewritten: list[list[Claim]] = []
    if unknown:
        explicit = []
        for index in unknown:
            # The claims of a follow-up are about what the user's turn before it names.
            question = texts[index][0 if subject(texts[index][0]) else -1]
            explicit.append(decisions[index].model_copy(update={"question": question}))
        rewritten = yield Call(rewriter or rewrite_by_sentence, None, explicit)
        if len(rewritten) != len(unknown):
            raise ConfigurationError(
                f"The rewriter returned {len(rewritten)} lists of claims for {len(unknown)} decisions.",
                hint="It must return one list per decision, in order; a list may be empty.",
            )
    # One list for the claims of all questions, so that the gate judges them in one call.
    all_claims = list(chain(*rewritten))
    for claim in all_claims:
        if not isinstance(claim, Claim):
            raise ConfigurationError(
                f"The rewriter returned a claim of type {type(claim).__name__}.",
                hint="Each claim must be a Claim, such as Claim(text=sentence, query=sentence).",
            )
    judged = iter((yield from _judge(all_claims, gate, threshold)))
    max_queries = max(max_queries, 1)
    for index, claims in zip(unknown, rewritten, strict=True):
        judged_claims = list(islice(judged, len(claims)))
        plans[index] = _plan(
            decisions[index].question,
            texts[index][-max_queries:],
            judged_claims,
            always_include_question,
            max_queries,
        )
    return plans


def _judge(claims: Sequence[Claim], gate: Decider | None, threshold: float | None) -> Flow[list[JudgedClaim]]:
    """Judge whether each claim is kept: first by the rewriter, then by the gate, if there is one."""
    judged = list(map(_judge_by_rewriter, claims))
    indices = [i for i, each in enumerate(judged) if each.kept and each.claim.kind != "question"]
    if gate is None or not indices:
        return judged
    # The query is judged as the question, and the claim as its draft.
    requests = [
        Request(str(claims[i].query), draft=Draft(text=claims[i].text), threshold=threshold) for i in indices
    ]
    decisions = yield from gate.flow(requests)
    for i, decision in zip(indices, decisions, strict=True):
        judged[i] = JudgedClaim(
            claim=claims[i],
            kept=decision.retrieve,
            reason=f"Judged {'unknown' if decision.retrieve else 'known'}: {decision.reason}",
            p_known=None if decision.error is not None else decision.p_known,
        )
    return judged


def _judge_by_rewriter(claim: Claim) -> JudgedClaim:
    """Judge a claim without a gate: drop it if it has no query, or if the rewriter says that it needs no search."""
    kept, reason = True, "Claims are not filtered."
    if not claim.query:
        kept, reason = False, "The claim has no query."
    elif claim.needs_search is False:
        kept, reason = False, "The rewriter says that the claim needs no search."
    elif claim.kind == "question":
        reason = "Sub-questions are not filtered."
    return JudgedClaim(claim=claim, kept=kept, reason=reason)


def _plan(
    question: str,
    texts: Sequence[str],
    claims: Sequence[JudgedClaim],
    include_question: bool,
    max_queries: int,
) -> QueryPlan:
    """Return the queries for a question's texts and kept claims, without near duplicates."""
    of_question = [Query(text=text) for text in texts]
    queries = list(of_question) if include_question else []
    judged = []
    for claim in claims:
        text = claim.claim.query
        if claim.kept and text is not None:
            problem = ""
            if any(are_alike(query.text, text) for query in queries):
                problem = "A similar query is already in the plan."
            elif len(queries) >= max_queries:
                problem = f"The plan already has {max_queries} queries."
            if problem:
                claim = claim.model_copy(update={"kept": False, "reason": problem})
            else:
                queries.append(Query(text=text, claim=claim.claim.text))
        judged.append(claim)
    # A question that needs retrieval always has a query.
    return QueryPlan(question=question, queries=tuple(queries or of_question), claims=tuple(judged))


def are_alike(first: str, second: str) -> bool:
    """Return whether two queries are equal, or at least four fifths of all their words are in both."""
    words, others = set(normalise(first).split()), set(normalise(second).split())
    # Searching both would return the same passages twice.
    return first == second or len(words & others) >= 0.8 * len(words | others) > 0
