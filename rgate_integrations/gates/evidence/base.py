"""Evidence: what gates look at, how a kind of evidence is defined, and how it is computed once for a batch.

A *spec* describes one piece of evidence: the first 32 tokens of a draft, the nearest labelled questions. It is
frozen and hashable, so gates that need the same piece share it. A new kind of evidence is one class: a frozen
dataclass with a ``compute`` method. Nothing else has to know it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, MutableMapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Generic, NamedTuple, Protocol, TypeAlias, TypeVar

from rgate_integrations.decision import Cost, Draft
from rgate_integrations.errors import (
    DownloadError,
    EvidenceError,
    MissingDependencyError,
    ModelLoadError,
    ServerError,
    UnknownNameError,
)
from rgate_integrations.models.base import Proxy

_T = TypeVar("_T")

_NO_MODEL = (DownloadError, MissingDependencyError, ModelLoadError, ServerError, UnknownNameError)
"""Errors that every question of a batch would meet: they are not tried again for each."""


@dataclass(frozen=True)
class Inputs:
    """One question and what the caller gave with it.

    Attributes:
        question: The question, validated and cut to the allowed length.
        draft: A given draft, or None.
        popularity: A popularity score, or None.
        history: What was said before, oldest first: lines such as ``user: Who wrote Hamlet?`` and
            ``assistant: Shakespeare.``
        metadata: What the caller knows of the request, for rules of the user's own.
        partly: Whether the question was too long to be read whole, and parts of its middle are left out.
    """

    question: str
    draft: Draft | None = None
    popularity: float | None = None
    history: tuple[str, ...] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict)
    partly: bool = False


class MadeBy(NamedTuple):
    """The model that a piece was computed with.

    Attributes:
        model: Its name.
        fingerprint: `Proxy.fingerprint`, which tells its weights apart from others; empty if it cannot be known.
    """

    model: str = ""
    fingerprint: str = ""


@dataclass(frozen=True)
class Piece(Generic[_T]):
    """A computed piece of evidence of one question.

    Attributes:
        value: The piece.
        cost: What computing it cost, without what it was made of and without its time.
        made_by: The model that it was computed with, if one was used; the context fills it in.
    """

    value: _T
    cost: Cost = field(default_factory=Cost)
    made_by: MadeBy = field(default_factory=MadeBy)


class Drafter(Protocol):
    """Whatever writes the first tokens of the answering LLM's answer: an adapter, or a proxy."""

    def draft(self, questions: Sequence[str], tokens: int) -> Sequence[Draft]:
        """Return one draft a question, of at most ``tokens`` tokens, with log-probabilities where known."""


class EvidenceSpec(ABC, Generic[_T]):
    """Describes a piece of evidence of type ``_T``, and computes it for a batch. Subclasses are frozen dataclasses.

    Attributes:
        reads_model: Whether a model reads the question, which is then cut to a length that models take.
        reads_history: Whether it is computed in the light of `Inputs.history`.
    """

    reads_model: ClassVar[bool] = True
    reads_history: ClassVar[bool] = False

    @property
    def needs(self) -> tuple[EvidenceSpec[Any], ...]:
        """The pieces it is made of; they are there when `compute` is called."""
        return ()

    @property
    def may_need(self) -> tuple[EvidenceSpec[Any], ...]:
        """The pieces that `compute` may ask for; by default those that it needs."""
        return self.needs

    @abstractmethod
    def compute(self, context: Context) -> Sequence[Piece[_T] | Exception]:
        """Return the piece of each question of a batch, or why it cannot be had.

        May raise: then each question is computed alone, so that one cannot fail the others.
        """


def expand_specs(specs: Sequence[EvidenceSpec[Any]]) -> list[EvidenceSpec[Any]]:
    """Return some specs and all that they may need, each once."""
    found: dict[EvidenceSpec[Any], None] = {}
    pending = list(specs)
    while pending:
        spec = pending.pop()
        if spec not in found:
            found[spec] = None
            pending += spec.may_need
    return list(found)


@dataclass(frozen=True)
class Evidence:
    """What a gate scores: some evidence of one question, read through the specs that asked for it.

    >>> evidence = Evidence(Inputs("who wrote hamlet?"))
    >>> evidence.question
    'who wrote hamlet?'

    Attributes:
        inputs: The question and what the caller gave.
        pieces: The pieces by spec.
        makers: The model that made each piece, by spec.
    """

    inputs: Inputs
    pieces: Mapping[EvidenceSpec[Any], Any] = field(default_factory=dict)
    makers: Mapping[EvidenceSpec[Any], MadeBy] = field(default_factory=dict)

    @property
    def question(self) -> str:
        """The question."""
        return self.inputs.question

    def __contains__(self, spec: object) -> bool:
        return spec in self.pieces

    def __getitem__(self, spec: EvidenceSpec[_T]) -> _T:
        """Return a piece.

        Raises:
            EvidenceError: It was not collected.
        """
        if spec not in self.pieces:
            raise EvidenceError(f"The evidence {spec} was not collected.")
        piece: _T = self.pieces[spec]
        return piece

    def made_by(self, spec: EvidenceSpec[Any]) -> MadeBy:
        """Return the model that a piece was computed with; with empty names if it is not known."""
        return self.makers.get(spec, MadeBy())


@dataclass(frozen=True)
class Sources:
    """What evidence is computed from.

    Attributes:
        proxy: Returns the proxy; called only when a piece needs it.
        llm: Writes drafts for specs with ``source="llm"``, or None.
        memory: What outlives a batch, by key.
    """

    proxy: Callable[[], Proxy]
    llm: Drafter | None
    memory: MutableMapping[Hashable, Any]


_Outcomes: TypeAlias = dict[EvidenceSpec[Any], Piece[Any] | Exception]
"""What became of each spec for one question."""


class Context:
    """A batch of questions, or a part of one, and its evidence: each piece is computed once, whoever asks for it.

    Args:
        inputs: The questions and what the caller gave with them.
        sources: What evidence is computed from.
        specs: Everything that will be asked for.

    Attributes:
        inputs: The questions and what the caller gave with them.
        planned: Everything that may be asked for.
        llm: Writes drafts in the answering LLM's words, or None.
    """

    def __init__(
        self, inputs: Sequence[Inputs], sources: Sources, specs: Sequence[EvidenceSpec[Any]] = ()
    ) -> None:
        self.inputs = list(inputs)
        self.planned = expand_specs(specs)
        self.llm = sources.llm
        self._sources = sources
        # A dict for each question: what fails for one is nothing to the others. Parts of the batch share them.
        self._outcomes: list[_Outcomes] = [{} for _ in inputs]
        self._asked_proxy: set[int] = set()  # about which questions, by identity, in the running computation

    @property
    def proxy(self) -> Proxy:
        """The proxy model, loaded when a piece first asks for it."""
        # Noted here, where it is handed out: no spec can forget to say which model made its pieces.
        self._asked_proxy.update(map(id, self._outcomes))
        return self._sources.proxy()

    def truncate(self, text: str, tokens: int) -> str | None:
        """Return the first tokens of a text, as the proxy counts them, or None when it is not longer."""
        # Not `proxy`: who counts tokens makes nothing.
        return self._sources.proxy().truncate(text, tokens)

    def memory(self, key: Hashable, make: Callable[[], _T]) -> _T:
        """Return what is kept under a key as long as the engine lives; made when it is missing."""
        kept = self._sources.memory
        if key not in kept:
            kept.setdefault(key, make())  # of two that are made at once, by two threads, one is kept
        found: _T = kept[key]
        return found

    def part(self, places: Sequence[int]) -> Context:
        """Return the context of some of the questions, by their positions in `inputs`."""
        part = copy(self)
        part.inputs = [self.inputs[place] for place in places]
        part._outcomes = [self._outcomes[place] for place in places]
        return part

    def get(self, spec: EvidenceSpec[_T]) -> list[_T]:
        """Return the piece of each question, of a spec that is in `EvidenceSpec.needs`."""
        values = []
        for found in self.find(spec):
            if isinstance(found, Exception):
                raise found
            values.append(found)
        return values

    def find(self, spec: EvidenceSpec[_T]) -> list[_T | Exception]:
        """Return the piece of each question, computed where it is missing, or why it cannot be had."""
        missing = self._without(spec)
        if missing.inputs:
            for needed in spec.needs:
                for outcomes, piece in zip(missing._outcomes, missing.find(needed), strict=True):
                    if isinstance(piece, Exception):
                        # The reason is what failed first, not what follows from it.
                        outcomes.setdefault(spec, piece)
            ready = self._without(spec)  # what it needs may have brought this piece with it
            if ready.inputs:
                ready._compute(spec)
        found: list[_T | Exception] = []
        for outcomes in self._outcomes:
            outcome = outcomes[spec]
            found.append(outcome if isinstance(outcome, Exception) else outcome.value)
        return found

    def evidence(
        self, specs: Sequence[EvidenceSpec[Any]], *, earlier: Sequence[EvidenceSpec[Any]] = ()
    ) -> list[Evidence | Exception]:
        """Return the evidence of each question, computed where it is missing, or why it cannot be had.

        Args:
            specs: All of these are needed.
            earlier: Pieces that were asked for before; those that could be had are there too.
        """
        # One spec after another, each for all questions at once: that is what makes batches.
        columns = {spec: self.find(spec) for spec in (*earlier, *specs)}
        makers = {spec: self._makers(spec) for spec in columns}
        found: list[Evidence | Exception] = []
        for place, inputs in enumerate(self.inputs):
            pieces = {}
            error = None
            for spec, column in columns.items():
                if not isinstance(column[place], Exception):
                    pieces[spec] = column[place]
                elif error is None and spec in specs:
                    error = column[place]
            own_makers = {spec: makers[spec][place] for spec in pieces}
            found.append(error or Evidence(inputs, pieces, own_makers))
        return found

    def also(self, spec: EvidenceSpec[_T], pieces: Sequence[Piece[_T]]) -> None:
        """Hand over pieces of another spec that were made on the way, one a question."""
        for outcomes, piece in zip(self._outcomes, pieces, strict=True):
            outcomes[spec] = replace(piece, made_by=self._maker(outcomes))

    def costs(self, spec: EvidenceSpec[Any]) -> list[Cost]:
        """Return for each question what a piece and all that it was made of cost, each counted once."""
        return [sum((piece.cost for piece in pieces), Cost()) for pieces in self._made_of(spec)]

    def _makers(self, spec: EvidenceSpec[Any]) -> list[MadeBy]:
        """Return for each question the model that made a piece, or something that the piece was made of."""
        found = []
        for pieces in self._made_of(spec):
            makers = [piece.made_by for piece in pieces if piece.made_by.model]
            found.append(makers[0] if makers else MadeBy())  # a batch has one proxy, so they are all the same
        return found

    def _made_of(self, spec: EvidenceSpec[Any]) -> list[list[Piece[Any]]]:
        """Return for each question a piece and all computed pieces that it may have been made of."""
        specs, found = expand_specs([spec]), []
        for outcomes in self._outcomes:
            pieces = [outcomes.get(each) for each in specs]
            found.append([piece for piece in pieces if isinstance(piece, Piece)])
        return found

    def _without(self, spec: EvidenceSpec[Any]) -> Context:
        """Return the context of the questions that lack a spec."""
        return self.part([place for place, each in enumerate(self._outcomes) if spec not in each])

    def _compute(self, spec: EvidenceSpec[Any]) -> None:
        """Compute a spec for all questions; if that fails, for each alone, so that one cannot fail all."""
        part = copy(self)
        part._asked_proxy = set()
        try:
            outcomes = spec.compute(part)
            if len(outcomes) != len(self.inputs):
                raise EvidenceError(f"{spec} gave {len(outcomes)} pieces for {len(self.inputs)} questions.")
        except Exception as error:  # evidence may be any user's code, so any error may come
            if len(self.inputs) > 1 and not isinstance(error, _NO_MODEL):
                for place in range(len(self.inputs)):
                    self.part([place])._compute(spec)
                return
            outcomes = [error] * len(self.inputs)
        for each, outcome in zip(self._outcomes, outcomes, strict=True):
            if isinstance(outcome, Piece):
                outcome = replace(outcome, made_by=part._maker(each))
            each[spec] = outcome

    def _maker(self, outcomes: _Outcomes) -> MadeBy:
        """Return the proxy, if the running computation asked it about a question."""
        if id(outcomes) not in self._asked_proxy:
            return MadeBy()
        proxy = self._sources.proxy()
        return MadeBy(proxy.name, proxy.fingerprint)
