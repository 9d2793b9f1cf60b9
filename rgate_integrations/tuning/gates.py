"""From labelled answers to the two gates: what they read, how they are fitted, and what they promise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import date
from typing import Any

import numpy as np

from rgate_integrations.artifacts.tuned import TunedArtifact
from rgate_integrations.engine.decision_engine import DecisionEngine
from rgate_integrations.errors import DataFormatError
from rgate_integrations.gates.probability import logits
from rgate_integrations.gates.tuned import features_of
from rgate_integrations.models.base import PooledLayer, Proxy
from rgate_integrations.prompts import ANSWER
from rgate_integrations.runtime.arrays import BoolArray, Float32Array, Float64Array, PositionArray
from rgate_integrations.training.drafts import Progress
from rgate_integrations.tuning.fit import Basis, Table, crossfit, fit_correction
from rgate_integrations.tuning.labelling import Labels
from rgate_integrations.tuning.metrics import auc, expected_calibration_error
from rgate_integrations.tuning.policies import Chosen, Policy

LEAST = 20
"""Fewer labelled questions are not fitted to."""

_CHUNK = 64
_DRAWS = 5
_TIMES_MORE = (2, 4, 8, 16, 32)


@dataclass(frozen=True)
class Readings:
    """What the proxy read of the questions; one row a question.

    Attributes:
        prior: Logit of the gate that is corrected, shape (n,).
        states: Hidden states, shape (n, layers, hidden size).
        layers: Which states.
        proxy: The model that read them.
    """

    prior: Float64Array
    states: Float32Array
    layers: tuple[PooledLayer, ...]
    proxy: Proxy


@dataclass(frozen=True)
class FittedGate:
    """A gate that was fitted, and what it does on questions that its fit has not seen.

    Attributes:
        artifact: The gate.
        chosen: Its threshold and promise.
        places: Which of the labelled questions it was fitted to, shape (n,).
        p: P(known) of these, held out, shape (n,).
        auc: Of `p` for "right without retrieval".
        auc_before: Of the gate that was corrected, on the same questions.
    """

    artifact: TunedArtifact
    chosen: Chosen
    places: PositionArray
    p: Float64Array
    auc: float
    auc_before: float


def prior_logits(gate: DecisionEngine, questions: Sequence[str], progress: Progress) -> Float64Array:
    """Return the logit of a gate's P(known) for each question, shape (n,): what tuning starts from.

    Raises:
        RGateError: The gate failed; here nothing is gained by going on.
    """
    strict = gate.with_options(on_error="raise")
    found: list[float] = []
    for start in range(0, len(questions), _CHUNK):
        found += [d.p_known for d in strict.decide_batch(questions[start : start + _CHUNK])]
        progress("asking the shipped gate", len(found), len(questions))
    return logits(np.array(found))


def read_states(
    proxy: Proxy, questions: Sequence[str], layers: Sequence[PooledLayer], progress: Progress
) -> Float32Array:
    """Return hidden states of the questions, shape (n, layers, hidden size), exactly as the gate reads them."""
    found: list[Float32Array] = []
    for start in range(0, len(questions), _CHUNK):
        values = [{"question": question} for question in questions[start : start + _CHUNK]]
        found += [each.states for each in proxy.hidden(ANSWER, values, None, layers)]
        progress("reading hidden states", len(found), len(questions))
    return np.stack(found)


def check_labels(labels: Labels) -> None:
    """Refuse labels that nothing can be learned from.

    Raises:
        DataFormatError: There are fewer than 20, or all are the same.
    """
    n, right = len(labels.known), sum(labels.known)
    if n < LEAST:
        raise DataFormatError(
            f"Only {n} questions have answers of both arms and a label.",
            hint=f"At least {LEAST} are needed, and hundreds for a promise worth having.",
        )
    if right in (0, n):
        what, gate = ("wrong", "constant:always") if right == 0 else ("right", "constant:never")
        raise DataFormatError(
            f"All {n} answers without retrieval are {what}: there is nothing to tell apart.",
            hint=f"load_gate({gate!r}) fits these questions; check the labels, or give other questions.",
        )


def fit_gate(
    labels: Labels,
    readings: Readings,
    policy: Policy,
    *,
    tokens: int = 0,
    folds: int = 5,
    seed: int = 0,
    facts: dict[str, Any] | None = None,
    llm: str = "",
) -> FittedGate | None:
    """Fit a gate, and choose its threshold on scores that come from fits without the question.

    Args:
        labels: The labelled answers.
        readings: What the proxy read of their questions.
        policy: Chooses the threshold.
        tokens: How many tokens of the begun answer are read; 0 for the question alone.
        folds: Folds of the cross-fitting.
        seed: Seed of everything.
        facts: What else the gate's file says of its origin; JSON values.
        llm: Name of the LLM.

    Returns:
        The gate; None if it reads begun answers, and too few have log-probabilities or all of those are alike.
    """
    answers = [each.direct for each in labels.answered]
    places = np.arange(len(answers))
    features = np.zeros((len(answers), 0))
    if tokens:
        places = np.array([i for i in places if answers[i].logprobs is not None], dtype=int)
        if len(places) < LEAST:
            return None
        features = np.stack([features_of(answers[i].head(tokens)) for i in places])
    known = np.array(labels.known, dtype=bool)[places]
    rag = np.array(labels.rag, dtype=bool)[places]
    if known.all() or not known.any():
        return None
    basis = Basis.of(readings.states[places], seed)
    shares = np.array(labels.shares)[places] if labels.shares else None
    table = Table(readings.prior[places], basis(readings.states[places]), features, known, shares)
    held_out = crossfit(table, folds, seed)
    p = 1 / (1 + np.exp(-held_out))
    # Thresholds come from a fixed grid, not from these scores: the promise needs that.
    chosen = with_advice(policy.choose(p, known, rag, seed), policy, p, known, rag, seed)
    correction = fit_correction(table, seed)
    weight = (correction.weight @ basis.components) / basis.scale
    before, after = auc(table.prior, known), auc(held_out, known)
    provenance = {
        "policy": {"name": policy.name, **policy.__dict__},
        "guarantee": chosen.promise,
        "guaranteed": chosen.kept,
        **chosen.facts,
        "labels": labels.kind,
        "samples": max(len(each.samples) for each in labels.answered),
        "unlabelled": labels.unknown,
        "known": round(float(known.mean()), 4),
        "auc": round(after, 4),
        "auc_before": round(before, 4),
        "ece": round(expected_calibration_error(p, known), 4),
        "shrinkage": correction.strength,
        "folds": folds,
        "seed": seed,
        "date": date.today().isoformat(),
        "scores": np.quantile(p, np.linspace(0, 1, 101)).round(5).tolist(),
        **(facts or {}),
    }
    artifact = TunedArtifact(
        slope=correction.slope,
        bias=correction.bias - float(basis.mean @ weight),
        weight=weight.reshape(readings.states.shape[1:]).astype(np.float32),
        head=correction.head.astype(np.float32),
        layers=readings.layers,
        tokens=tokens,
        base_model=readings.proxy.name,
        fingerprint=readings.proxy.fingerprint,
        llm=llm,
        threshold=chosen.threshold,
        provenance=provenance,
    )
    return FittedGate(artifact, chosen, places, p, after, before)


def with_advice(
    chosen: Chosen, policy: Policy, p: Float64Array, known: BoolArray, rag: BoolArray, seed: int
) -> Chosen:
    """Say, where a promise cannot be made, how many questions like these would do.

    Questions are drawn with replacement from these, and the policy chooses on them.
    """
    if chosen.kept:
        return chosen
    rng = np.random.default_rng(seed)
    for times in _TIMES_MORE:
        kept = 0
        for _ in range(_DRAWS):
            drawn = rng.integers(0, len(p), times * len(p))
            kept += policy.choose(p[drawn], known[drawn], rag[drawn], seed).kept
        if 2 * kept > _DRAWS:
            advice = f"About {times * len(p)} questions like these would do."
            return replace(chosen, promise=f"{chosen.promise} {advice}")
    advice = f"{_TIMES_MORE[-1] * len(p)} questions like these would not do either: allow for more."
    return replace(chosen, promise=f"{chosen.promise} {advice}")
