"""Drafts to train on: the proxy's own, written once and kept, or what the LLM is recorded to have written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

from rgate_integrations.decision import Draft
from rgate_integrations.errors import ConfigurationError, DataFormatError
from rgate_integrations.models.base import Proxy
from rgate_integrations.prompts import ANSWER, PromptTemplate
from rgate_integrations.training.examples import Example
from rgate_integrations.tuning.arms import ModelArm
from rgate_integrations.tuning.collection import Progress, cached_answers, silent
from rgate_integrations.tuning.questions import Question

DraftKind = Literal["proxy", "recorded", "none"]
"""Whose drafts are read: the proxy's own, what the LLM is recorded to have written, or none: the question alone."""


def valid_draft_kind(kind: str) -> None:
    """Check a kind of draft that a user gave.

    Raises:
        ConfigurationError: It is none.
    """
    if kind not in get_args(DraftKind):
        raise ConfigurationError(f"draft must be proxy, recorded or none, not {kind!r}.")


def drafts_for(
    proxy: Proxy,
    examples: Sequence[Example],
    kind: DraftKind,
    tokens: int,
    progress: Progress = silent,
    prompt: PromptTemplate = ANSWER,
) -> list[Draft] | None:
    """Return a draft an example, or None for the question alone.

    Raises:
        DataFormatError: Recorded drafts are asked for, and some examples have none.
    """
    valid_draft_kind(kind)
    if kind == "none":
        return None
    if kind == "proxy":
        return cached_drafts(proxy, [e.question for e in examples], tokens, progress, prompt)
    if not all(e.text for e in examples):
        raise DataFormatError("Some questions have no closed_book_text.", hint='Use draft="proxy" or "none".')
    return [recorded_draft(proxy, e.text, tokens) for e in examples]


def cached_drafts(
    proxy: Proxy,
    questions: Sequence[str],
    tokens: int,
    progress: Progress = silent,
    prompt: PromptTemplate = ANSWER,
) -> list[Draft]:
    """Return the proxy's drafts, which are kept in a file of the cache: a restart continues where it was."""
    arm = ModelArm(proxy, tokens=tokens, prompt=prompt)
    asked = [Question(text) for text in questions]
    answers = cached_answers("drafts", {"direct": arm}, asked, progress)
    drafts = [answers.answer_of(question, "direct") for question in asked]
    return [draft for draft in drafts if draft is not None]  # none is missing: that is an error above


def recorded_draft(proxy: Proxy, text: str, tokens: int) -> Draft:
    """Return the first tokens of a recorded text, counted by the proxy's tokenizer."""
    head = proxy.truncate(text, tokens)
    return Draft(text=(head or text).strip(), source="recorded", finished=head is None)
