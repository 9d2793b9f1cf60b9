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
    batches: dict[PromptTemplate, list[int]] = {}
    for index, texts in enumerate(passages):
        batches.setdefault(ANSWER_WITH_PASSAGES if texts else prompt, []).append(index)
    answers: dict[int, Draft] = {}
    for template, indices in batches.items():
        values = []
        for index in indices:
            fields = {"question": questions[index]}
            if passages[index]:
                fields["passages"] = format_passages(passages[index])
            values.append(fields)
        answers.update(zip(indices, llm.generate(template, values, tokens=tokens), strict=True))
    return [answers[index] for index in range(len(questions))]
