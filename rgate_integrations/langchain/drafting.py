"""What LLMs write before a gate decides: standalone questions and drafts."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import BaseMessage, SystemMessage
from langchain_core.runnables import Runnable, RunnableConfig, RunnableLambda
from langchain_core.runnables.history import RunnableWithMessageHistory

from rgate_integrations.answering.drafting import DraftWriter, attach_draft, read_message
from rgate_integrations.decision import Draft, Request
from rgate_integrations.engine.decider import Failed, read_item
from rgate_integrations.errors import ConfigurationError, InvalidQuestionError
from rgate_integrations.langchain.chat_models import length_field
from rgate_integrations.langchain.questions import UserTurn, parse_question
from rgate_integrations.langchain.runnable import Run, run_batch
from rgate_integrations.prompts import ANSWER
from rgate_integrations.runtime.flow import Flow, is_interrupt
from rgate_integrations.runtime.replies import split_thoughts
from rgate_integrations.runtime.text import redact

_log = logging.getLogger("rgate_integrations")

DRAFT_TAG = "rgate_draft"
CONDENSE_TAG = "rgate_condense"
CONDENSE_FAILED = "The follow-up could not be condensed."
NO_STREAM_TAG = "nostream"  # LangGraph leaves runs with this tag out of its message stream


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
            metadata=self.run.config.get("metadata"),
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
            _log.warning("A follow-up could not be condensed: %s", type(error).__name__)
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
            _log.warning("The LLM wrote no draft: %s: %s", type(error).__name__, redact(error, *texts))
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
