"""The engine for known questions: the LLM alone, asked as far as possible as the engine with passages asks it."""

from __future__ import annotations

import logging

from llama_index.core.base.base_query_engine import BaseQueryEngine
from llama_index.core.base.llms.types import ChatMessage, MessageRole
from llama_index.core.indices.empty import EmptyIndex
from llama_index.core.llms import LLM
from llama_index.core.llms.structured_llm import StructuredLLM
from llama_index.core.prompts import BasePromptTemplate, ChatPromptTemplate, SelectorPromptTemplate
from llama_index.core.prompts.chat_prompts import TEXT_QA_SYSTEM_PROMPT
from llama_index.core.response_synthesizers import BaseSynthesizer

_log = logging.getLogger("rgate_integrations")

_PROMPTS = ("text_qa_template", "summary_template", "simple_template")
"""The prompts that a synthesizer may ask its first question with; it has one of them."""
_MARK = "\0"
"""Stands for what a prompt is filled with, to see where that is."""


def find_synthesizer(engine: BaseQueryEngine) -> BaseSynthesizer | None:
    """Return an engine's synthesizer, or else that of an engine inside; None without one."""
    waiting: list[object] = [engine]
    while waiting:
        part = waiting.pop(0)
        if not isinstance(part, BaseQueryEngine):
            continue
        synthesizer = vars(part).get("_response_synthesizer")
        if isinstance(synthesizer, BaseSynthesizer):
            return synthesizer
        for value in vars(part).values():
            waiting += value if isinstance(value, list) else [value]
    return None


def direct_engine(
    query_engine: BaseQueryEngine, llm: LLM, prompt: BasePromptTemplate | None, *, streaming: bool
) -> BaseQueryEngine:
    """Return an engine that lets an LLM answer alone, and gives what the other engine's ``output_cls`` says.

    Args:
        query_engine: The engine with passages.
        llm: The LLM.
        prompt: What it is asked, with ``query_str``; when None the question alone, after the system messages of
            the engine's own prompt.
        streaming: Whether it streams; structured output does not.
    """
    if prompt is None:
        system = _system_messages(query_engine, llm)
        if system:
            question = ChatMessage(role=MessageRole.USER, content="{query_str}")
            prompt = ChatPromptTemplate(message_templates=[*system, question])
    output_cls = getattr(find_synthesizer(query_engine), "_output_cls", None)
    if output_cls is not None and not isinstance(llm, StructuredLLM):
        llm = llm.as_structured_llm(output_cls)
    streaming = streaming and not isinstance(llm, StructuredLLM)
    return EmptyIndex().as_query_engine(llm=llm, simple_template=prompt, streaming=streaming)


def _system_messages(engine: BaseQueryEngine, llm: LLM) -> list[ChatMessage]:
    """Return the system messages of the prompt with which an engine asks, without those that hold passages.

    LlamaIndex's own is left out: it forbids the LLM to use what it knows.
    """
    synthesizer = find_synthesizer(engine)
    prompts = {} if synthesizer is None else synthesizer.get_prompts()
    template = next((prompts[name] for name in _PROMPTS if name in prompts), None)
    if isinstance(template, SelectorPromptTemplate):
        template = template.select(llm)
    if template is None:
        return []
    marks = {name: _MARK for name in template.template_vars if name not in template.kwargs}
    try:
        messages = template.format_messages(llm=llm, **marks)
    except Exception as error:  # a function of the user's own fills it, and cannot do without passages
        _log.warning("The engine's prompt is not taken over for known questions: %s", type(error).__name__)
        return []
    system = []
    for message in messages:
        text = message.content or ""
        if message.role == MessageRole.SYSTEM and _MARK not in text and text != TEXT_QA_SYSTEM_PROMPT.content:
            system.append(message)
    return system
