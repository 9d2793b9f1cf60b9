"""``rgate collect``, ``evaluate``, ``calibrate``, ``report``, ``monitor``: collect answers, measure gates."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from rgate_integrations.cli.corpus import open_index
from rgate_integrations.cli.terminal import (
    DEFAULT_GATE,
    DEFAULT_LLM,
    KEPT_ANSWERS,
    NOT_WRITTEN,
    AnsweringLLM,
    AnswerTokens,
    BudgetOption,
    CorpusFolders,
    Data,
    ExtraBody,
    GateName,
    IndexFolder,
    Judge,
    JudgedName,
    MaxLossOption,
    ModelOnServer,
    PassageCount,
    ProxyName,
    Think,
    ThinkingTokens,
    make_policy,
    open_judge,
    open_llm,
    progress_bar,
    request_options,
    say,
    say_saved,
    say_table,
)
from rgate_integrations.errors import ConfigurationError, DataFormatError

if TYPE_CHECKING:
    from rgate_integrations.decision import Decision
    from rgate_integrations.engine.decision_engine import DecisionEngine
    from rgate_integrations.gates.artifacts import SavedGate
    from rgate_integrations.tuning.questions import Example

JudgedDraft = Annotated[
    Literal["proxy", "recorded"],
    typer.Option(
        "--draft",
        help="Draft to judge: proxy (written by the gate, if it reads one) or recorded (closed_book_text).",
    ),
]
_CONCURRENCY = 4  # concurrent LLM calls of `collect`


def collect(
    questions: Annotated[
        Path, typer.Option(help="JSONL with question and gold_answers (or answer) per line.")
    ],
    out: Annotated[
        Path, typer.Option(dir_okay=False, help="Paired JSONL to write; an existing one is continued.")
    ],
    llm: AnsweringLLM = DEFAULT_LLM,
    model: ModelOnServer = None,
    index: IndexFolder = None,
    closed_book: Annotated[
        bool, typer.Option("--closed-book", help="Only ask without retrieval, which is enough for training.")
    ] = False,
    k: PassageCount = 3,
    answer_tokens: AnswerTokens = 64,
    judge: Judge = None,
    think: Think = "as-is",
    thinking_tokens: ThinkingTokens = 2048,
    extra_body: ExtraBody = "{}",
) -> None:
    """Make paired data: your LLM's answers with and without retrieval. Run it again to resume."""
    from rgate_integrations.runtime.files import check_output
    from rgate_integrations.runtime.records import read_records
    from rgate_integrations.tuning import collect as run
    from rgate_integrations.tuning.questions import Question, read_questions

    check_output(out, questions)
    to_ask = read_questions(questions, gold=True)
    passages = None if closed_book else open_index(index)
    judging = open_judge(judge, _CONCURRENCY, thinking_tokens)
    answering = open_llm(llm, model, _CONCURRENCY, request_options(think, extra_body, thinking_tokens))
    with progress_bar(f"asking {llm}", stopped=KEPT_ANSWERS) as report_progress:
        run(
            to_ask,
            answering,
            out,
            index=passages,
            k=k,
            tokens=answer_tokens,
            judge=judging,
            progress=report_progress,
        )
    # The file may have questions of earlier runs.
    n = len({q.key for q in map(Question.from_record, read_records(out))} & {q.key for q in to_ask})
    # Evaluating needs the answers with passages, too.
    say(
        f"{n} of {len(to_ask)} questions are answered, in {out}. "
        f"{'' if n == len(to_ask) else 'Run the command again to repeat the failed calls. '}"
        f"Next: rgate {'train --out GATE' if closed_book else 'evaluate'} --data {shlex.quote(str(out))}"
    )


def evaluate(
    data: Data,
    gate: GateName = DEFAULT_GATE,
    draft: JudgedDraft = "proxy",
    proxy: ProxyName = None,
    llm_name: JudgedName = "",
    corpus: CorpusFolders = None,
    latency: Annotated[
        tuple[float, float] | None,
        typer.Option(help="Milliseconds for an answer without and with retrieval, for the break-even rate."),
    ] = None,
    out: Annotated[Path | None, typer.Option(dir_okay=False, help="Write the result here, as JSON.")] = None,
) -> None:
    """Evaluate a gate on paired data: AUC, and accuracy versus never, always, random and oracle retrieval.

    Columns: ECE is the calibration error of P(known); retr. and acc. are the gate's retrieval rate and accuracy;
    never, random (at that rate), always and oracle are the accuracies of other ways to decide. Among the skipped
    questions, helped counts those that only the answer without retrieval gets right, and harmed those that only the
    answer with retrieval gets right.
    """
    from rgate_integrations.runtime.files import check_output, json_text, write_atomically
    from rgate_integrations.tuning import read_paired
    from rgate_integrations.tuning.evaluation import break_even
    from rgate_integrations.tuning.evaluation import evaluate as run
    from rgate_integrations.tuning.questions import all_examples

    if latency is not None and not all(0 <= milliseconds < math.inf for milliseconds in latency):
        raise ConfigurationError(
            f"--latency must be two finite numbers of at least 0, not {latency[0]:g} and {latency[1]:g}.",
            hint="For example, --latency 300 900.",
        )
    if out is not None:
        check_output(out, *data)
    examples = all_examples(read_paired(data))
    loaded = _load_judged(gate, draft, proxy, llm_name, corpus)
    with progress_bar("asking the gate", stopped=NOT_WRITTEN) as report_progress:
        result, judged = run(loaded, examples, name=gate, draft=draft, progress=report_progress)
    measured = [*result["sets"].items(), ("pooled", result["pooled"])]  # a set may have this name, too
    say_table(_COLUMNS, [_row(name, numbers) for name, numbers in measured])
    if corpus:
        shares = [f"{name} {share:.1%}" for name, share in result["covered"].items()]
        say(f"questions that a corpus covers: {', '.join(shares) or 'none'}")
    if latency is not None:
        direct, rag = latency
        rate, gate_ms = result["pooled"]["retrieval_rate"], result["gate_ms"]
        saving = result["break_even"] = break_even(rate, gate=gate_ms, direct=direct, rag=rag)
        say(
            f"mean time per question: always {saving['always_ms']} ms, gated {saving['gated_ms']} ms; the gate "
            f"({gate_ms:.1f} ms) pays off below a retrieval rate of {saving['break_even']:.1%}"
        )
    if out is not None:
        result["questions"] = list(map(_as_question, examples, judged.decisions))
        write_atomically(out, json_text(result))
        say(f"Written to {out}.")


def _as_question(example: Example, decision: Decision) -> dict[str, Any]:
    """Return a question with its labels and its decision as JSON values, for ``rgate report``."""
    return {
        "question": example.question.text,
        "dataset": example.question.dataset,
        "p_known": round(decision.p_known, 5),
        "override": None if decision.override is None else decision.override.retrieve,
        "p_covered": decision.p_covered,
        "corpus": decision.corpora[0] if decision.corpora else None,
        "closed_book_correct": example.known,
        "rag_correct": example.rag_correct,
        "draft": decision.draft.text[:300] if decision.draft else None,
    }


_COLUMNS = (
    "set",
    "n",
    "AUC",
    "95 %",
    "ECE",
    "retr.",
    "acc.",
    "95 %",
    "never",
    "random",
    "always",
    "oracle",
    "helped",
    "harmed",
)


def _row(name: str, measured: dict[str, Any]) -> list[str]:
    """Return a row of the table, with one cell per column of `_COLUMNS`."""
    # The AUC is undefined if all labels are the same, and has no interval if there are few of one.
    ends = [f"{end:.2f}" for end in measured["intervals"].get("auc", ())]
    low, high = measured["intervals"]["containment_accuracy"]
    return [
        name,
        str(measured["n"]),
        "" if measured["auc"] is None else f"{measured['auc']:.3f}",
        "-".join(ends) or ("" if measured["auc"] is None else "too few"),
        f"{measured['ece']:.3f}",
        f"{measured['retrieval_rate']:.1%}",
        f"{measured['containment_accuracy']:.1%}",
        f"{low:.1%}-{high:.1%}",
        f"{measured['never']:.1%}",
        f"{measured['random_same_rate']:.1%}",
        f"{measured['always']:.1%}",
        f"{measured['oracle']:.1%}",
        str(measured["helped"]),
        str(measured["harmed"]),
    ]


def calibrate(
    data: Data,
    out: Annotated[Path, typer.Option(help="Folder for the calibrated gate.")],
    gate: Annotated[str, typer.Option(help="Gate: a name (see rgate gates) or a folder.")] = DEFAULT_GATE,
    draft: JudgedDraft = "proxy",
    max_loss: MaxLossOption = None,
    budget: BudgetOption = None,
    proxy: ProxyName = None,
    llm_name: JudgedName = "",
) -> None:
    """Calibrate P(known), choose a threshold that keeps to --max-loss or --budget, and save the gate.

    With enough questions the limit is guaranteed, with 95 % confidence. The command prints whether it is.
    """
    from rgate_integrations.gates.folder import check_gate_output, save_gate
    from rgate_integrations.gates.registry import saved_gate
    from rgate_integrations.tuning import calibrate as run
    from rgate_integrations.tuning import read_paired
    from rgate_integrations.tuning.calibration import DEFAULT_POLICY

    policy = make_policy(max_loss, budget) or DEFAULT_POLICY
    check_gate_output(out, *data, gate, proxy)
    files = read_paired(data)
    loaded = _load_judged(gate, draft, proxy, llm_name)
    with progress_bar("asking the gate", stopped=NOT_WRITTEN) as report_progress:
        calibration = run(loaded, files, policy, progress=report_progress, draft=draft)
    save_gate(saved_gate(calibration.gate.gate, calibration.provenance), out)
    say(calibration.choice.guarantee, bold=True)
    facts = calibration.provenance
    say(
        f"threshold {calibration.choice.threshold:.3f}, retrieval rate {facts['retrieval_rate']:.1%} on {facts['n']} "
        f"questions; calibration error {facts['ece_before']:.3f} -> {facts['ece']:.3f}"
    )
    if facts["repeated"]:
        say(f"{facts['repeated']} repeated questions were left out; of each, the first line counts.")
    say_saved(out)


def _load_judged(
    name: str, draft: str, proxy: str | None, llm_name: str, corpus: Sequence[Path] | None = None
) -> DecisionEngine:
    """Return the gate to evaluate or calibrate; ``"default"`` means the shipped gate for this kind of draft."""
    from rgate_integrations.engine.loading import DEFAULT_GATES, load_gate

    if name == DEFAULT_GATE:
        name = DEFAULT_GATES[draft]
    return load_gate(name, proxy=proxy, llm_name=llm_name, corpus=corpus or None)


def report(
    results: Annotated[list[Path], typer.Argument(help="Results of rgate evaluate --out.")],
    html: Annotated[Path, typer.Option(dir_okay=False, help="Page to write.")] = Path("report.html"),
) -> None:
    """Write an HTML page about evaluations: curves, reliability, examples, and a slider for the threshold."""
    from rgate_integrations.runtime.files import check_output, write_atomically
    from rgate_integrations.tuning.report import read_results, report_page

    check_output(html, *results)
    write_atomically(html, report_page(read_results(results)))
    say(f"Written to {html}.")


def monitor(
    log: Annotated[
        Path, typer.Argument(help="JSONL of logged decisions, as rgate decide --json prints them.")
    ],
    gate: Annotated[str, typer.Option(help="Folder of the tuned or calibrated gate.")],
) -> None:
    """Compare logged decisions with those at calibration."""
    from rgate_integrations.gates.folder import read_gate
    from rgate_integrations.runtime.records import Record, read_records
    from rgate_integrations.tuning.evaluation import is_judged, measure_drift

    saved = read_gate(gate)
    if "scores" not in saved.provenance:
        raise ConfigurationError(
            f"The gate {gate!r} is not calibrated.", hint="Make one with rgate tune or rgate calibrate."
        )
    calibration = Record(
        f"the calibration of {gate!r}",
        saved.provenance,
        hint="Make the gate with rgate tune or rgate calibrate.",
    )
    logged = []
    has_p_known = False
    for record in read_records(log, hint="Remove the line if its writing was interrupted."):
        p_known = record.optional_number("p_known")
        has_p_known = has_p_known or p_known is not None
        if p_known is not None and not 0 <= p_known <= 1:
            raise record.error("p_known is not in [0, 1]")
        if other := _describe_other_gate(record.fields, saved):
            # `rgate decide` has no drafts to judge.
            command = (
                "" if getattr(saved, "tokens", 0) else f": rgate decide --gate {shlex.quote(gate)} --json"
            )
            raise DataFormatError(
                f"{record.where}: {other} decided, not {gate!r} ({saved.method}).",
                hint=f"Log only the decisions of that gate{command}.",
            )
        if p_known is not None and is_judged(p_known, *map(record.fields.get, ("override", "error"))):
            logged.append(p_known)
    if not has_p_known:
        raise DataFormatError(
            f"No line of {str(log)!r} has p_known.", hint="Log decisions, as rgate decide --json prints them."
        )
    scores = calibration.numbers("scores")
    n = calibration.optional_number("scored") or calibration.optional_number("n") or len(scores)
    drift = measure_drift(scores, n, logged, saved.threshold)
    say(
        f"{drift.n} decisions: P(known) below the threshold in {drift.retrieval_rate:.1%}, {drift.expected_rate:.1%} "
        f"at calibration; largest difference at any threshold {drift.distance:.2f} (95 %: ± {drift.margin:.2f})"
    )
    say(drift.advice, bold=True)


def _describe_other_gate(logged: dict[str, Any], saved: SavedGate) -> str:
    """Return which gate made a logged decision if it cannot be the saved gate; otherwise an empty string.

    Thresholds may differ: each call may have its own.
    """
    from rgate_integrations.gates.artifacts import TunedArtifact
    from rgate_integrations.gates.composite import TUNED_ON
    from rgate_integrations.gates.registry import list_gates

    name, llm = logged.get("gate"), logged.get("llm")
    # A client calls its server's gate "remote".
    if name not in (saved.method, "remote") and name in [info.name for info in list_gates()]:
        return f"the gate {name!r}"
    if not isinstance(saved, TunedArtifact):
        return ""
    if llm and llm != saved.llm + TUNED_ON:
        return f"a gate that judged {llm!r}"
    # With answer first, the gate for the question alone makes those decisions for which the LLM is not asked.
    has_draft = logged.get("draft") is not None
    is_settled = logged.get("error") is not None or logged.get("override") is not None
    if name == saved.method and not is_settled and has_draft != (saved.tokens > 0):
        return f"a gate that judged the question {'with' if has_draft else 'without'} a draft"
    return ""
