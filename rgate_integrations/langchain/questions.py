"""The question in whatever a runnable is given, and the decision about it that a config carries."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from langchain_core.callbacks import adispatch_custom_event, dispatch_custom_event
from langchain_core.chat_history import BaseChatMessageHistory
from langchain_core.messages import AIMessage, BaseMessage, ChatMessage, HumanMessage, convert_to_messages
from langchain_core.prompt_values import PromptValue
from langchain_core.runnables import Runnable, RunnableConfig, RunnableSequence
from langchain_core.runnables.base import RunnableBindingBase

from rgate_integrations.decision import Decision
from rgate_integrations.engine.requests import valid_threshold
from rgate_integrations.errors import InvalidQuestionError
from rgate_integrations.runtime.flow import Call, Flow
from rgate_integrations.runtime.text import encodable

QuestionInput: TypeAlias = str | PromptValue | BaseMessage | Mapping[str, Any] | Sequence[Any]
"""What a question is read from: text, a prompt value, a message, a mapping that holds any of these, or messages."""

QUESTION_KEYS = ("question", "input", "query", "messages")
HISTORY_KEYS = ("chat_history", "history")
THRESHOLD_KEY = "retrieval_threshold"

# --- the question ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Asked:
    """A question and what was said before it.

    Attributes:
        question: The question as the user put it.
        history: The earlier turns, user's and LLM's; none for the first question of a conversation.
    """

    question: str
    history: tuple[BaseMessage, ...] = ()

    @property
    def conversation(self) -> list[BaseMessage]:
        """The earlier turns, then the question."""
        return [*self.history, HumanMessage(self.question)]

    @property
    def lines(self) -> tuple[str, ...]:
        """The earlier turns as gates read them."""
        lines = []
        for turn in self.history:
            speaker = "user" if isinstance(turn, HumanMessage) else "assistant"
            lines.append(f"{speaker}: {turn.text}")
        return tuple(lines)


def asked_in(value: Any, input_key: str | None = None) -> Asked:
    """Return the question in a string, a mapping, messages, a message history, or a prompt value.

    Args:
        value: The runnable's input. Of messages, the last human one is the question.
        input_key: Key of the question in a mapping; by default the first of `QUESTION_KEYS` that is there.
            Beside it the first of `HISTORY_KEYS` has the earlier turns, or ``messages`` if they end in the question.

    Raises:
        InvalidQuestionError: There is no question in it.
    """
    if isinstance(value, Mapping):
        return _asked_in_mapping(value, input_key)
    messages = _messages(value)
    for place in reversed(range(len(messages))):
        if isinstance(messages[place], HumanMessage):
            return Asked(encodable(messages[place].text), _turns(messages[:place]))
    raise InvalidQuestionError(
        "There is no human message among the messages.", hint="The last one is the question."
    )


def asked_in_all(inputs: Sequence[Any], input_key: str | None = None) -> tuple[dict[int, Asked], list[Any]]:
    """Return the questions in inputs, each by its place, and a list of results that they are to be put into.

    In the place of an input that holds no question there is its error already.
    """
    asked: dict[int, Asked] = {}
    results: list[Any] = [None] * len(inputs)
    for place, value in enumerate(inputs):
        try:
            asked[place] = asked_in(value, input_key)
        except InvalidQuestionError as error:
            results[place] = error
    return asked, results


def _asked_in_mapping(value: Mapping[Any, Any], input_key: str | None) -> Asked:
    keys = QUESTION_KEYS if input_key is None else (input_key,)
    key = next((key for key in keys if key in value), None)
    if key is None:
        raise InvalidQuestionError(
            f"The input has no key {' or '.join(keys)}; it has: {', '.join(map(repr, value)) or 'none'}.",
            hint='Name the key of the question: RetrievalGate(input_key="...").',
        )
    asked = asked_in(value[key])
    history: tuple[BaseMessage, ...] = ()
    earlier = next((value[name] for name in HISTORY_KEYS if value.get(name)), None)
    if earlier is not None:
        try:
            history = _turns(_messages(earlier))
        except InvalidQuestionError:  # such as the pairs of older chains: they were said all the same
            history = (HumanMessage(str(earlier)),)
    elif key != "messages" and value.get("messages"):
        # A graph's state often has both. A question that differs from the last message has been rewritten from it.
        with contextlib.suppress(InvalidQuestionError):
            beside = asked_in(value["messages"])
            if beside.question.strip() == asked.question.strip():
                history = beside.history
    return Asked(asked.question, (*history, *asked.history))


def _messages(value: Any) -> Sequence[BaseMessage]:
    """Return what was said, in any of the forms that LangChain has for it.

    Raises:
        InvalidQuestionError: It is none of them.
    """
    if isinstance(value, BaseMessage):
        value = value.text
    if isinstance(value, str):
        return [HumanMessage(encodable(value))]  # a message's text may be cut in the middle of an emoji
    if isinstance(value, BaseChatMessageHistory):
        value = value.messages
    try:
        return list(map(_with_its_type, convert_to_messages(value)))
    except (ValueError, NotImplementedError, KeyError, TypeError, AttributeError) as error:
        raise InvalidQuestionError(
            f"A question cannot be read from {type(value).__name__}: {error}",
            hint="Pass a string, a dict with the question, or messages.",
        ) from error


def _with_its_type(message: BaseMessage) -> BaseMessage:
    """Return a `ChatMessage`, whose role is a text, as the message that its role stands for; others as they are."""
    if isinstance(message, ChatMessage):
        role = message.role.lower()
        if role in ("user", "human"):
            return HumanMessage(message.content)
        if role in ("assistant", "ai"):
            return AIMessage(message.content)
    return message


def _turns(messages: Sequence[BaseMessage]) -> tuple[BaseMessage, ...]:
    """Return what the user and the LLM said, without system messages, tools and calls of tools."""
    turns: list[BaseMessage] = []
    for message in messages:
        if isinstance(message, HumanMessage):
            turns.append(message)
        elif isinstance(message, AIMessage):
            turns.append(AIMessage(encodable(message.text)))
    return tuple(turn for turn in turns if turn.text.strip())


# --- its threshold and its decision --------------------------------------------------------------------------------


def given_threshold(gate: Runnable[Any, Decision], config: RunnableConfig) -> float | None:
    """Return the threshold that a caller gave, for one input or for the gate; None for the gate's own.

    Raises:
        ConfigurationError: The one in the config is not a number of at least 0.
    """
    given = config.get("configurable", {}).get(THRESHOLD_KEY)
    return getattr(gate, "threshold", None) if given is None else valid_threshold(given)


# LangChain and LangGraph keep keys with two underscores out of traces and checkpoints.
DECISION_KEY = "__rgate_decided"


@dataclass(frozen=True)
class BoundDecision:
    """A decision that the config of a request carries, and whose it is.

    Attributes:
        question: The question as the user put it; the decision has it as it was judged, perhaps condensed.
        decision: What was decided.
        gate: What decided: the object that `RetrievalGate.origin` is.
        llm: The LLM that wrote the draft; None without one.
    """

    question: str
    decision: Decision
    gate: Any
    llm: Any = None


def bind(
    config: RunnableConfig, gate: Runnable[Any, Decision], value: Any, decision: Decision
) -> RunnableConfig:
    """Return a config that carries what a gate decided for an input."""
    while isinstance(gate, RunnableBindingBase | RunnableSequence):
        gate = gate.bound if isinstance(gate, RunnableBindingBase) else gate.last
    question = decision.question
    with contextlib.suppress(
        InvalidQuestionError
    ):  # a runnable of the user's own reads inputs in its own way
        question = asked_in(value, getattr(gate, "input_key", None)).question
    bound = BoundDecision(question, decision, getattr(gate, "origin", gate), getattr(gate, "llm", None))
    return {**config, "configurable": {**config.get("configurable", {}), DECISION_KEY: bound}}


def bound_decision(
    config: RunnableConfig, question: str, *, gate: Any, llm: Any = None, threshold: float | None = None
) -> Decision | None:
    """Return what this gate has decided for this question in the request that a config belongs to, or None.

    Args:
        config: The config of a call.
        question: The question that the call is about.
        gate: What is to decide; the decision of another gate does not count.
        llm: What is to write the draft; a decision on another LLM's draft does not count either.
        threshold: The threshold of the call, if it has one of its own.
    """
    bound: BoundDecision | None = config.get("configurable", {}).get(DECISION_KEY)
    if bound is None or bound.gate is not gate or bound.llm is not llm:
        return None
    is_same = question.strip() in (bound.question.strip(), bound.decision.question.strip())
    if is_same and threshold in (None, bound.decision.threshold):
        return bound.decision
    return None


EVENT = "retrieval_gate"

_SHOWN = {
    "question",
    "retrieve",
    "p_known",
    "threshold",
    "reason",
    "gate",
    "error",
    "warnings",
    "partial_answer",
    "p_helps",
    "outcome",
    "llm",
}


def announcing(decision: Decision, config: RunnableConfig | None = None) -> Flow[None]:
    """Tell listeners of a decision: a custom event `EVENT`, and in a graph ``{EVENT: ...}`` in its custom stream.

    Args:
        decision: The decision.
        config: The config of the run in which it was made; the surrounding run when None.
    """
    # A key may be added at any time; one that changes its meaning makes a new version.
    shown = {"version": 1, **decision.model_dump(mode="json", include=_SHOWN)}
    with contextlib.suppress(RuntimeError):  # outside of a run there is nobody to tell
        yield Call(dispatch_custom_event, adispatch_custom_event, EVENT, shown, config=config)
    if "langgraph" in sys.modules:  # else no graph can be running, and langgraph may not be installed
        from langgraph.config import get_stream_writer

        with contextlib.suppress(RuntimeError, KeyError):
            get_stream_writer()({EVENT: shown})
