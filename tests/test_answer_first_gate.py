"""Answer first in the pipeline: what is begun, judged, dropped or gone on with, and how `rgate ask` shows it."""

import asyncio
from dataclasses import replace

import pytest

from rgate_integrations import Decision, Draft, load_gate
from rgate_integrations.answering.answer_first import AnswerFirst
from rgate_integrations.answering.answer_first_gate import AnswerFirstGate
from rgate_integrations.answering.pipeline import Pipeline
from rgate_integrations.cli.ask import answered_as_json, likelihood, panel
from rgate_integrations.cli.output import Terminal
from rgate_integrations.index import Passage
from rgate_integrations.index.retriever import Hit
from tests.scripted_proxy import ScriptedProxy


class Look:
    """Says of each question what its last word is."""

    def __init__(self):
        self.asked = []

    def decide_batch(self, questions, *, threshold=None):
        self.asked.append(list(questions))
        found = []
        for question in questions:
            p = float(question.split()[-1])
            found.append(Decision(question=question, retrieve=p < 0.5, p_known=p, gate="look"))
        return found

    async def adecide_batch(self, questions, **options):
        return self.decide_batch(questions, **options)


class Judge(Look):
    """Knows what was begun with "sure"."""

    threshold = 0.5

    def __init__(self):
        super().__init__()
        self.drafts = []

    def decide_batch(self, questions, *, threshold=None, drafts=None):
        self.asked.append(list(questions))
        self.drafts += drafts
        found = []
        for question, draft in zip(questions, drafts, strict=True):
            p = 0.9 if "sure" in draft.text else 0.1
            found.append(
                Decision(question=question, retrieve=p < (threshold or 0.5), p_known=p, gate="judge")
            )
        return found


class Writer(ScriptedProxy):
    """Begins with "sure" where the question says so, and goes on with what it had begun."""

    name = "writer"

    def __init__(self):
        super().__init__()
        self.read = []

    def generate(self, prompt, values, *, tokens, adapter=None):
        self.read.append((prompt.name, tokens))
        written = []
        for each in values:
            if "EMPTY" in each["question"]:
                written.append(Draft(text="", model=self.name))
                continue
            first = "sure" if "easy" in each["question"] else "perhaps"
            words = (first, " it", " is")[:tokens]
            text = "".join(words)
            logprobs = (-0.1, -0.6, -3.0)[:tokens]
            written.append(
                Draft(
                    text=text,
                    tokens=words,
                    logprobs=logprobs,
                    finished=False,
                    model=self.name,
                    prompt_tokens=7,
                )
            )
        return written


class Index:
    def search(self, queries, k):
        return [[Hit(Passage("1", "found", title="T"), 0.5, query)] for query in queries]


@pytest.fixture
def gate():
    return AnswerFirstGate(
        Writer(), Judge(), AnswerFirst(tokens=2, retrieve_below=0.2, answer_above=0.9, question_gate=Look())
    )


@pytest.fixture(params=["blocking", "awaited"])
def decide(request, gate):
    if request.param == "blocking":
        return gate.decide_batch
    return lambda questions, **options: asyncio.run(gate.adecide_batch(questions, **options))


def test_only_what_is_not_clearly_unknown_is_begun_and_judged(gate, decide):
    unknown, easy, hard = decide(["clear 0.1", "easy 0.6", "hard 0.6"])
    assert gate.judge.asked == [["easy 0.6", "hard 0.6"]]
    assert [draft.text for draft in gate.judge.drafts] == ["sure it", "perhaps it"]
    assert (unknown.retrieve, unknown.draft, unknown.partial_answer.tokens_held) == (True, None, 0)
    assert unknown.signals == {"first_look": 0.1}
    assert (easy.retrieve, easy.partial_answer.tokens_held, easy.partial_answer.tokens_dropped) == (
        False,
        2,
        0,
    )
    assert (hard.retrieve, hard.partial_answer.tokens_dropped, hard.cost.tokens_out) == (True, 2, 2)
    assert hard.cost.tokens_in == 7
    assert easy.signals["first_look"] == hard.signals["first_look"] == 0.6
    assert easy.draft.source == "llm"


def test_what_is_clearly_known_is_not_judged(gate, decide):
    (sure,) = decide(["hard 0.9"])
    assert (sure.retrieve, sure.draft, sure.partial_answer.tokens_held) == (False, None, 0)
    assert sure.signals == {"first_look": 0.9}
    assert gate.judge.asked in ([], [[]])
    (strict,) = decide(["hard 0.9"], threshold=0.95)
    assert strict.retrieve
    assert strict.draft.text == "perhaps it"


@pytest.mark.parametrize("first_look", [None, "own"])
def test_without_a_first_look_every_answer_is_begun(first_look):
    gate = AnswerFirstGate(Writer(), Judge(), AnswerFirst(tokens=2, question_gate=first_look))
    (clear,) = gate.decide_batch(["clear 0.1"])
    assert clear.draft.text == "perhaps it"
    assert clear.signals == {}


def test_a_threshold_and_drafts_reach_the_judge(gate, decide):
    (easy,) = decide(["easy 0.6"], threshold=0.95)
    assert easy.retrieve
    before = len(gate.llm.read)
    (claim,) = decide(["a claim"], drafts=[Draft(text="sure")])
    assert (claim.p_known, len(gate.llm.read)) == (0.9, before)


def test_an_answer_of_nothing_retrieves(decide):
    (empty,) = decide(["EMPTY 0.8"])
    assert empty.retrieve
    assert "wrote nothing" in empty.error.message


def test_what_cannot_be_read_is_an_error_and_nothing_is_begun():
    llm = Writer()
    options = AnswerFirst(tokens=2, question_gate="constant:random:0.5")
    gate = AnswerFirstGate(llm, load_gate("constant:never"), options)
    first, second = gate.decide_batch(["", "easy?"])
    assert first.error.type == "InvalidQuestionError"
    assert not second.retrieve
    assert len(llm.read) == 1


def test_a_failing_llm_retrieves():
    class Broken(Writer):
        def generate(self, *arguments, **options):
            raise RuntimeError("down")

    gate = AnswerFirstGate(Broken(), Judge(), AnswerFirst(question_gate=Look()))
    (decision,) = Pipeline(gate, None, Writer()).decide(["easy 0.6"])
    assert decision.retrieve
    assert decision.error.message == "down"


def test_the_pipeline_goes_on_with_what_was_begun(gate):
    pipeline = Pipeline(gate, Index(), gate.llm, tokens=8, claims=False)
    known, unknown = pipeline.ask_batch(["easy 0.6", "hard 0.6"])
    assert known.answer == "sure it" + "sure it is"
    assert [name for name, _ in gate.llm.read] == ["answer", "answer-with-passages", "answer-continued"] or [
        name for name, _ in gate.llm.read
    ] == ["answer", "answer-continued", "answer-with-passages"]
    assert [tokens for name, tokens in gate.llm.read if name == "answer-continued"] == [6]
    assert len(unknown.hits) == 1


def shown(answered, *, coloured=False):
    console = Terminal(width=110)
    with console.capture() as caught:
        console.print(panel(answered, coloured=coloured))
    return caught.get()


def test_ask_shows_the_first_look_the_begun_answer_the_moment_and_what_was_saved(gate):
    pipeline = Pipeline(gate, Index(), gate.llm, claims=False)
    known, unknown, clear, sure = pipeline.ask_batch(["easy 0.6", "hard 0.6", "clear 0.1", "hard 0.9"])
    text = shown(known)
    assert "P(known) 0.60 by the question alone" in text
    assert "sure it ▌ judged after 2 tokens: it goes on" in text
    assert "the search, and reading what it finds" in text
    assert "tokens by their probability" not in text
    assert "\x1b" not in text, "no colours where nobody sees them"
    text = shown(unknown)
    assert "perhaps it ▌ stopped here: 2 tokens dropped" in text
    assert "it cost 2 tokens that were dropped" in text
    assert "the question alone is clearly unknown" in shown(clear)
    assert "not judged: the question alone is clearly known" in shown(sure)
    assert sure.answer
    assert answered_as_json(known)["partial_answer"]["tokens_held"] == 2
    assert answered_as_json(known)["signals"] == {"first_look": 0.6}


def test_in_a_terminal_tokens_have_colours_and_a_legend(gate, monkeypatch):
    (known,) = Pipeline(gate, Index(), gate.llm, claims=False).ask_batch(["easy 0.6"])
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    console = Terminal(width=110)
    assert console.is_terminal
    with console.capture() as caught:
        console.print(panel(known, coloured=True))
    text = caught.get()
    assert "\x1b[32msure" in text
    assert "\x1b[33m it" in text
    assert "tokens by their probability" in text


@pytest.mark.parametrize(("logprob", "word"), [(0.0, "likely"), (-0.5, "unsure"), (-2.0, "unlikely")])
def test_how_likely_a_token_was(logprob, word):
    assert likelihood(logprob) == word


def test_a_gate_for_the_question_alone_has_no_beginning(gate):
    pipeline = replace(Pipeline(load_gate("constant:never"), Index(), gate.llm), claims=False)
    text = shown(pipeline.ask("easy 0.6"))
    assert "begun" not in text
    assert "the search, and reading what it finds" in text
