"""``rgate decide`` and ``rgate ask``: decisions, and answers with their queries and passages."""

from __future__ import annotations

import itertools
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rgate_integrations.cli.index import open_index
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
)
from rgate_integrations.errors import DataFormatError, RGateError

# Bytes that Python could not decode: in arguments, and in standard input in the C locales of containers.
_UNDECODED = re.compile("[\udc80-\udcff]")

if TYPE_CHECKING:
    from rgate_integrations.decision import Decision, Request
    from rgate_integrations.engine.decider import Failed
    from rgate_integrations.engine.decision_engine import DecisionEngine
    from rgate_integrations.index import PassageIndex
    from rgate_integrations.models.base import LanguageModel


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

    Prints the decision, P(known), the question and the reason. An argument or line may also be a JSON object with
    "question" and, for gates that use them, "draft", "popularity" and "history", a list of turns. If an argument or
    line begins with "{", it and all that follow must be such objects; others get an error instead of a decision.
    """
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
    lines = _read_requests(_read_questions(questions), threshold)
    while batch := list(itertools.islice(lines, 16)):
        decisions = run(loaded.flow([item for _, item in batch]))
        for (question, _), decision in zip(batch, decisions, strict=True):
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

    resolve_model(llm)  # downloads the model or raises now, rather than after a search
    answering = shared_proxy(llm)
    loaded = load_gate(gate, proxy=proxy)
    # The demo's index is opened only when a question needs it, because building it takes minutes.
    open_once = cache(partial(open_index, index))
    if index is not None:
        open_once()
    # Load the models, so that loading does not count as the first question's time.
    loaded.decide(WARM_UP)
    answering.truncate(WARM_UP, 1)
    failed = False
    for question in _read_questions(questions):
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
        say(f"found     {hit.score:.2f} {hit.passage.searchable[:110]}")
    say(f"answer         {answer.text}", bold=True)
    stages = {"gate": decided - start, "search": searched - decided, "answer": answered - searched}
    for stage, seconds in stages.items():
        say(f"time           {stage} {seconds * 1e3:.0f} ms", dim=True)
    return decision


def _read_questions(arguments: list[str] | None) -> Iterator[str]:
    """Yield the questions of the arguments, or else the lines of standard input.

    Raises:
        DataFormatError: An argument or a line is not in the encoding of the terminal, usually UTF-8.
    """
    if arguments:
        for argument in arguments:
            if _UNDECODED.search(argument):
                raise _wrong_encoding("An argument", sys.getfilesystemencoding())
            yield argument
        return
    # None if it is closed.
    if sys.stdin and sys.stdin.isatty():
        say("Type one question per line, then Ctrl-D.", err=True)
    try:
        for line in sys.stdin or ():
            if _UNDECODED.search(line):
                raise _wrong_encoding("Standard input", sys.stdin.encoding)
            # Some editors write a byte order mark at the beginning of a file.
            yield line.removeprefix("\ufeff").rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise _wrong_encoding("Standard input", error.encoding) from error


def _wrong_encoding(source: str, encoding: str) -> DataFormatError:
    return DataFormatError(
        f"{source} has bytes that are not valid {encoding}.",
        hint="Encode it as UTF-8, and set PYTHONUTF8=1 if Python expects another encoding.",
    )


def _read_requests(
    lines: Iterable[str], threshold: float | None
) -> Iterator[tuple[object, Request | Failed]]:
    """Yield, for each line, the question as given and its request or error; a line is a question or a JSON object."""
    from rgate_integrations.engine.decider import Failed, read_item
    from rgate_integrations.runtime.files import parse_json

    is_json = False
    for number, line in enumerate(lines, start=1):
        # After a JSON line, a malformed line is an error and not a question.
        is_json = is_json or line.lstrip().startswith("{")
        fields: Any = None if is_json else {"question": line}
        if is_json:
            with suppress(ValueError):
                fields = parse_json(line)
        if not isinstance(fields, dict) or "question" not in fields:
            error = DataFormatError(
                f"Argument or line {number} is not a JSON object with a question.",
                hint='Write all of them as {"question": "…"}, or all as plain questions.',
            )
            yield line, Failed(error, line)
            continue
        item = read_item(
            fields["question"],
            threshold=threshold,
            draft=fields.get("draft"),
            popularity=fields.get("popularity"),
            history=fields.get("history"),
        )
        yield fields["question"], item


def _as_json(question: object, decision: Decision) -> dict[str, Any]:
    """Return a decision as a JSON object; after a failure, only ``question``, ``retrieve`` and ``error``."""
    if decision.error is not None:
        return {"question": question, "retrieve": True, "error": decision.error.model_dump()}
    draft = None if decision.draft is None else decision.draft.text
    return {**decision.model_dump(mode="json", exclude={"draft", "error"}), "draft": draft}


def _print_decision(question: object, decision: Decision) -> None:
    if (error := decision.error) is not None:
        say(f"error     {str(question)[:80]!r}: {RGateError(error.message, hint=error.hint)}", fg="red")
        return
    word, colour = ("retrieve", "yellow") if decision.retrieve else ("skip", "green")
    say(f"{word:8} ", nl=False, fg=colour)
    say(f"{decision.p_known:.2f}  {' '.join(decision.question.split())[:120]}")
    if decision.p_covered is not None:
        where = f" in {', '.join(decision.corpora)}" if decision.retrieve else ""
        say(f"               covered with probability {decision.p_covered:.2f}{where}", dim=True)
    say(f"               {decision.reason}", dim=True)
