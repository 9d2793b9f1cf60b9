"""Drafts: the first tokens of an answer, by the proxy, by the answering LLM, or from the caller."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from rgate_integrations.decision import MAX_TOKEN_CHARACTERS, Cost, Draft, DraftSource
from rgate_integrations.errors import EvidenceError
from rgate_integrations.gates.evidence.base import Context, EvidenceSpec, Piece
from rgate_integrations.models.proxies import language_model
from rgate_integrations.prompts import ANSWER, PromptTemplate
from rgate_integrations.runtime.segments import count_words


@dataclass(frozen=True)
class DraftSpec(EvidenceSpec[Draft]):
    """Evidence: the first tokens of an answer.

    A draft from the caller is used whatever the source. Drafts of more than ``tokens`` tokens are cut.

    Attributes:
        tokens: Maximum number of tokens, at least 1.
        source: Who writes it if the caller gives none: ``"proxy"``, a small model, or ``"llm"``, the answering LLM.
            With ``"recorded"``, a request without a draft fails.
        prompt: The proxy's prompt; unused for other sources.
        model: Name of the proxy model that writes the draft if ``source`` is ``"proxy"``; its tokenizer also cuts the
            caller's text to ``tokens``. Empty for the gate's own.
    """

    reads_draft: ClassVar[bool] = True

    tokens: int = 32
    source: DraftSource = "proxy"
    prompt: PromptTemplate = ANSWER
    model: str = ""

    def compute(self, context: Context) -> list[Piece[Draft]]:
        """Return the caller's draft or a new one for each request."""
        unwritten = [evidence for evidence in context.evidence if evidence.request.draft is None]
        written = iter(self._write(replace(context, evidence=unwritten)) if unwritten else ())
        pieces = []
        for request in context.requests:
            if request.draft is None:
                draft = next(written)  # an LLM may write more than requested
                pieces.append(Piece(draft.head(self.tokens), generation_cost(draft)))
            else:
                pieces.append(Piece(self._cut(request.draft, context).head(self.tokens)))
        return pieces

    def _cut(self, draft: Draft, context: Context) -> Draft:
        """Return a caller's draft. If it is only a text, cut it to ``tokens`` tokens of the proxy, as in training."""
        # For a text of at most `tokens` characters, it is not worth loading a tokenizer.
        if not draft.tokens and draft.logprobs is None and len(draft.text) > self.tokens:
            # Only a part, because tokenizing a book takes minutes.
            part = draft.text[: self.tokens * MAX_TOKEN_CHARACTERS]
            text = context.sources.proxy(self.model).truncate(part, self.tokens) or part
            if text != draft.text:
                draft = draft.model_copy(update={"text": text.strip(), "finished": False})
        return draft

    def _write(self, context: Context) -> Sequence[Draft]:
        if self.source == "proxy":
            return language_model(context.use_proxy(self.model)).generate(
                self.prompt, prompt_values(context), tokens=self.tokens
            )
        if self.source == "recorded":
            raise EvidenceError(
                "This gate judges recorded drafts, but the request has no draft.",
                hint="Pass the beginning of an answer: Request(question, draft=...). For rgate evaluate and "
                "calibrate, use --draft recorded.",
            )
        if context.sources.llm is None:
            raise EvidenceError(
                "This gate judges the beginning of the LLM's answer, but it has neither an LLM nor a draft.",
                hint="Load it with load_gate(..., llm=...), or pass Request(question, draft=...). For rgate evaluate "
                "and calibrate, use --draft recorded.",
            )
        drafts = context.sources.llm.draft([request.question for request in context.requests], self.tokens)
        if len(drafts) != len(context.requests):
            raise EvidenceError(
                f"llm.draft() returned {len(drafts)} drafts for {len(context.requests)} questions.",
                hint="It must return one draft per question.",
            )
        return [draft.model_copy(update={"source": "llm"}) for draft in drafts]


def generation_cost(draft: Draft) -> Cost:
    """Return the cost of a text that was generated for a question."""
    written = len(draft.tokens) or count_words(draft.text)  # some LLMs report no tokens
    return Cost(model_calls=1, tokens_in=draft.prompt_tokens, tokens_out=written + draft.thinking_tokens)


def prompt_values(context: Context, draft: DraftSpec | None = None) -> list[dict[str, str]]:
    """Return the values of a prompt's fields for each question, with its draft if ``draft`` is given."""
    questions = [request.question for request in context.requests]
    if draft is None:
        return [{"question": question} for question in questions]
    pairs = zip(questions, context.get(draft), strict=True)
    return [{"question": question, "draft": answer.text} for question, answer in pairs]
