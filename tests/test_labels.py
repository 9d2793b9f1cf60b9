"""Questions, and the labels of their answers: by gold answers, a judge, agreement, or several samples."""

import math
from unittest.mock import Mock

import numpy as np
import pytest

from rgate_integrations import Draft
from rgate_integrations.errors import ConfigurationError, DataFormatError
from rgate_integrations.gates.folder import read_gate
from rgate_integrations.models.base import TargetScores
from rgate_integrations.tuning import collect
from rgate_integrations.tuning.collection import Answered
from rgate_integrations.tuning.labelling import agrees, label, parse_verdict
from rgate_integrations.tuning.questions import Question, read_examples, read_paired, read_questions
from rgate_integrations.tuning.training import label_own_answers
from tests.commands import printed
from tests.fake_server import Fake, answer
from tests.saved_gates import change
from tests.scripted_proxy import ScriptedProxy
from tests.tuning_parts import Direct, Model, N, by_number, known, questions, retrieve, tuned, write

# --- questions ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([], "no questions"),
        ([{"question": " "}], "question 1: question is empty or not a string"),
        ([{"question": "x", "gold_answers": {}}], "gold_answers is neither a string nor a list"),
        ([7], "question 1: question is empty or not a string"),
        ("none.jsonl", "cannot be read"),
    ],
)
def test_a_log_that_cannot_be_used(given, said):
    with pytest.raises(DataFormatError, match=said):
        read_questions(given)


def test_questions_are_read_from_a_file_and_each_once(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text('{"question": "x", "answer": "y", "id": 0}\n')
    assert read_questions(str(path), gold=True) == [Question("x", ("y",), "0", "log")]
    (once,) = read_questions(["who is it?", {"question": " WHO is it? ", "gold_answers": "me"}])
    assert once.gold == ("me",), "the gold answers of the second are kept"


@pytest.mark.parametrize("from_file", [True, False])
def test_what_the_llm_answered_in_a_log_is_no_gold_answer(tmp_path, from_file):
    """Regression: it was, hardly any new answer contained it, and the tuned gate skipped nearly everything."""
    line = {"question": "Who wrote Emma?", "answer": "The novel Emma was written by Jane Austen in 1815."}
    log = str(write(tmp_path / "log.jsonl", line)) if from_file else [line]
    assert [question.gold for question in read_questions(log)] == [()]


# --- labels ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "gold", "right"),
    [
        ("I do not know the answer.", ["no"], False),  # "no" is in "not" and "know", but no word of it
        ("No, he did not.", ["no"], True),
        ("He was born in 1969.", ["9"], False),
        ("It was the Beatles!", ["The Rolling Stones", "beatles"], True),
        ("Anything.", ["the", "!"], False),  # gold answers that normalise to nothing
        # Regression: of numbers and names, only letters and digits were compared.
        ("15 minutes", ["1.5 minutes"], False),
        ("It is 0,012 of 1,5 g.", ["0.012 of 1.5 g"], True),
        ("It is 12.5%.", ["125"], False),
        ("About 12000 people.", ["12,000"], True),
        ("-5", ["5"], False),
        ("It was −5 °C.", ["-5"], True),
        ("C", ["C++"], False),
        ("It is A#.", ["A#"], True),
        # Regression: the LLM quotes a passage from a PDF file, whose letters are spelled in another way.
        ("Sie heißt Mu\u0308ller.", ["Müller"], True),
        ("Die Kranken\u00adkasse zahlt.", ["Krankenkasse"], True),
        ("In the o\ufb03ce of ＡＢＣ, room １２.", ["office of ABC, room 12"], True),
        ("It is 10².", ["102"], False),
    ],
)
def test_every_way_to_a_label_agrees(tmp_path, text, gold, right):
    question = {"question": "Did he do it?", "gold_answers": gold}
    collected = collect([question], ScriptedProxy(fixed=text), tmp_path / "collected.jsonl")
    recorded = write(tmp_path / "r.jsonl", {**question, "closed_book_answer": text, "rag_answer": text})
    (learned,) = read_examples([collected])[0].examples
    (measured,) = read_paired([recorded])[0].examples
    assert [learned.known, measured.known, measured.rag_correct] == [right] * 3


@pytest.mark.parametrize(
    ("direct", "n", "said"),
    [(lambda q: "nothing", N, "are wrong"), (retrieve, N, "are right"), (Direct(), 10, "Only 10 questions")],
)
def test_labels_that_nothing_can_be_learned_from(tmp_path, prior, direct, n, said):
    with pytest.raises(DataFormatError, match=said) as caught:
        tuned(tmp_path, prior, questions(n), direct=direct)
    # Regression: the hint was to use a gate that never retrieves, whatever is asked, if all answers were right.
    assert "constant:never" not in caught.value.hint
    assert not (tmp_path / "my-gate").exists()
    assert (tmp_path / "my-gate.answers.jsonl").exists()


def test_without_gold_answers_agreement_stands_in_and_says_so(tmp_path, prior):
    bare = [q["question"] for q in questions()]
    found = tuned(tmp_path, prior, bare)
    assert list(found.labels.known) == [known(e.question.text) for e in found.labels.answered]
    assert all(found.labels.rag)
    assert "is not correctness" in (found.folder / "README.md").read_text()
    with pytest.raises(DataFormatError, match="gold answer"):
        tuned(tmp_path, prior, bare, update=True, options={"labels": "gold"})


def test_one_question_without_gold_is_told_and_a_gate_that_is_updated_keeps_its_labels(
    tmp_path, prior, caplog
):
    """Regression: it turned the labels of all questions into agreement, and only the kind in the report said so."""
    bare = [*questions(), "what is number 99?"]
    assert tuned(tmp_path / "new", prior, bare).labels.kind == "agreement"
    assert "1 of 61 questions have no gold answers, so agreement labels all" in caplog.text
    tuned(tmp_path, prior)
    labels = tuned(tmp_path, prior, bare, update=True).labels
    assert (labels.kind, len(labels.known), labels.unlabelled) == ("gold", N, 1)
    change(tmp_path / "my-gate", provenance={"labels": "judge", "policy": {"name": "budget", "rate": 0.5}})
    with pytest.raises(ConfigurationError, match="needs a judge"):
        tuned(tmp_path, prior, bare, direct=pytest.fail, update=True)


@pytest.mark.parametrize(
    ("direct", "retrieve", "by_words", "by_meaning"),
    [
        ("Paris", "The answer is Paris.", True, True),
        ("no", "I do not see one", False, True),
        ("I do not know.", "I do not know.", False, False),
        ("", "Paris", False, False),
        ("", "", False, False),
        ("the French capital", "Paris", False, True),
    ],
)
def test_agreement_by_words_and_by_meaning(direct, retrieve, by_words, by_meaning):
    assert agrees(direct, retrieve, None) is by_words
    for second, expected in (
        ([0.97, 0.24], by_meaning),
        ([0.95, 0.31], by_words),
    ):  # cosines of about as much
        embedder = Mock(embed=Mock(return_value=np.array([[2.0, 0.0], second])))
        assert agrees(direct, retrieve, embedder) is expected


# --- a judge -----------------------------------------------------------------------------------------------


VERDICTS = {"Paris": (-0.1, -3.0), "Oslo": (-3.0, -0.1), "Bonn": (math.nan, math.nan)}
"""The log-probabilities of yes and no for an answer."""


def test_the_judge_leaves_refusals_and_nonsense_without_a_label(tmp_path):
    given = [{"question": f"{said}?", "gold_answers": ["Bonn"]} for said in (*VERDICTS, "I don't know that")]
    judge = ScriptedProxy()
    judge.score = Mock(
        side_effect=lambda prompt, values, targets: [TargetScores(VERDICTS[v["answer"]], 1) for v in values]
    )
    echo = Model(lambda question, seed: question.rstrip("?"))
    for _ in range(2):
        (file,) = read_examples([collect(given, echo, tmp_path / "out.jsonl", judge=judge)])
        # What the judge does not tell is judged by the gold answer; who refuses is not right.
        assert [example.known for example in file.examples] == [True, False, True, False]
    judge.score.assert_called_once()  # what was judged is not judged again


@pytest.mark.parametrize(
    ("reply", "said"),
    [
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
    assert parse_verdict(reply) is said


# --- samples while tuning ----------------------------------------------------------------------------------


PARIS = {"direct": Draft(text="Paris"), "retrieve": Draft(text="Paris")}


def drawn(body):
    """Answer as `by_number`; of the samples of an even number, the one with seed 1 is wrong."""
    return answer("who knows") if body.get("seed") == 1 else by_number(body)


@pytest.mark.parametrize(
    ("gold", "said", "share"),
    [
        (["Paris"], ["Paris", "Lyon", "In Paris."], 2 / 3),
        (["Paris"], ["Lyon"], 0.0),
        (["Paris"], [], 1.0),  # as the answer itself
        ([], ["Paris", "Lyon"], 0.5),  # by agreement
    ],
)
def test_a_label_is_the_share_of_samples_that_are_right(gold, said, share):
    drafts = PARIS | {f"sample {number}": Draft(text=text) for number, text in enumerate(said)}
    found = label(Mock(complete=lambda: [Answered(Question("?", tuple(gold)), drafts, {})]))
    assert (found.target.tolist(), found.known.tolist()) == ([pytest.approx(share)], [True])


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("judge", "need a judge"),
        # Regression: labelled by agreement, with a description that raised a bare KeyError.
        ("guess", "labels cannot be 'guess'.* Hint: Choose one of auto, gold, judge, agreement.$"),
    ],
)
def test_a_kind_of_label_that_cannot_be_made_is_refused(kind, said):
    with pytest.raises(ConfigurationError, match=said):
        label(Mock(complete=lambda: [Answered(Question("?", ("Paris",)), PARIS, {})]), kind)


def test_a_judge_that_judged_nothing_is_not_named():
    """Regression: with gold labels, an error said to check that the unused judge replies Yes or No."""
    complete = [Answered(Question("x?", ("Paris",)), PARIS, {}), Answered(Question("y?"), PARIS, {})]
    labels = label(Mock(complete=lambda: complete), "gold", judge=ScriptedProxy())
    assert (labels.unlabelled, labels.judge) == (1, "")


def test_a_server_is_asked_for_samples_and_the_gate_is_fitted_to_the_share_that_is_right(
    tmp_path, prior, fake
):
    def fails(body):
        return (500, "oh") if body.get("seed") == 2 and "number 8?" in str(body) else drawn(body)

    found = tuned(tmp_path, prior, direct=fake(fails, retries=0), options={"num_samples": 4})
    drawn_with = [(body["temperature"], body["seed"]) for _, body, _ in Fake.seen if body["temperature"] > 0]
    assert sorted(drawn_with) == sorted([(1.0, seed) for seed in range(4)] * N)
    # Of the even numbers one of four samples is wrong, and of number 8 one that is right is missing.
    shares = {each.question.text: 0.75 * known(each.question.text) for each in found.labels.answered}
    shares["what is number 8?"] = 2 / 3
    assert found.labels.target.tolist() == pytest.approx(list(shares.values()))
    assert found.failed == 1
    sentence = "up to 4 samples per question, which is neither 0 nor 1 for 50.0%"
    assert sentence in (found.folder / "report.html").read_text()


@pytest.mark.parametrize(
    ("options", "direct", "said"),
    [
        ({"labels": "judge"}, pytest.fail, "needs a judge"),
        # An object of the application cannot be made to sample.
        ({"num_samples": 2}, pytest.fail, "direct= .* whose temperature cannot be set"),
        # Regression: found only after every call of the LLM.
        ({"policy": "max-loss"}, pytest.fail, r"policy= must be MaxLoss\(…\) or Budget\(…\), not 'max-loss'"),
    ],
)
def test_labels_that_cannot_be_made_are_refused(tmp_path, prior, options, direct, said):
    with pytest.raises(ConfigurationError, match=said):
        tuned(tmp_path, prior, direct=direct, options=options)


# --- labels of a model's own samples (KBM, section 2.2) ----------------------------------------------------


@pytest.fixture
def forty(tmp_path, own_cache):
    lines = [{"question": f"q{i}? ", "gold_answers": ["Paris"], "dataset": "d"} for i in range(40)]
    return write(tmp_path / "q.jsonl", *lines)


@pytest.mark.parametrize(
    ("label", "said", "target"),
    [
        ("accuracy", ("Paris", "It is Paris.", "Rome"), 2 / 3),
        ("certainty", ("Paris",), 1.0),
        ("certainty", ("the Paris", "Paris.", "PARIS"), 1.0),
        ("certainty", ("a1", "b1"), 0.0),
        ("certainty", ("",), 0.0),
    ],
)
def test_labels_of_a_models_own_samples(forty, label, said, target):
    (file,) = label_own_answers([forty], Model(lambda question, seed: said[seed % len(said)]), label)
    assert [example.target for example in file.examples] == [target] * 40


def test_accuracy_needs_gold_answers(forty):
    forty.write_text('{"question": "q?"}\n')
    with pytest.raises(DataFormatError, match="line 1: gold_answers is missing"):
        label_own_answers([forty], Model(), "accuracy")


def test_training_on_sampled_labels_from_the_command_line(forty, tmp_path, monkeypatch):
    half = Model(lambda question, seed: "Paris" if int(question[1:-1]) % 2 else "Rome")
    monkeypatch.setattr("rgate_integrations.models.local.shared_proxy", lambda *a, **k: half)
    options = f"--label accuracy --draft none --proxy tiny --data {forty} --out {tmp_path / 'g'}"
    assert "40 questions, 50% known" in printed("train", *options.split())
    assert read_gate(tmp_path / "g").provenance["label"] == "accuracy of 30 answers of tiny"


@pytest.mark.parametrize("label", ["own_answer_correct", "accuracy"])
def test_labels_that_are_in_the_data_are_read_and_not_made_again(label, tmp_path, monkeypatch):
    """Regression: --proxy answered the questions again, and its answers replaced the labels."""
    monkeypatch.setattr("rgate_integrations.models.local.shared_proxy", lambda *a, **k: Model())
    data = write(tmp_path / "own.jsonl", *({"question": f"q{i}?", label: int(i % 4 == 0)} for i in range(40)))
    options = f"--label {label} --draft none --proxy tiny --data {data} --out {tmp_path / 'g'}"
    assert "40 questions, 25% known" in printed("train", *options.split())
