"""Makes the engine for known questions: the LLM alone, with the system messages of the RAG engine's prompt."""

from __future__ import annotations

import logging
from typing import Any, Self

from llama_index.core.base.base_query_engine import BaseQueryEngine
from llama_index.core.base.llms.base import BaseLLM
from llama_index.core.base.llms.types import ChatMessage, MessageRole
from llama_index.core.indices.empty import EmptyIndex
from llama_index.core.llms import LLM
from llama_index.core.llms.structured_llm import StructuredLLM
from llama_index.core.prompts import BasePromptTemplate, ChatPromptTemplate, SelectorPromptTemplate
from llama_index.core.prompts.chat_prompts import TEXT_QA_SYSTEM_PROMPT
from llama_index.core.prompts.default_prompts import DEFAULT_SIMPLE_INPUT_PROMPT
from llama_index.core.response_synthesizers import BaseSynthesizer
from pydantic import PrivateAttr

from rgate_integrations.errors import ConfigurationError

_log = logging.getLogger("rgate_integrations")

_PROMPTS = ("text_qa_template", "summary_template", "simple_template")  # a synthesizer uses one of these
_MARK = "\0"
# Stand for what a synthesizer puts into a prompt, to see which messages contain it. LlamaIndex leaves any other word
# in braces as it is, such as in LaTeX.
_MARKS = {"context_str": _MARK, "query_str": _MARK}


def find_synthesizer(engine: BaseQueryEngine) -> BaseSynthesizer | None:
    """Return the response synthesizer of an engine, or of the first engine nested in it that has one; else None."""
    engines = [engine] if isinstance(engine, BaseQueryEngine) else []
    for part in engines:  # grows
        synthesizer = vars(part).get("_response_synthesizer")
        if isinstance(synthesizer, BaseSynthesizer):
            return synthesizer
        for value in vars(part).values():
            for inner in value if isinstance(value, list) else [value]:
                # By identity: comparing engines, such as each other's fallbacks, may never end.
                if isinstance(inner, BaseQueryEngine) and not any(inner is known for known in engines):
                    engines.append(inner)
    return None


def direct_engine(
    query_engine: BaseQueryEngine, llm: LLM, prompt: BasePromptTemplate | None, *, streaming: bool
) -> BaseQueryEngine:
    """Return an engine in which an LLM answers alone.

    If the RAG engine has an ``output_cls``, the answers are objects of that class.

    Args:
        query_engine: The RAG engine.
        llm: The LLM.
        prompt: The prompt, with ``query_str``; a `DirectPrompt` when None.
        streaming: Whether the engine streams; with structured output it never does.

    Raises:
        ConfigurationError: The prompt does not contain the question.
    """
    if prompt is None:
        prompt = DirectPrompt(query_engine)
    elif not _shows_question(prompt, llm):
        raise ConfigurationError(
            "direct_prompt= has no {query_str}, so the LLM would not see the question.",
            hint='For example, PromptTemplate("Answer in one sentence: {query_str}").',
        )
    output_cls = getattr(find_synthesizer(query_engine), "_output_cls", None)
    if output_cls is not None and not isinstance(llm, StructuredLLM):
        llm = llm.as_structured_llm(output_cls)
    # A structured answer is an object, which exists only once it is complete.
    streaming = streaming and not isinstance(llm, StructuredLLM)
    return EmptyIndex().as_query_engine(llm=llm, simple_template=prompt, streaming=streaming)


def _shows_question(prompt: BasePromptTemplate, llm: LLM) -> bool:
    """Return whether a prompt contains the question, or fails without a real one."""
    try:
        messages = prompt.format_messages(llm=llm, query_str=_MARK)
    except Exception:  # the template may call the user's functions
        return True
    return any(_MARK in (message.content or "") for message in messages)


class DirectPrompt(SelectorPromptTemplate):
    """The system messages of a RAG engine's prompt, as it is at each question, followed by the question.

    Args:
        engine: The engine.
    """

    _engine: BaseQueryEngine = PrivateAttr()
    _failed: BasePromptTemplate | None = PrivateAttr(None)

    def __init__(self, engine: BaseQueryEngine) -> None:
        super().__init__(DEFAULT_SIMPLE_INPUT_PROMPT)
        self._engine = engine

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        """Return a copy for the copy of the engine, if one is made, too; ``get_prompts`` copies prompts alone."""
        return type(self)((memo or {}).get(id(self._engine), self._engine))

    def select(self, llm: BaseLLM | None = None) -> BasePromptTemplate:
        """Return the prompt for an LLM."""
        system = self._system_messages(llm)
        question = ChatMessage(role=MessageRole.USER, content="{query_str}")
        return ChatPromptTemplate(message_templates=[*system, question]) if system else self.default_template

    def _system_messages(self, llm: BaseLLM | None) -> list[ChatMessage]:
        """Return the system messages of the engine's prompt, except those with passages or the question.

        LlamaIndex's default system message is left out, because it forbids the LLM to use its own knowledge. If the
        prompt cannot be filled in, a warning is logged once, and no messages are returned.
        """
        synthesizer = find_synthesizer(self._engine)
        # The public method copies every prompt.
        prompts = {} if synthesizer is None else synthesizer._get_prompts()  # noqa: SLF001
        template = next((prompts[name] for name in _PROMPTS if name in prompts), None)
        if isinstance(template, SelectorPromptTemplate):
            template = template.select(llm)
        if template is None:
            return []
        try:
            messages = template.format_messages(llm=llm, **_MARKS)
        except Exception as error:  # the template may call the user's functions, which may need passages
            if template is not self._failed:
                self._failed = template
                _log.warning(
                    "Known questions are answered without the engine's prompt, which raised %s.",
                    type(error).__name__,
                )
            return []
        system = []
        for message in messages:
            text = message.content or ""
            if (
                message.role == MessageRole.SYSTEM
                and _MARK not in text
                and text != TEXT_QA_SYSTEM_PROMPT.content
            ):
                system.append(message)
        return system
