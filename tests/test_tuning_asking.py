"""What tuning asks and keeps: both arms, failures, kills, full disks, servers; nothing is asked twice."""

import threading

import pytest

from rgate_integrations.errors import (
    ConfigurationError,
    DataFormatError,
    EvidenceError,
    LockedError,
    ServerError,
    WriteError,
)
from rgate_integrations.index import Passage, PassageIndex
from rgate_integrations.index.hybrid import HybridIndex
from rgate_integrations.runtime.files import JsonlLog
from rgate_integrations.runtime.locks import locked
from rgate_integrations.tuning.arms import ModelArm, read_answer
from rgate_integrations.tuning.asking import STOP_AFTER, Answers
from tests.fake_server import Fake, serving
from tests.patience import PATIENCE
from tests.scripted_proxy import ScriptedProxy
from tests.test_hybrid import Words
from tests.tuning_parts import Direct, N, by_number, known, questions, retrieve, shipped, tuned


@pytest.fixture
def prior(tmp_path):
    return shipped(tmp_path)


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


def test_both_arms_are_asked_at_once(tmp_path, prior):
    # Only the first question's two calls meet: another's would wait for one that has been made already.
    both = threading.Barrier(2, timeout=PATIENCE)
    given = questions()
    met = []

    def meeting(answer):
        def asked(question):
            if question == given[0]["question"]:
                met.append(both.wait())
            return answer(question)

        return asked

    arms = {"direct": meeting(Direct()), "retrieve": meeting(retrieve)}
    tuned(tmp_path, prior, given, **arms, options={"concurrency": 2})
    assert sorted(met) == [0, 1]


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


def test_a_server_that_refuses_log_probabilities_is_asked_without_and_the_report_says_so(
    tmp_path, prior, served
):
    def refuses(body):
        if "logprobs" in body:
            return (400, "logprobs are not supported")
        message = by_number(body)["choices"][0]["message"]
        return {"choices": [{"message": message, "finish_reason": "stop"}]}

    found = tuned(tmp_path, prior, direct=served(refuses))
    assert (found.failed, found.answer_first) == (0, None)
    assert found.question.auc > 0.95
    for report in ("README.md", "report.html"):
        assert f"0 of {N} answers came with log-probabilities" in (found.folder / report).read_text()


@pytest.mark.parametrize("content", ["one line of notes", '{"question": "who?"}\n{"question": "what?"}'])
def test_a_typo_in_answers_costs_nothing(tmp_path, prior, content):
    """The file is looked at before it is cut: a torn last line is ours only where the lines before it are."""
    path = tmp_path / "notes.txt"
    path.write_text(content)
    with pytest.raises(DataFormatError, match="something else"):
        tuned(tmp_path, prior, answers=path)
    assert path.read_text() == content


def test_two_runs_for_one_gate_are_refused_whatever_their_answers(tmp_path, prior):
    """The second to end replaced the first's gate, without ``update``."""
    with locked(tmp_path / "my-gate"), pytest.raises(LockedError):
        tuned(tmp_path, prior, answers=tmp_path / "other.jsonl")
    tuned(tmp_path, prior, answers=tmp_path / "other.jsonl")


def test_answers_with_two_indexes_do_not_mix(tmp_path):
    def answers(*texts, make=lambda index: index):
        passages = [Passage(str(number), text) for number, text in enumerate(texts)]
        index = make(PassageIndex.build(passages, Words()))
        arms = {"direct": ModelArm(ScriptedProxy()), "retrieve": ModelArm(ScriptedProxy(), index)}
        return Answers(tmp_path / "answers.jsonl", arms)

    answers("Oulu is a city.", "It rains.")
    answers("Oulu is a city.", "It rains.")
    for other in (("Oulu is a city.",), ("Oulu is a city.", "It snows.")):
        with pytest.raises(ConfigurationError, match="mixed answers would train a wrong gate"):
            answers(*other)
    with pytest.raises(ConfigurationError, match="HybridIndex"):
        answers("Oulu is a city.", "It rains.", make=HybridIndex)
