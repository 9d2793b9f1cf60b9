"""The question in whatever a LangChain runnable is given, and the earlier turns that it follows."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from langchain_core.chat_history import BaseChatMessageHistory
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, convert_to_messages
from langchain_core.prompt_values import PromptValue

from rgate_integrations.decision import Decision
from rgate_integrations.engine.fallback import fallback_decision
from rgate_integrations.errors import InvalidQuestionError

_log = logging.getLogger("rgate_integrations")

QUESTION_KEYS = ("question", "input", "query", "messages")
HISTORY_KEYS = ("chat_history", "history")
UNCONDENSED = "The follow-up could not be condensed."


@dataclass(frozen=True)
class Asked:
    """A question and what was said before it.

    Attributes:
        question: The question as the user put it.
        history: The earlier turns, user's and LLM's; none for the first question of a conversation.
    """

    question: str
    history: tuple[BaseMessage, ...] = ()


def asked_in(value: Any, input_key: str | None = None) -> Asked:
    """Return the question in a string, a mapping, messages, a message history, or a prompt value.

    Args:
        value: The runnable's input. Of messages, the last human one is the question.
        input_key: Key of the question in a mapping; by default the first of `QUESTION_KEYS` that is there.
            Beside it the first of `HISTORY_KEYS` has the earlier turns, or ``messages`` if they end in the question.

    Raises:
        InvalidQuestionError: There is no question in it.
    """
    if isinstance(value, str):
        return Asked(value)
    if isinstance(value, BaseMessage):
        return Asked(value.text)
    if isinstance(value, Mapping):
        return _asked_in_mapping(value, input_key)
    messages = _listed(value)
    if messages is None:
        raise InvalidQuestionError(
            f"A question cannot be read from {type(value).__name__}.",
            hint="Pass a string, a dict with the question, or messages.",
        )
    for place in reversed(range(len(messages))):
        message = _message(messages[place])
        if isinstance(message, HumanMessage):
            return Asked(message.text, _turns(messages[:place]))
    raise InvalidQuestionError(
        "There is no human message among the messages.", hint="The last one is the question."
    )


def question_of(value: Any, input_key: str | None = None) -> str:
    """Return the question alone; see `asked_in`.

    Raises:
        InvalidQuestionError: There is no question in it.
    """
    return asked_in(value, input_key).question


@dataclass
class Questions:
    """The questions of a batch of inputs, each under its place in the batch.

    Attributes:
        texts: The questions that the gate is to judge.
        histories: The earlier turns of those of them that are follow-ups, as long as they are not condensed.
        decided: What is decided without asking the gate.
        errors: Why nothing could be decided for the others.
    """

    texts: dict[int, str] = field(default_factory=dict)
    histories: dict[int, list[BaseMessage]] = field(default_factory=dict)
    decided: dict[int, Decision] = field(default_factory=dict)
    errors: dict[int, Exception] = field(default_factory=dict)

    @classmethod
    def read(cls, inputs: Sequence[Any], input_key: str | None = None) -> Questions:
        """Read the question in each input."""
        questions = cls()
        for place, value in enumerate(inputs):
            try:
                asked = asked_in(value, input_key)
            except InvalidQuestionError as error:
                questions.errors[place] = error
                continue
            questions.texts[place] = asked.question
            if asked.history:
                questions.histories[place] = list(asked.history)
        return questions

    @property
    def conversations(self) -> dict[int, list[BaseMessage]]:
        """Each follow-up as messages: the earlier turns, then the question."""
        found = {}
        for place, history in self.histories.items():
            found[place] = [*history, HumanMessage(self.texts[place])]
        return found

    def condense(self, rewritten: Sequence[Any], *, on_error: str = "retrieve") -> None:
        """Take the condensed form of each follow-up; those that have none are decided: to retrieve.

        Args:
            rewritten: For each of `histories` what the condensing runnable returned, or its exception.
            on_error: "raise" makes a failure that input's error instead of a decision.
        """
        for place, value in zip(list(self.histories), rewritten, strict=True):
            try:
                self.texts[place] = condensed_question(value)
                self.histories.pop(place)
            except Exception as error:
                _log.warning("A follow-up could not be condensed: %s: %s", type(error).__name__, error)
                decision = fallback_decision(error, question=self.texts[place])
                self.decide(place, decision.model_copy(update={"warnings": (UNCONDENSED,)}))
                if on_error == "raise":
                    del self.decided[place]
                    self.errors[place] = error

    @property
    def lines(self) -> list[tuple[str, ...]]:
        """The earlier turns of each of `texts`, as gates read them."""
        found = []
        for place in self.texts:
            lines = []
            for turn in self.histories.get(place, []):
                speaker = "user" if turn.type == "human" else "assistant"
                lines.append(f"{speaker}: {turn.text}")
            found.append(tuple(lines))
        return found

    def results(self, decisions: Sequence[Decision]) -> list[Decision | Exception]:
        """Put the decisions, one for each of `texts`, in the places of their inputs, with all others in theirs."""
        judged = dict(zip(self.texts, decisions, strict=True))
        found: dict[int, Decision | Exception] = {**self.errors, **self.decided, **judged}
        return [found[place] for place in range(len(found))]

    def decide(self, place: int, decision: Decision) -> None:
        """Take a decision that was made elsewhere; the gate is not asked."""
        self.texts.pop(place)
        self.histories.pop(place, None)
        self.decided[place] = decision


def condensed_question(value: Any) -> str:
    """Return the question in what a condensing runnable returned; raises the exception that it is, or what is wrong.

    Raises:
        InvalidQuestionError: There is no question in it, or an empty one.
    """
    if isinstance(value, Exception):
        raise value
    condensed = question_of(value)
    if not condensed.strip():
        raise InvalidQuestionError("The condensed question is empty.")
    return condensed


def _asked_in_mapping(value: Mapping[Any, Any], input_key: str | None) -> Asked:
    keys = QUESTION_KEYS if input_key is None else (input_key,)
    key = next((key for key in keys if key in value), None)
    if key is None:
        wanted = " or ".join(map(repr, QUESTION_KEYS)) if input_key is None else input_key
        raise InvalidQuestionError(
            f"The input has no key {wanted}; it has: {', '.join(map(repr, value)) or 'none'}.",
            hint='Name the key of the question: RetrievalGate(input_key="...").',
        )
    asked = asked_in(value[key])
    history = next((value[name] for name in HISTORY_KEYS if value.get(name)), None)
    if history is not None:
        listed = _listed(history)
        return Asked(asked.question, (*_turns([history] if listed is None else listed), *asked.history))
    # A graph's state often has both. A question that differs from the last message has been rewritten from it.
    if key != "messages" and value.get("messages"):
        with contextlib.suppress(InvalidQuestionError):
            beside = asked_in(value["messages"])
            if beside.question.strip() == asked.question.strip():
                return Asked(asked.question, (*beside.history, *asked.history))
    return asked


def _listed(value: Any) -> Sequence[Any] | None:
    """Return messages in any of the forms that LangChain has for several; None for what is none of them."""
    if isinstance(value, BaseChatMessageHistory):
        return value.messages
    if isinstance(value, PromptValue):
        return value.to_messages()
    return value if isinstance(value, Sequence) and not isinstance(value, str | bytes) else None


def _turns(items: Iterable[Any]) -> tuple[BaseMessage, ...]:
    """Return what the user and the LLM said, without system messages, tools and calls of tools."""
    turns: list[BaseMessage] = []
    for item in items:
        # What is no message, such as the transcripts and pairs of older chains, was said all the same.
        message = _message(item) or HumanMessage(str(item))
        if isinstance(message, HumanMessage):
            turns.append(message)
        elif isinstance(message, AIMessage):
            turns.append(AIMessage(message.text))
    return tuple(turn for turn in turns if turn.text.strip())


def _message(item: Any) -> BaseMessage | None:
    """Return a message in any of LangChain's spellings as one; None for what is no message."""
    try:
        (message,) = convert_to_messages([item])
    except (ValueError, NotImplementedError, KeyError, TypeError, AttributeError):
        return None
    return message
