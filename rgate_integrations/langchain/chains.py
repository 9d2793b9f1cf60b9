"""`gated_rag`: a whole gated RAG chain in one line, from a retriever and a chat model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from langchain_core.documents import Document
from langchain_core.messages import SystemMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import BasePromptTemplate, ChatPromptTemplate
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import Runnable, RunnablePassthrough

from rgate_integrations.calling import DecidesBatches
from rgate_integrations.langchain.gate import RetrievalGate, as_retrieval_gate
from rgate_integrations.langchain.router import RetrievalRouter
from rgate_integrations.prompts import ANSWER, ANSWER_WITH_PASSAGES, PromptTemplate, format_passages


def gated_rag(
    retriever: BaseRetriever,
    llm: Runnable[Any, Any],
    prompt: BasePromptTemplate[Any] | None = None,
    *,
    gate: RetrievalGate | DecidesBatches | str | None = None,
) -> RetrievalRouter:
    """Return a chain from question to answer that retrieves only when the LLM does not know.

    Args:
        retriever: Finds passages.
        llm: Answers.
        prompt: Prompt with ``context`` and ``question``; known questions are asked without context. By default the
            prompts of this package's own command line.
        gate: A `RetrievalGate`, or its ``gate`` argument.
    """
    question: Runnable[Any, Any] = RunnablePassthrough()
    with_passages = prompt or _chat_prompt(ANSWER_WITH_PASSAGES, passages="context", question="question")
    closed_book = _chat_prompt(ANSWER, question="question")
    read = {"context": retriever | format_documents, "question": question}
    retrieve = read | with_passages | llm | StrOutputParser()
    direct = {"question": question} | closed_book | llm | StrOutputParser()
    return as_retrieval_gate(gate).route(retrieve=retrieve, direct=direct)


def format_documents(documents: Sequence[Document]) -> str:
    """Join documents into the context of a prompt: numbered, each with its title if it has one."""
    passages = [
        _TitledDocument(title=str(document.metadata.get("title") or ""), text=document.page_content)
        for document in documents
    ]
    return format_passages(passages)


@dataclass(frozen=True)
class _TitledDocument:
    title: str
    text: str


def _chat_prompt(template: PromptTemplate, **variables: str) -> ChatPromptTemplate:
    """Return a prompt of this package as LangChain's, each field under the variable name given for it."""
    fields = {name: f"{{{variable}}}" for name, variable in variables.items()}
    user = template.user.format(**fields)
    # The system text has no fields; as a message, and not a template, its braces would stay braces.
    return ChatPromptTemplate.from_messages([SystemMessage(template.system), ("human", user)])
