"""The answering LLM's own first tokens as drafts, with log-probabilities where its API gives them."""

from __future__ import annotations

import logging
from typing import Any

from llama_index.core.base.llms.types import ChatMessage, ChatResponse, CompletionResponse, MessageRole
from llama_index.core.llms import LLM
from llama_index.core.llms.structured_llm import StructuredLLM
from llama_index_instrumentation.dispatcher import active_instrument_tags, instrument_tags

from rgate_integrations.answering.drafting import DraftRequest, says_unsupported
from rgate_integrations.decision import Draft
from rgate_integrations.prompts import ANSWER
from rgate_integrations.runtime.flow import Call, Flow
from rgate_integrations.runtime.logprobs import read_logprobs

_log = logging.getLogger("rgate_integrations")

DRAFT_TAG = "rgate_draft"
"""In the ``tags`` of every LlamaIndex event of a drafting call: what the LLM writes there is not the answer."""


class LLMDrafter:
    """Lets a LlamaIndex LLM write the first tokens of its answer.

    It is asked with ``max_tokens`` and ``logprobs``. One that says that it does not take them is asked with fewer of
    them, and what worked is remembered. Events of the call have the tag `DRAFT_TAG`.

    Args:
        llm: The answering LLM. Of one with structured output the LLM inside drafts: the beginning of a JSON object
            says nothing.
        tokens: Maximum number of tokens of a draft, at least 1.
    """

    def __init__(self, llm: LLM, tokens: int = 32) -> None:
        self.llm = llm
        self.writer = _plain(llm)
        self.tokens = tokens
        self.request = DraftRequest(tokens)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle and copy the LLM and the length; what was learned about it is learned again."""
        return type(self), (self.llm, self.tokens)

    def drafting(self, question: str) -> Flow[Draft | None]:
        """Write a draft, as a flow; None, and a line in the log, when the LLM fails."""
        refusal: Exception | None = None
        for form in self.request.forms:
            try:
                with instrument_tags({**active_instrument_tags.get(), DRAFT_TAG: True}):
                    response = yield self._asking(question, form)
            except Exception as error:  # providers raise errors of their own
                if not says_unsupported(error):
                    # A timeout says nothing about what the model takes: the next question is asked with everything.
                    _log.warning("The LLM wrote no draft: %s: %s", type(error).__name__, error)
                    return None
                _log.info("The LLM refused %s: %s", ", ".join(form) or "a request without options", error)
                refusal = error
            else:
                self.request.worked(form)
                return self._draft(response)
        _log.warning(
            "The LLM wrote no draft: it refused every form of the request, at last with: %s", refusal
        )
        return None

    def _asking(self, question: str, form: dict[str, Any]) -> Call:
        if not self.writer.metadata.is_chat_model:
            prompt = f"{ANSWER.system}\n\nQuestion: {question}\nAnswer:"
            return Call(self.writer.complete, self.writer.acomplete, prompt, **form)
        messages = [
            ChatMessage(role=MessageRole.SYSTEM, content=ANSWER.system),
            ChatMessage(role=MessageRole.USER, content=question),
        ]
        return Call(self.writer.chat, self.writer.achat, messages, **form)

    def _draft(self, response: ChatResponse | CompletionResponse) -> Draft:
        text = response.message.content if isinstance(response, ChatResponse) else response.text
        # Each position is a list: the token that was written first, then those that were likely too.
        written = [position[0] for position in response.logprobs or [] if position]
        tokens, logprobs = read_logprobs(written)
        draft = Draft(
            text=(text or "").strip(),
            tokens=tokens,
            logprobs=logprobs or None,
            finished=False,
            source="llm",
            model=self.writer.metadata.model_name,
        )
        return draft.head(self.tokens)


def _plain(llm: LLM) -> LLM:
    while isinstance(llm, StructuredLLM):
        llm = llm.llm
    return llm
