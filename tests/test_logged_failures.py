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


def test_a_background_job_that_is_not_awaited_logs_its_failure(lines):
    def begin():
        task = yield Start(Call(fail, None))
        task.drop()
        return task

    with pytest.raises(QuotingError):
        run(begin()).run()
    while "QuotingError" not in lines():
        pass


class Failing(FakeListChatModel):
    """Quotes the messages that it gets."""

    responses: list[str] = []  # noqa: RUF012

    def _call(self, messages, *args, **kwargs):
        raise quote(messages[-1].content)

    _stream = _call


class Client:
    """An application's object that has no ``repr``."""

    def __str__(self):
        return "client"

    def __repr__(self):
        raise RuntimeError


class Person:
    """An application's object that only ``str`` gives a name."""

    def __str__(self):
        return TURN


METADATA = {"note": TURN, "client": Client(), "more": [PASSAGE]}
LOOP = [TURN]
LOOP.append(LOOP)


class QuotingGate:
    reads_history = True

    def decide_batch(self, requests):
        raise quote(requests[0].question, *requests[0].history, *map(str, requests[0].metadata.values()))

    async def adecide_batch(self, requests):
        self.decide_batch(requests)


def fail(*arguments):
    raise quote(PRIVATE, TURN, PASSAGE)


class QuotingProxy(ScriptedProxy):
    _called = fail


def fail_on_turn():
    raise quote(TURN)


def fail_on_question(options):
    raise quote(PRIVATE)


FOLLOW_UP = {"question": PRIVATE, "chat_history": [("human", TURN)]}
ARMS = {"retrieve": RunnableLambda(str), "direct": Failing()}
IK = load_gate("ik", proxy=ScriptedProxy())
SILENT = FakeListChatModel(responses=[""])
FAILURES = {
    "a model": (
        lambda: load_gate("ik", proxy=QuotingProxy()).decide(
            PRIVATE, draft=Draft(text=PASSAGE), history=[TURN]
        ),
        "QuotingError: status 400",
    ),
    "an object that is a gate": (
        lambda: RetrievalGate(QuotingGate()).invoke(FOLLOW_UP),
        "QuotingError: status 400",
    ),
    "a gate that quotes metadata": (
        lambda: RetrievalGate(QuotingGate()).invoke("who?", {"metadata": METADATA}),
        "QuotingError: status 400",
    ),
    "an LLM that writes drafts": (
        lambda: RetrievalGate(load_gate("ik", source="llm"), llm=Failing()).invoke(PRIVATE),
        "The LLM wrote no draft: QuotingError: status 400",
    ),
    "an LLM that writes nothing": (
        lambda: RetrievalGate(load_gate("ik", source="llm"), llm=SILENT).invoke(PRIVATE),
        "The LLM wrote no draft: NoAnswerError: ",
    ),
    "an LLM of LlamaIndex": (
        lambda: ClaimFusionRetriever(
            [Shelf()], ScriptedGate(), draft_llm=Writer(fails=fail_on_question)
        ).retrieve(PRIVATE),
        "The LLM wrote no draft: QuotingError: status 400",
    ),
    "a direct arm that answers first": (
        lambda: RetrievalGate(IK).route(**ARMS, answer_first=True).invoke(PRIVATE),
        "The direct arm wrote no answer: QuotingError",
    ),
    "condensing": (
        lambda: RetrievalGate(IK, condense=RunnableLambda(fail)).invoke(FOLLOW_UP),
        "A follow-up could not be condensed: QuotingError",
    ),
}


@pytest.mark.parametrize(("ask", "logged"), FAILURES.values(), ids=FAILURES)
def test_what_fails_is_logged_without_what_it_quotes(ask, logged, lines):
    ask()
    assert logged in lines()


@pytest.mark.parametrize(
    "metadata",
    [
        {"notes": [TURN, Client()]},
        {"user": {"note": TURN, "client": Client()}},
        {"user": {"a": ({"note": TURN},), "b": {"client": Client()}}},
        {"person": Person()},
        {"people": {"first": [Person()]}},
        {TURN: Client()},
        {"loop": LOOP},
    ],
    ids=range(7),
)
def test_metadata_beside_what_cannot_be_printed_is_not_logged(metadata, lines):
    """Regression: one object without ``repr`` hid all the texts beside it in the same value."""
    gate = QuotingGate()
    gate.decide_batch = lambda requests: fail_on_turn()
    RetrievalGate(gate).invoke("who?", {"metadata": metadata})
    assert "QuotingError: status 400" in lines()


def test_who_asked_may_read_what_was_quoted():
    decision = load_gate("ik", proxy=QuotingProxy()).decide(PRIVATE)
    assert (decision.retrieve, "Ann Example" in decision.error.message) == (True, True)


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
        # Gates read plain letters, and a server may quote the JSON of another one.
        ("no answer: Hamlet für カード", "Ｈａｍ\u00adｌｅｔ fu\u0308r ｶｰﾄﾞ", "no answer: … … …"),
        ("no answer: fu\u0308r カ\u30fcト\u3099", "für カード", "no answer: … …"),
        (r'"{\\"q\\": \\"\\u30ab\\u30fc\\u30c9 f\\\\u00fcr\\"}"', "カード für", '"{ q : f r }"'),
    ],
)
def test_a_message_is_one_line_without_the_words_of_private_texts(message, private, logged):
    assert redact(message, private) == logged


def test_masking_does_not_take_long():
    assert len(redact("word " * 1_000_000, "other " * 200_000)) == 300
