"""The answering LLM of the command line and the demo: closed book, or with passages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from rgate_integrations.decision import Decision, Draft
from rgate_integrations.prompts import ANSWER, ANSWER_CONTINUED, ANSWER_WITH_PASSAGES
from rgate_integrations.proxy.base import Proxy


class Found(Protocol):
    """A passage as an answer needs it."""

    @property
    def title(self) -> str: ...  # noqa: D102

    @property
    def text(self) -> str: ...  # noqa: D102


def answer_all(
    llm: Proxy, decisions: Sequence[Decision], passages: Sequence[Sequence[Found]], *, tokens: int = 64
) -> list[str]:
    """Answer questions, each with its passages if there are any; one batch for each of the two ways.

    A draft that this very LLM wrote is the answer, or its beginning if it was cut: nothing is generated twice.

    Args:
        llm: The answering LLM.
        decisions: Decisions of a gate.
        passages: Passages for each decision; none for those to be answered closed book.
        tokens: Greatest length of an answer.

    Returns:
        One answer a decision, in order.
    """
    answers: dict[int, str] = {}
    open_book = [i for i, found in enumerate(passages) if found]
    begun: list[tuple[int, Draft]] = []
    closed_book: list[int] = []
    for i, decision in enumerate(decisions):
        draft = decision.draft
        if passages[i]:
            continue
        if draft is None or draft.model != llm.name or not draft.text:
            closed_book.append(i)
        elif draft.finished or len(draft.tokens) >= tokens:
            answers[i] = draft.text
        else:
            begun.append((i, draft))
    direct = llm.generate(ANSWER, [{"question": decisions[i].question} for i in closed_book], tokens=tokens)
    rest = llm.generate(
        ANSWER_CONTINUED,
        [{"question": decisions[i].question, "draft": draft.text} for i, draft in begun],
        tokens=max((tokens - len(draft.tokens) for _, draft in begun), default=0),
    )
    values = [{"question": decisions[i].question, "passages": _as_text(passages[i])} for i in open_book]
    read = llm.generate(ANSWER_WITH_PASSAGES, values, tokens=tokens)
    answers.update({i: d.text for i, d in zip([*closed_book, *open_book], [*direct, *read], strict=True)})
    answers.update({i: draft.text + "".join(d.tokens) for (i, draft), d in zip(begun, rest, strict=True)})
    return [answers[i] for i in range(len(decisions))]


def _as_text(passages: Sequence[Found]) -> str:
    return "\n\n".join(
        f"[{n}] {p.title}: {p.text}" if p.title else f"[{n}] {p.text}" for n, p in enumerate(passages, 1)
    )
