"""Soft labels: the share of several sampled answers that is right."""

import json

import numpy as np
import pytest

from rgate_integrations.decision import Draft
from rgate_integrations.errors import ConfigurationError, ServerError
from rgate_integrations.tuning.asking import STOP_AFTER, Answered
from rgate_integrations.tuning.fit import Table, fit_correction
from rgate_integrations.tuning.labelling import label
from rgate_integrations.tuning.questions import Question
from tests.fake_server import Fake, answer, serving
from tests.scripted_proxy import ScriptedProxy
from tests.tuning_parts import Direct, N, by_number, known, questions, retrieve, shipped, tuned


@pytest.fixture
def prior(tmp_path):
    return shipped(tmp_path)


@pytest.fixture
def served():
    with serving() as make:
        yield make


def drawn(body):
    """Answer as `by_number`; of the samples of an even number, the one with seed 1 is wrong."""
    return answer("who knows") if body.get("seed") == 1 else by_number(body)


def sampled_bodies():
    return [body for _, body, _ in Fake.seen if body["temperature"] > 0]


def three_answers(*texts, gold=("Paris",)):
    samples = tuple(Draft(text=text) for text in texts)
    return Answered(Question("where?", gold), Draft(text="Paris"), Draft(text="Paris"), {}, samples)


def test_a_label_is_the_share_of_samples_that_are_right():
    found = label([three_answers("Paris", "Lyon", "In Paris."), three_answers(), three_answers("Lyon")])
    assert found.shares == pytest.approx((2 / 3, 1.0, 0.0))
    assert found.known == (True, True, True)


def test_samples_are_labelled_by_agreement_and_by_a_judge_too():
    bare = [three_answers("Paris", "Lyon", gold=())]
    assert label(bare, "agreement").shares == (0.5,)
    judged = label([three_answers("Paris", "I do not know")], "judge", judge=ScriptedProxy())
    assert judged.shares[0] in (0.0, 0.5)  # who refuses is not right, whatever the judge says


def test_without_samples_nothing_is_said_of_them():
    found = label([three_answers()])
    assert found.shares == ()
    assert "samples" not in found.description


def test_a_server_is_asked_for_samples_and_the_report_says_so(tmp_path, prior, served):
    found = tuned(tmp_path, prior, direct=served(drawn), options={"samples": 4})
    assert len(sampled_bodies()) == 4 * N
    assert {body["temperature"] for body in sampled_bodies()} == {1.0}
    assert {body["seed"] for body in sampled_bodies()} == {0, 1, 2, 3}
    assert found.labels.shares == tuple(0.75 * known(each.question.text) for each in found.labels.answered)
    assert found.question.artifact.provenance["samples"] == 4
    assert found.question.auc > 0.95
    for report in ("README.md", "report.html"):
        text = (found.folder / report).read_text()
        assert "up to 4 samples a question, which is neither 0 nor 1 for 50.0%" in text


def test_more_samples_are_asked_for_and_fewer_are_read(tmp_path, prior, served):
    tuned(tmp_path, prior, direct=served(drawn))
    tuned(tmp_path, prior, direct=served(drawn), options={"samples": 1}, update=True)
    before = len(Fake.seen)
    found = tuned(tmp_path, prior, direct=served(drawn), options={"samples": 3}, update=True)
    assert len(Fake.seen) - before == 2 * N
    assert max(found.labels.shares) == pytest.approx(2 / 3)
    before = len(Fake.seen)
    found = tuned(tmp_path, prior, direct=served(drawn), options={"samples": 1}, update=True)
    assert len(Fake.seen) == before
    assert set(found.labels.shares) == {0.0, 1.0}


def test_sampling_goes_on_where_it_stopped(tmp_path, prior, served):
    turns = iter(range(10_000))

    def stops(body):
        return drawn(body) if next(turns) < 2 * N else (503, "gone")

    server = {"retries": 0}
    with pytest.raises(ServerError, match="given up"):
        tuned(tmp_path, prior, direct=served(stops, **server), options={"samples": 4, "concurrency": 1})
    assert len(Fake.seen) <= 2 * N + 2 * STOP_AFTER
    before = len(Fake.seen)
    found = tuned(tmp_path, prior, direct=served(drawn), options={"samples": 4})
    assert len(Fake.seen) - before == 5 * N - 2 * N
    assert max(found.labels.shares) == 0.75


def test_a_sample_that_fails_is_counted_and_the_others_are_read(tmp_path, prior, served):
    def fails(body):
        return (500, "oh") if body.get("seed") == 2 and "number 8?" in str(body) else drawn(body)

    found = tuned(tmp_path, prior, direct=served(fails, retries=0), options={"samples": 4})
    assert found.failed == 1
    assert len(found.labels.shares) == N
    shares = {
        each.question.text: s for each, s in zip(found.labels.answered, found.labels.shares, strict=True)
    }
    assert shares["what is number 8?"] == pytest.approx(2 / 3)


def test_the_plan_tells_the_samples(tmp_path, prior, served):
    told = []
    tuned(tmp_path, prior, direct=served(drawn), options={"samples": 3}, before=told.append)
    assert told[0].calls == {"direct": N, "retrieve": N, "sample": 3 * N}


def test_an_object_of_the_application_samples_only_by_another(tmp_path, prior):
    direct = Direct()
    with pytest.raises(ConfigurationError, match="at random") as error:
        tuned(tmp_path, prior, direct=direct, options={"samples": 2})
    assert "sampling=" in error.value.hint
    assert direct.asked == []
    sampling = Direct()
    tuned(tmp_path, prior, direct=direct, sampling=sampling, options={"samples": 2})
    assert (len(direct.asked), len(sampling.asked)) == (N, 2 * N)


def test_samples_of_a_local_model(tmp_path, prior):
    class Local(ScriptedProxy):
        def sample(self, prompt, values, *, n, tokens, temperature, seed):
            return [(Draft(text=retrieve(each["question"]) if seed else "who knows"),) for each in values]

    found = tuned(tmp_path, prior, questions(), direct=Direct(), sampling=Local(), options={"samples": 2})
    assert set(found.labels.shares) == {0.5}


def test_soft_labels_tell_the_fit_more_than_hard_ones_and_its_level_is_that_of_the_answers():
    rng = np.random.default_rng(0)
    states = rng.normal(size=(2_000, 6)) / np.sqrt(6)
    p = 1 / (1 + np.exp(-6 * states[:, 0]))
    right = rng.random(2_000) < p
    few = np.arange(60)
    hard = Table(np.zeros(2_000), states, np.zeros((2_000, 0)), right)
    soft = Table(hard.prior, states, hard.features, right, shares=0.5 * p)  # samples are right half as often
    from_hard, from_soft = (fit_correction(each.part(few)) for each in (hard, soft))
    likeness = [np.corrcoef(fitted(hard), states[:, 0])[0, 1] for fitted in (from_hard, from_soft)]
    assert likeness[1] > likeness[0]
    mean = (1 / (1 + np.exp(-from_soft(soft.part(few))))).mean()
    assert mean == pytest.approx(right[few].mean(), abs=0.02)


def test_the_answers_file_keeps_samples_apart(tmp_path, prior, served):
    tuned(tmp_path, prior, direct=served(drawn), options={"samples": 2})
    lines = [json.loads(line) for line in (tmp_path / "my-gate.answers.jsonl").read_text().splitlines()]
    assert set(lines[0]["made_with"]) == {"direct", "retrieve", "sample 1", "sample 2"}
    assert sum(line.get("arm") == "sample 2" for line in lines) == N
