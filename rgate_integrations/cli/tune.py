"""``rgate tune``: from the questions of a log to a gate for your LLM."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rgate_integrations.cli.bars import TrainingBar
from rgate_integrations.cli.gate_options import numbers
from rgate_integrations.cli.opening import KEY, answering_llm, open_index, served_model
from rgate_integrations.cli.options import DEFAULT_GATE, IndexFolder, PassageCount
from rgate_integrations.cli.output import Terminal
from rgate_integrations.errors import ConfigurationError, ModelLoadError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rgate_integrations.index.embedder import Embedder
    from rgate_integrations.models.base import Proxy
    from rgate_integrations.tuning.evaluation import StageTimes
    from rgate_integrations.tuning.fitting import FittedGate
    from rgate_integrations.tuning.labelling import LabelKind
    from rgate_integrations.tuning.policies import Policy
    from rgate_integrations.tuning.summary import Prices
    from rgate_integrations.tuning.tuner import Plan, Tuned, TuneOptions

JUDGE_KEY = "RGATE_JUDGE_API_KEY"


@dataclass(frozen=True)
class _Asked:
    """What ``rgate tune`` was asked for; see `tune`."""

    questions: Path
    out: Path
    llm: str
    model: str | None
    index: Path | None
    k: int
    answer_tokens: int
    judge: str | None
    answers: Path | None
    limit: int | None
    update: bool
    yes: bool


def tune(
    questions: Annotated[
        Path, typer.Option(help="JSONL with question and, where known, gold_answers a line.")
    ],
    llm: Annotated[
        str, typer.Option(help=f"URL of an OpenAI-compatible server (its key in {KEY}), or a local model.")
    ],
    out: Annotated[Path, typer.Option(help="Folder for the gate.")],
    model: Annotated[str | None, typer.Option(help="Name of the model on the server.")] = None,
    index: IndexFolder = None,
    k: PassageCount = 3,
    max_loss: Annotated[
        float | None,
        typer.Option(help="Lose at most this much accuracy against always retrieving; 0.02 by default."),
    ] = None,
    budget: Annotated[
        float | None, typer.Option(help="Retrieve for at most this share of the questions.")
    ] = None,
    latency: Annotated[
        str | None,
        typer.Option(help="direct=…,rag=…: what an answer costs, for the threshold of the lowest cost."),
    ] = None,
    price_in: Annotated[
        float | None, typer.Option(help="Price of a million tokens of prompts, for the report.")
    ] = None,
    price_out: Annotated[float | None, typer.Option(help="Price of a million tokens of answers.")] = None,
    confidence: Annotated[float, typer.Option(help="Confidence of the guarantee.")] = 0.95,
    labels: Annotated[
        str,
        typer.Option(
            help="gold, judge, agreement, or auto: judge with --judge, else gold if every question has it."
        ),
    ] = "auto",
    judge: Annotated[
        str | None,
        typer.Option(
            help=f"NAME of a local model, or NAME@URL of a served one, that judges (key: {JUDGE_KEY})."
        ),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="First questions only.")] = None,
    max_questions: Annotated[
        int | None, typer.Option(min=1, help="This many questions, drawn to represent all.")
    ] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="LLM calls at a time.")] = 4,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of a begun answer that are judged.")] = 32,
    num_samples: Annotated[
        int,
        typer.Option(min=0, help="Further answers at temperature 1 to each question, for soft labels."),
    ] = 0,
    answer_tokens: Annotated[int, typer.Option(min=1, help="Maximum length of an answer.")] = 64,
    answers: Annotated[
        Path | None, typer.Option(help="File of the answers; OUT.answers.jsonl by default.")
    ] = None,
    update: Annotated[bool, typer.Option("--update", help="Add questions to the gate in --out.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask before the LLM is called.")] = False,
    init_from: Annotated[
        str, typer.Option(help="Gate to start from: a shipped one, or a folder of `rgate train`.")
    ] = DEFAULT_GATE,
    seed: Annotated[int, typer.Option(help="Seed of sample and folds.")] = 0,
) -> None:
    """Ask your LLM with and without retrieval, and make a gate for it. Run again, it goes on where it stopped."""
    from rgate_integrations.tuning import TuneOptions

    stage_times = _stage_times(latency)
    options = TuneOptions(
        policy=_policy(max_loss, budget, stage_times, confidence),
        labels=_label_kind(labels, judge),
        sample=max_questions,
        concurrency=concurrency,
        tokens=tokens,
        samples=num_samples,
        seed=seed,
        prior=init_from,
        prices=_prices(price_in, price_out),
    )
    asked = _Asked(
        questions=questions,
        out=out,
        llm=llm,
        model=model,
        index=index,
        k=k,
        answer_tokens=answer_tokens,
        judge=judge,
        answers=answers,
        limit=limit,
        update=update,
        yes=yes,
    )
    console = Terminal()
    try:
        tuned = _tuned(asked, options, console)
    except KeyboardInterrupt:
        Terminal(stderr=True).print("Stopped. What was answered is kept: the same command goes on.")
        raise
    _print(tuned, console)


def _tuned(asked: _Asked, options: TuneOptions, console: Terminal) -> Tuned:
    from rgate_integrations.tuning import tune as run
    from rgate_integrations.tuning.arms import ModelArm
    from rgate_integrations.tuning.questions import read_questions

    log = read_questions(asked.questions, asked.limit)
    answering = answering_llm(asked.llm, asked.model, options.concurrency)
    notices = Terminal(stderr=True)
    index = open_index(asked.index, notices)

    bar = TrainingBar()
    with ExitStack() as shown:

        def before(plan: Plan) -> None:
            _confirm(plan, asked, options.samples, notices)
            shown.enter_context(bar)  # not before: a bar would run over the question

        return run(
            log,
            direct=ModelArm(answering, tokens=asked.answer_tokens),
            retrieve=ModelArm(answering, index=index, k=asked.k, tokens=asked.answer_tokens),
            out=asked.out,
            options=replace(
                options,
                judge=_judge(asked, options.concurrency),
                embedder=_embedder(notices),
                answers=asked.answers,
            ),
            update=asked.update,
            before=before,
            progress=bar,
        )


def _judge(asked: _Asked, concurrency: int) -> Proxy | None:
    """Return the model that judges answers: ``NAME``, or ``NAME@URL``."""
    from rgate_integrations.models.local import shared_proxy

    if asked.judge is None:
        return None
    name, at, address = asked.judge.partition("@http")
    if not at:
        return shared_proxy(asked.judge)
    return served_model(f"http{address}", name, JUDGE_KEY, concurrency)


def _embedder(notices: Terminal) -> Embedder | None:
    """Return the embedder, if its model is here."""
    from rgate_integrations.index.embedder import DEFAULT_EMBEDDER, SentenceEmbedder
    from rgate_integrations.models.download import resolve_model

    try:
        resolve_model(DEFAULT_EMBEDDER)
    except ModelLoadError as error:
        notices.print(f"note: without an embedder a sample is drawn at random; {error.hint}", style="dim")
        return None
    return SentenceEmbedder()


def _confirm(plan: Plan, asked: _Asked, samples: int, notices: Terminal) -> None:
    """Say what will be asked, and wait for a yes."""
    notices.quiet = notices.quiet and asked.yes  # a question is asked with what it is about
    calls = sum(plan.calls.values())
    arms = f"{plan.calls['direct']} calls without and {plan.calls['retrieve']} with retrieval"
    if samples:
        arms += f", and {plan.calls['sample']} for {samples} samples each,"
    notices.print(
        f"{plan.questions} questions: {arms} to {asked.llm}, about {plan.tokens:,} tokens.", soft_wrap=True
    )
    if asked.judge is not None:
        judged = (2 + samples) * plan.questions
        notices.print(f"Then {judged} answers at most are judged by {asked.judge}.", soft_wrap=True)
    if calls == 0 or asked.yes:
        return
    if not _is_asked():
        raise ConfigurationError("The LLM was not asked: nobody is at the terminal to say yes.", hint="--yes")
    typer.confirm("Go on?", abort=True, err=True)


def _is_asked() -> bool:
    """Whether a person can be asked."""
    return sys.stdin.isatty()


def _policy(
    max_loss: float | None, budget: float | None, times: StageTimes | None, confidence: float
) -> Policy:
    from rgate_integrations.tuning.policies import Budget, MaxLoss, MinCost

    if max_loss is not None and budget is not None:
        raise ConfigurationError("Give one guarantee.", hint="--max-loss or --budget")
    if budget is not None:
        return Budget(budget, confidence)
    if max_loss is None and times is not None:
        return MinCost(retrieval=max(times.rag - times.direct, 0.0), answer=times.direct)
    return MaxLoss(0.02 if max_loss is None else max_loss, confidence)


def _stage_times(text: str | None) -> StageTimes | None:
    from rgate_integrations.tuning.evaluation import StageTimes

    if text is None:
        return None
    given = numbers(text, ("direct", "rag"), needed=("direct", "rag"))
    return StageTimes(gate=0.0, direct=given["direct"], rag=given["rag"])


def _prices(read: float | None, written: float | None) -> Prices | None:
    from rgate_integrations.tuning.summary import Prices

    if read is None and written is None:
        return None
    if read is None or written is None:
        raise ConfigurationError("One price is missing.", hint="--price-in and --price-out")
    return Prices(read, written)


def _label_kind(labels: str, judge: str | None) -> LabelKind:
    from rgate_integrations.tuning.labelling import LABEL_KINDS

    if labels == "auto" and judge is not None:
        return "judge"
    for kind in LABEL_KINDS:
        if kind == labels:
            return kind
    raise ConfigurationError(f"--labels {labels!r} is not known.", hint="gold, judge or agreement")


def _print(tuned: Tuned, console: Terminal) -> None:
    from rgate_integrations.gates.registry import loadable

    labels, name = tuned.labels, loadable(tuned.folder)
    if tuned.failed:
        console.print(f"{tuned.failed} calls failed; the same command asks them again.", style="bold yellow")
    console.print(
        f"{len(labels.known)} questions with a label ({labels.kind}), {labels.unknown} without. "
        f"{labels.description}",
        soft_wrap=True,
    )
    _print_gate("question alone", tuned.question, tuned.notes.question, console)
    _print_gate("answer first", tuned.answer_first, tuned.notes.answer_first, console)
    console.print(
        f'Saved. Use it as load_gate("{name}") or --gate {name}; the report is {tuned.folder}/report.html.',
        soft_wrap=True,
    )


def _print_gate(name: str, gate: FittedGate | None, notes: Sequence[str], console: Terminal) -> None:
    """Print what is said of a gate; the first sentence is its guarantee."""
    kept = gate is not None and gate.choice.guaranteed
    console.print(f"{name}: {notes[0]}", style="bold" if kept else "bold yellow", soft_wrap=True)
    for note in notes[1:]:
        console.print(note, soft_wrap=True)
