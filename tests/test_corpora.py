"""Several corpora: what a decision names is searched, in both frameworks, in graphs, and behind the gateway."""

import pytest
from langchain_core.documents import Document
from langchain_core.language_models import FakeListChatModel
from langchain_core.runnables import ConfigurableField, RunnableLambda, RunnablePassthrough
from llama_index.core.base.base_selector import SelectorResult
from llama_index.core.llms import MockLLM
from llama_index.core.query_engine import RouterQueryEngine
from llama_index.core.tools import QueryEngineTool

from rgate_integrations import load_gate
from rgate_integrations.errors import ConfigurationError, ProfileError
from rgate_integrations.langchain import CorpusRetriever, RetrievalGate, gated_rag
from rgate_integrations.langchain.corpora import CorpusChain
from rgate_integrations.langchain.graph import gate_node, route_edge
from rgate_integrations.llama_index import CorpusRetriever as Corpora
from rgate_integrations.llama_index import GatedQueryEngine, GatedRetriever, RetrievalGateSelector
from rgate_integrations.serving.agents import make_mcp_server
from rgate_integrations.serving.gateway import Gateway
from rgate_integrations.serving.service import DecisionService
from rgate_integrations.serving.upstream import Upstream
from tests import llama_index_parts
from tests.begun_answers import EventRecorder, Librarian
from tests.http_servers import serving_gate
from tests.langchain_fakes import BATCHES, INVOKES, SINGLES, Judge, Search, each, texts
from tests.llama_index_parts import Rag, both_ways
from tests.scripted_upstream import Shelf
from tests.test_gateway import gateway, gateway_headers

NAMES = Librarian.corpora
UNKNOWN = {f"unknown to {name}": name for name in NAMES} | {"unknown elsewhere": "web"}


class Sure(Librarian):
    """Knows what has no "unknown" in it."""

    def p_known(self, question, draft):
        return 0.2 if "unknown" in question else 0.8


@pytest.fixture
def gate():
    return RetrievalGate(Sure())


def chains(**more):
    return {name: RunnableLambda(lambda asked, name=name: f"{name}: {asked}") for name in NAMES} | more


def routed(gate, retrieve=None):
    return gate.route(retrieve=retrieve or chains(), direct=lambda asked: f"direct: {asked}")


# --- construction ----------------------------------------------------------------------------------------------

OTHERS = {"docs": Search(), "web": Search()}
WRONG = {
    "route": lambda: routed(RetrievalGate(Sure()), OTHERS),
    "a chain of one's own": lambda: routed(RetrievalGate(Sure()), CorpusChain(parts=OTHERS)),
    "a retriever in a chain": lambda: routed(RetrievalGate(Sure()), CorpusRetriever(parts=OTHERS) | str),
    "GatedQueryEngine": lambda: GatedQueryEngine.from_defaults(
        llama_index_parts.over(Corpora(dict.fromkeys(OTHERS, llama_index_parts.Shelf()))),
        Sure(),
        llm=MockLLM(),
    ),
    "guard": lambda: RetrievalGate(Sure()).guard(OTHERS),
    "GatedRetriever": lambda: GatedRetriever(dict.fromkeys(OTHERS, llama_index_parts.Shelf()), Sure()),
    "RetrievalGateSelector": lambda: RetrievalGateSelector(Sure(), retrieve=list(OTHERS)),
    "gateway": lambda: Gateway(DecisionService(Sure()), Upstream("http://127.0.0.1:1"), OTHERS),
}


@pytest.mark.parametrize("make", WRONG.values(), ids=list(WRONG))
def test_other_names_than_those_of_the_corpora_are_an_error_at_once(make):
    with pytest.raises(
        ConfigurationError,
        match=r"'docs', 'hr', 'web', but the chains, .* are named 'docs', 'web'\. Hint: .*same names",
    ):
        make()


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: CorpusChain(parts={}), "nothing to search"),
        (lambda: route_edge(retrieve={}, direct="answer"), "nothing to search"),
        (lambda: RetrievalGate(Sure(), corpus={}), "does not accept corpus="),
        (lambda: RetrievalGate(top=2), "top= needs a corpus"),
        (lambda: RetrievalGate(corpus=False, top=2), "top= needs a corpus"),
        (lambda: route_edge(retrieve=["a", "b"], direct="c"), "retrieve= must be .* not list"),
        (
            lambda: RetrievalGate(corpus=True).invoke("a"),
            "With corpus=True, the gate cannot decide by itself",
        ),
        (lambda: RetrievalGate(corpus=True).guard(Search()), "cannot be read from"),
        (lambda: RetrievalGateSelector(corpus=True), "cannot be read from"),
        (lambda: GatedRetriever(llama_index_parts.Shelf(), corpus=True), "cannot be read from"),
        (lambda: load_gate(corpus=True), "must be a CorpusProfile or its folder"),
        # It is a pydantic model, which is iterable.
        (lambda: RetrievalGate(corpus=Search()), "not Search.*from_retriever"),
        (lambda: load_gate(corpus=[]), "corpus= has no corpora"),
        (lambda: load_gate(corpus={}), "corpus= has no corpora"),
        # A text is taken for a folder, and the hint says what to use.
        (lambda: load_gate(corpus=["Press reset."]), r"no profile\. .*CorpusProfile\.from_texts\(texts\)"),
    ],
)
def test_what_cannot_be_searched_or_profiled(make, why):
    with pytest.raises((ConfigurationError, ProfileError), match=why):
        make()


def test_no_corpus_may_be_said_of_a_gate_of_ones_own():
    assert RetrievalGate(Sure(), corpus=False).guard(Search()).retriever is not None


def test_without_corpora_a_mapping_is_what_it_is_everywhere_in_langchain():
    router = RetrievalGate("constant:always").route(retrieve={"a": str.upper, "b": str.lower}, direct=str)
    assert router.invoke("Ab") == {"a": "AB", "b": "ab"}
    one = Sure()
    one.corpora = ("docs",)
    for retrieve, expected in (
        ({"context": str.upper}, {"context": "UNKNOWN"}),
        ({"docs": str.upper}, "UNKNOWN"),
    ):
        assert RetrievalGate(one).route(retrieve=retrieve, direct=str).invoke("unknown") == expected


def test_without_corpora_several_retrievers_are_searched_together():
    """Regression: they ran in parallel, and what they returned was no list of documents."""
    gate, model = RetrievalGate("constant:always"), FakeListChatModel(responses=["An answer."])
    found = gate.guard(FOUND).invoke("who?")
    answer = gated_rag(FOUND, model, gate=gate, return_sources=True).invoke("who?")
    for documents in (found, answer["sources"]):
        assert [document.metadata["rgate_corpus"] for document in documents] == list(NAMES)


# --- LangChain ----------------------------------------------------------------------------------------------------


@each(SINGLES)
def test_the_chain_of_the_corpus_runs(gate, call):
    listener = EventRecorder()
    for question, name in UNKNOWN.items():
        assert call(routed(gate), question, {"callbacks": [listener]}) == f"{name}: {question}"
    assert call(routed(gate), "a known one") == "direct: a known one"
    assert [event["corpus"] for event in listener.events] == list(UNKNOWN.values())
    assert listener.events[0]["p_covered"] == 0.9


class Elsewhere(Sure):
    """Names other corpora."""

    corpora = ("wiki", "news")


@pytest.mark.parametrize("look_first", [False, True])
@each(SINGLES)
def test_a_gate_of_other_corpora_in_a_calls_config_is_an_error_and_a_known_question_is_not(
    gate, call, look_first
):
    """Regression: the first chain answered, whatever it was about."""
    search = {name: RunnableLambda(lambda asked: []) | (lambda found: "found") for name in NAMES}
    router = gate.route(retrieve=search, direct=lambda asked: "direct", look_first=look_first)
    configurable = router.configurable_fields(gate=ConfigurableField(id="gate"))
    config = {"configurable": {"gate": RetrievalGate(Elsewhere())}}
    assert call(configurable, "unknown to hr") == "found"
    with pytest.raises(
        ConfigurationError, match=r"corpus 'news', for which .* no chain.* Hint: .*'docs', 'hr', 'web'"
    ):
        call(configurable, "unknown to hr", config)
    assert call(configurable, "a known one", config) == "direct"


@pytest.mark.parametrize("config", [None, {"max_concurrency": 1}], ids=["", "limited"])
@each(BATCHES)
def test_a_batch_is_one_call_of_the_gate(gate, call, config):
    asked = [*UNKNOWN, "a known one"]
    found = call(routed(gate), asked, config)
    assert found == [*(f"{name}: {question}" for question, name in UNKNOWN.items()), "direct: a known one"]
    assert gate.unadjusted.gate.calls == [asked]


FOUND = {
    name: RunnableLambda(lambda query, name=name: [Document(f"{name}: {query}", id="1")]) for name in NAMES
}
ASKS = {
    "guard": lambda gate: gate.guard(FOUND),
    "a retriever in a chain": lambda gate: gate.route(
        retrieve=RunnablePassthrough() | CorpusRetriever(parts=FOUND), direct=lambda _: []
    ),
    "a guard in a chain": lambda gate: gate.route(retrieve=gate.guard(FOUND), direct=lambda _: []),
}


@pytest.mark.parametrize("make", ASKS.values(), ids=list(ASKS))
@each(SINGLES)
def test_the_retrievers_of_the_corpora_are_asked_and_others_are_not(gate, call, make):
    asked = "unknown to hr and docs"
    found = call(make(gate), asked)
    assert texts(found) == [f"hr: {asked}", f"docs: {asked}"], "one id in two corpora is two documents"
    assert [document.metadata["rgate_corpus"] for document in found] == ["hr", "docs"]
    assert call(make(gate), "a known one") == []
    assert len(call(make(gate), "RAISE unknown to hr")) == 3, "a failing gate searches all"
    assert len(gate.unadjusted.gate.calls) == 3


@pytest.mark.parametrize("claims", [None, "Hamlet is old. It is long."], ids=["", "claims"])
@each(SINGLES)
def test_a_passage_that_is_in_two_corpora_is_returned_once(call, claims):
    """Regression: the LLM read it twice."""
    found = {
        "docs": RunnableLambda(lambda query: [Document("a", id="1"), Document("shared", id="2")]),
        "hr": RunnableLambda(
            lambda query: [Document("shared", id="1"), Document("", id="2"), Document("", id="3")]
        ),
    }
    documents = call(RetrievalGate(Judge(draft=claims)).guard(found), "unknown?")
    assert [(document.page_content, document.id) for document in documents] == [
        ("shared", "1"),
        ("a", "1"),
        ("", "2"),
        ("", "3"),
    ], "what has no text, such as an image, has only its id"


@each(BATCHES)
def test_each_question_of_a_batch_is_searched_where_its_decision_says(gate, call):
    found = call(gate.guard(FOUND), [*UNKNOWN, "a known one"])
    assert [texts(each) for each in found] == [[f"{name}: {asked}"] for asked, name in UNKNOWN.items()] + [[]]


# --- LangGraph ----------------------------------------------------------------------------------------------------


@each(INVOKES)
def test_the_edge_names_the_node(call):
    node, edge = (
        gate_node(Sure()),
        route_edge(retrieve={name: f"search_{name}" for name in NAMES}, direct="answer"),
    )
    expected = UNKNOWN | {"RAISE unknown to hr": "docs"}
    for question, name in expected.items():
        assert edge(call(node, {"question": question})) == f"search_{name}"
    assert edge(call(node, {"question": "a known one"})) == "answer"
    saved = {"retrieve": True, "corpora": ["hr", "docs"]}  # from a checkpoint
    assert edge({"retrieval_decision": saved}) == ["search_hr", "search_docs"]
    with pytest.raises(ConfigurationError, match="corpus 'wiki', for which retrieve= has no chain or node"):
        edge({"retrieval_decision": saved | {"corpora": ["wiki"]}})


# --- LlamaIndex ---------------------------------------------------------------------------------------------------


def router_engine():
    tools = [
        QueryEngineTool.from_defaults(Rag(answer=f"from {name}"), name=name, description="d")
        for name in ("direct", *NAMES)
    ]
    return RouterQueryEngine(RetrievalGateSelector(Sure()), tools, llm=MockLLM())


@both_ways
def test_the_tool_of_the_corpus_answers(call):
    for question, name in UNKNOWN.items():
        assert str(call(router_engine(), "query", question)) == f"from {name}"
    assert str(call(router_engine(), "query", "a known one")) == "from direct"
    text = str(call(router_engine(), "query", "unknown to hr and docs"))
    assert text.index("from hr") < text.index("from docs")


@both_ways
def test_several_tools_are_selected_where_several_may_hold_it_or_the_gate_fails(call):
    selector = RetrievalGateSelector(Sure())
    tools = ["web", "direct", "docs", "hr"]

    def selected(question):
        result: SelectorResult = call(selector, "select", tools, question)
        return [tools[index] for index in result.inds]

    assert selected("unknown to hr and docs") == ["hr", "docs"]
    assert selected("RAISE") == list(NAMES)
    with pytest.raises(ConfigurationError, match="Unknown tool 'web'"):
        call(selector, "select", tools[1:], "a known one")
    for given in (
        RetrievalGateSelector("constant:always", retrieve=["docs"]),
        RetrievalGateSelector(Sure(), retrieve="docs"),
    ):
        assert call(given, "select", tools[1:], "unknown to hr").ind == 1


@both_ways
def test_a_guard_asks_the_retrievers_of_the_corpora(call):
    shelves = {name: llama_index_parts.Shelf(name) for name in NAMES}
    guard = GatedRetriever(shelves, Sure())
    assert [node.text for node in call(guard, "retrieve", "unknown to hr and docs")] == ["hr", "docs"]
    assert [node.text for node in call(guard, "retrieve", "RAISE")] == list(NAMES)
    (note,) = call(guard, "retrieve", "a known one")
    assert note.node.metadata["rgate"]["corpora"] == ["web"]
    assert {name: len(shelf.queries) for name, shelf in shelves.items()} == {"docs": 2, "hr": 2, "web": 1}


@both_ways
def test_a_node_that_is_in_two_corpora_is_returned_once(call):
    shelves = {name: llama_index_parts.Shelf("shared", name) for name in NAMES}
    guard = GatedRetriever(shelves, Sure())
    nodes = call(guard, "retrieve", "unknown to hr and docs")
    assert [node.text for node in nodes] == ["shared", "hr", "docs"]


# --- servers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"look_first": True}], ids=["", "look first"])
def test_the_gateway_searches_the_indexes_that_the_gate_names(options):
    shelf = {name: Shelf(f"What is unknown to docs and hr is in {name}.") for name in NAMES}
    with gateway(Sure(), shelf=shelf, **options) as between:
        answer = gateway_headers(between.ask("unknown to hr and docs"))
        assert (answer["corpus"], answer["p-covered"], answer["passages"]) == ("hr", "0.900", "2")
        assert between.sent.index("is in hr") < between.sent.index("is in docs")
        assert [bool(each.queries) for each in shelf.values()] == [True, True, False]
        shelf["hr"].error = OSError("disk gone")
        assert gateway_headers(between.ask("unknown to hr and docs"))["passages"] == "1"
        assert gateway_headers(between.ask("RAISE unknown"))["passages"] == "2", (
            "all are asked, and one fails"
        )


def test_a_passage_that_is_in_two_corpora_reaches_the_llm_once():
    """Regression: the LLM read it twice."""
    shelf = {name: Shelf("What is unknown to docs and hr is here.") for name in NAMES}
    with gateway(Sure(), shelf=shelf) as between:
        answer = gateway_headers(between.ask("unknown to hr and docs"))
    assert answer["passages"] == "1"


def test_the_gateway_names_a_corpus_in_any_script():
    """Regression: the header was ``?? & B?ro``, the same for many names."""

    class Personnel(Sure):
        def decide_batch(self, requests):
            corpora = {"corpus": "人事 & Büro", "corpora": ("人事 & Büro",)}
            return [decision.model_copy(update=corpora) for decision in super().decide_batch(requests)]

    with gateway(Personnel(), shelf={name: Shelf() for name in NAMES}) as between:
        header = gateway_headers(between.ask("unknown to hr"))["corpus"]
    assert header == "%E4%BA%BA%E4%BA%8B & B%C3%BCro"


async def test_clients_are_told_where_to_search():
    mcp = pytest.importorskip("mcp")
    async with mcp.Client(make_mcp_server(Sure())) as client:
        advice = await client.call_tool("should_retrieve", {"question": "unknown to hr and docs"})
    assert (
        advice.structured_content.items()
        >= {"corpus": "hr", "corpora": ["hr", "docs"], "p_covered": 0.9}.items()
    )
    with serving_gate(Sure()) as url:
        decision = load_gate(url).decide("unknown to hr and docs")
        assert (
            routed(RetrievalGate(url), retrieve=CorpusChain(parts=chains()))
            .invoke("unknown to hr")
            .startswith("hr")
        )
        selector = RetrievalGateSelector(url, retrieve=["docs", "hr"])
        assert selector.select(["docs", "direct", "hr"], "unknown to hr").ind == 2
    assert (decision.corpus, decision.corpora, decision.p_covered) == ("hr", ("hr", "docs"), 0.9)
