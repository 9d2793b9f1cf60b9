"""`tune`: from the questions of a log to a gate for one's own LLM, in one call that can be stopped and run again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, get_args

import numpy as np

from rgate_integrations.engine.loading import DEFAULT_GATE, Corpus, load_gate
from rgate_integrations.errors import ConfigurationError
from rgate_integrations.gates.artifacts import ANSWER_FIRST
from rgate_integrations.gates.folder import CARD, read_gate, read_prior, tuned_files
from rgate_integrations.index.embedder import Embedder
from rgate_integrations.models.base import LanguageModel, Proxy
from rgate_integrations.runtime.files import find_folder, locked, write_folder
from rgate_integrations.tuning.arms import Arm, as_arm, describe_thinking, sampling_arms
from rgate_integrations.tuning.calibration import MaxLoss, Policy
from rgate_integrations.tuning.collection import Answers, ArmName, Progress, answers_file, no_progress
from rgate_integrations.tuning.fitting import (
    FittedGate,
    check_learnable,
    fit_gate,
    read_questions_with,
)
from rgate_integrations.tuning.labelling import JUDGE, LabelKind, Labels, label
from rgate_integrations.tuning.questions import Questions, read_questions
from rgate_integrations.tuning.report import Notes, write_card, write_notes, write_page

REPORT = "report.html"


@dataclass(frozen=True)
class TuneOptions:
    """How a gate is tuned.

    Attributes:
        policy: Chooses the threshold: `MaxLoss` or `Budget`.
        labels: What the labels are made from; ``"auto"`` is the judge if there is one.
        judge: A model that judges answers against gold ones.
        max_questions: How many questions are asked, drawn at random; all when None.
        embedder: Finds answers that say the same in other words, for agreement; the words alone count when None.
        concurrency: Calls at a time, at least 1; the user's own objects are called from threads.
        tokens: How many tokens of a partial answer the answer-first gate reads, at least 1.
        num_samples: Further answers without retrieval to each question, drawn at temperature 1, at least 0. The gates
            are fitted to the share of them that is right (KBM, section 2.2). ``direct`` must be a model then.
        seed: Seed of everything.
        init_from: The gate that is corrected, heads or a probe: the name of a shipped one, or a folder.
        proxy: The proxy model, instead of the shipped gate's own.
        corpus: What is searched, as of `load_gate`: then the report says what it covers. The gates are fitted as
            without; give it to `load_gate` with them.

    Raises:
        ConfigurationError: A number is out of its range, or the kind of labels is not known.
    """

    policy: Policy = MaxLoss(0.02)  # noqa: RUF009  it is frozen
    labels: LabelKind = "auto"
    judge: LanguageModel | None = None
    max_questions: int | None = None
    embedder: Embedder | None = None
    concurrency: int = 4
    tokens: int = 32
    num_samples: int = 0
    seed: int = 0
    init_from: str = DEFAULT_GATE
    proxy: Proxy | str | None = None
    corpus: Corpus | None = None

    def __post_init__(self) -> None:
        if self.labels not in get_args(LabelKind):
            raise ConfigurationError(
                f"Labels {self.labels!r} are not known.", hint=", ".join(get_args(LabelKind))
            )
        least = {"max_questions": 1, "concurrency": 1, "tokens": 1, "num_samples": 0}
        for name, minimum in least.items():
            value = getattr(self, name)
            if value is not None and value < minimum:
                raise ConfigurationError(f"{name} must be at least {minimum}, not {value}.")


@dataclass(frozen=True, repr=False)
class TuneResult:
    """A tuned gate, and how it came about.

    Attributes:
        folder: The gate for the question alone: ``load_gate(folder)``. Its sub-folder ``answer-first`` has the other.
        question: The gate for the question alone.
        answer_first: The gate that judges a partial answer; None if the LLM gives no log-probabilities.
        labels: What it was fitted to.
        failed: How many calls failed; the same call asks them again.
        notes: What the report says of both gates.
    """

    folder: Path
    question: FittedGate
    answer_first: FittedGate | None
    labels: Labels
    failed: int
    notes: Notes

    def __repr__(self) -> str:
        return "\n".join(
            [
                f"{self.folder}: tuned on {len(self.labels.known)} questions ({self.labels.kind}); "
                f"{self.labels.unlabelled} have no label, {self.failed} calls failed.",
                *(f"{gate}: {said[0]}" for gate, said in self.notes.items()),
                f"More is in {self.folder / REPORT}.",
            ]
        )


def tune(
    questions: Questions,
    *,
    direct: Any,
    retrieve: Any,
    out: str | Path,
    options: TuneOptions | None = None,
    update: bool = False,
    before: Callable[[int, Mapping[str, int]], None] | None = None,
    progress: Progress = no_progress,
) -> TuneResult:
    """Ask an LLM the questions of a log without and with retrieval, and fit a gate to what came out.

    Answers are kept as they come. Run again after a kill, it goes on: no call that was answered is made again. The
    gate is written at the end, whole. It starts from a shipped gate and leaves it only as far as held-out questions
    say so; its threshold is chosen on scores from fits that have not seen the question.

    Args:
        questions: The log: a JSONL file, or texts and objects; see
            `rgate_integrations.tuning.questions.read_questions`.
        direct: Answers without retrieval: a LangChain runnable or LlamaIndex engine that takes the question, a
            `rgate_integrations.models.base.LanguageModel`, or a function of the question.
        retrieve: Answers with retrieval, likewise.
        out: Folder for the gate.
        options: How; the defaults when None.
        update: Whether ``out`` may exist: it is replaced by a gate that is fitted to old and new questions.
        before: Called with the number of questions and of LLM calls that are left to make: ``"direct"``,
            ``"retrieve"`` and, if there are any, ``"sample"``. What it raises ends the run.
        progress: Progress callback: ``(label, done, total)``.

    Raises:
        ConfigurationError: ``out`` exists, an arm cannot answer, or the answers are from elsewhere.
        DataFormatError: There is no question, or too few or too equal labels.
        ModelLoadError: The prior is neither heads nor a probe, or cannot be read.
        ServerError: An LLM could not be asked.
        NoAnswerError: Answers were cut off while the LLM thought.
        WriteError: A disk is full; what was answered is kept.
        LockedError: Another process is tuning there.
    """
    options = options or TuneOptions()
    folder = Path(out)
    read_prior(options.init_from)
    _check_out(folder, update)
    answers_path = answers_file(folder)
    arms: dict[ArmName, Arm] = {
        "direct": as_arm(direct, "direct"),
        "retrieve": as_arm(retrieve, "retrieve"),
    }
    arms |= sampling_arms(arms["direct"], options.num_samples)
    asked = read_questions(questions)
    if options.max_questions is not None:
        drawn = np.random.default_rng(options.seed).permutation(len(asked))[: options.max_questions]
        asked = [asked[index] for index in np.sort(drawn)]
    with locked(answers_path):
        answers = Answers(answers_path, arms)
        if before is not None:
            before(len(asked), answers.count_missing(asked))
        failed = answers.ask(asked, concurrency=options.concurrency, progress=progress)
        return _fit_and_write(answers, folder, failed, options, progress)


def _check_out(folder: Path, update: bool) -> None:
    """Refuse before anything is asked what could not be written afterwards.

    Raises:
        ConfigurationError: The folder exists and is not to be updated, or is something else than a tuned gate.
    """
    there = find_folder(folder)
    if not there.exists():
        return
    if not update:
        raise ConfigurationError(
            f"{str(folder)!r} exists.",
            hint="update=True (--update) adds questions to it; or name another folder.",
        )
    if not there.is_dir() or read_gate(folder).method != "tuned":
        raise ConfigurationError(f"{str(folder)!r} is not a tuned gate.", hint="Name another folder.")


def _fit_and_write(
    answers: Answers, folder: Path, failed: int, options: TuneOptions, progress: Progress
) -> TuneResult:
    """Label the answers, read the questions, fit both gates, and write them."""
    labels = label(
        answers,
        options.labels,
        judge=options.judge,
        embedder=options.embedder,
        concurrency=options.concurrency,
        progress=progress,
    )
    check_learnable(labels)
    direct = answers.arms["direct"]
    llm = direct.name + describe_thinking(direct, [each.direct for each in labels.answered])
    gate = load_gate(options.init_from, proxy=options.proxy, corpus=options.corpus)
    readings = read_questions_with(gate, [each.question.text for each in labels.answered], progress)
    facts: dict[str, Any] = {"prior": options.init_from, "failed": failed}
    if labels.kind == "judge":
        facts["judge"] = {"name": labels.judge, "prompt": JUDGE.hash}
    fit = partial(fit_gate, labels, readings, options.policy, seed=options.seed, facts=facts, llm=llm)
    progress("fitting", 0, 2)
    question = fit()
    progress("fitting", 1, 2)
    begun = fit(tokens=options.tokens)
    assert question is not None  # noqa: S101  labels were checked
    notes = write_notes(labels, question, begun)
    files = tuned_files(question.artifact, options.init_from)
    if begun is not None:
        for name, content in tuned_files(begun.artifact, options.init_from).items():
            files[f"{ANSWER_FIRST}/{name}"] = content
    files[REPORT] = write_page(labels, question, begun, readings, notes)
    files[CARD] = write_card(folder.name, labels, llm, notes, failed)
    write_folder(folder, files)
    return TuneResult(folder, question, begun, labels, failed, notes)
