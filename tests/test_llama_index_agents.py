"""LlamaIndex: agents whose tools are called only for what the LLM does not know, on a server that follows rules."""

import copy
import json
import pickle
import re

import numpy as np
import pytest
from llama_index.core.agent.workflow import (
    AgentWorkflow,
    FunctionAgent,
    ReActAgent,
    ToolCallResult,
)
from llama_index.core.tools import FunctionTool, QueryEngineTool, RetrieverTool, ToolMetadata
from llama_index.core.tools.types import BaseTool, ToolOutput
from llama_index.core.workflow import Context

from rgate_integrations import load_gate
from rgate_integrations.errors import ConfigurationError, EvidenceError, UnknownNameError
from rgate_integrations.llama_index import GatedRetriever
from rgate_integrations.llama_index.agents import ANSWER_YOURSELF, GatedTool
from tests.begun_answers import TEXT, Reader
from tests.langchain_fakes import Judge
from tests.llama_index_parts import Shelf, both_ways, decisions_in, hearing, over

openai_like = pytest.importorskip("llama_index.llms.openai_like", reason="comes with the dev extra")
pytest.importorskip("fastapi", reason="the server that the agents ask comes with the serve extra")
tool_server = pytest.importorskip("tests.tool_server").tool_server
QUESTION = "an unknown one?"  # the LLM calls its tool for it, whatever the gate says


@pytest.fixture
def llm():
    with tool_server() as (url, _):
        yield openai_like.OpenAILike(
            api_base=url,
            api_key="none",
            model="rules",
            is_chat_model=True,
            is_function_calling_model=True,
            max_retries=0,
        )


def guarded_search(shelf, gate, **options):
    return GatedTool(RetrieverTool.from_defaults(shelf, name="search_docs", description="d"), gate, **options)


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


@pytest.mark.parametrize("make", AGENTS.values(), ids=list(AGENTS))
async def test_an_agent_answers_what_it_knows_without_its_tool(llm, make):
    shelf = Shelf()
    agent = make(guarded_search(shelf, Reader({"unknown to both": 0.2})), llm)
    answer, events = await asked(agent, QUESTION)
    assert shelf.queries == []
    assert ANSWER_YOURSELF in answer
    (result,) = [event for event in events if isinstance(event, ToolCallResult)]
    assert not result.tool_output.is_error
    assert not result.tool_output.raw_output.retrieve
    # Also if the gate fails, and for an unchanged follow-up.
    for question in ("unknown to both", "RAISE the unknown", "And how unknown is he?"):
        assert TEXT in (await asked(agent, question))[0]
        assert question in shelf.queries.pop()
    assert shelf.queries == []


async def test_a_tool_that_asks_for_the_context_gets_it(llm):
    async def search_docs(ctx: Context, query: str) -> str:
        """Search, and note it in the agent's store."""
        await ctx.store.set("searched", query)
        return f"found {query}"

    agent = function_agent(GatedTool(search_docs, Reader({QUESTION: 0.2})), llm)
    context = Context(agent)
    await agent.run(user_msg=QUESTION, ctx=context)
    await agent.run(user_msg="another unknown one?", ctx=context)
    assert await context.store.get("searched") == QUESTION
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
    guarded = GatedTool(tool, gate, known_message="You know.")
    assert guarded.metadata is tool.metadata
    known = call(guarded, "call", "a thing")
    assert (known.content, known.tool_name, known.raw_output.reason) == ("You know.", "docs", "because")
    assert call(guarded, "call", "unknown thing").content != "You know."


class Tagged(GatedTool):
    """A subclass with arguments of its own."""

    def __init__(self, *, gate):
        super().__init__(RetrieverTool.from_defaults(Shelf(), name="docs"), gate, known_message="You know.")
        self.tag = "mine"


@pytest.mark.parametrize("write", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_tool_is_copied_and_pickled(write):
    """Regression: "object proxy must define __deepcopy__()", also for an agent with the tool."""
    copied = Tagged(gate=Reader({"unknown thing": 0.2}))
    copied.partial_params = {"k": 1}
    for _ in range(2):  # a copy of a copy, too
        written = write(copied)
        copied = pickle.loads(written) if write is pickle.dumps else written  # noqa: S301  our own
        assert copied.call(input="a thing").content == "You know."
        assert copied.call(input="unknown thing").content != "You know."
        assert copied.fn(input="a thing").content == "You know."
        assert (copied.tag, copied.partial_params) == ("mine", {"k": 1})  # regression: a TypeError, or lost


NO_TOOL = (
    r"cannot be used as a tool: .* QueryEngineTool\.from_defaults"  # regression: "no attribute '__name__'"
)
DIRECT_TOOL = QueryEngineTool.from_defaults(over(Shelf()), return_direct=True)


@pytest.mark.parametrize(
    ("tool", "why"),
    [(over(Shelf()), NO_TOOL), ("docs", NO_TOOL), (DIRECT_TOOL, r"goes to the user.*GatedQueryEngine")],
    ids=["engine", "name", "tool that answers the user"],
)
def test_what_cannot_be_guarded_is_refused(gate, tool, why):
    with pytest.raises(ConfigurationError, match=why):
        GatedTool(tool, gate)


# Regressions: a key that is the value, and a float that is a whole number, were not judged.
KEYS = [
    "so",
    "Tell me more about Eno in who.",
    "Tell me more about 7 in who.",
    "Tell me more about Li in by.",
]
FLOATS = ["so", "Tell me more about 4411 in id.", "Tell me more about -2 in x."]


@pytest.mark.parametrize(
    ("arguments", "name", "judged"),
    [
        ({"query": "a thing", "k": 3, "alpha": 0.5}, None, ["a thing", "Tell me more about 3 in k."]),
        ({"city": "Oulu", "question": "a thing"}, None, ["a thing", "Tell me more about Oulu in city."]),
        ({"input": "a thing", "query": ""}, None, ["a thing"]),
        ({"input": "a thing", "query": "a thing"}, None, ["a thing"]),
        ({"query": "a thing", "files": [], "where": {}, "deep": True, "customer": None}, None, ["a thing"]),
        (
            {"query": "a thing", "files": ["a.pdf", None]},
            None,
            ["a thing", "Tell me more about a.pdf in files."],
        ),
        ({"topic": "so", "where": {"a": [{"id": 5}]}}, None, ["so", "Tell me more about 5 in id."]),
        (
            {"query": "so", "name": "A", "file_name": ("b", 0)},
            None,
            ["so", "Tell me more about A in name.", "Tell me more about b in file name."],
        ),
        ({"topic": "so", "who": {"Eno": True, "Ulf": False, 7: True, "Ida": None, "by": ["Li"]}}, None, KEYS),
        ({"topic": "so", "id": 4411.0, "at": {"x": -2.0, "y": 0.0}, "z": float("inf")}, None, FLOATS),
        ({"city": "Oulu", "k": 3}, None, ["Oulu", "Tell me more about 3 in k."]),
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


@pytest.mark.parametrize("name", ["topic", None])
def test_a_positional_argument_is_found_by_its_name(gate, name):
    """Regression: with ``question="topic"``, a positional call reached the tool undecided."""

    def search(topic: str, k: int = 3) -> str:
        raise AssertionError("the question is known")

    assert GatedTool(search, gate, question=name).call("a thing", 5).content == ANSWER_YOURSELF
    assert gate.questions == ["a thing", "Tell me more about 5 in k."][: 1 if name else 2]


def test_a_misspelt_argument_is_named(gate):
    """Regression: no call had a question, so the tool always ran."""
    with pytest.raises(
        UnknownNameError, match=r"no parameter of the tool 'search_docs' named 'imput'.*mean input"
    ):
        guarded_search(Shelf(), gate, question="imput")
    assert guarded_search(Shelf(), gate, question="input").call(input="a thing").content == ANSWER_YOURSELF


@both_ways
def test_an_error_of_the_tool_is_the_tools(gate, call):
    with pytest.raises(TimeoutError, match="index gone"):
        call(guarded_search(Shelf(), gate), "call", "broken, and unknown")


# --- what a call's other arguments ask for -----------------------------------------------------------------


def contracts(query: str, customer: str = "any", language: str = "en") -> str:
    """Search the contracts."""
    return f"found {query}"


@both_ways
@pytest.mark.parametrize(
    ("given", "options", "judged", "found"),
    [
        ({"customer": "unknown GmbH"}, {}, ["Tell me more about unknown GmbH in customer."], True),
        ({"customer": "any", "language": "en"}, {}, [], False),  # the defaults
        ({"language": "de"}, {}, ["Tell me more about de in language."], False),
        ({"customer": "RAISE"}, {}, ["Tell me more about RAISE in customer."], True),
        ({"customer": "unknown GmbH"}, {"question": "query"}, [], False),
    ],
    ids=["a customer", "defaults", "a harmless one", "a failure", "a named question"],
)
def test_another_argument_may_ask_for_what_the_llm_does_not_know(gate, call, given, options, judged, found):
    """Regression: "What is a penalty clause?", for the customer Weber GmbH, did not reach the tool."""
    output = call(GatedTool(contracts, gate, **options), "call", query="a thing", **given)
    assert gate.questions == ["a thing", *judged]
    assert output.content == ("found a thing" if found else ANSWER_YOURSELF)
    positional = call(GatedTool(contracts, gate, **options), "call", "a thing", *given.values())
    if "customer" in given:
        assert (positional.content, gate.questions) == (output.content, ["a thing", *judged] * 2)


@both_ways
def test_an_argument_that_is_bound_to_a_tool_counts(gate, call):
    """Regression: a search bound to one customer was skipped for what the LLM knows in general."""
    tool = FunctionTool.from_defaults(contracts, partial_params={"customer": "unknown GmbH"})
    output = call(GatedTool(tool, gate), "call", query="a thing")
    assert (output.content, gate.questions[1:]) == (
        "found a thing",
        ["Tell me more about unknown GmbH in customer."],
    )


class Unprintable:
    """An application's object without ``repr`` and truth value."""

    def __repr__(self):
        raise RuntimeError

    __bool__ = __hash__ = __repr__


@both_ways
@pytest.mark.parametrize(
    ("value", "found"),
    [
        (np.ones(2), False),
        ([np.ones(2)], False),
        ({"v": np.ones(2)}, False),
        ({"v": Unprintable()}, False),
        (Unprintable(), False),
        ({Unprintable.__new__: "unknown"}, True),
        (["known"] * 16, False),
        (["known"] * 17, True),
        ({"v": 1}, False),  # the default
        ({"v": 1, "w": ["unknown"]}, True),
    ],
    ids=range(10),
)
def test_an_argument_may_be_any_object(gate, call, value, found):
    """Regression: arrays, and objects without ``repr`` or truth value, ended the call with their own errors."""

    def search(query: str, options={"v": 1}):  # noqa: B006  as LlamaIndex's schema has it
        return "found"

    output = call(GatedTool(search, gate), "call", query="a thing", options=value)
    assert output.content == ("found" if found else ANSWER_YOURSELF)


class Unreadable(str):
    """An application's text that cannot be printed."""

    __slots__ = ()

    def __str__(self):
        raise OSError("Weber GmbH")


def holds_itself():
    value = []
    value.append(value)
    return value


@both_ways
@pytest.mark.parametrize(
    ("value", "why"), [(holds_itself(), "RecursionError"), (Unreadable("x"), "OSError")], ids=["loop", "text"]
)
def test_arguments_that_cannot_be_read_are_a_failure_of_the_gate(gate, call, value, why, caplog):
    """Regression: nothing was logged, there was no hint, and ``on_error="raise"`` raised a bare RecursionError."""
    with hearing() as events:
        output = call(GatedTool(contracts, gate), "call", query="a thing", customer=value)
    assert output.content == "found a thing"
    (decision,) = decisions_in(events)
    assert (decision.question, decision.error.type) == ("a thing", "EvidenceError")
    assert f"'contracts' cannot be read: {why}" in decision.error.message
    assert 'question="NAME"' in decision.error.hint
    (record,) = caplog.records
    assert decision.error.message in record.getMessage()
    assert "Weber" not in record.getMessage() + decision.reason
    caplog.clear()
    strict = GatedTool(contracts, load_gate("constant:never", on_error="raise"))
    with pytest.raises(EvidenceError, match=f"cannot be read: {why}") as caught:
        call(strict, "call", query="a thing", customer=value)
    assert type(caught.value.__cause__).__name__ == why
    assert not caplog.records


class Librarian(Judge):
    """A gate with corpora, of which the question is about one."""

    corpora = ("law", "crm")

    def decide_batch(self, requests):
        decisions = super().decide_batch(requests)
        return [decision.model_copy(update={"corpora": ("law",)}) for decision in decisions]


@both_ways
def test_another_argument_may_be_about_another_corpus(call):
    """Regression: the retriever inside searched only the corpora chosen for the question."""
    gate = Librarian()
    law, crm = Shelf("A clause."), Shelf("A customer.")
    inner = GatedRetriever({"law": law, "crm": crm}, gate)

    def search(query: str, where: dict) -> str:
        """Search."""
        return "; ".join(node.text for node in inner.retrieve(query))

    async def asearch(query: str, where: dict) -> str:
        """Search."""
        return "; ".join(node.text for node in await inner.aretrieve(query))

    tool = GatedTool(FunctionTool.from_defaults(search, async_fn=asearch), gate)
    with hearing() as events:
        output = call(tool, "call", query="a thing", where={"name": "unknown GmbH"})
    assert (law.queries, crm.queries) == (["a thing"], ["a thing"])
    assert "A customer." in output.content
    (decision,) = decisions_in(events)
    assert (decision.corpus, decision.corpora) == (None, ())
    assert decision.reason.startswith("The argument “where” seems")  # regression: “name”


PENALTY = "What is a penalty clause?"


@both_ways
@pytest.mark.parametrize(
    ("name", "rules", "found"),
    [
        ("constant:never", {"always": re.compile(r"clause\?$")}, True),
        ("constant:never", {"always": lambda question: question == PENALTY}, True),
        ("constant:never", {"always": re.compile("Tell|Weber")}, False),
        ("default", {"never": re.compile(r"^What is a penalty clause\?$")}, False),
        ("default", {"never": re.compile("Tell|Weber")}, True),
    ],
    ids=["always", "a function", "always, elsewhere", "never", "never, elsewhere"],
)
def test_rules_judge_the_question_alone(call, name, rules, found):
    """Regression: a rule for the end of a question saw the other arguments behind it, and did not match."""
    guarded = GatedTool(contracts, load_gate(name, **rules))
    with hearing() as events:
        output = call(guarded, "call", query=PENALTY, customer="Weber GmbH")
    assert output.content == (f"found {PENALTY}" if found else ANSWER_YOURSELF)
    (decision,) = decisions_in(events)
    assert (decision.question, decision.retrieve) == (PENALTY, found)


@pytest.mark.parametrize(
    "harmless", [{}, {"language": "de"}, {"format": "short"}, {"country": "France"}, {"order": "ascending"}]
)
def test_the_default_gate_reads_the_other_arguments(harmless):
    def search(query: str, customer="", language="en", format="", country="", order="") -> str:
        return "found"

    tool = GatedTool(search, load_gate(llm_name="gpt-4o"))
    assert tool.call(query="What is the capital of France?", **harmless).content == ANSWER_YOURSELF
    for question in ("What is a penalty clause?", "Was ist die Mehrwertsteuer?"):
        assert tool.call(query=question).content == ANSWER_YOURSELF
        for customer in ("Weber GmbH", 48213, 48213.0, ["Norholt"], {"name": "Okafor"}, {"Okafor": True}):
            assert tool.call(query=question, customer=customer, **harmless).content == "found"
