"""Evidence: what a gate looks at. Gates declare typed specs; a collector computes each piece once a batch.

A spec is a frozen, hashable description of one piece of evidence. Two gates that declare equal specs share
the piece; drafts that differ in length only are written once, at the greatest length asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from rgate_integrations.decision import Cost, Draft, DraftSource
from rgate_integrations.errors import EvidenceError
from rgate_integrations.prompts import ANSWER, SHORT_ANSWER, PromptTemplate
from rgate_integrations.proxy.base import PooledLayer


@dataclass(frozen=True)
class DraftSpec:
    """The first tokens of an answer.

    Attributes:
        tokens: Greatest number of tokens.
        source: Who writes it: the proxy, the answering LLM, or nobody (``recorded``: it must be given).
        prompt: The prompt that the drafting model is given; not used for recorded drafts.
        logprobs: Whether the gate reads token log-probabilities. A draft whose source gives none is then read
            by the proxy, and the proxy's log-probabilities of that text stand in for them (`Draft.scored_by`).
    """

    tokens: int = 32
    source: DraftSource = "proxy"
    prompt: PromptTemplate = ANSWER
    logprobs: bool = False


@dataclass(frozen=True)
class SamplesSpec:
    """Several sampled answers of the proxy.

    Attributes:
        n: How many.
        temperature: Sampling temperature, > 0.
        tokens: Greatest number of tokens of each.
        seed: Seed; the samples of a question depend on it and on the question, never on the batch.
        prompt: The prompt that the model is given.
    """

    n: int = 10
    temperature: float = 1.0
    tokens: int = 32
    seed: int = 0
    prompt: PromptTemplate = SHORT_ANSWER


@dataclass(frozen=True)
class TargetsSpec:
    """Log-probabilities of fixed continuations of a prompt, such as "Yes" and "No".

    Attributes:
        prompt: The prompt; its fields are ``question`` and, if ``draft`` is given, ``draft``.
        targets: The continuations; each is scored as a whole token sequence.
        draft: The draft that the prompt quotes, or None.
        adapter: Folder or Hub id of a LoRA adapter of the proxy, or None for the base model.
    """

    prompt: PromptTemplate
    targets: tuple[str, ...]
    draft: DraftSpec | None = None
    adapter: str | None = None


@dataclass(frozen=True)
class CompletionSpec:
    """A short greedy completion of a prompt other than the plain answer prompt, such as a verdict.

    Attributes:
        prompt: The prompt; its fields are ``question`` and, if ``draft`` is given, ``draft``.
        tokens: Greatest number of tokens.
        draft: The draft that the prompt quotes, or None.
        adapter: Folder or Hub id of a LoRA adapter of the proxy, or None for the base model.
    """

    prompt: PromptTemplate
    tokens: int = 16
    draft: DraftSpec | None = None
    adapter: str | None = None


@dataclass(frozen=True)
class NeighboursSpec:
    """The labelled questions nearest to the question.

    Attributes:
        k: How many.
        examples: JSONL file of labelled questions (``question`` and ``known`` or ``closed_book_correct``).
        embedder: Catalogue name, folder or Hub id of the sentence embedder.
    """

    k: int
    examples: str
    embedder: str = "all-minilm-l6-v2"


@dataclass(frozen=True)
class PopularitySpec:
    """A popularity score of the question's entity, given by the caller."""


@dataclass(frozen=True)
class HiddenSpec:
    """Pooled hidden states of the proxy over the chat of question and draft.

    Attributes:
        blocks: Which states: (layer, span, pooling) each; layer 0 is the embedding, the last is the output.
        draft: The draft that is the assistant's turn, or None for the question alone.
        prompt: The prompt that the question stands in.
    """

    blocks: tuple[PooledLayer, ...]
    draft: DraftSpec | None = None
    prompt: PromptTemplate = ANSWER


EvidenceSpec: TypeAlias = (
    DraftSpec | SamplesSpec | TargetsSpec | CompletionSpec | NeighboursSpec | PopularitySpec | HiddenSpec
)


@dataclass(frozen=True)
class Neighbour:
    """A labelled question near the question: its label and its cosine similarity in [-1, 1]."""

    question: str
    known: bool
    similarity: float


@dataclass(frozen=True)
class Inputs:
    """One question and what the caller gave with it.

    Attributes:
        question: The question, validated and cut to the allowed length.
        draft: A recorded draft, or None.
        popularity: A popularity score, or None.
    """

    question: str
    draft: Draft | None = None
    popularity: float | None = None


Piece: TypeAlias = (
    Draft | tuple[Draft, ...] | tuple[float, ...] | tuple[Neighbour, ...] | float | npt.NDArray[np.float32]
)


@dataclass(frozen=True)
class Evidence:
    """All evidence of one question, readable through the spec that asked for it.

    Attributes:
        inputs: The question and what the caller gave.
        pieces: The computed pieces by spec.
        cost: What the pieces cost.
    """

    inputs: Inputs
    pieces: Mapping[EvidenceSpec, Piece] = field(default_factory=dict)
    cost: Cost = field(default_factory=Cost)

    @property
    def question(self) -> str:
        """The question."""
        return self.inputs.question

    def draft(self, spec: DraftSpec) -> Draft:
        """Return the draft for a spec, cut to the spec's length."""
        piece = self.pieces.get(spec)
        if not isinstance(piece, Draft):
            raise EvidenceError(f"No draft was collected for {spec}.")
        return piece.head(spec.tokens)

    def samples(self, spec: SamplesSpec) -> tuple[Draft, ...]:
        """Return the sampled answers for a spec."""
        return self._get(spec)  # type: ignore[return-value]

    def targets(self, spec: TargetsSpec) -> tuple[float, ...]:
        """Return the log-probability of each target of a spec, in the spec's order."""
        return self._get(spec)  # type: ignore[return-value]

    def completion(self, spec: CompletionSpec) -> Draft:
        """Return the completion for a spec."""
        return self._get(spec)  # type: ignore[return-value]

    def neighbours(self, spec: NeighboursSpec) -> tuple[Neighbour, ...]:
        """Return the nearest labelled questions, nearest first."""
        return self._get(spec)  # type: ignore[return-value]

    def popularity(self, spec: PopularitySpec) -> float:
        """Return the popularity score."""
        return self._get(spec)  # type: ignore[return-value]

    def hidden(self, spec: HiddenSpec) -> npt.NDArray[np.float32]:
        """Return the pooled hidden states, shape (blocks, hidden size)."""
        return self._get(spec)  # type: ignore[return-value]

    def _get(self, spec: EvidenceSpec) -> Piece:
        try:
            return self.pieces[spec]
        except KeyError:
            raise EvidenceError(f"The evidence {spec} was not collected.") from None


def draft_spec(spec: EvidenceSpec) -> DraftSpec | None:
    """Return the draft that a spec is or is built on, if any."""
    if isinstance(spec, DraftSpec):
        return spec
    return getattr(spec, "draft", None)


def longest(spec: DraftSpec, others: list[DraftSpec]) -> DraftSpec:
    """Return the spec of the longest draft among ``others`` that contains the one ``spec`` asks for."""
    same = [o.tokens for o in others if (o.source, o.prompt) == (spec.source, spec.prompt)]
    return replace(spec, tokens=max([spec.tokens, *same]), logprobs=False)
