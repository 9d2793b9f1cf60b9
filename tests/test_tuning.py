"""Tuning: what is asked, kept, labelled, fitted and promised; whatever the log, the server or the disk does."""

import json
import shutil
import threading

import numpy as np
import pytest
from typer.testing import CliRunner

from rgate_integrations import load_gate
from rgate_integrations.calibration import Budget, LowestCost, MaxLoss
from rgate_integrations.cli.main import app
from rgate_integrations.decision import Draft
from rgate_integrations.errors import (
    ConfigurationError,
    DataFormatError,
    EvidenceError,
    LockedError,
    ModelLoadError,
    ServerError,
    WriteError,
)
from rgate_integrations.evaluation.break_even import StageTimes
from rgate_integrations.evaluation.report import report_page
from rgate_integrations.files import JsonlLog
from rgate_integrations.gates.tuned import features_of
from rgate_integrations.locks import locked
from rgate_integrations.saved.probe import ProbeArtifact, save_probe
from rgate_integrations.tuning.arms import read_answer
from rgate_integrations.tuning.asking import STOP_AFTER, Answered
from rgate_integrations.tuning.fit import Basis, Table, crossfit, fit_correction, ridge_logistic
from rgate_integrations.tuning.labelling import agreeing
from rgate_integrations.tuning.page import topics_of
from rgate_integrations.tuning.questions import Question, read_log, sampled
from rgate_integrations.tuning.tune import TuneOptions, tune
from tests.fake_server import Fake, answer, serving
from tests.scripted_proxy import ScriptedProxy

N = 60
OTHER = {
    "format": 1,
    "method": "calibrated",
    "threshold": 0.5,
    "provenance": {},
    "prompts": {},
    "config": {},
}


class Reader(ScriptedProxy):
    """A proxy with states that show whether the answer is known: even numbers are."""

    num_layers = 4
    fingerprint = "abc"

    def hidden(self, prompt, values, drafts, layers):
        read = super().hidden(prompt, values, drafts, layers)
        for each, value in zip(read, values, strict=True):
            each.states[:, 0] = known(value["question"])
        return read


def known(question):
    return int(question.rstrip("?").split()[-1]) % 2 == 0


@pytest.fixture
def prior(tmp_path):
    """A gate that says 0.5 of everything: whatever is known afterwards was learned."""
    probe = ProbeArtifact(
        weight=np.zeros((1, 4), dtype=np.float32),
        bias=0.0,
        layers=((2, "question", "mean"),),
        tokens=0,
        source="proxy",
        base_model="scripted",
        llm="another LLM",
        fingerprint="abc",
        provenance={"data": []},
    )
    return str(save_probe(probe, tmp_path / "shipped"))


def questions(n=N):
    return [{"question": f"what is number {i}?", "gold_answers": [f"n{i}"]} for i in range(n)]


class Direct:
    """Knows the even ones, and says so in its log-probabilities."""

    def __init__(self, fails=()):
        self.asked = []
        self.fails = fails

    def __call__(self, question):
        self.asked.append(question)
        number = int(question.rstrip("?").split()[-1])
        if number in self.fails:
            raise RuntimeError(f"no answer to {number}")
        right = known(question)
        logprobs = (-0.1, -0.2) if right else (-2.0, -3.0)
        return Draft(text=f"n{number}" if right else "who knows", tokens=("a", "b"), logprobs=logprobs)


def retrieve(question):
    return f"It is n{question.rstrip('?').split()[-1]}."


def tuned(tmp_path, prior, given=None, *, direct=None, retrieve=retrieve, options=None, **more):
    options = options or {}
    return tune(
        questions() if given is None else given,
        direct=direct or Direct(),
        retrieve=retrieve,
        out=tmp_path / "my-gate",
        options=TuneOptions(**{"prior": prior, "policy": MaxLoss(0.2), **options}),
        proxy=Reader(),
        **more,
    )


def test_a_gate_comes_out_that_knows_what_the_llm_knows(tmp_path, prior):
    found = tuned(tmp_path, prior)
    assert found.question.auc > 0.95
    assert found.question.auc_before == 0.5
    assert found.question.chosen.kept
    assert found.failed == 0
    gate = load_gate(str(found.folder), proxy=Reader(), on_error="raise")
    assert gate.threshold == found.question.chosen.threshold
    even, odd = gate.decide_batch(["what is number 102?", "what is number 103?"])
    assert even.p_known > 0.5 > odd.p_known
    assert even.gate == "tuned"
    assert sorted(p.name for p in found.folder.iterdir()) == [
        "README.md", "answer-first", "gate.json", "prior", "report.html", "tuned.safetensors",
    ]  # fmt: skip


def test_the_answer_first_gate_reads_the_log_probabilities_of_the_begun_answer(tmp_path, prior):
    found = tuned(tmp_path, prior)
    gate = load_gate(f"{found.folder}/answer-first", proxy=Reader(), on_error="raise")
    sure = Draft(text="x", tokens=("a", "b"), logprobs=(-0.1, -0.2))
    unsure = Draft(text="x", tokens=("a", "b"), logprobs=(-2.0, -3.0))
    question = "what is number 102?"
    first, second = gate.decide_batch([question, question], drafts=[sure, unsure])
    assert first.p_known > second.p_known
    with pytest.raises(EvidenceError, match="no log-probabilities"):
        gate.decide_batch([question], drafts=[Draft(text="x")])
    lenient = load_gate(f"{found.folder}/answer-first", proxy=Reader())
    assert lenient.decide_batch([question], drafts=[Draft(text="x")])[0].retrieve


def test_without_log_probabilities_there_is_no_answer_first_gate(tmp_path, prior):
    found = tuned(tmp_path, prior, direct=lambda q: Direct()(q).text)
    assert found.answer_first is None
    assert not (found.folder / "answer-first").exists()


def test_the_saved_gate_scores_as_the_fit_did(tmp_path, prior):
    found = tuned(tmp_path, prior)
    artifact = found.question.artifact
    gate = load_gate(str(found.folder), proxy=Reader())
    (decision,) = gate.decide_batch(["what is number 8?"])
    (state,) = Reader().hidden(None, [{"question": "what is number 8?"}], None, artifact.layers)
    logit = float((artifact.weight * state.states).sum()) + artifact.bias  # the prior's logit is 0
    assert decision.p_known == pytest.approx(1 / (1 + np.exp(-logit)), abs=1e-6)


def test_the_shipped_gate_is_kept_in_the_folder(tmp_path, prior):
    found = tuned(tmp_path, prior)
    for file in (tmp_path / "shipped").iterdir():
        file.unlink()
    assert load_gate(str(found.folder), proxy=Reader(), on_error="raise").decide("what is number 4?")


def test_nothing_is_asked_twice(tmp_path, prior):
    direct = Direct()
    tuned(tmp_path, prior, direct=direct)
    again = Direct()
    found = tuned(tmp_path, prior, direct=again, update=True)
    assert len(direct.asked) == N
    assert again.asked == []
    assert len(found.question.p) == N


def test_update_adds_questions(tmp_path, prior):
    tuned(tmp_path, prior)
    more = Direct()
    found = tuned(tmp_path, prior, questions(80), direct=more, update=True)
    assert len(more.asked) == 20
    assert len(found.question.p) == 80


def test_a_run_that_is_killed_goes_on_where_it_was(tmp_path, prior):
    class Killed(BaseException):
        pass

    def dies(question):
        if len(direct.asked) > 20:
            raise Killed
        return Direct.__call__(direct, question)

    direct = Direct()
    with pytest.raises(Killed):
        tuned(tmp_path, prior, direct=dies, options={"concurrency": 1})
    assert not (tmp_path / "my-gate").exists()
    log = tmp_path / "my-gate.answers.jsonl"
    with log.open("ab") as file:
        file.write(b'{"arm": "direct", "quest')  # as a kill leaves it
    answered = sum('"arm": "direct"' in line for line in log.read_text().splitlines()[:-1])
    again = Direct()
    again.__name__ = "dies"
    found = tuned(tmp_path, prior, direct=again)
    assert len(again.asked) == N - answered
    assert len(found.question.p) == N


def test_a_failure_is_one_and_is_asked_again(tmp_path, prior):
    found = tuned(tmp_path, prior, direct=Direct(fails={3, 4}))
    assert found.failed == 2
    assert len(found.question.p) == N - 2
    assert "2 calls failed" in (found.folder / "README.md").read_text()
    again = Direct()
    assert tuned(tmp_path, prior, direct=again, update=True).failed == 0
    assert sorted(again.asked) == ["what is number 3?", "what is number 4?"]


def test_who_fails_ten_times_in_a_row_is_asked_no_more(tmp_path, prior):
    direct = Direct(fails=range(N))
    with pytest.raises(ServerError, match="given up") as error:
        tuned(tmp_path, prior, direct=direct, options={"concurrency": 1})
    assert len(direct.asked) == STOP_AFTER
    assert "my-gate.answers.jsonl" in error.value.hint


def test_answers_from_elsewhere_are_not_mixed_in(tmp_path, prior):
    tuned(tmp_path, prior)
    with pytest.raises(ConfigurationError, match="made with"):
        tuned(tmp_path, prior, direct=lambda q: "x", update=True)


def test_an_existing_folder_is_left_alone_before_anything_is_asked(tmp_path, prior):
    direct = Direct()
    (tmp_path / "my-gate").mkdir()
    with pytest.raises(ConfigurationError, match="exists"):
        tuned(tmp_path, prior, direct=direct)
    (tmp_path / "my-gate" / "gate.json").write_text(
        json.dumps(
            {
                "format": 1,
                "method": "calibrated",
                "threshold": 0.5,
                "provenance": {},
                "prompts": {},
                "config": {},
            }
        )
    )
    with pytest.raises(ConfigurationError, match="no tuned gate"):
        tuned(tmp_path, prior, direct=direct, update=True)
    assert direct.asked == []


def test_folders_that_are_missing_are_made(tmp_path, prior):
    assert load_gate(str(tuned(tmp_path / "a" / "b", prior).folder)).gate.name == "tuned"


@pytest.mark.parametrize("out", [".", "..", "/"])
def test_a_folder_that_cannot_be_named(out, prior):
    with pytest.raises(ConfigurationError):
        tune(questions(), direct=Direct(), retrieve=retrieve, out=out, options=TuneOptions(prior=prior))


def test_options_out_of_range_are_refused():
    for name in ("concurrency", "tokens", "folds", "sample"):
        with pytest.raises(ConfigurationError, match=name):
            TuneOptions(**{name: 0})


def test_a_full_disk_keeps_what_was_answered(tmp_path, prior, monkeypatch):
    written = []
    append = JsonlLog.append

    def full(self, values):
        if len(written) == 30:
            raise WriteError("no space")
        written.append(1)
        append(self, values)

    monkeypatch.setattr(JsonlLog, "append", full)
    with pytest.raises(WriteError):
        tuned(tmp_path, prior)
    monkeypatch.undo()
    again = Direct()
    tuned(tmp_path, prior, direct=again)
    assert len(again.asked) < N


def test_two_runs_at_once_are_refused(tmp_path, prior):
    with locked(tmp_path / "my-gate.answers.jsonl"), pytest.raises(LockedError):
        tuned(tmp_path, prior)


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


def test_too_small_for_a_promise_says_how_many_would_do(tmp_path, prior):
    found = tuned(tmp_path, prior, options={"policy": MaxLoss(0.05)})
    assert not found.question.chosen.kept
    assert found.question.chosen.threshold > 1
    assert "questions like these would do" in found.question.chosen.promise


@pytest.mark.parametrize("policy", [Budget(0.9), LowestCost(retrieval=2.0, answer=1.0)])
def test_other_policies(tmp_path, prior, policy):
    found = tuned(tmp_path, prior, options={"policy": policy})
    assert found.question.chosen.kept
    assert found.question.artifact.provenance["policy"]["name"] == policy.name


def test_both_arms_are_asked_at_once(tmp_path, prior):
    both = threading.Barrier(2, timeout=60)
    met = []

    def first(question):
        if not met:
            both.wait()
            met.append(1)
        return Direct()(question)

    def second(question):
        if not met:
            both.wait()
        return retrieve(question)

    given = questions()
    tuned(tmp_path, prior, given, direct=first, retrieve=second, options={"concurrency": 2})
    assert met


def test_the_plan_is_told_before_anything_is_asked_and_may_be_refused(tmp_path, prior):
    class No(Exception):
        pass

    def refuse(plan):
        assert plan.calls == {"direct": N, "retrieve": N}
        raise No

    direct = Direct()
    with pytest.raises(No):
        tuned(tmp_path, prior, direct=direct, before=refuse)
    assert direct.asked == []


def test_secrets_of_the_environment_are_in_no_file(tmp_path, prior, monkeypatch):
    monkeypatch.setenv("MY_API_KEY", "s3cret-value")

    def fails(question):
        if known(question):
            return Direct()(question)
        if "7" in question:
            raise RuntimeError("wrong key s3cret-value")
        return "who knows"

    tuned(tmp_path, prior, direct=fails)
    for file in tmp_path.rglob("*"):
        if file.is_file():
            assert b"s3cret-value" not in file.read_bytes()
    assert "wrong key ***" in (tmp_path / "my-gate.answers.jsonl").read_text()


class Message:
    content = "Paris"

    def __init__(self):
        logprobs = [{"token": "Par", "logprob": -0.1}, {"token": "is", "logprob": 1e-9}]
        self.response_metadata = {"logprobs": {"content": logprobs}}


class Response:
    response = "Paris"


@pytest.mark.parametrize(
    "given", ["Paris", {"answer": "Paris"}, {"result": Response()}, Response(), Message()]
)
def test_answers_of_frameworks_are_read(given):
    assert read_answer(given).text == "Paris"


def test_log_probabilities_of_langchain_are_read():
    assert read_answer(Message()).logprobs == (-0.1, 0.0)


@pytest.mark.parametrize("given", [None, 3, {}, {"question": "x"}])
def test_an_answer_without_text(given):
    with pytest.raises(EvidenceError, match="no text"):
        read_answer(given)


def test_what_cannot_answer_is_refused(tmp_path, prior):
    with pytest.raises(ConfigurationError, match="direct="):
        tuned(tmp_path, prior, direct=3.5)


def test_runnables_and_engines_are_asked(tmp_path, prior):
    class Runnable:
        def invoke(self, question):
            return Direct()(question)

    class Engine:
        def query(self, question):
            return retrieve(question)

    assert tuned(tmp_path, prior, direct=Runnable(), retrieve=Engine()).question.auc > 0.95


class Spread:
    """Embeds a number at its remainder by two: two clusters, of which one is small."""

    name = identity = "spread"

    def embed(self, texts):
        return np.array([[1.0, 0.0] if int(t.split()[-1].rstrip("?")) < 900 else [0.0, 1.0] for t in texts])


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


# --- a server ------------------------------------------------------------------------------------------------


def by_number(body):
    """Answer as a server does: the number that is asked for, if it is even."""
    text = body["messages"][-1]["content"]
    number = text.split("number ")[-1].split("?")[0]
    return answer(f"n{number}" if int(number) % 2 == 0 else "who knows")


@pytest.fixture
def served():
    with serving() as make:
        yield make


def test_a_server_is_asked_and_its_log_probabilities_are_kept(tmp_path, prior, served):
    found = tuned(tmp_path, prior, direct=served(by_number))
    assert found.question.auc > 0.95
    assert found.answer_first is not None


def test_a_server_that_is_busy_at_times_is_asked_again(tmp_path, prior, served):
    turns = iter(range(10_000))

    def busy(body):
        return (429, "slow down") if next(turns) % 9 == 0 else by_number(body)

    found = tuned(tmp_path, prior, direct=served(busy, retries=5))
    assert found.failed == 0


@pytest.mark.parametrize(
    ("reply", "said"),
    [((401, "wrong key"), "refused the key"), ((500, "oh"), "500"), ((200, "garbage"), "OpenAI")],
)
def test_a_server_that_never_answers_ends_the_run(tmp_path, prior, served, reply, said):
    with pytest.raises(ServerError, match=said):
        tuned(tmp_path, prior, direct=served(reply, retries=0), options={"concurrency": 1})
    assert len(Fake.seen) == STOP_AFTER


def test_a_server_that_stops_in_the_middle(tmp_path, prior, served):
    turns = iter(range(10_000))

    def stops(body):
        return by_number(body) if next(turns) < 25 else (503, "gone")

    with pytest.raises(ServerError, match="given up"):
        tuned(tmp_path, prior, direct=served(stops, retries=0), options={"concurrency": 2})
    before = len(Fake.seen)
    found = tuned(tmp_path, prior, direct=served(by_number))
    assert len(found.question.p) == N
    assert len(Fake.seen) - before == N - 25


def test_the_key_is_in_no_file_and_no_error(tmp_path, prior, served):
    def quotes(body):
        return (400, "your key is sk-very-secret")

    with pytest.raises(ServerError) as error:
        tuned(tmp_path, prior, direct=served(quotes, api_key="sk-very-secret", retries=0))
    assert "sk-very-secret" not in str(error.value)
    assert "sk-very-secret" not in (tmp_path / "my-gate.answers.jsonl").read_text()


# --- the command ---------------------------------------------------------------------------------------------


class NothingFound:
    def search(self, queries, k):
        return [[] for _ in queries]


@pytest.fixture
def command(tmp_path, prior, served, monkeypatch):
    """Run ``rgate tune`` against a server: ``command(reply, *options)``."""
    monkeypatch.setattr("rgate_integrations.cli.tune.open_index", lambda folder, notices: NothingFound())
    monkeypatch.setattr("rgate_integrations.cli.tune._embedder", lambda notices: None)
    monkeypatch.setattr("rgate_integrations.proxy.local.shared_proxy", lambda name: Reader())
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


def test_the_command_limits_and_samples(command):
    command(by_number, "--model", "m", "--yes", "--limit", "40", "--sample", "25")
    assert len(Fake.seen) == 50


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--yes"], "Which model"),
        (["--model", "m"], "nobody to say yes"),
        (["--model", "m", "--yes", "--max-loss", "0.1", "--budget", "0.4"], "one promise"),
        (["--model", "m", "--yes", "--labels", "guess"], "not known"),
        (["--model", "m", "--yes", "--times", "direct=3"], "rag=… is missing"),
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


# --- the report ----------------------------------------------------------------------------------------------


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


def test_what_is_saved_is_told_at_the_users_prices(tmp_path, prior):
    times = StageTimes(gate=0.0, direct=100.0, rag=500.0)
    found = tuned(tmp_path, prior, options={"policy": Budget(0.9), "times": times})
    rate = float((found.question.p < found.question.chosen.threshold).mean())
    spent = f"{rate * 500 + (1 - rate) * 100:.3g}"
    assert f"{spent} (your figures) a question instead of 500" in (found.folder / "README.md").read_text()


# --- the fit -------------------------------------------------------------------------------------------------


def simulated(n, rng, directions=6):
    """Questions of which the prior knows a little, and the states a little more."""
    states = rng.normal(size=(n, directions)) / np.sqrt(directions)
    prior = rng.normal(size=n)
    right = rng.random(n) < 1 / (1 + np.exp(-(0.7 * prior + 3 * states[:, 0])))
    return Table(prior, states, np.zeros((n, 0)), right), rng.random(n) < 0.85


def test_the_promise_holds_for_new_questions():
    broken = made = 0
    for seed in range(20):
        rng = np.random.default_rng(seed)
        table, rag = simulated(200, rng)
        p = 1 / (1 + np.exp(-crossfit(table, 5, seed)))
        chosen = MaxLoss(0.1, confidence=0.9).choose(p, table.known, rag, seed)
        made += chosen.kept
        new, new_rag = simulated(4_000, rng)
        skipped = 1 / (1 + np.exp(-fit_correction(table, seed)(new))) >= chosen.threshold
        broken += np.where(skipped, new_rag.astype(float) - new.known, 0.0).mean() > 0.1
    assert made >= 10
    assert broken <= 2


def test_the_newton_steps_end_at_the_minimum():
    rng = np.random.default_rng(0)
    columns, offset = rng.normal(size=(80, 5)), rng.normal(size=80)
    right = rng.random(80) < 0.5
    found = ridge_logistic(columns, right, np.full(5, 0.5), offset)
    p = 1 / (1 + np.exp(-(offset + columns @ found)))
    assert columns.T @ (p - right) + 0.5 * found == pytest.approx(np.zeros(5), abs=2e-3)


def test_separable_labels_have_finite_weights():
    columns = np.linspace(-1, 1, 40)[:, None] * 1e3
    found = ridge_logistic(columns, columns[:, 0] > 0, [1e-6], np.zeros(40))
    assert np.isfinite(found).all()


def test_few_questions_leave_the_shipped_order_alone():
    rng = np.random.default_rng(1)
    prior = rng.normal(size=40)
    noise = rng.normal(size=(40, 20)) * 1e-3
    table = Table(prior, noise, np.zeros((40, 0)), rng.random(40) < 0.5)
    corrected = fit_correction(table)
    assert corrected.slope > 0


def test_the_components_are_of_variance_one_together_and_fold_back():
    states = np.random.default_rng(0).normal(size=(50, 2, 8)).astype(np.float32)
    basis = Basis.of(states)
    found = basis(states)
    assert found.var(axis=0).sum() == pytest.approx(1.0, abs=1e-6)
    weight = np.arange(found.shape[1], dtype=float)
    folded = (weight @ basis.components) / basis.scale
    flat = states.reshape(50, -1)
    assert found @ weight == pytest.approx(flat @ folded - basis.mean @ folded)


def test_features_of_log_probabilities_by_hand():
    found = features_of(Draft(text="x", logprobs=(-1.0, -50.0, -3.0)))
    assert found == pytest.approx([-1.0, -8.0, -20.0, -24.0, np.log(3)])
    assert features_of(Draft(text="", logprobs=())) == pytest.approx([-20.0, -20.0, -20.0, -20.0, 0.0])
    with pytest.raises(EvidenceError):
        features_of(Draft(text="x", logprobs=(-1.0,), scored_by="the proxy"))


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
    each = Answered(Question("where?"), Draft(text=direct), Draft(text=retrieve), {})
    assert agreeing([each], None) == [same]


def test_agreement_by_meaning():
    class Alike(Spread):
        def embed(self, texts):
            return np.array([[1.0, 0.0] if "capital" in t or "Paris" in t else [0.0, 1.0] for t in texts])

    pairs = [("the French capital", "Paris"), ("Lyon", "Paris"), ("", "Paris")]
    answered = [Answered(Question("where?"), Draft(text=a), Draft(text=b), {}) for a, b in pairs]
    assert agreeing(answered, Alike()) == [True, False, False]


# --- the saved gate ------------------------------------------------------------------------------------------


def test_a_damaged_gate_is_refused(tmp_path, prior):
    folder = tuned(tmp_path, prior).folder
    weights = folder / "tuned.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    with pytest.raises(ModelLoadError, match="damaged"):
        load_gate(str(folder))


def test_a_gate_without_its_prior_is_refused(tmp_path, prior, monkeypatch):
    tuned(tmp_path, prior)
    shutil.rmtree(tmp_path / "my-gate" / "prior")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelLoadError, match="no trained gate"):
        load_gate("my-gate")


def test_a_gate_for_another_model_is_refused(tmp_path, prior):
    folder = tuned(tmp_path, prior).folder

    class Other(Reader):
        fingerprint = "other"

    decision = load_gate(str(folder), proxy=Other()).decide("what is number 4?")
    assert decision.retrieve
    assert decision.error.type == "ModelLoadError"


def test_decisions_are_monitored(tmp_path, prior):
    folder = tuned(tmp_path, prior).folder
    log = tmp_path / "decided.jsonl"
    log.write_text("".join(json.dumps({"question": "q", "p_known": i / 100}) + "\n" for i in range(100)))
    done = CliRunner().invoke(app, ["monitor", str(log), "--gate", str(folder)])
    assert done.exit_code == 0, done.output
    assert "100 decisions" in done.output


@pytest.mark.model
def test_the_shipped_gate_is_tuned_with_its_own_model(tmp_path, smollm2):
    found = tune(
        questions(24),
        direct=Direct(),
        retrieve=retrieve,
        out=tmp_path / "my-gate",
        options=TuneOptions(policy=Budget(0.9)),
    )
    assert found.question.artifact.weight.shape == (3, 576)
    gate = load_gate(str(found.folder), on_error="raise")
    asked = [each.question.text for each in found.labels.answered]
    assert np.isfinite([decision.p_known for decision in gate.decide_batch(asked)]).all()
    begun = Draft(text="a b", tokens=("a", " b"), logprobs=(-0.1, -0.2))
    (decision,) = load_gate(f"{found.folder}/answer-first", on_error="raise").decide_batch(
        asked[:1], drafts=[begun]
    )
    assert decision.draft == begun
