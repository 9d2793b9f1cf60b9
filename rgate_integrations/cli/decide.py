"""``rgate decide``: decisions only, batch by batch, from arguments or standard input."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, TypeVar

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
from rgate_integrations.decision import Decision, Failure
from rgate_integrations.errors import DataFormatError
from rgate_integrations.runtime.files import parse_json

Item = TypeVar("Item")


def decide(
    questions: QuestionArguments = None,
    gate: GateName = DEFAULT_GATE,
    threshold: ThresholdOption = None,
    proxy: ProxyName = None,
    llm_name: Annotated[str, typer.Option(help="The LLM whose knowledge is judged.")] = "",
    batch_size: Annotated[int, typer.Option(min=1, help="Questions decided together.")] = 16,
    rules: Annotated[
        Path | None,
        typer.Option(help='JSON file of rules: {"always": ["an example", {"pattern": "..."}], "never": []}.'),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Decide for each question whether to retrieve, and say why. The exit code is 1 if one could not be judged.

    A line of standard input may also be a JSON object with "question" and, for gates that use them, "draft",
    "popularity" and "history", a list of turns; then every line after it must be one. A line that is none is an
    error, and the others go on.
    """
    from rgate_integrations.engine.loading import load_gate
    from rgate_integrations.gates.rules import Rules

    own = Rules() if rules is None else Rules.read(rules)
    loaded = load_gate(gate, llm_name=llm_name, proxy=proxy, always=own.always, never=own.never)
    console = Terminal()
    asked = skipped = 0
    failed = False
    for records in batched(_records(typed_questions(questions)), batch_size):
        good = [record for record in records if "error" not in record]
        decisions = iter(
            loaded.decide_batch(
                [record["question"] for record in good],
                threshold=threshold,
                drafts=[record.get("draft") for record in good],
                popularity=[record.get("popularity") for record in good],
                histories=[record.get("history") for record in good],
            )
        )
        for record in records:
            decision = _unread(record) if "error" in record else next(decisions)
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


def batched(items: Iterable[Item], size: int) -> Iterator[list[Item]]:
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


def _records(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Read lines: JSON objects with a question, or questions themselves. What is neither has an ``error``."""
    objects = False
    for number, line in enumerate(lines, start=1):
        objects = objects or line.lstrip().startswith("{")
        if not objects:
            yield {"question": line}
            continue
        try:
            found = parse_json(line)
        except ValueError as error:
            yield {"question": line, "error": f"Line {number}: not JSON ({error})."}
            continue
        if isinstance(found, dict) and "question" in found:
            yield {name: found.get(name) for name in ("question", "draft", "popularity", "history")}
        else:
            yield {"question": line, "error": f"Line {number}: no question."}


def _unread(record: dict[str, Any]) -> Decision:
    """Return what is printed for a line that could not be read."""
    hint = 'Each line is {"question": "…"}, or each is a question.'
    failure = Failure.of(DataFormatError(record["error"], hint=hint))
    return Decision(question=record["question"], retrieve=True, p_known=0.0, error=failure)


def _print(console: Terminal, asked: object, decision: Decision) -> None:
    if decision.error is not None:
        console.print("error   ", style="red", end=" ")
        console.print(
            f"{str(asked)[:80]!r}: {decision.error.message} {decision.error.hint}",
            markup=False,
            soft_wrap=True,
        )
        return
    if decision.retrieve:
        console.print("retrieve", style="yellow", end=" ")
    else:
        console.print("skip    ", style="green", end=" ")
    question = " ".join(decision.question.split())
    console.print(f"{decision.p_known:.2f}  {question[:120]}", markup=False, soft_wrap=True)
    console.print(f"               {decision.reason}", style="dim", markup=False, soft_wrap=True)
