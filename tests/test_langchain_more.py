"""LangChain: drafts of the user's own LLM, follow-ups, speculative search, claim queries, agents."""

import asyncio
import logging
import threading
import time

import pytest
from langchain.agents import create_agent
from langchain_core.documents import Document
from langchain_core.language_models import GenericFakeChatModel
from langchain_core.messages import AIMessage, HumanMessage, ToolCall
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import RunnableLambda
from langchain_core.tools import tool
from pydantic import Field

from rgate_integrations import Decision, load_gate
from rgate_integrations.errors import ConfigurationError
from rgate_integrations.langchain import (
    ClaimQueryRewriter,
    GatedRetriever,
    RetrievalGate,
    RetrievalGateMiddleware,
    gated_rag,
)
from rgate_integrations.langchain.drafts import ChatDrafter, token_logprobs
from rgate_integrations.langchain.gate import FOLLOW_UP
from tests.scripted_proxy import ScriptedProxy


class Judge:
    """Retrieves for questions with "unknown" in them; remembers the drafts it was given."""

    def __init__(self, wait=0.0):
        self.drafts, self.questions, self.wait = [], [], wait

    def decide_batch(self, questions, *, threshold=None, drafts=None):
        time.sleep(self.wait)
        self.questions += questions
        self.drafts += list(drafts or [None] * len(questions))
        drafts = drafts or [None] * len(questions)
        return [
            Decision(question=q, retrieve="unknown" in q, p_known=0.2 if "unknown" in q else 0.8, draft=d)
            for q, d in zip(questions, drafts, strict=True)
        ]

    async def adecide_batch(self, questions, **options):
        return await asyncio.to_thread(self.decide_batch, questions, **options)


class Chat(GenericFakeChatModel):
    """Answers in OpenAI's style, with log-probabilities if it is asked for them; refuses what ``refuses`` names."""

    messages: object = Field(default_factory=lambda: iter(()))
    refuses: tuple[str, ...] = ()
    seen: list = Field(default_factory=list)

    def _generate(self, messages, stop=None, run_manager=None, **kwargs):
        self.seen.append(kwargs)
        refused = [k for k in kwargs if k in self.refuses]
        if refused:
            raise ValueError(f"unknown parameter {refused[0]}")
        tokens = ["It ", "is ", "me."][: kwargs.get("max_tokens", 9)]
        metadata = {"finish_reason": "stop", "model_name": "chat"}
        if kwargs.get("logprobs"):
            metadata["logprobs"] = {"content": [{"token": t, "logprob": -0.5} for t in tokens]}
        message = AIMessage("".join(tokens), response_metadata=metadata)
        from langchain_core.outputs import ChatGeneration, ChatResult

        return ChatResult(generations=[ChatGeneration(message=message)])


def test_the_llm_writes_the_drafts():
    judge, llm = Judge(), Chat()
    decisions = RetrievalGate(judge, llm=llm, tokens=2).batch(["a?", "unknown?"])
    assert [d.retrieve for d in decisions] == [False, True]
    assert [(d.text, d.tokens, d.logprobs, d.source) for d in judge.drafts] == [
        ("It is", ("It ", "is "), (-0.5, -0.5), "llm")
    ] * 2
    assert llm.seen == [{"max_tokens": 2, "logprobs": True}] * 2
    decision = asyncio.run(RetrievalGate(judge, llm=llm, tokens=2).ainvoke("a?"))
    assert decision.draft.text == "It is"


def test_a_gate_that_reads_log_probabilities_gets_them():
    gate = RetrievalGate(load_gate("perplexity", proxy=ScriptedProxy()), llm=Chat())
    decision = gate.invoke("a?")
    assert decision.error is None
    assert decision.draft.scored_by == ""


@pytest.mark.parametrize(
    ("refuses", "kept"),
    [(("logprobs",), {"max_tokens": 2}), (("logprobs", "max_tokens"), {})],
)
def test_an_llm_that_refuses_options_is_asked_without(refuses, kept):
    llm = Chat(refuses=refuses)
    drafter = ChatDrafter(llm, 2)
    (draft,) = drafter.draft(["a?"])
    assert (draft.logprobs, draft.text) == (None, "It is")
    drafter.draft(["b?"])
    assert llm.seen[-1] == kept
    assert len(llm.seen) == len(refuses) + 2


def test_an_llm_that_fails_means_no_draft_and_retrieval():
    def fails(_):
        raise TimeoutError("server down")

    judge = load_gate("ik", source="recorded", proxy=ScriptedProxy())
    gate = RetrievalGate(judge, llm=RunnableLambda(fails))
    decision = gate.invoke("who?")
    assert decision.retrieve
    assert decision.error.type == "EvidenceError"


def test_log_probabilities_in_other_spellings():
    assert token_logprobs({}) == ((), None)
    assert token_logprobs({"logprobs": None}) == ((), None)
    assert token_logprobs({"logprobs": [{"token": "a", "logprob": -1}]}) == (("a",), (-1.0,))
    assert token_logprobs({"logprobs": {"content": [{"tok": "a"}]}}) == ((), None)


def test_the_draft_is_there_for_the_direct_arm():
    seen = {}

    def direct(question, config):
        seen.update(config["metadata"])
        return "direct"

    chain = RetrievalGate(Judge(), llm=Chat(), tokens=2).route(retrieve=lambda q: "rag", direct=direct)
    assert chain.batch(["a?", "unknown?"]) == ["direct", "rag"]
    assert seen["draft"] == "It is"


TURNS = [HumanMessage("Who wrote Hamlet?"), AIMessage("Shakespeare."), HumanMessage("And when?")]


def test_follow_ups_are_condensed_or_marked():
    judge = Judge()
    marked, plain = RetrievalGate(judge).batch([{"messages": TURNS}, TURNS[:1]])
    assert marked.warnings == (FOLLOW_UP,)
    assert plain.warnings == ()
    condense = RunnableLambda(lambda messages: f"When was Hamlet written? ({len(messages)} turns)")
    decision = RetrievalGate(judge, condense=condense).invoke(TURNS)
    assert decision.question == "When was Hamlet written? (3 turns)"
    assert decision.warnings == ()

    def broken(messages):
        raise RuntimeError("no")

    decision = asyncio.run(RetrievalGate(judge, condense=RunnableLambda(broken)).ainvoke(TURNS))
    assert (decision.question, decision.warnings) == ("And when?", (FOLLOW_UP,))


class Slow(BaseRetriever):
    """Takes its time; remembers queries and when they began; raises for "broken"."""

    wait: float = 0.15
    began: list = Field(default_factory=list)

    def _get_relevant_documents(self, query, *, run_manager):
        self.began.append((query, time.perf_counter()))
        time.sleep(self.wait)
        if "broken" in query:
            raise OSError("index gone")
        return [Document(page_content=f"about {query}")]


@pytest.mark.parametrize("style", ["invoke", "ainvoke"])
def test_speculative_search_runs_while_the_gate_thinks(style, caplog):
    def run(question):
        slow = Slow()
        guarded = RetrievalGate(Judge(wait=0.15)).guard(slow, speculative=True)
        start = time.perf_counter()
        found = guarded.invoke(question) if style == "invoke" else asyncio.run(guarded.ainvoke(question))
        return found, time.perf_counter() - start, slow.began

    found, _, began = run("unknown?")
    assert [d.page_content for d in found] == ["about unknown?"]
    assert len(began) == 1
    assert found[0].metadata["rgate"] == {"query": "unknown?", "claim": None, "rank": 1}
    found, _, _ = run("known?")
    assert found == []
    with caplog.at_level(logging.INFO):
        found, _, _ = run("broken but known?")
        assert found == []
        deadline = time.monotonic() + 2
        while style == "invoke" and "index gone" not in caplog.text and time.monotonic() < deadline:
            time.sleep(0.01)
    with pytest.raises(OSError, match="index gone"):
        run("broken and unknown?")


STYLES = ("invoke", "ainvoke", "batch", "abatch", "stream", "astream")


def run_in_style(chain, question, style):
    async def chunks():
        return [chunk async for chunk in chain.astream(question)]

    return {
        "invoke": lambda: chain.invoke(question),
        "ainvoke": lambda: asyncio.run(chain.ainvoke(question)),
        "batch": lambda: chain.batch([question])[0],
        "abatch": lambda: asyncio.run(chain.abatch([question]))[0],
        "stream": lambda: "".join(chain.stream(question)),
        "astream": lambda: "".join(asyncio.run(chunks())),
    }[style]()


@pytest.mark.parametrize("style", STYLES)
def test_a_speculative_router_searches_while_the_gate_thinks(style):
    slow = Slow(wait=0.0)

    class Waits(Judge):
        def decide_batch(self, questions, **options):
            deadline = time.monotonic() + 5
            while not slow.began and time.monotonic() < deadline:
                time.sleep(0.005)
            return super().decide_batch(questions, **options)

    chain = RetrievalGate(Waits()).route(
        retrieve={"context": slow, "question": lambda q: q}
        | RunnableLambda(lambda found: f"{found['question']} {found['context'][0].page_content}"),
        direct=lambda q: f"direct {q}",
        speculative=True,
    )
    assert run_in_style(chain, "unknown?", style) == "unknown? about unknown?"
    assert [query for query, _ in slow.began] == ["unknown?"]
    slow.began.clear()
    assert run_in_style(chain, "known?", style) == "direct known?"
    assert run_in_style(chain, "broken, but known?", style) == "direct broken, but known?"
    with pytest.raises(OSError, match="index gone"):
        run_in_style(chain, "broken and unknown?", style)


def test_a_speculative_batch_searches_once_and_keeps_order_and_errors():
    slow = Slow(wait=0.0)
    chain = RetrievalGate(Judge()).route(
        retrieve=slow | RunnableLambda(lambda found: found[0].page_content), direct=str, speculative=True
    )
    asked = ["unknown 1", "known 2", "broken unknown 3", "unknown 4"]
    for found in (
        chain.batch(asked, return_exceptions=True),
        asyncio.run(chain.abatch(asked, return_exceptions=True)),
    ):
        assert found[:2] == ["about unknown 1", "known 2"]
        assert isinstance(found[2], OSError)
        assert found[3] == "about unknown 4"
    with pytest.raises(ConfigurationError, match="several steps"):
        RetrievalGate(Judge()).route(retrieve=str, direct=str, speculative=True)


async def test_a_cancelled_speculative_call_leaves_no_task_behind():
    class Forever(Slow):
        async def _aget_relevant_documents(self, query, *, run_manager):
            await asyncio.sleep(60)

    chain = RetrievalGate(Judge(wait=0.2)).route(retrieve=Forever() | str, direct=str, speculative=True)
    assert await chain.ainvoke("known?") == "known?"
    task = asyncio.ensure_future(chain.ainvoke("unknown?"))
    await asyncio.sleep(0.3)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.sleep(0)
    assert [t for t in asyncio.all_tasks() if t is not asyncio.current_task()] == []


def test_the_search_begins_before_the_decision():
    slow = Slow(wait=0.0)
    thinking = threading.Event()

    class Waits(Judge):
        def decide_batch(self, questions, **options):
            deadline = time.monotonic() + 5
            while not slow.began and time.monotonic() < deadline:
                time.sleep(0.005)
            if slow.began:
                thinking.set()
            return super().decide_batch(questions, **options)

    assert GatedRetriever(retriever=slow, gate=Waits(), speculative=True).invoke("unknown?")
    assert thinking.is_set()


def test_claim_queries():
    rewriter = ClaimQueryRewriter(Judge())
    assert rewriter.invoke("unknown?") == ["unknown?"]
    assert rewriter.invoke("known?") == []
    assert rewriter.batch(["known?", "unknown?"]) == [[], ["unknown?"]]
    assert asyncio.run(rewriter.ainvoke("unknown?")) == ["unknown?"]
    plan = ClaimQueryRewriter("constant:always", plan=True).invoke({"question": "who?"})
    assert [q.text for q in plan.queries] == ["who?"]
    draft_gate = RetrievalGate(
        "constant:always", llm=RunnableLambda(lambda m: "Bacon wrote Hamlet in London.")
    )
    found = ClaimQueryRewriter(Judge(), filter_claims=False).invoke("unknown?")
    assert found[0] == "unknown?"
    assert draft_gate.invoke("x?").retrieve
    chain = ClaimQueryRewriter(Judge()) | Slow(wait=0).map()
    assert [d.page_content for each in chain.invoke("unknown?") for d in each] == ["about unknown?"]


def test_the_whole_thing_in_one_line():
    llm = RunnableLambda(lambda prompt: AIMessage(prompt.to_string()))
    chain = gated_rag(Slow(wait=0), llm, gate=Judge())
    assert "about unknown?" in chain.invoke("unknown?")
    assert "about" not in chain.invoke("known?")


class Agent(GenericFakeChatModel):
    """Calls the tool it is told to, once, and remembers which tools it was shown."""

    messages: object = Field(default_factory=lambda: iter(()))
    shown: list = Field(default_factory=list)
    stubborn: bool = False

    def bind_tools(self, tools, **kwargs):
        self.shown.append([t.name for t in tools])
        return self

    def _generate(self, messages, stop=None, run_manager=None, **kwargs):
        from langchain_core.outputs import ChatGeneration, ChatResult

        calls = []
        visible = self.shown and "search_docs" in self.shown[-1]
        if messages[-1].type == "human" and (visible or self.stubborn):
            calls = [ToolCall(name="search_docs", args={"query": "q"}, id="1")]
        text = "" if calls else f"answer after {messages[-1].text}"
        message = AIMessage(text, tool_calls=calls)
        return ChatResult(generations=[ChatGeneration(message=message)])


@pytest.mark.parametrize("style", ["invoke", "ainvoke"])
@pytest.mark.parametrize("stubborn", [False, True])
def test_agents_search_only_when_they_need_to(style, stubborn):
    searched = []

    @tool
    def search_docs(query: str) -> str:
        """Search the documents."""
        searched.append(query)
        return "found"

    @tool
    def add(a: int, b: int) -> int:
        """Add."""
        return a + b

    model = Agent(stubborn=stubborn)
    judge = Judge()
    middleware = RetrievalGateMiddleware(RetrievalGate(judge), tools=["search_docs"])
    agent = create_agent(model, [search_docs, add], middleware=[middleware])

    def run(question):
        value = {"messages": [HumanMessage(question)]}
        return agent.invoke(value) if style == "invoke" else asyncio.run(agent.ainvoke(value))

    known = run("known?")
    assert searched == []
    assert model.shown[-1] == ["add"]
    assert known["retrieval_decision"]["retrieve"] is False
    if stubborn:
        assert "not needed" in known["messages"][-1].text
    unknown = run("unknown?")
    assert searched == ["q"]
    assert unknown["messages"][-1].text == "answer after found"
    assert judge.questions == ["known?", "unknown?"]  # once a turn
    with pytest.raises(ConfigurationError):
        RetrievalGateMiddleware(tools="search_docs")


@pytest.mark.model
@pytest.mark.parametrize("style", ["batch", "abatch"])
def test_a_batch_of_64_makes_four_model_batches(smollm2, style):
    gate = load_gate("default-question", proxy=smollm2)
    searched = []

    def search(question):
        searched.append(question)
        return "retrieve"

    router = RetrievalGate(gate).route(retrieve=search, direct=lambda q: "direct")
    asked = [f"What is the capital of country {i}?" for i in range(64)]
    decisions = gate.decide_batch(asked)
    middle = sorted(d.p_known for d in decisions)[32]
    config = {"configurable": {"retrieval_threshold": middle}}
    before = smollm2.calls
    answers = router.batch(asked, config) if style == "batch" else asyncio.run(router.abatch(asked, config))
    assert smollm2.calls - before == 64 / smollm2.max_batch_size == 4
    assert sorted(searched) == sorted(d.question for d in decisions if d.p_known < middle)
    assert [a == "retrieve" for a in answers] == [d.p_known < middle for d in decisions]


def test_a_gate_is_a_decision_model_where_langchain_has_them():
    pytest.importorskip("langchain_core.decisions", reason="langchain-core >= 1.8")
    from rgate_integrations.langchain.decisions import KNOWS, ROUTE, GateDecisionModel

    model = GateDecisionModel(gate=Judge())
    asked = {"knows": KNOWS, "route": ROUTE}
    known = model.invoke({"state": "known?", "questions": asked})
    assert known.nouls["knows"].noul == known.choices["route"].probabilities["direct"] == 0.8
    unknown = asyncio.run(model.ainvoke({"state": [HumanMessage("unknown?")], "questions": asked}))
    assert (unknown.choices["route"].choice, unknown.choices["route"].confidence) == ("retrieve", 0.8)
    with pytest.raises(ConfigurationError, match="'bug' is not one"):
        model.invoke(
            {"state": "x?", "questions": {"bug": KNOWS.model_copy(update={"instructions": "A bug?"})}}
        )
