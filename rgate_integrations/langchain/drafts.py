"""The answering chat model's own first tokens as drafts, with log-probabilities where its API gives them."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import BaseMessage, HumanMessage, SystemMessage
from langchain_core.runnables import Runnable, RunnableConfig

from rgate_integrations.decision import Draft
from rgate_integrations.prompts import ANSWER

_log = logging.getLogger("rgate_integrations")
_CUT = ("length", "max_tokens", "MAX_TOKENS")


class ChatDrafter:
    """Lets a chat model write the first tokens of its answer.

    The model is asked with ``max_tokens`` and ``logprobs``; one that refuses them is asked with fewer of them, and
    what worked is remembered. A question whose draft fails has none.

    Args:
        llm: The answering chat model, or any runnable from messages to a message or string.
        tokens: Greatest number of tokens.
    """

    def __init__(self, llm: Runnable[Any, Any], tokens: int = 32) -> None:
        self.llm = llm
        self.tokens = tokens
        limited: list[dict[str, Any]] = [{"max_tokens": tokens, "logprobs": True}, {"max_tokens": tokens}]
        self._attempts = [*limited, {}] if isinstance(llm, BaseChatModel) else [{}]

    def draft(
        self, questions: Sequence[str], config: RunnableConfig | list[RunnableConfig] | None = None
    ) -> list[Draft | None]:
        """Write one draft a question, as one batch."""
        found: list[Any] = []
        for options in list(self._attempts):
            found = self._bound(options).batch(_messages(questions), config, return_exceptions=True)
            if not self._refused(options, found):
                break
        return [self._draft(f) for f in found]

    async def adraft(
        self, questions: Sequence[str], config: RunnableConfig | list[RunnableConfig] | None = None
    ) -> list[Draft | None]:
        """Write one draft a question, as one batch, without blocking the event loop."""
        found: list[Any] = []
        for options in list(self._attempts):
            found = await self._bound(options).abatch(_messages(questions), config, return_exceptions=True)
            if not self._refused(options, found):
                break
        return [self._draft(f) for f in found]

    def _bound(self, options: dict[str, Any]) -> Runnable[Any, Any]:
        return self.llm.bind(**options) if options else self.llm

    def _refused(self, options: dict[str, Any], found: Sequence[Any]) -> bool:
        """Whether the model took none of the questions with these options; then they are not tried again."""
        refused = bool(found) and all(isinstance(f, Exception) for f in found)
        if refused and len(self._attempts) > 1:
            _log.info("The LLM does not take %s: %s", ", ".join(options), found[0])
            self._attempts.remove(options)
        return refused

    def _draft(self, answer: Any) -> Draft | None:
        if isinstance(answer, Exception):
            _log.warning("The LLM wrote no draft: %s: %s", type(answer).__name__, answer)
            return None
        metadata = answer.response_metadata if isinstance(answer, BaseMessage) else {}
        text = answer.text if isinstance(answer, BaseMessage) else str(answer)
        tokens, logprobs = token_logprobs(metadata)
        reason = metadata.get("finish_reason") or metadata.get("stop_reason")
        draft = Draft(
            text=text.strip(),
            tokens=tokens,
            logprobs=logprobs,
            finished=reason not in _CUT,
            source="llm",
            model=str(metadata.get("model_name") or metadata.get("model") or ""),
        )
        return draft.head(self.tokens)


def token_logprobs(metadata: Mapping[str, Any]) -> tuple[tuple[str, ...], tuple[float, ...] | None]:
    """Read tokens and log-probabilities from a message's ``response_metadata``, as OpenAI-style servers give them.

    Returns:
        The tokens and their log-probabilities; ``((), None)`` when there are none.
    """
    given = metadata.get("logprobs")
    content = given.get("content") if isinstance(given, Mapping) else given
    if not isinstance(content, Sequence) or isinstance(content, str) or not content:
        return (), None
    try:
        tokens = tuple(str(c["token"]) for c in content)
        return tokens, tuple(min(float(c["logprob"]), 0.0) for c in content)
    except (KeyError, TypeError, ValueError):
        return (), None


def _messages(questions: Sequence[str]) -> list[Any]:
    return [[SystemMessage(ANSWER.system), HumanMessage(q)] for q in questions]
