"""Drafts: a LlamaIndex LLM writes the first tokens of its answer, for the gate to judge."""

from __future__ import annotations

import logging

from llama_index.core.base.llms.types import ChatMessage, ChatResponse, CompletionResponse, MessageRole
from llama_index.core.llms import LLM
from llama_index.core.llms.structured_llm import StructuredLLM
from llama_index_instrumentation.dispatcher import active_instrument_tags, instrument_tags

from rgate_integrations.answering.partial_answer import draft_options, says_unsupported
from rgate_integrations.decision import Draft
from rgate_integrations.prompts import ANSWER
from rgate_integrations.runtime.flow import Call, Flow
from rgate_integrations.runtime.records import read_logprobs
from rgate_integrations.runtime.text import redact

DRAFT_TAG = "rgate_draft"
"""In the ``tags`` of every LlamaIndex event of a drafting call: what the LLM writes there is not the answer."""

_log = logging.getLogger("rgate_integrations")


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
        while isinstance(llm, StructuredLLM):
            llm = llm.llm
        self.llm = llm
        self.tokens = tokens
        self._options = draft_options(tokens)

    def write_draft(self, question: str) -> Flow[Draft | None]:
        """Write a draft, as a flow; None, and a line in the log, when the LLM fails."""
        llm = self.llm
        forms = self._options
        for number, options in enumerate(forms):
            if llm.metadata.is_chat_model:
                system = ChatMessage(role=MessageRole.SYSTEM, content=ANSWER.system)
                messages = [system, ChatMessage(role=MessageRole.USER, content=question)]
                asking = Call(llm.chat, llm.achat, messages, **options)
            else:
                prompt = f"{ANSWER.system}\n\nQuestion: {question}\nAnswer:"
                asking = Call(llm.complete, llm.acomplete, prompt, **options)
            try:
                with instrument_tags({**active_instrument_tags.get(), DRAFT_TAG: True}):
                    response = yield asking
            except Exception as error:  # providers raise errors of their own
                # A timeout says nothing about what the model takes: the next question is asked with everything.
                problem = redact(error, question)
                if not options or not says_unsupported(error):
                    _log.warning("The LLM wrote no draft: %s: %s", type(error).__name__, problem)
                    return None
                _log.info("The LLM refused %s: %s", ", ".join(options), problem)
            else:
                self._options = forms[number:]
                return self._draft(response)
        return None

    def _draft(self, response: ChatResponse | CompletionResponse) -> Draft:
        text = response.text if isinstance(response, CompletionResponse) else response.message.content
        # Each position is a list: the token that was written first, then those that were likely too.
        written = [position[0] for position in response.logprobs or [] if position]
        tokens, logprobs = read_logprobs(written)
        draft = Draft(
            text=(text or "").strip(),
            tokens=tokens,
            logprobs=logprobs or None,
            finished=False,
            source="llm",
            model=self.llm.metadata.model_name,
        )
        return draft.head(self.tokens)
