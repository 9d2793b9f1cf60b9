"""The engine: owns the models and the queue, asks a gate, and turns its scores into decisions.

What `load_gate` returns. Everything that can go wrong with a request goes wrong here, in one place: `_decided`.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Hashable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any, Literal, Self, TypeAlias

from rgate_integrations.batching import Batcher
from rgate_integrations.decision import Cost, Decision, Draft
from rgate_integrations.errors import ConfigurationError, EvidenceError, InvalidQuestionError
from rgate_integrations.evidence.base import Drafter, EvidenceSpec, Inputs
from rgate_integrations.evidence.collector import Collector, Sources, with_all_that_they_need
from rgate_integrations.failing import log_failures, retrieve_instead
from rgate_integrations.gates.base import Gate, Score
from rgate_integrations.gates.scoring import ScoreSpec
from rgate_integrations.proxy.base import Proxy

MAX_QUESTION_TOKENS = 1_024
_MAX_QUESTION_CHARACTERS = 8_192

OnError: TypeAlias = Literal["retrieve", "raise"]


@dataclass(frozen=True)
class _Request:
    """What a caller asks, checked. A question that cannot be judged is its error from the start."""

    inputs: Inputs | Exception
    threshold: float


@dataclass(frozen=True)
class _Judged:
    """What the worker found out about a question; what to do about it is the caller's matter."""

    question: str
    score: Score | Exception
    cost: Cost = Cost()
    warnings: tuple[str, ...] = ()


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
        if queue_timeout is not None and not queue_timeout > 0:
            raise ConfigurationError(f"queue_timeout must be above 0 seconds, not {queue_timeout}.")
        if proxy is not None:
            gate = gate.changed(proxy=proxy.name if isinstance(proxy, Proxy) else proxy)
        self.gate = gate
        self.on_error = on_error
        self.queue_timeout = queue_timeout
        self._proxy = proxy if isinstance(proxy, Proxy) else None
        self._llm = llm
        self._memory: dict[Hashable, Any] = {}
        self._batcher: Batcher[Inputs, _Judged] = Batcher(self._judge, timeout=queue_timeout)

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
    def proxy_name(self) -> str:
        """Catalogue name, folder or Hub id of the proxy model."""
        return self.gate.proxy

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
        requests = self._one(question, threshold, draft, popularity)
        return self._decisions(requests, [_result(f) for f in self._submit(requests)])[0]

    async def adecide(
        self,
        question: str,
        *,
        threshold: float | None = None,
        draft: Draft | str | None = None,
        popularity: float | None = None,
    ) -> Decision:
        """Decide for one question without blocking the event loop; see `decide`."""
        requests = self._one(question, threshold, draft, popularity)
        return self._decisions(requests, await _results(self._submit(requests)))[0]

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
        requests = self._requests(questions, threshold, drafts, popularity)
        return self._decisions(requests, [_result(f) for f in self._submit(requests)])

    async def adecide_batch(
        self,
        questions: Sequence[str],
        *,
        threshold: float | Sequence[float | None] | None = None,
        drafts: Sequence[Draft | str | None] | None = None,
        popularity: Sequence[float | None] | None = None,
    ) -> list[Decision]:
        """Decide for a batch without blocking the event loop; see `decide_batch`."""
        requests = self._requests(questions, threshold, drafts, popularity)
        return self._decisions(requests, await _results(self._submit(requests)))

    # --- from what callers give to requests ----------------------------------------------------------------

    def _one(
        self,
        question: object,
        threshold: float | None,
        draft: Draft | str | None,
        popularity: float | None,
    ) -> list[_Request]:
        request = self._request(question, threshold, draft, popularity)
        if isinstance(request.inputs, InvalidQuestionError):
            raise request.inputs
        return [request]

    def _requests(
        self,
        questions: Sequence[str],
        threshold: float | Sequence[float | None] | None,
        drafts: Sequence[Draft | str | None] | None,
        popularity: Sequence[float | None] | None,
    ) -> list[_Request]:
        if isinstance(questions, str):
            raise ConfigurationError("decide_batch takes a list of questions.", hint="Use decide() for one.")
        n = len(questions)
        thresholds: list[Any] = [threshold] * n
        if isinstance(threshold, Iterable) and not isinstance(threshold, str):
            thresholds = list(threshold)
        given: dict[str, list[Any]] = {
            "thresholds": thresholds,
            "drafts": [None] * n if drafts is None else list(drafts),
            "popularity scores": [None] * n if popularity is None else list(popularity),
        }
        for name, values in given.items():
            if len(values) != n:
                raise ConfigurationError(f"{n} questions do not match {len(values)} {name}.")
        return [self._request(*each) for each in zip(questions, *given.values(), strict=True)]

    def _request(self, question: object, threshold: object, draft: object, popularity: object) -> _Request:
        """Check everything that a caller gives: the worker gets nothing that could trip it."""
        asked = self.threshold if threshold is None else _valid_threshold(threshold)
        try:
            inputs = Inputs(valid_question(question), _valid_draft(draft), _valid_popularity(popularity))
        except (InvalidQuestionError, EvidenceError) as error:
            return _Request(error, asked)
        return _Request(inputs, asked)

    # --- in the worker -------------------------------------------------------------------------------------

    def _submit(self, requests: Sequence[_Request]) -> list[Future[_Judged]]:
        """Queue what can be judged; the others are done already."""
        futures: list[Future[_Judged]] = []
        readable = [r.inputs for r in requests if isinstance(r.inputs, Inputs)]
        queued = iter(self._batcher.submit(readable))
        for request in requests:
            if isinstance(request.inputs, Inputs):
                futures.append(next(queued))
            else:
                done: Future[_Judged] = Future()
                done.set_exception(request.inputs)
                futures.append(done)
        return futures

    def _judge(self, batch: Sequence[Inputs]) -> list[_Judged]:
        """Score a merged batch; runs in the worker."""
        return _judge_together([self.gate], batch, self._sources())[0]

    def _sources(self) -> Sources:
        return Sources(self.get_proxy, self._llm, self._memory)

    # --- from scores to decisions --------------------------------------------------------------------------

    def _decisions(
        self, requests: Sequence[_Request], found: Sequence[_Judged | Exception]
    ) -> list[Decision]:
        decisions = [self._decided(r, judged) for r, judged in zip(requests, found, strict=True)]
        log_failures(decisions, self.gate.name)
        return decisions

    def _decided(self, request: _Request, judged: _Judged | Exception) -> Decision:
        """Apply the threshold. The one place where a failure of any kind becomes a decision to retrieve."""
        score = judged if isinstance(judged, Exception) else judged.score
        if isinstance(judged, _Judged) and isinstance(score, Score):
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
    requests = [engine._requests(questions, None, drafts, popularity) for engine in engines]
    batch = [r.inputs for r in requests[0] if isinstance(r.inputs, Inputs)]
    sources = Sources(engines[0].get_proxy, next(iter(llms.values()), None), {})
    judged = _judge_together([engine.gate for engine in engines], batch, sources)
    found = []
    for engine, asked, scored in zip(engines, requests, judged, strict=True):
        scores = iter(scored)
        outcomes = [r.inputs if isinstance(r.inputs, Exception) else next(scores) for r in asked]
        found.append(engine._decisions(asked, outcomes))
    return found


def valid_question(question: object) -> str:
    """Return a question without surrounding white space.

    Raises:
        InvalidQuestionError: It is not a string, is empty, or holds NUL bytes.
    """
    if not isinstance(question, str):
        raise InvalidQuestionError(
            f"A question must be a string, not {type(question).__name__}.",
            hint="Pass the text of the question.",
        )
    if not question.strip():
        raise InvalidQuestionError("The question is empty.", hint="Pass at least one word.")
    if "\0" in question:
        raise InvalidQuestionError(
            "The question holds NUL bytes.", hint="Is this text, and in the right encoding?"
        )
    return question.strip().encode("utf-8", errors="replace").decode()


def _valid_threshold(threshold: object) -> float:
    if not isinstance(threshold, Real):
        raise ConfigurationError(
            f"A threshold must be a number of at least 0, not a {type(threshold).__name__}."
        )
    value = float(threshold)
    if not math.isfinite(value) or value < 0:
        raise ConfigurationError(f"A threshold must be a number of at least 0, not {value}.")
    return value


def _valid_draft(draft: object) -> Draft | None:
    if isinstance(draft, str):
        return Draft(text=draft.strip(), source="recorded")
    if draft is None or isinstance(draft, Draft):
        return draft
    raise EvidenceError(f"A draft must be a string or a Draft, not {type(draft).__name__}.")


def _valid_popularity(popularity: object) -> float | None:
    if popularity is None:
        return None
    if not isinstance(popularity, Real):
        raise EvidenceError(f"A popularity score must be a number, not a {type(popularity).__name__}.")
    return float(popularity)


def _judge_together(gates: Sequence[Gate], batch: Sequence[Inputs], sources: Sources) -> list[list[_Judged]]:
    """Let several gates score one batch; returns a list of results for each."""
    specs = [ScoreSpec(gate) for gate in gates]
    inputs, warnings = _fitting(batch, specs, sources)
    collector = Collector(inputs, sources, specs)
    found = []
    for spec in specs:
        judged = []
        scores = collector.context().find(spec)
        for place, score in enumerate(scores):
            question, cost = inputs[place].question, collector.cost(spec, place)
            judged.append(_Judged(question, score, cost, warnings[place]))
        found.append(judged)
    return found


def _fitting(
    batch: Sequence[Inputs], specs: Sequence[EvidenceSpec[Any]], sources: Sources
) -> tuple[list[Inputs], list[tuple[str, ...]]]:
    """Cut questions that no model should read whole; returns them all, and a warning for each that was cut."""
    reads = any(spec.reads_model for spec in with_all_that_they_need(specs))
    inputs: list[Inputs] = []
    warnings: list[tuple[str, ...]] = []
    for each in batch:
        short = _cut(each.question, sources) if reads else each.question[:_MAX_QUESTION_CHARACTERS]
        said = f"The question was cut from {len(each.question):,} to {len(short):,} characters."
        warnings.append(() if short == each.question else (said,))
        inputs.append(each if short == each.question else replace(each, question=short))
    return inputs, warnings


def _cut(question: str, sources: Sources) -> str:
    if len(question.encode()) <= MAX_QUESTION_TOKENS:  # a token has at least one byte
        return question
    short = question[:_MAX_QUESTION_CHARACTERS]
    try:
        return sources.proxy().cut(short, MAX_QUESTION_TOKENS) or short
    except Exception:
        # There is no model to count its tokens. The evidence that needs it will fail for that reason.
        return short


def _result(future: Future[_Judged]) -> _Judged | Exception:
    try:
        return future.result()
    except Exception as error:
        return error


async def _results(futures: Sequence[Future[_Judged]]) -> list[_Judged | Exception]:
    found: list[_Judged | Exception] = []
    for outcome in await asyncio.gather(*map(asyncio.wrap_future, futures), return_exceptions=True):
        if isinstance(outcome, _Judged | Exception):
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
