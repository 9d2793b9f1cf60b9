"""The question in what a client sends: a text, a mapping with one, or messages in OpenAI's format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

QUESTION_KEYS = ("question", "input", "query", "messages")
_SPEAKERS = ("user", "assistant")


@dataclass(frozen=True)
class Asked:
    """A question and what was said before it.

    Attributes:
        question: The question.
        history: The earlier turns, oldest first, as gates read them: ``user: …`` and ``assistant: …``.
        place: Place of its message among the messages; -1 where there are none.
    """

    question: str
    history: tuple[str, ...] = ()
    place: int = -1

    @property
    def search_text(self) -> str:
        """What to search for: of a question that follows on others, also the last thing that the user said."""
        said = [turn for turn in self.history if turn.startswith("user: ")]
        return f"{said[-1].removeprefix('user: ')}\n{self.question}" if said else self.question


def question_in(state: object) -> Asked | None:
    """Return the question in a text, in a mapping under one of `QUESTION_KEYS`, or in messages; None without any."""
    if isinstance(state, str):
        return Asked(state)
    if isinstance(state, Mapping):
        for key in QUESTION_KEYS:
            if key in state:
                return question_in(state[key])
        return None
    return question_in_messages(state)


def question_in_messages(messages: object) -> Asked | None:
    """Return the question of a conversation: its last message, if that is the user's and is text alone."""
    if not isinstance(messages, list) or not messages:
        return None
    last = messages[-1]
    question = _text(last) if isinstance(last, Mapping) and last.get("role") == "user" else None
    if question is None:
        return None
    turns = []
    for message in messages[:-1]:
        # System messages and the results of tools were not said by anybody.
        if isinstance(message, Mapping) and message.get("role") in _SPEAKERS:
            text = _text(message)
            if text:
                turns.append(f"{message['role']}: {text}")
    return Asked(question, tuple(turns), place=len(messages) - 1)


def _text(message: Mapping[str, Any]) -> str | None:
    """Return the text of a message; None where it is, or holds, something else, such as an image."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        return None
    texts = []
    for part in content:
        if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
            return None
        texts.append(part["text"])
    return "\n".join(texts)
