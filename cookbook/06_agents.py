# %% [markdown]
# # Agents: search only when it is needed
#
# You end up with an agent whose search tool is hidden while its LLM knows the answer, and a LangGraph graph that
# branches on the gate. The agent's LLM is scripted here, so that the notebook runs offline; the gate is real:
# `rgate download multilingual-e5-small smollm2-135m-reader smollm2-135m-instruct`.

# %%
from langchain.agents import create_agent
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, HumanMessage, ToolCall
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.tools import tool
from langgraph.graph import END, START, StateGraph
from typing_extensions import TypedDict

from rgate_integrations.langchain import RetrievalGate, RetrievalGateMiddleware

# %% [markdown]
# ## An agent with a search tool
#
# This stand-in for an LLM searches whenever it can, as many agents do.


# %%
@tool
def search_docs(query: str) -> str:
    """Search the documents."""
    print(f"  (searching for {query!r})")
    return "Aarno Maliniemi was born in Oulu."


class Eager(BaseChatModel):
    """Calls search_docs if it is shown to it."""

    tools: tuple[str, ...] = ()

    @property
    def _llm_type(self) -> str:
        return "eager"

    def bind_tools(self, tools, **kwargs):
        return Eager(tools=tuple(t.name for t in tools))

    def _generate(self, messages, stop=None, run_manager=None, **kwargs):
        last = messages[-1]
        calls = []
        if last.type == "human" and "search_docs" in self.tools:
            calls = [ToolCall(name="search_docs", args={"query": last.text}, id="1")]
        text = "" if calls else ("from memory" if last.type == "human" else f"I read: {last.text}")
        return ChatResult(generations=[ChatGeneration(message=AIMessage(text, tool_calls=calls))])


# %%
gate = RetrievalGate()
agent = create_agent(
    Eager(), [search_docs], middleware=[RetrievalGateMiddleware(gate, tools=["search_docs"])]
)
for question in ("What is the capital of France?", "Where was the historian Aarno Maliniemi born?"):
    print(question)
    state = agent.invoke({"messages": [HumanMessage(question)]})
    print(f"  p_known {state['retrieval_decision'].p_known:.2f}: {state['messages'][-1].text}")

# %% [markdown]
# The gate decides once for each user turn. For a known question the model does not even see the tool.
#
# ## A LangGraph graph
#
# `RetrievalGate` is a Runnable, so it can also be part of a conditional edge.


# %%
class State(TypedDict, total=False):
    """Question and answer."""

    question: str
    answer: str


graph = StateGraph(State)
graph.add_node("retrieve", lambda state: {"answer": search_docs.invoke(state["question"])})
graph.add_node("direct", lambda state: {"answer": "from memory"})
graph.add_conditional_edges(
    START, gate | (lambda decision: "retrieve" if decision.retrieve else "direct"), ["retrieve", "direct"]
)
graph.add_edge("retrieve", END)
graph.add_edge("direct", END)
compiled = graph.compile()
for question in ("What is the capital of France?", "Where was the historian Aarno Maliniemi born?"):
    print(compiled.invoke({"question": question}))

# %% [markdown]
# **Next:** `01_langchain` for chains, `04_calibrate` for the threshold.
