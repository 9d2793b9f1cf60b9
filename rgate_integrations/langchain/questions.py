"""The question in whatever a LangChain runnable is given."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from langchain_core.messages import BaseMessage, HumanMessage
from langchain_core.prompt_values import PromptValue

from rgate_integrations.decision import Decision
from rgate_integrations.errors import InvalidQuestionError

_log = logging.getLogger("rgate_integrations")

QUESTION_KEYS = ("question", "input", "query", "messages")
FOLLOW_UP = (
    "The question follows earlier turns, which the gate did not see: give RetrievalGate(condense=...)."
)


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
        return question_of(value[_key_in(value, input_key)])
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return _last_human(value)
    raise InvalidQuestionError(
        f"A question cannot be read from {type(value).__name__}.",
        hint="Pass a string, a dict with the question, or messages.",
    )


def history_of(value: Any, input_key: str | None = None) -> list[Any]:
    """Return the messages in an input, or none: earlier turns and the question, in order.

    Raises:
        InvalidQuestionError: It is a mapping without the key of a question.
    """
    if isinstance(value, PromptValue):
        return list(value.to_messages())
    if isinstance(value, Mapping):
        return history_of(value[_key_in(value, input_key)])
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return list(value)
    return []


def is_follow_up(value: Any, input_key: str | None = None) -> bool:
    """Whether an input holds earlier human turns before the question."""
    human_turns = [message for message in history_of(value, input_key) if _human(message) is not None]
    return len(human_turns) > 1


@dataclass
class Questions:
    """The questions of a batch of inputs, each under its place in the batch.

    Attributes:
        texts: The questions that could be read.
        errors: Why the others could not.
        follow_ups: Places of the questions that follow earlier turns which the gate will not see.
    """

    texts: dict[int, str] = field(default_factory=dict)
    errors: dict[int, InvalidQuestionError] = field(default_factory=dict)
    follow_ups: list[int] = field(default_factory=list)

    @classmethod
    def read(cls, inputs: Sequence[Any], input_key: str | None) -> Questions:
        """Read the question in each input."""
        questions = cls()
        for place, value in enumerate(inputs):
            try:
                questions.texts[place] = question_of(value, input_key)
            except InvalidQuestionError as error:
                questions.errors[place] = error
                continue
            if is_follow_up(value, input_key):
                questions.follow_ups.append(place)
        return questions

    def condense(self, rewritten: Sequence[Any]) -> None:
        """Take the condensed form of each follow-up; where there is none the question stays as it is, and marked.

        Args:
            rewritten: For each of `follow_ups` what the condensing runnable returned, or its exception.
        """
        left = []
        for place, value in zip(self.follow_ups, rewritten, strict=True):
            try:
                if isinstance(value, Exception):
                    raise value
                self.texts[place] = question_of(value)
            except Exception as error:
                _log.warning("A follow-up could not be condensed: %s: %s", type(error).__name__, error)
                left.append(place)
        self.follow_ups = left

    def results(self, decisions: Sequence[Decision]) -> list[Decision | Exception]:
        """Put the decisions, one for each of `texts`, in the places of their inputs, and the errors in theirs."""
        found: dict[int, Decision | Exception] = dict(self.errors)
        found.update(zip(self.texts, decisions, strict=True))
        for place in self.follow_ups:
            decision = found[place]
            if isinstance(decision, Decision):
                warnings = (*decision.warnings, FOLLOW_UP)
                found[place] = decision.model_copy(update={"warnings": warnings})
        return [found[place] for place in range(len(found))]


def _key_in(value: Mapping[Any, Any], input_key: str | None) -> Any:
    """Return the key of the question in a mapping."""
    candidates = QUESTION_KEYS if input_key is None else (input_key,)
    for key in candidates:
        if key in value:
            return key
    wanted = " or ".join(map(repr, QUESTION_KEYS)) if input_key is None else input_key
    raise InvalidQuestionError(
        f"The input has no key {wanted}; it has: {', '.join(map(repr, value)) or 'none'}.",
        hint='Name the key of the question: RetrievalGate(input_key="...").',
    )


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
