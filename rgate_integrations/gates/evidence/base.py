"""Evidence: what gates look at, how a kind of evidence is defined, and how it is computed once for a batch.

A *spec* describes one piece of evidence: the first 32 tokens of a draft, the nearest labelled questions. It is
frozen and hashable, so gates that need the same piece share it. A new kind of evidence is one class: a frozen
dataclass with a ``compute`` method. Nothing else has to know it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from rgate_integrations.decision import Cost, Draft, Request
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
        reads_history: Whether it is computed in the light of `Request.history`.
        reads_draft: Whether it is the beginning of an answer.
    """

    reads_model: ClassVar[bool] = True
    reads_history: ClassVar[bool] = False
    reads_draft: ClassVar[bool] = False

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
    """What a gate scores: a request, and its pieces of evidence by the spec that asked for each.

    >>> Evidence(Request("who wrote hamlet?")).question
    'who wrote hamlet?'

    Attributes:
        request: The request, as it is read.
        truncated: Whether the question was too long to be read whole, so that parts of its middle are left out.
        leaves_out: Whether something is left out that may ask for something.
        original: The question as the user wrote it; empty where it is read as it is.
        pieces: The pieces by spec, or why they cannot be had.
        proxies: The models that read the request for some of them, by the name that they were asked for under.
    """

    request: Request
    truncated: bool = False
    leaves_out: bool = False
    original: str = ""
    pieces: dict[EvidenceSpec[Any], Piece[Any] | Exception] = field(default_factory=dict)
    proxies: dict[str, Proxy] = field(default_factory=dict)

    @property
    def question(self) -> str:
        """The question, as it is read."""
        return self.request.question

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
        proxy: Returns the proxy of a name, or that of the gate; called only when a piece needs it.
        llm: Writes drafts for specs with ``source="llm"``, or None.
        memory: What outlives a batch, by key.
        timeout: How long a call of the gate may take by default, in seconds: what asks a server waits no longer.
    """

    proxy: Callable[[str], Proxy]
    llm: Drafter | None
    memory: MutableMapping[Hashable, Any]
    timeout: float = math.inf


@dataclass(frozen=True)
class Context:
    """A batch of requests and its evidence: each piece is computed once, whoever asks for it.

    Attributes:
        evidence: The evidence of each request; what fails for one does not concern the others.
        sources: What evidence is computed from. `use_proxy` is for what a model reads; whoever asks ``sources`` for
            the proxy, as to count tokens, makes no evidence with it.
        planned: Everything that will be asked for.
    """

    evidence: Sequence[Evidence]
    sources: Sources
    planned: Sequence[EvidenceSpec[Any]] = ()

    @property
    def requests(self) -> list[Request]:
        """The requests, as they are read."""
        return [each.request for each in self.evidence]

    def use_proxy(self, name: str = "") -> Proxy:
        """Return a proxy model, loaded when first asked for, and note on each request that it is read by it.

        A gate that was trained on one model refuses evidence that another one made. It is noted here, where the
        model is handed out, so that no spec can forget it.

        Args:
            name: Which, as gates name it; that of the gate that decides unless given.
        """
        proxy = self.sources.proxy(name)
        for each in self.evidence:
            each.proxies[name] = proxy
        return proxy

    def memory(self, key: Hashable, make: Callable[[], _T]) -> _T:
        """Return what is kept under a key as long as the engine lives; made when it is missing."""
        kept = self.sources.memory
        if key not in kept:
            kept.setdefault(key, make())  # of two that are made at once, by two threads, one is kept
        value: _T = kept[key]
        return value

    def part(self, evidence: Sequence[Evidence]) -> Context:
        """Return the context of some of the requests."""
        return Context(evidence, self.sources, self.planned)

    def find(self, spec: EvidenceSpec[_T]) -> list[Piece[_T] | Exception]:
        """Return the piece of each request, computed where it is missing, or why it cannot be had."""
        for needed in spec.needs:
            missing = self.without(spec)
            for each, piece in zip(missing.evidence, missing.find(needed), strict=True):
                if isinstance(piece, Exception):
                    # The reason is what failed first, not what follows from it.
                    each.pieces[spec] = piece
        missing = self.without(spec)
        if missing.evidence:
            missing.compute(spec)
        return [each.pieces[spec] for each in self.evidence]

    def without(self, spec: EvidenceSpec[Any]) -> Context:
        """Return the context of the requests that have no piece of a spec yet."""
        return self.part([each for each in self.evidence if spec not in each.pieces])

    def get(self, spec: EvidenceSpec[_T]) -> list[_T]:
        """Return the value of each request's piece.

        Raises:
            Exception: Why the first that is missing cannot be had.
        """
        self.find(spec)
        return [each[spec] for each in self.evidence]

    def put(self, spec: EvidenceSpec[_T], pieces: Sequence[Piece[_T] | Exception]) -> None:
        """Keep pieces of a spec, one a request; also of another one, that were made on the way."""
        for each, piece in zip(self.evidence, pieces, strict=True):
            each.pieces[spec] = piece

    def compute(self, spec: EvidenceSpec[Any]) -> None:
        """Compute a spec for all requests; if that fails, for each alone, so that one cannot fail all."""
        try:
            pieces = spec.compute(self)
            if len(pieces) != len(self.evidence):
                raise EvidenceError(f"{spec} gave {len(pieces)} pieces for {len(self.evidence)} questions.")
        except Exception as error:  # evidence may be any user's code, so any error may come
            if len(self.evidence) > 1 and not isinstance(error, _NO_MODEL):
                for each in self.evidence:
                    self.part([each]).compute(spec)
                return
            pieces = [error] * len(self.evidence)
        self.put(spec, pieces)
