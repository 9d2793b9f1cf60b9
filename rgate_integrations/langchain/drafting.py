"""What an LLM writes before there is a decision: drafts of answers, and follow-ups condensed to questions."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from langchain_core.messages import BaseMessage, SystemMessage
from langchain_core.runnables import Runnable, RunnableConfig, RunnableLambda
from langchain_core.runnables.history import RunnableWithMessageHistory

from rgate_integrations.answering.partial_answer import draft_options, says_unsupported
from rgate_integrations.decision import Draft
from rgate_integrations.errors import ConfigurationError, InvalidQuestionError
from rgate_integrations.langchain.questions import UserTurn, parse_question
from rgate_integrations.langchain.runnable import BatchCall
from rgate_integrations.prompts import ANSWER
from rgate_integrations.runtime.flow import Flow
from rgate_integrations.runtime.records import choice_logprobs
from rgate_integrations.runtime.text import redact

DRAFT_TAG = "rgate_draft"
CONDENSE_TAG = "rgate_condense"
NO_STREAM_TAG = "nostream"  # LangGraph keeps the tokens of a run with this tag from its message stream

_log = logging.getLogger("rgate_integrations")
_CUT = ("length", "max_tokens", "MAX_TOKENS")


class ChatDrafter:
    """Lets a chat model write the first tokens of its answer.

    The model is asked with ``max_tokens`` and ``logprobs``. One that says that it does not take them is asked with
    fewer of them, and what it took is remembered. Any other error, such as a timeout, costs that question its draft
    and changes nothing for the next call.

    The runs of drafts carry the tags `DRAFT_TAG` and `NO_STREAM_TAG`: they are no part of the answer.

    Args:
        llm: The answering chat model, or any runnable from messages to a message or string.
        tokens: Maximum number of tokens.

    Raises:
        ConfigurationError: ``llm`` writes what it is asked into a message history.
    """

    def __init__(self, llm: Runnable[Any, Any], tokens: int = 32) -> None:
        if isinstance(llm, RunnableWithMessageHistory):
            raise ConfigurationError(
                "An LLM that keeps a message history would keep the drafts in it too.",
                hint="Pass the chat model itself as llm=, and wrap the chain that answers.",
            )
        self.llm = llm
        self.tokens = tokens
        self._forms = [{}] if isinstance(llm, RunnableLambda) else draft_options(tokens)

    def write_drafts(
        self, turns: Sequence[UserTurn], configs: Sequence[RunnableConfig]
    ) -> Flow[list[Draft | None]]:
        """Write a draft for each question, as one batch; those that are refused are asked again, for less.

        Returns:
            One draft a question, in order; None where the model failed.
        """
        calls = []
        for turn, config in zip(turns, configs, strict=True):
            prompt = [SystemMessage(ANSWER.system), *turn.conversation]
            calls.append(_DraftCall(prompt, hide_run(config, DRAFT_TAG)))
        waiting = calls
        forms = self._forms
        for number, form in enumerate(forms):
            answers = yield BatchCall(
                self.llm.bind(**form), [call.prompt for call in waiting], [call.config for call in waiting]
            )
            refused = []
            for call, answer in zip(waiting, answers, strict=True):
                if not isinstance(answer, Exception) and self._forms is forms:
                    # What works for one question of a batch is what the model takes.
                    self._forms = forms[number:]
                if isinstance(answer, Exception) and says_unsupported(answer) and form is not forms[-1]:
                    refused.append(call)
                else:
                    call.draft = self._draft(answer, call.prompt)
            if not refused:
                break
            waiting = refused
        return [call.draft for call in calls]

    def _draft(self, answer: Any, conversation: Sequence[BaseMessage]) -> Draft | None:
        """Return what a model answered as a draft; None if it failed or wrote nothing."""
        if isinstance(answer, Exception):
            problem = redact(answer, *(message.content for message in conversation))
            _log.warning("The LLM wrote no draft: %s: %s", type(answer).__name__, problem)
            return None
        if isinstance(answer, BaseMessage):
            metadata = answer.response_metadata
            tokens, logprobs = choice_logprobs(metadata)
            reason = (
                metadata.get("finish_reason") or metadata.get("stop_reason") or metadata.get("done_reason")
            )
            draft = Draft(
                text=answer.text.strip(),
                tokens=tokens,
                logprobs=logprobs or None,
                finished=bool(reason) and reason not in _CUT,  # who does not say may have been cut
                source="llm",
                model=str(metadata.get("model_name") or metadata.get("model") or ""),
            )
        else:
            draft = Draft(text=str(answer).strip(), source="llm")
        if not draft.text:
            _log.warning("The LLM wrote no draft: its answer has no text.")
            return None
        return draft.head(self.tokens)


@dataclass
class _DraftCall:
    """A question that is to be drafted for, and its draft once it is there."""

    prompt: list[BaseMessage]
    config: RunnableConfig
    draft: Draft | None = None


def condense_follow_ups(
    condense: Runnable[Any, Any] | None, turns: Sequence[UserTurn], configs: Sequence[RunnableConfig]
) -> Flow[list[UserTurn | Exception]]:
    """Turn the follow-ups among questions into ones that stand alone, as one batch.

    Args:
        condense: From messages to a question; None leaves them as they are.
        turns: The questions.
        configs: The config of each.

    Returns:
        Each question, condensed if it follows on earlier turns, or why it could not be.
    """
    if condense is None:
        return list(turns)
    conversations = []
    hidden = []
    for turn, config in zip(turns, configs, strict=True):
        if turn.history:
            conversations.append(turn.conversation)
            hidden.append(hide_run(config, CONDENSE_TAG))
    condensed = iter((yield BatchCall(condense, conversations, hidden)))
    return [_standalone(next(condensed)) if turn.history else turn for turn in turns]


def _standalone(result: Any) -> UserTurn | Exception:
    """Return the question in what a condensing runnable returned, or why there is none."""
    if isinstance(result, Exception):
        return result
    try:
        turn = UserTurn(parse_question(result).question)
    except InvalidQuestionError as error:
        return error
    if not turn.question.strip():
        return InvalidQuestionError("The condensed question is empty.")
    return turn


def hide_run(config: RunnableConfig, tag: str) -> RunnableConfig:
    """Return the config of a run that is no part of the answer: with this tag, and hidden from message streams."""
    return {**config, "tags": [*(config.get("tags") or []), NO_STREAM_TAG, tag]}
