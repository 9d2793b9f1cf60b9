"""LlamaIndex: `GatedQueryEngine(look_first=True)` searches once, and reads what it found only where that helps."""

import pytest
from llama_index.core.base.response.schema import Response
from llama_index.core.llms import MockLLM
from llama_index.core.query_engine import CustomQueryEngine, RetrieverQueryEngine
from llama_index.core.response_synthesizers import get_response_synthesizer
from llama_index.core.retrievers import BaseRetriever
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode

from rgate_integrations.answering.look_first import LookFirst
from rgate_integrations.artifacts.passage_utility import PassageUtilityModel
from rgate_integrations.errors import ConfigurationError
from rgate_integrations.evidence.search import FEATURES
from rgate_integrations.llama_index import GatedQueryEngine
from tests.llama_index_parts import ScriptedGate, ask, awaiting, blocking, both_ways, every_style

COVERED = PassageUtilityModel(
    features=FEATURES,
    weights=tuple(20.0 if name == "cover_best" else 0.0 for name in FEATURES),
    bias=-10.0,
    reading=0.9,
    distraction=0.25,
)
LOOK = LookFirst(model=COVERED)


class Shelf(BaseRetriever):
    """Finds one text for every query; fails for "broken", and finds nothing for "empty"."""

    def __init__(self):
        self.queries = []
        super().__init__()

    def _retrieve(self, query_bundle):
        self.queries.append(query_bundle.query_str)
        if "broken" in query_bundle.query_str:
            raise TimeoutError("index gone")
        if "empty" in query_bundle.query_str:
            return []
        return [NodeWithScore(node=TextNode(text="Zorba wrote the quartet."))]


def engine_over(shelf, look=LOOK, gate=None, *, streaming=False):
    llm = MockLLM()
    inner = RetrieverQueryEngine(shelf, get_response_synthesizer(llm=llm, streaming=streaming))
    return GatedQueryEngine.from_defaults(
        inner, gate or ScriptedGate(), llm=llm, streaming=streaming, look_first=look
    )


@every_style
def test_passages_that_hold_the_answer_are_read(style):
    shelf = Shelf()
    streaming = style in ("stream", "astream")
    question = "who wrote the Zorba quartet"  # P(known) is 0.5, and the gate alone would skip
    text, response = ask(engine_over(shelf, streaming=streaming), question, style)
    assert "Zorba wrote the quartet." in text
    said = response.metadata["rgate"]
    assert (said["retrieve"], said["outcome"]) == (True, "retrieve")
    assert said["p_helps"] == said["threshold"] == pytest.approx(0.9, abs=0.001)
    assert shelf.queries == [question]


@both_ways
@pytest.mark.parametrize(
    "found", ["Zorba wrote the quartet.", TextNode(text="Zorba wrote the quartet.")], ids=type
)
def test_what_is_not_quite_a_node_is_judged_by_its_text(call, found):
    class Odd(CustomQueryEngine):
        retriever: object = "there is one"

        def custom_query(self, query_str):
            return "read"

        def retrieve(self, query_bundle):
            return [found, None, 3]

        def synthesize(self, query_bundle, nodes, additional_source_nodes=None):
            return Response(f"read {len(nodes)}")

        async def asynthesize(self, query_bundle, nodes, additional_source_nodes=None):
            return self.synthesize(query_bundle, nodes)

    engine = GatedQueryEngine.from_defaults(Odd(), ScriptedGate(), llm=MockLLM(), look_first=LOOK)
    assert str(call(engine, "query", "who wrote the Zorba quartet")) == "read 3"
    assert "what is the weather" in str(call(engine, "query", "what is the weather"))


@every_style
def test_passages_that_do_not_help_are_not_read(style):
    shelf = Shelf()
    streaming = style in ("stream", "astream")
    text, response = ask(engine_over(shelf, streaming=streaming), "unknown weather", style)
    assert "Zorba" not in text
    said = response.metadata["rgate"]
    assert (said["retrieve"], said["outcome"]) == (False, "direct")
    assert shelf.queries == ["unknown weather"]


@both_ways
def test_in_two_steps(call):
    shelf = Shelf()
    engine = engine_over(shelf)
    for question, read in (("who wrote Zorba", True), ("unknown weather", False)):
        bundle = QueryBundle(question)
        nodes = call(engine, "retrieve", bundle)
        assert ("Zorba wrote" in nodes[0].node.text) is read
        assert ("Zorba wrote" in str(call(engine, "synthesize", bundle, nodes))) is read
    assert shelf.queries == ["who wrote Zorba", "unknown weather"]


@both_ways
@pytest.mark.parametrize("choice", ["retrieve", "direct"])
def test_where_neither_is_likely_the_option_chooses(call, choice):
    look = LookFirst(model=COVERED, abstain_below=0.6, on_abstain=choice)
    response = call(engine_over(Shelf(), look), "query", "unknown weather")
    said = response.metadata["rgate"]
    assert (said["outcome"], said["retrieve"]) == ("abstain", choice == "retrieve")
    assert ("Zorba" in str(response)) is (choice == "retrieve")


@both_ways
def test_a_search_that_fails_or_finds_nothing_leaves_it_to_the_question_alone(call):
    engine = engine_over(Shelf())
    response = call(engine, "query", "broken, yet fine")
    said = response.metadata["rgate"]
    assert (said["retrieve"], said["outcome"]) == (False, None)
    assert said["warnings"] == ["The search failed (TimeoutError): the gate alone decided."]
    with pytest.raises(TimeoutError, match="index gone"):
        call(engine, "query", "broken unknown")
    assert call(engine, "query", "empty, yet fine").metadata["rgate"]["retrieve"] is False
    assert call(engine, "query", "empty unknown").metadata["rgate"]["retrieve"] is True


@both_ways
def test_a_gate_that_fails_retrieves_and_does_not_search_again(call):
    shelf = Shelf()
    response = call(engine_over(shelf), "query", "RAISE")
    assert "Zorba wrote the quartet." in str(response)
    assert response.metadata["rgate"]["error"]["type"] == "RuntimeError"
    assert shelf.queries == ["RAISE"]


@both_ways
def test_a_question_that_refers_back_reads_what_was_found(call):
    response = call(engine_over(Shelf()), "query", "How tall was he?")
    assert "Zorba wrote the quartet." in str(response)
    assert response.metadata["rgate"]["outcome"] is None


@both_ways
def test_a_threshold_that_is_given_is_enough_whatever_was_found(call):
    engine = engine_over(Shelf())
    assert call(engine, "query", "who wrote Zorba").metadata["rgate"]["retrieve"] is True
    said = call(engine.with_threshold(0.4), "query", "who wrote Zorba").metadata["rgate"]
    assert (said["retrieve"], said["outcome"], said["threshold"]) == (False, "direct", 0.4)


class OneStep(CustomQueryEngine):
    """An engine that cannot search by itself."""

    def custom_query(self, query_str):
        return "one"


def test_an_engine_of_one_step_is_refused():
    with pytest.raises(ConfigurationError, match="two steps"):
        GatedQueryEngine.from_defaults(OneStep(), ScriptedGate(), llm=MockLLM(), look_first=True)


def test_the_default_model_is_shipped():
    assert 0 <= blocking(engine_over(Shelf(), True), "query", "fine").metadata["rgate"]["p_helps"] <= 1
    assert 0 <= awaiting(engine_over(Shelf(), True), "query", "fine").metadata["rgate"]["p_helps"] <= 1
