"""What is asked and kept: both arms, failures, kills, full disks, servers. Nothing is asked twice."""

import threading
from types import SimpleNamespace

import pytest

from rgate_integrations import Draft
from rgate_integrations.errors import (
    ConfigurationError,
    DataFormatError,
    EvidenceError,
    LockedError,
    ServerError,
)
from rgate_integrations.index import Passage, PassageIndex
from rgate_integrations.index.hybrid import HybridIndex
from rgate_integrations.models.remote import RemoteModel
from rgate_integrations.runtime.files import locked
from rgate_integrations.tuning import collect, read_paired
from rgate_integrations.tuning.arms import ModelArm, read_answer
from rgate_integrations.tuning.collection import STOP_AFTER, answers_file
from tests.fake_server import Fake
from tests.patience import PATIENCE
from tests.test_hybrid import TEXTS
from tests.test_index import Letters
from tests.tuning_parts import (
    Direct,
    Model,
    N,
    by_number,
    number,
    questions,
    retrieve,
    says_what_it_knows,
    tuned,
)


def index(texts=TEXTS):
    return PassageIndex.build([Passage(i, t) for i, t in texts.items()], Letters())


# --- tune --------------------------------------------------------------------------------------------------


def test_nothing_is_asked_twice_but_failures_and_update_adds_questions(tmp_path, prior):
    failing = Direct(fails=["what is number 3?", "what is number 4?"])
    found = tuned(tmp_path, prior, direct=failing)
    assert (found.failed, len(failing.asked), len(found.question.p)) == (2, N, N - 2)
    assert "2 calls failed" in (found.folder / "README.md").read_text()
    for given, asked in (
        (questions(), failing.fails),
        (questions(80), [q["question"] for q in questions(80)[N:]]),
    ):
        direct = Direct()
        found = tuned(tmp_path, prior, given, direct=direct, update=True)
        assert (found.failed, len(found.question.p)) == (0, len(given))
        assert sorted(direct.asked) == asked


def test_a_gate_without_its_answers_is_not_updated(tmp_path, prior):
    """Regression: a gate of the new questions alone took its place, without a word."""
    tuned(tmp_path, prior)
    (tmp_path / "my-gate.answers.jsonl").unlink()
    with pytest.raises(DataFormatError, match=r"file of answers, .*my-gate\.answers\.jsonl', is missing"):
        tuned(tmp_path, prior, questions(40), direct=pytest.fail, update=True)


def test_who_fails_ten_times_in_a_row_is_asked_no_more_and_the_same_run_goes_on(tmp_path, prior):
    direct = Direct(fails=[asked["question"] for asked in questions()[20:]])
    with pytest.raises(ServerError, match="Giving up"):
        tuned(tmp_path, prior, direct=direct, options={"concurrency": 1})
    assert len(direct.asked) == 20 + STOP_AFTER
    # What was answered before is kept, and is not asked again.
    assert not (tmp_path / "my-gate").exists()
    again = Direct()
    tuned(tmp_path, prior, direct=again)
    assert len(again.asked) == N - 20


def test_two_runs_for_one_gate_are_refused(tmp_path, prior):
    """Regression: the second to end replaced the first's gate, without ``update``."""
    with locked(tmp_path / "my-gate.answers.jsonl"):
        with pytest.raises(LockedError):
            tuned(tmp_path, prior)
        # Regression: `collect` appended to the same answers, and asked again what was being asked.
        with pytest.raises(LockedError):
            collect(ASKED, Model(), tmp_path / "my-gate.jsonl")


def test_several_calls_are_under_way_at_once(tmp_path, prior):
    both = threading.Barrier(2, timeout=PATIENCE)

    def meet(question):
        if number(question) in (1, 2):  # the very first call is made alone
            both.wait()
        return says_what_it_knows(question)

    assert tuned(tmp_path, prior, direct=Direct(says=meet), options={"concurrency": 2}).failed == 0


# --- what answers ------------------------------------------------------------------------------------------


def test_answers_of_frameworks_are_read():
    response = SimpleNamespace(response="Paris")
    for given in ("Paris", {"answer": "Paris"}, {"result": response}, response):
        assert read_answer(given) == Draft(text="Paris", source="llm")
    for given in (None, 3, {}, {"question": "x"}):
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

    with pytest.raises(ServerError, match="Giving up"):
        tuned(tmp_path, prior, direct=fake(breaks, retries=0))
    assert tuned(tmp_path, prior, direct=fake(breaks, retries=0)).failed == 1
    # Regression: a run in which only this call was missing gave up.
    assert tuned(tmp_path, prior, direct=fake(breaks, retries=0), update=True).failed == 1


def test_without_log_probabilities_there_is_one_gate_and_the_report_says_why(tmp_path, prior):
    found = tuned(tmp_path, prior, direct=Direct(says=lambda question: says_what_it_knows(question).text))
    assert found.answer_first is None
    assert f"0 of {N} answers came with log-probabilities" in (found.folder / "README.md").read_text()


def test_a_server_that_moved_answers_for_the_same_model(tmp_path, prior, fake):
    """Regression: after a restart on another port all answers were paid for again."""
    tuned(tmp_path, prior, direct=fake(by_number))
    moved = RemoteModel("http://127.0.0.1:9/v1", "m")  # nothing listens there
    assert tuned(tmp_path, prior, direct=moved, update=True).failed == 0
    for other in (RemoteModel(moved.url, "another"), ModelArm(moved, tokens=5)):
        with pytest.raises(ConfigurationError, match="were made with"):
            tuned(tmp_path, prior, direct=other, update=True)


# --- collect -----------------------------------------------------------------------------------------------

ASKED = [{"id": str(i), "question": f"What is {i}?", "gold_answers": ["Answer"]} for i in range(40)]


def test_collecting_goes_on_after_a_kill(tmp_path):
    asked = [*ASKED, {"id": "odd", "question": "one\u2028é\x85two?", "gold_answers": ["Answer"]}]
    whole = collect(asked, Model(), tmp_path / "whole.jsonl", index=index())
    (file,) = read_paired(str(whole))  # one path is not a list of letters
    assert [example.question.id for example in file.examples] == [question["id"] for question in asked]
    assert all(example.known and example.question.draft.logprobs for example in file.examples)
    kept = answers_file(whole).read_bytes()
    out = tmp_path / "again.jsonl"
    answers_file(out).write_bytes(kept[: kept.index("é".encode()) + 1])  # inside a character
    model = Model()
    assert collect(asked, model, out, index=index()).read_text() == whole.read_text()
    assert 0 < len(model.asked) < 2 * len(asked)
    assert "rag_answer" not in collect(ASKED, Model(), tmp_path / "alone.jsonl").read_text()


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
            "answers must not be mixed",
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


@pytest.mark.parametrize(
    "content", ["one line of notes", '{"question": "who?"}\n{"question": "what?"}', "5\n"]
)
@pytest.mark.parametrize("name", ["out.jsonl", "out.answers.jsonl"])
def test_a_file_of_something_else_is_left_alone(tmp_path, name, content):
    """The file is looked at before it is cut: a torn last line is ours only where the lines before it are."""
    (tmp_path / name).write_text(content)
    with pytest.raises(DataFormatError, match=r"is not one that this run|something other|is missing"):
        collect(ASKED, Model(), tmp_path / "out.jsonl")
    assert (tmp_path / name).read_text() == content
