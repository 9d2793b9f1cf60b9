"""``rgate evaluate``, ``rgate calibrate`` and ``rgate monitor``: what a gate is worth on your own data."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from rgate_integrations.errors import ConfigurationError
from rgate_integrations.files import json_text, write_atomically

Data = Annotated[list[Path], typer.Option("--data", help="Paired JSONL; several may follow.")]
More = Annotated[list[Path] | None, typer.Argument(metavar="[FILE]...", help="More files of --data.")]
GateName = Annotated[str, typer.Option("--gate", help="Gate: a name (see rgate gates) or a folder.")]
DraftOf = Annotated[
    str,
    typer.Option(
        "--draft",
        help="proxy: its own; recorded: closed_book_text, the LLM's own words; none: question only.",
    ),
]
Proxy = Annotated[str | None, typer.Option("--proxy", help="Proxy model: catalogue name, folder or Hub id.")]


def evaluate(
    data: Data,
    more: More = None,
    gate: GateName = "default",
    draft: DraftOf = "proxy",
    threshold: Annotated[
        float | None, typer.Option(min=0.0, help="Instead of the gate's own threshold.")
    ] = None,
    versus: Annotated[
        str | None, typer.Option(help="A second gate: the difference on the same questions.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="First questions of each file.")] = None,
    proxy: Proxy = None,
    times: Annotated[
        str | None, typer.Option(help="Milliseconds for the break-even: direct=…,rag=…,search=….")
    ] = None,
    out: Annotated[Path | None, typer.Option("--json", help="Write the result here.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the bootstrap.")] = 0,
) -> None:
    """Evaluate a gate on paired data: AUC, accuracy against never, always, random and oracle, break-even."""
    from rgate_integrations.evaluation.evaluate import compare
    from rgate_integrations.evaluation.evaluate import evaluate as run
    from rgate_integrations.evaluation.paired import read_paired

    stages = _stages(times) if times else None
    questions = [
        q for f in read_paired([*data, *(more or [])]) for q in (f.records[:limit] if limit else f.records)
    ]
    found = {}
    for name in dict.fromkeys([gate, *([versus] if versus else [])]):
        with Progress(console=Console(stderr=True), transient=True) as progress:
            task = progress.add_task(f"gate {name}", total=len(questions))
            found[name] = run(
                gate_for(name, draft, proxy),
                questions,
                name=name,
                draft=draft,  # type: ignore[arg-type]
                threshold=threshold,
                seed=seed,
                report=partial(_advance, progress, task),
            )
    result, judged = found[gate]
    console = Console(highlight=False, width=None if Console().is_terminal else 140)
    console.print(_table(result))
    if stages is not None:
        result["break_even"] = _break_even(result, stages, console)
    if versus:
        result["versus"] = {"gate": versus, **compare(judged, found[versus][1], seed=seed)}
        _print_difference(gate, result["versus"], console)
    if out is not None:
        result["questions"] = [
            {
                "question": q.question,
                "dataset": q.dataset,
                "p_known": round(d.p_known, 5),
                "closed_book_correct": q.closed_book_correct,
                "rag_correct": q.rag_correct,
                "draft": d.draft.text[:300] if d.draft else None,
            }
            for q, d in zip(questions, judged.decisions, strict=True)
        ]
        write_atomically(out, json_text(result))
        console.print(f"Written to {out}.", soft_wrap=True)


def calibrate(
    data: Data,
    out: Annotated[Path, typer.Option(help="Folder for the calibrated gate.")],
    more: More = None,
    gate: GateName = "default",
    draft: DraftOf = "proxy",
    budget: Annotated[
        float | None, typer.Option(help="Retrieve for at most this share of the questions.")
    ] = None,
    max_loss: Annotated[
        float | None, typer.Option(help="Lose at most this much in-accuracy against always.")
    ] = None,
    cost: Annotated[
        str | None, typer.Option(help="retrieval=…,draft=…,answer=…[,wrong=…]: the least expected cost.")
    ] = None,
    band: Annotated[
        float | None,
        typer.Option(
            help="Set the band of --gate cascade:FIRST,SECOND: lose at most this against SECOND for all."
        ),
    ] = None,
    confidence: Annotated[float, typer.Option(help="Confidence of the promise.")] = 0.95,
    probability: Annotated[str, typer.Option(help="platt, temperature, isotonic or none.")] = "platt",
    proxy: Proxy = None,
    seed: Annotated[int, typer.Option(help="Seed of the split.")] = 0,
) -> None:
    """Choose a gate's threshold, or a cascade's band, on paired data, with a promise, and save the gate."""
    from rgate_integrations.calibration import Budget, Cost, MaxLoss, Policy, calibrate_band
    from rgate_integrations.calibration import calibrate as run
    from rgate_integrations.evaluation.paired import read_paired
    from rgate_integrations.gates.registry import prompt_hashes
    from rgate_integrations.saved import save_calibrated

    if sum(option is not None for option in (budget, max_loss, cost, band)) != 1:
        raise ConfigurationError("Give one policy.", hint="--budget, --max-loss, --cost or --band")
    if probability not in ("platt", "temperature", "isotonic", "none"):
        raise ConfigurationError(f"--probability {probability!r} is not known.", hint="platt is the default.")
    policy: Policy | None = None
    if budget is not None:
        policy = Budget(budget, confidence)
    elif max_loss is not None:
        policy = MaxLoss(max_loss, confidence)
    elif cost is not None:
        policy = Cost(**_numbers(cost, ("retrieval", "draft", "answer", "wrong"), needed="retrieval"))
    files = read_paired([*data, *(more or [])])
    with Progress(console=Console(stderr=True), transient=True) as progress:
        judgments = sum(len(f.records) for f in files) * (1 if policy else 2)
        task = progress.add_task(f"gate {gate}", total=judgments)
        options: dict[str, Any] = {"draft": draft, "seed": seed, "report": partial(_advance, progress, task)}
        loaded = gate_for(gate, draft, proxy)
        if policy is not None:
            found = run(loaded, files, policy, method=probability, **options)  # type: ignore[arg-type]
        else:
            found = calibrate_band(loaded, files, loss=band or 0.0, confidence=confidence, **options)
    calibrated = found.gate
    save_calibrated(
        calibrated.config(), prompt_hashes(calibrated), calibrated.threshold, found.provenance, out
    )
    console = Console(highlight=False)
    facts = found.provenance
    console.print(found.chosen.promise, style="bold" if found.chosen.kept else "bold yellow")
    if policy is not None:
        measured = f"questions; calibration error {facts['ece_before']:.3f} -> {facts['ece']:.3f}"
    else:
        least, most = (100 * end for end in facts["interval"])
        measured = (
            f"held-out questions; band from {facts['low']:.3f} to {facts['high']:.3f}: {facts['spared']:.1%} need no "
            f"draft; against its second gate for all: in-accuracy {100 * facts['difference']:+.1f} points "
            f"[{least:+.1f}, {most:+.1f}], retrieval rate {100 * facts['retrieval_difference']:+.1f} points"
        )
    console.print(
        f"threshold {found.chosen.threshold:.3f}, retrieval rate {facts['retrieval_rate']:.1%} on {facts['n']} "
        + measured
    )
    console.print(f'Saved. Use it as load_gate("{out}") or --gate {out}.', soft_wrap=True)


def _advance(progress: Progress, task: Any, done: int) -> None:
    progress.update(task, completed=done)


def gate_for(name: str, draft: str, proxy: str | None) -> Any:
    """Load a gate to be evaluated; the shipped default is the one for the kind of draft."""
    from rgate_integrations.loading import DEFAULT_GATES, load_gate

    if draft not in ("proxy", "recorded", "none"):
        raise ConfigurationError(f"--draft must be proxy, recorded or none, not {draft!r}.")
    gate = load_gate(DEFAULT_GATES[draft] if name == "default" else name, proxy=proxy)
    if draft == "none" and "tokens" in type(gate).model_fields and name == "ik":
        return gate.with_options(tokens=0)
    if draft == "none" and isinstance(gate, Gate) and any(_drafts(s) for s in gate.specs):
        raise ConfigurationError(
            f"The gate {name!r} reads a draft.", hint="--draft proxy or recorded; or --gate default or ik."
        )
    return gate


def _drafts(spec: Any) -> bool:
    from rgate_integrations.evidence import draft_spec

    return draft_spec(spec) is not None


def _numbers(text: str, names: tuple[str, ...], needed: str = "") -> dict[str, float]:
    found: dict[str, float] = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        try:
            found[name.strip()] = float(value.strip().removesuffix("ms"))
        except ValueError as error:
            raise ConfigurationError(f"{part!r} is not name=number.") from error
    unknown = set(found) - set(names)
    if unknown or (needed and needed not in found):
        raise ConfigurationError(
            f"{sorted(unknown)[0]!r} is not known." if unknown else f"{needed}=… is missing.",
            hint=f"Names: {', '.join(names)}.",
        )
    return found


def _stages(text: str) -> dict[str, float]:
    found = _numbers(text, ("direct", "rag", "search", "gate"), needed="rag")
    if "direct" not in found:
        raise ConfigurationError("direct=… is missing.", hint="The time of an answer without retrieval.")
    return found


def _break_even(result: dict[str, Any], stages: dict[str, float], console: Console) -> dict[str, Any]:
    from rgate_integrations.evaluation.break_even import StageTimes

    times = StageTimes(**{"gate": result["gate_ms"], **stages})
    rate = result["pooled"]["retrieval_rate"]
    found = {
        "always_ms": round(times.always(), 2),
        "gated_ms": round(times.gated(rate), 2),
        "speculative_ms": round(times.gated(rate, speculative=True), 2),
        "break_even": round(times.break_even(), 4),
        "break_even_speculative": round(times.break_even(speculative=True), 4),
    }
    console.print(
        f"mean time a question: always {found['always_ms']} ms, gated {found['gated_ms']} ms, with speculative "
        f"search {found['speculative_ms']} ms; the gate ({times.gate:.1f} ms) pays below a retrieval rate of "
        f"{found['break_even']:.1%} (speculative: {found['break_even_speculative']:.1%})"
    )
    return found


def _table(result: dict[str, Any]) -> Table:
    threshold = "its own" if result["threshold"] is None else f"{result['threshold']:.3f}"
    title = f"gate {result['gate']}, draft {result['draft']}, threshold {threshold}"
    table = Table(box=None, title=title, title_justify="left")
    columns = (
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
    )
    table.add_column("set")
    for name in (*columns, "area", "helped", "harmed"):
        table.add_column(name, justify="right")
    for name, m in [*result["sets"].items(), ("pooled", result["pooled"])]:
        interval, accuracy = m["intervals"].get("auc"), m["intervals"]["in_accuracy"]
        table.add_row(
            name,
            str(m["n"]),
            _number(m["auc"]),
            f"{interval[0]:.2f}-{interval[1]:.2f}" if interval else "",
            _number(m["auc_utility"]),
            _number(m["ece"]),
            f"{100 * m['retrieval_rate']:.1f}",
            f"{100 * m['in_accuracy']:.1f}",
            f"{100 * accuracy[0]:.1f}-{100 * accuracy[1]:.1f}",
            *(f"{100 * m[k]:.1f}" for k in ("never", "random_same_rate", "always", "oracle")),
            _number(m["area_between"]),
            str(m["helped"]),
            str(m["harmed"]),
        )
    return table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _print_difference(gate: str, found: dict[str, Any], console: Console) -> None:
    auc = found["auc_difference"]
    low, high = found["in_accuracy_interval"]
    console.print(
        f"{gate} minus {found['gate']}: AUC "
        + (
            "-"
            if auc is None
            else f"{auc:+.3f} [{found['auc_interval'][0]:+.3f}, {found['auc_interval'][1]:+.3f}]"
        )
        + f", in-accuracy {100 * found['in_accuracy_difference']:+.1f} points [{100 * low:+.1f}, {100 * high:+.1f}]; "
        f"right where the other is wrong: {found['only_first']} against {found['only_second']} "
        f"(McNemar p = {found['p_value']:.3g})"
    )
