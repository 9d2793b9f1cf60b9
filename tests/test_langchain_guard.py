"""LangChain: what a guarded retriever takes, tells and returns, in every way of calling it."""

import asyncio

import pytest
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import ConfigurableField, RunnableConfig, RunnableLambda
from langchain_core.tools import create_retriever_tool
from langchain_core.tracers.run_collector import RunCollectorCallbackHandler
from pydantic import Field, ValidationError

from rgate_integrations import Decision
from rgate_integrations.errors import ConfigurationError, InvalidQuestionError
from rgate_integrations.langchain import GatedRetriever, RetrievalGate
from rgate_integrations.langchain.retriever import NOTE
from tests.langchain_fakes import BATCHES, INVOKES, SINGLES, Judge, Search, each

ASKED = ["unknown a", "b", "unknown c"]


class Counted(Search):
    """Counts its batches, and notes what it was given with each query."""

    batches: list = Field(default_factory=list)
    options: list = Field(default_factory=list)

    def _get_relevant_documents(self, query, *, run_manager, **options):
        self.options.append(options)
        return super()._get_relevant_documents(query, run_manager=run_manager)

    async def _aget_relevant_documents(self, query, *, run_manager, **options):
        return self._get_relevant_documents(query, run_manager=run_manager, **options)

    def batch(self, inputs, config=None, **options):
        self.batches.append(list(inputs))
        return super().batch(inputs, config, **options)

    async def abatch(self, inputs, config=None, **options):
        self.batches.append(list(inputs))
        return await super().abatch(inputs, config, **options)


@pytest.fixture
def search():
    return Counted()


def texts(documents):
    return [document.page_content for document in documents]


# --- one call of everything --------------------------------------------------------------------------------


@each(BATCHES)
def test_a_batch_is_one_call_of_the_gate_and_one_batch_of_the_retriever(search, call):
    judge = Judge()
    found = call(RetrievalGate(judge).guard(search), ASKED)
    assert [texts(documents) for documents in found] == [
        ["about unknown a", "shared"],
        [],
        ["about unknown c", "shared"],
    ]
    assert judge.calls == [ASKED]
    assert search.batches == [["unknown a", "unknown c"]]
    assert call(RetrievalGate(judge).guard(search), []) == []


@each(BATCHES)
def test_the_claims_of_a_batch_are_judged_and_searched_together(search, call):
    judge = Judge(draft="unknown Ada wrote programs.")
    guarded = RetrievalGate(judge).guard(search, filter_claims=True)
    call(guarded, ["Who is unknown Ada?", "b", "What did unknown Ada do?"])
    assert [len(questions) for questions in judge.calls] == [3, 2]
    assert [len(queries) for queries in search.batches] == [4]


@each(BATCHES)
def test_what_fails_stays_with_its_item(search, call):
    guarded = RetrievalGate(Judge()).guard(search)
    asked = ["unknown a", "unknown and broken", {"x": 1}, "b"]
    found = call(guarded, asked, return_exceptions=True)
    assert texts(found[0]) == ["about unknown a", "shared"]
    assert [type(each) for each in found[1:]] == [OSError, InvalidQuestionError, list]
    with pytest.raises(OSError, match="index gone"):
        call(guarded, asked)


@each(BATCHES)
def test_a_threshold_for_one_item_does_not_split_the_batch(search, call):
    judge = Judge()
    configs = [{"configurable": {"retrieval_threshold": t}} for t in (0.1, 0.9)]
    found = call(RetrievalGate(judge).guard(search), ["unknown a", "b"], configs)
    assert [texts(documents) for documents in found] == [[], ["about b", "shared"]]
    assert judge.calls == [["unknown a", "b"]]


@each(SINGLES)
def test_a_threshold_for_one_call(search, call):
    guarded = RetrievalGate(Judge()).guard(search)
    assert texts(call(guarded, "b", {"configurable": {"retrieval_threshold": 0.9}})) == ["about b", "shared"]
    assert "retrieval_threshold" in [spec.id for spec in guarded.config_specs]


# --- what listeners see ------------------------------------------------------------------------------------


class Events(BaseCallbackHandler):
    def __init__(self):
        self.seen = []

    def on_custom_event(self, name, data, *, run_id, **others):
        self.seen.append((name, data["question"], data["retrieve"]))


@each({**INVOKES, **BATCHES})
def test_each_decision_is_a_child_run_and_an_event(search, call):
    collector, events = RunCollectorCallbackHandler(), Events()
    batched = call in BATCHES.values()
    guarded = RetrievalGate(Judge()).guard(search)
    call(guarded, ["unknown a", "b"] if batched else "unknown a", {"callbacks": [collector, events]})
    known = [("retrieval_gate", "b", False)] if batched else []
    assert events.seen == [("retrieval_gate", "unknown a", True), *known]
    runs = collector.traced_runs
    assert [(run.name, run.run_type) for run in runs] == [("GatedRetriever", "retriever")] * len(runs)
    assert [[child.name for child in run.child_runs] for run in runs] == [
        ["RetrievalGate", "Counted"],
        ["RetrievalGate"],
    ][: len(runs)]
    assert runs[0].inputs == {"query": "unknown a"}
    assert texts(runs[0].outputs["documents"]) == ["about unknown a", "shared"]
    assert runs[0].child_runs[0].outputs["output"].retrieve


@pytest.mark.parametrize("gate", ["constant:never", None])
async def test_events_reach_astream_events(search, gate):
    guarded = RetrievalGate(gate or Judge()).guard(search)
    events = [event async for event in guarded.astream_events("unknown?", version="v2")]
    (custom,) = [event for event in events if event["event"] == "on_custom_event"]
    assert custom["data"]["retrieve"] is (gate is None)
    ends = [event["name"] for event in events if event["event"] == "on_retriever_end"]
    assert ends == (["GatedRetriever"] if gate else ["Counted", "GatedRetriever"])


@each(INVOKES)
def test_a_decision_of_a_router_above_is_not_told_again(search, call):
    events, judge = Events(), Judge()
    gate = RetrievalGate(judge)
    chain = gate.route(retrieve=gate.guard(search) | texts, direct=lambda question: [])
    assert call(chain, "unknown?", {"callbacks": [events]}) == ["about unknown?", "shared"]
    assert events.seen == [("retrieval_gate", "unknown?", True)]
    assert judge.calls == [["unknown?"]]


@each({**INVOKES, **BATCHES})
def test_a_failing_search_is_a_failed_run(search, call):
    collector = RunCollectorCallbackHandler()
    value = ["unknown and broken", "b"] if call in BATCHES.values() else "unknown and broken"
    with pytest.raises(OSError, match="index gone"):
        call(RetrievalGate(Judge()).guard(search), value, {"callbacks": [collector]})
    errors = [run.error or "" for run in collector.traced_runs]
    assert "index gone" in errors[0]
    assert errors[1:] == [""] * (len(errors) - 1)


@each(INVOKES)
def test_the_config_of_a_call_reaches_its_run_and_what_is_guarded(call):
    seen = []

    def find(query: str, config: RunnableConfig):
        seen.append((config["tags"], config["metadata"]["who"]))
        return [Document(query)]

    collector = RunCollectorCallbackHandler()
    guarded = GatedRetriever(
        retriever=RunnableLambda(find), gate=Judge(), tags=["mine"], metadata={"of": "guard"}
    )
    call(
        guarded,
        "unknown?",
        {"callbacks": [collector], "tags": ["t"], "metadata": {"who": "me"}, "run_name": "docs"},
    )
    (run,) = collector.traced_runs
    assert (run.name, set(run.tags)) == ("docs", {"t", "mine"})
    assert (run.extra["metadata"]["who"], run.extra["metadata"]["of"]) == ("me", "guard")
    assert "t" in seen[0][0]
    assert seen[0][1] == "me"


# --- what can be guarded -----------------------------------------------------------------------------------


class Down(BaseRetriever):
    """A retriever that is always down."""

    def _get_relevant_documents(self, query, *, run_manager):
        raise OSError("down")


class Ranked(BaseRetriever):
    """A retriever with a field to configure."""

    rank: int = 1

    def _get_relevant_documents(self, query, *, run_manager):
        return [Document(f"rank {self.rank} for {query}")]


GUARDED = {
    "fallbacks": (lambda: Down().with_fallbacks([Ranked()]), "rank 1 for unknown?"),
    "config": (lambda: Ranked().with_config(tags=["t"]), "rank 1 for unknown?"),
    "configurable": (
        lambda: Ranked().configurable_fields(rank=ConfigurableField(id="rank")),
        "rank 2 for unknown?",
    ),
    "retry": (lambda: Ranked().with_retry(), "rank 1 for unknown?"),
    "lambda": (lambda: RunnableLambda(lambda query: [Document(query)]), "unknown?"),
    "function": (lambda: lambda query: [Document(query)], "unknown?"),
    "chain": (lambda: RunnableLambda(str.upper) | Ranked(), "rank 1 for UNKNOWN?"),
    "guard": (lambda: RetrievalGate("constant:always").guard(Ranked()), "rank 1 for unknown?"),
}


@pytest.mark.parametrize("name", GUARDED)
@each(SINGLES)
def test_any_runnable_from_query_to_documents(name, call):
    make, expected = GUARDED[name]
    guarded = RetrievalGate(Judge()).guard(make())
    config = {"configurable": {"rank": 2}} if name == "configurable" else None
    assert texts(call(guarded, "unknown?", config)) == [expected]
    assert call(guarded, "b", config) == []


@each(SINGLES)
def test_what_returns_no_documents(call):
    guarded = RetrievalGate(Judge()).guard(RunnableLambda(lambda query: f"about {query}"))
    with pytest.raises(ConfigurationError, match="returned str"):
        call(guarded, "unknown?")
    with pytest.raises(TypeError):
        RetrievalGate(Judge()).guard("a retriever")


@pytest.mark.parametrize("gate", ["with_config", "with_fallbacks", "lambda", "configurable"])
@each(INVOKES)
def test_any_runnable_from_question_to_decision_guards(search, gate, call):
    gates = {
        "with_config": lambda: RetrievalGate(Judge()).with_config(tags=["t"]),
        "with_fallbacks": lambda: RetrievalGate(Judge()).with_fallbacks([RetrievalGate("constant:always")]),
        "lambda": lambda: RunnableLambda(
            lambda q: Decision(question=q, retrieve="unknown" in q, p_known=0.5)
        ),
        "configurable": lambda: RetrievalGate(Judge()).configurable_fields(
            threshold=ConfigurableField(id="t")
        ),
    }
    guarded = GatedRetriever(retriever=search, gate=gates[gate]())
    assert texts(call(guarded, "unknown?")) == ["about unknown?", "shared"]
    assert call(guarded, "b") == []
    if gate == "configurable":
        assert texts(call(guarded, "b", {"configurable": {"t": 0.9}})) == ["about b", "shared"]


@each(INVOKES)
def test_a_runnable_that_does_not_decide(search, call):
    with pytest.raises(ConfigurationError, match="returned bool and no Decision"):
        call(GatedRetriever(retriever=search, gate=RunnableLambda(lambda q: True)), "b")


# --- options -----------------------------------------------------------------------------------------------


@each(SINGLES)
def test_arguments_of_a_call_reach_what_is_guarded(search, call):
    guarded = RetrievalGate(Judge()).guard(search)
    found = call(guarded.bind(filter={"year": 2020}, k=1), "unknown?")
    assert texts(found) == ["about unknown?"]
    assert search.options == [{"filter": {"year": 2020}, "k": 1}]


@each(BATCHES)
def test_arguments_of_a_batch_reach_what_is_guarded(search, call):
    call(RetrievalGate(Judge()).guard(search), ASKED, filter={"year": 2020})
    assert search.options == [{"filter": {"year": 2020}}] * 2


def test_misspelt_options(search):
    with pytest.raises(TypeError, match="max_querys"):
        RetrievalGate(Judge()).guard(search, max_querys=3)
    with pytest.raises(ValidationError, match="max_querys"):
        GatedRetriever(retriever=search, gate=Judge(), max_querys=3)
    with pytest.raises(ValidationError, match="when_known"):
        RetrievalGate(Judge()).guard(search, when_known="notes")
    with pytest.raises(ValidationError, match="max_queries"):
        RetrievalGate(Judge()).guard(search, max_queries=0)


# --- questions ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [
        {"question": "unknown?"},
        {"input": "unknown?"},
        {"messages": [HumanMessage("unknown?")]},
        [("human", "unknown?")],
        HumanMessage("unknown?"),
    ],
)
@each(SINGLES)
def test_the_question_is_read_in_any_input(search, value, call):
    found = call(RetrievalGate(Judge()).guard(search), value)
    assert texts(found) == ["about unknown?", "shared"]
    assert search.queries == ["unknown?"]


@pytest.mark.parametrize(("when_known", "said"), [("nothing", ""), ("note", NOTE)])
def test_a_search_tool_says_something_of_a_known_question_only_with_a_note(search, when_known, said):
    guarded = RetrievalGate(Judge()).guard(search, when_known=when_known)
    searching = create_retriever_tool(guarded, "search_docs", "Search the documents.")
    assert searching.invoke({"query": "known?"}) == said
    assert searching.invoke({"query": "unknown?"}).startswith("about unknown?")


@pytest.mark.parametrize("value", [{"x": 1}, 3, {"question": 3}, [], "", " ", {"question": ""}])
@each(SINGLES)
def test_an_input_without_a_question_is_an_error_and_never_searched(search, value, call):
    with pytest.raises(InvalidQuestionError):
        call(RetrievalGate(Judge()).guard(search), value)
    assert search.queries == []


@each(SINGLES)
def test_the_key_of_the_question(search, call):
    guarded = RetrievalGate(Judge(), input_key="q").guard(search)
    assert texts(call(guarded, {"q": "unknown?", "question": "b"})) == ["about unknown?", "shared"]


@each(INVOKES)
def test_a_follow_up_is_searched_as_it_was_condensed(search, call):
    turns = [HumanMessage("Who wrote Hamlet?"), AIMessage("Shakespeare."), HumanMessage("And when?")]
    gate = RetrievalGate(Judge(), condense=lambda messages: "unknown year of Hamlet")
    assert texts(call(gate.guard(search), turns)) == ["about unknown year of Hamlet", "shared"]


# --- what is returned --------------------------------------------------------------------------------------


@each(SINGLES)
def test_a_note_for_known_questions(search, call):
    guarded = RetrievalGate(Judge()).guard(search, when_known="note")
    (note,) = call(guarded, "b")
    assert note.page_content == "No passages were needed for this question: answer it from what you know."
    assert note.metadata == {"rgate_note": True, "rgate_p_known": 0.8, "rgate_reason": ""}
    assert texts(call(guarded, "unknown?")) == ["about unknown?", "shared"]
    assert search.queries == ["unknown?"]


@each(SINGLES)
def test_documents_with_their_decision(search, call):
    both = RetrievalGate(Judge()).guard(search).with_decision()
    unknown, known = call(both, "unknown?"), call(both, {"question": "b"})
    assert texts(unknown["documents"]) == ["about unknown?", "shared"]
    assert (unknown["decision"].retrieve, unknown["decision"].p_known) == (True, 0.2)
    assert (known["documents"], known["decision"].retrieve) == ([], False)


@each(BATCHES)
def test_a_batch_of_documents_with_their_decisions(search, call):
    judge = Judge()
    both = RetrievalGate(judge).guard(search, when_known="note").with_decision()
    found = call(both, [*ASKED, {"x": 1}], return_exceptions=True)
    assert [each["decision"].retrieve for each in found[:3]] == [True, False, True]
    assert [len(each["documents"]) for each in found[:3]] == [2, 1, 2]
    assert isinstance(found[3], InvalidQuestionError)
    assert judge.calls == [ASKED]
    assert both.config_specs == RetrievalGate().config_specs


class Tagged(BaseRetriever):
    """Finds a document with metadata of the user's own."""

    def _get_relevant_documents(self, query, *, run_manager):
        return [Document(query, metadata={"rgate": "mine", "rgate_rank": "mine", "year": 2020})]


@each(INVOKES)
def test_metadata_of_the_users_own_is_kept(call):
    (found,) = call(RetrievalGate(Judge()).guard(Tagged()), "unknown?")
    assert found.metadata == {
        "rgate": "mine",
        "rgate_rank": "mine",
        "year": 2020,
        "rgate_query": "unknown?",
        "rgate_claim": None,
    }


@each(INVOKES)
def test_documents_of_the_retrievers_own_are_not_changed(call):
    kept = [Document("x", metadata={"n": 1})]
    call(RetrievalGate(Judge()).guard(lambda query: kept), "unknown?")
    assert kept == [Document("x", metadata={"n": 1})]


async def test_many_concurrent_calls_keep_to_themselves(search):
    guarded = RetrievalGate(Judge()).guard(search)
    asked = [f"unknown {i}" if i % 2 else f"{i}" for i in range(50)]
    found = await asyncio.gather(*(guarded.ainvoke(question) for question in asked))
    assert [bool(documents) for documents in found] == ["unknown" in question for question in asked]


def test_old_code_calls_the_hook_itself(search):
    class Outer(BaseRetriever):
        inner: BaseRetriever

        def _get_relevant_documents(self, query, *, run_manager):
            return self.inner._get_relevant_documents(query, run_manager=run_manager)

    collector = RunCollectorCallbackHandler()
    outer = Outer(inner=RetrievalGate(Judge()).guard(search))
    assert texts(outer.invoke("unknown?", {"callbacks": [collector]})) == ["about unknown?", "shared"]
    assert [child.name for child in collector.traced_runs[0].child_runs] == ["GatedRetriever"]
