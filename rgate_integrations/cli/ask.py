"""``rgate ask``: the decision, what was searched and found, and the answer, with the time of each stage."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import typer
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from rgate_integrations.cli.decide import typed_questions
from rgate_integrations.cli.options import (
    DEFAULT_GATE,
    DEFAULT_LLM,
    AnswerFirstFlag,
    AsJson,
    GateName,
    IndexFolder,
    LLMName,
    PassageCount,
    ProxyName,
    QuestionArguments,
    ThresholdOption,
    open_index,
    open_llm,
)
from rgate_integrations.cli.output import Terminal, hit_as_json, print_json
from rgate_integrations.errors import IndexNotFoundError

if TYPE_CHECKING:
    from collections.abc import Callable

    from rgate_integrations.decision import Decision
    from rgate_integrations.engine.decision_engine import DecisionEngine
    from rgate_integrations.index import PassageIndex
    from rgate_integrations.index.retriever import Hit
    from rgate_integrations.models.base import Proxy


BEGUN_TOKENS = 32
"""How much of an answer is begun before it is judged."""


@dataclass
class Answered:
    """Everything that happened for one question; times are in milliseconds."""

    decision: Decision
    queries: list[str] = field(default_factory=list)
    hits: list[Hit] = field(default_factory=list)
    answer: str = ""
    times: dict[str, float] = field(default_factory=dict)


def ask(
    questions: QuestionArguments = None,
    gate: GateName = DEFAULT_GATE,
    threshold: ThresholdOption = None,
    proxy: ProxyName = None,
    llm: LLMName = DEFAULT_LLM,
    index: IndexFolder = None,
    k: PassageCount = 3,
    answer_first: AnswerFirstFlag = None,
    as_json: AsJson = False,
) -> None:
    """Ask questions: retrieve only for those that the LLM does not know."""
    from rgate_integrations.engine.loading import load_gate

    console, notices = Terminal(), Terminal(stderr=True)
    if index is not None and not index.exists():
        raise IndexNotFoundError(f"There is no folder {str(index)!r}.", hint="rgate index build makes one.")
    # Opened by the first search: the demo's index is built then, which takes minutes.
    searched = cache(partial(open_index, index))
    loaded = load_gate(gate, proxy=proxy)
    with notices.status("loading models"):
        answering = open_llm(llm, loaded.get_proxy(), notices)
        begins = gate == DEFAULT_GATE if answer_first is None else answer_first
        if begins:
            loaded = _judge_of(loaded, answering)
        # Models are loaded now, so that the first question's time is its own.
        loaded.decide("Is this a question?", draft="Yes, it is." if begins else None)
    failed = False
    for question in typed_questions(questions):
        answered = _answer(
            question, loaded, answering, searched, k=k, threshold=threshold, answer_first=begins
        )
        failed = failed or answered.decision.error is not None
        if as_json:
            print_json(_as_json(answered))
        else:
            console.print(panel(answered))
    if failed:
        raise typer.Exit(1)


def _judge_of(gate: DecisionEngine, llm: Proxy) -> DecisionEngine:
    """Return the gate that judges how the LLM begins to answer."""
    from rgate_integrations.engine.loading import load_gate
    from rgate_integrations.errors import ConfigurationError
    from rgate_integrations.gates.pairs import answer_gate_of

    judge = answer_gate_of(gate.gate)
    if judge is None:
        raise ConfigurationError(
            f"The gate {gate.gate.name!r} reads the question alone.", hint="--no-answer-first"
        )
    return load_gate(judge.for_llm(llm.name, "the model that answers"))


def _answer(
    question: str,
    gate: DecisionEngine,
    llm: Proxy,
    index: Callable[[], PassageIndex],
    *,
    k: int,
    threshold: float | None,
    answer_first: bool,
) -> Answered:
    """Decide, search if needed, and answer, unless what the LLM began is the whole answer."""
    from rgate_integrations.answering.claims import plan_queries
    from rgate_integrations.answering.requests import write_answers
    from rgate_integrations.errors import InvalidQuestionError
    from rgate_integrations.index.hybrid import fuse
    from rgate_integrations.index.retriever import passage_id

    times = {}
    draft = None
    if answer_first and question.strip():
        start = time.perf_counter()
        (draft,) = write_answers(llm, [question], [[]], tokens=BEGUN_TOKENS)
        times["begin"] = _milliseconds(start)
    start = time.perf_counter()
    (decision,) = gate.decide_batch([question], threshold=threshold, drafts=[draft])
    times["gate"] = _milliseconds(start)
    answered = Answered(decision, times=times)
    if decision.error is not None and decision.error.type == InvalidQuestionError.__name__:
        return answered
    if decision.retrieve:
        (plan,) = plan_queries([decision])
        answered.queries = [query.text for query in plan.queries]
        start = time.perf_counter()
        answered.hits = fuse(index().search(answered.queries, k), key=passage_id, k=k)
        answered.times["search"] = _milliseconds(start)
    start = time.perf_counter()
    whole = draft if draft is not None and draft.finished and not answered.hits else None
    if whole is None:
        (whole,) = write_answers(llm, [question], [[hit.passage for hit in answered.hits]])
    answered.answer = whole.text
    answered.times["answer"] = _milliseconds(start)
    return answered


def _milliseconds(start: float) -> float:
    return (time.perf_counter() - start) * 1e3


def _as_json(answered: Answered) -> dict[str, Any]:
    decision = answered.decision
    found: dict[str, Any] = {
        "question": decision.question,
        "retrieve": decision.retrieve,
        "p_known": decision.p_known,
        "threshold": decision.threshold,
        "reason": decision.reason,
        "draft": decision.draft.text if decision.draft else None,
        "queries": answered.queries,
        "passages": [hit_as_json(hit) for hit in answered.hits],
        "answer": answered.answer,
        "timings": {stage: round(ms, 1) for stage, ms in answered.times.items()},
    }
    if decision.error is not None:
        found["error"] = decision.error.model_dump()
    return found


def panel(answered: Answered) -> Panel:
    """Show one answered question."""
    decision = answered.decision
    if decision.error is not None and not answered.answer:
        text = Text(f"{decision.error.message} {decision.error.hint}")
        return Panel(text, title="error", border_style="red", title_align="left")
    word, sign, colour = ("skip retrieval", ">=", "green")
    if decision.retrieve:
        word, sign, colour = ("retrieve", "<", "yellow")
    numbers = f"   p_known {decision.p_known:.2f} {sign} threshold {decision.threshold:.2f}"
    grid = Table.grid(padding=(0, 2))
    grid.add_column(justify="right", style="dim", min_width=7)
    grid.add_column()
    grid.add_row("", Text.assemble((word, f"bold {colour}"), numbers))
    grid.add_row("because", _one_line(decision.reason))
    if decision.draft is not None:
        grid.add_row("begun", _one_line(decision.draft.text))
    for query in answered.queries:
        grid.add_row("query", _one_line(query))
    for hit in answered.hits:
        grid.add_row(f"{hit.score:.2f}", _one_line(f"{hit.passage.title}: {hit.passage.text[:110]}…"))
    grid.add_row("answer", _one_line(answered.answer, "bold"))
    stages = "  ".join(f"{stage} {ms:.0f} ms" for stage, ms in answered.times.items())
    grid.add_row("time", _one_line(f"{stages}  (total {sum(answered.times.values()):.0f} ms)", "dim"))
    for warning in decision.warnings:
        grid.add_row("note", _one_line(warning, "dim"))
    return Panel(grid, title=Text(decision.question[:90]), title_align="left", border_style=colour)


def _one_line(text: str, style: str = "") -> Text:
    return Text(" ".join(text.split()), style)
