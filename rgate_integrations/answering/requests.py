"""What the answering LLM is asked: closed book, with passages, or to go on with a draft of its own.

`answer_all` answers a batch. `AnswerRequest` is one question of it, for callers that want the two arms apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rgate_integrations.decision import Decision, Draft
from rgate_integrations.models.base import Proxy
from rgate_integrations.prompts import (
    ANSWER,
    ANSWER_CONTINUED,
    ANSWER_WITH_PASSAGES,
    PromptTemplate,
    TitledText,
    format_passages,
)


def answer_all(
    llm: Proxy, decisions: Sequence[Decision], passages: Sequence[Sequence[TitledText]], *, tokens: int = 64
) -> list[str]:
    """Answer questions, each with its passages if there are any; one batch for each kind of request.

    A draft that this very LLM wrote is the answer, or its beginning if it was cut: nothing is generated twice.

    Args:
        llm: The answering LLM.
        decisions: Decisions of a gate.
        passages: Passages for each decision; none for those to be answered closed book.
        tokens: Maximum length of an answer, a draft that is continued included.

    Returns:
        One answer a decision, in order.
    """
    requests = []
    for decision, found in zip(decisions, passages, strict=True):
        requests.append(AnswerRequest.of(decision, found, llm.name, tokens))
    answers = []
    for request, written in zip(requests, write_answers(llm, requests), strict=True):
        answers.append(request.whole_answer(written))
    return answers


@dataclass(frozen=True)
class AnswerRequest:
    """What an LLM is asked for one answer.

    Attributes:
        prompt: The prompt.
        values: Its fields.
        tokens: Maximum number of tokens to write, at least 0.
        prefix: The part of the answer that is written already.
    """

    prompt: PromptTemplate
    values: Mapping[str, str]
    tokens: int
    prefix: str = ""

    @classmethod
    def of(
        cls, decision: Decision, passages: Sequence[TitledText], llm: str, tokens: int = 64
    ) -> AnswerRequest:
        """Return the request that a decision leads to, for the LLM of that name."""
        if passages:
            return cls.with_passages(decision.question, passages, tokens)
        draft = decision.draft
        if draft is not None and draft.text and draft.model == llm:
            return cls.continuing(decision.question, draft, tokens)
        return cls.closed_book(decision.question, tokens)

    @classmethod
    def closed_book(cls, question: str, tokens: int = 64) -> AnswerRequest:
        """Ask for an answer without passages."""
        return cls(ANSWER, {"question": question}, tokens)

    @classmethod
    def with_passages(cls, question: str, passages: Sequence[TitledText], tokens: int = 64) -> AnswerRequest:
        """Ask for an answer from passages."""
        values = {"question": question, "passages": format_passages(passages)}
        return cls(ANSWER_WITH_PASSAGES, values, tokens)

    @classmethod
    def continuing(cls, question: str, draft: Draft, tokens: int = 64) -> AnswerRequest:
        """Ask for the rest of a draft that the LLM wrote itself; nothing is left to write when it is finished."""
        left = 0 if draft.finished else max(tokens - len(draft.tokens), 0)
        values = {"question": question, "draft": draft.text}
        return cls(ANSWER_CONTINUED, values, left, prefix=draft.text)

    def whole_answer(self, written: Draft) -> str:
        """Return the answer, given what the LLM wrote."""
        if not self.prefix:
            return written.text
        if not written.tokens:
            return f"{self.prefix} {written.text}".strip()
        # The text of a draft is stripped; its tokens still have the space between the two parts.
        return self.prefix + "".join(written.tokens)


def write_answers(llm: Proxy, requests: Sequence[AnswerRequest]) -> list[Draft]:
    """Let an LLM write what is asked for: one batch for all requests of the same prompt and length.

    Returns:
        What it wrote for each request, in order, without the `AnswerRequest.prefix`.
    """
    written = [Draft(text="", model=llm.name) for _ in requests]
    batches: dict[tuple[PromptTemplate, int], list[int]] = {}
    for position, request in enumerate(requests):
        if request.tokens > 0:
            batches.setdefault((request.prompt, request.tokens), []).append(position)
    for (prompt, tokens), positions in batches.items():
        values = [requests[position].values for position in positions]
        for position, draft in zip(positions, llm.generate(prompt, values, tokens=tokens), strict=True):
            written[position] = draft
    return written
