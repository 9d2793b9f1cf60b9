"""The chat models inside what a user calls "my LLM": their names, their drafts, and follow-ups that they condense."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

from langchain_core.language_models import BaseChatModel, BaseLanguageModel
from langchain_core.messages import BaseMessage, SystemMessage
from langchain_core.runnables import Runnable, RunnableConfig, RunnableLambda, RunnableSequence
from langchain_core.runnables.base import RunnableBindingBase
from langchain_core.runnables.configurable import (
    RunnableConfigurableAlternatives,
    RunnableConfigurableFields,
)
from langchain_core.runnables.history import RunnableWithMessageHistory
from langchain_core.runnables.utils import ConfigurableFieldMultiOption, ConfigurableFieldSingleOption
from pydantic import BaseModel

from rgate_integrations.answering.partial_answer import draft_options, says_unsupported
from rgate_integrations.decision import Draft
from rgate_integrations.errors import ConfigurationError, InvalidQuestionError
from rgate_integrations.gates.ability import weakest
from rgate_integrations.langchain.questions import Asked, asked_in
from rgate_integrations.langchain.runnable import BatchCall, RunBatch
from rgate_integrations.prompts import ANSWER
from rgate_integrations.runtime.flow import Flow
from rgate_integrations.runtime.records import message_logprobs
from rgate_integrations.runtime.text import redact

_T = TypeVar("_T")

_NAMES = ("base_model_id", "model_name", "model", "deployment_name", "model_id")
"""Where chat models keep the name of the LLM. Bedrock's first: its ``model_id`` may be an ARN that says nothing."""


def parts_of(runnable: Any) -> list[Runnable[Any, Any]]:
    """Return the runnables that a runnable is made of, in order; none for a model."""
    if isinstance(runnable, RunnableLambda):
        return list(runnable.deps)
    if isinstance(runnable, BaseLanguageModel) or not isinstance(runnable, BaseModel):
        return []
    return list(instances_in(vars(runnable), Runnable))  # type: ignore[type-abstract]  # it makes none


def instances_in(value: Any, kind: type[_T]) -> Iterator[_T]:
    """Yield the objects of a type in mappings, lists and tuples within each other."""
    if isinstance(value, kind):
        yield value
    elif isinstance(value, Mapping):
        yield from instances_in(list(value.values()), kind)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from instances_in(each, kind)


def with_logprobs(arm: Runnable[Any, Any]) -> Runnable[Any, Any] | None:
    """Return a copy of an arm whose chat model is asked for log-probabilities; None if it does not know them."""
    if isinstance(arm, BaseChatModel):
        # LangChain's OpenAI models, for one, have such a field; what the user set stays.
        if "logprobs" in type(arm).model_fields and getattr(arm, "logprobs", None) is None:
            return arm.bind(logprobs=True)
    elif isinstance(arm, RunnableBindingBase) and "logprobs" not in arm.kwargs:
        inner = with_logprobs(arm.bound)
        if inner is not None:
            return arm.model_copy(update={"bound": inner})
    elif isinstance(arm, RunnableSequence):
        steps = list(arm.steps)
        for place in reversed(range(len(steps))):  # the last model is the one that answers
            inner = with_logprobs(steps[place])
            if inner is not None:
                steps[place] = inner
                return RunnableSequence(*steps, name=arm.name)
    return None


def llm_name(arm: Runnable[Any, Any]) -> str:
    """Return the name of the LLM that answers in an arm; of several, such as fallbacks, the one that knows least.

    Empty where no model is found, or where one of them tells no name and the others know more than the default.
    """
    names = _llm_names(arm, {})
    return weakest(names) if names else ""


def _llm_names(arm: Runnable[Any, Any], options: Mapping[str, Any]) -> list[str]:
    """Return the name of each model that may answer in an arm; an empty one for a model that tells none."""
    if isinstance(arm, RunnableBindingBase):
        return _llm_names(arm.bound, {**arm.kwargs, **options})
    names: list[str] = []
    if isinstance(arm, RunnableSequence):
        for step in reversed(arm.steps):  # the last model is the one that answers
            names = names or _llm_names(step, {})
        return names
    parts = parts_of(arm)
    for part in parts:
        names += _llm_names(part, options)
    if isinstance(arm, RunnableConfigurableFields):
        for key, field in arm.fields.items():  # a call's config may choose among several models
            if key in _NAMES and isinstance(
                field, ConfigurableFieldSingleOption | ConfigurableFieldMultiOption
            ):
                names += map(str, field.options.values())
    if isinstance(arm, RunnableConfigurableAlternatives):
        for alternative in arm.alternatives.values():
            if not isinstance(alternative, Runnable):
                names.append("")  # what a factory would make is not known before it is called
    if not parts:  # a model, or such as what init_chat_model returns, which is no model itself
        name = _name_of(arm, options)
        if name or isinstance(arm, BaseLanguageModel):
            names.append(name)
    return names


def _name_of(model: Runnable[Any, Any], options: Mapping[str, Any]) -> str:
    """Return the name that a model, or the options of its call, tell; empty if they tell none."""
    bound = options.get("model") or options.get("model_name")
    if isinstance(bound, str) and bound.strip():
        return bound
    chosen: Any = getattr(model, "model_fields_set", ())
    elsewhere = bool(getattr(model, "openai_api_base", None))
    for place in _NAMES:
        told = getattr(model, place, None)
        # OpenAI's default says nothing of another server.
        if isinstance(told, str) and told.strip() and (place in chosen or not elsewhere):
            return told
    return ""


# --- what is asked of them before there is a decision --------------------------------------------------------------

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

    def drafting(self, asked: Sequence[Asked], configs: Sequence[RunnableConfig]) -> Flow[list[Draft | None]]:
        """Write a draft for each question, as one batch; those that are refused are asked again, for less.

        Returns:
            One draft a question, in order; None where the model failed.
        """
        drafts: list[Draft | None] = [None] * len(asked)
        waiting = list(range(len(asked)))
        forms = self._forms
        for number, form in enumerate(forms):
            prompts = [[SystemMessage(ANSWER.system), *asked[place].conversation] for place in waiting]
            hidden = [_hidden(configs[place], DRAFT_TAG) for place in waiting]
            answers = yield BatchCall(self.llm.bind(**form), prompts, hidden)
            refused = []
            for place, answer in zip(waiting, answers, strict=True):
                if not isinstance(answer, Exception) and self._forms is forms:
                    # What works for one question of a batch is what the model takes.
                    self._forms = forms[number:]
                if isinstance(answer, Exception) and says_unsupported(answer) and form is not forms[-1]:
                    refused.append(place)
                else:
                    drafts[place] = self._draft(answer, asked[place].conversation)
            if not refused:
                break
            waiting = refused
        return drafts

    def _draft(self, answer: Any, conversation: Sequence[BaseMessage]) -> Draft | None:
        """Return what a model answered as a draft; None if it failed or wrote nothing."""
        if isinstance(answer, Exception):
            problem = redact(answer, *(message.content for message in conversation))
            _log.warning("The LLM wrote no draft: %s: %s", type(answer).__name__, problem)
            return None
        if isinstance(answer, BaseMessage):
            metadata = answer.response_metadata
            tokens, logprobs = message_logprobs(metadata)
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


def condensing(
    condense: Runnable[Any, Any] | None, asked: Mapping[int, Asked], batch: RunBatch
) -> Flow[dict[int, Asked | Exception]]:
    """Turn the follow-ups among questions into ones that stand alone, as one batch.

    Args:
        condense: From messages to a question; None leaves them as they are.
        asked: The questions, by their place in the batch.
        batch: The inputs that they are from.

    Returns:
        For the place of each follow-up the question that stands alone, or why there is none.
    """
    if condense is None:
        return {}
    follow_ups = []
    conversations = []
    configs = []
    for place, each in asked.items():
        if each.history:
            follow_ups.append(place)
            conversations.append(each.conversation)
            configs.append(_hidden(batch.child(place), CONDENSE_TAG))
    results = yield BatchCall(condense, conversations, configs)
    return dict(zip(follow_ups, map(_standalone, results), strict=True))


def _standalone(result: Any) -> Asked | Exception:
    """Return the question in what a condensing runnable returned, or why there is none."""
    if isinstance(result, Exception):
        return result
    try:
        asked = Asked(asked_in(result).question)
    except InvalidQuestionError as error:
        return error
    if not asked.question.strip():
        return InvalidQuestionError("The condensed question is empty.")
    return asked


def _hidden(config: RunnableConfig, tag: str) -> RunnableConfig:
    """Return the config of a run that is no part of the answer: with this tag, and hidden from message streams."""
    return {**config, "tags": [*(config.get("tags") or []), NO_STREAM_TAG, tag]}
