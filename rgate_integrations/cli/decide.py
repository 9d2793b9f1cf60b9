"""``rgate decide``: decisions only, batch by batch, from arguments or standard input."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterable, Iterator
from typing import Annotated, Any

import typer
from rich.console import Console

from rgate_integrations.decision import Decision

_Threshold = Annotated[float | None, typer.Option(min=0.0, help="Retrieve iff p_known is below it.")]
_Proxy = Annotated[str | None, typer.Option(help="Proxy model: catalogue name, folder or Hub id.")]


def read_questions(arguments: list[str] | None) -> Iterator[str]:
    """Yield the questions given as arguments, or else the lines of standard input."""
    if arguments:
        yield from arguments
        return
    if sys.stdin.isatty():
        typer.echo("Type one question a line, then Ctrl-D.", err=True)
    for line in sys.stdin:
        yield line.rstrip("\r\n")


def batched(items: Iterable[str], size: int) -> Iterator[list[str]]:
    """Yield lists of at most ``size`` items."""
    iterator = iter(items)
    while batch := list(itertools.islice(iterator, size)):
        yield batch


def decide(
    questions: Annotated[
        list[str] | None, typer.Argument(help="Questions; standard input when none.")
    ] = None,
    gate: Annotated[str, typer.Option(help="Gate: a name (see rgate gates) or a folder.")] = "default",
    threshold: _Threshold = None,
    proxy: _Proxy = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Questions decided together.")] = 16,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a line.")] = False,
) -> None:
    """Decide for each question whether to retrieve. Exit code 1 if any could not be judged.

    A line of standard input may also be a JSON object with "question" and, for gates that use them, "draft"
    and "popularity".
    """
    from rgate_integrations.loading import load_gate

    loaded = load_gate(gate, proxy=proxy)
    console = Console(highlight=False)
    failed = False
    for lines in batched(read_questions(questions), batch_size):
        records = [_record(line) for line in lines]
        batch = [r["question"] for r in records]
        decisions = loaded.decide_batch(
            batch,
            threshold=threshold,
            drafts=[r.get("draft") for r in records],
            popularity=[r.get("popularity") for r in records],
        )
        for asked, decision in zip(batch, decisions, strict=True):
            failed = failed or decision.error is not None
            if as_json:
                typer.echo(json.dumps(as_object(asked, decision), ensure_ascii=False))
            else:
                _print(console, asked, decision)
    if failed:
        raise typer.Exit(1)


def _record(line: str) -> dict[str, Any]:
    """Read a line: a JSON object with a question, or the question itself."""
    if line.lstrip().startswith("{"):
        try:
            found = json.loads(line)
        except ValueError:
            return {"question": line}
        if isinstance(found, dict) and "question" in found:
            return found
    return {"question": line}


def as_object(asked: str, decision: Decision) -> dict[str, Any]:
    """Return a decision, or its error, as JSON values; ``question`` is the question as it was asked."""
    if decision.error is not None:
        return {"question": asked, "retrieve": True, "error": decision.error.model_dump()}
    found: dict[str, Any] = decision.model_dump(mode="json", exclude={"draft", "error"})
    draft = decision.draft
    return {**found, "draft": None if draft is None else draft.text}


def _print(console: Console, asked: str, decision: Decision) -> None:
    if decision.error is not None:
        console.print("error   ", style="red", end=" ")
        console.print(f"{asked[:80]!r}: {decision.error.message} {decision.error.hint}", markup=False)
        return
    style, word = ("yellow", "retrieve") if decision.retrieve else ("green", "skip    ")
    console.print(word, style=style, end=" ")
    console.print(f"{decision.p_known:.2f}  {decision.question[:120]}", markup=False, soft_wrap=True)
