"""The questions of a log, and the labels of their answers."""

import numpy as np
import pytest

from rgate_integrations.decision import Draft
from rgate_integrations.errors import (
    ConfigurationError,
    DataFormatError,
)
from rgate_integrations.training.labels import verdict
from rgate_integrations.tuning.asking import Answered
from rgate_integrations.tuning.labelling import agreeing, label
from rgate_integrations.tuning.questions import Question, read_log, sampled
from tests.scripted_proxy import ScriptedProxy
from tests.tuning_parts import Direct, N, Spread, known, questions, retrieve, shipped, tuned


@pytest.fixture
def prior(tmp_path):
    return shipped(tmp_path)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([], "no questions"),
        ([{"question": " "}], "question 1: no question"),
        ([{"q": "x"}], "question 1: no question"),
        ([{"question": "x", "gold_answers": {}}], "gold_answers is neither"),
        ([7], "question 1: no question"),
    ],
)
def test_a_log_that_cannot_be_used(tmp_path, prior, given, said):
    with pytest.raises(DataFormatError, match=said):
        tuned(tmp_path, prior, given)


def test_a_log_that_is_not_there_or_is_no_log(tmp_path, prior):
    with pytest.raises(DataFormatError, match="no file"):
        tuned(tmp_path, prior, tmp_path / "none.jsonl")
    (tmp_path / "log.jsonl").write_text('{"question": "x"}\nnonsense\n')
    with pytest.raises(DataFormatError, match=r"line 2: not JSON"):
        tuned(tmp_path, prior, tmp_path / "log.jsonl")


def test_duplicates_are_asked_once(tmp_path, prior):
    direct = Direct()
    twice = [*questions(), *[{"question": f" WHAT is number {i}? "} for i in range(N)]]
    assert len(tuned(tmp_path, prior, twice, direct=direct).question.p) == N
    assert len(direct.asked) == N


def test_the_gold_answers_of_a_duplicate_are_kept():
    (question,) = read_log(["who?", {"question": "who?", "answer": "me"}])
    assert question.gold == ("me",)


def test_a_sample_has_every_kind_in_its_share():
    log = read_log(questions(1_000))
    shares = []
    for seed in range(5):
        some = sampled(log, 50, Spread(), seed)
        assert len({q.key for q in some}) == 50
        shares.append(sum(int(q.text.split()[-1].rstrip("?")) >= 900 for q in some))
    assert set(shares) <= {4, 5, 6}
    assert sampled(log, 50, Spread(), 1) == sampled(log, 50, Spread(), 1)
    assert len(sampled(log, 5_000, None, 0)) == 1_000


@pytest.mark.parametrize(("fixed", "said"), [("nothing", "are wrong"), (None, "are right")])
def test_one_class_has_nothing_to_tell_apart(tmp_path, prior, fixed, said):
    with pytest.raises(DataFormatError, match=said):
        tuned(tmp_path, prior, direct=lambda q: fixed or retrieve(q))
    assert not (tmp_path / "my-gate").exists()
    assert (tmp_path / "my-gate.answers.jsonl").exists()


def test_too_few_questions(tmp_path, prior):
    with pytest.raises(DataFormatError, match="Only 10 questions"):
        tuned(tmp_path, prior, questions(10))


def test_without_gold_answers_agreement_stands_in_and_says_so(tmp_path, prior):
    found = tuned(tmp_path, prior, [q["question"] for q in questions()])
    assert found.labels.kind == "agreement"
    assert list(found.labels.known) == [known(e.question.text) for e in found.labels.answered]
    assert all(found.labels.rag)
    assert "is not correctness" in (found.folder / "README.md").read_text()


def test_gold_labels_need_gold_answers_and_a_judge_a_judge(tmp_path, prior):
    bare = [q["question"] for q in questions()]
    with pytest.raises(DataFormatError, match="gold answer"):
        tuned(tmp_path, prior, bare, options={"labels": "gold"})
    with pytest.raises(ConfigurationError, match="judge"):
        tuned(tmp_path, prior, options={"labels": "judge"}, answers=tmp_path / "other.jsonl")


def test_a_judge_labels(tmp_path, prior):
    judge = ScriptedProxy()
    found = tuned(tmp_path, prior, options={"labels": "judge"}, judge=judge)
    assert found.labels.kind == "judge"
    assert judge.calls == ["score", "score"]
    assert found.question.artifact.provenance["judge"]["name"] == "scripted"


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        ("Yes", True),
        ("**Yes**, it agrees.", True),
        (" no.", False),
        ("No, Paris", False),
        ("Not really", None),
        ("yesterday", None),
        ("<think> Yes", None),
        ("", None),
    ],
)
def test_what_a_reply_of_a_judge_says(reply, said):
    assert verdict(reply) is said


def test_who_refuses_to_answer_is_not_right_whatever_the_judge_says():
    answered = [
        Answered(Question("where?", ("Paris",)), Draft(text="I do not know."), Draft(text="Paris"), {})
    ]
    found = label(answered, "judge", judge=ScriptedProxy())
    assert found.known == (False,)


@pytest.mark.parametrize(
    ("direct", "retrieve", "same"),
    [
        ("Paris", "The answer is Paris.", True),
        ("no", "I do not know", False),
        ("", "Paris", False),
        ("", "", False),
        ("Lyon", "Paris", False),
    ],
)
def test_agreement_by_words(direct, retrieve, same):
    assert agreeing([direct], [retrieve], None) == [same]


def test_agreement_by_meaning():
    class Alike(Spread):
        def embed(self, texts):
            return np.array([[1.0, 0.0] if "capital" in t or "Paris" in t else [0.0, 1.0] for t in texts])

    pairs = [("the French capital", "Paris"), ("Lyon", "Paris"), ("", "Paris")]
    first, second = zip(*pairs, strict=True)
    assert agreeing(first, second, Alike()) == [True, False, False]
