"""The gate: declares its evidence, scores it, and turns the score into a decision.

A new gate is one file: a subclass with an `info`, parameters, `specs` and `score`. Everything else, from
batching to failing toward retrieval, is here.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr

from rgate_integrations.batching import Batcher
from rgate_integrations.decision import Cost, Decision, Draft, Failure
from rgate_integrations.errors import (
    ConfigurationError,
    EvidenceError,
    InvalidQuestionError,
    OverloadedError,
    ScoreError,
)
from rgate_integrations.evidence import Evidence, EvidenceSpec, Inputs, NeighboursSpec, PopularitySpec
from rgate_integrations.gates.collector import Collector, Drafter
from rgate_integrations.proxy.base import Proxy

_log = logging.getLogger("rgate_integrations")

MAX_QUESTION_TOKENS = 1_024
_MAX_QUESTION_CHARACTERS = 8_192

CostClass = Literal["none", "one pass", "draft", "draft + judgment", "several samples", "search"]
Threshold = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]


@dataclass(frozen=True)
class GateInfo:
    """What a gate is, for `list_gates` and ``rgate gates``.

    Attributes:
        name: The name that `load_gate` takes.
        paper: Where the method comes from.
        evidence: What it looks at, in a few words.
        training: Whether it needs training: ``"no"``, ``"optional"`` or ``"yes"``.
        cost: What it costs a question.
    """

    name: str
    paper: str
    evidence: str
    training: Literal["no", "optional", "yes"]
    cost: CostClass


@dataclass(frozen=True)
class Score:
    """What a gate makes of the evidence of one question.

    Attributes:
        p_known: Probability in [0, 1] that the LLM answers rightly without retrieval. Higher means skip.
        reason: One sentence for a person.
        draft: The draft to hand on with the decision, if there is one.
        cost: What the evidence cost; filled in by the base class.
    """

    p_known: float
    reason: str
    draft: Draft | None = None
    cost: Cost = field(default_factory=Cost)


@dataclass(frozen=True)
class _Request:
    question: object
    threshold: float | None
    draft: Draft | str | None
    popularity: float | None


class Gate(BaseModel, ABC):
    """Decides for each question whether to retrieve.

    Gates are immutable; `with_options` makes a changed copy. Making one loads nothing: weights are loaded by
    the first decision that needs them. Concurrent callers share model batches.

    Attributes:
        threshold: Retrieve iff p_known < threshold. 0 never retrieves, anything above 1 always does.
        proxy: Catalogue name, folder or Hub id of the proxy model.
        on_error: ``"retrieve"``: a failure yields a decision that retrieves and says why; ``"raise"``: it is
            raised.
        queue_timeout: A question that has waited longer than this for its turn, in seconds, is not judged: it
            fails with an `OverloadedError`, so it retrieves. By default questions wait as long as it takes.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    info: ClassVar[GateInfo]

    threshold: Threshold = 0.5
    proxy: str = "smollm2-135m-instruct"
    on_error: Literal["retrieve", "raise"] = "retrieve"
    queue_timeout: float | None = Field(default=None, gt=0)

    _proxy: Proxy | None = PrivateAttr(default=None)
    _llm: Drafter | None = PrivateAttr(default=None)
    _batcher: Batcher[_Request, Decision | Exception] | None = PrivateAttr(default=None)

    # --- what a gate defines -------------------------------------------------------------------------------

    @property
    @abstractmethod
    def specs(self) -> tuple[EvidenceSpec, ...]:
        """The evidence this gate needs."""

    @abstractmethod
    def score(self, evidence: Evidence) -> Score:
        """Score the evidence of one question. Pure: the same evidence gives the same score."""

    @property
    def all_specs(self) -> tuple[EvidenceSpec, ...]:
        """Everything this gate may ask for, so that drafts are written once at the greatest length."""
        return self.specs

    def scores(self, collector: Collector, indices: Sequence[int]) -> dict[int, Score | Exception]:
        """Collect evidence and score some questions of a batch. Gates that work in stages override this."""
        return {
            i: evidence if isinstance(evidence, Exception) else self.score_checked(evidence)
            for i, evidence in collector.evidence(self.specs, indices).items()
        }

    @classmethod
    def from_argument(cls, argument: str, **options: Any) -> Self:
        """Make the gate from the part of its name behind the colon, as in ``constant:always``."""
        raise ConfigurationError(
            f"The gate {cls.info.name!r} takes no argument, but {argument!r} was given.",
            hint=f'Use load_gate("{cls.info.name}").',
        )

    # --- what users call -----------------------------------------------------------------------------------

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
            threshold: Used instead of the gate's own.
            draft: A draft to judge instead of writing one: the LLM's own first tokens, or recorded text.
            popularity: Popularity score of the question's entity, for gates that use one.

        Raises:
            InvalidQuestionError: The question is empty, not a string, or holds NUL bytes.
        """
        found = self._submit([_Request(question, threshold, draft, popularity)])[0].result()
        return self._one(found)

    async def adecide(
        self,
        question: str,
        *,
        threshold: float | None = None,
        draft: Draft | str | None = None,
        popularity: float | None = None,
    ) -> Decision:
        """Decide for one question without blocking the event loop; concurrent callers share batches.

        Raises:
            InvalidQuestionError: The question is empty, not a string, or holds NUL bytes.
        """
        future = self._submit([_Request(question, threshold, draft, popularity)])[0]
        return self._one(await asyncio.wrap_future(future))

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
            threshold: Used instead of the gate's own: one for all, or one a question.
            drafts: Drafts to judge instead of writing them, one a question; None where there is none.
            popularity: Popularity scores, one a question.

        Returns:
            One decision a question, in order.
        """
        requests = self._requests(questions, threshold, drafts, popularity)
        return [self._batch_item(f.result()) for f in self._submit(requests)]

    async def adecide_batch(
        self,
        questions: Sequence[str],
        *,
        threshold: float | Sequence[float | None] | None = None,
        drafts: Sequence[Draft | str | None] | None = None,
        popularity: Sequence[float | None] | None = None,
    ) -> list[Decision]:
        """Decide for a batch without blocking the event loop; see `decide_batch`."""
        futures = self._submit(self._requests(questions, threshold, drafts, popularity))
        found = await asyncio.gather(*map(asyncio.wrap_future, futures))
        return [self._batch_item(f) for f in found]

    def with_options(
        self, *, proxy: Proxy | str | None = None, llm: Drafter | None = None, **parameters: Any
    ) -> Self:
        """Return a copy with other parameters, another proxy, or an LLM that writes the drafts.

        Args:
            proxy: A loaded `Proxy`, or the name, folder or Hub id of one.
            llm: Writes the drafts of gates with ``source="llm"``.
            **parameters: Fields of this gate.
        """
        if isinstance(proxy, str):
            parameters["proxy"] = proxy
        elif proxy is not None:
            parameters["proxy"] = proxy.name
        copy = type(self).model_validate({**self.__dict__, **parameters})
        copy._proxy = proxy if isinstance(proxy, Proxy) else (self._proxy if proxy is None else None)
        copy._llm = llm if llm is not None else self._llm
        return copy

    def config(self) -> dict[str, Any]:
        """Return name and parameters as JSON values; `rgate_integrations.gates.gate_from_config` reads it."""
        return {"gate": self.info.name, **self.model_dump(mode="json")}

    def to_json(self) -> str:
        """Return name and parameters as JSON; `rgate_integrations.gates.gate_from_json` reads it."""
        return json.dumps(self.config())

    def get_proxy(self) -> Proxy:
        """Return the proxy, shared with every gate that names the same model."""
        if self._proxy is None:
            from rgate_integrations.proxy.local import shared_proxy

            self._proxy = shared_proxy(self.proxy)
        return self._proxy

    # --- from requests to decisions ------------------------------------------------------------------------

    def __getstate__(self) -> dict[Any, Any]:
        """Pickle the parameters and a given proxy or LLM, not the worker thread."""
        state = super().__getstate__()
        private = {**(state.get("__pydantic_private__") or {}), "_batcher": None}
        return {**state, "__pydantic_private__": private}

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
        one = threshold is None or isinstance(threshold, Real)
        given: dict[str, Sequence[Any]] = {
            "thresholds": [threshold] * n if one else list(threshold),  # type: ignore[arg-type]
            "drafts": [None] * n if drafts is None else list(drafts),
            "popularity scores": [None] * n if popularity is None else list(popularity),
        }
        for name, values in given.items():
            if len(values) != n:
                raise ConfigurationError(f"{n} questions do not match {len(values)} {name}.")
        return [_Request(*each) for each in zip(questions, *given.values(), strict=True)]

    def _submit(self, requests: Sequence[_Request]) -> list[Future[Decision | Exception]]:
        if self._batcher is None:
            self._batcher = Batcher(self._run, timeout=self.queue_timeout, overdue=self._overdue)
        return self._batcher.submit(requests)

    def _one(self, found: Decision | Exception) -> Decision:
        if isinstance(found, InvalidQuestionError):
            raise found
        return self._batch_item(found)

    def _batch_item(self, found: Decision | Exception) -> Decision:
        if isinstance(found, Decision):
            return found
        if self.on_error == "raise" or isinstance(found, ConfigurationError):
            raise found
        return self._failed("", self.threshold, found)

    def _overdue(self, request: _Request, waited: float) -> Decision | Exception:
        error = OverloadedError(
            f"The question waited {waited:.1f} s for its turn.",
            hint="Raise queue_timeout, ask less at once, or run the gate on faster hardware.",
        )
        threshold = self.threshold if request.threshold is None else request.threshold
        return error if self.on_error == "raise" else self._failed(str(request.question), threshold, error)

    def _run(self, requests: Sequence[_Request]) -> list[Decision | Exception]:
        batch = _Batch.of(requests, self.all_specs, self.get_proxy)
        collector = Collector(batch.inputs, self.get_proxy, self._llm, self.all_specs)
        return self._decisions(batch, collector)

    def _decisions(self, batch: _Batch, collector: Collector) -> list[Decision | Exception]:
        """Decide for a merged batch. The one place where a failure becomes a decision to retrieve."""
        results: list[Decision | Exception | None] = list(batch.errors)
        places = [i for i, error in enumerate(batch.errors) if error is None]
        try:
            scores = self.scores(collector, range(len(places)))
        except Exception as error:
            scores = dict.fromkeys(range(len(places)), error)
        failures: list[Exception] = []
        for k, i in enumerate(places):
            score, question = self._valid(scores[k]), batch.inputs[k].question
            given = batch.thresholds[k]
            threshold = self.threshold if given is None else given
            if isinstance(score, Exception):
                failures.append(score)
                results[i] = score if self.on_error == "raise" else self._failed(question, threshold, score)
                continue
            results[i] = Decision(
                question=question,
                retrieve=score.p_known < threshold,
                p_known=score.p_known,
                threshold=threshold,
                reason=score.reason,
                gate=self.info.name,
                draft=score.draft,
                cost=score.cost,
                warnings=batch.warnings[k],
            )
        if failures and self.on_error == "retrieve":
            _log.warning(
                "The gate %r failed for %d of %d questions and retrieves: %s: %s",
                self.info.name,
                len(failures),
                len(places),
                type(failures[0]).__name__,
                failures[0],
            )
        return [r for r in results if r is not None]

    def score_checked(self, evidence: Evidence) -> Score | Exception:
        """Score the evidence of one question; an exception or a score that is no probability is returned."""
        try:
            score = self.score(evidence)
        except Exception as error:
            return error
        return self._valid(replace(score, cost=evidence.cost))

    def _valid(self, score: Score | Exception) -> Score | Exception:
        if isinstance(score, Exception):
            return score
        if not -1e-6 <= score.p_known <= 1 + 1e-6:  # NaN is in no range
            return ScoreError(f"The gate {self.info.name!r} gave the score {score.p_known}.")
        return replace(score, p_known=min(max(score.p_known, 0.0), 1.0))

    def _failed(self, question: str, threshold: float, error: Exception) -> Decision:
        failure = Failure.of(error)
        nothing = isinstance(error, InvalidQuestionError)
        reason = "There is nothing to judge" if nothing else "The gate failed"
        return Decision(
            question=question,
            retrieve=True,
            p_known=0.0,
            threshold=threshold,
            reason=f"{reason}, so it retrieves: {failure.message}",
            gate=self.info.name,
            error=failure,
        )


@dataclass(frozen=True)
class _Batch:
    """Requests after validation: `errors` has a place for each request, the other lists skip the bad ones."""

    inputs: list[Inputs]
    thresholds: list[float | None]
    warnings: list[tuple[str, ...]]
    errors: list[Exception | None]

    @classmethod
    def of(
        cls, requests: Sequence[_Request], specs: Sequence[EvidenceSpec], proxy: Callable[[], Proxy]
    ) -> _Batch:
        reads = any(not isinstance(s, PopularitySpec | NeighboursSpec) for s in specs)
        cut = (lambda text: proxy().cut(text, MAX_QUESTION_TOKENS)) if reads else lambda text: None
        batch = cls([], [], [], [])
        for request in requests:
            try:
                question, warnings = _fitting(valid_question(request.question), cut)
                given = request.threshold
                if given is not None and not (math.isfinite(given) and given >= 0):
                    raise ConfigurationError(f"A threshold must be a number of at least 0, not {given}.")
                draft = request.draft
                if isinstance(draft, str):
                    draft = Draft(text=draft.strip(), source="recorded")
                if draft is not None and not isinstance(draft, Draft):
                    raise EvidenceError(f"A draft must be a string or a Draft, not {type(draft).__name__}.")
            except Exception as error:
                batch.errors.append(error)
                continue
            batch.inputs.append(Inputs(question, draft, request.popularity))
            batch.thresholds.append(given)
            batch.warnings.append(warnings)
            batch.errors.append(None)
        return batch


def _fitting(question: str, cut: Callable[[str], str | None]) -> tuple[str, tuple[str, ...]]:
    """Cut a question that no model should read whole, and say so."""
    if len(question.encode()) <= MAX_QUESTION_TOKENS:  # a token has at least one byte
        return question, ()
    short = question[:_MAX_QUESTION_CHARACTERS]
    short = cut(short) or short
    if short == question:
        return question, ()
    return short, (f"The question was cut from {len(question):,} to {len(short):,} characters.",)


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


def decide_together(
    gates: Sequence[Gate],
    questions: Sequence[str],
    *,
    drafts: Sequence[Draft | str | None] | None = None,
    popularity: Sequence[float | None] | None = None,
) -> list[list[Decision]]:
    """Run several gates over one batch; every piece of evidence that they share is computed once.

    Args:
        gates: The gates; all must use the same proxy and, those that have one, the same LLM.
        questions: The questions.
        drafts: Drafts to judge instead of writing them, one a question.
        popularity: Popularity scores, one a question.

    Returns:
        For each gate its decisions, in the order of the questions.

    Raises:
        ConfigurationError: The gates use different proxies or LLMs.
    """
    if not gates:
        return []
    first = gates[0]
    if any(g.get_proxy() is not first.get_proxy() for g in gates):
        raise ConfigurationError("Gates that share evidence must use the same proxy.")
    llms = {id(g._llm): g._llm for g in gates if g._llm is not None}
    if len(llms) > 1:
        raise ConfigurationError("Gates that share evidence must use the same LLM.")
    specs = [spec for g in gates for spec in g.all_specs]
    batch = _Batch.of(first._requests(questions, None, drafts, popularity), specs, first.get_proxy)
    collector = Collector(batch.inputs, first.get_proxy, next(iter(llms.values()), None), specs)
    return [[g._batch_item(found) for found in g._decisions(batch, collector)] for g in gates]
