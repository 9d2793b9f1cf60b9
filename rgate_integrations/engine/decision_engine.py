"""The engine: owns the models and the queue, asks a gate, and turns its scores into decisions.

What `load_gate` returns. Everything that can go wrong with a request goes wrong here, in one place: `_decision`.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any, Literal, Self, TypeAlias

from rgate_integrations.decision import Decision, Draft
from rgate_integrations.engine.batching import Batcher, await_results, wait_results
from rgate_integrations.engine.evaluation import evaluate
from rgate_integrations.engine.fallback import explain_threshold, fallback_decision, log_failures
from rgate_integrations.engine.follow_ups import is_unread, retrieve_unread
from rgate_integrations.engine.requests import check_requests, valid_question, valid_timeout
from rgate_integrations.errors import ConfigurationError
from rgate_integrations.gates.base import Gate, Score
from rgate_integrations.gates.evidence.base import Drafter, Inputs, Sources, expand_specs
from rgate_integrations.gates.rules import RuleOrRules, Rules
from rgate_integrations.models.base import Proxy
from rgate_integrations.runtime.flow import Call, Flow, arun, run

OnError: TypeAlias = Literal["retrieve", "raise"]

_LOCAL_AT_ONCE = 16  # rows that a local model reads in one pass
_MOST_AT_ONCE = 64
_BUSY: ContextVar[DecisionEngine | None] = ContextVar("_BUSY", default=None)
"""The engine whose worker is busy with what this is a part of."""


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
        self._proxy = proxy if isinstance(proxy, Proxy) else None
        if proxy is not None:
            gate = gate.changed(proxy=getattr(proxy, "name", proxy))
        self.gate = gate
        self.rules = Rules.of(always, never)
        self.on_error = on_error
        self.timeout = valid_timeout(timeout)
        self.llm = llm
        self._memory: dict[Hashable, Any] = {}
        at_once = _LOCAL_AT_ONCE
        if llm is not None or isinstance(proxy, Proxy):
            at_once = getattr(proxy, "max_batch_size", _MOST_AT_ONCE)
        self._batcher: Batcher[Inputs, Score | Exception] = Batcher(self._evaluate, max_size=at_once)

    def __repr__(self) -> str:
        return f"DecisionEngine({self.gate!r}, on_error={self.on_error!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle gate, options and a given proxy or LLM; not the worker, nor what it remembers."""
        return partial(type(self), **self._options), (self.gate,)

    @property
    def threshold(self) -> float:
        """The gate's threshold: retrieve iff p_known is below it."""
        return self.gate.threshold

    @property
    def reads_history(self) -> bool:
        """Whether the gate judges a question in the light of the turns before it."""
        return any(spec.reads_history for spec in expand_specs(self.gate.specs))

    @property
    def proxy(self) -> str:
        """Catalogue name, folder or Hub id of the proxy model; `get_proxy` returns the model."""
        return self.gate.proxy

    def get_proxy(self) -> Proxy:
        """Return the proxy model, shared with every engine whose gate names the same one."""
        if self._proxy is None:
            from rgate_integrations.models.local import shared_proxy

            self._proxy = shared_proxy(self.gate.proxy)
        return self._proxy

    def with_options(self, *, gate: Gate | None = None, **changes: Any) -> Self:
        """Return a copy with another gate, with other parameters of it, or with other options.

        Args:
            gate: Another gate.
            **changes: Options of the engine, such as ``timeout``, and parameters of the gate, such as ``threshold``.
                An option that is None stays as it is.

        Raises:
            ConfigurationError: The gate has no such parameter.
        """
        if gate is self.gate and not changes:  # then callers still share its batches
            return self
        options, parameters = self._options, {}
        for name, value in changes.items():
            if name not in options:
                parameters[name] = value
            elif value is not None:
                options[name] = value
        changed = (gate or self.gate).changed(**parameters)
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

    def config(self) -> dict[str, Any]:
        """Return the gate's name and parameters, and the options: engines that decide alike have equal ones."""
        options = {"on_error": self.on_error, "timeout": self.timeout, "rules": self.rules}
        return {**self.gate.config(), **options}

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
        (decision,) = self.decide_batch(
            [valid_question(question)],  # in a batch, one that is none is an error of its item
            threshold=[threshold],
            drafts=[draft],
            popularity=[popularity],
            histories=[history],
            metadata=[metadata],
            timeout=timeout,
        )
        return decision

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
        (decision,) = await self.adecide_batch(
            [valid_question(question)],
            threshold=[threshold],
            drafts=[draft],
            popularity=[popularity],
            histories=[history],
            metadata=[metadata],
            timeout=timeout,
        )
        return decision

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
        return run(self._decide(questions, threshold, drafts, popularity, histories, metadata, timeout))

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
        decide = self._decide(questions, threshold, drafts, popularity, histories, metadata, timeout)
        return await arun(decide)

    def _decide(
        self,
        questions: Sequence[str],
        threshold: float | Sequence[float | None] | None,
        drafts: Sequence[Draft | str | None] | None,
        popularity: Sequence[float | None] | None,
        histories: Sequence[Sequence[str] | None] | None,
        metadata: Sequence[Mapping[str, Any] | None] | None,
        timeout: float | None,
    ) -> Flow[list[Decision]]:
        """Check what a caller gives, queue what can be judged, wait for it, and decide."""
        inputs, thresholds = check_requests(questions, threshold, drafts, popularity, histories, metadata)
        patience = self.timeout if timeout is None else valid_timeout(timeout)
        # Thresholds stay with the caller: they concern nobody else in a merged batch.
        judged = [each for each in inputs if isinstance(each, Inputs)]
        found: Sequence[Score | Exception]
        if _BUSY.get() is self:
            itself = ConfigurationError(
                "The gate was called while it judges, by its own drafter: it would wait for itself.",
                hint="Give llm= the model that answers, not a chain with the gate in it.",
            )
            found = [itself] * len(judged)
        else:
            found = yield Call(wait_results, await_results, self._batcher.submit(judged), patience)
        scores = iter(found)
        decisions = []
        for given, compared in zip(inputs, thresholds, strict=True):
            score = next(scores) if isinstance(given, Inputs) else given
            decisions.append(self._decision(given, compared, score))
        log_failures(decisions, self.gate.name, _private_texts(judged))
        return decisions

    def _evaluate(self, batch: Sequence[Inputs]) -> list[Score | Exception]:
        """Score what the callers of a batch ask; runs in the worker, whose thread is this engine's own."""
        _BUSY.set(self)
        sources = Sources(self.get_proxy, self.llm, self._memory, self.timeout or math.inf)
        return evaluate(self.gate, batch, sources, self.rules)

    def _decision(
        self, inputs: Inputs | Exception, given: float | None, score: Score | Exception
    ) -> Decision:
        """Apply the threshold. The one place where a failure of any kind becomes a decision to retrieve."""
        question = inputs.question if isinstance(inputs, Inputs) else ""
        threshold = self.threshold if given is None else given
        if isinstance(score, Exception):
            if self.on_error == "raise":
                raise score
            return fallback_decision(score, question=question, threshold=threshold, gate=self.gate.name)
        if given is None and score.threshold is not None:
            threshold = score.threshold
        retrieve = score.p_known < threshold
        reason = score.reason
        if score.override:
            retrieve = score.override == "always"
        elif given is not None:
            # The gate wrote its reason for its own threshold.
            own = self.threshold if score.threshold is None else score.threshold
            reason = explain_threshold(
                reason, score.p_known, given, is_turned=retrieve != (score.p_known < own)
            )
        decision = Decision(
            question=question,
            retrieve=retrieve,
            p_known=score.p_known,
            threshold=threshold,
            reason=reason,
            gate=self.gate.name,
            draft=score.draft,
            cost=score.cost,
            warnings=score.warnings,
            signals=dict(score.signals),
            llm=score.llm,
            override=score.override,
        )
        if isinstance(inputs, Inputs) and inputs.history and not self.reads_history:
            return retrieve_unread(decision)
        # A gate on a server says so itself.
        return decision.model_copy(update={"retrieve": decision.retrieve or is_unread(decision)})


def _private_texts(batch: Sequence[Inputs]) -> Iterator[str]:
    """Yield what came with questions: the turns before them, and drafts that were given."""
    for inputs in batch:
        yield from inputs.history
        if inputs.draft is not None:
            yield inputs.draft.text
