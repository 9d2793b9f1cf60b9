"""``rgate ask``: decision, draft, queries, passages and answer, with the time of each stage."""

from __future__ import annotations

import json
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from rgate_integrations.cli.decide import read_questions
from rgate_integrations.decision import Decision
from rgate_integrations.errors import ModelLoadError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rgate_integrations.claims import QueryPlan
    from rgate_integrations.gates import Gate
    from rgate_integrations.index import Hit, PassageIndex
    from rgate_integrations.proxy.local import LocalProxy

DEFAULT_LLM = "qwen2.5-coder-0.5b-instruct"
CORPUS = "encyclopedia-leads"


@dataclass
class Answered:
    """Everything that happened for one question.

    Attributes:
        decision: The gate's decision.
        plan: The queries that were searched.
        hits: The passages that were found.
        answer: The LLM's answer; empty when the gate could not read the question.
        timings: Milliseconds of each stage.
    """

    decision: Decision
    plan: QueryPlan
    hits: list[Hit] = field(default_factory=list)
    answer: str = ""
    timings: dict[str, float] = field(default_factory=dict)

    def as_object(self) -> dict[str, Any]:
        """Return JSON values."""
        d = self.decision
        found = {
            "question": d.question,
            "retrieve": d.retrieve,
            "p_known": d.p_known,
            "threshold": d.threshold,
            "reason": d.reason,
            "draft": d.draft.text if d.draft else None,
            "queries": [q.text for q in self.plan.queries],
            "passages": [
                {
                    "id": h.passage.id,
                    "title": h.passage.title,
                    "text": h.passage.text,
                    "score": round(h.score, 4),
                }
                for h in self.hits
            ],
            "answer": self.answer,
            "timings": {name: round(value, 1) for name, value in self.timings.items()},
        }
        return {**found, "error": d.error.model_dump()} if d.error else found


class Pipeline:
    """Gate, claims, index and LLM in a row; what ``rgate ask`` and the demo run.

    Args:
        gate: Decides.
        index: Searched when it retrieves.
        llm: Answers.
        k: Passages a question.
    """

    def __init__(self, gate: Gate, index: PassageIndex, llm: LocalProxy, *, k: int = 3) -> None:
        self.gate, self.index, self.llm, self.k = gate, index, llm, k

    def warm_up(self) -> None:
        """Use every model once, so that the first question's times are those of its own work."""
        from rgate_integrations.prompts import ANSWER

        self.gate.decide("Is this a question?")
        self.index.search(["warm up"], 1)
        self.llm.generate(ANSWER, [{"question": "Is this a question?"}], tokens=1)

    def ask(self, question: str, *, threshold: float | None = None) -> Answered:
        """Decide, search if needed, and answer one question."""
        from rgate_integrations.answer import answer_all
        from rgate_integrations.claims import QueryPlan, plan_queries
        from rgate_integrations.index import fuse

        timings: dict[str, float] = {}
        with _timed(timings, "gate"):
            decision = self.gate.decide_batch([question], threshold=threshold)[0]
        if decision.error is not None and not decision.question:
            return Answered(decision, QueryPlan(question=""), timings=timings)
        with _timed(timings, "claims"):
            plan = plan_queries([decision], gate=self.gate)[0]
        hits: list[Hit] = []
        with _timed(timings, "search"):
            if plan.queries:
                found = self.index.search([q.text for q in plan.queries], self.k)
                hits = fuse(found, key=lambda h: h.passage.id, k=self.k)
        with _timed(timings, "answer"):
            answer = answer_all(self.llm, [decision], [[h.passage for h in hits]])[0]
        return Answered(decision, plan, hits, answer, timings)


def ask(
    questions: Annotated[
        list[str] | None, typer.Argument(help="Questions; standard input when none.")
    ] = None,
    gate: Annotated[str, typer.Option(help="Gate: a name (see rgate gates) or a folder.")] = "default",
    threshold: Annotated[
        float | None, typer.Option(min=0.0, help="Retrieve iff p_known is below it.")
    ] = None,
    proxy: Annotated[str | None, typer.Option(help="Proxy model: catalogue name, folder or Hub id.")] = None,
    llm: Annotated[str, typer.Option(help="Answering LLM: catalogue name, folder or Hub id.")] = DEFAULT_LLM,
    index: Annotated[
        Path | None, typer.Option(help="Folder of an index; the demo's corpus when none.")
    ] = None,
    k: Annotated[int, typer.Option("-k", min=1, help="Passages a question.")] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a line.")] = False,
) -> None:
    """Ask questions: retrieve only for those that the LLM does not know."""
    from rgate_integrations.loading import load_gate

    notices = Console(stderr=True, highlight=False)
    loaded = load_gate(gate, proxy=proxy)
    pipeline = Pipeline(loaded, open_index(index, notices), open_llm(llm, loaded.proxy, notices), k=k)
    with notices.status("loading models"):
        pipeline.warm_up()
    console = Console(highlight=False)
    failed = False
    for question in read_questions(questions):
        answered = pipeline.ask(question, threshold=threshold)
        failed = failed or answered.decision.error is not None
        if as_json:
            typer.echo(json.dumps(answered.as_object(), ensure_ascii=False))
        else:
            console.print(panel(answered))
    if failed:
        raise typer.Exit(1)


def open_llm(name: str, proxy: str, notices: Console) -> LocalProxy:
    """Return the answering LLM; the default one, when it is not downloaded, gives way to the proxy with a notice."""
    from rgate_integrations.proxy.download import resolve_model
    from rgate_integrations.proxy.local import shared_proxy

    try:
        resolve_model(name)
    except ModelLoadError as error:
        if name != DEFAULT_LLM:
            raise
        notices.print(f"note: answering with the proxy, {proxy}; for a better LLM: {error.hint}", style="dim")
        return shared_proxy(proxy)
    return shared_proxy(name)


def open_index(folder: Path | None, notices: Console) -> PassageIndex:
    """Load an index; without a folder that of the demo's corpus, which is built on first use."""
    from rgate_integrations.index import PassageIndex, read_passages
    from rgate_integrations.proxy.download import PASSAGES, cache_dir, cached_path

    if folder is not None:
        return PassageIndex.load(folder)
    home = cache_dir() / f"index-{CORPUS}"
    if not (home / "index.json").is_file():
        corpus = cached_path(CORPUS)
        if corpus is None:
            raise ModelLoadError(
                "There is no index to search.",
                hint=f"rgate download {CORPUS} all-minilm-l6-v2, or give --index DIR.",
            )
        passages = list(read_passages(corpus / PASSAGES))
        with notices.status("building the index, once") as status:
            PassageIndex.build(
                passages,
                report=lambda n: status.update(
                    f"building the index, once: {n:,} of {len(passages):,} passages"
                ),
            ).save(home)
    return PassageIndex.load(home)


def panel(answered: Answered) -> Panel:
    """Show one answered question."""
    d = answered.decision
    if d.error is not None and not answered.answer:
        return Panel(
            Text(f"{d.error.message} {d.error.hint}"), title="error", border_style="red", title_align="left"
        )
    word, colour = ("retrieve", "yellow") if d.retrieve else ("skip retrieval", "green")
    sign = "<" if d.retrieve else ">="
    head = Text.assemble(
        (word, f"bold {colour}"), f"   p_known {d.p_known:.2f} {sign} threshold {d.threshold:.2f}"
    )
    lines: list[tuple[str, Text]] = [("", head), _line("because", d.reason)]
    if d.draft is not None:
        lines.append(_line("draft", d.draft.text))
    elif not d.retrieve and d.error is None:
        lines.append(_line("draft", "not needed", "dim"))
    lines += [_line("query", q.text) for q in answered.plan.queries]
    lines += [_line(f"{h.score:.2f}", f"{h.passage.title}: {h.passage.text[:110]}…") for h in answered.hits]
    lines.append(_line("answer", answered.answer, "bold"))
    stages = "  ".join(f"{name} {ms:.0f} ms" for name, ms in answered.timings.items())
    lines.append(_line("time", f"{stages}  (total {sum(answered.timings.values()):.0f} ms)", "dim"))
    lines += [_line("note", warning, "dim") for warning in d.warnings]
    grid = Table.grid(padding=(0, 2))
    grid.add_column(justify="right", style="dim", min_width=7)
    grid.add_column()
    for name, text in lines:
        grid.add_row(name, text)
    return Panel(grid, title=Text(d.question[:90]), title_align="left", border_style=colour)


def _line(name: str, text: str, style: str = "") -> tuple[str, Text]:
    return name, Text(" ".join(text.split()), style)


@contextmanager
def _timed(timings: dict[str, float], stage: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    timings[stage] = (time.perf_counter() - start) * 1e3
