"""``rgate tune``: what it asks for, what it says, and its report."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from rgate_integrations.cli.main import app
from rgate_integrations.decision import Draft
from rgate_integrations.errors import ConfigurationError
from rgate_integrations.tuning import Budget
from rgate_integrations.tuning.asking import Answered
from rgate_integrations.tuning.break_even import StageTimes
from rgate_integrations.tuning.costs import Costs, Prices, Tokens, tokens_spent
from rgate_integrations.tuning.page import topics_of
from rgate_integrations.tuning.questions import Question
from rgate_integrations.tuning.report import report_page
from tests.fake_server import Fake, answer, serving
from tests.tuning_parts import (
    N,
    Reader,
    Spread,
    by_number,
    questions,
    shipped,
    tuned,
)


@pytest.fixture
def prior(tmp_path):
    return shipped(tmp_path)


@pytest.fixture
def served():
    with serving() as make:
        yield make


class NothingFound:
    def search(self, queries, k):
        return [[] for _ in queries]


@pytest.fixture
def command(tmp_path, prior, served, monkeypatch):
    """Run ``rgate tune`` against a server: ``command(reply, *options)``."""
    monkeypatch.setattr("rgate_integrations.cli.tune.open_index", lambda folder, notices: NothingFound())
    monkeypatch.setattr("rgate_integrations.cli.tune._embedder", lambda notices: None)
    monkeypatch.setattr("rgate_integrations.models.local.shared_proxy", lambda name: Reader())
    log = tmp_path / "log.jsonl"
    log.write_text("".join(json.dumps(each) + "\n" for each in questions()))

    def run(reply, *options):
        url = served(reply).url
        fixed = ["--questions", str(log), "--llm", url, "--gate", prior, "--out", str(tmp_path / "my-gate")]
        return CliRunner().invoke(app, ["tune", *fixed, *options])

    return run


def test_the_command_says_what_it_will_ask_and_what_came_out(command, tmp_path, monkeypatch):
    monkeypatch.setenv("RGATE_API_KEY", "sk-from-outside")
    done = command(by_number, "--model", "m", "--budget", "0.9", "--yes")
    assert done.exit_code == 0, done.output
    assert f"{N} questions: {N} calls without and {N} with retrieval" in done.output
    assert "question alone: Retrieves for at most 90.0%" in done.output
    assert {key for _, _, key in Fake.seen} == {"Bearer sk-from-outside"}
    assert "sk-from-outside" not in done.output
    for file in tmp_path.rglob("*"):
        assert file.is_dir() or b"sk-from-outside" not in file.read_bytes()


def test_the_command_says_how_many_samples_it_will_ask_for(command):
    done = command(by_number, "--model", "m", "--budget", "0.9", "--num-samples", "2", "--yes")
    assert done.exit_code == 0, done.output
    calls = f"{N} calls without and {N} with retrieval, and {2 * N} for 2 samples each, to http"
    assert calls in done.output
    assert "share of right answers among up to 2 samples a question" in done.output
    assert len(Fake.seen) == 4 * N


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


def test_a_served_judge_labels_and_what_it_does_not_say_is_counted(command, served, tmp_path, monkeypatch):
    monkeypatch.setenv("RGATE_JUDGE_API_KEY", "sk-of-the-judge")
    url = served(judging).url
    done = command(judging, "--model", "m", "--judge", f"org/big@{url}", "--budget", "0.9", "--yes")
    assert done.exit_code == 0, done.output
    assert f"{N - 2} questions with a label (judge), 2 without." in done.output
    assert f"{2 * N} answers at most are judged by org/big@{url}" in done.output
    judged = [(body["model"], key) for _, body, key in Fake.seen if "Answer to judge" in str(body)]
    assert set(judged) == {("org/big", "Bearer sk-of-the-judge")}


def test_a_judge_that_cannot_be_asked_ends_the_run_and_the_answers_are_kept(command, served, tmp_path):
    def refuses(body):
        return (401, "who are you?") if "Answer to judge" in str(body) else by_number(body)

    url = served(refuses).url
    done = command(refuses, "--model", "m", "--judge", f"big@{url}", "--yes")
    assert done.exit_code == 1
    assert "refused the key" in str(done.exception)
    assert sum("Answer to judge" in str(body) for _, body, _ in Fake.seen) == 10
    assert len((tmp_path / "my-gate.answers.jsonl").read_text().splitlines()) == 1 + 2 * N


def test_the_command_limits_and_samples(command):
    command(by_number, "--model", "m", "--yes", "--limit", "40", "--max-questions", "25")
    assert len(Fake.seen) == 50


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--yes"], "Which model"),
        (["--model", "m"], "nobody is at the terminal"),
        (["--model", "m", "--yes", "--max-loss", "0.1", "--budget", "0.4"], "one promise"),
        (["--model", "m", "--yes", "--labels", "guess"], "not known"),
        (["--model", "m", "--yes", "--price-in", "3"], "price is missing"),
        (["--model", "m", "--yes", "--latency", "direct=3"], "rag=… is missing"),
    ],
)
def test_a_command_that_cannot_be_meant(command, options, said):
    done = command(by_number, *options)
    assert done.exit_code == 1
    assert said in str(done.exception)
    assert Fake.seen == []


def test_no_is_an_answer(command, monkeypatch):
    monkeypatch.setattr("rgate_integrations.cli.tune._is_asked", lambda: True)
    assert command(by_number, "--model", "m").exit_code == 1
    assert Fake.seen == []


def test_the_report_is_one_page_that_fetches_nothing_and_runs_nothing_of_the_log(tmp_path, prior):
    given = [
        *questions(),
        {"question": "</script><script>alert(1)</script> number 62?", "gold_answers": ["n62"]},
    ]
    found = tuned(tmp_path, prior, given)
    page = (found.folder / "report.html").read_text()
    for name in ("src=", "href=", "@import", "https:", "<script>alert"):
        assert name not in page
    assert json.dumps(found.question.chosen.promise) in page
    assert "tuned, answer first" in page
    assert '"gate": "shipped"' in page


@pytest.mark.parametrize("notes", [None, 5, "text", {"a": 1}])
def test_notes_that_are_none_are_not_shown(notes):
    result = {"gate": "g", "threshold": 0.5, "questions": [], "notes": notes}
    assert '"notes": []' in report_page([result])


def test_topics_are_named_by_their_words():
    class Kinds(Spread):
        def embed(self, texts):
            return np.array([[1.0, 0.0] if "river" in t else [0.0, 1.0] for t in texts])

    asked = [f"how long is the river {i}?" for i in range(40)] + [
        f"who painted number {i}?" for i in range(40)
    ]
    topics = topics_of(asked, Kinds())
    assert topics[0] != topics[-1]
    assert "river" in topics[0]
    assert "painted" in topics[-1]
    assert set(topics_of(asked, None)) == {"all questions"}


def test_the_command_tells_tokens_at_the_users_prices_and_the_first_look(command, tmp_path):
    prices = ("--price-in", "2", "--price-out", "10")
    done = command(by_number, "--model", "m", "--budget", "0.9", "--yes", *prices)
    assert done.exit_code == 0, done.output
    # The server says that each prompt has 7 tokens, and each answer is one token.
    assert "instead of 7 and 1 with retrieval always. At your prices" in done.output
    assert "for 1,000 questions instead of 0.024" in done.output
    assert "AnswerFirst(retrieve_below=" in done.output
    first_look = json.loads((tmp_path / "my-gate" / "answer-first" / "gate.json").read_text())["provenance"]
    assert 0 <= first_look["first_look"]["low"] <= 1.01
    assert first_look["first_look"]["n"] == N / 2


def test_tokens_by_hand():
    short = Draft(text="x", tokens=("a",) * 4, prompt_tokens=10)
    long = Draft(text="x" * 40, prompt_tokens=100)  # whose tokens are not listed: about ten
    answered = [Answered(Question("?"), short, long, {})] * 2
    yes, no = np.array([True, True]), np.array([False, False])
    one = np.array([True, False])
    assert tokens_spent(answered, yes, no) == Tokens(100, 10)
    assert tokens_spent(answered, no, no) == Tokens(10, 4)
    assert tokens_spent(answered, one, no) == Tokens(55, 7)
    assert tokens_spent(answered, one, one, 3) == Tokens(
        60, 8.5
    )  # a begun answer: its prompt and three tokens
    unknown = [Answered(Question("?"), short, Draft(text="x"), {})]
    assert tokens_spent(unknown, one[:1], no[:1]) is None


@pytest.mark.parametrize("prices", [(-1, 1), (1, float("nan"))])
def test_prices_below_nothing_are_refused(prices):
    with pytest.raises(ConfigurationError, match="price"):
        Prices(*prices)


def test_what_is_saved_is_told_at_the_users_prices(tmp_path, prior):
    times = StageTimes(gate=0.0, direct=100.0, rag=500.0)
    found = tuned(tmp_path, prior, options={"policy": Budget(0.9), "costs": Costs(times=times)})
    rate = float((found.question.p < found.question.chosen.threshold).mean())
    spent = f"{rate * 500 + (1 - rate) * 100:.3g}"
    assert f"{spent} (your figures) a question instead of 500" in (found.folder / "README.md").read_text()


def test_ctrl_c_says_that_the_same_command_goes_on(command, monkeypatch):
    def stopped(*given, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("rgate_integrations.tuning.tune.tune", stopped)
    done = command(by_number, "--model", "m", "--budget", "0.9", "--yes")
    assert "What was answered is kept: the same command goes on." in done.output
    assert done.exit_code != 0
