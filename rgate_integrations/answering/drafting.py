"""Drafts by the user's own LLM: the first tokens of its answer, for a gate to judge; and its whole answers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Generic, TypeVar

from rgate_integrations.decision import Draft, Request
from rgate_integrations.engine.decider import Failed
from rgate_integrations.errors import no_answer
from rgate_integrations.models.base import LanguageModel
from rgate_integrations.prompts import (
    ANSWER,
    ANSWER_WITH_PASSAGES,
    PromptTemplate,
    TitledText,
    format_passages,
)
from rgate_integrations.runtime.flow import Flow
from rgate_integrations.runtime.records import read_choice_logprobs
from rgate_integrations.runtime.replies import get_field
from rgate_integrations.runtime.text import logger, redact

DRAFT_TAG = "rgate_draft"
"""Tag of the runs and events of a drafting call, which are not part of the answer."""

_Prompt = TypeVar("_Prompt")


class DraftWriter(ABC, Generic[_Prompt]):
    """Lets an LLM write the first tokens of its answers.

    It sends ``max_tokens`` and ``logprobs``. If the LLM rejects an option, the request is repeated with fewer
    options, and later calls start with those that worked. After any other error, such as a timeout, the question
    has no draft and retrieves, and nothing changes for later calls.

    Args:
        tokens: Maximum number of tokens of a draft, at least 1.

    Attributes:
        forms: Sets of options to send, in order of preference: if the first set is rejected, the next is
            used.
    """

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.forms: list[dict[str, Any]] = [
            {"max_tokens": tokens, "logprobs": True},
            {"max_tokens": tokens},
            {},
        ]

    @abstractmethod
    def ask(self, prompts: Sequence[_Prompt], options: dict[str, Any]) -> Flow[Sequence[Any]]:
        """Send prompts with these options to the LLM, and return the answer or the exception of each."""

    @abstractmethod
    def read_draft(self, answer: Any) -> Draft:
        """Convert one answer from `ask` to a draft. Exceptions are not passed to it."""

    @abstractmethod
    def private_texts(self, prompt: _Prompt) -> Iterable[object]:
        """Return the texts that an error message may quote but the log must not contain."""

    def write_drafts(self, prompts: Sequence[_Prompt]) -> Flow[list[Draft | Exception]]:
        """Return the LLM's draft for each prompt, or the exception that prevented it, which is also logged.

        A reply without an answer, such as one with only thoughts, gives a draft with an empty text, which counts
        toward the cost; `attach_draft` refuses it.
        """
        drafts: list[Draft | Exception] = []
        answers = yield from self._ask_in_form(prompts, self.forms)
        for prompt, answer in zip(prompts, answers, strict=True):
            draft = answer if isinstance(answer, Exception) else self.read_draft(answer).head(self.tokens)
            error = _refuse_empty(draft)
            if isinstance(error, Exception):
                message = redact(error, *self.private_texts(prompt))
                logger.warning("The LLM wrote no draft: %s: %s", type(error).__name__, message)
            drafts.append(draft)
        return drafts

    def _ask_in_form(self, prompts: Sequence[_Prompt], forms: list[dict[str, Any]]) -> Flow[Sequence[Any]]:
        """Send prompts with the first set of options, and rejected ones again with the next; return all answers."""
        options, *simpler = forms
        answers = yield from self.ask(prompts, options)
        works = any(not isinstance(answer, Exception) for answer in answers)
        refused = [
            prompt for prompt, answer in zip(prompts, answers, strict=True) if says_unsupported(answer)
        ]
        if refused and simpler:
            retries = iter((yield from self._ask_in_form(refused, simpler)))
            answers = [next(retries) if says_unsupported(answer) else answer for answer in answers]
        # Set after the retries, because they may set a simpler form. A single answer shows that the LLM accepts
        # the form used here.
        if works:
            self.forms = forms
        return answers


def attach_draft(request: Request | Failed, draft: Draft | Exception | None) -> Request | Failed:
    """Return a request with this draft.

    `Failed` if the request has failed already, or the draft is an exception or has an empty text.
    """
    if isinstance(request, Failed):
        return request
    draft = _refuse_empty(draft)
    if isinstance(draft, Exception):
        return Failed(draft, request.question, request.threshold)
    return replace(request, draft=draft)


def _refuse_empty(draft: Draft | Exception | None) -> Draft | Exception | None:
    """Return a `NoAnswerError` for a draft with an empty text; anything else unchanged."""
    if isinstance(draft, Draft) and not draft.text:
        return no_answer(draft.non_answer, thinking=draft.is_cut_off)
    return draft


_FINISH_REASONS = ("finish_reason", "stop_reason", "done_reason", "stopReason", "status")


def read_message(message: Any) -> Draft:
    """Convert a message of a LangChain chat model to a draft."""
    metadata = get_field(message, "response_metadata") or {}
    usage = get_field(message, "usage_metadata") or {}
    tokens, logprobs = read_choice_logprobs(metadata)
    return Draft.from_message(
        message,
        usage=usage,
        reason=next(filter(None, map(metadata.get, _FINISH_REASONS)), None),
        tokens=tokens,
        logprobs=logprobs or None,
        source="llm",
        model=str(metadata.get("model_name") or metadata.get("model") or ""),
        prompt_tokens=usage.get("input_tokens", 0),
    )


# Statuses with which servers reject a field. Others, such as 401, 429 or 500, concern every request.
_REFUSED = frozenset({400, 404, 405, 415, 422, 501})
_UNSUPPORTED = ("unsupported", "notsupported", "notimplemented", "badrequest", "unprocessable")
_WORDS = ("logprob", "max_tokens", "unsupported", "not supported", "unexpected keyword", "unknown parameter")


def says_unsupported(answer: object) -> bool:
    """Return whether an LLM's answer is an error about an unsupported option of the call.

    Each provider has its own error classes, so only status, name and message can tell. An error with a status
    counts if the status is 400 or another that rejects a field. An error without a status counts if it is a
    `TypeError` about an argument, its class has a name such as ``UnsupportedParamsError``, or it is a
    `ValueError` that names an option.
    """
    if not isinstance(answer, Exception):
        return False
    for holder in (answer, getattr(answer, "response", None)):
        for name in ("status_code", "http_status", "status", "code"):
            status = getattr(holder, name, None)
            if isinstance(status, int) and not isinstance(status, bool):
                return status in _REFUSED
    text = str(answer).lower()
    if isinstance(answer, TypeError):
        return "argument" in text
    if any(word in type(answer).__name__.lower() for word in _UNSUPPORTED):
        return True
    return isinstance(answer, ValueError) and any(word in text for word in _WORDS)


def write_answers(
    llm: LanguageModel,
    questions: Sequence[str],
    passages: Sequence[Sequence[TitledText]],
    *,
    tokens: int = 64,
    prompt: PromptTemplate = ANSWER,
) -> list[Draft]:
    """Let an LLM answer questions: those with passages in one batch, the others in another.

    Args:
        llm: The answering LLM.
        questions: The questions.
        passages: Passages for each question; an empty sequence for an answer without passages.
        tokens: Maximum number of tokens of an answer, at least 1.
        prompt: The prompt for questions without passages; it has the field ``question``.

    Returns:
        One answer per question, in order.
    """
    # A model call has a single template, so questions are grouped by it.
    batches: dict[PromptTemplate, dict[int, dict[str, str]]] = {}
    for index, (question, texts) in enumerate(zip(questions, passages, strict=True)):
        values = {"question": question}
        if texts:
            values["passages"] = format_passages(texts)
        batches.setdefault(ANSWER_WITH_PASSAGES if texts else prompt, {})[index] = values
    answers: dict[int, Draft] = {}
    for template, batch in batches.items():
        answers.update(zip(batch, llm.generate(template, list(batch.values()), tokens=tokens), strict=True))
    return [answers[index] for index in range(len(questions))]
