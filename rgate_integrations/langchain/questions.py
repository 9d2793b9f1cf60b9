"""The question in whatever a LangChain runnable is given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from langchain_core.messages import BaseMessage, HumanMessage
from langchain_core.prompt_values import PromptValue

from rgate_integrations.errors import InvalidQuestionError

QUESTION_KEYS = ("question", "input", "query", "messages")


def question_of(value: Any, input_key: str | None = None) -> str:
    """Return the question in a string, a mapping, messages, or a prompt value.

    Args:
        value: The runnable's input. Of messages, the last human one is the question.
        input_key: Key of the question in a mapping; by default the first of `QUESTION_KEYS` that is there.

    Raises:
        InvalidQuestionError: There is no question in it.
    """
    if isinstance(value, str):
        return value
    if isinstance(value, PromptValue):
        return _last_human(value.to_messages())
    if isinstance(value, BaseMessage):
        return value.text
    if isinstance(value, Mapping):
        key = input_key or next((k for k in QUESTION_KEYS if k in value), None)
        if key is None or key not in value:
            raise InvalidQuestionError(
                f"The input has no key {input_key or ' or '.join(map(repr, QUESTION_KEYS))}; "
                f"it has: {', '.join(map(repr, value)) or 'none'}.",
                hint='Name the key of the question: RetrievalGate(input_key="...").',
            )
        return question_of(value[key])
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return _last_human(value)
    raise InvalidQuestionError(
        f"A question cannot be read from {type(value).__name__}.",
        hint="Pass a string, a dict with the question, or messages.",
    )


def history_of(value: Any, input_key: str | None = None) -> list[Any]:
    """Return the messages in an input, or none: earlier turns and the question, in order."""
    if isinstance(value, PromptValue):
        return list(value.to_messages())
    if isinstance(value, Mapping):
        key = input_key or next((k for k in QUESTION_KEYS if k in value), None)
        return history_of(value[key]) if key is not None and key in value else []
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return list(value)
    return []


def is_follow_up(value: Any, input_key: str | None = None) -> bool:
    """Whether an input holds earlier human turns before the question."""
    return sum(_human(m) is not None for m in history_of(value, input_key)) > 1


def _last_human(messages: Sequence[Any]) -> str:
    for message in reversed(messages):
        text = _human(message)
        if text is not None:
            return text
    raise InvalidQuestionError(
        "There is no human message among the messages.", hint="The last one is the question."
    )


def _human(message: Any) -> str | None:
    """Return the text of a human message, in any of LangChain's spellings; None for any other."""
    if isinstance(message, HumanMessage):
        return message.text
    if isinstance(message, tuple | list) and len(message) == 2 and message[0] in ("human", "user"):
        return str(message[1])
    if isinstance(message, Mapping) and message.get("role") in ("human", "user"):
        return str(message.get("content", ""))
    return None
