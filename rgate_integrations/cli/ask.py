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
from rgate_integrations.errors import DataFormatError

if TYPE_CHECKING:
    from rgate_integrations.decision import Decision, Failure
    from rgate_integrations.engine.decision_engine import DecisionEngine
    from rgate_integrations.index import PassageIndex
    from rgate_integrations.models.base import Proxy


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
    from rgate_integrations.decision import Decision
    from rgate_integrations.engine.loading import load_gate
    from rgate_integrations.gates.rules import Rules

    own = Rules() if rules is None else Rules.read(rules)
    loaded = load_gate(gate, llm_name=llm_name, proxy=proxy, always=own.always, never=own.never)
    count = skipped = failed = 0
    lines = _read_lines(_read_questions(questions))
    while batch := list(itertools.islice(lines, 16)):
        asked, drafts, popularity, histories, problems = zip(*batch, strict=True)
        decisions = loaded.decide_batch(
            asked, threshold=threshold, drafts=drafts, popularity=popularity, histories=histories
        )
        for question, decision, problem in zip(asked, decisions, problems, strict=True):
            if problem is not None:
                decision = Decision(question=question, retrieve=True, p_known=0.0, error=problem)
            count += 1
            skipped += not decision.retrieve
            failed += decision.error is not None
            if as_json:
                print_json(_as_json(question, decision))
            else:
                _print_decision(question, decision)
    if count > 1:
        say(f"{skipped} of {count} skip retrieval.", err=True)
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
        decision, told = _answer(question, loaded, answering, searched, k, threshold)
        failed = failed or decision.error is not None
        if as_json:
            print_json({**_as_json(question, decision), **told})
            continue
        _print_decision(question, decision)
        if told:
            _print_answer(told)
    if failed:
        raise typer.Exit(1)


def _answer(
    question: str,
    gate: DecisionEngine,
    llm: Proxy,
    index: Callable[[], PassageIndex],
    k: int,
    threshold: float | None,
) -> tuple[Decision, dict[str, Any]]:
    """Decide, search if needed, and answer; returns what was searched, found and written as JSON values."""
    from rgate_integrations.answering.answers import write_answers
    from rgate_integrations.answering.claims import plan_queries
    from rgate_integrations.index.hybrid import fuse
    from rgate_integrations.index.retriever import passage_id

    began = time.perf_counter()
    (decision,) = gate.decide_batch([question], threshold=threshold)
    decided = time.perf_counter()
    if not decision.question:  # there is nothing to answer
        return decision, {}
    (plan,) = plan_queries([decision])
    queries = plan.texts
    hits = fuse(index().search(queries, k), key=passage_id, k=k) if queries else []
    found = time.perf_counter()
    (written,) = write_answers(llm, [decision.question], [[hit.passage for hit in hits]])
    ended = time.perf_counter()
    milliseconds = {
        "gate": round((decided - began) * 1e3, 1),
        "search": round((found - decided) * 1e3, 1),
        "answer": round((ended - found) * 1e3, 1),
    }
    return decision, {
        "queries": queries,
        "passages": list(map(hit_as_json, hits)),
        "answer": written.text,
        "timings": milliseconds,
    }


def _print_answer(told: dict[str, Any]) -> None:
    for query in told["queries"]:
        say(f"searched       {query}")
    for passage in told["passages"]:
        say(f"found     {passage['score']:.2f} {passage['title']}: {passage['text'][:110]}")
    say(f"answer         {told['answer']}", bold=True)
    for stage, milliseconds in told["timings"].items():
        say(f"time           {stage} {milliseconds:.0f} ms", dim=True)


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
            yield line.removeprefix("\ufeff").rstrip(
                "\r\n"
            )  # editors put a mark before what they save as UTF-8
    except UnicodeDecodeError as error:
        raise DataFormatError(
            f"Standard input has bytes that are not {error.encoding}.", hint="Give it as UTF-8."
        ) from error


def _read_lines(lines: Iterable[str]) -> Iterator[tuple[Any, Any, Any, Any, Failure | None]]:
    """Read questions, or JSON objects with a question: question, draft, popularity, history, and what is wrong."""
    from rgate_integrations.decision import Failure
    from rgate_integrations.runtime.files import parse_json

    is_json = False
    for number, line in enumerate(lines, start=1):
        is_json = is_json or line.lstrip().startswith("{")
        found: Any = {"question": line}
        if is_json:
            try:
                found = parse_json(line)
            except ValueError:
                found = None
        if isinstance(found, dict) and "question" in found:
            yield found["question"], found.get("draft"), found.get("popularity"), found.get("history"), None
        else:
            error = DataFormatError(
                f"Line {number} is no JSON object with a question.",
                hint='Each line is {"question": "…"}, or each is a question.',
            )
            yield line, None, None, None, Failure.of(error)


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
