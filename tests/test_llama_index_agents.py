"""LlamaIndex: agents whose tools are called only for what the LLM does not know."""

import json

import pytest
from llama_index.core.agent.workflow import (
    AgentStream,
    AgentWorkflow,
    FunctionAgent,
    ReActAgent,
    ToolCallResult,
)
from llama_index.core.base.llms.types import ChatMessage, ChatResponse, LLMMetadata
from llama_index.core.llms.function_calling import FunctionCallingLLM
from llama_index.core.llms.llm import ToolSelection
from llama_index.core.tools import FunctionTool, QueryEngineTool, RetrieverTool, ToolMetadata
from llama_index.core.tools.types import BaseTool, ToolOutput
from llama_index.core.workflow import Context

from rgate_integrations.errors import ConfigurationError
from rgate_integrations.llama_index.agents import ANSWER_YOURSELF, GatedTool
from tests.begun_answers import TEXT
from tests.llama_index_parts import ScriptedGate, Shelf, both_ways, over


class AgentLLM(FunctionCallingLLM):
    """Asks the tool ``search`` the user's question, and answers with what the tool said. Drafts "It is me.".

    Attributes:
        functions: Whether it calls functions; otherwise it writes what a ReAct agent reads.
    """

    functions: bool = True

    @property
    def metadata(self):
        return LLMMetadata(model_name="agent", is_chat_model=True, is_function_calling_model=self.functions)

    def chat(self, messages, **options):
        last = messages[-1]
        text, answer, calls = last.content or "", "", []
        if "max_tokens" in options:
            answer = "It is me."
        elif text.startswith("Observation"):
            answer = f"Thought: I can answer.\nAnswer: {text}"
        elif not self.functions:
            answer = f"Thought: I need a tool.\nAction: search\nAction Input: {json.dumps({'input': text})}"
        elif last.role == "tool":
            answer = f"answer after: {text}"
        else:
            calls = [ToolSelection(tool_id="1", tool_name="search", tool_kwargs={"input": text})]
        message = ChatMessage(role="assistant", content=answer, additional_kwargs={"tool_calls": calls})
        return ChatResponse(message=message, delta=answer)

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
def shelf():
    return Shelf()


def guarded_search(shelf, gate, **options):
    return GatedTool(RetrieverTool.from_defaults(shelf, name="search", description="d"), gate, **options)


def function_agent(tool, llm):
    return FunctionAgent(name="one", description="d", tools=[tool], llm=llm)


AGENTS = {
    "function": function_agent,
    "ReAct": lambda tool, llm: ReActAgent(tools=[tool], llm=llm),
    "workflow": lambda tool, llm: AgentWorkflow(agents=[function_agent(tool, llm)]),
    "workflow of tools": lambda tool, llm: AgentWorkflow.from_tools_or_functions([tool], llm=llm),
}


async def asked(agent, question):
    """Run an agent; returns its answer and the events of its stream."""
    handler = agent.run(user_msg=question)
    events = [event async for event in handler.stream_events()]
    return str(await handler), events


@pytest.mark.parametrize("name", AGENTS)
async def test_an_agent_answers_what_it_knows_without_its_tool(gate, shelf, name):
    agent = AGENTS[name](guarded_search(shelf, gate), AgentLLM(functions=name != "ReAct"))
    answer, events = await asked(agent, "a thing")
    assert shelf.queries == []
    assert ANSWER_YOURSELF in answer
    (result,) = [event for event in events if isinstance(event, ToolCallResult)]
    assert not result.tool_output.is_error
    assert not result.tool_output.raw_output.retrieve
    # Also where the gate fails, and for a follow-up as it is.
    for question in ("unknown thing", "RAISE", "And how tall is he?"):
        assert TEXT in (await asked(agent, question))[0]
        assert question in shelf.queries.pop()
    assert shelf.queries == []


async def test_the_agents_own_llm_drafts_and_users_see_none_of_it(gate, shelf):
    llm = AgentLLM()
    answer, events = await asked(function_agent(guarded_search(shelf, gate, llm=llm), llm), "a thing")
    assert [draft.text for (draft,) in gate.drafts] == ["It is me."]
    streamed = "".join(event.delta or "" for event in events if isinstance(event, AgentStream))
    assert "It is" not in answer + streamed


async def test_a_tool_that_asks_for_the_context_gets_it(gate):
    async def search(ctx: Context, input: str) -> str:
        """Search, and note it in the agent's store."""
        await ctx.store.set("searched", input)
        return f"found {input}"

    agent = function_agent(GatedTool(search, gate), AgentLLM())
    context = Context(agent)
    await agent.run(user_msg="unknown thing", ctx=context)
    await agent.run(user_msg="a thing", ctx=context)
    assert await context.store.get("searched") == "unknown thing"
    assert json.dumps(context.to_dict())


# --- the tool by itself ------------------------------------------------------------------------------------


class Old(BaseTool):
    """A tool without an asynchronous form."""

    metadata = ToolMetadata(name="docs", description="d")

    def __call__(self, input):
        return ToolOutput(content=f"found {input}", tool_name="docs", raw_input={}, raw_output=None)


@both_ways
@pytest.mark.parametrize(
    "tool",
    [
        QueryEngineTool.from_defaults(over(Shelf()), name="docs"),
        RetrieverTool.from_defaults(Shelf(), name="docs"),
        Old(),
    ],
    ids=["engine", "retriever", "old"],
)
def test_tools_of_every_kind(gate, call, tool):
    guarded = GatedTool(tool, gate, when_known="You know.")
    assert guarded.metadata.name == "docs"
    assert guarded.metadata.fn_schema is tool.metadata.fn_schema
    known = call(guarded, "call", "a thing")
    assert (known.content, known.tool_name, known.raw_output.reason) == ("You know.", "docs", "because")
    assert call(guarded, "call", "unknown thing").content != "You know."


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
def test_which_argument_is_the_question(gate, arguments, name, judged):
    calls = []
    tool = FunctionTool.from_defaults(lambda **given: calls.append(given), name="f", description="d")
    output = GatedTool(tool, gate, question=name).call(**arguments)
    assert gate.questions == judged
    assert calls == ([] if judged else [arguments])
    assert (output.content == ANSWER_YOURSELF) is bool(judged)


@both_ways
def test_an_error_of_the_tool_is_the_tools(gate, call, shelf):
    with pytest.raises(TimeoutError, match="index gone"):
        call(guarded_search(shelf, gate), "call", "broken, and unknown")


def test_a_tool_that_answers_the_user_cannot_be_guarded(gate):
    tool = QueryEngineTool.from_defaults(over(Shelf()), return_direct=True)
    with pytest.raises(ConfigurationError, match=r"goes to the user.*GatedQueryEngine"):
        GatedTool(tool, gate)
