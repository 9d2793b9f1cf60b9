"""Evidence: what gates look at, how a kind of evidence is defined, and how it is computed once for a batch.

A *spec* describes one piece of evidence, such as the first 32 tokens of a draft, or the nearest labelled
questions. It is frozen and hashable, so gates that need the same piece share it. A new kind of evidence is
one class, a frozen dataclass with a ``compute`` method.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from rgate_integrations.decision import Cost, Draft, Request
from rgate_integrations.errors import (
    ConfigurationError,
    DownloadError,
    EvidenceError,
    MissingDependencyError,
    ModelLoadError,
    ServerError,
    UnknownNameError,
    no_answer,
)
from rgate_integrations.models.base import Proxy

_T = TypeVar("_T")

# Errors that every question of a batch would hit, so they are not retried question by question.
_SHARED_ERRORS = (DownloadError, MissingDependencyError, ModelLoadError, ServerError, UnknownNameError)


@dataclass(frozen=True)
class Piece(Generic[_T]):
    """A computed piece of evidence for one question.

    Attributes:
        value: The evidence itself, such as a draft or hidden states.
        cost: Cost of computing it, without the time, and without the cost of other pieces that it needs.
    """

    value: _T
    cost: Cost = field(default_factory=Cost)


class Drafter(Protocol):
    """Writes the beginning of the answering LLM's answer. Any object with the method `draft` will do."""

    def draft(self, questions: Sequence[str], tokens: int) -> Sequence[Draft]:
        """Return a draft per question, of at most ``tokens`` tokens, with log-probabilities if known."""


class EvidenceSpec(ABC, Generic[_T]):
    """Describes a piece of evidence of type ``_T``, and computes it for a batch. Subclasses are frozen dataclasses.

    Attributes:
        reads_model: Whether a model reads the question. If so, a very long question is truncated.
        reads_history: Whether it depends on `Request.history`.
        reads_draft: Whether the piece is a draft, that is, the beginning of an answer. A `Draft` whose text is not an
            answer, such as a refusal, is replaced by a `NoAnswerError`.
    """

    reads_model: ClassVar[bool] = True
    reads_history: ClassVar[bool] = False
    reads_draft: ClassVar[bool] = False

    @property
    def needs(self) -> tuple[EvidenceSpec[Any], ...]:
        """Specs of the pieces to compute before this one; by default, all specs among its fields."""
        return tuple(value for value in vars(self).values() if isinstance(value, EvidenceSpec))

    def accepts(self, error: Exception) -> bool:
        """Return whether the piece can be computed although a piece that it needs is this error; by default never."""
        return False

    @abstractmethod
    def compute(self, context: Context) -> Sequence[Piece[_T] | Exception]:
        """Return a piece or an error for each question of a batch.

        If it raises, each question is computed alone, so that one question cannot make the others fail. Errors
        that all questions would hit, such as a missing model, are not retried.
        """


def expand_specs(specs: Sequence[EvidenceSpec[Any]]) -> list[EvidenceSpec[Any]]:
    """Return these specs and all that they need, directly or through others, each once.

    Raises:
        ConfigurationError: The specs of a gate, or of a gate inside it, are not a tuple of specs.
    """
    expanded: dict[EvidenceSpec[Any], None] = {}
    pending: list[EvidenceSpec[Any]] = []
    pending += _check_specs(specs)
    while pending:
        spec = pending.pop()
        if spec not in expanded:
            expanded[spec] = None
            pending += _check_specs(spec.needs)
    return list(expanded)


def _check_specs(specs: Any) -> Sequence[EvidenceSpec[Any]]:
    is_several = isinstance(specs, list | tuple)
    wrong = [spec for spec in specs if not isinstance(spec, EvidenceSpec)] if is_several else [specs]
    if wrong:
        raise ConfigurationError(
            f"A gate's specs must be a tuple of evidence specs, but {wrong[0]!r:.60} is of type "
            f"{type(wrong[0]).__name__}.",
            hint="For example, return (DraftSpec(tokens=16),), or () if the gate needs no evidence.",
        )
    return specs


@dataclass
class Evidence:
    """A request and its pieces of evidence, which a gate scores.

    Examples:
        >>> Evidence(Request("who wrote hamlet?")).question
        'who wrote hamlet?'

    Attributes:
        request: The request as models read it: in plain letters, and truncated if it is too long.
        truncated: Whether a part of the middle of the question was left out because the question is too long.
        leaves_out: Whether the part that was left out may ask for something.
        original: The question before its conversion to plain letters (full-width ones, for example, are not plain);
            empty if that changed nothing.
        pieces: For each spec, its piece, or the error if that could not be computed.
        proxies: The models that read the request, by the name under which they were requested.
    """

    request: Request
    truncated: bool = False
    leaves_out: bool = False
    original: str = ""
    pieces: dict[EvidenceSpec[Any], Piece[Any] | Exception] = field(default_factory=dict)
    proxies: dict[str, Proxy] = field(default_factory=dict)

    @property
    def question(self) -> str:
        """The question as models read it."""
        return self.request.question

    def __getitem__(self, spec: EvidenceSpec[_T]) -> _T:
        """Return the value of the piece of evidence that a spec describes.

        Raises:
            EvidenceError: The gate's specs do not include this spec.
            Exception: The piece could not be computed; this is the error from its computation.
        """
        if spec not in self.pieces:
            raise EvidenceError(
                f"The gate's score() reads the evidence {spec}, which the gate did not request.",
                hint="Add it to the gate's specs.",
            )
        piece = self.pieces[spec]
        if isinstance(piece, Exception):
            raise piece
        return piece.value

    @property
    def cost(self) -> Cost:
        """Cost of all pieces computed so far."""
        return sum((piece.cost for piece in self.pieces.values() if isinstance(piece, Piece)), Cost())


@dataclass(frozen=True)
class Sources:
    """Where evidence comes from.

    Attributes:
        proxy: Returns the proxy model of a name, or the gate's own for an empty name. Models load on first use.
        llm: Writes drafts for specs with ``source="llm"``; None if no LLM was given.
        memory: Values that outlive a batch, by key.
    """

    proxy: Callable[[str], Proxy]
    llm: Drafter | None
    memory: MutableMapping[Hashable, Any]


@dataclass(frozen=True)
class Context:
    """A batch of requests and its evidence. Each piece is computed once, whoever asks for it.

    Attributes:
        evidence: The evidence of each request; a failure of one does not affect the others.
        sources: Where evidence comes from. A spec gets the model that reads the requests from `use_proxy`, which
            records the model. ``sources.proxy`` records nothing: use it for other tasks, such as truncating a text.
    """

    evidence: Sequence[Evidence]
    sources: Sources

    @property
    def requests(self) -> list[Request]:
        """The requests as models read them."""
        return [evidence.request for evidence in self.evidence]

    def use_proxy(self, name: str = "") -> Proxy:
        """Return the proxy model of a name, and record on each request of the batch that this model reads it.

        An empty name means the gate's own proxy. The record lets a gate that was trained on one model reject
        evidence from another.
        """
        proxy = self.sources.proxy(name)
        for evidence in self.evidence:
            evidence.proxies[name] = proxy
        return proxy

    def memory(self, key: Hashable, make: Callable[[], _T]) -> _T:
        """Return the value for a key; ``make`` makes it on first use, and the engine keeps it."""
        memory = self.sources.memory
        if key not in memory:
            memory.setdefault(key, make())  # two threads may both make it: the first one wins
        return memory[key]

    def find(self, spec: EvidenceSpec[_T]) -> list[Piece[_T] | Exception]:
        """Return the piece that a spec describes for each request, or the error instead.

        Pieces that have not been computed yet are computed and stored.
        """
        for needed in spec.needs:
            missing = self.without(spec)
            for evidence, piece in zip(missing.evidence, missing.find(needed), strict=True):
                # Report the first failure, not what follows from it.
                if isinstance(piece, Exception) and not spec.accepts(piece):
                    evidence.pieces[spec] = piece
        missing = self.without(spec)
        if missing.evidence:
            missing.compute(spec)
        return [evidence.pieces[spec] for evidence in self.evidence]

    def without(self, spec: EvidenceSpec[Any]) -> Context:
        """Return a context with only the requests for which this spec has not been computed yet."""
        return replace(self, evidence=[item for item in self.evidence if spec not in item.pieces])

    def get(self, spec: EvidenceSpec[_T]) -> list[_T]:
        """Return the value that a spec describes for each request; if any failed, raise the first error."""
        self.find(spec)
        return [evidence[spec] for evidence in self.evidence]

    def compute(self, spec: EvidenceSpec[Any]) -> None:
        """Compute and store a spec's pieces for all requests together.

        If that fails, compute each request alone, unless the error is one that all requests would hit.
        """
        try:
            pieces = spec.compute(self)
            if len(pieces) != len(self.evidence):
                raise EvidenceError(
                    f"compute() of {spec} returned {len(pieces)} items for {len(self.evidence)} questions.",
                    hint="It must return one Piece or one exception per question.",
                )
        except Exception as error:  # specs may be any user's code
            if len(self.evidence) > 1 and not isinstance(error, _SHARED_ERRORS):
                for evidence in self.evidence:
                    replace(self, evidence=[evidence]).compute(spec)
                return
            pieces = [error] * len(self.evidence)
        for evidence, piece in zip(self.evidence, pieces, strict=True):
            evidence.pieces[spec] = _check_draft(piece) if spec.reads_draft else piece


def _check_draft(piece: Piece[Any] | Exception) -> Piece[Any] | Exception:
    """Return a `NoAnswerError` for a draft that is not an answer, such as a refusal; anything else unchanged."""
    draft = getattr(piece, "value", None)
    if isinstance(draft, Draft) and draft.non_answer:
        return no_answer(
            draft.non_answer,
            thinking=draft.is_cut_off,
            writer="proxy" if draft.source == "proxy" else "LLM",
        )
    return piece
