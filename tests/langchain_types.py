"""User code, for a type checker only: what it sees of the LangChain adapter. `test_langchain_types` checks it."""

from collections.abc import Iterator
from typing import assert_type

from langchain.agents import create_agent
from langchain.agents.middleware import SummarizationMiddleware
from langchain_core.documents import Document
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import Runnable, RunnableLambda
from typing_extensions import TypedDict

from rgate_integrations import Decision
from rgate_integrations.langchain import RetrievalGate, RetrievalGateMiddleware, gate_node
from rgate_integrations.langchain.router import RetrievalRouter


class State(TypedDict):
    """A user's own state."""

    messages: list[BaseMessage]


async def decisions(gate: RetrievalGate, state: State) -> None:
    for value in ("who?", {"question": "who?"}, state, [HumanMessage("who?")]):
        assert_type(gate.invoke(value), Decision)
    assert_type(gate.batch(["who?", "when?"]), list[Decision])
    assert_type(await gate.abatch(["who?"]), list[Decision])


def upper(text: str) -> str:
    return text.upper()


def routes(gate: RetrievalGate, rag: Runnable[str, str], llm: Runnable[str, AIMessage]) -> None:
    alike = gate.route(retrieve=rag, direct=rag)
    assert_type(alike, RetrievalRouter[str, str])
    assert_type(alike.invoke("who?"), str)
    assert_type(alike.stream("who?"), Iterator[str])
    assert_type((alike | RunnableLambda(len)).invoke("who?"), int)
    assert_type(gate.route(retrieve=rag, direct=llm).invoke("who?"), str | AIMessage)
    # As LangChain types a prompt, which takes the value of its only variable, too.
    prompted = ChatPromptTemplate.from_template("{question}") | RunnableLambda(str)
    assert_type(gate.route(retrieve=rag, direct=prompted).invoke("who?"), str)
    assert_type(gate.route(retrieve=upper, direct=len).invoke("who?"), str | int)


def guards(gate: RetrievalGate, retriever: BaseRetriever) -> None:
    assert_type(gate.guard(retriever.with_fallbacks([retriever]), k=4).invoke("who?"), list[Document])


def agents(model: BaseChatModel, middleware: RetrievalGateMiddleware) -> None:
    create_agent(model, [], middleware=[middleware, SummarizationMiddleware(model)])


def with_a_config(gate: RetrievalGate) -> None:
    named = gate.with_config(run_name="gate")
    RetrievalGateMiddleware(named, tools=["search"])
    gate_node(named)


def mistakes(gate: RetrievalGate, retriever: BaseRetriever) -> None:
    gate.guard(retriever, max_querys=3)  # type: ignore[call-arg]
    RetrievalGate(treshold=0.5)  # type: ignore[call-arg]
    gate.invoke(3)  # type: ignore[arg-type]
