"""LangChain: the package's runnables are configured, written, shown and described as LangChain's own are."""

import copy
import json
import pickle
import warnings
from operator import itemgetter

import pytest
from langchain_core.chat_history import InMemoryChatMessageHistory
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.load import dumpd, load
from langchain_core.prompts import ChatPromptTemplate, HumanMessagePromptTemplate, PromptTemplate
from langchain_core.runnables import (
    ConfigurableField,
    RunnableLambda,
    RunnablePassthrough,
)
from langchain_core.runnables.history import RunnableWithMessageHistory
from langchain_core.tracers.run_collector import RunCollectorCallbackHandler
from langchain_core.vectorstores import InMemoryVectorStore
from pydantic import ValidationError

from rgate_integrations import load_gate
from rgate_integrations.answering.answer_first import AnswerFirst
from rgate_integrations.errors import ConfigurationError, UnknownNameError
from rgate_integrations.index import BM25Index
from rgate_integrations.langchain import (
    ClaimQueryRewriter,
    CorpusChain,
    CorpusRetriever,
    GatedRetriever,
    IndexRetriever,
    LocalChat,
    RetrievalGate,
    gated_rag,
)
from rgate_integrations.langchain.router import RetrievalRouter
from tests.langchain_fakes import BATCHES, INVOKES, Chat, Judge, Search, each, runs_named

READABLE = [
    RetrievalGate,
    RetrievalRouter,
    GatedRetriever,
    ClaimQueryRewriter,
    ChatPromptTemplate,
    HumanMessagePromptTemplate,
    PromptTemplate,
]


def loaded(dumped, readable=READABLE):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # `load` is in beta
        return load(dumped, allowed_objects=readable, valid_namespaces=["rgate_integrations"])


# --- thresholds and other fields ---------------------------------------------------------------------------


@pytest.mark.parametrize("threshold", [-0.1, "high", float("nan"), float("inf"), [], True])
def test_a_threshold_that_is_none(threshold):
    config = {"configurable": {"retrieval_threshold": threshold}}
    makers = (lambda: RetrievalGate(Judge()).invoke("a", config), lambda: RetrievalGate(threshold=threshold))
    for make in makers:
        with pytest.raises(ConfigurationError, match="threshold must be a finite number of at least 0"):
            make()


@pytest.mark.parametrize("look_first", [False, True])
@each(BATCHES)
def test_a_threshold_that_is_none_stays_with_its_input(call, look_first):
    """Regression: the whole batch failed."""
    gate = RetrievalGate(Judge())
    router = gate.route(retrieve=Search() | str, direct=lambda asked: f"D:{asked}", look_first=look_first)
    configs = [{}, {"configurable": {"retrieval_threshold": "high"}}, {}]
    for runnable in (gate, gate.guard(Search()), router):
        found = call(runnable, ["a", "b", "c"], configs, return_exceptions=True)
        assert [isinstance(each, ConfigurationError) for each in found] == [False, True, False]
    assert [found[0], found[2]] == ["D:a", "D:c"]


def test_configurable_fields():
    gate = RetrievalGate("constant:never").configurable_fields(
        gate=ConfigurableField(id="gate"), threshold=ConfigurableField(id="threshold")
    )
    for given, retrieve in (({}, False), ({"gate": "constant:always"}, True), ({"threshold": 1.5}, True)):
        assert gate.invoke("a", {"configurable": given}).retrieve is retrieve
    with pytest.raises(UnknownNameError):
        gate.invoke("a", {"configurable": {"gate": "constnt"}})


CONFIG = {"configurable": {"retrieval_threshold": 0.9}, "tags": ["mine"], "metadata": {"tenant": "a"}}
MADE = {
    "route": lambda gate, search: gate.route(retrieve=search, direct=lambda _: []),
    "route over a guard": lambda gate, search: gate.route(retrieve=gate.guard(search), direct=lambda _: []),
    "answer first": lambda gate, search: gate.route(
        retrieve=search, direct=lambda _: "known", answer_first=AnswerFirst(question_gate=None)
    ),
    "look first": lambda gate, search: gate.route(retrieve=search, direct=lambda _: [], look_first=True),
    "guard": lambda gate, search: gate.guard(search),
    "constructor": lambda gate, search: GatedRetriever(gate=gate, retriever=search),
}


@pytest.mark.parametrize("make", MADE.values(), ids=list(MADE))
@each(INVOKES)
def test_what_is_made_from_a_gate_with_a_config_has_that_config(call, make):
    """Regression: route and guard lost it."""
    search, judge, collector = Search(), Judge(), RunCollectorCallbackHandler()
    made = make(RetrievalGate(judge).with_config(CONFIG), search)
    call(made, "b", {"callbacks": [collector]})
    gate_run, *_ = runs_named("RetrievalGate", collector.traced_runs)
    assert (search.queries, len(judge.calls)) == (["b"], 1), "its threshold is 0.9"
    assert ("mine" in gate_run.tags, gate_run.metadata["tenant"]) == (True, "a")
    call(made, "c", {"configurable": {"retrieval_threshold": 0.1}})
    assert search.queries[1:] == [] or make is MADE["look first"], "a call's own threshold counts more"


GATE = RetrievalGate("constant:never")
ARMS = {"retrieve": str, "direct": str}
PREFETCH = AnswerFirst(prefetch=True)
STORE = InMemoryVectorStore(DeterministicFakeEmbedding(size=2))
WRONG = [
    # Regression: the error was that of a class that the user does not know.
    (
        TypeError,
        r"^RetrievalGate\(\) got an unexpected keyword argument 'treshold'\. Did you mean 'threshold'\?$",
        lambda: RetrievalGate("constant:never", treshold=0.5),
    ),
    (TypeError, "retreive", lambda: GATE.route(retreive=str, direct=str)),
    (ConfigurationError, "needs condense=", lambda: GATE.route(**ARMS, condensed_key="alone")),
    (ValidationError, "tokens", lambda: RetrievalGate("constant:never", tokens=0)),
    (ConfigurationError, "int does not have both", lambda: RetrievalGate(3)),
    (TypeError, r"^RetrievalGate\(\) .* 'alway'\. .* 'always'\?$", lambda: RetrievalGate(Judge(), alway="a")),
    (TypeError, r"argument 'zzz'\.$", lambda: RetrievalGate(zzz=None)),
    (ConfigurationError, "'constant' .* treshold", lambda: load_gate("constant:never", treshold=0.9)),
    (
        ConfigurationError,
        "history",
        lambda: RetrievalGate(llm=RunnableWithMessageHistory(Chat(), InMemoryChatMessageHistory)),
    ),
    (ConfigurationError, "^condense must .* not an object of type str", lambda: RetrievalGate(condense="a")),
    (ConfigurationError, "^direct must be a runnable", lambda: GATE.route(retrieve=str, direct="gpt-4o")),
    (ConfigurationError, "^llm must be a runnable.*ChatOpenAI", lambda: gated_rag(Search(), "gpt-4o")),
    (ConfigurationError, "'gpt-4o' is a string.*llm_name=", lambda: RetrievalGate(llm="gpt-4o")),
    (ConfigurationError, "several steps", lambda: GATE.route(**ARMS, look_first=True)),
    (ConfigurationError, "several steps", lambda: RetrievalGate().route(**ARMS, answer_first=PREFETCH)),
    (ConfigurationError, r"^retriever must .* str.*as_retriever\(\)", lambda: GATE.guard("a retriever")),
    (ConfigurationError, r"InMemory.*as_retriever\(\)", lambda: GATE.guard({"docs": STORE})),
    (ConfigurationError, r"InMemory.*as_retriever\(\)", lambda: GATE.route(retrieve=STORE, direct=str)),
    (ConfigurationError, r"InMemory.*as_retriever\(\)", lambda: gated_rag(STORE, Chat())),
    (ValidationError, "max_querys", lambda: GatedRetriever(retriever=Search(), max_querys=3)),
    (ValidationError, "kk", lambda: CorpusRetriever(parts={"docs": Search()}, kk=3)),
    (ValidationError, "known_message", lambda: GatedRetriever(retriever=Search(), known_message=3)),
    (ValidationError, "max_queries", lambda: GatedRetriever(retriever=Search(), max_queries=0)),
    (ValidationError, "k\n", lambda: GatedRetriever(retriever=Search(), k=0)),
    (ValidationError, "k\n", lambda: IndexRetriever(index=BM25Index([]), k=0)),
    (ValidationError, "instance of Retriever", lambda: IndexRetriever(index="a folder")),
    (ValidationError, "instance of Retriever", lambda: IndexRetriever(index=None)),
    # Regression: True was read as 1.
    (ValidationError, "tokens must be a number", lambda: RetrievalGate("constant:never", tokens=True)),
    (ValidationError, "top must be a number", lambda: RetrievalGate(corpus=True, top=True)),
    (ValidationError, "k must be a number", lambda: GatedRetriever(retriever=Search(), k=True)),
    (ValidationError, "max_queries must be a number", lambda: ClaimQueryRewriter(max_queries=True)),
    (ValidationError, "k must be a number", lambda: IndexRetriever(index=BM25Index([]), k=True)),
    (ValidationError, "max_tokens must be a number", lambda: LocalChat(max_tokens=True)),
    (ConfigurationError, "return_sources must be", lambda: gated_rag(Search(), Chat(), return_sources="no")),
]


@pytest.mark.parametrize(("error", "why", "make"), WRONG)
def test_options_that_are_misspelt_or_out_of_range(error, why, make):
    with pytest.raises(error, match=why):
        make()


# --- written and read --------------------------------------------------------------------------------------


def test_a_gate_that_was_named_can_be_written_and_read():
    dumped = json.loads(json.dumps(dumpd(RetrievalGate("constant:never", threshold=0.3, input_key="q"))))
    assert dumped["id"] == ["rgate_integrations", "langchain", "gate", "RetrievalGate"]
    assert dumped["kwargs"] == {"gate": "constant:never", "threshold": 0.3, "input_key": "q", "tokens": 32}
    again = loaded(dumped)
    assert (again.threshold, again.input_key, again.invoke({"q": "a"}).retrieve) == (0.3, "q", False)
    assert loaded(dumpd(RetrievalGate())).gate.gate == load_gate().gate


def test_a_guard_is_written_with_its_gate_but_a_gate_object_is_not():
    dumped = dumpd(GatedRetriever(retriever=Search(), gate="constant:never", k=3))["kwargs"]
    assert (dumped["k"], dumped["gate"]["kwargs"]["gate"]) == (3, "constant:never")
    assert loaded(dumpd(ClaimQueryRewriter("constant:always", max_queries=2))).max_queries == 2
    assert dumpd(RetrievalGate(Judge()))["kwargs"]["gate"]["type"] == "not_implemented"


def test_a_router_that_answers_first_cannot_be_read_and_hides_the_login_of_its_gate():
    prompt = ChatPromptTemplate.from_template("{question}")
    options = AnswerFirst(question_gate="http://me:secret@localhost:1")
    dumped = dumpd(GATE.route(retrieve=prompt, direct=prompt, answer_first=options))
    assert "secret" not in json.dumps(dumped)
    with pytest.raises(NotImplementedError, match="Strategy"):
        loaded(dumped)


def pickled(runnable):
    return pickle.loads(pickle.dumps(runnable))  # noqa: S301


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, pickled])
def test_copies_and_pickles(again):
    gate = RetrievalGate("constant:never", threshold=0.2)
    assert dumpd(again(gate)) == dumpd(gate)
    assert again(gate.route(retrieve=str.upper, direct=str.lower)).invoke("Ada") == "ada"


@pytest.mark.parametrize("answer_first", [False, AnswerFirst(prefetch=True, question_gate=None)])
def test_a_copy_with_other_arms_runs_these(answer_first):
    """Regression: with answer first, and with a search ahead, it ran those of the original."""
    old = {
        "retrieve": Search() | (lambda found: "old"),
        "direct": RunnableLambda(lambda asked: f"old {asked}"),
    }
    new = {
        "retrieve": Search() | (lambda found: "new"),
        "direct": RunnableLambda(lambda asked: f"new {asked}"),
    }
    router = RetrievalGate(Judge()).route(**old, answer_first=answer_first)
    copied = router.model_copy(update=new)
    for chain, age in ((copied, "new"), (router, "old")):
        assert [chain.invoke("unknown?"), chain.invoke("b")] == [age, f"{age} b"]


# --- shown and described -----------------------------------------------------------------------------------


@pytest.mark.parametrize("several", [False, True])
def test_a_router_has_the_schemas_of_its_retrieve_arm(several):
    """Regression: it had only the type of the input, such as a dict, and its tool had no arguments."""
    arm = RunnablePassthrough.assign(found=itemgetter("question") | Search())
    gate = RetrievalGate("constant:never")
    router = gate.route(retrieve=CorpusChain(parts={"docs": arm, "hr": arm}) if several else arm, direct=arm)
    assert router.get_input_jsonschema() == arm.get_input_jsonschema()
    assert router.get_output_jsonschema() == arm.get_output_jsonschema()
    assert router.as_tool(name="rag", description="d").args.keys() == {"question"}


def test_schemas():
    gate = RetrievalGate("constant:never")
    kinds = [kind.get("type") for kind in gate.get_input_jsonschema()["anyOf"]]
    assert kinds == ["string", "object", "array"]
    assert gated_rag(Search(), Chat(), gate=gate).get_input_jsonschema()["anyOf"][0] == {"type": "string"}
