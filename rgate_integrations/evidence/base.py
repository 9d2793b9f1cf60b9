"""Evidence: what gates look at, and how a kind of evidence is defined.

A *spec* describes one piece of evidence: the first 32 tokens of a draft, the nearest labelled questions. It is
frozen and hashable, so gates that need the same piece share it. A new kind of evidence is one class: a frozen
dataclass with a ``compute`` method. Nothing else has to know it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar

from rgate_integrations.decision import Cost, Draft
from rgate_integrations.errors import EvidenceError
from rgate_integrations.models.base import Proxy

_T = TypeVar("_T")


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
        cost: What computing it cost, without what it was made of; milliseconds are filled in by the collector.
        made_by: The model that it was computed with, if one was used; filled in by the collector.
    """

    value: _T
    cost: Cost = field(default_factory=Cost)
    made_by: MadeBy = field(default_factory=MadeBy)


class Drafter(Protocol):
    """Whatever writes the first tokens of the answering LLM's answer: an adapter, or a proxy."""

    def draft(self, questions: Sequence[str], tokens: int) -> Sequence[Draft]:
        """Return one draft a question, of at most ``tokens`` tokens, with log-probabilities where known."""


class Context(ABC):
    """Some questions of a batch, and what their evidence may be computed from.

    Attributes:
        inputs: The questions and what the caller gave with them.
        planned: Everything that the gates of this batch may ask for. A draft is written at the maximum length
            among them.
        llm: Writes drafts in the answering LLM's words, or None.
    """

    inputs: Sequence[Inputs]
    planned: Sequence[EvidenceSpec[Any]]
    llm: Drafter | None

    @property
    @abstractmethod
    def proxy(self) -> Proxy:
        """The proxy model, loaded when a piece first asks for it."""

    @abstractmethod
    def truncate(self, text: str, tokens: int) -> str | None:
        """Return the first tokens of a text, as the proxy counts them, or None when it is not longer."""

    @abstractmethod
    def get(self, spec: EvidenceSpec[_T]) -> list[_T]:
        """Return the piece of each question, of a spec that is in `EvidenceSpec.needs`."""

    @abstractmethod
    def part(self, places: Sequence[int]) -> Context:
        """Return the context of some of the questions, by their positions in `inputs`."""

    @abstractmethod
    def find(self, spec: EvidenceSpec[_T]) -> list[_T | Exception]:
        """Return the piece of each question, computed where it is missing, or why it cannot be had."""

    @abstractmethod
    def evidence(
        self, specs: Sequence[EvidenceSpec[Any]], *, earlier: Sequence[EvidenceSpec[Any]] = ()
    ) -> list[Evidence | Exception]:
        """Return the evidence of each question, computed where it is missing, or why it cannot be had.

        Args:
            specs: All of these are needed.
            earlier: Pieces that were asked for before; those that could be had are there too.
        """

    @abstractmethod
    def also(self, spec: EvidenceSpec[_T], pieces: Sequence[Piece[_T]]) -> None:
        """Hand over pieces of another spec that were made on the way, one a question."""

    @abstractmethod
    def memory(self, key: Hashable, make: Callable[[], _T]) -> _T:
        """Return what is kept under a key as long as the engine lives; made when it is missing."""


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

    def is_slow(self, inputs: Inputs) -> bool:
        """Return whether it takes a model many passes for this question, as writing does; by default not.

        What is slow is computed after the quick looks at other callers' questions.
        """
        return False

    @abstractmethod
    def compute(self, context: Context) -> Sequence[Piece[_T] | Exception]:
        """Return the piece of each question of a batch, or why it cannot be had.

        May raise: then each question is computed alone, so that one cannot fail the others.
        """

    def stored_as(self, planned: Sequence[EvidenceSpec[Any]]) -> EvidenceSpec[_T]:
        """Return the planned spec whose piece contains this one; by default itself."""
        return self

    def taken_from(self, stored: _T) -> _T:
        """Return this piece out of the stored one; by default the whole."""
        return stored


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
