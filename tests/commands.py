"""The command line, run in this process."""

import logging
import subprocess
import sys
from functools import cache
from unittest.mock import patch

from typer.main import get_command
from typer.testing import CliRunner

from rgate_integrations.cli import app

# By default each run makes all commands of their functions again, which takes 40 ms.
commands_made_once = patch("typer.testing._get_command", cache(get_command))


@commands_made_once
def rgate(*arguments, stdin=""):
    """Run a command, whatever becomes of it; what it does to the process's log is undone."""
    handlers, level = logging.root.handlers[:], logging.root.level
    logging.root.handlers = []  # basicConfig closes those that it replaces
    try:
        return CliRunner().invoke(app, [str(each) for each in arguments], input=stdin)
    finally:
        logging.root.handlers = handlers
        logging.root.setLevel(level)


def printed(*arguments, stdin=""):
    """Run a command that succeeds; returns what it prints."""
    done = rgate(*arguments, stdin=stdin)
    assert done.exit_code == 0, (done.output, done.exception)
    return done.output


def process(*arguments, before="", **options):
    """Run a command in a process of its own; its streams are bytes, and its standard input is ``input=``."""
    command = [sys.executable, "-c", f"{before}from rgate_integrations.cli import main; main()", *arguments]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.run(command, check=False, **streams | options)
