"""``rgate collect``, ``evaluate``, ``calibrate``, ``report`` and ``monitor``: paired data, and gates on them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from rgate_integrations.cli.index import open_index
from rgate_integrations.cli.terminal import (
    DEFAULT_GATE,
    DEFAULT_LLM,
    AnswerTokens,
    Bar,
    BudgetOption,
    Data,
    DraftOf,
    GateName,
    IndexFolder,
    LLMName,
    MaxLossOption,
    PassageCount,
    ProxyName,
    chosen_policy,
    say,
    say_table,
)
from rgate_integrations.errors import ConfigurationError
from rgate_integrations.runtime.files import json_text, write_atomically
from rgate_integrations.runtime.records import Record, read_records

if TYPE_CHECKING:
    from rgate_integrations.engine.decision_engine import DecisionEngine
    from rgate_integrations.tuning.questions import Example


def collect(
    questions: Annotated[Path, typer.Option(help="JSONL with question and gold_answers (or answer) a line.")],
    out: Annotated[Path, typer.Option(help="Paired JSONL to write; an existing one is continued.")],
    llm: LLMName = DEFAULT_LLM,
    index: IndexFolder = None,
    closed_book: Annotated[
        bool, typer.Option("--closed-book", help="Ask without retrieval only, as training needs.")
    ] = False,
    k: PassageCount = 3,
    answer_tokens: AnswerTokens = 64,
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
    judging = None if judge is None else shared_proxy(judge)
    with Bar(f"asking {llm}") as bar:
        run(
            asked,
            shared_proxy(llm),
            out,
            index=searched,
            k=k,
            tokens=answer_tokens,
            judge=judging,
            report=bar.count,
        )
    say(f"{len(asked)} questions were asked. Their answers are in {out}: rgate evaluate --data {out}")


def evaluate(
    data: Data,
    gate: GateName = DEFAULT_GATE,
    draft: DraftOf = "proxy",
    proxy: ProxyName = None,
    latency: Annotated[
        tuple[float, float] | None,
        typer.Option(help="Milliseconds of an answer without and with retrieval, for the break-even."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write the result here, as JSON.")] = None,
) -> None:
    """Evaluate a gate on paired data: AUC, accuracy against never, always, random and oracle, break-even."""
    from rgate_integrations.tuning import read_paired
    from rgate_integrations.tuning.evaluation import break_even
    from rgate_integrations.tuning.evaluation import evaluate as run

    examples: list[Example] = []
    for file in read_paired(data):
        examples += file.examples
    loaded = _gate_for(gate, draft, proxy)
    with Bar(f"gate {gate}", len(examples)) as bar:
        result, judged = run(loaded, examples, name=gate, draft=draft, report=bar.count)
    rows: list[Sequence[str]] = [_COLUMNS]
    for name, measured in {**result["sets"], "pooled": result["pooled"]}.items():
        rows.append(_row(name, measured))
    say_table(rows)
    if latency is not None:
        direct, rag = latency
        rate, gate_ms = result["pooled"]["retrieval_rate"], result["gate_ms"]
        found = result["break_even"] = break_even(rate, gate=gate_ms, direct=direct, rag=rag)
        say(
            f"mean time a question: always {found['always_ms']} ms, gated {found['gated_ms']} ms; the gate "
            f"({gate_ms:.1f} ms) pays below a retrieval rate of {found['break_even']:.1%}"
        )
    if out is not None:
        result["questions"] = []  # what `rgate report` shows of each
        for example, decision in zip(examples, judged.decisions, strict=True):
            result["questions"].append(
                {
                    "question": example.question.text,
                    "dataset": example.question.dataset,
                    "p_known": round(decision.p_known, 5),
                    "closed_book_correct": example.known,
                    "rag_correct": example.rag_correct,
                    "draft": decision.draft.text[:300] if decision.draft else None,
                }
            )
        write_atomically(out, json_text(result))
        say(f"Written to {out}.")


_COLUMNS = (
    "set",
    "n",
    "AUC",
    "95 %",
    "ECE",
    "retr. %",
    "acc. %",
    "95 %",
    "never",
    "random",
    "always",
    "oracle",
    "helped",
    "harmed",
)


def _row(name: str, measured: dict[str, Any]) -> list[str]:
    """Return the cells of `_COLUMNS`."""
    auc = [f"{end:.2f}" for end in measured["intervals"].get("auc") or ()]
    low, high = measured["intervals"]["containment_accuracy"]
    return [
        name,
        str(measured["n"]),
        _number(measured["auc"]),
        "-".join(auc),
        _number(measured["ece"]),
        _percent(measured["retrieval_rate"]),
        _percent(measured["containment_accuracy"]),
        f"{_percent(low)}-{_percent(high)}",
        _percent(measured["never"]),
        _percent(measured["random_same_rate"]),
        _percent(measured["always"]),
        _percent(measured["oracle"]),
        str(measured["helped"]),
        str(measured["harmed"]),
    ]


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def calibrate(
    data: Data,
    out: Annotated[Path, typer.Option(help="Folder for the calibrated gate.")],
    gate: GateName = DEFAULT_GATE,
    draft: DraftOf = "proxy",
    max_loss: MaxLossOption = None,
    budget: BudgetOption = None,
    probability: Annotated[
        Literal["platt", "none"], typer.Option(help="Map from scores to P(known).")
    ] = "platt",
    proxy: ProxyName = None,
) -> None:
    """Choose a gate's threshold on paired data, with a guarantee, and save the gate."""
    from rgate_integrations.gates.folder import save_gate
    from rgate_integrations.gates.registry import loadable, saved_gate
    from rgate_integrations.tuning import calibrate as run
    from rgate_integrations.tuning import read_paired

    policy = chosen_policy(max_loss, budget)
    files = read_paired(data)
    loaded = _gate_for(gate, draft, proxy)
    with Bar(f"gate {gate}", sum(len(file.examples) for file in files)) as bar:
        found = run(loaded, files, policy, report=bar.count, draft=draft, method=probability)
    save_gate(saved_gate(found.gate.gate, found.provenance), out)
    say(found.choice.guarantee, bold=True)
    facts = found.provenance
    say(
        f"threshold {found.choice.threshold:.3f}, retrieval rate {facts['retrieval_rate']:.1%} on {facts['n']} "
        f"questions; calibration error {facts['ece_before']:.3f} -> {facts['ece']:.3f}"
    )
    say(f'Saved. Use it as load_gate("{loadable(out)}") or --gate {loadable(out)}.')


def _gate_for(name: str, draft: str, proxy: str | None) -> DecisionEngine:
    """Load a gate to be evaluated; the shipped default is the one for the kind of draft.

    Raises:
        ConfigurationError: The gate reads a draft, and there is to be none.
    """
    from rgate_integrations.engine.loading import DEFAULT_GATES, load_gate
    from rgate_integrations.gates.evidence.base import expand_specs
    from rgate_integrations.gates.evidence.draft import DraftSpec

    if name == DEFAULT_GATE:
        name = DEFAULT_GATES[draft]
    gate = load_gate(name, proxy=proxy)
    if draft != "none":
        return gate
    if name == "ik":
        return gate.with_options(tokens=0)
    if any(isinstance(spec, DraftSpec) for spec in expand_specs(gate.gate.specs)):
        raise ConfigurationError(
            f"The gate {name!r} reads a draft.",
            hint=f"--draft proxy or recorded; or --gate {DEFAULT_GATE} or ik.",
        )
    return gate


def report(
    results: Annotated[list[Path], typer.Argument(help="What rgate evaluate --out wrote.")],
    html: Annotated[Path, typer.Option(help="Page to write.")] = Path("report.html"),
) -> None:
    """Write a self-contained page: curves, reliability, examples, and a threshold that can be moved."""
    from rgate_integrations.tuning.report import read_results, report_page

    write_atomically(html, report_page(read_results(results)))
    say(f"Written to {html}.")


def monitor(
    log: Annotated[Path, typer.Argument(help="Logged decisions, JSONL, as rgate decide --json prints them.")],
    gate: Annotated[Path, typer.Option(help="Folder of the tuned or calibrated gate.")],
) -> None:
    """Compare logged decisions with the calibration, and say when to calibrate again."""
    from rgate_integrations.gates.folder import read_gate
    from rgate_integrations.tuning.evaluation import measure_drift

    saved = read_gate(str(gate))
    hint = "rgate tune … or rgate calibrate … --out DIR makes a gate with one."
    calibration = Record(f"the calibration of {str(gate)!r}", 1, saved.provenance, hint)
    scores = calibration.numbers("scores")
    logged = []
    for record in read_records(log):
        p_known = record.optional_number("p_known")
        if p_known is not None and not record.fields.get("error"):  # decisions that failed have none
            logged.append(p_known)
    found = measure_drift(scores, logged, saved.threshold)
    say(
        f"{found.n} decisions: retrieval rate {found.retrieval_rate:.1%}, {found.expected_rate:.1%} at calibration; "
        f"population stability index {found.psi:.3f}"
    )
    say(found.advice, bold=True)
