"""LlamaIndex: `answer_first` and `look_first` together judge a begun answer beside what one search found."""

import pytest
from llama_index.core.llms import MockLLM
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.response_synthesizers import get_response_synthesizer
from llama_index.core.retrievers import BaseRetriever
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode

from rgate_integrations.answering.answer_first import AnswerFirst
from rgate_integrations.answering.look_first import LookFirst
from rgate_integrations.llama_index import GatedQueryEngine
from tests.llama_index_parts import ask, both_ways, every_style
from tests.test_llama_index_answer_first import KNOWN, UNSURE, Reader, Writer
from tests.test_llama_index_look_first import COVERED, LOOK

TEXT = "The unknown Zorba wrote the quartet."
HELD, NOT_HELD = "who wrote the Zorba quartet", "the weather"
HELD_UNKNOWN = "who wrote the unknown Zorba quartet"
LOOKS = {"the Zorba quartet": 0.05, "cold weather": 0.05, "poor weather": 0.12, "a broken one": 0.05}


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
        return [NodeWithScore(node=TextNode(text=TEXT))]


class Gated:
    """An engine over a shelf and a writer, with all that its parts note."""

    def __init__(self, style="query", look=LOOK, *, writer=None, judge=None, **options):
        self.shelf = Shelf()
        self.writer, self.judge = writer or Writer(), judge or Reader()
        self.first = Reader(LOOKS)
        streaming = style in ("stream", "astream")
        synthesizer = get_response_synthesizer(llm=MockLLM(), streaming=streaming)
        self.engine = GatedQueryEngine.from_defaults(
            RetrieverQueryEngine(self.shelf, synthesizer),
            self.judge,
            self.writer,
            streaming=streaming,
            answer_first=AnswerFirst(**{"tokens": 4, "question_gate": self.first} | options),
            look_first=look,
        )


@every_style
def test_a_known_answer_goes_on_though_passages_hold_it(style):
    gated = Gated(style)
    text, response = ask(gated.engine, HELD, style)
    assert text == KNOWN
    said = response.metadata["rgate"]
    assert (said["outcome"], said["retrieve"], said["p_known"]) == ("direct", False, 0.9)
    assert gated.writer.ended == ["whole"]
    assert gated.shelf.queries == [HELD]


@every_style
def test_an_unsure_answer_is_stopped_for_passages_that_help_and_they_are_not_searched_again(style):
    gated = Gated(style)
    text, response = ask(gated.engine, HELD_UNKNOWN, style)
    assert TEXT in text
    said = response.metadata["rgate"]
    assert (said["outcome"], said["retrieve"], said["p_known"]) == ("retrieve", True, 0.2)
    assert said["p_helps"] == pytest.approx(0.9, abs=0.001)
    assert said["partial_answer"]["tokens_dropped"] == 4
    assert gated.writer.ended == ["closed"]
    assert gated.shelf.queries == [HELD_UNKNOWN]


@every_style
def test_where_no_passage_helps_the_answer_goes_on_unjudged(style):
    gated = Gated(style)
    text, response = ask(gated.engine, "unknownish weather", style)
    assert text == UNSURE
    said = response.metadata["rgate"]
    assert (said["outcome"], said["p_known"], said["partial_answer"]["tokens_held"]) == ("direct", 0.5, 0)
    assert gated.writer.ended == ["whole"]
    assert gated.judge.calls == []


@both_ways
def test_what_is_clearly_unknown_is_settled_by_what_was_found(call):
    gated = Gated()
    assert TEXT in str(call(gated.engine, "query", "the Zorba quartet"))
    assert gated.writer.calls == []
    assert str(call(gated.engine, "query", "poor weather")) == KNOWN
    assert gated.judge.calls == []


@both_ways
@pytest.mark.parametrize("choice", ["retrieve", "direct"])
def test_where_neither_is_likely_the_option_chooses(call, choice):
    gated = Gated(look=LookFirst(model=COVERED, on_abstain=choice))
    response = call(gated.engine, "query", "cold weather")
    assert response.metadata["rgate"]["outcome"] == "abstain"
    assert (TEXT in str(response)) is (choice == "retrieve")


@both_ways
def test_without_a_first_look_every_answer_is_begun(call):
    gated = Gated(question_gate=None)
    response = call(gated.engine, "query", "unknownish weather")
    assert str(response) == UNSURE
    assert gated.judge.calls == ["unknownish weather"]
    assert response.metadata["rgate"]["p_known"] == 0.2


@both_ways
def test_a_search_that_fails_or_finds_nothing_leaves_it_to_the_begun_answer(call):
    for question, error in (
        ("broken, yet fine", "failed (TimeoutError)"),
        ("empty, yet fine", "found nothing"),
    ):
        response = call(Gated().engine, "query", question)
        assert str(response) == KNOWN
        said = response.metadata["rgate"]
        assert said["outcome"] is None
        assert error in said["warnings"][0]
    assert call(Gated().engine, "query", "empty unknown").metadata["rgate"]["retrieve"] is True
    for question in ("broken unknown", "a broken one"):
        with pytest.raises(TimeoutError, match="index gone"):
            call(Gated().engine, "query", question)


class Broken(Reader):
    """Fails for every draft."""

    def decide_batch(self, questions, **options):
        raise RuntimeError("gate down")


@both_ways
def test_a_gate_or_an_llm_that_fails_reads_what_was_found(call):
    for gated in (Gated(judge=Broken()), Gated(writer=Writer(fails_at=2))):
        response = call(gated.engine, "query", HELD)
        assert TEXT in str(response)
        assert response.metadata["rgate"]["error"] is not None
        assert gated.shelf.queries == [HELD]
    with pytest.raises(OSError, match="connection lost"):
        call(
            Gated(writer=Writer(fails_at=2)).engine, "query", NOT_HELD
        )  # nothing helps, so it is the caller's


@both_ways
def test_a_threshold_that_is_given_is_enough_whatever_was_found(call):
    assert str(call(Gated().engine.with_threshold(0.1), "query", HELD_UNKNOWN)) == UNSURE
    assert TEXT in str(call(Gated().engine, "query", HELD_UNKNOWN))


@both_ways
def test_a_question_that_refers_back_reads_what_was_found(call):
    gated = Gated()
    assert TEXT in str(call(gated.engine, "query", "Who is he?"))
    assert gated.writer.calls == []
    assert gated.shelf.queries == ["Who is he?"]


@both_ways
def test_in_two_steps_a_draft_of_the_llm_is_judged_and_the_nodes_are_handed_on(call):
    gated = Gated()
    unsure = "Perhaps Zorba wrote the quartet?"  # this LLM's drafts repeat their prompts
    for question, read in ((unsure, True), (NOT_HELD, False)):
        bundle = QueryBundle(question)
        nodes = call(gated.engine, "retrieve", bundle)
        assert (nodes[0].node.text == TEXT) is read
        assert (TEXT in str(call(gated.engine, "synthesize", bundle, nodes))) is read
    assert gated.shelf.queries == [unsure, NOT_HELD]
