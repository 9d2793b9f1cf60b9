"""From question and draft to claims with queries: by sentence, by prompting a model, or by a trained adapter."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TypeAlias

from rgate_integrations.claims.format import Claim, parse_claims, without_tags
from rgate_integrations.claims.sentences import sentence_claims
from rgate_integrations.decision import Draft
from rgate_integrations.models.base import Proxy
from rgate_integrations.prompts import PromptTemplate

_log = logging.getLogger("rgate_integrations")

REWRITE = PromptTemplate(
    name="slimplm-rewrite",
    version=1,
    system=(
        "You are a helpful assistant. Your task is to parse user input into structured formats and accomplish "
        "the task according to the heuristic answer."
    ),
    user="Heuristic answer: {draft}\nQuestion: {question}\nQuery Rewrite Output:",
    cut="draft",
)
"""The paper's prompt, section 3.3: what a trained rewriter sees."""

REWRITE_FEW_SHOT = PromptTemplate(
    name="slimplm-rewrite-few-shot",
    version=1,
    system=(
        "Split the heuristic answer into brief, self-contained claims and give each a search query that checks it. "
        "Write nothing but <Claim> and <Query> tags."
    ),
    user=REWRITE.user,
    examples=(
        (
            REWRITE.user.format(
                draft="Hamlet was written by William Shakespeare. It was first printed in 1603.",
                question="who wrote hamlet and when was it printed?",
            ),
            "<Claim> Hamlet was written by William Shakespeare. <Query> author of Hamlet "
            "<Claim> Hamlet was first printed in 1603. <Query> Hamlet first printed edition year",
        ),
        (
            REWRITE.user.format(
                draft="The Danube flows through ten countries.",
                question="How many countries does the Danube cross?",
            ),
            "<Claim> The Danube flows through ten countries. <Query> Danube number of countries",
        ),
    ),
    cut="draft",
)


Rewriter: TypeAlias = Callable[[Sequence[str], Sequence[Draft | None]], list[list[Claim]]]
"""Turns questions and drafts into claims, one list a question, which may be empty; one call serves a batch."""


def rewrite_by_sentence(questions: Sequence[str], drafts: Sequence[Draft | None]) -> list[list[Claim]]:
    """Make sentences of the drafts self-contained; deterministic, needs no model. The default."""
    return list(map(sentence_claims, questions, drafts))


class ModelRewriter:
    """SlimPLM's query rewriter (section 3.3): a model writes claims and queries in one round.

    Output that holds no readable claim falls back to `rewrite_by_sentence` for that question. A question without a
    draft has no claims, and the model is not asked.

    Args:
        proxy: The model. Prompting needs one of 1B or more; smaller ones want an adapter.
        adapter: LoRA adapter of a trained rewriter (then the paper's own prompt is used), or None to prompt
            with examples.
        tokens: Maximum length of the output.
    """

    def __init__(self, proxy: Proxy, *, adapter: str | None = None, tokens: int = 256) -> None:
        self.proxy = proxy
        self.adapter = adapter
        self.tokens = tokens
        self.prompt = REWRITE if adapter else REWRITE_FEW_SHOT

    def __call__(self, questions: Sequence[str], drafts: Sequence[Draft | None]) -> list[list[Claim]]:
        """Rewrite with the model, falling back sentence by sentence where it failed."""
        found: list[list[Claim]] = [[] for _ in questions]
        drafted = {place: draft for place, draft in enumerate(drafts) if draft is not None}
        if not drafted:
            return found
        values = []
        for place, draft in drafted.items():
            # What is quoted must plant no claims.
            values.append({"question": without_tags(questions[place]), "draft": without_tags(draft.text)})
        outputs = self.proxy.generate(self.prompt, values, tokens=self.tokens, adapter=self.adapter)
        for (place, draft), output in zip(drafted.items(), outputs, strict=True):
            found[place] = [claim for claim in parse_claims(output.text) if claim.query]
            if not found[place]:
                question = questions[place]
                _log.info("The rewriter wrote no readable claim for %r: splitting sentences.", question[:80])
                found[place] = sentence_claims(question, draft)
        return found
