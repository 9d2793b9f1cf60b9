"""``rgate tune``: what it asks for, and what it says."""

import re
from unittest.mock import Mock

import pytest

from rgate_integrations.index import BM25Index
from tests.commands import printed, rgate
from tests.fake_server import Fake, answer
from tests.tuning_parts import N, Reader, by_number, questions, shipped, write


@pytest.fixture
def command(tmp_path, fake, monkeypatch):
    """Run ``rgate tune`` against a server: ``command(reply, *options)``."""
    monkeypatch.setattr("rgate_integrations.cli.tune.open_index", lambda folder: BM25Index([]))
    monkeypatch.setattr("rgate_integrations.models.local.shared_proxy", lambda name: Reader())
    log = write(tmp_path / "log.jsonl", *questions())
    fixed = ["tune", "--questions", log, "--init-from", shipped(tmp_path), "--out", tmp_path / "my gate"]
    return lambda reply, *options, index=("--index", "passages"): rgate(
        *fixed, *index, "--llm", fake(reply).url, *options
    )


def test_the_command_says_what_it_will_ask_and_what_came_out(command, tmp_path, monkeypatch):
    monkeypatch.setenv("RGATE_API_KEY", "sk-from-outside")
    options = ["--budget", "0.9", "--yes", "--num-samples", "2", "--max-questions", "50"]
    done = command(by_number, "--model", "m", *options)
    assert done.exit_code == 0, done.output
    assert "50 questions, with LLM calls to http" in done.output
    assert ": 50 direct, 50 retrieve, 100 sample." in done.output
    assert "share of right answers among up to 2 samples per question" in done.output
    assert re.search(r"Right without retrieval: \d+\.0%; with retrieval: \d+\.0%\.", done.output)
    assert "question alone: Retrieves for at most 90%" in done.output
    # Regression: the command that is shown did not work for this folder.
    assert f"or --gate '{tmp_path}/my gate'." in done.output.replace("\n", " ")
    assert [key for _, _, key in Fake.seen] == ["Bearer sk-from-outside"] * 200
    assert "sk-from-outside" not in done.output
    for file in tmp_path.rglob("*"):
        assert file.is_dir() or b"sk-from-outside" not in file.read_bytes()


def judging(body):
    """Answer as an LLM that is its own judge: one that says nothing clear of number 4, and breaks at number 6."""
    text = body["messages"][-1]["content"]
    if "Answer to judge" not in text:
        return by_number(body)
    if "number 4?" in text:
        return answer("Well, perhaps.")
    if "number 6?" in text:
        return (400, "I break")
    return answer("**Yes**, it does." if "Answer to judge: n" in text else "no")


def test_a_served_judge_labels_and_what_it_does_not_say_is_counted(command, fake, tmp_path, monkeypatch):
    monkeypatch.setenv("RGATE_JUDGE_API_KEY", "sk-of-the-judge")
    url = fake(judging).url
    done = command(judging, "--model", "m", "--judge", f"org/big@{url}", "--budget", "0.9", "--yes")
    assert done.exit_code == 0, done.output
    assert f"{N - 2} questions with a label (judge), 2 without." in done.output
    judged = [(body["model"], key) for _, body, key in Fake.seen if "Answer to judge" in str(body)]
    assert set(judged) == {("org/big", "Bearer sk-of-the-judge")}


@pytest.mark.parametrize(
    ("verdict", "said", "hint", "calls"),
    [
        ((401, "who are you?"), "refused the key", "The answers so far are kept", 1),
        # Regression: the error was that there are too few questions.
        (
            answer("Well, perhaps."),
            "at least 20 are needed. 60 more",
            "Check that big replies Yes or No.",
            2 * N,
        ),
    ],
)
def test_a_judge_that_does_not_judge_ends_the_run_and_the_answers_are_kept(
    command, fake, tmp_path, verdict, said, hint, calls
):
    def reply(body):
        return verdict if "Answer to judge" in str(body) else by_number(body)

    done = command(reply, "--model", "m", "--judge", f"big@{fake(reply).url}", "--yes")
    assert said in str(done.exception)
    assert hint in done.exception.hint
    assert sum("Answer to judge" in str(body) for _, body, _ in Fake.seen) == calls
    kept = (tmp_path / "my gate.answers.jsonl").read_text().splitlines()
    assert sum('"draft"' in line and "judge" not in line for line in kept) == 2 * N


PASSAGES = ["--index", "passages"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([*PASSAGES, "--yes"], "without the name of a model"),
        ([*PASSAGES, "--model", "m", "--yes", "--max-loss", "0.1", "--budget", "0.4"], "cannot be combined"),
        # It compared answers without retrieval with answers read from the demo's encyclopedia.
        (["--model", "m", "--yes"], "--index"),
        ([*PASSAGES, "--model", "m"], "Continue (--yes skips this question)?"),
    ],
)
def test_a_command_that_cannot_be_meant_or_has_no_yes_asks_nothing(command, options, said):
    done = command(by_number, *options, index=())
    assert said in f"{done.output} {done.exception}"
    assert (done.exit_code != 0, Fake.seen) == (True, [])


def test_collecting_says_how_many_questions_are_answered_and_how_to_get_the_others(fake, tmp_path):
    """Regression: "Asked 60 questions", whether or not they were answered."""

    def breaks(body):
        return (400, "I break") if "number 6?" in body["messages"][-1]["content"] else by_number(body)

    asked = [each | {"gold_answers": ["1"]} for each in questions(20)]
    fixed = ["collect", "--closed-book", "--questions", write(tmp_path / "q.jsonl", *asked)]
    said = []
    for reply in (breaks, by_number):
        server = ["--llm", fake(reply).url, "--model", "m"]
        said.append(printed(*fixed, *server, "--out", tmp_path / "o 1.jsonl").replace("\n", " "))
    first, second = said
    assert "19 of 20 questions are answered" in first
    assert "Run the command again to repeat the failed calls." in first
    assert "20 of 20 questions are answered" in second
    assert f"--data '{tmp_path}/o 1.jsonl'" in second
    assert "Run" not in second


STARTS_AGAIN, RESUMES = "Run the same command to start again.", "Run the same command to resume."


@pytest.mark.parametrize(
    ("work", "line", "says"),
    [
        ("tuning.tune", "tune --questions {q} --llm {url} --model m --index i --out o --yes", RESUMES),
        ("tuning.ability.measure_ability", "ability --llm {url} --model m --out o", RESUMES),
        ("tuning.collect", "collect --questions {q} --closed-book --out o", RESUMES),
        ("tuning.evaluation.evaluate", "evaluate --data {q}", STARTS_AGAIN),
        ("tuning.calibrate", "calibrate --data {q} --out o", STARTS_AGAIN),
        (
            "tuning.training.train_probe",
            "train --data {q} --draft none --out o",
            "the same command reuses them.",
        ),
        ("tuning.fine_tuning.train_adapter", "train --data {q} --gate ik --out o", "starts again."),
        ("index.PassageIndex.build", "index build --corpus {q} --out o", STARTS_AGAIN),
        ("models.download.download", "download all-minilm-l6-v2", RESUMES),
    ],
    ids=lambda value: value.partition(" ")[0],
)
def test_ctrl_c_says_what_is_kept_and_how_to_go_on(work, line, says, command, fake, tmp_path, monkeypatch):
    """Regression: `rgate ability` said nothing."""
    monkeypatch.chdir(tmp_path)
    paired = {"closed_book_correct": True, "rag_correct": True, "text": "t"}
    q = write(tmp_path / "q.jsonl", *(each | paired for each in questions()))
    stopped = Mock(side_effect=KeyboardInterrupt)
    monkeypatch.setattr(f"rgate_integrations.{work}", stopped)
    done = rgate(*line.format(q=q, url=fake(answer()).url).split())
    assert stopped.called, (done.output, done.exception)
    assert re.search(f"Stopped. .*(kept|written).* {re.escape(says)}", done.output.replace("\n", " "))
    assert done.exit_code != 0


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("collect --questions {q} --closed-book --llm {url} --model m --judge nosuch --out o", "'nosuch'"),
        ("tune --questions {q} --llm {url} --model m --index nowhere --judge nosuch --out o", "'nowhere'"),
        ("ask --index nowhere --llm nosuch q", "'nowhere'"),
    ],
)
def test_inputs_are_checked_before_anything_is_asked_or_downloaded(line, said, fake, tmp_path, monkeypatch):
    """Regressions: a judge was looked for after all LLM calls; an LLM was downloaded, and the index did not exist."""
    monkeypatch.chdir(tmp_path)
    asked = []
    url = fake(lambda body: asked.append(body) or answer()).url
    done = rgate(*line.format(q=write(tmp_path / "q.jsonl", *questions()), url=url).split())
    assert said in str(done.exception)
    assert asked == []
