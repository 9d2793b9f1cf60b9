"""The engine: owns the models and the queue, asks a gate, and turns its scores into decisions.

What `load_gate` returns. Everything that can go wrong with a request goes wrong here, in one place: `_decided`.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, Self, TypeAlias

from rgate_integrations.decision import Decision, Draft
from rgate_integrations.engine.batching import Batcher, Later
from rgate_integrations.engine.deadlines import aresults, results
from rgate_integrations.engine.fallback import fallback_decision, log_failures
from rgate_integrations.engine.follow_ups import retrieve_unread
from rgate_integrations.engine.judging import Begun, Judged, judge_together, look_first, look_on
from rgate_integrations.engine.requests import Request, checked, checked_batch, valid_timeout
from rgate_integrations.errors import ConfigurationError, InvalidQuestionError
from rgate_integrations.evidence.base import Drafter, Inputs
from rgate_integrations.evidence.collector import Sources, expanded_specs
from rgate_integrations.gates.base import Gate, Score
from rgate_integrations.gates.rules import RuledGate, RuleOrRules, Rules
from rgate_integrations.models.base import Proxy

OnError: TypeAlias = Literal["retrieve", "raise"]

_LOCAL_AT_ONCE = 16  # rows that a local model reads in one pass
_MOST_AT_ONCE = 64
_JUDGING: ContextVar[tuple[DecisionEngine, ...]] = ContextVar("_JUDGING", default=())
"""The engines whose workers are busy with what this is a part of."""


class DecisionEngine:
    """Decides with a gate for each question whether to retrieve. Concurrent callers share model batches.

    Making one loads nothing: weights are loaded by the first decision that needs them. It is immutable;
    `with_options` makes a changed copy.

    Args:
        gate: Scores the evidence.
        proxy: A loaded `Proxy`, or the name, folder or Hub id of one, in place of the gate's.
        llm: Writes the drafts of gates with ``source="llm"``.
        on_error: ``"retrieve"``: a failure yields a decision that retrieves and says why; ``"raise"``: it is raised.
        timeout: How long a call may take in all, in seconds. A question that has no decision by then, wherever it
            is, fails with an `OverloadedError`, so it retrieves. By default a call takes as long as it takes. The
            first call loads the model, which counts too: decide something beforehand.
        always: Rules for what always retrieves: examples, patterns, and functions; see
            `rgate_integrations.gates.rules`.
        never: Rules for what never does.

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
        timeout: float | None = None,
        always: RuleOrRules = (),
        never: RuleOrRules = (),
    ) -> None:
        if on_error not in ("retrieve", "raise"):
            raise ConfigurationError(f"on_error cannot be {on_error!r}.", hint="retrieve or raise")
        if proxy is not None:
            gate = gate.changed(proxy=proxy.name if isinstance(proxy, Proxy) else proxy)
        self.gate = gate
        self.rules = Rules.of(always, never)
        self._asked = RuledGate(inner=gate, proxy=gate.proxy, rules=self.rules) if self.rules else gate
        self.on_error = on_error
        self.timeout = valid_timeout(timeout)
        self._proxy = proxy if isinstance(proxy, Proxy) else None
        self._llm = llm
        self._memory: dict[Hashable, Any] = {}
        # Two queues: what needs a draft that is still to be written holds up nobody whom a quick look settles.
        at_once = _at_once(proxy, llm)
        self._slow: Batcher[Begun, Judged] = Batcher(self._look_on, max_size=at_once)
        self._batcher: Batcher[Inputs, Judged] = Batcher(self._look_first, then=self._slow, max_size=at_once)

    def __repr__(self) -> str:
        return f"DecisionEngine({self.gate!r}, on_error={self.on_error!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle gate, options and a given proxy or LLM; not the worker, nor what it remembers."""
        given = (self.gate, self._proxy, self._llm, self.on_error, self.timeout, self.rules)
        return _engine, given

    @property
    def threshold(self) -> float:
        """The gate's threshold: retrieve iff p_known is below it."""
        return self.gate.threshold

    @property
    def reads_history(self) -> bool:
        """Whether the gate judges a question in the light of the turns before it."""
        return any(spec.reads_history for spec in expanded_specs(self.gate.specs))

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
            from rgate_integrations.models.local import shared_proxy

            self._proxy = shared_proxy(self.gate.proxy)
        return self._proxy

    def with_options(
        self,
        *,
        proxy: Proxy | str | None = None,
        llm: Drafter | None = None,
        on_error: OnError | None = None,
        timeout: float | None = None,
        always: RuleOrRules | None = None,
        never: RuleOrRules | None = None,
        **parameters: Any,
    ) -> Self:
        """Return a copy with other options, or with other parameters of its gate."""
        gate = self.gate.changed(**parameters) if parameters else self.gate
        return self.with_gate(
            gate, proxy=proxy, llm=llm, on_error=on_error, timeout=timeout, always=always, never=never
        )

    def with_gate(
        self,
        gate: Gate,
        *,
        proxy: Proxy | str | None = None,
        llm: Drafter | None = None,
        on_error: OnError | None = None,
        timeout: float | None = None,
        always: RuleOrRules | None = None,
        never: RuleOrRules | None = None,
    ) -> Self:
        """Return a copy with another gate; what is not given stays as it is, the models too."""
        same_model = proxy is None and gate.proxy == self.gate.proxy
        return type(self)(
            gate,
            proxy=self._proxy if same_model else proxy,
            llm=self._llm if llm is None else llm,
            on_error=on_error or self.on_error,
            timeout=self.timeout if timeout is None else timeout,
            always=self.rules.always if always is None else always,
            never=self.rules.never if never is None else never,
        )

    def config(self) -> dict[str, Any]:
        """Return the gate's name and parameters, and the options, as JSON values."""
        rules = {"rules": self.rules.config()} if self.rules else {}
        return {**self.gate.config(), "on_error": self.on_error, "timeout": self.timeout, **rules}

    def to_json(self) -> str:
        """Return `config` as JSON; `rgate_integrations.engine.loading.gate_from_json` reads it."""
        return json.dumps(self.config())

    # --- decisions -----------------------------------------------------------------------------------------

    def decide(
        self,
        question: str,
        *,
        threshold: float | None = None,
        draft: Draft | str | None = None,
        popularity: float | None = None,
        history: Sequence[str] | None = None,
        metadata: Mapping[str, Any] | None = None,
        timeout: float | None = None,
    ) -> Decision:
        """Decide for one question.

        Args:
            question: The user's question.
            threshold: Used instead of the gate's own, at least 0.
            draft: A draft to judge instead of writing one: the LLM's own first tokens, or recorded text.
            popularity: Popularity score of the question's entity, for gates that use one.
            history: What was said before, oldest first: lines such as ``user: Who wrote Hamlet?`` and
                ``assistant: Shakespeare.`` A gate that does not read it retrieves; see `reads_history`.
            metadata: What rules that are functions may look at.
            timeout: Used instead of the gate's own, in seconds: without a decision by then it retrieves.

        Raises:
            InvalidQuestionError: The question is empty, not a string, or holds NUL bytes.
            ConfigurationError: The threshold is not a number of at least 0, or the timeout not one above 0.
        """
        asked = [self._request(question, threshold, draft, popularity, history, metadata)]
        patience = self._patience(timeout)
        found = results(self._submit(asked), patience)
        return self._decisions(asked, found)[0]

    async def adecide(
        self,
        question: str,
        *,
        threshold: float | None = None,
        draft: Draft | str | None = None,
        popularity: float | None = None,
        history: Sequence[str] | None = None,
        metadata: Mapping[str, Any] | None = None,
        timeout: float | None = None,
    ) -> Decision:
        """Decide for one question without blocking the event loop; see `decide`."""
        asked = [self._request(question, threshold, draft, popularity, history, metadata)]
        patience = self._patience(timeout)
        found = await aresults(self._submit(asked), patience)
        return self._decisions(asked, found)[0]

    def decide_batch(
        self,
        questions: Sequence[str],
        *,
        threshold: float | Sequence[float | None] | None = None,
        drafts: Sequence[Draft | str | None] | None = None,
        popularity: Sequence[float | None] | None = None,
        histories: Sequence[Sequence[str] | None] | None = None,
        metadata: Sequence[Mapping[str, Any] | None] | None = None,
        timeout: float | None = None,
    ) -> list[Decision]:
        """Decide for a batch of questions.

        A bad question or a failing model affects its own item alone: that decision retrieves and carries
        the `error` (with ``on_error="raise"`` the first such error is raised).

        Args:
            questions: The questions.
            threshold: Used instead of the gate's own: one for all, or one a question; at least 0.
            drafts: Drafts to judge instead of writing them, one a question; None where there is none.
            popularity: Popularity scores, one a question.
            histories: What was said before each question; None where it is the first.
            metadata: What rules that are functions may look at, one mapping a question.
            timeout: Used instead of the gate's own, in seconds, for all questions together: those without a
                decision by then retrieve.

        Returns:
            One decision a question, in order.

        Raises:
            ConfigurationError: A threshold is not a number of at least 0, the timeout is not one above 0, or the
                numbers of items differ.
        """
        asked = checked_batch(
            questions, threshold, drafts, popularity, histories, metadata, default=self.threshold
        )
        patience = self._patience(timeout)
        found = results(self._submit(asked), patience)
        return self._decisions(asked, found)

    async def adecide_batch(
        self,
        questions: Sequence[str],
        *,
        threshold: float | Sequence[float | None] | None = None,
        drafts: Sequence[Draft | str | None] | None = None,
        popularity: Sequence[float | None] | None = None,
        histories: Sequence[Sequence[str] | None] | None = None,
        metadata: Sequence[Mapping[str, Any] | None] | None = None,
        timeout: float | None = None,
    ) -> list[Decision]:
        """Decide for a batch without blocking the event loop; see `decide_batch`."""
        asked = checked_batch(
            questions, threshold, drafts, popularity, histories, metadata, default=self.threshold
        )
        patience = self._patience(timeout)
        found = await aresults(self._submit(asked), patience)
        return self._decisions(asked, found)

    # --- to the worker -------------------------------------------------------------------------------------

    def _request(self, *given: object) -> Request:
        asked = checked(*given, default=self.threshold)
        if isinstance(asked.inputs, InvalidQuestionError):  # in a batch it is an error of its item
            raise asked.inputs
        return asked

    def _submit(self, asked: Sequence[Request]) -> list[Future[Judged]]:
        """Queue what can be judged; returns a future for each request, and for what cannot be one that is done.

        The worker gets questions only. Thresholds stay with the caller: they concern nobody else in a merged batch.
        """
        if self in _JUDGING.get():
            itself = ConfigurationError(
                "The gate was called while it judges, by its own drafter: it would wait for itself.",
                hint="Give llm= the model that answers, not a chain with the gate in it.",
            )
            return [_failed(itself) for _ in asked]
        queued = iter(self._batcher.submit([r.inputs for r in asked if isinstance(r.inputs, Inputs)]))
        return [next(queued) if isinstance(r.inputs, Inputs) else _failed(r.inputs) for r in asked]

    def _look_first(self, batch: Sequence[Inputs]) -> list[Judged | Later]:
        """Score what needs no slow evidence; runs in a worker."""
        with _judging(self):
            found = look_first(self._asked, batch, self._sources())
        return [Later(each) if isinstance(each, Begun) else each for each in found]

    def _look_on(self, batch: Sequence[Begun]) -> list[Judged]:
        """Score the others; runs in another worker."""
        with _judging(self):
            return look_on(self._asked, batch, self._sources())

    def _patience(self, timeout: float | None) -> float | None:
        return self.timeout if timeout is None else valid_timeout(timeout)

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
        question = request.inputs.question if isinstance(request.inputs, Inputs) else ""
        if isinstance(judged, Judged) and isinstance(score, Score):
            decision = Decision(
                question=question,
                retrieve=score.p_known < request.threshold,
                p_known=score.p_known,
                threshold=request.threshold,
                reason=score.reason,
                gate=self.gate.name,
                draft=score.draft,
                cost=judged.cost,
                warnings=judged.warnings,
                signals=dict(score.signals),
                llm=score.llm,
            )
            has_history = isinstance(request.inputs, Inputs) and bool(request.inputs.history)
            return retrieve_unread(decision) if has_history and not self.reads_history else decision
        error = score if isinstance(score, Exception) else RuntimeError("The gate gave no score.")
        if self.on_error == "raise":
            raise error
        return fallback_decision(error, question=question, threshold=request.threshold, gate=self.gate.name)


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
    gates = [engine._asked for engine in engines]
    judged = judge_together(gates, [r.inputs for r in asked if isinstance(r.inputs, Inputs)], sources)
    for engine, scored in zip(engines, judged, strict=True):
        scores = iter(scored)
        outcomes = [next(scores) if isinstance(r.inputs, Inputs) else r.inputs for r in asked]
        own = [replace(each, threshold=engine.threshold) for each in asked]
        found.append(engine._decisions(own, outcomes))
    return found


def _failed(error: Exception) -> Future[Judged]:
    future: Future[Judged] = Future()
    future.set_exception(error)
    return future


@contextmanager
def _judging(engine: DecisionEngine) -> Iterator[None]:
    """Note, for whatever is called meanwhile, that an engine's worker is busy."""
    token = _JUDGING.set((*_JUDGING.get(), engine))
    try:
        yield
    finally:
        _JUDGING.reset(token)


def _at_once(proxy: Proxy | str | None, llm: Drafter | None) -> int:
    """Return how many questions are judged together: more would hold back the decisions that are made first."""
    if llm is not None or isinstance(proxy, Proxy):
        return getattr(proxy, "max_batch_size", _MOST_AT_ONCE)
    return _LOCAL_AT_ONCE


def _engine(
    gate: Gate,
    proxy: Proxy | None,
    llm: Drafter | None,
    on_error: OnError,
    timeout: float | None,
    rules: Rules,
) -> DecisionEngine:
    """Make an engine again from what was pickled."""
    return DecisionEngine(
        gate,
        proxy=proxy,
        llm=llm,
        on_error=on_error,
        timeout=timeout,
        always=rules.always,
        never=rules.never,
    )
