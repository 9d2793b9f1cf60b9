"""A short completion of a prompt other than the plain answer prompt, such as a verdict."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rgate_integrations.decision import Cost, Draft
from rgate_integrations.evidence.base import Context, EvidenceSpec, Piece
from rgate_integrations.evidence.draft import DraftSpec, quoted_values
from rgate_integrations.prompts import PromptTemplate


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
