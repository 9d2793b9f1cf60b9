"""``rgate tune``, ``rgate train`` and ``rgate ability``: make a gate for your LLM, and measure what it knows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from rgate_integrations.cli.corpus import open_index
from rgate_integrations.cli.terminal import (
    DEFAULT_GATE,
    KEPT_ANSWERS,
    AnsweringLLM,
    AnswerTokens,
    BudgetOption,
    CorpusFolders,
    Data,
    ExtraBody,
    Judge,
    JudgedName,
    MaxLossOption,
    ModelOnServer,
    PassageCount,
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
from rgate_integrations.errors import ConfigurationError

if TYPE_CHECKING:
    from rgate_integrations.tuning.collection import Progress
    from rgate_integrations.tuning.training import TrainingOptions
    from rgate_integrations.tuning.tuner import TuneResult

_LLM = "the LLM of the data"
_STOPPED = (
    "No gate was saved. Drafts and answers are kept: the same command reuses them. Fine-tuning starts again."
)

Labelling = Annotated[
    Literal["auto", "gold", "judge", "agreement"],
    typer.Option(
        help="auto: judge with --judge, gold if all questions have gold answers, else agreement; "
        "--update keeps gold and judge."
    ),
]
Concurrency = Annotated[int, typer.Option(min=1, help="Number of concurrent LLM calls.")]
NumSamples = Annotated[
    int, typer.Option(min=0, help="Answers to sample per question; the label is the share of right ones.")
]
TrainedProxy = Annotated[
    str, typer.Option("--proxy", help="Model that the gate reads: name (rgate download), folder or Hub id.")
]
MaxQuestions = Annotated[int | None, typer.Option(min=1, help="Ask only this many, drawn at random.")]
Update = Annotated[
    bool,
    typer.Option(
        "--update",
        help="Add these questions to those of the gate in --out, and by default keep its --max-loss or --budget.",
    ),
]
SelfLabel = Annotated[
    bool, typer.Option("--self-label", help="Label the --proxy model's own answers, by gold_answers.")
]
DraftOf = Annotated[
    Literal["proxy", "recorded", "none"],
    typer.Option(
        "--draft",
        help="Draft to learn from: proxy (the --proxy model writes it), recorded (closed_book_text of the data) or "
        "none.",
    ),
]
TrainedGate = Annotated[
    Literal["probe", "ik", "slimplm", "adapt", "boundary", "rewriter"],
    typer.Option(help="What to train: a probe, the gate of a paper, or the rewriter of claims."),
]


def tune(
    questions: Annotated[Path, typer.Option(help="JSONL with question and, if known, gold_answers.")],
    llm: AnsweringLLM,
    index: Annotated[Path, typer.Option(help="Index of your passages: rgate index build.")],
    out: Annotated[Path, typer.Option(help="Folder for the gate.")],
    model: ModelOnServer = None,
    k: PassageCount = 3,
    max_loss: MaxLossOption = None,
    budget: BudgetOption = None,
    labels: Labelling = "auto",
    judge: Judge = None,
    max_questions: MaxQuestions = None,
    concurrency: Concurrency = 4,
    num_samples: NumSamples = 0,
    answer_tokens: AnswerTokens = 64,
    think: Think = "as-is",
    thinking_tokens: ThinkingTokens = 2048,
    extra_body: ExtraBody = "{}",
    update: Update = False,
    yes: Annotated[bool, typer.Option("--yes", help="Call the LLM without confirmation.")] = False,
    init_from: Annotated[str, typer.Option(help="Gate that the new one corrects.")] = DEFAULT_GATE,
    llm_name: JudgedName = "",
    corpus: CorpusFolders = None,
) -> None:
    """Ask your LLM with and without retrieval, and make a gate for it. If interrupted, run it again."""
    from rgate_integrations.index.embedder import SentenceEmbedder
    from rgate_integrations.runtime.files import check_output
    from rgate_integrations.tuning import TuneOptions
    from rgate_integrations.tuning import tune as run
    from rgate_integrations.tuning.arms import ModelArm

    check_output(out, questions, index, *(corpus or ()))
    passages = open_index(index)
    options = TuneOptions(
        policy=make_policy(max_loss, budget),
        labels=labels,
        judge=open_judge(judge, concurrency, thinking_tokens),
        max_questions=max_questions,
        embedder=SentenceEmbedder(),
        concurrency=concurrency,
        num_samples=num_samples,
        init_from=init_from,
        llm_name=llm_name,
        corpus=corpus or None,
    )
    answering = open_llm(llm, model, concurrency, request_options(think, extra_body, thinking_tokens))
    direct = ModelArm(answering, tokens=answer_tokens)
    with progress_bar(stopped=KEPT_ANSWERS) as report:
        result = run(
            questions,
            direct=direct,
            retrieve=replace(direct, index=passages, k=k),
            out=out,
            options=options,
            update=update,
            before=partial(_confirm, report, llm, judge, yes),
            progress=report,
        )
    _say_result(result)


def _say_result(result: TuneResult) -> None:
    _say_failed(result.failed)
    labels = result.labels
    say(
        f"{len(labels.known)} questions with a label ({labels.kind}), {labels.unlabelled} without. "
        f"{labels.description}"
    )
    # Gold answers that no answer contains show here first.
    say(f"Right without retrieval: {labels.known.mean():.1%}; with retrieval: {labels.rag.mean():.1%}.")
    for gate, (guarantee, *notes) in result.notes.items():
        say(f"{gate}: {guarantee}", bold=True)
        for note in notes:
            say(note)
    say_saved(result.folder)
    say(f"The report is {result.folder}/report.html.")


def _confirm(
    report: Progress,
    llm: str,
    judge: str | None,
    yes: bool,
    num_questions: int,
    calls: Mapping[str, int],
) -> None:
    """Print the number of calls. If there are any and ``yes`` is false, ask whether to continue; "no" aborts.

    Then ``report`` shows the progress bar, which would otherwise appear only after the first call.
    """
    remaining = [f"{number} {kind}" for kind, number in calls.items() if number]
    say(f"{num_questions} questions, with LLM calls to {llm}: {', '.join(remaining) or 'none'}.", err=True)
    if judge is not None:
        say(f"Then {judge} judges the answers.", err=True)
    if remaining and not yes:
        typer.confirm("Continue (--yes skips this question)?", abort=True, err=True)
    report("asking the LLM", 0, sum(calls.values()))


def train(
    data: Data,
    out: Annotated[Path, typer.Option(help="Folder for the trained gate.")],
    gate: TrainedGate = "probe",
    model: TrainedProxy = "smollm2-135m-instruct",
    draft: DraftOf = "proxy",
    label: Annotated[
        str,
        typer.Option(
            help="Key of the label (a boolean, or a number in [0, 1]); match_ratio, computed from gold_answers and "
            "closed_book_text; or accuracy or certainty, sampled from --proxy (30 answers each) if not in the data."
        ),
    ] = "closed_book_correct",
    tokens: Annotated[int, typer.Option(min=1, max=128, help="Number of draft tokens to read.")] = 32,
    folds: Annotated[int, typer.Option(min=2, help="Folds of a probe's cross-validation.")] = 5,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Seed of all random choices.")] = 0,
    self_label: SelfLabel = False,
    system: Annotated[str | None, typer.Option(help="System prompt of your direct arm (probe only).")] = None,
    llm: Annotated[str, typer.Option(help="Name of the LLM whose answers were labelled.")] = _LLM,
) -> None:
    """Train a gate on labelled questions, or a rewriter of claims on annotated claims, and save it.

    A probe takes minutes, and its cross-validated AUC is printed. All others are LoRA adapters of the --proxy model.
    """
    from rgate_integrations.gates.folder import ADAPTER, check_gate_output
    from rgate_integrations.runtime.files import check_output, locked
    from rgate_integrations.tuning.training import SELF_LABEL, TrainingOptions

    if system is not None and gate != "probe":
        raise ConfigurationError(f"--system needs --gate probe, not {gate!r}.", hint="Omit --system.")
    if self_label and (gate == "rewriter" or draft == "recorded"):
        raise ConfigurationError(
            "--self-label cannot be combined with --gate rewriter or --draft recorded.",
            hint="Omit --self-label, or use a --gate other than rewriter with --draft proxy or --draft none.",
        )
    if gate == "probe":
        check_gate_output(out, *data, model)
    else:
        check_output(out, *data, model, files=(ADAPTER,))
    options = TrainingOptions(
        draft=draft,
        tokens=tokens,
        folds=folds,
        seed=seed,
        label=SELF_LABEL if self_label else label,
        llm=llm,
        system=system,
    )
    with locked(out), progress_bar("reading questions", stopped=_STOPPED) as report:
        metrics = _train(gate, data, model, out, options, report, self_label=self_label).get("metrics")
    if metrics:
        areas = {**metrics["auc"], "mean of the sets": metrics["auc_mean"], "pooled": metrics["auc_pooled"]}
        say_table(
            ("set", "cross-validated AUC"),
            [(name, f"{area:.3f}") for name, area in areas.items() if area is not None],
        )
    if gate == "rewriter":
        say(f"Saved. Use it as ModelRewriter(proxy, adapter={str(out)!r}).")
    else:
        say_saved(out)


def _train(
    gate: str,
    paths: Sequence[Path],
    model: str,
    out: Path,
    options: TrainingOptions,
    report: Progress,
    *,
    self_label: bool,
) -> dict[str, Any]:
    """Read or make the labels, train and save; return the facts about a probe's training, {} for other gates."""
    from rgate_integrations.gates.folder import save_gate
    from rgate_integrations.models.local import shared_proxy
    from rgate_integrations.models.proxies import gate_proxy
    from rgate_integrations.tuning.questions import read_examples
    from rgate_integrations.tuning.training import SAMPLES, label_own_answers, needs_sampling, train_probe

    if gate == "rewriter":
        from rgate_integrations.tuning.fine_tuning import train_rewriter

        train_rewriter(paths, model, out, options, progress=report)
        return {}
    if self_label or needs_sampling(paths, options.label):
        files = label_own_answers(
            paths,
            shared_proxy(model),
            options.label,
            prompt=options.prompt,
            seed=options.seed,
            progress=report,
        )
        source = model if self_label else f"{SAMPLES} answers of {model}"
        llm = model if options.llm == _LLM else options.llm
        options = replace(options, labelled_by=source, llm=llm)
    else:
        files = read_examples(paths, options.label)
    known = [example.known for file in files for example in file.examples]
    say(f"{len(known)} questions, {sum(known) / len(known):.0%} known", err=True)
    if gate != "probe":
        from rgate_integrations.tuning.fine_tuning import train_adapter

        train_adapter(gate, files, model, out, options, progress=report)
        return {}
    artifact = train_probe(files, gate_proxy(model), options, progress=report)
    save_gate(artifact, out)
    return artifact.provenance


def ability(
    llm: AnsweringLLM,
    out: Annotated[Path, typer.Option(help="Folder for the ability.")],
    model: ModelOnServer = None,
    concurrency: Concurrency = 4,
    think: Think = "as-is",
    thinking_tokens: ThinkingTokens = 2048,
    extra_body: ExtraBody = "{}",
) -> None:
    """Ask your LLM 100 short questions, and measure how much it knows. Run it again to resume."""
    from rgate_integrations.tuning.ability import measure_ability
    from rgate_integrations.tuning.arms import ModelArm

    answering = open_llm(llm, model, concurrency, request_options(think, extra_body, thinking_tokens))
    with progress_bar("reading questions", stopped=KEPT_ANSWERS) as report:
        measured = measure_ability(ModelArm(answering), out, concurrency=concurrency, progress=report)
    _say_failed(measured.failed)
    estimate, prior = measured.ability, measured.prior
    margin = 1.96 * estimate.sd
    say(f"{estimate.llm}: {estimate.source}.")
    say(
        f"Ability {estimate.theta:+.2f} (95 %: {estimate.theta - margin:+.2f} to {estimate.theta + margin:+.2f}); "
        "Llama-3.1-8B-Instruct has 0. "
        f"Before measuring: {prior.theta:+.2f} ± {prior.sd:.2f}, {prior.source}.",
        bold=True,
    )
    say(f'Saved. Use it as load_gate(llm_name="{measured.folder}").')


def _say_failed(calls: int) -> None:
    if calls:
        say(
            f"{calls} calls failed, or were cut off before an answer. Run the command again to repeat them "
            "(rgate tune: with --update).",
            fg="yellow",
        )
