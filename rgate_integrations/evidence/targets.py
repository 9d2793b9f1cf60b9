"""Log-probabilities of fixed continuations of a prompt, such as "Yes" and "No"."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

from rgate_integrations.decision import Cost
from rgate_integrations.evidence.base import Context, EvidenceSpec, Piece
from rgate_integrations.evidence.draft import DraftSpec, quoted_values
from rgate_integrations.prompts import PromptTemplate

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
