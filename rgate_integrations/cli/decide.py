"""``rgate decide``: decisions only, batch by batch, from arguments or standard input."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable, Iterator
from typing import Annotated, Any

import typer

from rgate_integrations.cli.options import (
    DEFAULT_GATE,
    AsJson,
    GateName,
    ProxyName,
    QuestionArguments,
    ThresholdOption,
)
from rgate_integrations.cli.output import Terminal, print_json
from rgate_integrations.decision import Decision
from rgate_integrations.errors import DataFormatError
from rgate_integrations.files import parsed_json


def decide(
    questions: QuestionArguments = None,
    gate: GateName = DEFAULT_GATE,
    threshold: ThresholdOption = None,
    proxy: ProxyName = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Questions decided together.")] = 16,
    as_json: AsJson = False,
) -> None:
    """Decide for each question whether to retrieve, and say why. The exit code is 1 if one could not be judged.

    A line of standard input may also be a JSON object with "question" and, for gates that use them, "draft"
    and "popularity".
    """
    from rgate_integrations.loading import load_gate

    loaded = load_gate(gate, proxy=proxy)
    console = Terminal()
    asked = skipped = 0
    failed = False
    for lines in batched(typed_questions(questions), batch_size):
        records = [_record(line) for line in lines]
        decisions = loaded.decide_batch(
            [record["question"] for record in records],
            threshold=threshold,
            drafts=[record.get("draft") for record in records],
            popularity=[record.get("popularity") for record in records],
        )
        for record, decision in zip(records, decisions, strict=True):
            failed = failed or decision.error is not None
            asked += 1
            skipped += not decision.retrieve
            if as_json:
                print_json(decision_as_json(record["question"], decision))
            else:
                _print(console, record["question"], decision)
    if asked > 1:
        Terminal(stderr=True).print(f"{skipped} of {asked} skip retrieval.")
    if failed:
        raise typer.Exit(1)


def typed_questions(arguments: list[str] | None) -> Iterator[str]:
    """Yield the questions given as arguments, or else the lines of standard input.

    Raises:
        DataFormatError: A line is not in the encoding of the terminal, which is mostly UTF-8.
    """
    if arguments:
        yield from arguments
        return
    if sys.stdin.isatty():
        typer.echo("Type one question a line, then Ctrl-D.", err=True)
    try:
        for line in sys.stdin:
            yield line.rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise DataFormatError(
            f"Standard input has bytes that are not {error.encoding}.", hint="Give it as UTF-8."
        ) from error


def batched(items: Iterable[str], size: int) -> Iterator[list[str]]:
    """Yield lists of at most ``size`` items."""
    iterator = iter(items)
    while batch := list(itertools.islice(iterator, size)):
        yield batch


def decision_as_json(asked: object, decision: Decision) -> dict[str, Any]:
    """Return a decision, or its error, as JSON values; ``question`` is the question as it was asked."""
    if decision.error is not None:
        return {"question": asked, "retrieve": True, "error": decision.error.model_dump()}
    found: dict[str, Any] = decision.model_dump(mode="json", exclude={"draft", "error"})
    found["draft"] = None if decision.draft is None else decision.draft.text
    return found


def _record(line: str) -> dict[str, Any]:
    """Read a line: a JSON object with a question, or the question itself."""
    if line.lstrip().startswith("{"):
        try:
            found = parsed_json(line)
        except ValueError:
            return {"question": line}
        if isinstance(found, dict) and "question" in found:
            return found
    return {"question": line}


def _print(console: Terminal, asked: object, decision: Decision) -> None:
    if decision.error is not None:
        console.print("error   ", style="red", end=" ")
        console.print(f"{str(asked)[:80]!r}: {decision.error.message} {decision.error.hint}", markup=False)
        return
    if decision.retrieve:
        console.print("retrieve", style="yellow", end=" ")
    else:
        console.print("skip    ", style="green", end=" ")
    console.print(f"{decision.p_known:.2f}  {decision.question[:120]}", markup=False, soft_wrap=True)
    console.print(f"               {decision.reason}", style="dim", markup=False, soft_wrap=True)
