"""Shared by the commands: options, functions that interpret them, LLMs, and functions that print safely."""

from __future__ import annotations

import importlib
import json
import logging
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from rgate_integrations.errors import ConfigurationError, RGateError, first_line

if TYPE_CHECKING:
    from rgate_integrations.models.base import LanguageModel
    from rgate_integrations.models.request_options import RequestOptions
    from rgate_integrations.tuning.calibration import Policy

DEFAULT_GATE = "default"  # the same as in loading.py, which imports too much for a quick --help
DEFAULT_LLM = "qwen2.5-coder-0.5b-instruct"
KEY = "RGATE_API_KEY"
"""Environment variable with the key of the LLM's server."""
JUDGE_KEY = "RGATE_JUDGE_API_KEY"
"""Environment variable with the key of the judge's server."""
KEPT_ANSWERS = "Finished answers are kept. Run the same command to resume."
"""Message of commands that ask an LLM, after Ctrl-C."""
NOT_WRITTEN = "Nothing was written or changed. Run the same command to start again."
"""Message of commands that write only at the end, after Ctrl-C."""
TOKEN = "RGATE_TOKEN"  # noqa: S105  the variable's name; as in gates/remote.py

# --- options -----------------------------------------------------------------------------------------------------

QuestionArguments = Annotated[
    list[str] | None, typer.Argument(help="Questions; read from standard input if none are given.")
]
GateName = Annotated[
    str, typer.Option("--gate", help="Gate: a name (see rgate gates), a folder, or the URL of rgate serve.")
]
ThresholdOption = Annotated[
    float | None,
    typer.Option(
        "--threshold", min=0.0, help="Retrieve if P(known) is below this; the gate's own by default."
    ),
]
ProxyName = Annotated[
    str | None,
    typer.Option("--proxy", help="Model that the gate reads: name (rgate download), folder or Hub id."),
]
JudgedName = Annotated[
    str,
    typer.Option("--llm-name", help="LLM whose knowledge is judged: its name, or a folder of rgate ability."),
]
IndexFolder = Annotated[
    Path | None,
    typer.Option("--index", help="Folder of rgate index build; encyclopaedia articles by default."),
]
CorpusFolders = Annotated[
    list[Path] | None,
    typer.Option("--corpus", help="Folder of a corpus's profile (rgate profile); may be repeated."),
]
PassageCount = Annotated[int, typer.Option("-k", min=1, help="Passages per question.")]
AnswerTokens = Annotated[int, typer.Option(min=1, help="Maximum length of an answer in tokens.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object per line.")]
Data = Annotated[
    list[Path], typer.Option("--data", help="JSONL of labelled questions (rgate collect); may be repeated.")
]
MaxLossOption = Annotated[
    float | None,
    typer.Option("--max-loss", help="Maximum loss of accuracy versus always retrieving; 0.02 by default."),
]
BudgetOption = Annotated[
    float | None,
    typer.Option("--budget", help="Instead of --max-loss: maximum share of questions to retrieve for."),
]
AnsweringLLM = Annotated[
    str,
    typer.Option(
        "--llm",
        help=f"URL of an OpenAI-compatible server (key: {KEY}); PROVIDER:NAME, such as openai:gpt-5, through "
        "LangChain; or a local model: name (rgate download), folder or Hub id.",
    ),
]
ModelOnServer = Annotated[str | None, typer.Option("--model", help="Name of the model on the server.")]
Judge = Annotated[
    str | None,
    typer.Option(help=f"Model that judges: NAME, PROVIDER:NAME, or NAME@URL on a server (key: {JUDGE_KEY})."),
]
Think = Annotated[
    Literal["off", "low", "as-is"],
    typer.Option(help="How much the LLM should think first; as-is sends no setting."),
]
ExtraBody = Annotated[
    str,
    typer.Option(help="JSON object with additional fields of each request, as your application sends them."),
]
ThinkingTokens = Annotated[
    int, typer.Option(min=0, help="Additional tokens for an answer if the LLM thinks first.")
]


def make_policy(max_loss: float | None, budget: float | None) -> Policy | None:
    """Return the policy that chooses a threshold, from ``--max-loss`` and ``--budget``; None if neither is set.

    Raises:
        ConfigurationError: Both options are set, or one is out of range.
    """
    from rgate_integrations.tuning import Budget, MaxLoss

    if budget is None:
        return None if max_loss is None else MaxLoss(max_loss)
    if max_loss is not None:
        raise ConfigurationError("--max-loss and --budget cannot be combined.", hint="Omit one of them.")
    return Budget(budget)


def load_object(name: str) -> Any:
    """Import and return the object with a name of the form MODULE:OBJECT.

    Raises:
        ConfigurationError: The object cannot be imported.
    """
    module, _, attribute = name.partition(":")
    sys.path.insert(0, os.getcwd())  # the current folder comes first, as with uvicorn
    try:
        return getattr(importlib.import_module(module), attribute)
    except (Exception, SystemExit) as error:  # a module may raise anything
        raise ConfigurationError(
            f"{name!r} cannot be imported: {type(error).__name__}: {first_line(error)}",
            hint="Write it as MODULE:OBJECT, and check that Python can import the module from this folder.",
        ) from error


# --- LLMs -------------------------------------------------------------------------------------------------------

_TOKENS_PER_SECOND = 10  # speed of the slowest LLM that the timeout allows for
_PROVIDER = re.compile(r"([a-z][a-z_]+):(.+)")


def request_options(think: Literal["off", "low", "as-is"], extra_body: str, tokens: int) -> RequestOptions:
    """Return the options of requests to an LLM.

    Args:
        think: The value of ``--think``.
        extra_body: The value of ``--extra-body``.
        tokens: The value of ``--thinking-tokens``: additional tokens for an answer if the LLM thinks first.

    Raises:
        ConfigurationError: ``extra_body`` is not a JSON object.
    """
    from rgate_integrations.models.request_options import RequestOptions
    from rgate_integrations.runtime.files import parse_json

    try:
        return RequestOptions(think, tokens, parse_json(extra_body))
    except ValueError as error:
        problem = str(getattr(error, "message", error)).removesuffix(".")  # without a hint
        raise ConfigurationError(
            f"--extra-body {extra_body[:100]!r} is not a JSON object: {problem}.",
            hint='Pass a JSON object such as {"top_p": 0.9}.',
        ) from None


def open_llm(
    llm: str, model: str | None, concurrency: int, options: RequestOptions, *, key: str = KEY
) -> LanguageModel:
    """Return the LLM of an application: on a server, at a provider, or a local one.

    Args:
        llm: The value of ``--llm``.
        model: Name of the model on a server, otherwise unused.
        concurrency: Maximum concurrent requests to a server.
        options: Options of the requests.
        key: Environment variable with the key of a server.

    Raises:
        ConfigurationError: The name of the server's model is missing, the URL or provider is invalid, or the LLM is
            local and ``options`` sets how much it thinks or an extra body.
        MissingDependencyError: LangChain or the provider's package is not installed.
    """
    if llm.startswith(("http://", "https://")):
        if model is None:
            raise ConfigurationError(
                "A server's URL was given without the name of a model.",
                hint="For --llm URL, add --model with the name that the server gives the LLM. For a judge, write "
                "--judge NAME@URL.",
            )
        from rgate_integrations.models.remote import RemoteModel

        # A thinking LLM may send nothing for a long time, so the timeout grows with its tokens.
        return RemoteModel(
            llm,
            model,
            api_key=os.environ.get(key) or None,
            timeout=60.0 + options.thinking_tokens / _TOKENS_PER_SECOND,
            max_concurrency=concurrency,
            options=options,
        )
    provider = _PROVIDER.fullmatch(llm)
    if provider is not None:
        from rgate_integrations.langchain.provider_model import ProviderModel

        return ProviderModel(provider[1], provider[2], options)
    if options.facts:
        raise ConfigurationError(
            f"A local model accepts neither --think nor --extra-body, and --llm {llm!r} is local.",
            hint="Omit them, or pass the URL of a server or PROVIDER:NAME as --llm.",
        )
    from rgate_integrations.models.local import shared_proxy

    return shared_proxy(llm)


def open_judge(judge: str | None, concurrency: int, thinking_tokens: int) -> LanguageModel | None:
    """Return the model that judges answers, from ``NAME``, ``PROVIDER:NAME`` or ``NAME@URL``; None without a judge.

    Raises the errors of `open_llm`, and of `resolve_model` for a local model.
    """
    if judge is None:
        return None
    name, at, address = judge.partition("@http")
    llm, model = (f"http{address}", name) if at else (name, None)
    if not at and _PROVIDER.fullmatch(name) is None:
        from rgate_integrations.models.download import resolve_model

        resolve_model(
            name
        )  # downloads the model or raises now, rather than after the calls of the answering LLM
    return open_llm(llm, model, concurrency, request_options("as-is", "{}", thinking_tokens), key=JUDGE_KEY)


# --- text --------------------------------------------------------------------------------------------------------

# Control characters, of which ESC and CSI begin commands to the terminal; line separators; marks that reverse the
# direction of text; lone surrogates, which cannot be encoded.
_COMMANDS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def say(text: str = "", *, err: bool = False, **style: Any) -> None:
    """Print text from any source, without characters that control the terminal.

    Args:
        text: The text.
        err: Whether to print to standard error, which is for everything except results.
        **style: Style for ``typer.secho``, such as ``bold=True``.
    """
    # Otherwise, it depends on whether the stream is a terminal. See https://no-color.org.
    color = False if os.environ.get("NO_COLOR") else None
    typer.secho(_COMMANDS.sub("", text), err=err, color=color, **style)


def shorten(text: str, width: int) -> str:
    """Return a text on one line, which ends in "…" if the text has more than ``width`` characters."""
    line = " ".join(text.split())
    return line if len(line) <= width else f"{line[: width - 1].rstrip()}…"


def say_table(names: Sequence[str], rows: Sequence[Sequence[str]], *, as_json: bool = False) -> None:
    """Print rows as a table with column names, or each row as a JSON object."""
    if as_json:
        for row in rows:
            print_json(dict(zip(names, row, strict=True)))
        return
    # Not one of rich's tables, which would wrap or truncate commands that users want to copy.
    widths = [max(map(len, column)) for column in zip(names, *rows, strict=True)]
    for number, row in enumerate([names, *rows]):
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        say("  ".join(cells).rstrip(), bold=number == 0)


def say_saved(folder: Path) -> None:
    """Print how to use a saved gate."""
    from rgate_integrations.gates.registry import gate_argument

    name = gate_argument(folder)
    say(f'Saved. Use it as load_gate("{name}") or --gate {shlex.quote(name)}.')


def say_error(error: RGateError | OSError) -> None:
    """Print an error and its hint."""
    say(f"error: {getattr(error, 'message', f'Reading or writing failed: {error}.')}", err=True, fg="red")
    if hint := getattr(error, "hint", "Check the disk, and where standard output goes."):
        say(f"hint: {hint}", err=True)


def print_json(value: Any) -> None:
    """Print a JSON value on one line, in ASCII, with all control characters escaped."""
    typer.echo(json.dumps(value).replace("\x7f", "\\u007f"))


class _PlainFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return _COMMANDS.sub("", super().format(record))


def print_log(level: int, form: str = "%(message)s") -> None:
    """Print log messages of a level and above to standard error, from now on."""
    handler = logging.StreamHandler()
    handler.setFormatter(_PlainFormatter(form))
    logging.basicConfig(level=level, handlers=[handler], force=True)
    for library in ("httpx", "httpcore", "mcp"):  # these libraries log URLs, and names that clients send
        logging.getLogger(library).setLevel(logging.WARNING)


@contextmanager
def progress_bar(label: str = "", *, stopped: str) -> Iterator[Callable[..., None]]:
    """Show a progress bar during a ``with`` block, and yield the callback that moves it.

    The callback takes ``(label, done, total)``. If standard error is not a terminal, nothing is shown.

    Args:
        label: The current activity. If empty, the bar appears at the first call of the callback.
        stopped: Message after Ctrl-C: what is kept, and how to resume.
    """
    from rich.console import Console
    from rich.progress import Progress

    # Without a terminal, such as in a log, rich would print an empty line.
    bar = Progress(console=Console(stderr=True), transient=True, disable=not Console(stderr=True).is_terminal)
    task = bar.add_task(label, total=None)

    def report(label: str, done: int, total: int) -> None:
        bar.start()
        bar.update(task, description=label, completed=done, total=total)

    if label:
        bar.start()
    try:
        yield report
    except KeyboardInterrupt:
        bar.stop()  # so that the message gets a line of its own
        say(f"Stopped. {stopped}", err=True)
        raise
    finally:
        bar.stop()
