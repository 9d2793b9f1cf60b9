"""User code, for a type checker only: what it sees of the LangChain adapter. `test_langchain_types` checks it."""

from collections.abc import Iterator
from typing import Any, assert_type

from langchain_core.documents import Document
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import Runnable, RunnableLambda
from typing_extensions import TypedDict

from rgate_integrations import Decision
from rgate_integrations.langchain import GatedRetriever, RetrievalGate, RetrievalRouter


class State(TypedDict):
    """A user's own state."""

    messages: list[BaseMessage]


def decisions(gate: RetrievalGate, state: State) -> None:
    assert_type(gate.invoke("who?"), Decision)
    assert_type(gate.invoke({"question": "who?"}), Decision)
    assert_type(gate.invoke(state), Decision)
    assert_type(gate.invoke([HumanMessage("who?")]), Decision)
    assert_type(gate.batch(["who?", "when?"]), list[Decision])
    assert_type(gate.invoke("who?").p_known, float)


async def decided_later(gate: RetrievalGate) -> None:
    assert_type(await gate.ainvoke("who?"), Decision)
    assert_type(await gate.abatch(["who?"]), list[Decision])


def upper(text: str) -> str:
    return text.upper()


def length(text: str) -> int:
    return len(text)


def routes(gate: RetrievalGate, rag: Runnable[str, str], llm: Runnable[str, AIMessage]) -> None:
    alike = gate.route(retrieve=rag, direct=rag)
    assert_type(alike, RetrievalRouter[str, str])
    assert_type(alike.invoke("who?"), str)
    assert_type(alike.batch(["who?"]), list[str])
    assert_type(alike.stream("who?"), Iterator[str])
    mixed = gate.route(retrieve=rag, direct=llm)
    assert_type(mixed.invoke("who?"), str | AIMessage)
    assert_type(gate.route(retrieve=upper, direct=length).invoke("who?"), str | int)
    assert_type((alike | RunnableLambda(length)).invoke("who?"), int)


def chains(gate: RetrievalGate, chat: BaseChatModel, prompt: ChatPromptTemplate) -> None:
    rag = prompt | chat | StrOutputParser()
    routed = gate.route(retrieve=rag, direct=rag)
    assert_type(routed.invoke({"question": "who?"}), str)


def guards(gate: RetrievalGate, retriever: BaseRetriever) -> None:
    guarded = gate.guard(retriever, k=4)
    assert_type(guarded, GatedRetriever)
    assert_type(guarded.invoke("who?"), list[Document])
    gate.guard(retriever.with_config(tags=["t"]))
    gate.guard(retriever.with_fallbacks([retriever]))


def mistakes(gate: RetrievalGate, retriever: BaseRetriever) -> None:
    gate.guard(retriever, max_querys=3)  # type: ignore[call-arg]
    RetrievalGate(treshold=0.5)  # type: ignore[call-arg]
    gate.invoke(3)  # type: ignore[arg-type]
    wrong: int = gate.invoke("who?")  # type: ignore[assignment]
    anything: Any = wrong
    del anything
