"""Drafts by a LlamaIndex LLM: the first tokens of its answer, for the gate to judge."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llama_index.core.base.llms.types import ChatMessage, ChatResponse, CompletionResponse, MessageRole
from llama_index.core.llms import LLM
from llama_index.core.llms.structured_llm import StructuredLLM
from llama_index_instrumentation.dispatcher import active_instrument_tags, instrument_tags

from rgate_integrations.answering.drafting import DraftWriter
from rgate_integrations.decision import Draft
from rgate_integrations.prompts import ANSWER
from rgate_integrations.runtime.flow import Call, Flow
from rgate_integrations.runtime.records import read_logprobs
from rgate_integrations.runtime.replies import get_field

DRAFT_TAG = "rgate_draft"
"""Tag of all LlamaIndex events of a drafting call, to tell its text from the answer."""


class LLMDrafter(DraftWriter[str]):
    """Lets a LlamaIndex LLM write the first tokens of its answer. The call's events have the tag `DRAFT_TAG`.

    Args:
        llm: The answering LLM. If it writes structured output, the LLM that it wraps writes the draft, because the
            beginning of a JSON object says nothing about the answer.
        tokens: Maximum number of tokens of a draft, at least 1.
    """

    def __init__(self, llm: LLM, tokens: int) -> None:
        super().__init__(tokens)
        while isinstance(llm, StructuredLLM):
            llm = llm.llm
        self.llm = llm

    def ask(self, prompts: Sequence[str], options: dict[str, Any]) -> Flow[list[Any]]:
        """Ask the LLM a question, the only item of ``prompts``; return a list with its response or exception."""
        (question,) = prompts
        llm = self.llm
        if llm.metadata.is_chat_model:
            system = ChatMessage(role=MessageRole.SYSTEM, content=ANSWER.system)
            messages = [system, ChatMessage(role=MessageRole.USER, content=question)]
            call = Call(llm.chat, llm.achat, messages, **options)
        else:
            prompt = f"{ANSWER.system}\n\nQuestion: {question}\nAnswer:"
            call = Call(llm.complete, llm.acomplete, prompt, **options)
        try:
            with instrument_tags({**active_instrument_tags.get(), DRAFT_TAG: True}):
                return [(yield call)]
        except Exception as error:  # each provider raises its own exceptions
            return [error]

    def read_draft(self, answer: ChatResponse | CompletionResponse) -> Draft:
        """Convert a response to a draft."""
        # Each position is a list: the generated token, then other likely ones.
        tokens, logprobs = read_logprobs([position[0] for position in answer.logprobs or [] if position])
        return Draft.from_message(
            answer if isinstance(answer, CompletionResponse) else answer.message,
            usage=get_field(answer.raw, "usage"),
            tokens=tokens,
            logprobs=logprobs or None,
            source="llm",
            model=self.llm.metadata.model_name,
        )

    def private_texts(self, prompt: str) -> list[str]:
        """Return the only text that logs must not quote, the question."""
        return [prompt]
