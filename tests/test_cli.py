"""The command line, as a user runs it; what needs a model runs in this process, which has it loaded already."""

import json
import os
import re
from pathlib import Path
from unittest.mock import MagicMock, Mock

import pytest
import typer

from rgate_integrations.cli import app
from rgate_integrations.cli.terminal import DEFAULT_GATE, TOKEN
from rgate_integrations.engine.loading import load_gate
from rgate_integrations.errors import ConfigurationError, DataFormatError, IndexNotFoundError
from rgate_integrations.gates import remote
from rgate_integrations.models.catalog import CATALOGUE, READER
from rgate_integrations.runtime.files import write_folder
from tests.commands import printed, process, rgate
from tests.scripted_upstream import Shelf

NEVER = ("decide", "--gate", "constant:never")
ZORBLAT = (
    '{"id": "1", "title": "Zorblat", "text": "The capital of Zorblat is Quimbo."}\n'
    '{"id": "2", "title": "Bread", "text": "Bread\\nis baked."}\n'
)


def objects(done):
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_errors_have_a_hint_in_one_line_and_exit_code_one():
    done = process("decide", "--gate", "ikk", "who?")
    assert (done.returncode, done.stdout) == (1, b"")
    assert done.stderr == b"error: There is no gate named 'ikk'.\nhint: Did you mean ik?\n"
    assert "rgate index build" in rgate("index", "search", "/no/such/index", "q").exception.hint
    assert isinstance(rgate("report", "/no/such/result.json").exception, DataFormatError)


@pytest.mark.parametrize(
    "command",
    [
        "evaluate --data mine.jsonl --out ./mine.jsonl",
        "report r.json --html link.json",
        "collect --questions mine.jsonl --out mine.jsonl",
        "calibrate --data gate/mine.jsonl --out gate",
        "calibrate --data mine.jsonl --gate gate --out gate",
        "train --data gate/mine.jsonl --out gate",
        "tune --questions gate/mine.jsonl --out gate --update --llm x --index no-such",
        "profile --corpus gate/mine.jsonl --out gate",
    ],
)
def test_an_output_that_would_replace_an_input_is_refused_before_the_work(command, tmp_path, monkeypatch):
    """Regression: the result of `evaluate` replaced its data."""
    monkeypatch.chdir(tmp_path)
    files = {"mine.jsonl": "{}", "mine.answers.jsonl": "", "r.json": "{}", "gate/gate.json": "{}"}
    write_folder("w", files | {"gate/mine.jsonl": "{}"})
    monkeypatch.chdir("w")
    Path("link.json").symlink_to("r.json")
    before = {path: path.read_text() for path in Path().rglob("*.json*")}
    error = rgate(*command.split()).exception
    assert isinstance(error, ConfigurationError)
    assert "would replace the input" in error.message
    assert {path: path.read_text() for path in Path().rglob("*.json*")} == before


@pytest.mark.parametrize(
    "command",
    [
        "index build --corpus no-such.jsonl",
        "profile --corpus no-such.jsonl",
        "calibrate --data no-such.jsonl",
        "train --data no-such.jsonl",
        "train --data no-such.jsonl --gate ik",
        "ability --llm no-such",
    ],
)
def test_a_folder_with_other_files_is_refused_before_the_work(command, tmp_path):
    write_folder(tmp_path / "w", {"thesis.txt": "years of work"})
    error = rgate(*command.split(), "--out", tmp_path / "w").exception
    assert isinstance(error, ConfigurationError)
    assert "such as 'thesis.txt'" in error.message


@pytest.mark.parametrize(
    "command",
    [
        # A folder is no file to write.
        "evaluate --data d --out .",
        "report r --html .",
        "collect --questions q --out .",
        # Regression: a traceback, after the models had read all questions.
        "train --data d --out o --seed -1",
        f"train --data d --out o --seed {2**32}",
    ],
)
def test_a_value_that_an_option_cannot_have_is_refused_at_once(command):
    assert rgate(*command.split()).exit_code == 2


def test_every_command_knows_h_and_a_flag_means_one_thing_in_all():
    named = {}
    for name, command in typer.main.get_command(app).commands.items():
        named[name] = {flag for option in command.params for flag in option.opts}
        assert "Usage" in rgate(name, "-h").stdout
    assert rgate("--version").stdout.startswith("rgate ")
    # The length of an answer, the model that a gate reads, and a model's name on a server.
    assert "--answer-tokens" in named["collect"] & named["tune"]
    assert "--proxy" in named["train"] & named["decide"]
    assert {name for name, flags in named.items() if "--model" in flags} == {"ability", "collect", "tune"}
    for flag in ("--think", "--thinking-tokens", "--extra-body"):
        assert {name for name, flags in named.items() if flag in flags} == {"ability", "collect", "tune"}


def test_gates_lists_all_with_their_papers():
    assert {gate["name"] for gate in objects(rgate("gates", "--json"))} > {
        "ik",
        "slimplm",
        "adapt",
        "boundary",
    }
    assert "IK score" in rgate("gates").stdout
    assert (load_gate().gate.artifact, remote.TOKEN) == (DEFAULT_GATE, TOKEN)  # written twice


def test_decide_says_why_and_a_line_that_is_no_question_is_an_error_beside_the_others():
    reason = load_gate("constant:never").decide("who is Bo?").reason
    asked = "\ufeffwho is Bo?\nTraceback: KeyError  Why?\n\n"  # some editors write such a mark
    done = rgate(*NEVER, stdin=asked)
    lines = [line.strip() for line in done.stdout.splitlines()]
    skipped = ["skip     1.00  who is Bo?", reason, "skip     1.00  Traceback: KeyError Why?", reason]
    assert lines[:4] == skipped
    assert (done.exit_code, done.stderr) == (1, "2 of 3 skip retrieval.\n")
    found = objects(rgate(*NEVER, "--json", stdin=asked))
    assert [each["retrieve"] for each in found] == [False, False, True]
    assert (found[2]["question"], found[2]["error"]["type"]) == ("", "InvalidQuestionError")


def test_ctrl_c_while_the_command_finishes_is_no_traceback():
    finishing = "import atexit, os, signal; atexit.register(os.kill, os.getpid(), signal.SIGINT); "
    done = process(*NEVER, "who is Bo?", before=finishing)
    assert done.returncode == 130
    assert b"skip" in done.stdout
    assert b"Traceback" not in done.stderr


# --- what there is ------------------------------------------------------------------------------------------------


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("RGATE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def doctor():
    return {found["name"]: (found["state"], found["remedy"]) for found in objects(rgate("doctor", "--json"))}


def test_doctor_says_what_is_missing_and_the_command_that_brings_it(cache):
    found = doctor()
    page = rgate("doctor").stdout
    downloads = rgate("download").stdout
    for name in CATALOGUE:  # whole, to be copied, even in a narrow terminal
        assert found[name] == (
            "not downloaded; RGATE_OFFLINE=1 forbids downloads",
            f"rgate download {name}",
        )
        assert f"  rgate download {name}\n" in page
        assert name in downloads
    assert found["torch"][0].startswith("2.")
    assert str(cache) in found["cache"][0]
    assert not cache.exists()
    assert rgate("ask", "who?").exception.hint == "Run `rgate download qwen2.5-coder-0.5b-instruct`."


def test_doctor_advises_one_of_the_two_faiss(cache, monkeypatch):
    """Regression: beside faiss-cpu it advised to install faiss-gpu, but both together break the module."""
    assert [name for name in doctor() if name.startswith("faiss")] == ["faiss-cpu"]
    monkeypatch.setattr("rgate_integrations.cli.doctor.find_spec", lambda name: None)
    assert doctor()["faiss-gpu"] == ("not installed", 'pip install "rgate-integrations[gpu]"')


def test_doctor_says_what_first_use_would_fetch_and_what_is_cached(cache, online):
    assert doctor()[READER] == ("not downloaded; first use fetches it (93 MB)", f"rgate download {READER}")
    assert "(95 MB)" in doctor()["multilingual-e5-small"][0]
    assert not cache.exists()
    write_folder(cache / "all-minilm-l6-v2", {"rgate.json": "{}"})
    assert doctor()["all-minilm-l6-v2"] == ("downloaded", "")


def test_doctor_needs_no_access_to_the_cache(tmp_path, monkeypatch):
    """Regression: looking for a cache in a folder of another user ended it with a traceback."""
    monkeypatch.setenv("RGATE_CACHE", str(tmp_path / ("x" * 300)))  # fails for root, too
    assert str(tmp_path) in doctor()["cache"][0]
    (tmp_path / "file").touch()
    monkeypatch.setenv("RGATE_CACHE", str(tmp_path / "file"))
    assert "RGATE_CACHE" in doctor()["cache"][1]


# --- with models --------------------------------------------------------------------------------------------------


def test_ask_loads_its_llm_first_and_opens_the_index_for_the_first_question_that_needs_it(
    monkeypatch, scripted
):
    """Regressions: it built an index of 10,033 passages before any question; loading counted as the first answer."""
    monkeypatch.setattr("rgate_integrations.models.download.resolve_model", lambda name: name)
    monkeypatch.setattr("rgate_integrations.models.local.shared_proxy", lambda *given: scripted)
    monkeypatch.setattr(scripted, "truncate", lambda *given: scripted.calls.append("load"))
    assert isinstance(rgate("ask", "--index", "no-such-folder", "who?").exception, IndexNotFoundError)
    opened = Mock(return_value=Shelf())
    monkeypatch.setattr("rgate_integrations.cli.ask.open_index", opened)
    for gate, times in (("constant:never", 0), ("constant:always", 1)):
        scripted.calls.clear()
        assert rgate("ask", "--gate", gate, "who is Bo?", "what is Bo?").exit_code == 0
        assert (scripted.calls, opened.call_count) == (["load", "generate", "generate"], times)


def test_an_index_is_built_into_a_folder_whose_parent_may_not_be_written_to(tmp_path, monkeypatch):
    """Regression: refused, as was the current folder. A volume that is mounted in a container is such a folder."""
    build = MagicMock()
    monkeypatch.setattr("rgate_integrations.index.PassageIndex.build", build)
    monkeypatch.setattr(os, "access", lambda path, mode: str(path) != str(tmp_path))
    (tmp_path / "corpus.jsonl").write_text(ZORBLAT)
    (tmp_path / "volume").mkdir()
    monkeypatch.chdir(tmp_path / "volume")
    for name in (tmp_path / "volume", "."):
        assert rgate("index", "build", "--corpus", tmp_path / "corpus.jsonl", "--out", name).exit_code == 0
        build.return_value.save.assert_called_with(Path(name))
    missing = rgate("index", "build", "--corpus", "no-such.jsonl", "--out", tmp_path / "new").exception
    assert "not a folder that you may write to" in missing.message


@pytest.mark.skipif(not Path("/dev/fd").exists(), reason="no names for pipes")
def test_an_index_of_a_corpus_that_comes_through_a_pipe_is_not_empty(tmp_path, monkeypatch):
    """Regression: the corpus was read twice, so an index of no passages replaced an earlier one, without an error."""
    build = MagicMock()
    monkeypatch.setattr("rgate_integrations.index.PassageIndex.build", build)
    end, start = os.pipe()
    os.write(start, ZORBLAT.encode())
    os.close(start)
    with os.fdopen(end):
        printed("index", "build", "--corpus", f"/dev/fd/{end}", "--out", tmp_path / "index")
    assert [passage.id for passage in build.call_args.args[0]] == ["1", "2"]


@pytest.mark.model
def test_decide_with_the_real_proxy_judges_what_the_named_llm_knows(smollm2):
    asked = "Who was the second husband of Queen Mary of Scots?"
    (unknown,) = objects(rgate("decide", "--json", asked))
    (strong,) = objects(rgate("decide", "--json", "--llm-name", "gpt-4o", asked))
    assert strong["p_known"] > unknown["p_known"]
    assert strong["llm"].startswith("gpt-4o")


@pytest.mark.model
def test_an_own_index_is_built_and_searched_for_what_is_unknown(smollm2, embedder_model, tmp_path):
    index, question = tmp_path / "index", "What is the capital of Zorblat?"
    (tmp_path / "corpus.jsonl").write_text(ZORBLAT)
    assert rgate("index", "build", "--corpus", tmp_path / "corpus.jsonl", "--out", index).exit_code == 0
    listed = rgate("index", "search", index, "zorblat capital").stdout
    assert "  Zorblat. The capital" in listed
    assert "  Bread. Bread is baked." in listed, "a passage with line feeds is listed on one line"
    options = ["--index", index, "--llm", "smollm2-135m-instruct", "-k", "1", "--gate", "prompt"]
    retrieving = [*options, "--threshold", "1.01"]
    skipped = rgate("ask", *options, "--threshold", "0", "What is bread?").stdout
    assert re.search(r"^skip .*^answer +\S", skipped, re.DOTALL | re.MULTILINE)
    assert not re.search("^(found|searched)", skipped, re.MULTILINE)
    done = rgate("ask", *retrieving, stdin=f"{question}\n\n")
    lines = ["retrieve ", f"searched       {re.escape(question)}", "found .*Zorblat. The", "answer .*Quimbo"]
    times = [f"time           {stage} [0-9]+ ms" for stage in ("gate", "search", "answer")]
    assert re.search(".*^".join([*lines, *times, "error"]), done.stdout, re.DOTALL | re.MULTILINE)
    assert done.exit_code == 1
