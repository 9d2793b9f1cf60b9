"""The answering LLM's own first tokens as drafts, with log-probabilities where its API gives them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

from llama_index.core.base.llms.types import ChatMessage, ChatResponse, CompletionResponse, MessageRole
from llama_index.core.llms import LLM

from rgate_integrations.decision import Draft
from rgate_integrations.prompts import ANSWER

_log = logging.getLogger("rgate_integrations")


class LLMDrafter:
    """Lets a LlamaIndex LLM write the first tokens of its answer.

    It is asked with ``max_tokens`` and ``logprobs``; one that refuses them is asked with fewer of them, and what
    worked is remembered. A question whose draft fails has none.

    Args:
        llm: The answering LLM.
        tokens: Greatest number of tokens.
    """

    def __init__(self, llm: LLM, tokens: int = 32) -> None:
        self.llm = llm
        self.tokens = tokens
        self._attempts: list[dict[str, Any]] = [
            {"max_tokens": tokens, "logprobs": True},
            {"max_tokens": tokens},
            {},
        ]

    def draft(self, questions: Sequence[str]) -> list[Draft | None]:
        """Write one draft a question."""
        return [self._one(q) for q in questions]

    async def adraft(self, questions: Sequence[str]) -> list[Draft | None]:
        """Write one draft a question, side by side, without blocking the event loop."""
        return list(await asyncio.gather(*(self._aone(q) for q in questions)))

    def _one(self, question: str) -> Draft | None:
        for options in list(self._attempts):
            try:
                if self.llm.metadata.is_chat_model:
                    return self._draft(self.llm.chat(_messages(question), **options))
                return self._draft(self.llm.complete(_prompt(question), **options))
            except Exception as error:  # providers raise errors of their own
                self._refused(options, error)
        return None

    async def _aone(self, question: str) -> Draft | None:
        for options in list(self._attempts):
            try:
                if self.llm.metadata.is_chat_model:
                    return self._draft(await self.llm.achat(_messages(question), **options))
                return self._draft(await self.llm.acomplete(_prompt(question), **options))
            except Exception as error:  # providers raise errors of their own
                self._refused(options, error)
        return None

    def _refused(self, options: dict[str, Any], error: Exception) -> None:
        if options and options in self._attempts:
            _log.info("The LLM does not take %s: %s", ", ".join(options), error)
            self._attempts.remove(options)
        elif not options:
            _log.warning("The LLM wrote no draft: %s: %s", type(error).__name__, error)

    def _draft(self, response: ChatResponse | CompletionResponse) -> Draft:
        text = response.message.content if isinstance(response, ChatResponse) else response.text
        steps = [step[0] for step in response.logprobs or [] if step]
        draft = Draft(
            text=(text or "").strip(),
            tokens=tuple(s.token for s in steps),
            logprobs=tuple(min(s.logprob, 0.0) for s in steps) if steps else None,
            finished=False,
            source="llm",
            model=self.llm.metadata.model_name,
        )
        return draft.head(self.tokens)


def _messages(question: str) -> list[ChatMessage]:
    return [
        ChatMessage(role=MessageRole.SYSTEM, content=ANSWER.system),
        ChatMessage(role=MessageRole.USER, content=question),
    ]


def _prompt(question: str) -> str:
    return f"{ANSWER.system}\n\nQuestion: {question}\nAnswer:"
