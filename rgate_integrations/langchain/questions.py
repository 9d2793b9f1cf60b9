"""Finds the question and the earlier turns in a runnable's input."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from typing import Any, TypeAlias

from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    ChatMessage,
    HumanMessage,
    SystemMessage,
    convert_to_messages,
)
from langchain_core.prompt_values import PromptValue
from pydantic import BaseModel

from rgate_integrations.errors import InvalidQuestionError, first_line
from rgate_integrations.runtime.segments import label_turns, split_history
from rgate_integrations.runtime.text import encodable

QuestionInput: TypeAlias = str | PromptValue | BaseMessage | Mapping[str, Any] | Sequence[Any]
"""Text, a prompt value, a message, messages, or a mapping with any of these."""

QUESTION_KEYS = ("question", "input", "query", "messages")
HISTORY_KEYS = ("chat_history", "history")


@dataclass(frozen=True)
class UserTurn:
    """A question and the messages before it.

    Attributes:
        question: The question, in the user's words or condensed.
        earlier: System messages, and the earlier turns of user and LLM. The question's own images are the last of
            them.
    """

    question: str
    earlier: tuple[BaseMessage, ...] = ()

    @property
    def history(self) -> tuple[BaseMessage, ...]:
        """The earlier turns with a text, which gates read."""
        return tuple(filter(_is_turn, self.earlier))

    def rewritten(self, question: str) -> UserTurn:
        """Return a question that stands alone, with the system messages and images, but without earlier turns."""
        return UserTurn(question, tuple(message for message in self.earlier if not _is_turn(message)))

    @property
    def conversation(self) -> list[BaseMessage]:
        """The earlier turns, then the question."""
        return [*self.history, HumanMessage(self.question)]

    @property
    def lines(self) -> tuple[str, ...]:
        """The earlier turns in the format that gates read: ``user: …`` and ``assistant: …``."""
        speakers = ["user" if isinstance(turn, HumanMessage) else "assistant" for turn in self.history]
        return tuple(f"{who}: {turn.text}" for who, turn in zip(speakers, self.history, strict=True))


def parse_question(value: Any, input_key: str | None = None) -> UserTurn:
    """Return the question and the earlier turns in an input, such as a string, a mapping or messages.

    Args:
        value: The runnable's input: a string, a mapping (or a pydantic model or dataclass), a message, a list of
            messages or a prompt value. In a list, the last human message is the question.
        input_key: Key of the question in a mapping; by default, the first of `QUESTION_KEYS` whose value is neither
            None nor blank. The earlier turns are under one of `HISTORY_KEYS`, or under ``messages`` if the last human
            message there is the question or has an answer. They may be messages, strings as in `Request.history`, or
            a transcript; anything else counts as the assistant's.

    Raises:
        InvalidQuestionError: The input has no question.
    """
    value = as_mapping(value)
    if isinstance(value, Mapping):
        return _parse_mapping(value, input_key)
    messages = _messages(value)
    for index in reversed(range(len(messages))):
        if isinstance(messages[index], HumanMessage):
            # A message without text, such as an image, belongs to the user's message before it.
            if index and not messages[index].text.strip() and isinstance(messages[index - 1], HumanMessage):
                continue
            return UserTurn(encodable(messages[index].text), _before(messages, index))
    raise InvalidQuestionError(
        "The messages include no human message.", hint="Add one: the last human message is the question."
    )


def as_mapping(value: Any) -> Any:
    """Convert the state of a graph, if it is a pydantic model or dataclass, to a mapping; return others unchanged."""
    if isinstance(value, BaseModel) and not isinstance(value, BaseMessage | PromptValue):
        return dict(value)
    return vars(value) if is_dataclass(value) else value


def _parse_mapping(value: Mapping[Any, Any], input_key: str | None) -> UserTurn:
    keys = QUESTION_KEYS if input_key is None else (input_key,)
    present = [key for key in keys if key in value]
    # The schema of a graph's state may have a question that is not set, beside the messages.
    key = next((key for key in present if not _is_blank(value[key])), present[0] if present else None)
    if key is None:
        expected = " or ".join(map(repr, keys))
        raise InvalidQuestionError(
            f"The input has no key {expected}; its keys are: {', '.join(map(repr, value)) or 'none'}.",
            hint='Name the key of the question: RetrievalGate(input_key="...").',
        )
    turn = parse_question(value[key])
    history: tuple[BaseMessage, ...] = ()
    earlier = next((value[name] for name in HISTORY_KEYS if value.get(name)), None)
    if isinstance(earlier, str):
        earlier = split_history(encodable(earlier))
    elif isinstance(earlier, Sequence) and all(isinstance(line, str) for line in earlier):
        earlier = label_turns(list(map(encodable, earlier)))
    if earlier is not None:
        try:
            history = _turns(_messages(earlier))
        except InvalidQuestionError:
            # If it is unknown, not a user turn, because consecutive user turns are read as one question.
            # The gate must know that something came before, even in an unknown form.
            history = (AIMessage(str(earlier)),)
    elif key != "messages" and value.get("messages"):
        # A graph's state often has both.
        with contextlib.suppress(InvalidQuestionError):
            history = _turns_before(turn.question, _messages(value["messages"]))
    # A state may have the same message as its question and among its messages.
    own = () if history[-len(turn.earlier) :] == turn.earlier else turn.earlier
    return UserTurn(turn.question, (*history, *own))


def _turns_before(question: str, messages: Sequence[BaseMessage]) -> tuple[BaseMessage, ...]:
    """Return the messages before a question; without turns if it is the last of them, rewritten to stand alone."""
    turns = _turns(messages)
    texts = [index for index, turn in enumerate(turns) if _is_turn(turn)]
    asked = [index for index in texts if isinstance(turns[index], HumanMessage)]
    is_same = bool(asked) and turns[asked[-1]].text.strip() == question.strip()
    if is_same or (asked and asked[-1] == texts[-1]):
        turns = _before(turns, asked[-1])
        return turns if is_same else UserTurn(question, turns).rewritten(question).earlier
    return turns


def _is_blank(value: Any) -> bool:
    if isinstance(value, str):
        value = value.strip()
    return isinstance(value, str | list | tuple | None) and not value


def _messages(value: Any) -> Sequence[BaseMessage]:
    """Return the messages of a conversation in any of LangChain's forms.

    Raises:
        InvalidQuestionError: The value is not a conversation.
    """
    if isinstance(value, BaseMessage):
        value = [value] if isinstance(value, HumanMessage) else value.text
    if isinstance(value, str):
        return [HumanMessage(encodable(value))]  # text may have been cut in the middle of an emoji
    try:
        return list(map(_as_typed_message, convert_to_messages(value)))
    except (ValueError, NotImplementedError, KeyError, TypeError, AttributeError) as error:
        raise InvalidQuestionError(
            f"Cannot read a question from {type(value).__name__}: {first_line(error)}",
            hint="Pass a string, a dict with the question, or messages.",
        ) from error


def _as_typed_message(message: BaseMessage) -> BaseMessage:
    """Convert a `ChatMessage` to the class of its role, if it is a common one; return others unchanged."""
    roles = ("user", "human", "assistant", "ai", "system", "developer")
    if isinstance(message, ChatMessage) and message.role.lower() in roles:
        (message,) = convert_to_messages([(message.role.lower(), message.content)])
    return message


def _before(messages: Sequence[BaseMessage], index: int) -> tuple[BaseMessage, ...]:
    """Return the turns before the user's message at an index, the system messages after it, and images in both."""
    system = [message for message in messages[index:] if isinstance(message, SystemMessage)]
    return _turns([*messages[:index], *system, HumanMessage(_images(messages[index:]))])


def _turns(messages: Sequence[BaseMessage]) -> tuple[BaseMessage, ...]:
    """Return the system messages, and the messages of user and LLM, without tool results and tool calls."""
    turns: list[BaseMessage] = []
    for message in messages:
        if isinstance(message, HumanMessage | SystemMessage):
            turns.append(message)
        elif isinstance(message, AIMessage):
            turns.append(AIMessage(encodable(message.text)))
    return tuple(turn for turn in turns if turn.text.strip() or _images([turn]))


def _images(messages: Sequence[BaseMessage]) -> list[Any]:
    """Return the parts of the user's messages that are not text, such as images."""
    return [
        part
        for message in messages
        if isinstance(message, HumanMessage) and isinstance(message.content, list)
        for part in message.content
        if isinstance(part, dict) and part.get("type") != "text"
    ]


def _is_turn(message: BaseMessage) -> bool:
    return not isinstance(message, SystemMessage) and bool(message.text.strip())
