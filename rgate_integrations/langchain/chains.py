"""The whole thing in one line: a gated RAG chain from a retriever and a chat model."""

from __future__ import annotations

from typing import Any

from langchain_core.documents import Document
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import BasePromptTemplate, ChatPromptTemplate
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import Runnable, RunnablePassthrough

from rgate_integrations.langchain.gate import RetrievalGate
from rgate_integrations.langchain.router import RetrievalRouter

PROMPT = ChatPromptTemplate.from_template(
    "Answer the question briefly, using the passages where they help.\n\n{context}\n\nQuestion: {question}"
)
DIRECT_PROMPT = ChatPromptTemplate.from_template("Answer the question briefly.\n\nQuestion: {question}")


def gated_rag(
    retriever: BaseRetriever,
    llm: Runnable[Any, Any],
    prompt: BasePromptTemplate[Any] | None = None,
    *,
    gate: RetrievalGate | Any = None,
) -> RetrievalRouter:
    """Return a chain from question to answer that retrieves only when the LLM does not know.

    Args:
        retriever: Finds passages.
        llm: Answers.
        prompt: Prompt with ``context`` and ``question``; known questions are asked without context.
        gate: A `RetrievalGate`, or its ``gate`` argument.
    """
    documents = retriever | format_documents
    rag = (
        {"context": documents, "question": RunnablePassthrough()}
        | (prompt or PROMPT)
        | llm
        | StrOutputParser()
    )
    direct = {"question": RunnablePassthrough()} | DIRECT_PROMPT | llm | StrOutputParser()
    decides = gate if isinstance(gate, RetrievalGate) else RetrievalGate(gate)
    return decides.route(retrieve=rag, direct=direct)


def format_documents(documents: list[Document]) -> str:
    """Join documents into the context of a prompt, each with its title if it has one."""
    texts = [
        f"{d.metadata['title']}: {d.page_content}" if d.metadata.get("title") else d.page_content
        for d in documents
    ]
    return "\n\n".join(texts)
