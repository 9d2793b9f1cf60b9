"""`tune`: fits a gate to your LLM from the questions of a log, in one call that can be interrupted and resumed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import numpy as np
from pydantic import TypeAdapter, ValidationError

from rgate_integrations.decision import valid_choice, valid_count
from rgate_integrations.engine.decision_engine import DecisionEngine
from rgate_integrations.engine.loading import DEFAULT_GATE, Corpus, load_gate
from rgate_integrations.errors import ConfigurationError, DataFormatError
from rgate_integrations.gates.ability import resolve_ability
from rgate_integrations.gates.folder import (
    ANSWER_FIRST,
    CARD,
    CONFIG,
    read_gate,
    read_prior,
    tuned_files,
    unreadable,
)
from rgate_integrations.index.embedder import Embedder
from rgate_integrations.models.base import LanguageModel, Proxy
from rgate_integrations.models.proxies import require_states
from rgate_integrations.runtime.files import check_output, expand, find_folder, locked, write_folder
from rgate_integrations.tuning.arms import Arm, ModelArm, as_arm, describe_thinking, sampling_arms
from rgate_integrations.tuning.calibration import DEFAULT_POLICY, LEAST, Policy, check_policy
from rgate_integrations.tuning.collection import (
    Answers,
    ArmName,
    Progress,
    answers_file,
    check_continuable,
    no_progress,
)
from rgate_integrations.tuning.evaluation import MAX_SEED, question_folds
from rgate_integrations.tuning.fitting import (
    FittedGate,
    check_learnable,
    fit_gate,
    make_readings,
)
from rgate_integrations.tuning.labelling import JUDGE, LabelKind, Labels, label
from rgate_integrations.tuning.questions import Question, Questions, read_questions, without_repetitions
from rgate_integrations.tuning.report import Notes, write_card, write_notes, write_page

REPORT = "report.html"


@dataclass(frozen=True)
class TuneOptions:
    """Options of `tune`.

    Attributes:
        policy: Chooses the threshold: `MaxLoss` or `Budget`. When None, the policy of the gate that is updated, or
            ``MaxLoss(0.02)`` for a new gate.
        labels: How to label, see `rgate_integrations.tuning.labelling.LabelKind`. If a gate is updated whose labels
            are from gold answers or a judge, ``"auto"`` keeps their kind.
        judge: Model that judges answers against gold ones; ``labels="judge"`` needs one, ``"auto"`` uses it if given.
        max_questions: Maximum number of questions to ask, drawn at random, at least 1; all when None.
        embedder: Detects answers of the same meaning, for ``labels="agreement"``; when None, only words are compared.
        concurrency: Maximum concurrent calls, at least 1; your own objects are called from worker threads.
        tokens: Tokens of a partial answer that the answer-first gate reads, at least 1.
        num_samples: Number of additional answers per question without retrieval, sampled at temperature 1, at least
            0. The gates are fitted to the share of right samples (KBM paper, section 2.2). Needs a model as
            ``direct``.
        seed: Seed of the drawn questions and of the fit; the samples do not depend on it.
        init_from: The gate that tuning corrects, the prior: a shipped gate's name, a folder, or a Hub id. Its method
            must be ``"heads"``, as the default gate's is, or ``"probe"``.
        llm_name: The LLM whose knowledge that gate judges, see `load_gate`; empty for the name of ``direct``, if that
            is a model whose name is known.
        proxy: The proxy model, instead of that gate's own.
        corpus: The corpora whose coverage the report shows, see `load_gate`. They are not saved with the gate: pass
            them to `load_gate` again.

    Raises:
        ConfigurationError: A number is out of range, ``labels`` is unknown or needs a judge, or ``policy`` is neither
            `MaxLoss` nor `Budget`.
    """

    policy: Policy | None = None
    labels: LabelKind = "auto"
    judge: LanguageModel | None = None
    max_questions: int | None = None
    embedder: Embedder | None = None
    concurrency: int = 4
    tokens: int = 32
    num_samples: int = 0
    seed: int = 0
    init_from: str = DEFAULT_GATE
    llm_name: str = ""
    proxy: Proxy | str | None = None
    corpus: Corpus | None = None

    def __post_init__(self) -> None:
        valid_choice(self.labels, "labels", get_args(LabelKind))
        if self.labels == "judge" and self.judge is None:
            raise ConfigurationError('labels="judge" needs a judge.', hint="Pass judge= (--judge).")
        if self.policy is not None:
            check_policy(self.policy)
        minima = {"max_questions": 1, "concurrency": 1, "tokens": 1, "num_samples": 0, "seed": 0}
        for name, minimum in minima.items():
            if getattr(self, name) is not None:
                valid_count(getattr(self, name), name, least=minimum, most=MAX_SEED)


@dataclass(frozen=True, repr=False)
class TuneResult:
    """The result of `tune`.

    Attributes:
        folder: Folder of the gate for the question alone; its subfolder ``answer-first`` has `answer_first`, if any.
        question: The gate for the question alone.
        answer_first: The gate that judges partial answers; None if fewer than 20 answers without retrieval have
            log-probabilities, or if all of these are right, or all wrong.
        labels: The labels to which both gates were fitted.
        failed: Number of failed calls, not counting the judge's; running `tune` again with ``update=True`` repeats
            only failed calls.
        notes: The report on both gates, as sentences.
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
                *(f"{gate}: {guarantee}" for gate, (guarantee, *_) in self.notes.items()),
                f"See {self.folder / REPORT} for details.",
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
    """Ask an LLM the questions of a log without and with retrieval, and fit gates to the answers.

    Each answer is saved immediately, so an interrupted run resumes without repeating answered calls.

    Args:
        questions: The log; see `rgate_integrations.tuning.questions.read_questions`. Questions that differ only in
            case, punctuation and articles are asked once.
        direct: Answers without retrieval: a LangChain runnable or LlamaIndex engine that takes the question, a
            `rgate_integrations.models.base.LanguageModel`, or a function of the question.
        retrieve: Answers with retrieval; the same types.
        out: Folder for the gate.
        options: Options; the defaults when None.
        update: Whether ``out`` may exist. It is then replaced by gates fitted to old and new questions.
        before: Called before the first LLM call with the number of questions and the number of calls per kind
            (``"direct"``, ``"retrieve"``, ``"sample"``). If it raises an exception, the run ends.
        progress: Progress callback: ``(label, done, total)``.

    Raises:
        ConfigurationError: ``out`` exists and ``update`` is false, or ``out`` contains the file ``questions`` or is
            not a tuned gate. Or ``direct`` or ``retrieve`` is of an unsupported type, or ``direct`` cannot give
            samples. Or one of them, or the judge, has other settings than when it gave the earlier answers.
        DataFormatError: The log cannot be read, ``out`` exists without its file of answers, fewer than
            20 questions have labels, or all labels are the same.
        ModelLoadError: The gate ``options.init_from`` cannot be read or corrected, or the gate in ``out`` is damaged.
        RGateError: The gate ``options.init_from`` has a proxy without hidden states, or could not judge a question.
        MissingDependencyError: scikit-learn or SciPy is not installed.
        ServerError: The LLM or the judge could not be reached, or too many calls failed.
        NoAnswerError: Answers were cut off, for example while the LLM was still thinking.
        WriteError: A file could not be written, for example because the disk is full; the answers are kept.
        LockedError: Another process is using ``out``.
    """
    options = options or TuneOptions()
    folder = expand(out)
    # Check the prior and the folder first, so that errors are raised before any LLM call is paid for.
    read_prior(options.init_from)
    gate = _load_prior(options, as_arm(direct, "direct"))
    next(question_folds(2, 2, seed=0))  # needs scikit-learn, as the fit does
    options = _check_replaceable(folder, update, questions, options)
    arms: dict[ArmName, Arm] = {"direct": as_arm(direct, "direct"), "retrieve": as_arm(retrieve, "retrieve")}
    arms |= sampling_arms(arms["direct"], options.num_samples)
    to_ask = _draw(questions, options)
    with locked(answers_file(folder)):  # not the folder, which is replaced as a whole at the end
        answers = Answers(answers_file(folder), arms)
        _check_enough([*to_ask, *(answered.question for answered in answers.complete())], options)
        if before is not None:
            before(len(to_ask), answers.count_missing(to_ask))
        failed = answers.ask(to_ask, concurrency=options.concurrency, progress=progress)
        return _fit_and_write(answers, gate, folder, failed, options, progress)


def _load_prior(options: TuneOptions, direct: Arm) -> DecisionEngine:
    """Return the gate to be corrected. It judges the LLM of the options, or else that of the arm if it is known."""
    gate = load_gate(options.init_from, proxy=options.proxy, corpus=options.corpus, llm_name=options.llm_name)
    require_states(gate.get_proxy())
    is_known = isinstance(direct, ModelArm) and not resolve_ability(direct.name, folders=False)[1]
    return gate.for_llm(direct.name, "the LLM that answers") if is_known else gate


def _draw(source: Questions, options: TuneOptions) -> list[Question]:
    """Return the questions to ask: a random sample of the log, in its order."""
    questions = without_repetitions(read_questions(source), lambda question: question)
    order = np.random.default_rng(options.seed).permutation(len(questions))
    return [questions[index] for index in np.sort(order[: options.max_questions])]


def _check_enough(questions: Sequence[Question], options: TuneOptions) -> None:
    """Check, before any LLM call, that enough questions may get a label.

    Raises:
        DataFormatError: Fewer than 20 may.
    """
    needs_gold = options.labels in ("gold", "judge") or (
        options.labels == "auto" and options.judge is not None
    )
    usable = {question.normalised for question in questions if question.gold or not needs_gold}
    if len(usable) < LEAST:
        raise DataFormatError(
            f"Only {len(usable)} questions{' have gold answers' if needs_gold else ''}; at least {LEAST} are needed.",
            hint='Add "gold_answers" to the questions, or use labels="agreement" (--labels agreement).'
            if needs_gold
            else "Add questions: a useful guarantee needs hundreds.",
        )


def _check_replaceable(folder: Path, update: bool, questions: Questions, options: TuneOptions) -> TuneOptions:
    """Check, before any LLM call, that the gate can be written; return the options, completed by an earlier gate's.

    Its labels count unless they are by agreement, which only stands in for others.

    Raises:
        ConfigurationError: The file ``questions`` is inside the folder; or the folder exists, and ``update`` is false
            or the folder is not a tuned gate; or its labels need a judge.
        DataFormatError: ``update`` is true, but the folder's file of answers is missing.
        ModelLoadError: ``update`` is true, but the gate in the folder is damaged.
    """
    check_output(folder, questions)
    existing = find_folder(folder)
    if existing.exists() and not update:
        raise ConfigurationError(
            f"{str(folder)!r} already exists.",
            hint="If it is a tuned gate, add questions to it with update=True (--update). Otherwise, choose another "
            "folder.",
        )
    if not existing.exists():
        return options
    earlier = read_gate(folder) if (existing / CONFIG).is_file() else None
    if earlier is None or earlier.method != "tuned":
        raise ConfigurationError(
            f"{str(folder)!r} is not a tuned gate, so it cannot be updated.", hint="Choose another folder."
        )
    check_continuable(folder)
    try:
        policy = TypeAdapter(Policy).validate_python(earlier.provenance.get("policy"))
    except ValidationError as error:
        raise unreadable(folder, error) from error
    labels = earlier.provenance.get("labels")
    if options.labels != "auto" or options.judge is not None or labels not in ("gold", "judge"):
        labels = options.labels
    return replace(options, policy=options.policy or policy, labels=labels)


def _fit_and_write(
    answers: Answers,
    gate: DecisionEngine,
    folder: Path,
    failed: int,
    options: TuneOptions,
    progress: Progress,
) -> TuneResult:
    """Label the answers, run the gate to be corrected on their questions, and fit and write the new gates."""
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
    llm = direct.name + describe_thinking(direct, [answered.direct for answered in labels.answered])
    readings = make_readings(gate, [answered.question.text for answered in labels.answered], progress)
    facts: dict[str, Any] = {"prior": options.init_from, "failed": failed}
    if labels.kind == "judge":
        facts["judge"] = {"name": labels.judge, "prompt": JUDGE.hash}
    fit = partial(
        fit_gate, labels, readings, options.policy or DEFAULT_POLICY, seed=options.seed, facts=facts, llm=llm
    )
    progress("fitting", 0, 2)
    question = fit()
    progress("fitting", 1, 2)
    answer_first = fit(tokens=options.tokens)
    assert question is not None  # noqa: S101  the labels were checked
    notes = write_notes(labels, question, answer_first)
    files = tuned_files(question.artifact, options.init_from)
    if answer_first is not None:
        for name, content in tuned_files(answer_first.artifact, options.init_from).items():
            files[f"{ANSWER_FIRST}/{name}"] = content
    files[REPORT] = write_page(labels, question, answer_first, readings, notes)
    files[CARD] = write_card(folder.name, labels, llm, notes, failed)
    # All files at once, so that an interrupted run never leaves half a gate.
    write_folder(folder, files)
    return TuneResult(folder, question, answer_first, labels, failed, notes)
