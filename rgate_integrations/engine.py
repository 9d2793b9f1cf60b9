"""The engine: owns the models and the queue, asks a gate, and turns its scores into decisions.

What `load_gate` returns. Everything that can go wrong with a request goes wrong here, in one place: `_decided`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Hashable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from numbers import Real
from typing import TYPE_CHECKING, Any, Literal, Self, TypeAlias

from rgate_integrations.batching import Batcher
from rgate_integrations.decision import Decision, Draft
from rgate_integrations.errors import ConfigurationError, InvalidQuestionError
from rgate_integrations.evidence.base import Drafter, Inputs
from rgate_integrations.evidence.collector import Sources
from rgate_integrations.failing import log_failures, retrieve_instead
from rgate_integrations.gates.base import Gate, Score
from rgate_integrations.judging import Judged, judge_together
from rgate_integrations.proxy.base import Proxy
from rgate_integrations.request import Request, checked, checked_batch

OnError: TypeAlias = Literal["retrieve", "raise"]


class DecisionEngine:
    """Decides with a gate for each question whether to retrieve. Concurrent callers share model batches.

    Making one loads nothing: weights are loaded by the first decision that needs them. It is immutable;
    `with_options` makes a changed copy.

    Args:
        gate: Scores the evidence.
        proxy: A loaded `Proxy`, or the name, folder or Hub id of one, in place of the gate's.
        llm: Writes the drafts of gates with ``source="llm"``.
        on_error: ``"retrieve"``: a failure yields a decision that retrieves and says why; ``"raise"``: it is raised.
        queue_timeout: A question that has waited longer than this for its turn, in seconds, is not judged: it
            fails with an `OverloadedError`, so it retrieves. By default questions wait as long as it takes.

    Raises:
        ConfigurationError: An argument is out of its range.
    """

    def __init__(
        self,
        gate: Gate,
        *,
        proxy: Proxy | str | None = None,
        llm: Drafter | None = None,
        on_error: OnError = "retrieve",
        queue_timeout: float | None = None,
    ) -> None:
        if on_error not in ("retrieve", "raise"):
            raise ConfigurationError(f"on_error cannot be {on_error!r}.", hint="retrieve or raise")
        if queue_timeout is not None and not (isinstance(queue_timeout, Real) and queue_timeout > 0):
            raise ConfigurationError(f"queue_timeout must be above 0 seconds, not {queue_timeout!r}.")
        if proxy is not None:
            gate = gate.changed(proxy=proxy.name if isinstance(proxy, Proxy) else proxy)
        self.gate = gate
        self.on_error = on_error
        self.queue_timeout = queue_timeout
        self._proxy = proxy if isinstance(proxy, Proxy) else None
        self._llm = llm
        self._memory: dict[Hashable, Any] = {}
        self._batcher: Batcher[Inputs, Judged] = Batcher(self._judge, timeout=queue_timeout)

    def __repr__(self) -> str:
        return f"DecisionEngine({self.gate!r}, on_error={self.on_error!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle gate, options and a given proxy or LLM; not the worker, nor what it remembers."""
        given = (self.gate, self._proxy, self._llm, self.on_error, self.queue_timeout)
        return _engine, given

    @property
    def threshold(self) -> float:
        """The gate's threshold: retrieve iff p_known is below it."""
        return self.gate.threshold

    @property
    def proxy(self) -> str:
        """Catalogue name, folder or Hub id of the proxy model; `get_proxy` returns the model."""
        return self.gate.proxy

    if not TYPE_CHECKING:  # a type checker is to see what there is, not what may be

        def __getattr__(self, name: str) -> Any:
            """Read a parameter of the gate, such as ``tokens``."""
            gate = self.__dict__.get("gate")
            if gate is not None and name in type(gate).model_fields:
                return getattr(gate, name)
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @property
    def llm(self) -> Drafter | None:
        """Writes the drafts of gates with ``source="llm"``."""
        return self._llm

    def get_proxy(self) -> Proxy:
        """Return the proxy model, shared with every engine whose gate names the same one."""
        if self._proxy is None:
            from rgate_integrations.proxy.local import shared_proxy

            self._proxy = shared_proxy(self.gate.proxy)
        return self._proxy

    def with_options(
        self,
        *,
        proxy: Proxy | str | None = None,
        llm: Drafter | None = None,
        on_error: OnError | None = None,
        queue_timeout: float | None = None,
        **parameters: Any,
    ) -> Self:
        """Return a copy with other options, or with other parameters of its gate."""
        gate = self.gate.changed(**parameters) if parameters else self.gate
        return self.with_gate(gate, proxy=proxy, llm=llm, on_error=on_error, queue_timeout=queue_timeout)

    def with_gate(
        self,
        gate: Gate,
        *,
        proxy: Proxy | str | None = None,
        llm: Drafter | None = None,
        on_error: OnError | None = None,
        queue_timeout: float | None = None,
    ) -> Self:
        """Return a copy with another gate; what is not given stays as it is, the models too."""
        same_model = proxy is None and gate.proxy == self.gate.proxy
        return type(self)(
            gate,
            proxy=self._proxy if same_model else proxy,
            llm=self._llm if llm is None else llm,
            on_error=on_error or self.on_error,
            queue_timeout=self.queue_timeout if queue_timeout is None else queue_timeout,
        )

    def config(self) -> dict[str, Any]:
        """Return the gate's name and parameters, and the options, as JSON values."""
        return {**self.gate.config(), "on_error": self.on_error, "queue_timeout": self.queue_timeout}

    def to_json(self) -> str:
        """Return `config` as JSON; `rgate_integrations.loading.gate_from_json` reads it."""
        return json.dumps(self.config())

    # --- decisions -----------------------------------------------------------------------------------------

    def decide(
        self,
        question: str,
        *,
        threshold: float | None = None,
        draft: Draft | str | None = None,
        popularity: float | None = None,
    ) -> Decision:
        """Decide for one question.

        Args:
            question: The user's question.
            threshold: Used instead of the gate's own, at least 0.
            draft: A draft to judge instead of writing one: the LLM's own first tokens, or recorded text.
            popularity: Popularity score of the question's entity, for gates that use one.

        Raises:
            InvalidQuestionError: The question is empty, not a string, or holds NUL bytes.
            ConfigurationError: The threshold is not a number of at least 0.
        """
        asked = [self._request(question, threshold, draft, popularity)]
        return self._decisions(asked, [_result(f) for f in self._submit(asked)])[0]

    async def adecide(
        self,
        question: str,
        *,
        threshold: float | None = None,
        draft: Draft | str | None = None,
        popularity: float | None = None,
    ) -> Decision:
        """Decide for one question without blocking the event loop; see `decide`."""
        asked = [self._request(question, threshold, draft, popularity)]
        return self._decisions(asked, await _results(self._submit(asked)))[0]

    def decide_batch(
        self,
        questions: Sequence[str],
        *,
        threshold: float | Sequence[float | None] | None = None,
        drafts: Sequence[Draft | str | None] | None = None,
        popularity: Sequence[float | None] | None = None,
    ) -> list[Decision]:
        """Decide for a batch of questions.

        A bad question or a failing model affects its own item alone: that decision retrieves and carries
        the `error` (with ``on_error="raise"`` the first such error is raised).

        Args:
            questions: The questions.
            threshold: Used instead of the gate's own: one for all, or one a question; at least 0.
            drafts: Drafts to judge instead of writing them, one a question; None where there is none.
            popularity: Popularity scores, one a question.

        Returns:
            One decision a question, in order.

        Raises:
            ConfigurationError: A threshold is not a number of at least 0, or the numbers of items differ.
        """
        asked = checked_batch(questions, threshold, drafts, popularity, default=self.threshold)
        return self._decisions(asked, [_result(f) for f in self._submit(asked)])

    async def adecide_batch(
        self,
        questions: Sequence[str],
        *,
        threshold: float | Sequence[float | None] | None = None,
        drafts: Sequence[Draft | str | None] | None = None,
        popularity: Sequence[float | None] | None = None,
    ) -> list[Decision]:
        """Decide for a batch without blocking the event loop; see `decide_batch`."""
        asked = checked_batch(questions, threshold, drafts, popularity, default=self.threshold)
        return self._decisions(asked, await _results(self._submit(asked)))

    # --- to the worker -------------------------------------------------------------------------------------

    def _request(self, question: object, threshold: object, draft: object, popularity: object) -> Request:
        asked = checked(question, threshold, draft, popularity, default=self.threshold)
        if isinstance(asked.inputs, InvalidQuestionError):  # in a batch it is an error of its item
            raise asked.inputs
        return asked

    def _submit(self, asked: Sequence[Request]) -> list[Future[Judged]]:
        """Queue what can be judged; the others are done already.

        The worker gets questions only. Thresholds stay with the caller: they concern nobody else in a merged batch.
        """
        futures: list[Future[Judged]] = []
        queued = iter(self._batcher.submit([r.inputs for r in asked if isinstance(r.inputs, Inputs)]))
        for each in asked:
            if isinstance(each.inputs, Inputs):
                futures.append(next(queued))
            else:
                failed: Future[Judged] = Future()
                failed.set_exception(each.inputs)
                futures.append(failed)
        return futures

    def _judge(self, batch: Sequence[Inputs]) -> list[Judged]:
        """Score a merged batch; runs in the worker."""
        return judge_together([self.gate], batch, self._sources())[0]

    def _sources(self) -> Sources:
        return Sources(self.get_proxy, self._llm, self._memory)

    # --- from scores to decisions --------------------------------------------------------------------------

    def _decisions(self, requests: Sequence[Request], found: Sequence[Judged | Exception]) -> list[Decision]:
        decisions = [self._decided(r, judged) for r, judged in zip(requests, found, strict=True)]
        log_failures(decisions, self.gate.name)
        return decisions

    def _decided(self, request: Request, judged: Judged | Exception) -> Decision:
        """Apply the threshold. The one place where a failure of any kind becomes a decision to retrieve."""
        score = judged if isinstance(judged, Exception) else judged.score
        if isinstance(judged, Judged) and isinstance(score, Score):
            return Decision(
                question=judged.question,
                retrieve=score.p_known < request.threshold,
                p_known=score.p_known,
                threshold=request.threshold,
                reason=score.reason,
                gate=self.gate.name,
                draft=score.draft,
                cost=judged.cost,
                warnings=judged.warnings,
                signals=dict(score.signals),
            )
        error = score if isinstance(score, Exception) else RuntimeError("The gate gave no score.")
        if self.on_error == "raise":
            raise error
        question = request.inputs.question if isinstance(request.inputs, Inputs) else ""
        return retrieve_instead(error, question=question, threshold=request.threshold, gate=self.gate.name)


def decide_together(
    engines: Sequence[DecisionEngine],
    questions: Sequence[str],
    *,
    drafts: Sequence[Draft | str | None] | None = None,
    popularity: Sequence[float | None] | None = None,
) -> list[list[Decision]]:
    """Run several gates over one batch; every piece of evidence that they share is computed once.

    Args:
        engines: What `load_gate` returned; all must use the same proxy and, those that have one, the same LLM.
        questions: The questions.
        drafts: Drafts to judge instead of writing them, one a question.
        popularity: Popularity scores, one a question.

    Returns:
        For each gate its decisions, in the order of the questions.

    Raises:
        ConfigurationError: The gates use different proxies or LLMs.
    """
    if not engines:
        return []
    proxy = engines[0].get_proxy()
    if any(engine.get_proxy() is not proxy for engine in engines):
        raise ConfigurationError("Gates that share evidence must use the same proxy.")
    llms = {id(engine.llm): engine.llm for engine in engines if engine.llm is not None}
    if len(llms) > 1:
        raise ConfigurationError("Gates that share evidence must use the same LLM.")
    sources = Sources(engines[0].get_proxy, next(iter(llms.values()), None), {})
    found = []
    asked = checked_batch(questions, None, drafts, popularity, default=0.5)
    readable = [each.inputs for each in asked if isinstance(each.inputs, Inputs)]
    judged = judge_together([engine.gate for engine in engines], readable, sources)
    for engine, scored in zip(engines, judged, strict=True):
        scores = iter(scored)
        outcomes = [each.inputs if isinstance(each.inputs, Exception) else next(scores) for each in asked]
        own = [replace(each, threshold=engine.threshold) for each in asked]
        found.append(engine._decisions(own, outcomes))
    return found


def _result(future: Future[Judged]) -> Judged | Exception:
    try:
        return future.result()
    except Exception as error:
        return error


async def _results(futures: Sequence[Future[Judged]]) -> list[Judged | Exception]:
    found: list[Judged | Exception] = []
    for outcome in await asyncio.gather(*map(asyncio.wrap_future, futures), return_exceptions=True):
        if isinstance(outcome, Judged | Exception):
            found.append(outcome)
        else:
            raise outcome
    return found


def _engine(
    gate: Gate,
    proxy: Proxy | None,
    llm: Drafter | None,
    on_error: OnError,
    queue_timeout: float | None,
) -> DecisionEngine:
    """Make an engine again from what was pickled."""
    return DecisionEngine(gate, proxy=proxy, llm=llm, on_error=on_error, queue_timeout=queue_timeout)
