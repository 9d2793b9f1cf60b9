"""The whole way of a question without a framework: decide, plan, search, answer.

`Pipeline` is what the command line, the playground, evaluation and the demo run. Each stage is a method that takes a
batch and returns one result an item; `Pipeline.ask_batch` runs them in a row, `Pipeline.both_arms` and
`Pipeline.stream_arms` answer without and with passages whatever the gate says.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice

from rgate_integrations.answering.requests import AnswerRequest, answer_all, stream_answer, write_answers
from rgate_integrations.claims.plan import Query, QueryPlan, plan_queries
from rgate_integrations.decision import Decision, Draft
from rgate_integrations.engine.gate_like import GateLike, decide
from rgate_integrations.errors import InvalidQuestionError
from rgate_integrations.index.fusion import fuse
from rgate_integrations.index.retriever import Hit, Retriever, passage_id
from rgate_integrations.models.base import Proxy
from rgate_integrations.runtime.flow import run


@dataclass(frozen=True)
class Answered:
    """Everything that happened for one question.

    Attributes:
        decision: The gate's decision.
        plan: The queries that were searched.
        hits: The passages that were found.
        answer: The LLM's answer; empty when the question could not be read.
        timings: Milliseconds of each stage; in a batch, its time divided by the number of questions.
    """

    decision: Decision
    plan: QueryPlan
    hits: Sequence[Hit] = ()
    answer: str = ""
    timings: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class BothArms:
    """A question answered both ways, or as far as that has come while it is streamed.

    Attributes:
        decision: The gate's decision; it has no influence on what follows.
        plan: The queries that were searched; None if none have been planned.
        hits: The passages that were found.
        closed_book: The answer without passages; None if there is none yet.
        with_passages: The answer with passages; None if there is none yet, or no index.
        timings: Milliseconds of each stage; in a batch, its time divided by the number of questions.
    """

    decision: Decision
    plan: QueryPlan | None = None
    hits: Sequence[Hit] = ()
    closed_book: Draft | None = None
    with_passages: Draft | None = None
    timings: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Pipeline:
    """Gate, claims, index and LLM in a row.

    Attributes:
        gate: Decides. One that fails retrieves.
        index: Searched for the questions that retrieve; without one every question is answered closed book.
        llm: Answers.
        k: Maximum number of passages a question.
        tokens: Maximum length of an answer.
        claims: Whether the claims of the draft are searched beside the question.
    """

    gate: GateLike
    index: Retriever | None
    llm: Proxy
    k: int = field(default=3, kw_only=True)
    tokens: int = field(default=64, kw_only=True)
    claims: bool = field(default=True, kw_only=True)

    def ask(self, question: str, *, threshold: float | None = None) -> Answered:
        """Decide, search if needed, and answer one question; see `ask_batch`."""
        return self.ask_batch([question], threshold=threshold)[0]

    def ask_batch(self, questions: Sequence[str], *, threshold: float | None = None) -> list[Answered]:
        """Decide, search for what is not known, and answer.

        Args:
            questions: The questions. One that cannot be read gets an error in its decision, and no answer.
            threshold: Used instead of the gate's own.

        Returns:
            One result a question, in order.
        """
        timings: dict[str, float] = {}
        with _timed(timings, "gate", len(questions)):
            decisions = self.decide(questions, threshold=threshold)
        readable = [decision for decision in decisions if _is_readable(decision)]
        with _timed(timings, "claims", len(questions)):
            plans = self.plan(readable)
        with _timed(timings, "search", len(questions)):
            hits = self.search(plans)
        with _timed(timings, "answer", len(questions)):
            answers = self.answer(readable, hits)
        results = zip(plans, hits, answers, strict=True)
        answered = []
        for decision in decisions:
            if _is_readable(decision):
                plan, found, answer = next(results)
                answered.append(Answered(decision, plan, found, answer, timings))
            else:
                answered.append(Answered(decision, QueryPlan(question=""), timings=timings))
        return answered

    def both_arms(self, questions: Sequence[str]) -> list[BothArms]:
        """Answer without and with passages, whatever the gate says, as paired data need it.

        The answer with passages is the closed-book one where nothing is found.

        Returns:
            One result a question, in order; one that cannot be read has no answers.
        """
        timings: dict[str, float] = {}
        with _timed(timings, "gate", len(questions)):
            decisions = self.decide(questions)
        readable = [decision for decision in decisions if _is_readable(decision)]
        with _timed(timings, "claims", len(questions)):
            plans = self.plan(_retrieving(readable))
        with _timed(timings, "search", len(questions)):
            hits = self.search(plans)
        with _timed(timings, "answer without", len(questions)):
            closed = self.answer_closed_book(readable)
        with _timed(timings, "answer with passages", len(questions)):
            opened = self.answer_with_passages(readable, hits, closed)
        results = zip(plans, hits, closed, opened, strict=True)
        arms = []
        for decision in decisions:
            if _is_readable(decision):
                plan, found, without, with_passages = next(results)
                arms.append(BothArms(decision, plan, found, without, with_passages, timings))
            else:
                arms.append(BothArms(decision, timings=timings))
        return arms

    def stream_arms(self, question: str) -> Iterator[BothArms]:
        """Answer one question both ways, and yield what there is each time there is more of it.

        The decision comes first, then the passages, then the two answers one after the other.
        """
        timings: dict[str, float] = {}
        with _timed(timings, "gate"):
            (decision,) = self.decide([question])
        arms = BothArms(decision, timings=dict(timings))
        yield arms
        if not _is_readable(decision):
            return
        with _timed(timings, "claims"):
            (plan,) = self.plan(_retrieving([decision]))
        with _timed(timings, "search"):
            (hits,) = self.search([plan])
        arms = replace(arms, plan=plan, hits=hits, timings=dict(timings))
        yield arms
        request = AnswerRequest.closed_book(decision.question, self.tokens)
        for draft in self._stream(request, timings, "answer without"):
            arms = replace(arms, closed_book=draft, timings=dict(timings))
            yield arms
        if not hits:
            yield replace(arms, with_passages=arms.closed_book)
            return
        request = AnswerRequest.with_passages(decision.question, [h.passage for h in hits], self.tokens)
        for draft in self._stream(request, timings, "answer with passages"):
            arms = replace(arms, with_passages=draft, timings=dict(timings))
            yield arms

    # --- the stages ----------------------------------------------------------------------------------------

    def decide(self, questions: Sequence[str], *, threshold: float | None = None) -> list[Decision]:
        """Ask the gate, in one call; whatever goes wrong, every question gets a decision to retrieve."""
        return run(decide(self.gate, questions, threshold=threshold))

    def plan(self, decisions: Sequence[Decision]) -> list[QueryPlan]:
        """Turn decisions into queries: the question and, with `claims`, the claims of its draft."""
        if self.claims:
            return plan_queries(decisions)
        plans = []
        for decision in decisions:
            queries = (Query(text=decision.question),) if decision.retrieve else ()
            plans.append(QueryPlan(question=decision.question, queries=queries))
        return plans

    def search(self, plans: Sequence[QueryPlan]) -> list[list[Hit]]:
        """Search the queries of all plans in one call, and fuse the results of each plan by rank."""
        queries = [query.text for plan in plans for query in plan.queries]
        if self.index is None or not queries:
            return [[] for _ in plans]
        rankings = iter(self.index.search(queries, self.k))
        found = []
        for plan in plans:
            own = list(islice(rankings, len(plan.queries)))
            found.append(fuse(own, key=passage_id, k=self.k))
        return found

    def answer(self, decisions: Sequence[Decision], hits: Sequence[Sequence[Hit]]) -> list[str]:
        """Answer with the passages that were found, else closed book; see `answer_all`."""
        passages = [[hit.passage for hit in found] for found in hits]
        return answer_all(self.llm, decisions, passages, tokens=self.tokens)

    def answer_closed_book(self, decisions: Sequence[Decision]) -> list[Draft]:
        """Answer without passages, as one batch."""
        requests = [AnswerRequest.closed_book(decision.question, self.tokens) for decision in decisions]
        return write_answers(self.llm, requests)

    def answer_with_passages(
        self, decisions: Sequence[Decision], hits: Sequence[Sequence[Hit]], closed_book: Sequence[Draft]
    ) -> list[Draft | None]:
        """Answer from passages, as one batch; where nothing was found the closed-book answer is taken.

        Returns:
            One answer a decision; None for all if there is no index.
        """
        if self.index is None:
            return [None for _ in decisions]
        answers: list[Draft | None] = list(closed_book)
        positions = [position for position, found in enumerate(hits) if found]
        requests = []
        for position in positions:
            passages = [hit.passage for hit in hits[position]]
            requests.append(AnswerRequest.with_passages(decisions[position].question, passages, self.tokens))
        for position, draft in zip(positions, write_answers(self.llm, requests), strict=True):
            answers[position] = draft
        return answers

    def warm_up(self, *, search: bool = True) -> None:
        """Use every model once, so that the first question's times are those of its own work.

        Args:
            search: Whether to search, too; a question that the LLM knows needs no index.
        """
        question = "Is this a question?"
        self.decide([question])
        if self.index is not None and search:
            self.index.search([question], 1)
        write_answers(self.llm, [AnswerRequest.closed_book(question, tokens=1)])

    def _stream(self, request: AnswerRequest, timings: dict[str, float], stage: str) -> Iterator[Draft]:
        """Yield an answer as it grows, and keep the time of the stage up to date."""
        start = time.perf_counter()
        for text in stream_answer(self.llm, request):
            timings[stage] = (time.perf_counter() - start) * 1e3
            yield Draft(text=text, finished=False, source="llm", model=self.llm.name)


def _is_readable(decision: Decision) -> bool:
    """Whether there is a question to answer: a gate that failed on a good one still retrieves for it."""
    if decision.error is None:
        return True
    return bool(decision.question.strip()) and decision.error.type != InvalidQuestionError.__name__


def _retrieving(decisions: Sequence[Decision]) -> list[Decision]:
    """Return the decisions with `retrieve` set, for passages that are shown whatever the gate says."""
    return [decision.model_copy(update={"retrieve": True}) for decision in decisions]


@contextmanager
def _timed(timings: dict[str, float], stage: str, questions: int = 1) -> Iterator[None]:
    start = time.perf_counter()
    yield
    timings[stage] = (time.perf_counter() - start) * 1e3 / max(questions, 1)
