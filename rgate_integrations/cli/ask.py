"""``rgate decide`` and ``rgate ask``: decisions, and answers with what was searched and found for them."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rgate_integrations.cli.index import open_index
from rgate_integrations.cli.terminal import (
    DEFAULT_GATE,
    DEFAULT_LLM,
    AsJson,
    GateName,
    IndexFolder,
    JudgedName,
    LLMName,
    PassageCount,
    ProxyName,
    QuestionArguments,
    ThresholdOption,
    hit_as_json,
    print_json,
    say,
)
from rgate_integrations.decision import Decision, Failure
from rgate_integrations.errors import DataFormatError
from rgate_integrations.runtime.files import parse_json

if TYPE_CHECKING:
    from rgate_integrations.index import PassageIndex
    from rgate_integrations.index.retriever import Hit
    from rgate_integrations.models.base import Proxy

_BATCH = 16


def decide(
    questions: QuestionArguments = None,
    gate: GateName = DEFAULT_GATE,
    threshold: ThresholdOption = None,
    proxy: ProxyName = None,
    llm_name: JudgedName = "",
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
    asked = skipped = failed = 0
    records = _read_records(_read_questions(questions))
    while batch := list(itertools.islice(records, _BATCH)):
        decisions = loaded.decide_batch(
            [record["question"] for record in batch],
            threshold=threshold,
            drafts=[record.get("draft") for record in batch],
            popularity=[record.get("popularity") for record in batch],
            histories=[record.get("history") for record in batch],
        )
        for record, decision in zip(batch, decisions, strict=True):
            if "error" in record:
                decision = _unread(record)
            asked += 1
            skipped += not decision.retrieve
            failed += decision.error is not None
            if as_json:
                print_json(_as_json(record["question"], decision))
            else:
                _print_decision(record["question"], decision)
    if asked > 1:
        say(f"{skipped} of {asked} skip retrieval.", err=True)
    if failed:
        raise typer.Exit(1)


def ask(
    questions: QuestionArguments = None,
    gate: GateName = DEFAULT_GATE,
    threshold: ThresholdOption = None,
    proxy: ProxyName = None,
    llm: LLMName = DEFAULT_LLM,
    index: IndexFolder = None,
    k: PassageCount = 3,
    as_json: AsJson = False,
) -> None:
    """Ask questions: retrieve only for those that the LLM does not know, and say how long each step took."""
    from rgate_integrations.engine.loading import load_gate
    from rgate_integrations.models.download import resolve_model
    from rgate_integrations.models.local import shared_proxy

    resolve_model(llm)  # raises now, and not after a search, if it is not downloaded
    answering = shared_proxy(llm)
    loaded = load_gate(gate, proxy=proxy)
    # That of the demo is opened for the first question that needs it: it may have to be built, which takes minutes.
    searched = cache(partial(open_index, index))
    if index is not None:
        searched()
    loaded.decide("Is this a question?")  # loads the model, so that the first question's time is its own
    failed = False
    for question in _read_questions(questions):
        began = time.perf_counter()
        (decision,) = loaded.decide_batch([question], threshold=threshold)
        decided = time.perf_counter()
        failed = failed or decision.error is not None
        told = _answer(decision, answering, searched, k)
        told["timings"] = {"gate": round((decided - began) * 1e3, 1), **told["timings"]}
        if as_json:
            print_json({**_as_json(question, decision), **told})
            continue
        _print_decision(question, decision)
        for query in told["queries"]:
            say(f"searched       {query}")
        for passage in told["passages"]:
            say(f"found     {passage['score']:.2f} {passage['title']}: {passage['text'][:110]}")
        say(f"answer         {told['answer']}", bold=True)
        stages = [f"{stage} {milliseconds:.0f} ms" for stage, milliseconds in told["timings"].items()]
        say(f"time           {', '.join(stages)}", dim=True)
    if failed:
        raise typer.Exit(1)


def _answer(decision: Decision, llm: Proxy, index: Callable[[], PassageIndex], k: int) -> dict[str, Any]:
    """Search if needed, and answer; returns queries, passages, the answer and milliseconds as JSON values."""
    from rgate_integrations.answering.claims import plan_queries
    from rgate_integrations.answering.requests import write_answers
    from rgate_integrations.index.hybrid import fuse
    from rgate_integrations.index.retriever import passage_id

    hits: list[Hit] = []
    answer = ""
    began = time.perf_counter()
    (plan,) = plan_queries([decision])
    queries = [query.text for query in plan.queries if query.text]
    if queries:
        hits = fuse(index().search(queries, k), key=passage_id, k=k)
    found = time.perf_counter()
    if decision.question:
        (written,) = write_answers(llm, [decision.question], [[hit.passage for hit in hits]])
        answer = written.text
    answered = time.perf_counter()
    timings = {"search": round((found - began) * 1e3, 1), "answer": round((answered - found) * 1e3, 1)}
    return {
        "queries": queries,
        "passages": [hit_as_json(hit) for hit in hits],
        "answer": answer,
        "timings": timings,
    }


def _read_questions(arguments: list[str] | None) -> Iterator[str]:
    """Yield the questions given as arguments, or else the lines of standard input.

    Raises:
        DataFormatError: A line is not in the encoding of the terminal, which is mostly UTF-8.
    """
    if arguments:
        yield from arguments
        return
    if sys.stdin.isatty():
        say("Type one question a line, then Ctrl-D.", err=True)
    try:
        for line in sys.stdin:
            yield line.rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise DataFormatError(
            f"Standard input has bytes that are not {error.encoding}.", hint="Give it as UTF-8."
        ) from error


def _read_records(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Read lines: JSON objects with a question, or questions themselves. What is neither has an ``error``."""
    is_json = False
    for number, line in enumerate(lines, start=1):
        is_json = is_json or line.lstrip().startswith("{")
        if not is_json:
            yield {"question": line}
            continue
        try:
            found = parse_json(line)
        except ValueError:
            found = None
        if isinstance(found, dict) and "question" in found:
            # An "error" of the file itself is not ours.
            yield {name: found.get(name) for name in ("question", "draft", "popularity", "history")}
        else:
            yield {"question": line, "error": f"Line {number} is no JSON object with a question."}


def _unread(record: dict[str, Any]) -> Decision:
    """Return what is printed for a line that could not be read."""
    hint = 'Each line is {"question": "…"}, or each is a question.'
    failure = Failure.of(DataFormatError(record["error"], hint=hint))
    return Decision(question=record["question"], retrieve=True, p_known=0.0, error=failure)


def _as_json(asked: object, decision: Decision) -> dict[str, Any]:
    """Return a decision, or its error, as JSON values; ``question`` is the question as it was asked."""
    if decision.error is not None:
        return {"question": asked, "retrieve": True, "error": decision.error.model_dump()}
    found: dict[str, Any] = decision.model_dump(mode="json", exclude={"draft", "error"})
    found["draft"] = None if decision.draft is None else decision.draft.text
    return found


def _print_decision(asked: object, decision: Decision) -> None:
    if decision.error is not None:
        say(f"error     {str(asked)[:80]!r}: {decision.error.message} {decision.error.hint}", fg="red")
        return
    word, colour = ("retrieve", "yellow") if decision.retrieve else ("skip", "green")
    say(f"{word:8} ", nl=False, fg=colour)
    say(f"{decision.p_known:.2f}  {' '.join(decision.question.split())[:120]}")
    say(f"               {decision.reason}", dim=True)
