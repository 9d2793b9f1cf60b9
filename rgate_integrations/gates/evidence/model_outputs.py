"""What the proxy gives for a prompt: hidden states, scores of fixed continuations, completions and samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

from rgate_integrations.decision import Cost, Draft
from rgate_integrations.gates.evidence.base import Context, EvidenceSpec, Piece
from rgate_integrations.gates.evidence.draft import DraftSpec, questions_as_values, quoted_values
from rgate_integrations.models.base import PooledLayer
from rgate_integrations.prompts import ANSWER, SHORT_ANSWER, PromptTemplate
from rgate_integrations.runtime.arrays import Float32Array


@dataclass(frozen=True)
class HiddenSpec(EvidenceSpec[Float32Array]):
    """Pooled hidden states, shape (layers, hidden size).

    Attributes:
        layers: Which states: (layer, span, pooling) each; layer 0 is the embedding, the last is the output.
        draft: The draft that is the assistant's turn, or None for the question alone.
        prompt: The prompt that the question stands in.
    """

    layers: tuple[PooledLayer, ...]
    draft: DraftSpec | None = None
    prompt: PromptTemplate = ANSWER

    @property
    def needs(self) -> tuple[EvidenceSpec[Any], ...]:
        """The draft that is read."""
        return () if self.draft is None else (self.draft,)

    def compute(self, context: Context) -> list[Piece[Float32Array]]:
        """Read the questions, with their drafts if there are any."""
        drafts = None if self.draft is None else context.get(self.draft)
        states = context.proxy.hidden(self.prompt, questions_as_values(context), drafts, self.layers)
        pieces = []
        for each in states:
            # States that were kept while a draft was written have no prompt of their own, and cost nothing.
            cost = Cost(model_calls=int(each.prompt_tokens > 0), tokens_in=each.prompt_tokens)
            pieces.append(Piece(each.states, cost))
        return pieces


LogProbabilities: TypeAlias = tuple[float, ...]


@dataclass(frozen=True)
class TargetsSpec(EvidenceSpec[LogProbabilities]):
    """The log-probability of each of some continuations of a prompt, in their order.

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

    @property
    def needs(self) -> tuple[EvidenceSpec[Any], ...]:
        """The draft that the prompt quotes."""
        return () if self.draft is None else (self.draft,)

    def compute(self, context: Context) -> list[Piece[LogProbabilities]]:
        """Score the targets after the prompt."""
        values = quoted_values(context, self.draft)
        scores = context.proxy.score(self.prompt, values, self.targets, adapter=self.adapter)
        return [Piece(each.logprobs, Cost(model_calls=1, tokens_in=each.prompt_tokens)) for each in scores]


@dataclass(frozen=True)
class CompletionSpec(EvidenceSpec[Draft]):
    """A short greedy completion.

    Attributes:
        prompt: The prompt; its fields are ``question`` and, if ``draft`` is given, ``draft``.
        tokens: Maximum number of tokens.
        draft: The draft that the prompt quotes, or None.
        adapter: Folder or Hub id of a LoRA adapter of the proxy, or None for the base model.
    """

    prompt: PromptTemplate
    tokens: int = 16
    draft: DraftSpec | None = None
    adapter: str | None = None

    @property
    def needs(self) -> tuple[EvidenceSpec[Any], ...]:
        """The draft that the prompt quotes."""
        return () if self.draft is None else (self.draft,)

    def compute(self, context: Context) -> list[Piece[Draft]]:
        """Complete the prompts."""
        values = quoted_values(context, self.draft)
        written = context.proxy.generate(self.prompt, values, tokens=self.tokens, adapter=self.adapter)
        pieces = []
        for each in written:
            cost = Cost(model_calls=1, tokens_in=each.prompt_tokens, tokens_out=len(each.tokens))
            pieces.append(Piece(each, cost))
        return pieces


Samples: TypeAlias = tuple[Draft, ...]


@dataclass(frozen=True)
class SamplesSpec(EvidenceSpec[Samples]):
    """Several sampled answers.

    Attributes:
        n: How many.
        temperature: Sampling temperature, > 0.
        tokens: Maximum number of tokens of each.
        seed: Seed; the samples of a question depend on it and on the question, never on the batch.
        prompt: The prompt that the model is given.
    """

    n: int = 10
    temperature: float = 1.0
    tokens: int = 32
    seed: int = 0
    prompt: PromptTemplate = SHORT_ANSWER

    def compute(self, context: Context) -> list[Piece[Samples]]:
        """Sample answers to all questions together."""
        sampled = context.proxy.sample(
            self.prompt,
            questions_as_values(context),
            n=self.n,
            tokens=self.tokens,
            temperature=self.temperature,
            seed=self.seed,
        )
        return [Piece(answers, self._cost(answers)) for answers in sampled]

    def _cost(self, answers: Samples) -> Cost:
        return Cost(
            model_calls=self.n,
            tokens_in=sum(each.prompt_tokens for each in answers),
            tokens_out=sum(len(each.tokens) for each in answers),
        )
