"""LlamaIndex: agents whose tools are called only for what the LLM does not know."""

import asyncio
import json

import pytest
from llama_index.core.agent.workflow import (
    AgentStream,
    AgentWorkflow,
    FunctionAgent,
    ReActAgent,
    ToolCallResult,
)
from llama_index.core.base.llms.types import ChatMessage, ChatResponse, LLMMetadata, LogProb
from llama_index.core.llms import MockLLM
from llama_index.core.llms.function_calling import FunctionCallingLLM
from llama_index.core.llms.llm import ToolSelection
from llama_index.core.tools import FunctionTool, QueryEngineTool, RetrieverTool, ToolMetadata
from llama_index.core.tools.types import BaseTool, ToolOutput
from llama_index.core.workflow import Context
from pydantic import Field

from rgate_integrations import load_gate
from rgate_integrations.errors import ConfigurationError
from rgate_integrations.llama_index.agents import ANSWER_YOURSELF, GatedTool
from tests.llama_index_parts import ScriptedGate, both_ways, vector_index
from tests.scripted_proxy import ScriptedProxy


class AgentLLM(FunctionCallingLLM):
    """Asks the tool ``search`` the user's question, and answers with what the tool said. Drafts "It is me.".

    Attributes:
        functions: Whether it calls functions; otherwise it writes what a ReAct agent reads.
        drafted: The questions it was asked to draft for.
    """

    functions: bool = True
    drafted: list = Field(default_factory=list)

    @property
    def metadata(self):
        return LLMMetadata(model_name="agent", is_chat_model=True, is_function_calling_model=self.functions)

    def chat(self, messages, **options):
        if "max_tokens" in options:
            return self._draft(messages)
        text = messages[-1].content or ""
        if self.functions:
            message = self._with_functions(messages[-1])
        elif text.startswith("Observation"):
            message = ChatMessage(role="assistant", content=f"Thought: I can answer.\nAnswer: {text}")
        else:
            asked = json.dumps({"input": text})
            message = ChatMessage(
                role="assistant", content=f"Thought: I need a tool.\nAction: search\nAction Input: {asked}"
            )
        return ChatResponse(message=message, delta=message.content)

    def _with_functions(self, last):
        if last.role == "tool":
            return ChatMessage(role="assistant", content=f"answer after: {last.content}")
        call = ToolSelection(tool_id="1", tool_name="search", tool_kwargs={"input": last.content})
        return ChatMessage(role="assistant", content="", additional_kwargs={"tool_calls": [call]})

    def _draft(self, messages):
        self.drafted.append(messages[-1].content)
        logprobs = [[LogProb(token=token, logprob=-0.5)] for token in ("It ", "is ", "me.")]
        return ChatResponse(message=ChatMessage(role="assistant", content="It is me."), logprobs=logprobs)

    async def achat(self, messages, **options):
        return self.chat(messages, **options)

    async def astream_chat(self, messages, **options):
        async def stream():
            yield self.chat(messages, **options)

        return stream()

    def get_tool_calls_from_response(self, response, error_on_no_tool_call=True, **options):
        return response.message.additional_kwargs.get("tool_calls", [])

    def _prepare_chat_with_tools(self, tools, user_msg=None, chat_history=None, **options):
        return {"messages": list(chat_history or [])}

    def complete(self, prompt, formatted=False, **options):
        raise NotImplementedError

    stream_complete = acomplete = astream_complete = stream_chat = complete


@pytest.fixture
def gate():
    return ScriptedGate()


@pytest.fixture
def searched():
    return []


@pytest.fixture
def search(searched):
    """A plain function, as agents take them."""

    def search(input: str) -> str:
        """Search the documents."""
        searched.append(input)
        return f"found {input}"

    return search


def function_agent(tool, llm):
    return FunctionAgent(tools=[tool], llm=llm)


def react_agent(tool, llm):
    llm.functions = False
    return ReActAgent(tools=[tool], llm=llm)


def workflow(tool, llm):
    return AgentWorkflow(agents=[FunctionAgent(name="one", description="d", tools=[tool], llm=llm)])


def from_tools(tool, llm):
    return AgentWorkflow.from_tools_or_functions([tool], llm=llm)


every_agent = pytest.mark.parametrize("make", [function_agent, react_agent, workflow, from_tools])


async def asked(agent, question):
    """Run an agent; returns its answer and the events of its stream."""
    handler = agent.run(user_msg=question)
    events = [event async for event in handler.stream_events()]
    return str(await handler), events


@every_agent
async def test_an_agent_answers_what_it_knows_without_its_tool(gate, search, searched, make):
    agent = make(GatedTool(search, gate), AgentLLM())
    answer, events = await asked(agent, "a thing")
    assert searched == []
    assert ANSWER_YOURSELF in answer
    (result,) = [event for event in events if isinstance(event, ToolCallResult)]
    assert not result.tool_output.is_error
    assert not result.tool_output.raw_output.retrieve
    answer, _ = await asked(agent, "unknown thing")
    assert searched == ["unknown thing"]
    assert "found unknown thing" in answer
    assert gate.questions == [["a thing"], ["unknown thing"]]


@every_agent
async def test_a_failing_gate_calls_the_tool(gate, search, searched, make):
    answer, _ = await asked(make(GatedTool(search, gate), AgentLLM()), "RAISE")
    assert searched == ["RAISE"]
    assert "found RAISE" in answer


@every_agent
async def test_a_follow_up_that_the_agent_hands_on_as_it_is_calls_the_tool(gate, search, searched, make):
    await asked(make(GatedTool(search, gate), AgentLLM()), "And how tall is he?")
    assert searched == ["And how tall is he?"]


async def test_the_agents_own_llm_drafts_and_users_see_none_of_it(gate, search):
    llm = AgentLLM()
    answer, events = await asked(function_agent(GatedTool(search, gate, llm=llm, tokens=2), llm), "a thing")
    assert llm.drafted == ["a thing"]
    assert [draft.text for draft in gate.drafts] == ["It is"]
    streamed = "".join(event.delta or "" for event in events if isinstance(event, AgentStream))
    assert "It is" not in answer + streamed


async def test_a_tool_that_asks_for_the_context_gets_it(gate, searched):
    async def search(ctx: Context, input: str) -> str:
        """Search, and count in the agent's store."""
        count = await ctx.store.get("count", default=0)
        await ctx.store.set("count", count + 1)
        searched.append(input)
        return f"found {input}"

    agent = function_agent(GatedTool(search, gate), AgentLLM())
    context = Context(agent)
    await agent.run(user_msg="unknown thing", ctx=context)
    await agent.run(user_msg="a thing", ctx=context)
    assert searched == ["unknown thing"]
    assert await context.store.get("count") == 1
    assert json.dumps(context.to_dict())


# --- the tool by itself ------------------------------------------------------------------------------------


@both_ways
def test_tools_of_every_kind(gate, call):
    index = vector_index()
    engine = QueryEngineTool.from_defaults(index.as_query_engine(llm=MockLLM()), name="docs")
    retriever = RetrieverTool.from_defaults(index.as_retriever(), name="docs")

    class Old(BaseTool):
        """A tool without an asynchronous form."""

        metadata = ToolMetadata(name="docs", description="d")

        def __call__(self, input):
            return ToolOutput(content=f"found {input}", tool_name="docs", raw_input={}, raw_output=None)

    for tool in (engine, retriever, Old()):
        guarded = GatedTool(tool, gate)
        assert guarded.metadata.name == "docs"
        assert guarded.metadata.fn_schema is tool.metadata.fn_schema
        known = call(guarded, "call", "a thing")
        assert known.content == ANSWER_YOURSELF
        assert known.tool_name == "docs"
        assert call(guarded, "call", "unknown thing").content != ANSWER_YOURSELF


@both_ways
@pytest.mark.parametrize(
    ("arguments", "name", "judged"),
    [
        ({"query": "a thing", "k": 3}, None, ["a thing"]),
        ({"city": "Oulu", "question": "a thing"}, None, ["a thing"]),
        ({"city": "Oulu", "k": 3}, None, ["Oulu"]),
        ({"city": "Oulu", "query": "a thing"}, "city", ["Oulu"]),
        ({"city": "Oulu", "country": "Finland"}, None, []),
        ({"query": "a thing"}, "city", []),
        ({"k": 3}, None, []),
        ({}, None, []),
    ],
)
def test_which_argument_is_the_question(gate, call, arguments, name, judged):
    calls = []
    tool = FunctionTool.from_defaults(lambda **given: calls.append(given), name="f", description="d")
    call_it = GatedTool(tool, gate, question=name)
    output = run_with(call_it, call, arguments)
    assert [question for (question,) in gate.questions] == judged
    assert calls == ([] if judged else [arguments])
    assert (output.content == ANSWER_YOURSELF) is bool(judged)


def run_with(tool, call, arguments):
    if call.__name__ == "blocking":
        return tool.call(**arguments)
    return asyncio.run(tool.acall(**arguments))


@both_ways
def test_what_the_agent_is_told_can_be_changed(gate, call, search):
    assert call(GatedTool(search, gate, when_known="You know."), "call", "a thing").content == "You know."


@both_ways
def test_an_error_of_the_tool_is_the_tools(gate, call):
    def broken(input: str) -> str:
        """Fail."""
        raise OSError("index gone")

    with pytest.raises(OSError, match="index gone"):
        call(GatedTool(broken, gate), "call", "unknown thing")


def test_a_tool_that_answers_the_user_cannot_be_guarded(gate):
    tool = QueryEngineTool.from_defaults(vector_index().as_query_engine(llm=MockLLM()), return_direct=True)
    with pytest.raises(ConfigurationError, match="goes to the user") as caught:
        GatedTool(tool, gate)
    assert "GatedQueryEngine" in caught.value.hint


@both_ways
def test_a_gate_of_this_package(call, search, searched):
    gate = load_gate("ik", proxy=ScriptedProxy(), threshold=0.0)
    output = call(GatedTool(search, gate), "call", "Who wrote Hamlet?")
    assert output.raw_output.gate == "ik"
    assert searched == []
