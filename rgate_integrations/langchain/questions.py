"""Finds the question and the earlier turns in an input; LLMs condense them, and draft an answer for the gate."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from itertools import zip_longest
from typing import Any, Self, TypeAlias

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    ChatMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
    convert_to_messages,
)
from langchain_core.prompt_values import PromptValue
from langchain_core.runnables import Runnable, RunnableConfig, RunnableLambda
from langchain_core.runnables.history import RunnableWithMessageHistory
from pydantic import BaseModel

from rgate_integrations.answering.drafting import DRAFT_TAG, DraftWriter, attach_draft, read_message
from rgate_integrations.decision import Draft, Request
from rgate_integrations.engine.decider import Failed, read_item
from rgate_integrations.errors import ConfigurationError, InvalidQuestionError, first_line
from rgate_integrations.langchain.chat_models import length_field
from rgate_integrations.langchain.runnable import Run, run_batch
from rgate_integrations.prompts import ANSWER
from rgate_integrations.runtime.flow import Flow, is_interrupt
from rgate_integrations.runtime.replies import split_thoughts
from rgate_integrations.runtime.segments import label_turns, split_history
from rgate_integrations.runtime.text import encodable, logger, redact

CONDENSE_TAG = "rgate_condense"
CONDENSE_FAILED = "The follow-up could not be condensed."
NO_STREAM_TAG = "nostream"  # LangGraph leaves runs with this tag out of its message stream

QuestionInput: TypeAlias = str | PromptValue | BaseMessage | Mapping[str, Any] | Sequence[Any]
"""Text, a prompt value, a message, messages, or a mapping with any of these."""

QUESTION_KEYS = ("question", "input", "query", "messages")
HISTORY_KEYS = ("chat_history", "history")
_TEXT_TYPES = (None, "text", "input_text", "output_text")  # Gemini's and Bedrock's parts have no type


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
        """The earlier turns in the format that gates read: ``user: …`` and ``assistant: …``.

        A summary that LangChain's `SummarizationMiddleware` wrote counts as the assistant's, because consecutive user
        turns are read as one question.
        """
        speakers = []
        for turn in self.history:
            is_user = isinstance(turn, HumanMessage) and not is_summary(turn)
            speakers.append("user" if is_user else "assistant")
        return tuple(f"{who}: {_read_text(turn)}" for who, turn in zip(speakers, self.history, strict=True))


def is_summary(message: BaseMessage) -> bool:
    """Return whether LangChain's `SummarizationMiddleware` wrote a message, as a summary of earlier ones."""
    return message.additional_kwargs.get("lc_source") == "summarization"


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
    if isinstance(value, Mapping) and (input_key is not None or not _is_message(value)):
        return _parse_mapping(value, input_key)
    messages = _messages(value)
    for index in reversed(range(len(messages))):
        if isinstance(messages[index], HumanMessage):
            # A message without text, such as an image, belongs to the user's message before it.
            if (
                index
                and not _read_text(messages[index]).strip()
                and isinstance(messages[index - 1], HumanMessage)
            ):
                continue
            return UserTurn(encodable(_read_text(messages[index])), _before(messages, index))
    raise InvalidQuestionError(
        "The messages include no human message.", hint="Add one: the last human message is the question."
    )


def as_mapping(value: Any) -> Any:
    """Convert the state of a graph, if it is a pydantic model or dataclass, to a mapping; return others unchanged."""
    if isinstance(value, BaseModel) and not isinstance(value, BaseMessage | PromptValue):
        return dict(value)
    if is_dataclass(value) and not isinstance(value, type):
        # Not `vars`: one with slots has none.
        return {each.name: getattr(value, each.name) for each in fields(value)}
    return value


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
    try:
        turn = parse_question(value[key])
    except InvalidQuestionError as error:
        raise InvalidQuestionError(f"In {key!r}: {error.message}", hint=error.hint) from error
    history: tuple[BaseMessage, ...] = ()
    earlier = next((value[name] for name in HISTORY_KEYS if value.get(name)), None)
    if isinstance(earlier, Mapping) and "messages" in earlier:  # a state
        earlier = earlier["messages"]
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
    is_same = bool(asked) and _read_text(turns[asked[-1]]).strip() == question.strip()
    if is_same or (asked and asked[-1] == texts[-1]):
        turns = _before(turns, asked[-1])
        return turns if is_same else UserTurn(question, turns).rewritten(question).earlier
    return turns


def _is_message(value: Mapping[Any, Any]) -> bool:
    """Whether a mapping is one message, such as ``{"role": "user", "content": "Hi"}``, and has no other question."""
    return "role" in value and "content" in value and not any(key in value for key in QUESTION_KEYS)


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
    if isinstance(value, Mapping):
        value = [value]
    try:
        return list(map(_as_typed_message, convert_to_messages(value)))
    except (ValueError, NotImplementedError, KeyError, TypeError, AttributeError) as error:
        # About anything but a list of messages, the error tells how LangChain's code failed.
        detail = f": {first_line(error)}" if isinstance(value, list | tuple) else "."
        raise InvalidQuestionError(
            f"Cannot read a question from {type(value).__name__}{detail}",
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
    """Return the system messages, and the messages of user and LLM, without tool calls and most tool results."""
    turns: list[BaseMessage] = []
    for message, following in zip_longest(messages, messages[1:]):
        # If the user writes next, a tool's result was the answer, as in structured output or with return_direct.
        is_result = isinstance(message, ToolMessage) and isinstance(following, HumanMessage)
        if isinstance(message, HumanMessage | SystemMessage):
            turns.append(message)
        elif isinstance(message, AIMessage) or is_result:
            turns.append(AIMessage(encodable(_read_text(message))))
    return tuple(turn for turn in turns if _read_text(turn).strip() or _images([turn]))


def _images(messages: Sequence[BaseMessage]) -> list[Any]:
    """Return the parts of the user's messages that are not text, such as images."""
    return [
        part
        for message in messages
        if isinstance(message, HumanMessage) and isinstance(message.content, list)
        for part in message.content
        if _part_text(part) is None
    ]


def has_images(messages: Sequence[BaseMessage]) -> bool:
    """Return whether the user's last turn has parts that are not text, such as images."""
    for message in reversed(messages):
        if isinstance(message, AIMessage):
            return False
        if _images([message]):
            return True
    return False


def _read_text(message: BaseMessage) -> str:
    """Return the text of a message. Parts of a user's, such as a pasted text and a question, are lines of it."""
    parts = [message.content] if isinstance(message.content, str) else message.content
    separator = (
        "\n" if isinstance(message, HumanMessage) else ""
    )  # an LLM's text may be cut anywhere, by citations
    return separator.join(text for part in parts if (text := _part_text(part)) is not None)


def _part_text(part: Any) -> str | None:
    """Return the text in a part of a message, in LangChain's or a provider's form; None for an image or a file."""
    if isinstance(part, str):
        return part
    text = part.get("text") if part.get("type") in _TEXT_TYPES else None
    return text if isinstance(text, str) else None


def _is_turn(message: BaseMessage) -> bool:
    return not isinstance(message, SystemMessage) and bool(_read_text(message).strip())


@dataclass
class GateCall:
    """One input of a gate, and the results so far.

    Attributes:
        run: The input and its run.
        turn: The question and the turns before it; once condensed, the standalone question alone.
        condense_error: Why a follow-up could not be condensed; None if it could, or did not need to be.
        threshold: The caller's threshold; None for the gate's own.
        draft: The draft to judge with the question; None to judge only the question; an exception if the draft could
            not be written, which the decision reports.
        result: This input's result, such as the decision, or its exception; None until there is one.
    """

    run: Run
    turn: UserTurn = field(default_factory=lambda: UserTurn(""))
    condense_error: Exception | None = None
    threshold: float | None = None
    draft: Draft | Exception | None = None
    result: Any = None

    @classmethod
    def read(cls, run: Run, input_key: str | None) -> Self:
        """Return the call for an input. If the input has no question, the call's `result` is the error."""
        if isinstance(run.input, Failed):  # a router could not condense it
            return cls(run, UserTurn(run.input.question), run.input.error)
        try:
            return cls(run, parse_question(run.input, input_key))
        except InvalidQuestionError as error:
            return cls(run, result=error)

    def hidden_run(self, tag: str) -> RunnableConfig:
        """Return a config for a child run that is not part of the answer: tagged, and hidden from message streams."""
        return self.run.child(tags=(NO_STREAM_TAG, tag))

    def item(self) -> Request | Failed:
        """Return the request to the gate, or the failure that prevents one."""
        if self.condense_error is not None:
            return Failed(self.condense_error, self.turn.question, self.threshold)
        request = read_item(
            self.turn.question,
            history=self.turn.lines,
            # Not the config's: retrievers around this one pass on only their callbacks, which have it, too.
            metadata=self.run.manager.metadata,
            threshold=self.threshold,
        )
        return attach_draft(request, self.draft)


def condense_follow_ups(condense: Runnable[Any, Any] | None, calls: Sequence[GateCall]) -> Flow[None]:
    """Rewrite follow-ups as standalone questions, in one batch.

    Args:
        condense: Runnable from messages to a question; None changes nothing.
        calls: The inputs; each follow-up gets its new question, or a `GateCall.condense_error`.
    """
    follow_ups = [call for call in calls if call.turn.history]
    if condense is None or not follow_ups:
        return
    conversations = [call.turn.conversation for call in follow_ups]
    configs = [call.hidden_run(CONDENSE_TAG) for call in follow_ups]
    answers = yield from run_batch(condense, conversations, configs)
    for call, answer in zip(follow_ups, answers, strict=True):
        try:
            if isinstance(answer, Exception):
                raise answer
            question = split_thoughts(parse_question(answer).question).answer.strip()
            if not question:
                raise InvalidQuestionError(
                    "The condensed question is empty.", hint="Check what the condense= runnable returns."
                )
        except Exception as error:  # the application's runnable may raise anything
            logger.warning("A follow-up could not be condensed: %s", type(error).__name__)
            call.condense_error = error
        else:
            call.turn = call.turn.rewritten(question)


class ChatDrafter(DraftWriter[GateCall]):
    """Lets a chat model write the first tokens of its answers, in one batch.

    The runs have the tags `DRAFT_TAG` and `NO_STREAM_TAG`: they are not part of the answer.

    Args:
        llm: The answering chat model, or any runnable from messages to a message or string.
        tokens: Maximum number of tokens of a draft, at least 1.

    Raises:
        ConfigurationError: ``llm`` keeps a message history, to which it would add the drafts.
    """

    def __init__(self, llm: Runnable[Any, Any], tokens: int) -> None:
        super().__init__(tokens)
        if isinstance(llm, RunnableWithMessageHistory):
            raise ConfigurationError(
                "The LLM in llm= has a message history, to which it would add the drafts.",
                hint="Pass the chat model itself as llm=, and add the history to the chain that answers.",
            )
        self.llm = llm
        if isinstance(llm, RunnableLambda):  # each option would fail in the traces first
            self.forms = [{}]
        field = length_field(llm)
        if isinstance(llm, BaseChatModel) and field not in (None, "max_tokens"):
            # Gemini's and Ollama's classes have no max_tokens, and Gemini's has no logprobs. Their own fields are not
            # options of a call, so the limit is set in a copy.
            self.llm = llm.model_copy(update={field: tokens})
            self.forms = [{"logprobs": True}, {}] if "logprobs" in type(llm).model_fields else [{}]

    def write_for(self, calls: Sequence[GateCall]) -> Flow[None]:
        """Write a draft for each call, except those whose follow-up could not be condensed.

        If the batch as a whole raises an exception, that becomes the draft of all these calls.
        """
        calls = [call for call in calls if call.condense_error is None]
        try:
            drafts: Sequence[Draft | Exception] = yield from self.write_drafts(calls)
        except Exception as error:  # an LLM may raise anything
            if is_interrupt(error):
                raise
            texts = [text for call in calls for text in self.private_texts(call)]
            logger.warning("The LLM wrote no draft: %s: %s", type(error).__name__, redact(error, *texts))
            drafts = [error] * len(calls)
        for call, draft in zip(calls, drafts, strict=True):
            call.draft = draft

    def ask(self, prompts: Sequence[GateCall], options: dict[str, Any]) -> Flow[list[Any]]:
        """Return the LLM's answer to each question, or the exception that it raised."""
        conversations = [[SystemMessage(ANSWER.system), *call.turn.conversation] for call in prompts]
        configs = [call.hidden_run(DRAFT_TAG) for call in prompts]
        return (yield from run_batch(self.llm.bind(**options), conversations, configs))

    def read_draft(self, answer: Any) -> Draft:
        """Convert a message or a string to a draft; anything else, which is no answer, to an empty one."""
        if not isinstance(answer, BaseMessage):
            return Draft(text=answer.strip() if isinstance(answer, str) else "", source="llm")
        return read_message(answer)

    def private_texts(self, prompt: GateCall) -> list[object]:
        """Return the texts that logs must not quote: the question and the turns before it."""
        return [message.content for message in prompt.turn.conversation]
