"""What is asked and kept: both arms, failures, kills, full disks, servers. Nothing is asked twice."""

import json
import shutil
import subprocess
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
from rgate_integrations.runtime.files import locked
from rgate_integrations.tuning import collect, read_paired
from rgate_integrations.tuning.arms import read_answer
from rgate_integrations.tuning.collection import STOP_AFTER, answers_file
from rgate_integrations.tuning.questions import read_examples
from tests.fake_server import Fake
from tests.patience import PATIENCE
from tests.scripted_proxy import ScriptedProxy
from tests.test_hybrid import TEXTS, Words
from tests.tuning_parts import Direct, Killed, N, by_number, questions, retrieve, tuned


def index(texts=TEXTS):
    return PassageIndex.build([Passage(i, t) for i, t in texts.items()], Words())


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
    found = tuned(tmp_path, prior, direct=Direct(fails={3, 4}))
    assert (found.failed, len(found.question.p)) == (2, N - 2)
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
    second, met = questions()[1]["question"], []  # the very first call is made alone

    def meeting(answer):
        def asked(question):
            if question == second:
                met.append(both.wait())
            return answer(question)

        return asked

    tuned(tmp_path, prior, direct=meeting(Direct()), retrieve=meeting(retrieve), options={"concurrency": 2})
    assert sorted(met) == [0, 1]


def test_the_plan_is_told_before_anything_is_asked_and_may_be_refused(tmp_path, prior):
    def refuse(plan):
        assert plan.calls == {"direct": N, "retrieve": N}
        raise Killed

    direct = Direct()
    with pytest.raises(Killed):
        tuned(tmp_path, prior, direct=direct, before=refuse)
    assert direct.asked == []


def test_secrets_of_the_environment_are_in_no_file(tmp_path, prior, monkeypatch):
    monkeypatch.setenv("MY_API_KEY", "no answer")
    tuned(tmp_path, prior, direct=Direct(fails={7}))
    assert not [file for file in tmp_path.rglob("*") if file.is_file() and b"no answer" in file.read_bytes()]
    assert "RuntimeError: *** to 7" in (tmp_path / "my-gate.answers.jsonl").read_text()


# --- what answers ------------------------------------------------------------------------------------------


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
    found = read_answer(given)
    assert found.text == "Paris"
    assert found.logprobs == ((-0.1, 0.0) if isinstance(given, Message) else None)


@pytest.mark.parametrize("given", [None, 3, {}, {"question": "x"}])
def test_an_answer_without_text(given):
    with pytest.raises(EvidenceError, match="no text"):
        read_answer(given)


def test_runnables_and_engines_are_asked_and_nothing_else(tmp_path, prior):
    class Runnable:
        def invoke(self, question):
            return Direct()(question)

    class Engine:
        def query(self, question):
            return retrieve(question)

    assert tuned(tmp_path, prior, direct=Runnable(), retrieve=Engine()).question.auc > 0.95
    with pytest.raises(ConfigurationError, match="direct="):
        tuned(tmp_path / "other", prior, direct=3.5)


# --- servers -----------------------------------------------------------------------------------------------


def test_a_server_that_is_busy_at_times_is_asked_again(tmp_path, prior, fake):
    turns = iter(range(10_000))

    def busy(body):
        return (429, "slow down") if next(turns) % 9 == 0 else by_number(body)

    found = tuned(tmp_path, prior, direct=fake(busy, retries=5))
    assert found.failed == 0
    assert found.answer_first is not None, "its log-probabilities are kept"


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


def test_the_key_is_in_no_file_and_no_error(tmp_path, prior, fake):
    def quotes(body):
        return (400, "your key is sk-very-secret")

    with pytest.raises(ServerError) as error:
        tuned(tmp_path, prior, direct=fake(quotes, api_key="sk-very-secret", retries=0))
    assert "sk-very-secret" not in str(error.value)
    assert "sk-very-secret" not in (tmp_path / "my-gate.answers.jsonl").read_text()


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
    assert not (found.folder / "answer-first").exists()
    for report in ("README.md", "report.html"):
        assert f"0 of {N} answers came with log-probabilities" in (found.folder / report).read_text()


# --- collect -----------------------------------------------------------------------------------------------

ASKED = [{"id": str(i), "question": f"What is {i}?", "gold_answers": ["Answer"]} for i in range(40)]


class Model(ScriptedProxy):
    """Has a name and weights."""

    fingerprint = "w1"

    def __init__(self, name="one", weights="w1"):
        super().__init__()
        self.name = name
        self.fingerprint = weights
        self.asked = []

    def generate(self, prompt, values, **options):
        self.asked += [each["question"] for each in values]
        return super().generate(prompt, values, **options)


def test_collecting_goes_on_after_a_kill(tmp_path):
    given = {"index": index()}
    whole = collect(ASKED, Model(), tmp_path / "whole.jsonl", **given)
    (file,) = read_paired([whole])
    assert [example.question.id for example in file.examples] == [question["id"] for question in ASKED]
    assert all(example.known and example.question.draft.logprobs for example in file.examples)
    kept = answers_file(whole).read_text()
    out = tmp_path / "whole.again.jsonl"
    answers_file(out).write_text(kept[: len(kept) * 2 // 3])  # in the middle of a line
    model = Model()
    collect(ASKED, model, out, **given)
    assert out.read_text() == whole.read_text()
    assert 0 < len(model.asked) < 2 * len(ASKED)
    again = Model()
    collect(ASKED, again, out, **given)
    assert again.asked == []
    assert "rag_answer" not in collect(ASKED, Model(), tmp_path / "alone.jsonl").read_text()


def test_lines_that_hold_line_separators_are_collected(tmp_path):
    odd = {"question": "one\u2028é\x85two?", "gold_answers": ["é"]}
    out = collect([odd], Model(), tmp_path / "p.jsonl")
    kept = answers_file(out)
    whole = kept.read_bytes()
    kept.write_bytes(whole + whole[: whole.index("é".encode()) + 1])  # a kill inside a character
    collect([odd, ASKED[0]], Model(), out)
    (file,) = read_examples([out])
    assert [example.question.text for example in file.examples] == [odd["question"], "What is 0?"]


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
        ({"llm": Model("two")}, "'llm': 'one'.*'llm': 'two'"),
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
    with pytest.raises(ConfigurationError, match=named) as caught:
        collect(ASKED, out=out, **given | change)
    assert "another place" in caught.value.hint
    assert out.read_text() == before
    collect(ASKED[:4], out=out, **given)
    assert len(out.read_text().splitlines()) == 4


@pytest.mark.parametrize("line", ["5", '{"question": "no id"}'])
def test_a_file_of_something_else_is_left_alone(tmp_path, line):
    out = tmp_path / "notes.jsonl"
    out.write_text(line + "\n")
    with pytest.raises(DataFormatError, match="something else"):
        collect(ASKED, Model(), out)
    assert out.read_text() == line + "\n"


def test_kept_lines_that_no_run_wrote_are_refused(tmp_path):
    out = tmp_path / "out.jsonl"
    collect(ASKED[:2], Model(), out)
    with answers_file(out).open("a") as file:
        file.write(json.dumps({"arm": "direct", "question": "a?", "draft": 5}) + "\n")
    with pytest.raises(DataFormatError, match="line 4"):
        collect(ASKED, Model(), out)
