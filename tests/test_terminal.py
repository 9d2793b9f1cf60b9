"""What the commands print: text of models, passages and files is text, and never a command to the terminal."""

import io
import json
import re
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.panel import Panel
from rich.progress import Progress
from rich.table import Table
from rich.text import Text
from typer.testing import CliRunner

from rgate_integrations.cli.ask import Answered, panel
from rgate_integrations.cli.main import app
from rgate_integrations.cli.output import Terminal, print_error, print_json
from rgate_integrations.decision import Decision, Draft
from rgate_integrations.errors import RGateError
from rgate_integrations.index import Passage
from rgate_integrations.index.retriever import Hit

# Clears the screen, sets the title, writes to the clipboard, the 8-bit CSI, rings, goes back, turns writing around.
HOSTILE = "a\x1b[2Jb\x1b]0;title\x07c\x1b]52;c;cm0=\x07d\x9b31me\x07f\x08\rg\u202eh\x00i\x7fj\ud800k"
COMMANDS = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e\ud800]")


def printed(*objects, **options):
    """What reaches a terminal without colours, as which the style of rich itself would not hide anything."""
    terminal = Terminal(width=100)
    terminal.file = io.StringIO()
    terminal.print(*objects, **options)
    return terminal.file.getvalue()


@pytest.mark.parametrize(
    "shown",
    [HOSTILE, Text(HOSTILE), Panel(HOSTILE, title=Text(HOSTILE)), Table(HOSTILE, title=Text(HOSTILE))],
)
@pytest.mark.parametrize("options", [{}, {"markup": False}, {"soft_wrap": True}, {"style": "bold"}])
def test_nothing_commands_the_terminal(shown, options):
    out = printed(shown, **options)
    assert not COMMANDS.search(out)
    assert "a[2Jb" in out.replace("\n", "")


def test_a_layout_stays_what_it_is():
    lines = printed(Panel(Text(HOSTILE), width=60)).splitlines()
    assert {len(line) for line in lines} == {60}


def test_colours_and_progress_are_still_there():
    terminal = Terminal(width=40)
    terminal.file = io.StringIO()
    terminal._force_terminal, terminal._color_system = True, 1
    terminal.print("red", style="red")
    with Progress(console=terminal) as progress:
        progress.update(progress.add_task("work", total=1), completed=1)
    assert "\x1b[31mred\x1b[0m" in terminal.file.getvalue()
    assert "work" in terminal.file.getvalue()


def test_an_answered_question_is_text():
    decision = Decision(
        question=HOSTILE.replace("\ud800", ""),
        retrieve=True,
        p_known=0.1,
        threshold=0.5,
        reason=HOSTILE,
        draft=Draft(text=HOSTILE),
        warnings=(HOSTILE,),
    )
    hit = Hit(Passage("1", HOSTILE, title=HOSTILE), 0.5)
    out = printed(panel(Answered(decision, [HOSTILE], [hit], HOSTILE)))
    assert not COMMANDS.search(out)


def test_an_error_is_text(capsys):
    print_error(RGateError(HOSTILE, hint=HOSTILE))
    err = capsys.readouterr().err
    assert not COMMANDS.search(err)
    assert "[2J" in err


@settings(deadline=None)
@given(st.text() | st.lists(st.text()) | st.dictionaries(st.text(), st.text()))
def test_json_is_escaped_and_means_the_same(value):
    with pytest.MonkeyPatch.context() as patch:
        out = io.StringIO()
        patch.setattr(sys, "stdout", out)
        print_json(value)
    (line, end) = out.getvalue().split("\n")
    assert json.loads(line) == value
    assert not COMMANDS.search(line)
    assert end == ""


# --- what `rgate decide` reads -----------------------------------------------------------------------------


def decide(*lines, as_json=True):
    command = ["decide", "--gate", "popularity", *(["--json"] if as_json else [])]
    return CliRunner().invoke(app, command, input="\n".join(lines) + "\n")


@pytest.mark.parametrize("as_json", [True, False])
@pytest.mark.parametrize(
    "line",
    [
        '{"question": 5}',
        '{"question": null}',
        '{"question": ["who?"]}',
        '{"question": {"a": 1}}',
        '{"question": "who?", "draft": 5}',
        '{"question": "who?", "popularity": "much"}',
        '{"question": "who?", "popularity": %s}' % ("9" * 400),
        "{" * 5_000,
        '{"question": ' + "[" * 100_000,
        '{"question": "\\ud800"}',
        "\x1b[2J",
    ],
)
def test_a_line_that_is_no_question_is_an_error_of_its_own(line, as_json):
    done = decide(
        '{"question": "who?", "popularity": 5000}',
        line,
        '{"question": "x?", "popularity": 3}',
        as_json=as_json,
    )
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    lines = done.stdout.splitlines()
    assert not COMMANDS.search(done.stdout.replace("\n", ""))
    if as_json:
        assert len(lines) == 3
        found = [json.loads(each) for each in lines]
        assert [each["retrieve"] for each in found] == [False, True, True]
    else:
        assert "who?" in lines[0]
        assert "x?" in done.stdout.partition(lines[0])[2]


def test_standard_input_that_is_not_utf_8_is_said():
    command = [
        sys.executable,
        "-X",
        "utf8=0",
        "-c",
        "from rgate_integrations.cli import main; main()",
        "decide",
    ]
    done = subprocess.run(
        [*command, "--gate", "constant:always"],
        input=b"who?\ncaf\xe9\n",
        capture_output=True,
        check=False,
        env={"PATH": "", "PYTHONPATH": ":".join(sys.path), "PYTHONIOENCODING": "utf-8:strict"},
    )
    assert done.returncode == 1
    assert b"Standard input has bytes that are not utf-8" in done.stderr
    assert b"Traceback" not in done.stderr
