"""Drafts: the first tokens of an answer, written by the proxy or by the answering LLM, or given by the caller."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from rgate_integrations.decision import MAX_TOKEN_CHARACTERS, Cost, Draft, DraftSource
from rgate_integrations.errors import EvidenceError
from rgate_integrations.gates.evidence.base import Context, EvidenceSpec, Piece
from rgate_integrations.models.proxies import language_model
from rgate_integrations.prompts import ANSWER, PromptTemplate


@dataclass(frozen=True)
class DraftSpec(EvidenceSpec[Draft]):
    """The first tokens of an answer.

    A greedy draft of n tokens begins with the greedy draft of fewer. So drafts that differ in length only are one
    piece, written once at the maximum length that is planned, and each gate takes its part of it.

    Attributes:
        tokens: Maximum number of tokens, at least 1.
        source: Who writes it: the proxy or the answering LLM; a ``recorded`` one must be given.
        prompt: The prompt that the drafting model is given; not used for recorded drafts.
        model: The proxy that writes, or whose tokens count; that of the gate that decides unless given.
    """

    reads_draft: ClassVar[bool] = True

    tokens: int = 32
    source: DraftSource = "proxy"
    prompt: PromptTemplate = ANSWER
    model: str = ""

    def compute(self, context: Context) -> list[Piece[Draft]]:
        """Take given drafts and write the others."""
        unwritten = [each for each in context.evidence if each.request.draft is None]
        written = iter(self._write(context.part(unwritten)) if unwritten else ())
        pieces = []
        for each in context.requests:
            if each.draft is not None:
                pieces.append(Piece(self._beginning_of(each.draft, context)))
                continue
            draft = next(written)
            # An LLM may write more than it is asked for.
            pieces.append(Piece(draft.head(self.tokens), generation_cost([draft])))
        return pieces

    def _beginning_of(self, given: Draft, context: Context) -> Draft:
        """Cut a given draft; bare text is counted in the proxy's tokens, as it was in training."""
        if given.tokens or given.logprobs is not None or len(given.text) <= self.tokens:
            return given.head(self.tokens)
        # A part of it first: counting the tokens of a whole book takes minutes.
        part = given.text[: self.tokens * MAX_TOKEN_CHARACTERS]
        text = context.sources.proxy(self.model).truncate(part, self.tokens) or part
        if text != given.text:
            given = given.model_copy(update={"text": text.strip(), "finished": False})
        return given.head(self.tokens)

    def _write(self, context: Context) -> Sequence[Draft]:
        if self.source == "recorded":
            raise EvidenceError(
                "This gate judges recorded drafts, and none was given.",
                hint="Pass drafts=[...] to decide_batch, or load the gate with source='proxy'.",
            )
        if self.source == "llm":
            if context.sources.llm is None:
                raise EvidenceError(
                    "This gate judges the LLM's own first tokens, and it has no LLM.",
                    hint="Load it with llm=..., pass drafts=[...], or load it with source='proxy'.",
                )
            questions = [each.question for each in context.requests]
            drafts = context.sources.llm.draft(questions, self.tokens)
            if len(drafts) != len(questions):
                raise EvidenceError(f"The LLM wrote {len(drafts)} drafts for {len(questions)} questions.")
            return [draft.model_copy(update={"source": "llm"}) for draft in drafts]
        return language_model(context.use_proxy(self.model)).generate(
            self.prompt, prompt_values(context), tokens=self.tokens
        )


def generation_cost(drafts: Sequence[Draft]) -> Cost:
    """Return what texts cost that were written to one question."""
    cost = Cost()
    for draft in drafts:
        written = len(draft.tokens) or len(draft.text.split())  # where the LLM gives no tokens
        written += draft.thinking_tokens
        cost += Cost(model_calls=1, tokens_in=draft.prompt_tokens, tokens_out=written)
    return cost


def prompt_values(context: Context, draft: DraftSpec | None = None) -> list[dict[str, str]]:
    """Return a prompt's fields for each question, with its draft if the prompt quotes one."""
    values = [{"question": each.question} for each in context.requests]
    if draft is not None:
        for fields, each in zip(values, context.get(draft), strict=True):
            fields["draft"] = each.text
    return values
