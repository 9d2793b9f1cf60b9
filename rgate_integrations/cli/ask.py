"""``rgate decide`` and ``rgate ask``: decisions, and answers with their queries and passages."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Iterator
from functools import cache, partial
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rgate_integrations.cli.corpus import open_index
from rgate_integrations.cli.terminal import (
    DEFAULT_GATE,
    DEFAULT_LLM,
    AsJson,
    CorpusFolders,
    GateName,
    IndexFolder,
    JudgedName,
    PassageCount,
    ProxyName,
    QuestionArguments,
    ThresholdOption,
    print_json,
    say,
    shorten,
)
from rgate_integrations.errors import DataFormatError, RGateError

if TYPE_CHECKING:
    from rgate_integrations.decision import Decision
    from rgate_integrations.engine.decision_engine import DecisionEngine
    from rgate_integrations.index import PassageIndex
    from rgate_integrations.models.base import LanguageModel

_BATCH = 16  # maximum number of questions that are decided together


def decide(
    questions: QuestionArguments = None,
    gate: GateName = DEFAULT_GATE,
    threshold: ThresholdOption = None,
    proxy: ProxyName = None,
    llm_name: JudgedName = "",
    rules: Annotated[
        Path | None,
        typer.Option(
            help='JSON file with rules: {"always": ["an example", {"pattern": "..."}], "never": []}.'
        ),
    ] = None,
    corpus: CorpusFolders = None,
    as_json: AsJson = False,
) -> None:
    """Decide for each question whether to retrieve, and say why. The exit code is 1 if any could not be judged.

    Prints the decision, P(known), the question and the reason.
    """
    from rgate_integrations.engine.decider import read_item
    from rgate_integrations.engine.loading import load_gate
    from rgate_integrations.gates.rules import Rules
    from rgate_integrations.runtime.flow import run

    rule_lists = Rules() if rules is None else Rules.read(rules)
    loaded = load_gate(
        gate,
        llm_name=llm_name,
        proxy=proxy,
        always=rule_lists.always,
        never=rule_lists.never,
        corpus=corpus or None,
    )
    count = skipped = failed = 0
    for batch in _read_questions(questions):
        decisions = run(loaded.flow([read_item(question, threshold=threshold) for question in batch]))
        for question, decision in zip(batch, decisions, strict=True):
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
    llm: Annotated[
        str, typer.Option(help="Answering LLM: name (rgate download), folder or Hub id.")
    ] = DEFAULT_LLM,
    index: IndexFolder = None,
    k: PassageCount = 3,
) -> None:
    """Answer questions with a local LLM, retrieving if it may not know; print decision, passages and times.

    The exit code is 1 if any question could not be judged.
    """
    from rgate_integrations.engine.loading import WARM_UP, load_gate
    from rgate_integrations.models.download import resolve_model
    from rgate_integrations.models.local import shared_proxy

    loaded = load_gate(gate, proxy=proxy)
    # The demo's index is opened only when a question needs it, because building it takes minutes.
    open_once = cache(partial(open_index, index))
    if index is not None:
        open_once()
    resolve_model(llm)  # downloads the model or raises now, rather than after a search
    answering = shared_proxy(llm)
    # Load the models, so that loading does not count as the first question's time.
    loaded.decide(WARM_UP)
    answering.truncate(WARM_UP, 1)
    failed = False
    for question in itertools.chain.from_iterable(_read_questions(questions)):
        decision = _answer(question, loaded, answering, open_once, k, threshold)
        failed = failed or decision.error is not None
    if failed:
        raise typer.Exit(1)


def _answer(
    question: str,
    gate: DecisionEngine,
    llm: LanguageModel,
    open_once: Callable[[], PassageIndex],
    k: int,
    threshold: float | None,
) -> Decision:
    """Answer a question, print each step, and return the decision. An invalid question gets only an error."""
    from rgate_integrations.answering.drafting import write_answers
    from rgate_integrations.answering.query_plan import plan_queries
    from rgate_integrations.engine.decider import read_item
    from rgate_integrations.index.hybrid import fuse
    from rgate_integrations.index.retriever import passage_id
    from rgate_integrations.runtime.flow import run

    start = time.perf_counter()
    (decision,) = run(gate.flow([read_item(question, threshold=threshold)]))
    decided = time.perf_counter()
    _print_decision(question, decision)
    if not decision.question:  # the question is invalid
        return decision
    (plan,) = plan_queries([decision])
    hits = fuse(open_once().search(plan.texts, k), key=passage_id, k=k) if plan.texts else []
    searched = time.perf_counter()
    (answer,) = write_answers(llm, [decision.question], [[hit.passage for hit in hits]])
    answered = time.perf_counter()
    for query in plan.texts:
        say(f"searched       {query}")
    for hit in hits:
        say(f"found     {hit.score:.2f} {shorten(hit.passage.searchable, 110)}")
    say(f"answer         {answer.text}", bold=True)
    stages = {"gate": decided - start, "search": searched - decided, "answer": answered - searched}
    for stage, seconds in stages.items():
        say(f"time           {stage} {seconds * 1e3:.0f} ms", dim=True)
    return decision


def _read_questions(arguments: list[str] | None) -> Iterator[list[str]]:
    """Yield the questions of the arguments, or else the lines of standard input, in batches."""
    for questions in [arguments] if arguments else _read_lines():
        for start in range(0, len(questions), _BATCH):
            yield questions[start : start + _BATCH]


def _read_lines() -> Iterator[list[str]]:
    """Yield the lines of standard input that have arrived: a program may wait for an answer to each line.

    Raises:
        DataFormatError: A line is not UTF-8.
    """
    if not isinstance(sys.stdin, TextIOWrapper):  # closed
        return
    if sys.stdin.isatty():
        say("Type one question per line. Ctrl-D ends.", err=True)
    count = 0
    rest = b""  # of a line that has not arrived completely
    while chunk := sys.stdin.buffer.read1(1 << 20):
        lines = (rest + chunk).splitlines(keepends=True)
        rest = b"" if lines[-1].endswith(b"\n") else lines.pop()
        yield [_decode(line, number) for number, line in enumerate(lines, count + 1)]
        count += len(lines)
    if rest:
        yield [_decode(rest, count + 1)]


def _decode(line: bytes, number: int) -> str:
    """Return a line of standard input without its end; raises the error of `_read_lines`."""
    try:
        # Whatever the locale. Some editors write a byte order mark at the beginning of a file.
        return line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise DataFormatError(
            f"Standard input is not UTF-8 in line {number}.", hint="Encode it as UTF-8."
        ) from error


def _as_json(question: str, decision: Decision) -> dict[str, Any]:
    """Return a decision as a JSON object, with the text of the draft."""
    draft = None if decision.draft is None else decision.draft.text
    return {**decision.model_dump(mode="json"), "question": question, "draft": draft}


def _print_decision(question: str, decision: Decision) -> None:
    if (error := decision.error) is not None:
        say(f"error     {question[:80]!r}: {RGateError(error.message, hint=error.hint)}", fg="red")
        return
    word, colour = ("retrieve", "yellow") if decision.retrieve else ("skip", "green")
    say(f"{word:8} ", nl=False, fg=colour)
    say(f"{decision.p_known:.2f}  {shorten(decision.question, 120)}")
    if decision.p_covered is not None:
        where = f" in {', '.join(decision.corpora)}" if decision.retrieve else ""
        say(f"               covered with probability {decision.p_covered:.2f}{where}", dim=True)
    say(f"               {decision.reason}", dim=True)
