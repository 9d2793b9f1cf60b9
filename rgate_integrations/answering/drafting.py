"""What adapters share in drafting: the user's own LLM writes the first tokens of its answer, for a gate to judge."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, Generic, TypeVar

from rgate_integrations.decision import Draft
from rgate_integrations.errors import NoAnswerError, no_answer
from rgate_integrations.runtime.flow import Flow
from rgate_integrations.runtime.records import read_choice_logprobs
from rgate_integrations.runtime.replies import get_field
from rgate_integrations.runtime.text import redact

_Asked = TypeVar("_Asked")
_log = logging.getLogger("rgate_integrations")


class Drafter(ABC, Generic[_Asked]):
    """Lets an LLM write the first tokens of its answers.

    It is asked with ``max_tokens`` and ``logprobs``. One that says that it does not take them is asked with fewer of
    them, and what it took is remembered. Any other error, such as a timeout, costs that question its draft and
    changes nothing for the next call.

    Args:
        tokens: Maximum number of tokens of a draft, at least 1.

    Attributes:
        forms: The options to ask with; an LLM that refuses some is asked with the next.
    """

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.forms: list[dict[str, Any]] = [
            {"max_tokens": tokens, "logprobs": True},
            {"max_tokens": tokens},
            {},
        ]

    @abstractmethod
    def ask(self, asked: Sequence[_Asked], options: dict[str, Any]) -> Flow[Sequence[Any]]:
        """Ask the LLM several questions; returns each answer, or its exception."""

    @abstractmethod
    def read_draft(self, answer: Any) -> Draft:
        """Return an answer as a draft."""

    @abstractmethod
    def private_texts(self, asked: _Asked) -> Iterable[object]:
        """Return what an error may quote and the log must not."""

    def write_drafts(self, asked: Sequence[_Asked]) -> Flow[list[Draft | NoAnswerError | None]]:
        """Write a draft for each question; None, and a line in the log, where the LLM fails.

        Where it writes no answer, such as thoughts alone, that is the error, and nothing can be judged.
        """
        drafts: list[Draft | NoAnswerError | None] = []
        answers = yield from self._ask_for_less(asked, self.forms)
        for each, answer in zip(asked, answers, strict=True):
            draft: Draft | NoAnswerError | None = None
            if isinstance(answer, Exception):
                problem = redact(answer, *self.private_texts(each))
                _log.warning("The LLM wrote no draft: %s: %s", type(answer).__name__, problem)
            else:
                draft = self.read_draft(answer).head(self.tokens)
                if not draft.text:
                    draft = no_answer(draft.missing, thinking=draft.is_cut_off)
                    _log.warning("The LLM wrote no draft: %s", draft.message)
            drafts.append(draft)
        return drafts

    def _ask_for_less(self, asked: Sequence[_Asked], forms: list[dict[str, Any]]) -> Flow[Sequence[Any]]:
        """Ask with the first of these forms; where that is refused, with the next."""
        options, *others = forms
        answers = yield from self.ask(asked, options)
        is_taken = any(not isinstance(answer, Exception) for answer in answers)
        refused = [each for each, answer in zip(asked, answers, strict=True) if says_unsupported(answer)]
        if refused and others:
            again = iter((yield from self._ask_for_less(refused, others)))
            answers = [next(again) if says_unsupported(answer) else answer for answer in answers]
        if is_taken:  # what works for one question of a batch is what the LLM takes
            self.forms = forms
        return answers


_FINISH_REASONS = ("finish_reason", "stop_reason", "done_reason", "stopReason", "status")


def read_message(message: Any) -> Draft:
    """Return what a chat model of LangChain answered as the LLM's draft."""
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


_REFUSED = frozenset({400, 404, 405, 415, 422, 501})
_UNSUPPORTED = ("unsupported", "notsupported", "notimplemented", "badrequest", "unprocessable")
_WORDS = ("logprob", "max_tokens", "unsupported", "not supported", "unexpected keyword", "unknown parameter")


def says_unsupported(answer: object) -> bool:
    """Return whether an LLM's answer is an error which says that it does not take what it was asked with.

    That is a status such as 400, a `TypeError` about an argument, an error of a type that says so, or a `ValueError`
    that names what was asked for. Providers raise errors of their own classes, so they are told apart by what they
    carry.
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
