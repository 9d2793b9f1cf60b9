"""Lets an LLM answer questions, with or without passages."""

from __future__ import annotations

from collections.abc import Sequence

from rgate_integrations.decision import Draft
from rgate_integrations.models.base import LanguageModel
from rgate_integrations.prompts import (
    ANSWER,
    ANSWER_WITH_PASSAGES,
    PromptTemplate,
    TitledText,
    format_passages,
)


def write_answers(
    llm: LanguageModel,
    questions: Sequence[str],
    passages: Sequence[Sequence[TitledText]],
    *,
    tokens: int = 64,
    prompt: PromptTemplate = ANSWER,
) -> list[Draft]:
    """Let an LLM answer questions: those with passages in one batch, the others in another.

    Args:
        llm: The answering LLM.
        questions: The questions.
        passages: Passages for each question; an empty sequence for an answer without passages.
        tokens: Maximum number of tokens of an answer, at least 1.
        prompt: The prompt for questions without passages; it has the field ``question``.

    Returns:
        One answer per question, in order.
    """
    # A model call has a single template, so questions are grouped by it.
    batches: dict[PromptTemplate, dict[int, dict[str, str]]] = {}
    for index, (question, texts) in enumerate(zip(questions, passages, strict=True)):
        values = {"question": question}
        if texts:
            values["passages"] = format_passages(texts)
        batches.setdefault(ANSWER_WITH_PASSAGES if texts else prompt, {})[index] = values
    answers: dict[int, Draft] = {}
    for template, batch in batches.items():
        answers.update(zip(batch, llm.generate(template, list(batch.values()), tokens=tokens), strict=True))
    return [answers[index] for index in range(len(questions))]
