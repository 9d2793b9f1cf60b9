"""How much an LLM knows, measured: closed-book answers to the anchor questions that ship with the package."""

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
from rgate_integrations.runtime.files import SHIPPED, check_replaceable, locked
from rgate_integrations.runtime.records import read_records
from rgate_integrations.runtime.text import is_correct
from rgate_integrations.tuning.arms import Arm, describe_thinking
from rgate_integrations.tuning.collection import Answers, Progress, answers_file, no_progress
from rgate_integrations.tuning.fitting import ridge_logistic
from rgate_integrations.tuning.questions import Question

LEAST_ANSWERS = 20
"""With fewer answers nothing is measured."""

_LEAST_SD = 0.5  # of the prior: the copy on a server may be quantised, or tuned further


@dataclass(frozen=True)
class AbilityEstimate:
    """A measured ability.

    Attributes:
        ability: The ability.
        prior: What was known of it before.
        failed: How many calls failed; the same call asks them again.
        folder: Where the ability is: ``llm_name=`` takes it.
    """

    ability: Ability
    prior: Ability
    failed: int
    folder: Path


def read_anchors() -> list[Question]:
    """Return the anchor questions of the package, of all kinds in turn. They are CC0, and of no benchmark.

    The ``dataset`` of each is its kind: ``"well-known"``, ``"middling"``, ``"obscure"`` or ``"multi-step"``.
    """
    records = read_records(SHIPPED / "anchors.jsonl")
    return [Question.from_record(record, record.text("kind")) for record in records]


def measure_ability(
    arm: Arm, out: str | Path, *, concurrency: int = 4, progress: Progress = no_progress
) -> AbilityEstimate:
    """Ask an LLM the anchor questions without passages, and estimate its ability from which answers are right.

    Answers are kept as they come, in ``out`` with ``.answers.jsonl`` behind it. Run again after a kill, it goes on:
    no call that was answered is made again. An answer is right if it contains a gold answer, word by word. The
    estimate is the likeliest ability (maximum a posteriori): the prior is what the name says, and the difficulty of a
    question what the default gate says.

    Args:
        arm: What answers, such as `rgate_integrations.tuning.arms.ModelArm`; its name gives the prior.
        out: Folder for the ability; one that was measured before is replaced.
        concurrency: Calls at a time.
        progress: Progress callback: ``(label, done, total)``.

    Raises:
        ConfigurationError: ``out`` is something else than a measured ability, or the answers are from elsewhere.
        DataFormatError: Too few questions were answered.
        ServerError: The LLM could not be asked.
        NoAnswerError: Its answers were cut off while it thought.
        LockedError: Another process is measuring there.
    """
    folder = Path(out)
    check_replaceable(folder, (ABILITY,))
    answers_path = answers_file(folder)
    # The answers are locked and not the folder, which is replaced in one step at the end.
    with locked(answers_path):
        answers = Answers(answers_path, {"direct": arm})
        failed = answers.ask(read_anchors(), concurrency=concurrency, progress=progress)
        answered = answers.complete()
        if len(answered) < LEAST_ANSWERS:
            raise DataFormatError(
                f"{len(answered)} of {len(answered) + failed} questions were answered; {LEAST_ANSWERS} are needed.",
                hint="Run the same again: only what failed is asked.",
            )
        right = np.array([is_correct(each.direct.text, each.question.gold) for each in answered])
        easiness, slope = anchor_logits(load_gate(), [each.question.text for each in answered])
        asks_fact = ~np.isnan(easiness)
        prior, _ = resolve_ability(arm.name)
        prior = replace(prior, llm=arm.name, sd=max(prior.sd, _LEAST_SD))
        thinking = describe_thinking(arm, [each.direct for each in answered])
        ability = replace(
            estimate_ability(prior, easiness[asks_fact], slope, right[asks_fact].astype(np.float64)),
            source=f"measured: {sum(right)} of {len(answered)} anchor questions answered rightly{thinking}",
        )
        return AbilityEstimate(ability, prior, failed, save_measured(ability, folder))


def anchor_logits(gate: DecisionEngine, questions: Sequence[str]) -> tuple[Float64Array, float]:
    """Return how the default gate's P(known) of questions depends on the ability of the LLM.

    Args:
        gate: A gate with heads, such as the default one.
        questions: The questions.

    Returns:
        The logit that an LLM of ability 0 knows the answer, shape (n,), NaN of what asks for no fact, and how much
        it grows with each unit.

    Raises:
        RGateError: The gate could not judge a question.
    """
    at = []
    for theta in (0.0, 1.0):
        ability = Ability("", theta, 0.0, "")
        certain = gate.with_options(ability=ability, margin=ALWAYS_READ, on_error="raise")
        decisions = certain.decide_batch(questions)
        known = [decision.signals.get("known", math.nan) for decision in decisions]
        at.append(logits(np.array(known)))
    # The slope is the same for all, but where a probability is nearly 0 or 1.
    return at[0], float(np.nanmedian(at[1] - at[0]))


def estimate_ability(prior: Ability, easiness: Float64Array, slope: float, right: Float64Array) -> Ability:
    """Return the likeliest ability of an LLM by its answers, and how unsure it is (Laplace's approximation).

    The model is P(right) = sigmoid(easiness + slope * theta), with theta ~ N(prior.theta, prior.sd).

    Args:
        prior: What is known before; its ``sd`` is above 0.
        easiness: The logit that an LLM of ability 0 is right, shape (n,).
        slope: How much the logit grows with each unit of ability, above 0.
        right: Whether each answer is right, shape (n,).
    """
    precision = prior.sd**-2
    at_prior = easiness + slope * prior.theta
    (moved,) = ridge_logistic(np.full((len(right), 1), slope), right, [precision], at_prior)
    theta = prior.theta + float(moved)
    p = sigmoids(easiness + slope * theta)
    curvature = slope**2 * float((p * (1 - p)).sum()) + precision
    return Ability(prior.llm, theta, curvature**-0.5, prior.source)
