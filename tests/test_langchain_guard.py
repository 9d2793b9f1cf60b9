"""LangChain: what a guarded retriever takes, emits and returns, and the queries that are worth searching."""

from unittest.mock import Mock, patch

import pytest
from langchain_core.documents import Document
from langchain_core.prompts import PromptTemplate
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import ConfigurableField, RunnableLambda
from langchain_core.tools import create_retriever_tool
from langchain_core.tracers.run_collector import RunCollectorCallbackHandler

from rgate_integrations import Decision
from rgate_integrations.errors import ConfigurationError, InvalidQuestionError
from rgate_integrations.langchain import ClaimQueryRewriter, GatedRetriever, RetrievalGate, gate_node
from rgate_integrations.langchain.router import RetrievalRouter
from tests.begun_answers import EventRecorder
from tests.langchain_fakes import BATCHES, INVOKES, SINGLES, Judge, Search, each, texts

ASKED = ["unknown a", "b", "unknown c"]
DRAFT = "unknown Ada wrote programs. Babbage built engines."
CLAIMS = ["unknown Ada wrote programs", "Ada Babbage built engines"]


@pytest.fixture
def search():
    return Search()


@pytest.fixture
def guarded(search):
    return RetrievalGate(Judge()).guard(search)


# --- one call of everything --------------------------------------------------------------------------------


@each(SINGLES)
def test_known_questions_are_not_searched(search, guarded, call):
    assert call(guarded, "b") == []
    assert search.queries == []
    assert texts(call(guarded, {"input": "unknown?"})) == ["about unknown?", "shared"]
    assert texts(call(guarded, "b", {"configurable": {"retrieval_threshold": 0.9}})) == ["about b", "shared"]
    assert texts(call(guarded, "RAISE")) == ["about RAISE", "shared"], "a failing gate searches"


class PassesCallbacks(BaseRetriever):
    """A retriever around another one, to which it passes only callbacks, as most of LangChain's do."""

    inner: BaseRetriever

    def _get_relevant_documents(self, query, *, run_manager):
        return self.inner.invoke(query, config={"callbacks": run_manager.get_child()})

    async def _aget_relevant_documents(self, query, *, run_manager):
        return await self.inner.ainvoke(query, config={"callbacks": run_manager.get_child()})


@each(INVOKES)
def test_rules_read_the_metadata_behind_another_retriever(search, call):
    """Regression: the metadata was lost, so the rule did not match."""
    gate = RetrievalGate("constant:never", always=[lambda question, metadata: metadata.get("tenant") == "a"])
    outer = PassesCallbacks(inner=gate.guard(search))
    assert texts(call(outer, "b", {"metadata": {"tenant": "a"}})) == ["about b", "shared"]
    assert call(outer, "b", {"metadata": {"tenant": "b"}}) == []


@each(INVOKES)
def test_a_guarded_retriever_is_a_tool_as_any_retriever(guarded, call):
    """Regression: ``as_tool`` raised a TypeError about the type of its input."""
    tool = guarded.as_tool(name="search", description="Searches.")
    assert tool.args == Search().as_tool(name="search", description="Searches.").args
    assert [texts(call(tool, {"query": asked})) for asked in ("b", "unknown?")] == [
        [],
        ["about unknown?", "shared"],
    ]


def test_a_batch_is_one_call_of_the_gate_and_one_batch_of_the_retriever(search):
    judge = Judge()
    guarded = RetrievalGate(judge).guard(search)
    with patch.object(Search, "batch", autospec=True, side_effect=Search.batch) as searching:
        found = guarded.batch(ASKED)
    expected = [["about unknown a", "shared"], [], ["about unknown c", "shared"]]
    assert [texts(each) for each in found] == expected
    assert judge.calls == [ASKED]
    assert [each.args[1] for each in searching.call_args_list] == [["unknown a", "unknown c"]]
    assert guarded.batch([]) == []


@each(BATCHES)
def test_arguments_of_a_call_reach_what_is_guarded(call):
    search = Mock(return_value=[Document("x"), Document("y")])
    found = call(RetrievalGate(Judge()).guard(search), ["unknown?", "b"], filter={"year": 2020}, k=1)
    assert [texts(each) for each in found] == [["x"], []]
    search.assert_called_once_with("unknown?", filter={"year": 2020}, k=1)


@pytest.mark.parametrize("k", [0, -1, 1.5])
def test_the_k_of_a_call_is_checked_before_the_search(guarded, search, k):
    with pytest.raises(ConfigurationError, match="k must be a whole number of at least 1"):
        guarded.invoke("unknown?", k=k)
    assert search.queries == []


@each(BATCHES)
def test_what_fails_stays_with_its_item_and_is_a_failed_run(guarded, call):
    collector = RunCollectorCallbackHandler()
    asked = ["unknown a", "unknown and broken", {"x": 1}, "b"]
    found = call(guarded, asked, {"callbacks": [collector]}, return_exceptions=True)
    assert texts(found[0]) == ["about unknown a", "shared"]
    assert [type(each) for each in found[1:]] == [TimeoutError, InvalidQuestionError, list]
    assert sorted(bool(run.error) for run in collector.traced_runs) == [False, False, True, True]
    with pytest.raises(OSError, match="index gone"):
        call(guarded, asked[:2])


@pytest.mark.parametrize("value", [{"x": 1}, 3, {"question": 3}, [], "", " ", {"question": ""}])
@each(INVOKES)
def test_an_input_without_a_question_is_an_error_and_never_searched(search, guarded, value, call):
    with pytest.raises(InvalidQuestionError, match=r" Hint: "):
        call(guarded, value)
    assert search.queries == []


@pytest.mark.parametrize(
    ("message", "prompt", "told"),
    [
        ("You know this.", None, "You know this."),
        (
            Document("You know this.", metadata={"title": "Note"}),
            "{title}: {page_content}",
            "Note: You know this.",
        ),
    ],
)
def test_a_retriever_tool_tells_the_agent_of_a_known_question(search, message, prompt, told):
    """Regression: it handed the agent an empty text, and failed if its prompt had other variables."""
    guarded = RetrievalGate(Judge()).guard(search, known_message=message)
    prompt = prompt and PromptTemplate.from_template(prompt)
    tool = create_retriever_tool(guarded, "docs", "Docs.", document_prompt=prompt)
    assert tool.invoke({"query": "b"}) == told
    first, second = guarded.batch(["b", "c"])
    assert first[0] is not second[0], "each one's own"


# --- claims ------------------------------------------------------------------------------------------------


@each(INVOKES)
def test_unknown_claims_are_searched_beside_the_question(search, call):
    judge = Judge(draft=DRAFT)
    found = call(RetrievalGate(judge).guard(search, filter_claims=True), "Who is unknown Ada?")
    asked = ["Who is unknown Ada?", "unknown Ada wrote programs"]
    assert sorted(search.queries) == asked, "they are searched at once, in any order"
    assert texts(found).count("shared") == 1
    metadata = {document.page_content: document.metadata for document in found}
    assert metadata["about unknown Ada wrote programs"] == {
        "rgate_query": "unknown Ada wrote programs",
        "rgate_claim": "unknown Ada wrote programs.",
        "rgate_rank": 1,
    }
    assert judge.calls == [["Who is unknown Ada?"], CLAIMS]
    call(RetrievalGate(judge).guard(search), "Who is unknown Ada?")
    assert sorted(search.queries[2:]) == sorted([asked[0], *CLAIMS]), "by default all claims are searched"
    assert judge.calls[3:] == []


@each(BATCHES)
def test_a_rewriter_makes_one_gate_call_for_the_questions_and_one_for_their_claims(call):
    judge = Judge(draft=DRAFT)
    rewriter = ClaimQueryRewriter(judge, filter_claims=True)
    asked = ["Who is unknown Ada?", "known?", {"x": 1}, "Who was unknown Ada?"]
    found = call(rewriter, asked, return_exceptions=True)
    assert found[:2] == [["Who is unknown Ada?", "unknown Ada wrote programs"], []]
    assert (type(found[2]), len(found[3])) == (InvalidQuestionError, 2)
    assert judge.calls == [[asked[0], asked[1], asked[3]], CLAIMS * 2]


@pytest.mark.parametrize(
    ("options", "queries"),
    [
        ({}, ["Who is unknown Ada?", *CLAIMS]),
        ({"always_include_question": False}, CLAIMS),
        ({"max_queries": 1}, ["Who is unknown Ada?"]),
    ],
)
def test_options_of_a_rewriter(options, queries):
    assert ClaimQueryRewriter(Judge(draft=DRAFT), **options).invoke("Who is unknown Ada?") == queries


@pytest.mark.parametrize("value", ["", " ", {"question": ""}])
@each(INVOKES)
def test_a_rewriter_has_no_queries_for_an_empty_question(value, call):
    """Regression: an empty text was searched for."""
    assert call(ClaimQueryRewriter(Judge()), value) == []


# --- what listeners see ------------------------------------------------------------------------------------


@each(BATCHES)
def test_each_decision_is_a_child_run_and_an_event(guarded, call):
    collector, events = RunCollectorCallbackHandler(), EventRecorder()
    call(guarded, ["unknown a", "b"], {"callbacks": [collector, events]})
    decided = [(event["question"], event["retrieve"]) for event in events.events]
    assert decided == [("unknown a", True), ("b", False)]
    assert [(run.name, run.run_type) for run in collector.traced_runs] == [
        ("GatedRetriever", "retriever")
    ] * 2
    children = [[child.name for child in run.child_runs] for run in collector.traced_runs]
    assert sorted(children) == [["RetrievalGate"], ["RetrievalGate", "Search"]]


@each(INVOKES)
def test_the_config_of_a_call_reaches_its_run_and_what_is_guarded(call):
    collector = RunCollectorCallbackHandler()
    own = {"tags": ["mine"], "metadata": {"of": "guard", "who": "guard"}}
    guarded = GatedRetriever(retriever=Search(), gate=Judge(), **own)
    config = {"callbacks": [collector], "tags": ["t"], "metadata": {"who": "me"}, "run_name": "docs"}
    call(guarded, "unknown?", config)
    (run,) = collector.traced_runs
    searched = run.child_runs[-1]
    assert (run.name, set(run.tags), "t" in searched.tags) == ("docs", {"t", "mine"}, True)
    for each_run in (run, searched):
        assert each_run.extra["metadata"].items() >= {"who": "me", "of": "guard"}.items()


# --- what can be guarded, and by what ----------------------------------------------------------------------


FOUND = ["about unknown?", "shared"]
GUARD = RetrievalGate("constant:always").guard(Search())
GUARDED = [
    (RunnableLambda(int).with_fallbacks([Search()]), FOUND),
    (GUARD.configurable_fields(k=ConfigurableField(id="documents")), FOUND[:1]),
    (Search().with_retry(), FOUND),
    (lambda query: [Document(query)], ["unknown?"]),
    (RunnableLambda(str.upper) | Search(), ["about UNKNOWN?", "shared"]),
    (GUARD, FOUND),
]


DECIDERS = [
    RetrievalGate(Judge()).with_config(tags=["t"]),
    RetrievalGate(Judge()).with_fallbacks([RetrievalGate("constant:always")]),
    RunnableLambda(lambda q: Decision(question=q, retrieve="unknown" in q, p_known=0.5)),
    RetrievalGate(Judge()).configurable_fields(threshold=ConfigurableField(id="t")),
]


@pytest.mark.parametrize(
    ("guarded", "expected"),
    [
        *((RetrievalGate(Judge()).guard(inner), expected) for inner, expected in GUARDED),
        *((GatedRetriever(retriever=Search(), gate=gate), FOUND) for gate in DECIDERS),
    ],
)
def test_any_runnable_to_documents_is_guarded_by_any_runnable_to_a_decision(guarded, expected):
    config = {"configurable": {"documents": 1}}
    assert texts(guarded.invoke("unknown?", config)) == expected
    assert guarded.invoke("b", config) == []


NO_DECISION = RunnableLambda(lambda question: True)
IS_BOOL = "returned bool instead of a Decision"


@pytest.mark.parametrize(
    ("runnable", "value", "why"),
    [
        (RetrievalGate(Judge()).guard(lambda query: f"about {query}"), "unknown?", "returned str"),
        (GatedRetriever(retriever=Search(), gate=NO_DECISION), "b", IS_BOOL),
        (ClaimQueryRewriter(NO_DECISION), "b", IS_BOOL),
        (gate_node(NO_DECISION), {"question": "b"}, IS_BOOL),
        # Regression: the router returned it to the user.
        (RetrievalRouter(NO_DECISION, retrieve=str, direct=str), "b", IS_BOOL),
    ],
)
def test_what_cannot_guard_or_be_guarded(runnable, value, why):
    with pytest.raises(ConfigurationError, match=why):
        runnable.invoke(value)


# --- what is returned --------------------------------------------------------------------------------------


def test_documents_keep_their_own_metadata_and_are_not_changed():
    own = {"rgate_rank": "mine", "year": 2020}
    kept = [Document("x", metadata=dict(own))]
    (found,) = RetrievalGate(Judge()).guard(lambda query: kept).invoke("unknown?")
    assert found.metadata == {**own, "rgate_query": "unknown?", "rgate_claim": None}
    assert kept == [Document("x", metadata=own)]


class Outer(BaseRetriever):
    """Old code, which calls the hook itself."""

    inner: BaseRetriever

    def _get_relevant_documents(self, query, *, run_manager):
        return self.inner._get_relevant_documents(query, run_manager=run_manager)


def test_old_code_calls_the_hook_itself(guarded):
    assert texts(Outer(inner=guarded).invoke("unknown?")) == FOUND


def test_what_one_search_found_is_kept_whole():
    """Regression: of two documents with the same text or id, one was lost, and with it a citation."""
    alike = [Document("See it.", metadata={"source": name}) for name in "ab"]
    parts = [Document(text, id="manual") for text in "cd"]
    found = RetrievalGate("constant:always").guard(lambda query: [*alike, *parts]).invoke("Which?")
    assert [document.page_content for document in found] == ["See it.", "See it.", "c", "d"]
    assert [document.metadata.get("source") for document in found] == ["a", "b", None, None]
