"""The command line, as a user runs it; what needs a model runs in this process, which has it loaded already."""

import json
import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

from rgate_integrations.cli.main import app
from rgate_integrations.cli.options import DEFAULT_GATE
from rgate_integrations.cli.output import print_error
from rgate_integrations.engine.loading import load_gate
from rgate_integrations.errors import ConfigurationError, DataFormatError, IndexNotFoundError, ModelLoadError

RGATE = [sys.executable, "-c", "from rgate_integrations.cli import main; main()"]
ZORBLAT = (
    '{"id": "1", "title": "Zorblat", "text": "The capital of Zorblat is Quimbo."}\n'
    '{"id": "2", "title": "Bread", "text": "Bread is baked."}\n'
)


def rgate(*arguments, stdin=""):
    """Run a command in this process."""
    return CliRunner().invoke(app, [str(a) for a in arguments], input=stdin)


def objects(done):
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_errors_have_a_hint_and_exit_code_one():
    done = subprocess.run(
        [*RGATE, "decide", "--gate", "ikk", "who?"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "error: There is no gate named 'ikk'." in done.stderr
    assert "Did you mean ik" in done.stderr
    assert "Traceback" not in done.stderr
    assert rgate("--version").stdout.startswith("rgate ")
    missing = rgate("index", "search", "/no/such/index", "q").exception
    assert "rgate index build" in missing.hint


def test_gates_lists_all_with_their_papers():
    done = rgate("gates", "--json")
    found = objects(done)
    assert done.exit_code == 0
    assert len(found) >= 16
    assert {"ik", "slimplm", "adapt", "boundary"} <= {g["name"] for g in found}
    assert "IK score" in rgate("gates").stdout
    assert load_gate().gate.artifact == DEFAULT_GATE


def test_decide_streams_and_goes_on_after_an_error():
    done = rgate("decide", "--gate", "constant:never", "--json", stdin="who?\n\nwhat?\n")
    lines = objects(done)
    assert [line["question"] for line in lines] == ["who?", "", "what?"]
    assert lines[1]["error"]["type"] == "InvalidQuestionError"
    assert lines[1]["error"]["hint"]
    assert [line["retrieve"] for line in lines] == [False, True, False]
    assert done.exit_code == 1
    assert rgate("decide", "--gate", "constant:never", "who?").exit_code == 0


def test_decide_says_why_and_how_many_skip():
    done = rgate("decide", "--gate", "constant:never", stdin="who?\nwhat?\n")
    reason = load_gate("constant:never").decide("who?").reason
    lines = [line.strip() for line in done.stdout.splitlines()]
    assert lines == ["skip     1.00  who?", reason, "skip     1.00  what?", reason]
    assert done.stderr == "2 of 2 skip retrieval.\n"


def test_decide_hands_on_the_turns_before_a_message():
    line = {"question": "And in Italy?", "history": ["user: How many customers do we have?"]}
    done = rgate("decide", "--gate", "constant:never", stdin=json.dumps(line))
    assert done.stdout.startswith(
        "retrieve"
    )  # this gate reads no turns, so what follows on them is retrieved for


def test_decide_shows_a_question_of_several_lines_in_one():
    done = rgate("decide", "--gate", "constant:never", "Traceback:\n  KeyError\n\nWhy?")
    assert "Traceback: KeyError Why?" in done.stdout


def test_decide_reads_json_lines():
    lines = '{"question": "who?", "popularity": 5000}\n{"question": "what?", "popularity": 3}\n{not json\n'
    found = objects(rgate("decide", "--gate", "popularity", "--json", stdin=lines))
    assert [f["retrieve"] for f in found] == [False, True, True]
    assert "error" in found[2]
    assert found[2]["question"] == "{not json"


def test_doctor_reports_and_says_how_to_mend(tmp_path, monkeypatch):
    monkeypatch.setenv("RGATE_CACHE", str(tmp_path / "cache"))
    (found,) = objects(rgate("doctor", "--json"))
    assert found["cache"]["entries"]["smollm2-135m-instruct"] is False
    assert found["missing"]["smollm2-135m-instruct"] == "rgate download smollm2-135m-instruct"
    assert found["packages"]["torch"]
    assert "rgate download" in rgate("doctor").stdout
    assert "smollm2-135m-instruct" in rgate("download").stdout


def test_what_is_not_downloaded_is_said(tmp_path, monkeypatch, scripted):
    from rich.console import Console

    from rgate_integrations.cli.options import DEFAULT_LLM, open_index, open_llm

    monkeypatch.setenv("RGATE_CACHE", str(tmp_path / "cache"))
    notices = Console(record=True, quiet=True)
    assert open_llm(DEFAULT_LLM, scripted, notices) is scripted, "the proxy answers in its place"
    with pytest.raises(ModelLoadError):
        open_llm("smollm2-135m-instruct", scripted, notices)
    with pytest.raises(ModelLoadError, match="no index") as caught:
        open_index(None)
    assert "rgate download encyclopedia-leads" in caught.value.hint


@pytest.mark.parametrize(("gate", "opened"), [("constant:never", 0), ("constant:always", 1)])
def test_ask_opens_the_index_for_the_first_question_that_needs_it(monkeypatch, scripted, gate, opened):
    """It built one of 10,033 passages first, for "What is the capital of France?" too."""
    found = []

    class Index:
        def search(self, queries, k):
            return [[] for _ in queries]

    def open_index(folder):
        found.append(folder)
        return Index()

    monkeypatch.setattr("rgate_integrations.cli.ask.open_index", open_index)
    monkeypatch.setattr("rgate_integrations.cli.ask.open_llm", lambda *given: scripted)
    done = rgate("ask", "--gate", gate, "who?", "what?")
    assert (done.exit_code, len(found)) == (0, opened), done.output
    missing = rgate("ask", "--index", "no-such-folder", "who?")
    assert isinstance(missing.exception, IndexNotFoundError)


def test_an_error_of_the_questions_ends_collecting_before_a_model_is_loaded(tmp_path):
    (tmp_path / "q.jsonl").write_text('{"question": "who?"}\n')
    done = rgate("collect", "--questions", tmp_path / "q.jsonl", "--out", tmp_path / "out.jsonl")
    assert "'who?' has no gold_answers" in str(done.exception)
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.model
def test_decide_with_the_real_proxy(smollm2):
    done = rgate("decide", "--json", stdin="who wrote hamlet?\n\nwhere was Aarno Maliniemi born?\n")
    first, second, third = objects(done)
    assert "error" in second
    for found in (first, third):
        assert 0 <= found["p_known"] <= 1
        assert found["cost"]["model_calls"] >= 1
    assert done.exit_code == 1


@pytest.mark.model
def test_decide_judges_what_the_named_llm_knows():
    asked = ("--json", "Who was the second person to walk on the moon?")
    unknown, strong = (
        objects(rgate("decide", *named, *asked))[0] for named in ((), ("--llm-name", "gpt-4o"))
    )
    assert strong["p_known"] > unknown["p_known"]
    assert strong["llm"].startswith("gpt-4o")


@pytest.fixture(scope="module")
def zorblat(minilm, tmp_path_factory):
    """The folder of a small index, built by the command."""
    folder = tmp_path_factory.mktemp("zorblat")
    (folder / "corpus.jsonl").write_text(ZORBLAT)
    built = rgate("index", "build", "--corpus", folder / "corpus.jsonl", "--out", folder / "index")
    assert built.exit_code == 0, built.output
    return folder / "index"


@pytest.mark.model
def test_searching_an_own_index(zorblat):
    (found,) = objects(rgate("index", "search", zorblat, "zorblat capital", "--json"))
    assert found["passages"][0]["title"] == "Zorblat"
    assert "Zorblat: The capital" in rgate("index", "search", zorblat, "zorblat capital").stdout
    assert isinstance(
        rgate("index", "search", zorblat, "q", "-k", "0").exception, SystemExit | ConfigurationError
    )


@pytest.mark.model
def test_ask_with_an_own_index(smollm2, zorblat):
    options = ["--index", zorblat, "--llm", "smollm2-135m-instruct", "-k", "1", "--gate", "prompt"]
    retrieving = [*options, "--threshold", "1.01"]
    (answered,) = objects(rgate("ask", "--json", *retrieving, "What is the capital of Zorblat?"))
    keys = {
        "question",
        "retrieve",
        "p_known",
        "threshold",
        "draft",
        "queries",
        "passages",
        "answer",
        "timings",
    }
    assert keys <= set(answered)
    assert answered["retrieve"] is True
    assert [p["title"] for p in answered["passages"]] == ["Zorblat"]
    assert "Quimbo" in answered["answer"]
    (skipped,) = objects(rgate("ask", "--json", *options, "--threshold", "0", "What is bread?"))
    assert skipped["passages"] == []
    assert skipped["queries"] == []
    assert skipped["answer"]
    done = rgate("ask", *retrieving, stdin="What is the capital of Zorblat?\n\n")
    assert "retrieve" in done.stdout
    assert "Quimbo" in done.stdout
    assert "error" in done.stdout
    assert done.exit_code == 1


@pytest.mark.model
def test_ask_answers_first_with_the_default_gate(smollm2, zorblat):
    options = ["--index", zorblat, "--llm", "smollm2-135m-instruct", "-k", "1"]
    asked = ["Which is longer, the Nile or the Rhine?", "What is the capital of France?"]
    answered, sure = objects(rgate("ask", "--json", *options, "--threshold", "0", *asked))
    assert sure["retrieve"] is False
    assert sure["answer"].startswith(sure["draft"])
    assert "error" not in answered
    assert answered["retrieve"] is False
    assert answered["answer"].startswith(answered["draft"])


def test_a_line_that_is_no_question_is_an_error_with_its_number():
    """It was judged as a question, and skipped with P(known) 0.98."""
    lines = 'who?\n{"q": 1}\n{"question": "what?"}\n{not json\nnot json{\n{"question": "where?"}\n'
    done = rgate("decide", "--gate", "constant:never", "--json", stdin=lines)
    found = objects(done)
    assert [each["retrieve"] for each in found] == [False, True, False, True, True, False]
    wrong = [each["error"]["message"] for each in found if "error" in each]
    assert [message[:14] for message in wrong] == ["Line 2: no que", "Line 4: not JS", "Line 5: not JS"]
    assert done.exit_code == 1
    plain = rgate("decide", "--gate", "constant:never", stdin='{"q": 1}\n')
    assert plain.exit_code == 1
    assert "Line 1: no question. Each line is" in plain.stdout


def test_ctrl_c_while_the_command_finishes_is_no_traceback():
    finishing = "import atexit, os, signal; atexit.register(os.kill, os.getpid(), signal.SIGINT)"
    command = [*RGATE[:2], f"{finishing}; {RGATE[2]}", "decide", "--gate", "constant:never", "who?"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 130
    assert "skip" in done.stdout
    assert "Traceback" not in done.stderr


def test_a_hint_stays_one_line_where_nothing_is_shown_on_a_terminal(capsys):
    command = "rgate download " + " ".join(f"model-number-{number}" for number in range(20))
    print_error(ModelLoadError("Something is missing. " * 10, hint=command))
    message, hint = capsys.readouterr().err.splitlines()
    assert message.startswith("error: Something")
    assert hint == f"hint:  {command}"


def test_every_command_knows_h():
    for command in ((), ("decide",), ("index", "search")):
        done = rgate(*command, "-h")
        assert (done.exit_code, "Usage" in done.stdout) == (0, True)


def test_quiet_prints_results_and_errors_only_and_verbose_the_log(tmp_path):
    asked = ["decide", "--gate", "constant:never", "who?", "what?"]
    assert rgate(*asked).stderr == "2 of 2 skip retrieval.\n"
    quiet = rgate("-q", *asked)
    assert (quiet.stderr, quiet.stdout) == ("", rgate(*asked).stdout)
    done = subprocess.run(
        [*RGATE, "-q", "decide", "--gate", "ikk", "who?"], capture_output=True, text=True, check=False
    )
    assert "error: There is no gate named" in done.stderr
    # The first line of a log of the package: a gate that cannot judge.
    popular = ["decide", "--gate", "popularity", "who\x1b[2J?"]
    done = subprocess.run([*RGATE, "-v", *popular], capture_output=True, text=True, check=False)
    assert "The gate 'popularity' failed for 1 of 1 questions" in done.stderr
    assert "\x1b[2J" not in done.stderr


def test_a_flag_means_one_thing_in_every_command():
    commands = typer.main.get_command(app).commands
    named = {
        name: {flag for option in command.params for flag in option.opts}
        for name, command in commands.items()
    }
    # The length of an answer, and the model that a gate reads, as elsewhere.
    assert "--answer-tokens" in named["collect"] & named["tune"]
    assert "--tokens" not in named["collect"]
    assert "--proxy" in named["train"] & named["decide"]
    # A model's name on a server.
    assert {name for name, flags in named.items() if "--model" in flags} == {"ability", "tune"}


def test_a_report_of_a_missing_file_is_a_typed_error(tmp_path):
    done = rgate("report", tmp_path / "none.json")
    assert isinstance(done.exception, DataFormatError)
    assert "none.json' cannot be read" in str(done.exception)
