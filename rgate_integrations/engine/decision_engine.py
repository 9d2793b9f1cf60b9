"""`DecisionEngine`, which `load_gate` returns: it queues requests, runs a gate, and turns scores into decisions."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from typing import Any, Self, Unpack, get_args
from weakref import WeakMethod

from rgate_integrations.decision import Decision, Request, valid_choice, valid_timeout
from rgate_integrations.engine.batching import Batcher, await_results, wait_results
from rgate_integrations.engine.decider import Decider, OnError
from rgate_integrations.engine.scoring import score_requests
from rgate_integrations.errors import ConfigurationError
from rgate_integrations.gates.base import Gate, Score
from rgate_integrations.gates.evidence.base import Drafter, Sources
from rgate_integrations.gates.rules import RuleOptions, RuleOrRules, Rules
from rgate_integrations.models.base import Proxy
from rgate_integrations.models.proxies import gate_proxy
from rgate_integrations.runtime.flow import Call, Flow, variable_set

# Requests per batch. A local model reads 16 rows in one pass; larger passes are not faster, and keep others waiting.
_LOCAL_BATCH, _MAX_BATCH = 16, 64
# The engine whose worker runs this code, to detect a drafter that calls its own gate.
_JUDGING: ContextVar[DecisionEngine | None] = ContextVar("_JUDGING", default=None)


class DecisionEngine(Decider):
    """Decides with a gate whether to retrieve. Concurrent callers share model batches.

    Construction loads no model; the first decision does. An engine is immutable; `with_options` returns a
    changed copy.

    Args:
        gate: The gate that scores the evidence.
        proxy: Replaces the gate's proxy model: a loaded `Proxy`, or the name, folder or Hub id of one.
        llm: Writes the drafts for gates with ``source="llm"``.
        on_error: ``"retrieve"`` turns a failure into a decision to retrieve; ``"raise"`` raises it.
        timeout: Maximum time of a call in seconds, for all of its questions; None waits forever. A question
            without a decision by then fails with a `DecisionTimeoutError`; see ``on_error``. The first call
            also loads the model, so make one before you serve users.
        always: Rules for what always retrieves: examples, patterns and functions; see
            `rgate_integrations.gates.rules`.
        never: Rules for what never retrieves.

    Raises:
        ConfigurationError: An argument is invalid.
    """

    knows_follow_ups = True

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
        # Of a proxy, only the name is read.
        if llm is not None and not isinstance(llm, Proxy) and not hasattr(llm, "draft"):
            raise ConfigurationError(
                f"llm= needs a method draft, which {type(llm).__name__} does not have.",
                hint="Pass its name as llm_name=, or a chat model as llm= to RetrievalGate or GatedQueryEngine.",
            )
        self._proxy = proxy if isinstance(proxy, Proxy) else None
        if proxy is not None:
            gate = gate.replace(proxy=getattr(proxy, "name", proxy))
        self.gate = gate
        self.rules = Rules.coerce(always, never)
        self.on_error = valid_choice(on_error, "on_error", get_args(OnError))
        self.timeout = valid_timeout(timeout)
        self.llm = llm
        # Values that evidence keeps between batches, such as the vectors of examples.
        self._memory: dict[Hashable, Any] = {}
        size = _LOCAL_BATCH
        if llm is not None or isinstance(proxy, Proxy):  # servers take larger batches
            size = getattr(proxy, "max_batch_size", _MAX_BATCH)
        # Weak: a reference back would keep a dropped engine and its model until a full garbage collection.
        decide = WeakMethod(self._decide)
        # One queue per engine: all callers of a gate share its batches. While they wait, they hold the engine.
        self._batcher: Batcher[Request, Decision | Exception] = Batcher(
            lambda requests: decide()(requests),  # type: ignore[misc]
            max_size=size,
        )

    def __repr__(self) -> str:
        return f"DecisionEngine({self.gate!r}, on_error={self.on_error!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the gate and the options, but neither the worker nor the values kept between batches."""
        return partial(type(self), **self.options), (self.gate,)

    @property
    def name(self) -> str:
        """The gate's name."""
        return self.gate.name

    @property
    def threshold(self) -> float:
        """The gate's threshold: retrieve iff p_known is below it."""
        return self.gate.threshold

    @property
    def reads_history(self) -> bool:
        """Whether the gate reads the turns before a question."""
        return self.gate.reads_history

    @property
    def corpora(self) -> tuple[str, ...]:
        """Names of the gate's corpora."""
        return self.gate.corpora

    @property
    def proxy(self) -> str:
        """Catalogue name, folder or Hub id of the proxy model; `get_proxy` returns the model."""
        return self.gate.proxy

    def get_proxy(self, name: str = "") -> Proxy:
        """Return a proxy model: the one given to this engine, or one that all engines in the process share.

        Args:
            name: Name of the model; empty for the gate's own proxy. A model given to this engine replaces only the
                gate's own proxy; all others, such as the encoder, are shared.
        """
        if self._proxy is not None and name in ("", self.gate.proxy):
            return self._proxy
        return gate_proxy(name or self.gate.proxy)

    def with_options(self, *, gate: Gate | None = None, **changes: Any) -> Self:
        """Return a copy with another gate or other options; this engine itself if given only its own gate.

        Args:
            gate: Another gate; None keeps this one.
            **changes: Options of the engine, such as ``timeout``, and parameters of the gate, such as ``threshold``.
                ``timeout=None`` removes the limit.

        Raises:
            ConfigurationError: A parameter is unknown, or a value is invalid.
            ModelLoadError: A saved gate or measured ability that a parameter names cannot be loaded.
        """
        if gate is self.gate and not changes:  # a copy would not share batches with this engine
            return self
        options = self.options
        parameters = {name: value for name, value in changes.items() if name not in options}
        new_gate = (gate or self.gate).replace(**parameters)
        if new_gate.proxy != self.gate.proxy:  # the loaded model belongs to the old gate
            options["proxy"] = None
        options |= {name: value for name, value in changes.items() if name in options}
        return type(self)(new_gate, **options)

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of this engine other than the gate, by name."""
        return {
            "proxy": self._proxy,
            "llm": self.llm,
            "on_error": self.on_error,
            "timeout": self.timeout,
            "always": self.rules.always,
            "never": self.rules.never,
        }

    def answer_gate(self) -> DecisionEngine | None:
        """Return the engine that judges partial answers; see `Decider.answer_gate`."""
        gate = self.gate.answer_gate()
        return None if gate is None else self.with_options(gate=gate)

    def question_gate(self) -> DecisionEngine | None:
        """Return the engine that judges the question before the LLM starts to answer; see `Decider.question_gate`."""
        gate = self.gate.question_gate()
        return None if gate is None else self.with_options(gate=gate)

    def for_llm(self, name: str, name_source: str = "") -> Self:
        """Return a copy that judges what an LLM knows; see `Decider.for_llm`."""
        return self.with_options(gate=self.gate.for_llm(name, name_source)) if name else self

    def with_rules(self, **rules: Unpack[RuleOptions]) -> Self:
        """Return a copy with other rules; see `Decider.with_rules`."""
        new = Rules.coerce(**rules)
        merged = Rules(new.always or self.rules.always, new.never or self.rules.never)
        if merged == self.rules:
            return self
        return self.with_options(always=merged.always, never=merged.never)

    def without_rules(self) -> Self:
        """Return a copy without rules; see `Decider.without_rules`."""
        return self if self.rules == Rules() else self.with_options(always=(), never=())

    def decides_like(self, other: Decider) -> bool:
        """Return whether another engine has equal options, and a gate with equal parameters.

        The default gates of two adapters are alike in this sense. The source of an LLM's name makes no difference.
        """
        return (
            isinstance(other, DecisionEngine)
            and _without_source(self.gate.config()) == _without_source(other.gate.config())
            and self.options == other.options
        )

    def judge(self, requests: Sequence[Request]) -> Flow[Sequence[Decision | Exception]]:
        """Queue the requests, wait, and return their decisions or errors, in order.

        Raises:
            ConfigurationError: A decision of this gate calls it, for example in ``llm`` or in a rule.
        """
        if _JUDGING.get() is self:
            raise ConfigurationError(
                "llm= or a rule contains the gate itself, so each decision would wait for another one.",
                hint="Give llm= the model that answers, and call another gate in a rule.",
            )
        limits = [self.timeout if request.timeout is None else request.timeout for request in requests]
        # All decisions are returned together, so the longest limit applies.
        limit = None if None in limits else max(limits)  # type: ignore[type-var]  # no None
        if limit is not None:  # a gate on a server should not wait longer
            requests = [replace(request, timeout=limit) for request in requests]
        return (yield Call(wait_results, await_results, self._batcher.submit(requests), limit))

    def _decide(self, requests: Sequence[Request]) -> list[Decision | Exception]:
        """Return a decision or an error for each request of a batch; runs in this engine's worker thread."""
        sources = Sources(self.get_proxy, self.llm, self._memory)
        with variable_set(_JUDGING, self):
            scores = score_requests(self.gate, requests, sources, self.rules)
        outcomes: list[Decision | Exception] = []
        for request, score in zip(requests, scores, strict=True):
            try:
                outcomes.append(score if isinstance(score, Exception) else self._to_decision(request, score))
            except ValueError as error:  # a user's gate may return signals that are not numbers
                outcomes.append(error)
        return outcomes

    def _to_decision(self, request: Request, score: Score) -> Decision:
        """Turn a score into a decision.

        The score's override decides. Without one, P(known) is compared with the threshold of the request; if it has
        none, with that of the score, or else of the gate.
        """
        threshold = self.threshold if score.threshold is None else score.threshold
        # The override decides but leaves P(known) unchanged, so that calibration and logs get the real number.
        retrieve, reason = score.p_known < threshold, score.reason
        if request.threshold is None:
            reason = f"{reason} {score.caveat}".strip()
        if score.override is not None:
            retrieve = score.override.retrieve
            reason = f"{score.override.reason} {reason}".strip()
        decision = Decision(
            question=request.question,
            retrieve=retrieve,
            p_known=score.p_known,
            threshold=threshold,
            reason=reason,
            override=score.override,
            gate=self.gate.name,
            draft=score.draft,
            cost=score.cost,
            warnings=score.warnings,
            signals=dict(score.signals),
            llm=score.llm,
            p_covered=score.p_covered,
            corpus=score.corpora[0] if retrieve and score.corpora else None,
            corpora=score.corpora,
            outcome=score.outcome,
        )
        return decision if request.threshold is None else decision.with_threshold(request.threshold)


def _without_source(config: dict[str, Any]) -> dict[str, Any]:
    """Return a gate's config without the sources of LLMs' names, also in inner gates."""
    items = [(name, value) for name, value in config.items() if name != "llm_name_source"]
    return {name: _without_source(value) if isinstance(value, dict) else value for name, value in items}
