"""The command line, as a user runs it."""

import json
import subprocess
import sys

import pytest

RGATE = [sys.executable, "-c", "from rgate_integrations.cli import main; main()"]


def rgate(*arguments, stdin=""):
    return subprocess.run([*RGATE, *arguments], input=stdin, capture_output=True, text=True, check=False)


def test_gates_lists_all_with_their_papers():
    done = rgate("gates", "--json")
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0
    assert len(found) >= 18
    assert {"ik", "slimplm", "adapt", "boundary"} <= {g["name"] for g in found}
    assert "IK score" in rgate("gates").stdout


def test_errors_have_a_hint_and_exit_code_one():
    done = rgate("decide", "--gate", "ikk", "who?")
    assert done.returncode == 1
    assert "error: There is no gate named 'ikk'." in done.stderr
    assert "Did you mean ik" in done.stderr
    assert "Traceback" not in done.stderr
    assert rgate("--version").stdout.startswith("rgate ")
    missing = rgate("index", "search", "/no/such/index", "q")
    assert missing.returncode == 1
    assert "rgate index build" in missing.stderr


def test_decide_streams_and_goes_on_after_an_error():
    done = rgate("decide", "--gate", "constant:never", "--json", stdin="who?\n\nwhat?\n")
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["question"] for line in lines] == ["who?", "", "what?"]
    assert lines[1]["error"]["type"] == "InvalidQuestionError"
    assert lines[1]["error"]["hint"]
    assert [line["retrieve"] for line in lines] == [False, True, False]
    assert done.returncode == 1
    assert rgate("decide", "--gate", "constant:never", "who?").returncode == 0


def test_decide_reads_json_lines():
    lines = '{"question": "who?", "popularity": 5000}\n{"question": "what?", "popularity": 3}\n{not json\n'
    done = rgate("decide", "--gate", "popularity", "--json", stdin=lines)
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [f["retrieve"] for f in found] == [False, True, True]
    assert "error" in found[2]
    assert found[2]["question"] == "{not json"


def test_doctor_reports_and_says_how_to_mend(tmp_path, monkeypatch):
    monkeypatch.setenv("RGATE_CACHE", str(tmp_path / "cache"))
    found = json.loads(rgate("doctor", "--json").stdout)
    assert found["cache"]["entries"]["smollm2-135m-instruct"] is False
    assert found["missing"]["smollm2-135m-instruct"] == "rgate download smollm2-135m-instruct"
    assert found["packages"]["torch"]
    assert "rgate download" in rgate("doctor").stdout
    assert "smollm2-135m-instruct" in rgate("download").stdout


@pytest.mark.model
def test_decide_with_the_real_proxy(smollm2):
    done = rgate("decide", "--json", stdin="who wrote hamlet?\n\nwhere was Aarno Maliniemi born?\n")
    first, second, third = (json.loads(line) for line in done.stdout.splitlines())
    assert "error" in second
    for found in (first, third):
        assert 0 <= found["p_known"] <= 1
        assert found["cost"]["model_calls"] >= 1
    assert done.returncode == 1


@pytest.mark.model
def test_ask_with_an_own_index(smollm2, minilm, tmp_path):
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text(
        '{"id": "1", "title": "Zorblat", "text": "The capital of Zorblat is Quimbo."}\n'
        '{"id": "2", "title": "Bread", "text": "Bread is baked."}\n'
    )
    built = rgate("index", "build", "--corpus", str(corpus), "--out", str(tmp_path / "i"))
    assert built.returncode == 0, built.stderr
    found = json.loads(rgate("index", "search", str(tmp_path / "i"), "zorblat capital", "--json").stdout)
    assert found["passages"][0]["title"] == "Zorblat"
    options = [
        "--index",
        str(tmp_path / "i"),
        "--llm",
        "smollm2-135m-instruct",
        "--threshold",
        "1.01",
        "-k",
        "1",
    ]
    done = rgate("ask", "--json", *options, "What is the capital of Zorblat?")
    answered = json.loads(done.stdout)
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
    assert answered["passages"][0]["title"] == "Zorblat"
    assert "Quimbo" in answered["answer"]
    skipped = json.loads(rgate("ask", "--json", *options[:-4], "--threshold", "0", "What is bread?").stdout)
    assert skipped["passages"] == []
    assert skipped["queries"] == []
    assert skipped["answer"]
    shown = rgate("ask", *options, "What is the capital of Zorblat?").stdout
    assert "retrieve" in shown
    assert "Quimbo" in shown
