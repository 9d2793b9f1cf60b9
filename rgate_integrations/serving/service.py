"""Shares one gate among many clients: bounds the queue, adjusts the gate to their LLMs, counts decisions."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from rgate_integrations.answering.look_first import LookFirst, decide_with_passages
from rgate_integrations.decision import Decision, Draft, valid_count, valid_timeout
from rgate_integrations.engine.decider import Decider, read_item
from rgate_integrations.engine.loading import resolve_gate
from rgate_integrations.engine.own_gate import GateLike
from rgate_integrations.errors import RGateError
from rgate_integrations.gates.base import CLIENT
from rgate_integrations.runtime.flow import arun
from rgate_integrations.serving import logger
from rgate_integrations.serving.wire import DecideItem, likeliest_kind, route_label

# Upper limits of the histograms' buckets; seconds go from below the fastest decision up to the default timeout.
_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
# Requests name the LLM, so clients could otherwise fill the memory.
_MAX_LLMS = 64
_MAX_NAME = 400  # characters, as many as are read of an LLM's name

LLM_NAME_SOURCE = "the request"
"""What decisions report as the source of the LLM's name if the client's request named it."""


class QueueFullError(RGateError):
    """The queue has too few free places for a request: the client should try again later, or retrieve."""


class Metrics:
    """The Prometheus metrics of a server.

    Attributes:
        errors: Failed decisions and requests, by type of error; in the gateway also failed searches, rewrites of
            follow-ups, and writes to the log.
        requests: POST requests to the gateway, by outcome: ``retrieve``, ``direct``, ``shadow`` (only logged),
            ``undecided`` (nothing that the gate can judge) or ``off`` (switched off by the client).
        undecided: Requests about which the gateway cannot decide, by reason.
        waiting: Number of questions in the queue or being decided.
    """

    def __init__(self) -> None:
        # Not the global registry, because several servers may run in one process.
        registry = self._registry = CollectorRegistry()
        self._decisions = Counter(
            "rgate_decisions", "Decisions made.", ["outcome", "kind", "gate"], registry=registry
        )
        self.errors = Counter(
            "rgate_errors", "Decisions and requests that failed.", ["type"], registry=registry
        )
        self.requests = Counter("rgate_gateway_requests", "Requests, by outcome.", ["way"], registry=registry)
        self.undecided = Counter(
            "rgate_gateway_undecided",
            "Requests forwarded without a decision, by reason.",
            ["reason"],
            registry=registry,
        )
        self._seconds = Histogram(
            "rgate_decision_seconds", "Time to decide.", buckets=_SECONDS, registry=registry
        )
        self._sizes = Histogram(
            "rgate_questions_per_call", "Questions decided together.", buckets=_SIZES, registry=registry
        )
        self.waiting = Gauge(
            "rgate_waiting_questions", "Questions in the queue or being decided.", registry=registry
        )

    def count(self, decisions: Sequence[Decision], seconds: float) -> None:
        """Count decisions that were made together, and the seconds that this took."""
        self._seconds.observe(seconds)
        self._sizes.observe(len(decisions))
        for decision in decisions:
            outcome: str = route_label(decision)
            if decision.error is not None:
                outcome = "failed"
                self.errors.labels(decision.error.type).inc()
            self._decisions.labels(outcome, likeliest_kind(decision), decision.gate).inc()

    def text(self) -> bytes:
        """Return the metrics in Prometheus's text format."""
        return generate_latest(self._registry)


@dataclass(frozen=True)
class LLMGates:
    """The gates that judge what one LLM knows.

    Attributes:
        question: The gate for questions.
        answer: The gate for drafts; None if the service's gate cannot judge drafts.
    """

    question: Decider
    answer: Decider | None

    @classmethod
    def for_llm(cls, gate: Decider, llm: str, name_source: str) -> LLMGates:
        """Split a gate into one for questions and one for drafts, both adjusted to an LLM; see `Decider.for_llm`."""
        question = (gate.question_gate() or gate).for_llm(llm, name_source)
        answer = gate.answer_gate()
        return cls(question, None if answer is None else answer.for_llm(llm, name_source))


class DecisionService:
    """Decides for all clients with one gate, which batches their questions together.

    Args:
        gate: The gate.
        timeout: Seconds for a decision; a late decision retrieves.
        queue: Number of questions that may wait, at least 1; further ones are rejected at once.

    Raises:
        ConfigurationError: ``timeout`` is not a number above 0, ``queue`` is below 1, or ``gate`` is not a gate.

    Attributes:
        metrics: What the server counts and measures, for Prometheus.
    """

    def __init__(self, gate: GateLike, *, timeout: float = 5.0, queue: int = 512) -> None:
        self.gate = resolve_gate(gate)
        self.metrics = Metrics()
        self.timeout = valid_timeout(timeout) or math.inf
        self._queue = valid_count(queue, "queue")
        self._waiting = 0
        self.metrics.waiting.set_function(lambda: self._waiting)
        # Bounded, because clients can send any name.
        self._gates = lru_cache(_MAX_LLMS)(partial(LLMGates.for_llm, self.gate))

    def gates(self, llm: str = "", name_source: str = LLM_NAME_SOURCE) -> LLMGates:
        """Return the gates that judge what an LLM knows.

        Args:
            llm: Name of the LLM, perhaps with its provider, as in ``openai/gpt-4o``; empty for the LLM that the
                server was started for.
            name_source: Where the client found the name; empty if its user gave it. Only a name that a user gave
                overrides the one that the server was started with.
        """
        # Cut, because clients choose the name, and the cache keeps it. With a source, it is never read as a folder.
        name = llm[:_MAX_NAME].strip()
        return self._gates(name, (name_source or CLIENT) if name else "")

    async def decide(
        self,
        items: Sequence[DecideItem],
        llm: str = "",
        name_source: str = LLM_NAME_SOURCE,
        milliseconds: float | None = None,
    ) -> list[Decision]:
        """Return one decision per question of a client's request, in order; see `DecisionEngine.decide_batch`.

        Args:
            items: The questions.
            llm: Name of the LLM whose knowledge is judged, see `gates`; may be empty.
            name_source: Source of that name, see `gates`.
            milliseconds: The client's timeout in milliseconds. The service's timeout applies if it is shorter, or
                if this is None.

        Raises:
            QueueFullError: The queue has too few free places.
            Exception: The gate failed, and its ``on_error`` is ``"raise"``.
        """
        gates = self.gates(llm, name_source)
        # A client may shorten the timeout but not lengthen it, or it could block the queue.
        timeout = min((milliseconds or math.inf) / 1e3, self.timeout)
        with self.counting(len(items)) as decisions:
            # One by one: the gate's own queue batches them with those of other clients.
            tasks = [asyncio.ensure_future(_decide(item, gates, timeout)) for item in items]
            try:
                decisions += await asyncio.gather(*tasks)
            finally:
                # If one raised, the others' places are free only when they have ended.
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
        return decisions

    @contextmanager
    def counting(self, questions: int) -> Iterator[list[Decision]]:
        """Reserve places in the queue, yield a list, and count and log the decisions that the caller adds to it.

        Raises:
            QueueFullError: The queue has too few free places.
        """
        # Reject at once: a client that is told "full" retrieves now, and one that waits would time out later.
        if self._waiting + questions > self._queue:
            raise QueueFullError(
                f"The queue has too few free places: {self._waiting} of {self._queue} are taken, and this request "
                f"needs {questions}.",
                hint="Try again later, send fewer questions, or retrieve."
                if questions <= self._queue
                else f"Send at most {self._queue} questions at once, or raise the server's --queue.",
            )
        start = time.perf_counter()
        decisions: list[Decision] = []
        # No lock is needed, because everything here runs on one event loop.
        self._waiting += questions
        try:
            yield decisions
        finally:
            self._waiting -= questions
        seconds = time.perf_counter() - start
        self.metrics.count(decisions, seconds)
        retrieving = sum(decision.retrieve for decision in decisions)
        logger.info("questions: %d, to retrieve: %d, %.0f ms", questions, retrieving, seconds * 1e3)


async def _decide(item: DecideItem, gates: LLMGates, timeout: float) -> Decision:
    """Judge a question, with its draft if the gate reads drafts, and then with its passages if it has any."""
    gate, draft = gates.question, item.draft
    if draft is not None and gates.answer is not None:
        gate = gates.answer
    if isinstance(draft, Draft):  # an id could name the states of another client's answer
        draft = draft.model_copy(update={"response_id": ""})
    request = read_item(
        item.question,
        history=item.history,
        draft=draft,
        popularity=item.popularity,
        threshold=item.threshold,
        timeout=timeout,
    )
    (decision,) = await arun(gate.flow([request]))
    if item.passages:
        decision = decide_with_passages(decision, item.passages, LookFirst(), direct_threshold=item.threshold)
    return decision
