"""Estimates how much an LLM knows, from its answers without passages to 100 shipped questions, the anchors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from rgate_integrations.engine.decision_engine import DecisionEngine
from rgate_integrations.engine.loading import load_gate
from rgate_integrations.errors import DataFormatError
from rgate_integrations.gates.ability import ABILITY, Ability, resolve_ability, save_measured
from rgate_integrations.gates.heads import ALWAYS_READ
from rgate_integrations.gates.probability import logits, sigmoids
from rgate_integrations.runtime.arrays import Float64Array
from rgate_integrations.runtime.files import SHIPPED, check_output, expand, locked
from rgate_integrations.runtime.records import read_records
from rgate_integrations.runtime.text import is_correct
from rgate_integrations.tuning.arms import Arm, describe_thinking
from rgate_integrations.tuning.collection import Answers, Progress, answers_file, no_progress
from rgate_integrations.tuning.fitting import ridge_logistic
from rgate_integrations.tuning.questions import Question

MIN_ANSWERS = 20
"""Minimum number of answers for an estimate."""

_MIN_SD = 0.5  # of the prior, because a copy on a server may be quantised or fine-tuned, whatever its name


@dataclass(frozen=True)
class AbilityEstimate:
    """The result of `measure_ability`.

    Attributes:
        ability: The measured ability.
        prior: The ability that the name of the LLM suggests.
        failed: Number of failed calls; running `measure_ability` again repeats only these.
        folder: Folder that holds the ability; pass it to `load_gate` as ``llm_name=``.
    """

    ability: Ability
    prior: Ability
    failed: int
    folder: Path


def read_anchors() -> list[Question]:
    """Return the 100 anchor questions that ship with the package; they are CC0, and from no benchmark.

    The ``dataset`` of each is its group: ``"well-known"``, ``"middling"``, ``"obscure"`` or ``"multi-step"``.
    The groups alternate.
    """
    return [
        Question.from_record(record, record.text("kind"))
        for record in read_records(SHIPPED / "anchors.jsonl")
    ]


def measure_ability(
    arm: Arm, out: str | Path, *, concurrency: int = 4, progress: Progress = no_progress
) -> AbilityEstimate:
    """Ask an LLM the anchor questions without passages, and estimate its ability from its answers.

    Each answer is saved immediately in a file next to ``out``, so an interrupted run resumes without
    repeating answered calls. An answer is right if it contains a gold answer, compared by whole words.

    The estimate is the most probable ability given the answers, where the ability that the LLM's name suggests is
    the prior. The default gate gives the difficulty of each question.

    Args:
        arm: What asks the LLM, such as a `rgate_integrations.tuning.arms.ModelArm`; its name is the LLM's name.
        out: Folder for the ability; an earlier ability is replaced.
        concurrency: Maximum concurrent calls.
        progress: Progress callback: ``(label, done, total)``.

    Raises:
        ConfigurationError: ``out`` holds something other than an ability, or earlier answers were made with
            other settings, such as another LLM.
        DataFormatError: Fewer than 20 questions were answered.
        ServerError: The LLM could not be reached, or too many calls failed.
        NoAnswerError: Answers were cut off, for example while the LLM was still thinking.
        RGateError: The default gate could not judge a question, for example because its models are missing.
        LockedError: Another process is using ``out``.
        WriteError: A file could not be written, for example because the disk is full.
    """
    folder = expand(out)
    check_output(folder, files=(ABILITY,))
    # Not the file of `tune` and `collect`, whose other questions would count as anchors.
    answers_path = answers_file(folder.with_name(f"{folder.name}.ability"))
    # We lock the answers and not the folder, because the folder is replaced as a whole at the end.
    with locked(answers_path):
        answers = Answers(answers_path, {"direct": arm})
        failed = answers.ask(read_anchors(), concurrency=concurrency, progress=progress)
        complete = answers.complete()
        if len(complete) < MIN_ANSWERS:
            raise DataFormatError(
                f"{len(complete)} of {len(complete) + failed} questions were answered; {MIN_ANSWERS} are needed.",
                hint=f"See the errors in {str(answers_path)!r}, then try again: only failed calls are repeated.",
            )
        right = np.array([is_correct(answered.direct.text, answered.question.gold) for answered in complete])
        easiness, slope = anchor_logits(load_gate(), [answered.question.text for answered in complete])
        asks_fact = ~np.isnan(easiness)
        prior, _ = resolve_ability(arm.name, folders=False)
        prior = replace(prior, llm=arm.name, sd=max(prior.sd, _MIN_SD))
        thinking = describe_thinking(arm, [answered.direct for answered in complete])
        ability = replace(
            estimate_ability(prior, easiness[asks_fact], slope, right[asks_fact].astype(np.float64)),
            source=f"measured: {sum(right)} of {len(complete)} anchor questions answered correctly{thinking}",
        )
        return AbilityEstimate(ability, prior, failed, save_measured(ability, folder))


def anchor_logits(gate: DecisionEngine, questions: Sequence[str]) -> tuple[Float64Array, float]:
    """Return how a gate's signal ``known``, the probability that the LLM knows a fact, depends on the LLM's ability.

    Args:
        gate: A gate with the signal ``known`` and the option ``margin``, such as the default one.
        questions: The questions.

    Returns:
        The logits of ``known`` for an LLM of ability 0, shape (n,), with NaN for a question without this signal,
        which asks for no fact; and the median of the logits' increases per unit of ability.

    Raises:
        RGateError: The gate could not judge a question.
    """
    rows = []
    for theta in (0.0, 1.0):
        certain = gate.with_options(ability=Ability("", theta, 0.0, ""), margin=ALWAYS_READ, on_error="raise")
        rows.append([decision.signals.get("known", math.nan) for decision in certain.decide_batch(questions)])
    at_zero, at_one = logits(np.array(rows))
    # The median, because clipping probabilities near 0 or 1 distorts individual slopes.
    return at_zero, float(np.nanmedian(at_one - at_zero))


def estimate_ability(prior: Ability, easiness: Float64Array, slope: float, right: Float64Array) -> Ability:
    """Return the most likely ability given the answers, with Laplace's approximation as its ``sd``.

    The model is P(right) = sigmoid(easiness + slope * theta), with theta ~ N(prior.theta, prior.sd).

    Args:
        prior: Mean and standard deviation before the answers; its ``sd`` is above 0.
        easiness: The logit of P(right) for an LLM of ability 0, shape (n,).
        slope: Increase of the logit per unit of ability, above 0.
        right: 1 for each right answer, 0 for each wrong one, shape (n,).
    """
    precision = prior.sd**-2
    (shift,) = ridge_logistic(
        np.full((len(right), 1), slope), right, [precision], easiness + slope * prior.theta
    )
    theta = prior.theta + float(shift)
    p = sigmoids(easiness + slope * theta)
    curvature = slope**2 * float((p * (1 - p)).sum()) + precision
    return Ability(prior.llm, theta, curvature**-0.5, prior.source)
