"""What is asked and kept: both arms, failures, kills, full disks, servers. Nothing is asked twice."""

import shutil
import subprocess
import threading
from functools import partial
from types import SimpleNamespace

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
from rgate_integrations.runtime.files import locked
from rgate_integrations.tuning import collect, read_paired
from rgate_integrations.tuning.arms import read_answer
from rgate_integrations.tuning.collection import STOP_AFTER, answers_file
from tests.fake_server import Fake
from tests.patience import PATIENCE
from tests.test_hybrid import TEXTS
from tests.test_index import Letters
from tests.tuning_parts import Direct, Killed, Model, N, by_number, questions, retrieve, tuned


def index(texts=TEXTS):
    return PassageIndex.build([Passage(i, t) for i, t in texts.items()], Letters())


# --- tune --------------------------------------------------------------------------------------------------


def test_nothing_is_asked_twice_and_update_adds_questions(tmp_path, prior):
    asked = []
    for given, update in ((questions(), False), (questions(), True), (questions(80), True)):
        direct = Direct()
        found = tuned(tmp_path, prior, given, direct=direct, update=update)
        asked.append((len(direct.asked), len(found.question.p)))
    assert asked == [(N, N), (0, N), (20, 80)]


def test_a_run_that_is_killed_goes_on_where_it_was(tmp_path, prior):
    with pytest.raises(Killed):
        tuned(tmp_path, prior, direct=Direct(dies_at=20), options={"concurrency": 1})
    assert not (tmp_path / "my-gate").exists()
    log = tmp_path / "my-gate.answers.jsonl"
    answered = log.read_text().count('"arm": "direct"')
    with log.open("ab") as file:
        file.write(b'{"arm": "direct", "quest')  # as a kill leaves it
    again = Direct()
    assert len(tuned(tmp_path, prior, direct=again).question.p) == N
    assert len(again.asked) == N - answered < N


def test_a_failure_is_one_and_is_asked_again(tmp_path, prior):
    found = tuned(tmp_path, prior, direct=Direct(fails=["what is number 3?", "what is number 4?"]))
    assert (found.failed, len(found.question.p)) == (2, N - 2)
    assert "2 calls failed" in (found.folder / "README.md").read_text()
    again = Direct()
    assert tuned(tmp_path, prior, direct=again, update=True).failed == 0
    assert sorted(again.asked) == ["what is number 3?", "what is number 4?"]


def test_who_fails_ten_times_in_a_row_is_asked_no_more(tmp_path, prior):
    direct = Direct(fails=[asked["question"] for asked in questions()])
    with pytest.raises(ServerError, match="given up"):
        tuned(tmp_path, prior, direct=direct, options={"concurrency": 1})
    assert len(direct.asked) == STOP_AFTER


def test_two_runs_for_one_gate_are_refused(tmp_path, prior):
    """The second to end replaced the first's gate, without ``update``."""
    with locked(tmp_path / "my-gate.answers.jsonl"), pytest.raises(LockedError):
        tuned(tmp_path, prior)


@pytest.mark.parametrize("content", ["one line of notes", '{"question": "who?"}\n{"question": "what?"}'])
def test_a_file_of_something_else_in_the_place_of_the_answers_is_kept(tmp_path, prior, content):
    """The file is looked at before it is cut: a torn last line is ours only where the lines before it are."""
    path = tmp_path / "my-gate.answers.jsonl"
    path.write_text(content)
    with pytest.raises(DataFormatError, match="something else"):
        tuned(tmp_path, prior)
    assert path.read_text() == content


def test_several_calls_are_under_way_at_once(tmp_path, prior):
    both = threading.Barrier(2, timeout=PATIENCE)
    second = questions()[1]["question"]  # the very first call is made alone

    def meet(answer, question):
        if question == second:
            both.wait()
        return answer(question)

    arms = {"direct": partial(meet, Direct()), "retrieve": partial(meet, retrieve)}
    assert tuned(tmp_path, prior, options={"concurrency": 2}, **arms).failed == 0


# --- what answers ------------------------------------------------------------------------------------------


LOGPROBS = [{"token": "Par", "logprob": -0.1}, {"token": "is", "logprob": 1e-9}]
RESPONSE = SimpleNamespace(response="Paris")
MESSAGE = SimpleNamespace(content="Paris", response_metadata={"logprobs": {"content": LOGPROBS}})


@pytest.mark.parametrize(
    ("given", "logprobs"),
    [
        ("Paris", None),
        ({"answer": "Paris"}, None),
        ({"result": RESPONSE}, None),
        (RESPONSE, None),
        (MESSAGE, (-0.1, 0.0)),
    ],
)
def test_answers_of_frameworks_are_read(given, logprobs):
    found = read_answer(given)
    assert (found.text, found.logprobs) == ("Paris", logprobs)


@pytest.mark.parametrize("given", [None, 3, {}, {"question": "x"}])
def test_an_answer_without_text(given):
    with pytest.raises(EvidenceError, match="no text"):
        read_answer(given)


def test_runnables_and_engines_are_asked_and_nothing_else(tmp_path, prior):
    arms = {"direct": SimpleNamespace(invoke=Direct()), "retrieve": SimpleNamespace(query=retrieve)}
    assert tuned(tmp_path, prior, **arms).question.auc > 0.95
    with pytest.raises(ConfigurationError, match="direct="):
        tuned(tmp_path / "other", prior, direct=3.5)


# --- servers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reply", "said"),
    [((401, "wrong key"), "refused the key"), ((500, "oh"), "500"), ((200, "garbage"), "OpenAI")],
)
def test_one_call_finds_a_server_that_cannot_be_used(tmp_path, prior, fake, reply, said):
    with pytest.raises(ServerError, match=said):
        tuned(tmp_path, prior, direct=fake(reply, retries=0), options={"concurrency": 8})
    assert len(Fake.seen) == 1


def test_a_question_that_breaks_the_server_comes_last_next_time(tmp_path, prior, fake):
    def breaks(body):
        return (500, "oh") if "number 0?" in str(body) else by_number(body)

    with pytest.raises(ServerError, match="given up"):
        tuned(tmp_path, prior, direct=fake(breaks, retries=0))
    assert tuned(tmp_path, prior, direct=fake(breaks, retries=0)).failed == 1


def test_a_server_that_refuses_log_probabilities_is_asked_without_and_the_report_says_so(
    tmp_path, prior, fake
):
    def refuses(body):
        if "logprobs" in body:
            return (400, "logprobs are not supported")
        message = by_number(body)["choices"][0]["message"]
        return {"choices": [{"message": message, "finish_reason": "stop"}]}

    found = tuned(tmp_path, prior, direct=fake(refuses))
    assert (found.failed, found.answer_first) == (0, None)
    told = (found.folder / "README.md").read_text()
    assert f"0 of {N} answers came with log-probabilities" in told


# --- collect -----------------------------------------------------------------------------------------------

ASKED = [{"id": str(i), "question": f"What is {i}?", "gold_answers": ["Answer"]} for i in range(40)]


def test_collecting_goes_on_after_a_kill(tmp_path):
    odd = {"id": "odd", "question": "one\u2028é\x85two?", "gold_answers": ["Answer"]}
    asked = [*ASKED, odd]
    whole = collect(asked, Model(), tmp_path / "whole.jsonl", index=index())
    (file,) = read_paired([whole])
    assert [example.question.id for example in file.examples] == [question["id"] for question in asked]
    assert all(example.known and example.question.draft.logprobs for example in file.examples)
    kept = answers_file(whole).read_bytes()
    out = tmp_path / "again.jsonl"
    answers_file(out).write_bytes(kept[: kept.index("é".encode()) + 1])  # inside a character
    model = Model()
    assert collect(asked, model, out, index=index()).read_text() == whole.read_text()
    assert 0 < len(model.asked) < 2 * len(asked)
    assert "rag_answer" not in collect(ASKED, Model(), tmp_path / "alone.jsonl").read_text()


@pytest.fixture
def small_disk(tmp_path):
    """A disk of a few kilobytes, and what makes it larger; where none can be mounted, the test is skipped."""
    folder = tmp_path / "disk"
    folder.mkdir()

    def mount(options):
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0

    if shutil.which("mount") is None or not mount("size=12k"):
        pytest.skip("no disk can be mounted here")
    try:
        yield folder, lambda: mount("remount,size=1m")
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_collecting_goes_on_when_a_real_disk_has_room_again(small_disk):
    disk, enlarge = small_disk
    out = disk / "out.jsonl"
    for _ in range(2):  # as long as it is full, it says so and changes nothing
        with pytest.raises(WriteError, match="No space left"):
            collect(ASKED, Model(), out)
        kept = answers_file(out).read_text()
        assert kept.endswith("\n")
        assert not out.exists()
    assert enlarge()
    again = Model()
    collect(ASKED, again, out)
    assert len(again.asked) == len(ASKED) - kept.count('"draft"')


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"llm": Model(name="two")}, "'llm': 'one'.*'llm': 'two'"),
        ({"llm": Model(weights="w2")}, "'weights': 'w1'.*'weights': 'w2'"),
        ({"tokens": 32}, "'tokens': 64.*'tokens': 32"),
        ({"k": 2}, "'k': 3.*'k': 2"),
        ({"index": index({"1": "Bread is baked."})}, "2 passages.*1 passages"),
        (
            {"index": index({"1": "Bread is baked.", "2": "It snows."})},
            "mixed answers would train a wrong gate",
        ),
        ({"index": HybridIndex(index({"1": "Bread is baked.", "2": "Rain falls."}))}, "HybridIndex"),
    ],
)
def test_answers_that_were_made_otherwise_are_not_mixed(tmp_path, change, named):
    out = tmp_path / "out.jsonl"
    given = {"llm": Model(), "index": index({"1": "Bread is baked.", "2": "Rain falls."})}
    collect(ASKED[:2], out=out, **given)
    before = out.read_text()
    with pytest.raises(ConfigurationError, match=named):
        collect(ASKED, out=out, **given | change)
    assert out.read_text() == before


@pytest.mark.parametrize("line", ["5", '{"question": "no id"}'])
def test_a_file_of_something_else_is_left_alone(tmp_path, line):
    out = tmp_path / "notes.jsonl"
    out.write_text(line + "\n")
    with pytest.raises(DataFormatError, match="something else"):
        collect(ASKED, Model(), out)
    assert out.read_text() == line + "\n"
