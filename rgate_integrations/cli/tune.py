"""``rgate tune``: from the questions of a log to a gate for your LLM."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rgate_integrations.cli.options import (
    DEFAULT_GATE,
    KEY,
    PassageCount,
    answering_llm,
    open_index,
    served_model,
)
from rgate_integrations.cli.output import Terminal, training_bar
from rgate_integrations.errors import ConfigurationError, ModelLoadError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rgate_integrations.index.embedder import Embedder
    from rgate_integrations.models.base import Proxy
    from rgate_integrations.tuning.calibration import Policy
    from rgate_integrations.tuning.fitting import FittedGate
    from rgate_integrations.tuning.tuner import Plan, Tuned

JUDGE_KEY = "RGATE_JUDGE_API_KEY"


def tune(
    questions: Annotated[Path, typer.Option(help="JSONL with question, and gold_answers where known.")],
    llm: Annotated[str, typer.Option(help=f"URL of an OpenAI-compatible server (key: {KEY}), or a model.")],
    index: Annotated[Path, typer.Option(help="Index of your passages: rgate index build.")],
    out: Annotated[Path, typer.Option(help="Folder for the gate.")],
    model: Annotated[str | None, typer.Option(help="Name of the model on the server.")] = None,
    k: PassageCount = 3,
    max_loss: Annotated[float | None, typer.Option(help="Most accuracy to lose; 0.02 by default.")] = None,
    budget: Annotated[float | None, typer.Option(help="Largest share to retrieve for.")] = None,
    confidence: Annotated[float, typer.Option(help="Confidence of the guarantee.")] = 0.95,
    labels: Annotated[
        str, typer.Option(help="gold, judge, agreement, or auto: judge with --judge, gold if all have it.")
    ] = "auto",
    judge: Annotated[
        str | None, typer.Option(help=f"Model that judges: NAME, or NAME@URL on a server (key: {JUDGE_KEY}).")
    ] = None,
    max_questions: Annotated[int | None, typer.Option(min=1, help="So many, drawn at random.")] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="LLM calls at a time.")] = 4,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of a begun answer that are judged.")] = 32,
    num_samples: Annotated[int, typer.Option(min=0, help="Answers to draw, for soft labels.")] = 0,
    answer_tokens: Annotated[int, typer.Option(min=1, help="Maximum length of an answer.")] = 64,
    update: Annotated[bool, typer.Option("--update", help="Add questions to the gate in --out.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask before the LLM is called.")] = False,
    init_from: Annotated[str, typer.Option(help="Gate to start from.")] = DEFAULT_GATE,
    seed: Annotated[int, typer.Option(help="Seed of sample and folds.")] = 0,
) -> None:
    """Ask your LLM with and without retrieval, and make a gate for it. Run again, it goes on where it stopped."""
    from rgate_integrations.tuning import TuneOptions
    from rgate_integrations.tuning import tune as run
    from rgate_integrations.tuning.arms import ModelArm

    notices, bar = Terminal(stderr=True), training_bar()
    options = TuneOptions(
        policy=_policy(max_loss, budget, confidence),
        labels=labels,  # type: ignore[arg-type]  # TuneOptions checks it
        judge=None if judge is None else _judge(judge, concurrency),
        sample=max_questions,
        embedder=_embedder(notices),
        concurrency=concurrency,
        tokens=tokens,
        samples=num_samples,
        seed=seed,
        prior=init_from,
    )
    direct = ModelArm(answering_llm(llm, model, concurrency), tokens=answer_tokens)
    retrieve = replace(direct, index=open_index(index), k=k)
    with ExitStack() as shown:

        def before(plan: Plan) -> None:
            _confirm(plan, llm, judge, num_samples, yes)
            shown.enter_context(bar)  # not before: a bar would run over the question

        arms: dict[str, Any] = {
            "direct": direct,
            "retrieve": retrieve,
            "before": before,
            "progress": bar.tell,
        }
        try:
            tuned = run(questions, out=out, options=options, update=update, **arms)
        except KeyboardInterrupt:
            notices.print("Stopped. What was answered is kept: the same command goes on.")
            raise
    _print(tuned, Terminal())


def _judge(judge: str, concurrency: int) -> Proxy:
    """Return the model that judges answers: ``NAME``, or ``NAME@URL``."""
    from rgate_integrations.models.local import shared_proxy

    name, at, address = judge.partition("@http")
    if not at:
        return shared_proxy(judge)
    return served_model(f"http{address}", name, JUDGE_KEY, concurrency)


def _embedder(notices: Terminal) -> Embedder | None:
    """Return the embedder, if its model is here."""
    from rgate_integrations.index.embedder import DEFAULT_EMBEDDER, SentenceEmbedder
    from rgate_integrations.models.download import resolve_model

    try:
        resolve_model(DEFAULT_EMBEDDER)
    except ModelLoadError as error:
        notices.print(f"note: without an embedder answers agree by their words; {error.hint}", style="dim")
        return None
    return SentenceEmbedder()


def _confirm(plan: Plan, llm: str, judge: str | None, samples: int, yes: bool) -> None:
    """Say what will be asked, and wait for a yes."""
    notices = Terminal(stderr=True)
    notices.quiet = notices.quiet and yes  # a question is asked with what it is about
    arms = f"{plan.calls['direct']} calls without and {plan.calls['retrieve']} with retrieval"
    if samples:
        arms += f", and {plan.calls['sample']} for {samples} samples each,"
    notices.print(
        f"{plan.questions} questions: {arms} to {llm}, about {plan.tokens:,} tokens.", soft_wrap=True
    )
    if judge is not None:
        judged = (2 + samples) * plan.questions
        notices.print(f"Then {judged} answers at most are judged by {judge}.", soft_wrap=True)
    if yes or not sum(plan.calls.values()):
        return
    if not _is_asked():
        raise ConfigurationError("The LLM was not asked: nobody is at the terminal to say yes.", hint="--yes")
    typer.confirm("Go on?", abort=True, err=True)


def _is_asked() -> bool:
    """Whether a person can be asked."""
    return sys.stdin.isatty()


def _policy(max_loss: float | None, budget: float | None, confidence: float) -> Policy:
    from rgate_integrations.tuning import Budget, MaxLoss

    if max_loss is not None and budget is not None:
        raise ConfigurationError("Give one guarantee.", hint="--max-loss or --budget")
    if budget is not None:
        return Budget(budget, confidence)
    return MaxLoss(0.02 if max_loss is None else max_loss, confidence)


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
