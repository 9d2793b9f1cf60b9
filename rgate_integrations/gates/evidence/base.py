"""Evidence: what gates look at, how a kind of evidence is defined, and how it is computed once for a batch.

A *spec* describes one piece of evidence: the first 32 tokens of a draft, the nearest labelled questions. It is
frozen and hashable, so gates that need the same piece share it. A new kind of evidence is one class: a frozen
dataclass with a ``compute`` method. Nothing else has to know it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, MutableMapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from pydantic.dataclasses import dataclass as checked_dataclass

from rgate_integrations.decision import Cost, Draft, Text
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


@checked_dataclass(frozen=True)
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

    question: Text
    draft: Draft | None = None
    popularity: float | None = None
    history: tuple[Text, ...] = ()
    metadata: Mapping[Any, Any] = field(default_factory=dict)
    partly: bool = False


@dataclass(frozen=True)
class Piece(Generic[_T]):
    """A computed piece of evidence of one question.

    Attributes:
        value: The piece.
        cost: What computing it cost, without what it was made of and without its time.
    """

    value: _T
    cost: Cost = field(default_factory=Cost)


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
        """The pieces it is made of, which are those among its fields; they are there when `compute` is called."""
        return tuple(each for each in vars(self).values() if isinstance(each, EvidenceSpec))

    @abstractmethod
    def compute(self, context: Context) -> Sequence[Piece[_T] | Exception]:
        """Return the piece of each question of a batch, or why it cannot be had.

        May raise: then each question is computed alone, so that one cannot fail the others.
        """


def expand_specs(specs: Sequence[EvidenceSpec[Any]]) -> list[EvidenceSpec[Any]]:
    """Return some specs and all that they need, each once."""
    found: dict[EvidenceSpec[Any], None] = {}
    pending = list(specs)
    while pending:
        spec = pending.pop()
        if spec not in found:
            found[spec] = None
            pending += spec.needs
    return list(found)


@dataclass
class Evidence:
    """What a gate scores: the evidence of one question, read through the specs that asked for it.

    >>> evidence = Evidence(Inputs("who wrote hamlet?"))
    >>> evidence.question
    'who wrote hamlet?'

    Attributes:
        inputs: The question and what the caller gave.
        pieces: The pieces by spec, or why they cannot be had.
        proxy: The model that read the question for some of them; None if none did.
    """

    inputs: Inputs
    pieces: dict[EvidenceSpec[Any], Piece[Any] | Exception] = field(default_factory=dict)
    proxy: Proxy | None = None

    @property
    def question(self) -> str:
        """The question."""
        return self.inputs.question

    def __getitem__(self, spec: EvidenceSpec[_T]) -> _T:
        """Return the value of a piece.

        Raises:
            EvidenceError: The gate has not named it in its specs.
            Exception: Why it cannot be had.
        """
        piece = self.pieces.get(spec, EvidenceError(f"The evidence {spec} was not collected."))
        if isinstance(piece, Exception):
            raise piece
        value: _T = piece.value
        return value

    @property
    def cost(self) -> Cost:
        """What all pieces cost that were computed so far."""
        return sum((piece.cost for piece in self.pieces.values() if isinstance(piece, Piece)), Cost())


@dataclass(frozen=True)
class Sources:
    """What evidence is computed from.

    Attributes:
        proxy: Returns the proxy; called only when a piece needs it.
        llm: Writes drafts for specs with ``source="llm"``, or None.
        memory: What outlives a batch, by key.
        timeout: How long a call of the gate may take by default, in seconds: what asks a server waits no longer.
    """

    proxy: Callable[[], Proxy]
    llm: Drafter | None
    memory: MutableMapping[Hashable, Any]
    timeout: float = math.inf


class Context:
    """A batch of questions, or a part of one, and its evidence: each piece is computed once, whoever asks for it.

    Args:
        inputs: The questions and what the caller gave with them.
        sources: What evidence is computed from.
        specs: Everything that will be asked for.

    Attributes:
        evidence: The evidence of each question; what fails for one is nothing to the others.
        planned: Everything that will be asked for.
        sources: What evidence is computed from. Who asks it for the proxy, as to count tokens, made nothing with it.
    """

    def __init__(
        self, inputs: Sequence[Inputs], sources: Sources, specs: Sequence[EvidenceSpec[Any]] = ()
    ) -> None:
        self.planned = expand_specs(specs)
        self.sources = sources
        self.evidence = list(map(Evidence, inputs))

    @property
    def inputs(self) -> list[Inputs]:
        """The questions and what the caller gave with them."""
        return [each.inputs for each in self.evidence]

    @property
    def proxy(self) -> Proxy:
        """The proxy model, loaded when a piece first asks for it."""
        proxy = self.sources.proxy()
        # Noted here, where it is handed out: no spec can forget to say that a model made its pieces.
        for each in self.evidence:
            each.proxy = proxy
        return proxy

    def memory(self, key: Hashable, make: Callable[[], _T]) -> _T:
        """Return what is kept under a key as long as the engine lives; made when it is missing."""
        kept = self.sources.memory
        if key not in kept:
            kept.setdefault(key, make())  # of two that are made at once, by two threads, one is kept
        found: _T = kept[key]
        return found

    def part(self, places: Sequence[int]) -> Context:
        """Return the context of some of the questions, by their positions in `inputs`."""
        part = copy(self)
        part.evidence = [self.evidence[place] for place in places]
        return part

    def find(self, spec: EvidenceSpec[_T]) -> list[Piece[_T] | Exception]:
        """Return the piece of each question, computed where it is missing, or why it cannot be had."""
        for needed in spec.needs:
            for each, piece in zip(self.evidence, self.find(needed), strict=True):
                if isinstance(piece, Exception):
                    # The reason is what failed first, not what follows from it.
                    each.pieces.setdefault(spec, piece)
        missing = [place for place, each in enumerate(self.evidence) if spec not in each.pieces]
        if missing:
            self.part(missing)._compute(spec)
        return [each.pieces[spec] for each in self.evidence]

    def get(self, spec: EvidenceSpec[_T]) -> list[_T]:
        """Return the value of each question's piece.

        Raises:
            Exception: Why the first that is missing cannot be had.
        """
        self.find(spec)
        return [each[spec] for each in self.evidence]

    def put(self, spec: EvidenceSpec[_T], pieces: Sequence[Piece[_T] | Exception]) -> None:
        """Keep pieces of a spec, one a question; also of another one, that were made on the way."""
        for each, piece in zip(self.evidence, pieces, strict=True):
            each.pieces[spec] = piece

    def _compute(self, spec: EvidenceSpec[Any]) -> None:
        """Compute a spec for all questions; if that fails, for each alone, so that one cannot fail all."""
        try:
            pieces = spec.compute(self)
            if len(pieces) != len(self.evidence):
                raise EvidenceError(f"{spec} gave {len(pieces)} pieces for {len(self.evidence)} questions.")
        except Exception as error:  # evidence may be any user's code, so any error may come
            if len(self.evidence) > 1 and not isinstance(error, _NO_MODEL):
                for place in range(len(self.evidence)):
                    self.part([place])._compute(spec)
                return
            pieces = [error] * len(self.evidence)
        self.put(spec, pieces)
