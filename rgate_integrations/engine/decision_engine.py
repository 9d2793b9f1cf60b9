"""The engine, which `load_gate` makes: owns models and queue, asks a gate, and turns its scores into decisions."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any, Self, Unpack

from rgate_integrations.decision import Decision, Request, valid_timeout
from rgate_integrations.engine.batching import Batcher, await_results, wait_results
from rgate_integrations.engine.decider import Decider, OnError
from rgate_integrations.engine.scoring import score_requests
from rgate_integrations.errors import ConfigurationError
from rgate_integrations.gates.base import Gate, Score
from rgate_integrations.gates.evidence.base import Drafter, Sources
from rgate_integrations.gates.rules import RuleOptions, RuleOrRules, Rules
from rgate_integrations.models.base import Proxy
from rgate_integrations.models.proxies import gate_proxy
from rgate_integrations.runtime.flow import Call, Flow

_LOCAL_AT_ONCE = 16  # rows that a local model reads in one pass
_MOST_AT_ONCE = 64
_BUSY: ContextVar[DecisionEngine | None] = ContextVar("_BUSY", default=None)
"""The engine whose worker is busy with what this is a part of."""


class DecisionEngine(Decider):
    """Decides with a gate for each question whether to retrieve. Concurrent callers share model batches.

    Making one loads nothing: weights are loaded by the first decision that needs them. It is immutable;
    `with_options` makes a changed copy.

    Args:
        gate: Scores the evidence.
        proxy: A loaded `Proxy`, or the name, folder or Hub id of one, in place of the gate's.
        llm: Writes the drafts of gates with ``source="llm"``.
        on_error: ``"retrieve"``: a failure yields a decision that retrieves and says why; ``"raise"``: it is raised.
        timeout: How long a call may take in all, in seconds. A question that has no decision by then, wherever it
            is, fails with a `DecisionTimeoutError`, so it retrieves. By default a call takes as long as it takes. The
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
        self._proxy = proxy if isinstance(proxy, Proxy) else None
        if proxy is not None:
            gate = gate.replace(proxy=getattr(proxy, "name", proxy))
        self.gate = gate
        self.rules = Rules.coerce(always, never)
        self.on_error = on_error
        self.timeout = valid_timeout(timeout)
        self.llm = llm
        self._memory: dict[Hashable, Any] = {}
        at_once = _LOCAL_AT_ONCE
        if llm is not None or isinstance(proxy, Proxy):
            at_once = getattr(proxy, "max_batch_size", _MOST_AT_ONCE)
        self._batcher: Batcher[Request, Decision | Exception] = Batcher(self._decide, max_size=at_once)

    def __repr__(self) -> str:
        return f"DecisionEngine({self.gate!r}, on_error={self.on_error!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle gate, options and a given proxy or LLM; not the worker, nor what it remembers."""
        return partial(type(self), **self._options), (self.gate,)

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
        """Whether the gate judges a question in the light of the turns before it."""
        return self.gate.reads_history

    @property
    def knows_follow_ups(self) -> bool:
        """Whether the gate was trained on turns; those of this package that read them were."""
        return self.reads_history

    @property
    def corpora(self) -> tuple[str, ...]:
        """Names of the gate's corpora."""
        return self.gate.corpora

    @property
    def proxy(self) -> str:
        """Catalogue name, folder or Hub id of the proxy model; `get_proxy` returns the model."""
        return self.gate.proxy

    def get_proxy(self, name: str = "") -> Proxy:
        """Return a proxy model, shared with every engine whose gate names the same one.

        Args:
            name: Which of those that the gate and gates inside of it name; the gate's own unless given.
        """
        if name not in ("", self.gate.proxy):
            return gate_proxy(name)
        if self._proxy is None:
            self._proxy = gate_proxy(self.gate.proxy)
        return self._proxy

    def with_options(self, *, gate: Gate | None = None, **changes: Any) -> Self:
        """Return a copy with another gate, with other parameters of it, or with other options.

        Args:
            gate: Another gate.
            **changes: Options of the engine, such as ``timeout``, and parameters of the gate, such as ``threshold``.
                ``timeout=None`` removes the limit.

        Raises:
            ConfigurationError: The gate has no such parameter.
        """
        if gate is self.gate and not changes:  # then callers still share its batches
            return self
        options, parameters = self._options, {}
        for name, value in changes.items():
            if name in options:
                options[name] = value
            else:
                parameters[name] = value
        changed = (gate or self.gate).replace(**parameters)
        if changed.proxy != self.gate.proxy and changes.get("proxy") is None:
            options["proxy"] = None
        return type(self)(changed, **options)

    @property
    def _options(self) -> dict[str, Any]:
        return {
            "proxy": self._proxy,
            "llm": self.llm,
            "on_error": self.on_error,
            "timeout": self.timeout,
            "always": self.rules.always,
            "never": self.rules.never,
        }

    def answer_gate(self) -> DecisionEngine | None:
        """Return what judges begun answers; see `Decider.answer_gate`."""
        gate = self.gate.answer_gate()
        return None if gate is None else self.with_options(gate=gate)

    def question_gate(self) -> DecisionEngine | None:
        """Return what reads the question alone; see `Decider.question_gate`."""
        gate = self.gate.question_gate()
        return None if gate is None else self.with_options(gate=gate)

    def for_llm(self, name: str, name_source: str = "") -> Self:
        """Return a copy that judges what an LLM knows; see `Decider.for_llm`."""
        return self.with_options(gate=self.gate.for_llm(name, name_source)) if name else self

    def with_rules(self, **rules: Unpack[RuleOptions]) -> Self:
        """Return a copy with other rules; see `Decider.with_rules`."""
        given = Rules.coerce(**rules)
        changed = Rules(given.always or self.rules.always, given.never or self.rules.never)
        if changed == self.rules:
            return self
        return self.with_options(always=changed.always, never=changed.never)

    def decides_like(self, other: Decider) -> bool:
        """Return whether another engine was made alike: each ``gate=None`` loads a gate of its own."""
        if not isinstance(other, DecisionEngine):
            return False
        return self.config() == other.config() and self.llm is other.llm

    def config(self) -> dict[str, Any]:
        """Return the gate's name and parameters, and the options: engines that decide alike have equal ones."""
        options = {"on_error": self.on_error, "timeout": self.timeout, "rules": self.rules}
        return {**self.gate.config(), **options}

    # --- decisions -----------------------------------------------------------------------------------------

    def judge(self, requests: Sequence[Request]) -> Flow[Sequence[Decision | Exception]]:
        """Queue the requests, and wait for their decisions."""
        if _BUSY.get() is self:
            raise ConfigurationError(
                "The gate was called while it judges, by its own drafter: it would wait for itself.",
                hint="Give llm= the model that answers, not a chain with the gate in it.",
            )
        limits = [self.timeout if request.timeout is None else request.timeout for request in requests]
        # They are returned together, so the most patient of them counts.
        patience = None if None in limits else max(limits, default=None)  # type: ignore[type-var]  # no None
        outcomes: list[Decision | Exception] = yield Call(
            wait_results, await_results, self._batcher.submit(requests), patience
        )
        return outcomes

    def _decide(self, requests: Sequence[Request]) -> list[Decision | Exception]:
        """Decide what the callers of a batch ask; runs in the worker, whose thread is this engine's own."""
        _BUSY.set(self)
        sources = Sources(self.get_proxy, self.llm, self._memory, self.timeout or math.inf)
        outcomes: list[Decision | Exception] = []
        for request, score in zip(
            requests, score_requests(self.gate, requests, sources, self.rules), strict=True
        ):
            try:
                outcomes.append(score if isinstance(score, Exception) else self._decision(request, score))
            except ValueError as error:  # a user's gate may give signals that are no numbers
                outcomes.append(error)
        return outcomes

    def _decision(self, request: Request, score: Score) -> Decision:
        """Apply an override, or else the threshold: that of the request, of the score, or of the gate."""
        threshold = self.threshold if score.threshold is None else score.threshold
        retrieve, reason = score.p_known < threshold, score.reason
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
