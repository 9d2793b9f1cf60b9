"""``rgate collect``, ``evaluate``, ``calibrate``, ``report`` and ``monitor``: paired data, and gates on them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer
from rich.table import Table

from rgate_integrations.cli.options import (
    DEFAULT_GATE,
    DEFAULT_LLM,
    Data,
    DraftOf,
    GateName,
    IndexFolder,
    LLMName,
    More,
    PassageCount,
    ProxyName,
    gate_for,
    numbers,
    open_index,
)
from rgate_integrations.cli.output import Bar, Terminal
from rgate_integrations.errors import ConfigurationError, DataFormatError
from rgate_integrations.runtime.files import json_text, read_jsonl, write_atomically
from rgate_integrations.runtime.records import Record, read_records

if TYPE_CHECKING:
    from rgate_integrations.tuning.calibration import Policy
    from rgate_integrations.tuning.evaluation import JudgedQuestions
    from rgate_integrations.tuning.questions import Example


def evaluate(
    data: Data,
    more: More = None,
    gate: GateName = DEFAULT_GATE,
    draft: DraftOf = "proxy",
    threshold: Annotated[
        float | None, typer.Option(min=0.0, help="Instead of the gate's own threshold.")
    ] = None,
    versus: Annotated[
        str | None, typer.Option(help="A second gate: the difference on the same questions.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="First questions of each file.")] = None,
    proxy: ProxyName = None,
    latency: Annotated[
        str | None, typer.Option(help="Milliseconds for the break-even: direct=…,rag=…,search=….")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write the result here, as JSON.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the bootstrap.")] = 0,
) -> None:
    """Evaluate a gate on paired data: AUC, accuracy against never, always, random and oracle, break-even."""
    from rgate_integrations.tuning import compare, read_paired

    stages = None
    if latency is not None:
        stages = numbers(latency, ("direct", "rag", "search", "gate"), needed=("rag", "direct"))
    questions = [e for f in read_paired([*data, *(more or [])]) for e in f.examples[:limit]]
    judge = partial(_evaluated, questions, draft, threshold, proxy, seed)
    result, judged = judge(gate)
    console = Terminal(width=None if Terminal().is_terminal else 140)
    console.print(_table(result))
    if stages is not None:
        result["break_even"] = _break_even(result, stages, console)
    if versus is not None:
        _, other = (result, judged) if versus == gate else judge(versus)
        result["versus"] = {"gate": versus, **compare(judged, other, seed=seed)}
        _print_difference(gate, result["versus"], console)
    if out is not None:
        result["questions"] = _each_question(questions, judged)
        write_atomically(out, json_text(result))
        console.print(f"Written to {out}.", soft_wrap=True)


def _evaluated(
    questions: Sequence[Example],
    draft: str,
    threshold: float | None,
    proxy: str | None,
    seed: int,
    name: str,
) -> tuple[dict[str, Any], JudgedQuestions]:
    from rgate_integrations.tuning.evaluation import evaluate as evaluate_gate

    loaded = gate_for(name, draft, proxy)
    with Bar(what=f"gate {name}", total=len(questions)) as bar:
        return evaluate_gate(
            loaded,
            questions,
            name=name,
            draft=draft,  # type: ignore[arg-type]  # `gate_for` has checked it
            threshold=threshold,
            seed=seed,
            report=bar.count,
        )


def _each_question(questions: Sequence[Example], judged: JudgedQuestions) -> list[dict[str, Any]]:
    """Return what ``rgate report`` shows of each question."""
    rows = []
    for example, decision in zip(questions, judged.decisions, strict=True):
        rows.append(
            {
                "question": example.question.text,
                "dataset": example.question.dataset,
                "p_known": round(decision.p_known, 5),
                "closed_book_correct": example.known,
                "rag_correct": example.rag_correct,
                "draft": decision.draft.text[:300] if decision.draft else None,
            }
        )
    return rows


def _break_even(result: dict[str, Any], stages: dict[str, float], console: Terminal) -> dict[str, Any]:
    from rgate_integrations.tuning.evaluation import break_even

    stages = {"gate": result["gate_ms"], **stages}
    found = break_even(result["pooled"]["retrieval_rate"], **stages)
    console.print(
        f"mean time a question: always {found['always_ms']} ms, gated {found['gated_ms']} ms; the gate "
        f"({stages['gate']:.1f} ms) pays below a retrieval rate of {found['break_even']:.1%}"
    )
    return found


_COLUMNS = (
    "n",
    "AUC",
    "95 %",
    "utility",
    "ECE",
    "retr. %",
    "acc. %",
    "95 %",
    "never",
    "random",
    "always",
    "oracle",
    "area",
    "helped",
    "harmed",
)


def _table(result: dict[str, Any]) -> Table:
    threshold = "its own" if result["threshold"] is None else f"{result['threshold']:.3f}"
    title = f"gate {result['gate']}, draft {result['draft']}, threshold {threshold}"
    table = Table(box=None, title=title, title_justify="left")
    table.add_column("set")
    for column in _COLUMNS:
        table.add_column(column, justify="right")
    for name, measured in [*result["sets"].items(), ("pooled", result["pooled"])]:
        table.add_row(name, *_row(measured))
    return table


def _row(measured: dict[str, Any]) -> list[str]:
    """Return the cells of `_COLUMNS`."""
    auc_interval = measured["intervals"].get("auc")
    low, high = measured["intervals"]["containment_accuracy"]
    shares = [measured[name] for name in ("never", "random_same_rate", "always", "oracle")]
    return [
        str(measured["n"]),
        _number(measured["auc"]),
        f"{auc_interval[0]:.2f}-{auc_interval[1]:.2f}" if auc_interval else "",
        _number(measured["auc_utility"]),
        _number(measured["ece"]),
        f"{100 * measured['retrieval_rate']:.1f}",
        f"{100 * measured['containment_accuracy']:.1f}",
        f"{100 * low:.1f}-{100 * high:.1f}",
        *(f"{100 * share:.1f}" for share in shares),
        _number(measured["area_between"]),
        str(measured["helped"]),
        str(measured["harmed"]),
    ]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _print_difference(gate: str, found: dict[str, Any], console: Terminal) -> None:
    auc = "-"
    if found["auc_interval"] is not None:
        low, high = found["auc_interval"]
        auc = f"{found['auc_difference']:+.3f} [{low:+.3f}, {high:+.3f}]"
    points = 100 * found["in_accuracy_difference"]
    low, high = (100 * end for end in found["in_accuracy_interval"])
    console.print(
        f"{gate} minus {found['gate']}: AUC {auc}, in-accuracy {points:+.1f} points [{low:+.1f}, {high:+.1f}]; "
        f"right where the other is wrong: {found['only_first']} against {found['only_second']} "
        f"(McNemar p = {found['p_value']:.3g})"
    )


def report(
    results: Annotated[list[Path], typer.Argument(help="What rgate evaluate --out wrote.")],
    html: Annotated[Path, typer.Option(help="Page to write.")] = Path("report.html"),
    texts: Annotated[
        bool, typer.Option(help="Whether questions and drafts are in the page, as examples.")
    ] = True,
) -> None:
    """Write a self-contained page: curves, reliability, examples, and a threshold that can be moved."""
    from rgate_integrations.tuning.report import read_results, report_page

    page = report_page(read_results(results), texts=texts)
    write_atomically(html, page)
    Terminal().print(f"Written to {html}: open it in a browser.", soft_wrap=True)


def monitor(
    log: Annotated[Path, typer.Argument(help="Logged decisions, JSONL, as rgate decide --json prints them.")],
    gate: Annotated[Path, typer.Option(help="Folder of the calibrated gate.")],
) -> None:
    """Compare logged decisions with the calibration, and say when to calibrate again."""
    from rgate_integrations.gates.artifacts.folder import read_gate
    from rgate_integrations.tuning.evaluation import measure_drift

    saved = read_gate(str(gate))
    if saved.method not in ("calibrated", "tuned"):
        raise DataFormatError(
            f"{str(gate)!r} is not a calibrated gate.", hint="rgate tune … or rgate calibrate … --out DIR"
        )
    logged = []
    for record in read_records(log):
        p_known = record.optional_number("p_known")
        if p_known is not None and not record.fields.get("error"):  # decisions that failed have none
            logged.append(p_known)
    calibration = Record(f"the calibration of {str(gate)!r}", 1, saved.provenance, hint="Calibrate it again.")
    found = measure_drift(calibration.numbers("scores"), logged, saved.threshold)
    console = Terminal()
    console.print(
        f"{found.n} decisions: retrieval rate {found.retrieval_rate:.1%}, {found.expected_rate:.1%} at calibration; "
        f"population stability index {found.psi:.3f}",
        soft_wrap=True,
    )
    console.print(found.advice, style="bold")


def _policy(budget: float | None, max_loss: float | None, cost: str | None, confidence: float) -> Policy:
    """Return the policy that was asked for, one of the three."""
    from rgate_integrations.tuning import Budget, MaxLoss, MinCost

    if (budget, max_loss, cost).count(None) != 2:
        raise ConfigurationError("Give one policy.", hint="--budget, --max-loss or --cost")
    if budget is not None:
        return Budget(budget, confidence)
    if max_loss is not None:
        return MaxLoss(max_loss, confidence)
    return MinCost(**numbers(cost or "", ("retrieval", "draft", "answer", "wrong"), needed=("retrieval",)))


def calibrate(
    data: Data,
    out: Annotated[Path, typer.Option(help="Folder for the calibrated gate.")],
    more: More = None,
    gate: GateName = DEFAULT_GATE,
    draft: DraftOf = "proxy",
    budget: Annotated[
        float | None, typer.Option(help="Retrieve for at most this share of the questions.")
    ] = None,
    max_loss: Annotated[
        float | None, typer.Option(help="Lose at most this much accuracy against always retrieving.")
    ] = None,
    cost: Annotated[
        str | None,
        typer.Option(help="retrieval=…,draft=…,answer=…[,wrong=…]: prices, for the lowest expected cost."),
    ] = None,
    confidence: Annotated[float, typer.Option(help="Confidence of the guarantee.")] = 0.95,
    probability: Annotated[str, typer.Option(help="platt, isotonic or none.")] = "platt",
    proxy: ProxyName = None,
    seed: Annotated[int, typer.Option(help="Seed of the split.")] = 0,
) -> None:
    """Choose a gate's threshold on paired data, with a guarantee, and save the gate."""
    from rgate_integrations.gates.artifacts.folder import save_gate
    from rgate_integrations.gates.probability import Method
    from rgate_integrations.gates.registry import loadable, saved_gate
    from rgate_integrations.tuning import calibrate as calibrate_threshold
    from rgate_integrations.tuning import read_paired

    policy = _policy(budget, max_loss, cost, confidence)
    if probability not in get_args(Method):
        raise ConfigurationError(f"--probability {probability!r} is not known.", hint="platt is the default.")
    files = read_paired([*data, *(more or [])])
    loaded = gate_for(gate, draft, proxy)
    questions = sum(len(f.examples) for f in files)
    options: dict[str, Any] = {"draft": draft, "method": probability, "seed": seed}
    with Bar(what=f"gate {gate}", total=questions) as bar:
        found = calibrate_threshold(loaded, files, policy, report=bar.count, **options)
    save_gate(saved_gate(found.gate.gate, found.provenance), out)
    console = Terminal()
    console.print(found.choice.guarantee, style="bold" if found.choice.guaranteed else "bold yellow")
    facts = found.provenance
    console.print(
        f"threshold {found.choice.threshold:.3f}, retrieval rate {facts['retrieval_rate']:.1%} on {facts['n']} "
        f"questions; calibration error {facts['ece_before']:.3f} -> {facts['ece']:.3f}"
    )
    name = loadable(out)
    console.print(f'Saved. Use it as load_gate("{name}") or --gate {name}.', soft_wrap=True)


def collect(
    questions: Annotated[Path, typer.Option(help="JSONL with question and gold_answers (or answer) a line.")],
    out: Annotated[Path, typer.Option(help="Paired JSONL to write; an existing one is continued.")],
    llm: LLMName = DEFAULT_LLM,
    index: IndexFolder = None,
    closed_book: Annotated[
        bool, typer.Option("--closed-book", help="Ask without retrieval only, as training needs.")
    ] = False,
    k: PassageCount = 3,
    answer_tokens: Annotated[int, typer.Option(min=1, help="Maximum length of an answer.")] = 64,
    judge: Annotated[
        str | None,
        typer.Option(help="A model that judges the answers; without one, gold answers are looked for."),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="First questions only.")] = None,
) -> None:
    """Make paired data: your LLM's answers with and without retrieval. Run again, it goes on where it stopped."""
    from rgate_integrations.models.local import shared_proxy
    from rgate_integrations.tuning import collect as run
    from rgate_integrations.tuning.questions import read_questions

    asked = read_questions(questions, limit, gold=True)
    searched = None if closed_book else open_index(index)
    with Bar(what=f"asking {llm}") as bar:
        run(
            asked,
            shared_proxy(llm),
            out,
            index=searched,
            k=k,
            tokens=answer_tokens,
            judge=shared_proxy(judge) if judge else None,
            report=bar.count,
        )
    Terminal().print(_summary(out, both_arms=not closed_book), soft_wrap=True)


def _summary(out: Path, *, both_arms: bool) -> str:
    """Say how many of the answers in a file are right."""
    asked = closed = opened = 0
    for _, record in read_jsonl(out):
        asked += 1
        closed += record["closed_book_correct"]
        opened += record.get("rag_correct", False)
    if not asked:
        return "There are no questions."
    text = f"{asked} questions in {out}: right without retrieval {closed / asked:.1%}"
    if both_arms:
        text += f", with retrieval {opened / asked:.1%}"
    return f"{text}."
