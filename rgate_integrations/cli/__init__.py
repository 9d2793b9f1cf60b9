"""The command line, ``rgate``: registers the commands, and prints typed errors with their hint.

Modules of this package hold a few commands each. Heavy imports happen inside the commands.
"""

from __future__ import annotations

import io
import logging
import os
import signal
import sys
from typing import Annotated

import typer

from rgate_integrations import __version__
from rgate_integrations.cli import ask, corpus, doctor, evaluate, serve, tune
from rgate_integrations.cli.terminal import print_log, say_error
from rgate_integrations.errors import RGateError

app = typer.Typer(
    name="rgate",
    help="Retrieval gates: decide whether to retrieve, make gates for your LLM, and serve them.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    """Print the version, with ``--version``."""
    if version:
        typer.echo(f"rgate {__version__}")
        raise typer.Exit


for command in (
    doctor.download,
    doctor.doctor,
    doctor.gates,
    ask.decide,
    ask.ask,
    corpus.profile,
    tune.ability,
    tune.tune,
    tune.train,
    evaluate.collect,
    evaluate.evaluate,
    evaluate.calibrate,
    evaluate.report,
    evaluate.monitor,
    serve.serve,
    serve.mcp,
):
    app.command()(command)
app.add_typer(corpus.index, name="index")


def main() -> None:
    """Run the command line; exit code 1 after an error, 2 for invalid options, 130 after Ctrl-C."""
    print_log(logging.WARNING)
    if isinstance(sys.stdout, io.TextIOWrapper):  # it may not be UTF-8, as in a pipe on Windows
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        app()
    except (RGateError, OSError) as error:
        say_error(error)
        if not isinstance(error, RGateError):  # what standard output could not write would fail again
            sys.stdout = None  # type: ignore[assignment]
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        # From here on, Ctrl-C while Python waits for threads ends the process without a traceback.
        typer.echo(nl=False)  # flushes; standard output may be closed
        signal.signal(signal.SIGINT, lambda *_: os._exit(130))
