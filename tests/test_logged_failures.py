"""What fails is logged on one line, without the question, the turns before it, drafts and passages."""

import json
import logging

import pytest
from langchain_core.language_models.fake_chat_models import FakeListChatModel
from langchain_core.runnables import RunnableLambda

from rgate_integrations import Draft, load_gate
from rgate_integrations.answering.look_first import LookFirst, decide_with_passages
from rgate_integrations.decision import Decision
from rgate_integrations.gates.passage_utility import FoundPassage
from rgate_integrations.langchain import RetrievalGate
from rgate_integrations.llama_index import ClaimFusionRetriever
from rgate_integrations.runtime.flow import Call, Start, run
from rgate_integrations.runtime.text import redact
from tests.llama_index_parts import ScriptedGate, Shelf, Writer
from tests.scripted_proxy import ScriptedProxy

PRIVATE = "What is the salary of\nAnn Example?"
TURN = "user: I owe Bob Specimen 700 francs."
PASSAGE = "The ransom is hidden below the oak."
SECRETS = ("salary", "Ann", "Example", "owe", "Specimen", "700", "ransom", "oak")


class QuotingError(Exception):
    """Quotes what it was given, as the errors of many libraries do."""


def quote(*texts):
    return QuotingError(f"status 400: {json.dumps(texts)} {texts!r}\nERROR forged {texts[0][:30]}")


@pytest.fixture
def lines(caplog):
    """Return the lines that were logged, none of which may have a secret or a forged line after it."""
    caplog.set_level(logging.DEBUG, logger="rgate_integrations")

    def logged():
        found = [record.getMessage() for record in caplog.records if record.name == "rgate_integrations"]
        assert found
        for line in found:
            assert line.isprintable()
            assert [secret for secret in SECRETS if secret in line] == []
        return " / ".join(found)

    return logged


def test_a_gate_whose_model_quotes_question_turns_and_draft(lines):
    class Quoting(ScriptedProxy):
        def _called(self, name, values):
            raise quote(PRIVATE, TURN, PASSAGE)

    gate = load_gate("ik", proxy=Quoting())
    decision = gate.decide(PRIVATE, draft=Draft(text=PASSAGE), history=[TURN])
    assert "Ann Example" in decision.error.message  # who asked may read it
    assert "QuotingError: status 400" in lines()


def test_an_object_that_is_a_gate_and_quotes(lines):
    class Quoting:
        reads_history = True

        def decide_batch(self, requests):
            raise quote(requests[0].question, *requests[0].history)

        async def adecide_batch(self, requests):
            raise quote(requests[0].question)

    RetrievalGate(Quoting()).invoke({"question": PRIVATE, "chat_history": [("human", TURN)]})
    assert "QuotingError: status 400" in lines()


def test_a_background_job_that_is_not_awaited_logs_its_failure(lines):
    def fail():
        raise quote(PRIVATE)

    def begin():
        task = yield Start(Call(fail, None))
        task.drop()
        return task

    task = run(begin())
    with pytest.raises(QuotingError):
        task.run()
    while "QuotingError" not in lines():
        pass


class Failing(FakeListChatModel):
    """Quotes the messages that it gets."""

    responses: list[str] = []  # noqa: RUF012

    def _call(self, messages, *args, **kwargs):
        raise quote(messages[-1].content)

    _stream = _call


def test_llms_that_write_drafts_and_quote(lines):
    RetrievalGate(load_gate("ik", source="llm"), llm=Failing()).invoke(PRIVATE)
    assert "QuotingError: status 400" in lines()


def test_an_llm_that_writes_nothing_is_logged_like_one_that_fails(lines):
    llm = FakeListChatModel(responses=[""])
    RetrievalGate(load_gate("ik", source="llm"), llm=llm).invoke(PRIVATE)
    assert "The LLM wrote no draft: NoAnswerError: " in lines()


def test_a_llama_index_llm_that_writes_drafts_and_quotes(lines):
    def fail(options):
        raise quote(PRIVATE)

    ClaimFusionRetriever([Shelf()], ScriptedGate(), draft_llm=Writer(fails=fail)).retrieve(PRIVATE)
    assert "The LLM wrote no draft: QuotingError: status 400" in lines()


def test_a_direct_arm_that_answers_first_and_quotes(lines):
    arms = {"retrieve": RunnableLambda(str), "direct": Failing()}
    gate = RetrievalGate(load_gate("ik", proxy=ScriptedProxy()))
    gate.route(**arms, answer_first=True).invoke(PRIVATE)
    assert "The direct arm wrote no answer: QuotingError" in lines()


def test_a_follow_up_whose_condensing_fails_and_quotes(lines):
    def condense(messages):
        raise quote(PRIVATE, TURN)

    gate = RetrievalGate(load_gate("ik", proxy=ScriptedProxy()), condense=RunnableLambda(condense))
    decision = gate.invoke({"question": PRIVATE, "chat_history": [("human", TURN)]})
    assert decision.retrieve
    assert "A follow-up could not be condensed: QuotingError" in lines()


def test_what_is_found_and_cannot_be_judged(lines, monkeypatch):
    def fail(question, found, *_):
        raise quote(question, *(passage.text for passage in found))

    monkeypatch.setattr("rgate_integrations.answering.look_first.estimate_p_helps", fail)
    decision = Decision(question=PRIVATE, retrieve=False, p_known=0.9)
    assert decide_with_passages(decision, [FoundPassage(PASSAGE)], LookFirst()).retrieve
    assert "Judging the passages failed: QuotingError: status 400" in lines()


@pytest.mark.parametrize(
    ("message", "private", "logged"),
    [
        ("no disk", "Who wrote Hamlet?", "no disk"),
        ("\x1b[31mred\x07\u2028line\r\n", "", "[31mred line"),
        ("nothing to hide", "", "nothing to hide"),
        ("Ham", "Hamlet", "…"),  # cut
        ("one decision for the question", "Who is the one?", "one decision for the question"),
        ("caf\\u00e9 f\\xfcr", "café für", "… f r"),
        ("哈姆雷特是谁写的", "请问哈姆雷特是谁写的呢", "…"),
        ("key 0123456789abcdef0123456789abcdef0", "", "key …"),
        ("x " * 1_000, "", ("x " * 150)),
        ("y" * 10_000_000, "y", "…"),
        (
            "404 for http://s/?q=wer%20schrieb%20M%C3%BCnchen%0A",
            "Wer schrieb München",
            "404 for http://s/?q=… … …",
        ),
        ("file who_wrote_hamlet2.json", "Who wrote Hamlet", "file who_…_…2.json"),
        ("out of 12 GB, 1 is free", "what costs about 1 or 120 GBP?", "out of 12 GB, … is free"),
        (r"no file C:\Users\anna\gate", "", r"no file C:\Users\anna\gate"),  # three letters were lost
        (r"\U0001f600\nHamlet\n", "Hamlet", "…"),
    ],
)
def test_a_message_is_one_line_without_the_words_of_private_texts(message, private, logged):
    assert redact(message, private) == logged


def test_masking_does_not_take_long():
    assert len(redact("word " * 1_000_000, "other " * 200_000)) == 300
