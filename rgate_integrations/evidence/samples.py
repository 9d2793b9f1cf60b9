"""Several sampled answers of the proxy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from rgate_integrations.decision import Cost, Draft
from rgate_integrations.evidence.base import Context, EvidenceSpec, Piece
from rgate_integrations.evidence.draft import questions_as_values
from rgate_integrations.prompts import SHORT_ANSWER, PromptTemplate

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
