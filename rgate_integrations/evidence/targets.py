"""Log-probabilities of fixed continuations of a prompt, such as "Yes" and "No"."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from rgate_integrations.decision import Cost, Draft
from rgate_integrations.evidence.base import Context, EvidenceSpec, Piece
from rgate_integrations.evidence.draft import DraftSpec, WrittenWithDraft, is_that_draft, quoted_values
from rgate_integrations.models.base import Proxy, TargetScores, Values
from rgate_integrations.prompts import PromptTemplate

LogProbabilities: TypeAlias = tuple[float, ...]


@dataclass(frozen=True)
class TargetsSpec(WrittenWithDraft[LogProbabilities]):
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
        return [_piece(each) for each in scores]

    def comes_with(self, draft: DraftSpec) -> bool:
        """Return whether the prompt is a further turn of the conversation in which that draft is written."""
        return self.prompt.follows(draft.prompt) and is_that_draft(self.draft, draft)

    def write(
        self, draft: DraftSpec, proxy: Proxy, values: Sequence[Values]
    ) -> tuple[list[Draft], list[Piece[LogProbabilities]]]:
        """Write the drafts, and score the targets on their keys and values."""
        both = proxy.generate_scored(
            draft.prompt,
            values,
            tokens=draft.tokens,
            follow_up=self.prompt,
            targets=self.targets,
            adapter=self.adapter,
        )
        return [written for written, _ in both], [_piece(scores) for _, scores in both]


def _piece(scores: TargetScores) -> Piece[LogProbabilities]:
    return Piece(scores.logprobs, Cost(model_calls=1, tokens_in=scores.prompt_tokens))
