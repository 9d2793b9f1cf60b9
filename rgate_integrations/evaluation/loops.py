"""Answer loops of the papers as baselines: the LLM is asked and the corpus searched by turns, without a gate."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

Ask: TypeAlias = Callable[[str], str]
"""Lets the LLM continue a prompt."""
Search: TypeAlias = Callable[[str], Sequence[str]]
"""Returns passages for a query, the best first."""

_FOLLOW_UP = re.compile(r"follow up:(?P<question>[^\n]*)", re.IGNORECASE)
_FINAL = re.compile(r"so the final answer is:(?P<answer>[^\n]*)", re.IGNORECASE)
_INTERMEDIATE = "\nIntermediate answer:"


@dataclass(frozen=True)
class LoopAnswer:
    """What a loop came to.

    Attributes:
        answer: The answer; empty if the LLM gave none.
        queries: What was searched for, in order.
        calls: How often the LLM was asked.
    """

    answer: str
    queries: tuple[str, ...]
    calls: int


SELF_ASK_EXAMPLE = """Question: Who lived longer, Theodor Haecker or Harry Vaughan Watkins?
Are follow up questions needed here: Yes.
Follow up: How old was Theodor Haecker when he died?
Intermediate answer: Theodor Haecker was 65 years old when he died.
Follow up: How old was Harry Vaughan Watkins when he died?
Intermediate answer: Harry Vaughan Watkins was 69 years old when he died.
So the final answer is: Harry Vaughan Watkins.
"""
"""The first example of the paper's prompt (Press et al. 2023, figure 3)."""


def self_ask(
    question: str, ask: Ask, search: Search, *, hops: int = 4, example: str = SELF_ASK_EXAMPLE
) -> LoopAnswer:
    """Answer by Self-Ask with search (Press et al. 2023): each follow-up that the LLM asks is answered by a search.

    The LLM's own intermediate answers are thrown away: the best passage stands in their place.

    Args:
        question: The question.
        ask: Lets the LLM continue a prompt; it may write more than is taken of it.
        search: Searches for a follow-up question.
        hops: Maximum number of follow-ups, at least 0; then the final answer is asked for.
        example: Worked examples that the prompt begins with.
    """
    prompt = f"{example}\nQuestion: {question}\nAre follow up questions needed here:"
    queries: list[str] = []
    for call in range(1, hops + 2):
        written = ask(prompt)
        follow_up, final = _FOLLOW_UP.search(written), _FINAL.search(written)
        asks_first = follow_up is not None and (final is None or follow_up.start() < final.start())
        if follow_up is None or not asks_first or call > hops:
            if final is not None:
                return LoopAnswer(final["answer"].strip(), tuple(queries), call)
            prompt += f"{written.rstrip()}\nSo the final answer is:"
            return LoopAnswer(_first_line(ask(prompt)), tuple(queries), call + 1)
        query = follow_up["question"].strip()
        queries.append(query)
        found = search(query)
        passage = found[0] if found else "Nothing was found."
        prompt += f"{written[: follow_up.end()]}{_INTERMEDIATE} {passage}\n"
    raise AssertionError("the last round returns")


def iter_retgen(question: str, ask: Ask, search: Search, *, rounds: int = 2, passages: int = 5) -> LoopAnswer:
    """Answer by ITER-RETGEN (Shao et al. 2023): each round searches for the question with the last round's answer.

    Args:
        question: The question.
        ask: Lets the LLM continue a prompt.
        search: Searches for a query.
        rounds: How often is searched and answered, at least 1; the paper finds little after the second.
        passages: How many passages are read in each round.
    """
    queries: list[str] = []
    answer = ""
    for _ in range(rounds):
        queries.append(f"{question} {answer}".strip())
        found = list(search(queries[-1]))[:passages]
        context = "\n\n".join(found)
        answer = ask(f"{context}\n\nQuestion: {question}\nAnswer:").strip()
    return LoopAnswer(answer, tuple(queries), rounds)


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0].strip()
