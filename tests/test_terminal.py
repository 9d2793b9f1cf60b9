"""What the commands print: text of models, passages and files is text, and never a command to the terminal."""

import io
import json
import logging
import os
import re
import sys
from contextlib import redirect_stdout
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer import Exit

from rgate_integrations.cli.ask import decide
from rgate_integrations.cli.terminal import (
    load_object,
    print_json,
    print_log,
    progress_bar,
    say,
    say_error,
    say_table,
    shorten,
)
from rgate_integrations.errors import ConfigurationError, RGateError
from tests.commands import process

# Clears the screen, sets the title, writes to the clipboard, the 8-bit CSI, rings, goes back, turns writing around.
HOSTILE = "a\x1b[2Jb\x1b]0;title\x07c\x1b]52;c;cm0=\x07d\x9b31me\x07f\x08\rg\u202eh\x00i\x7fj\ud800k"
COMMANDS = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e\ud800]")


ALWAYS = ("decide", "--gate", "constant:always")
ENVIRONMENT = {"PATH": "", "PYTHONPATH": ":".join(sys.path)}


def log(text):
    """Log as the package does, to what the commands print."""
    with patch.object(logging.getLogger(), "handlers", []):
        print_log(logging.WARNING)
        logging.getLogger("rgate_integrations").warning("%s", text)


@pytest.mark.parametrize(
    "show",
    [
        say,
        lambda text: say(text, err=True, bold=True, fg="red"),
        lambda text: say_table((text, text), [(text, text)]),
        lambda text: say_error(RGateError(text, hint=text)),
        log,
    ],
    ids=["line", "style", "table", "error", "log"],
)
def test_nothing_commands_the_terminal(show, capsys):
    show(HOSTILE)
    printed = "".join(capsys.readouterr())
    assert not COMMANDS.search(printed)
    assert "a[2Jb" in printed


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(("value", "printed"), [("", "\x1b[31mred\x1b[0m\n"), ("1", "red\n")])
def test_a_terminal_has_no_colours_if_its_user_wants_none(value, printed, monkeypatch):
    """Regression: NO_COLOR was ignored."""
    monkeypatch.setenv("NO_COLOR", value)
    with redirect_stdout(Terminal()) as out:
        say("red", fg="red")
    assert out.getvalue() == printed


def test_a_log_gets_no_progress_bar(capsys):
    """Regression: it got an empty line."""
    with progress_bar("asking", stopped="Nothing is lost.") as report:
        report("asking", 1, 2)
    assert capsys.readouterr() == ("", "")
    with patch.object(sys, "stderr", None), progress_bar("asking", stopped="Nothing is lost."):
        pass  # as with 2>&-


@given(st.text() | st.lists(st.text()) | st.dictionaries(st.text(), st.text()))
def test_json_is_escaped_and_means_the_same(value):
    with redirect_stdout(io.StringIO()) as out:
        print_json(value)
    printed = out.getvalue()
    assert json.loads(printed) == value
    assert not COMMANDS.search(printed)
    assert printed.index("\n") == len(printed) - 1


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("import os; x = os.environ['NO_SUCH_SETTING']", "KeyError: 'NO_SUCH_SETTING'"),
        ("def f(:", "SyntaxError: invalid syntax"),
        ("raise RuntimeError('no database')", "RuntimeError: no database"),
        ("raise SystemExit('no settings')", "SystemExit: no settings"),
        ("", "AttributeError: .* no attribute 'x'"),
    ],
)
def test_an_object_whose_module_fails_is_said_with_the_reason(content, why, tmp_path, monkeypatch):
    (tmp_path / "failing_app.py").write_text(content)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.delitem(sys.modules, "failing_app", raising=False)
    with pytest.raises(ConfigurationError, match=f"'failing_app:x' cannot be imported: {why}"):
        load_object("failing_app:x")


@pytest.mark.parametrize(
    "locale",
    [{"PYTHONIOENCODING": "utf-8:strict"}, {"LC_ALL": "C"}, {"LC_ALL": "POSIX"}, {"LC_ALL": "C.UTF-8"}],
    ids=str,
)
def test_questions_that_are_not_utf_8_are_refused_in_each_locale(locale):
    """Regression: in the locales of containers, "caf\xe9" in Latin-1 was judged as "caf?"."""
    done = process(*ALWAYS, input=b"who?\ncaf\xe9\n", env=ENVIRONMENT | locale)
    assert done.returncode == 1
    assert b"Standard input is not UTF-8 in line 2" in done.stderr
    assert b"caf" not in done.stdout
    assert b"Traceback" not in done.stderr


def test_what_standard_output_cannot_encode_is_escaped():
    """Regression: with the encoding of a pipe on Windows, a Japanese question was a traceback."""
    done = process(*ALWAYS, "今日 Ä", env=ENVIRONMENT | {"PYTHONIOENCODING": "cp1252"})
    assert (done.returncode, done.stderr) == (0, b"")
    assert rb"\u4eca\u65e5 " + "Ä".encode("cp1252") in done.stdout


def test_a_long_text_ends_in_an_ellipsis():
    assert shorten("a\n passage", 9) == "a passage"
    assert shorten("a\n passages", 9) == "a passag…"
    assert shorten("a passa es", 9) == "a passa…"


class Dialogue(io.RawIOBase):
    """A program that sends a line, or a part of one, when everything before has been answered."""

    def __init__(self, parts, answers):
        super().__init__()
        self.parts, self.answers, self.log = list(parts), answers, []

    def readable(self):
        return True

    def readinto(self, buffer):
        self.log.append(self.answers())
        part = self.parts.pop(0) if self.parts else b""
        buffer[: len(part)] = part
        return len(part)


def test_a_program_that_waits_for_each_decision_gets_it(capsys, monkeypatch):
    """Regression: the first decision came when sixteen lines had been sent, so that such a program waited forever."""
    parts = [b"\xef\xbb\xbfwho?\n", b"whe", b"re?\r\nwhy\xc3", b"\xa9?\r", b"\n\nwhat?\rhow?"]
    program = Dialogue(
        parts, lambda: [json.loads(line)["question"] for line in capsys.readouterr().out.splitlines()]
    )
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BufferedReader(program)))
    with pytest.raises(Exit):  # the empty line
        decide(gate="constant:always", as_json=True)
    assert program.log == [[], ["who?"], [], ["where?"], [], ["whyé?", "", "what?"]]
    assert program.answers() == ["how?"]


@pytest.mark.parametrize("stream", ["stdin", "stdout", "stderr"])
def test_a_closed_stream_is_no_failure(stream):
    """Regression: as a job started with ``<&-`` or ``>&-``, a command ended in a traceback after its work."""
    done = process(*ALWAYS, before=f"import sys; sys.{stream} = None; ", input=b"who?\nwhere?\n")
    assert done.returncode == 0
    assert b"Traceback" not in done.stderr
    assert (b"who?" in done.stdout) == (stream == "stderr")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="the system has no such device")
@pytest.mark.parametrize("arguments", [("gates",), (*ALWAYS, "--json"), ("--help",)])
def test_a_full_disk_behind_standard_output_is_an_error_with_a_hint(arguments):
    """Regression: a traceback, and another one at the end of the process."""
    with open("/dev/full", "wb") as full:
        done = process(*arguments, input=b"who?\n", stdout=full)
    assert done.returncode == 1
    error, hint = done.stderr.splitlines()
    assert error == b"error: Reading or writing failed: [Errno 28] No space left on device."
    assert hint.startswith(b"hint: Check the disk")


def test_after_an_error_a_program_that_called_the_command_line_still_prints():
    """Regression: its standard output was gone."""
    last = "import atexit; atexit.register(print, 'still here'); "
    done = process("decide", "--gate", "nobody's", before=last)
    assert done.stderr.startswith(b"error: There is no gate named")
    assert done.stdout == b"still here\n"
