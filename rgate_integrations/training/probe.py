"""Fits linear probes on the proxy's hidden states, with cross-validation by question."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from rgate_integrations.errors import ConfigurationError, missing_dependency
from rgate_integrations.evidence import HiddenSpec
from rgate_integrations.prompts import ANSWER
from rgate_integrations.proxy.base import PooledLayer, Pooling, Span
from rgate_integrations.proxy.local import LocalProxy
from rgate_integrations.saved import EarlyExit, PooledLayer, ProbeArtifact
from rgate_integrations.training.drafts import DraftKind, Report, drafts_for
from rgate_integrations.training.examples import DataFile, Example, check_labels

Floats = npt.NDArray[np.float32]
_CHUNK = 256
_PCA, _C = 128, 0.005
_FREE = 100.0  # as large a feature is hardly regularised
View: TypeAlias = tuple[Span, Pooling]
_VIEWS: dict[DraftKind, tuple[View, ...]] = {
    "none": (("question", "mean"),),
    "proxy": (("draft", "mean"), ("question", "mean")),
    # a recorded answer is often whole: its last token sums it up
    "recorded": (("draft", "mean"), ("draft", "last"), ("question", "mean")),
}
_DEPTH: dict[Span, tuple[float, float]] = {"question": (0.47, 0.60), "draft": (0.47, 0.74)}


@dataclass(frozen=True)
class Fitted:
    """A linear probe.

    Attributes:
        weight: Shape (blocks, hidden size).
        bias: Added to the sum of ``weight * states``.
    """

    weight: Floats
    bias: float

    def __call__(self, states: Floats) -> npt.NDArray[np.float64]:
        """Return the logit for each of the states, shape (n, blocks, hidden size)."""
        logits: npt.NDArray[np.float64] = (
            np.einsum("nbh,bh->n", states.astype(np.float64), self.weight) + self.bias
        )
        return logits


def middle_layers(layers: int, span: Span = "draft") -> tuple[int, ...]:
    """Return the middle layers of a model, where probes work best (measured: docs/benchmarks/gate_quality.md)."""
    first, last = _DEPTH[span]
    return tuple(range(round(layers * first), round(layers * last) + 1, 2))


def fit_probe(
    states: Floats, known: npt.NDArray[np.bool_], seed: int = 0, sets: Sequence[str] | None = None
) -> Fitted:
    """Fit one regularised logistic regression a block, on standardised principal components, and average them.

    With several data sets each block is fitted twice and averaged: once as it is, and once with a free intercept
    a set. The latter learns what tells known from unknown within a set, not which set a question is from.
    Standardisation, projection and averaging are linear, so the result folds into one weight vector a block.

    Args:
        states: Shape (n, blocks, hidden size).
        known: The labels, shape (n,).
        seed: Seed of the solver.
        sets: The data set of each question, or None if they are one.
    """
    try:
        from sklearn.decomposition import PCA
        from sklearn.linear_model import LogisticRegression
    except ImportError as error:
        raise missing_dependency("sklearn", "train") from error
    blocks = states.shape[1]
    names = np.asarray(sets if sets is not None else [""] * len(known))
    free = _FREE * (names[:, None] == np.unique(names)[None, :])
    weights, bias = [], 0.0
    for b in range(blocks):
        block = states[:, b].astype(np.float64)
        mean, scale = block.mean(axis=0), block.std(axis=0) + 1e-6
        pca = PCA(min(_PCA, *block.shape), svd_solver="full")
        parts = pca.fit_transform((block - mean) / scale)
        model = LogisticRegression(C=_C, max_iter=2_000, random_state=seed).fit(parts, known)
        coefficients, intercept = model.coef_[0], model.intercept_[0]
        if free.shape[1] > 1:
            model.fit(np.hstack([parts, free]), known)
            coefficients = (coefficients + model.coef_[0, : parts.shape[1]]) / 2
        weight = (pca.components_.T @ coefficients) / scale
        weights.append(weight / blocks)
        offset = pca.mean_ @ (pca.components_.T @ coefficients)
        bias += float(intercept - mean @ weight - offset) / blocks
    return Fitted(np.stack(weights).astype(np.float32), bias)


def cross_validate(
    states: Floats,
    known: npt.NDArray[np.bool_],
    folds: int,
    seed: int,
    sets: Sequence[str] | None = None,
) -> npt.NDArray[np.float64]:
    """Return for each question the logit of a probe that was fitted without its fold."""
    logits = np.zeros(len(known))
    names = np.asarray(sets if sets is not None else [""] * len(known))
    for train, test in question_folds(len(known), folds, seed):
        fitted = fit_probe(states[train], known[train], seed, names[train].tolist())
        logits[test] = fitted(states[test])
    return logits


def combine(
    logits: npt.NDArray[np.float64], known: npt.NDArray[np.bool_]
) -> tuple[npt.NDArray[np.float64], float]:
    """Fit the weights of several probes' held-out logits, and so calibrate them: sigmoid(logits @ weights + bias).

    Args:
        logits: Held-out logits, shape (n, probes).
        known: The labels, shape (n,).
    """
    from sklearn.linear_model import LogisticRegression

    model = LogisticRegression(C=1e6).fit(logits, known)
    return model.coef_[0], float(model.intercept_[0])


def _early_exit(
    fitted: Fitted,
    held_out: npt.NDArray[np.float64],
    logits: npt.NDArray[np.float64],
    known: npt.NDArray[np.bool_],
) -> EarlyExit | None:
    """Calibrate the probe of the question alone, and find from where on it needs no draft.

    That is the lowest probability from which on it is right as often as the whole gate is when that skips, both
    held out; None if there is none.
    """
    (slope,), intercept = combine(held_out[:, None], known)
    skipped = logits >= 0
    p = 1 / (1 + np.exp(-(slope * held_out + intercept)))
    for lowest in np.arange(0.5, 0.95, 0.05):
        sure = p >= lowest
        if skipped.any() and sure.any() and known[sure].mean() >= known[skipped].mean():
            weight = (fitted.weight * slope).astype(np.float32)
            return EarlyExit(weight, float(fitted.bias * slope + intercept), round(float(lowest), 2))
    return None


def question_folds(
    n: int, folds: int, seed: int
) -> list[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
    """Return (training positions, test positions) of each fold; a row is a question."""
    from sklearn.model_selection import KFold

    return list(KFold(folds, shuffle=True, random_state=seed).split(np.zeros(n)))


def auc_by_set(
    scores: npt.NDArray[np.float64], known: npt.NDArray[np.bool_], sets: Sequence[str]
) -> dict[str, float]:
    """Return the AUC of each set that has both labels."""
    from sklearn.metrics import roc_auc_score

    names = np.asarray(sets)
    return {
        name: float(roc_auc_score(known[names == name], scores[names == name]))
        for name in dict.fromkeys(sets)
        if len(set(known[names == name].tolist())) == 2
    }


def train_probe(
    files: Sequence[DataFile],
    proxy: LocalProxy,
    *,
    draft: DraftKind = "proxy",
    tokens: int = 32,
    layers: Sequence[int] | None = None,
    folds: int = 5,
    seed: int = 0,
    llm: str = "the LLM of the training data",
    licence: str = "that of the training data",
    label: str = "closed_book_correct",
    report: Report | None = None,
) -> ProbeArtifact:
    """Train a probe: read the questions with the proxy, cross-validate, then fit on everything.

    Args:
        files: The examples.
        proxy: The model whose hidden states are read.
        draft: ``"proxy"`` writes its own drafts, ``"recorded"`` reads what the LLM wrote, ``"none"`` reads the
            question alone.
        tokens: Draft tokens to read.
        layers: Hidden layers to read; the middle ones by default.
        folds: Folds of the cross-validation, at least 2.
        seed: Seed of folds and solver.
        llm: Name of the LLM whose answers were labelled.
        licence: Licence of the weights.
        label: Name of the label, for the model card.
        report: Told what is being done, how far it is, and how far it goes.

    Raises:
        DataFormatError: All labels are the same, or there are fewer questions than folds.
    """
    examples = [e for f in files for e in f.examples]
    if folds < 2:
        raise ConfigurationError("A probe is calibrated on held-out folds.", hint="folds >= 2")
    known = check_labels(examples, folds)
    sets = [e.dataset for e in examples]
    views = _VIEWS[draft]
    chosen = {view: tuple(layers or middle_layers(proxy.num_layers, view[0])) for view in views}
    blocks, parts = _blocks(chosen)
    states = _states(proxy, examples, HiddenSpec(blocks), draft, tokens, report)
    held_out = np.stack([cross_validate(states[:, p], known, folds, seed, sets) for p in parts], axis=1)
    logits = np.zeros(len(known))
    for train, test in question_folds(len(known), folds, seed):
        weights, bias = combine(held_out[train], known[train])
        logits[test] = held_out[test] @ weights + bias
    weights, bias = combine(held_out, known)
    fitted = [fit_probe(states[:, part], known, seed, sets) for part in parts]
    early = _early_exit(fitted[-1], held_out[:, -1], logits, known) if draft == "proxy" else None
    each = auc_by_set(logits, known, sets)
    return ProbeArtifact(
        weight=np.concatenate([f.weight * w for f, w in zip(fitted, weights, strict=True)]).astype(
            np.float32
        ),
        bias=float(sum(f.bias * w for f, w in zip(fitted, weights, strict=True)) + bias),
        layers=blocks,
        tokens=0 if draft == "none" else tokens,
        source="recorded" if draft == "recorded" else "proxy",
        base_model=proxy.name,
        llm=llm,
        early_exit=early,
        fingerprint=proxy.fingerprint,
        provenance={
            "label": label,
            "seed": seed,
            "folds": folds,
            "recipe": _recipe({v: (chosen[v], float(w)) for v, w in zip(views, weights, strict=True)}),
            "data": [f.as_provenance() for f in files],
            "metrics": {
                "auc": each,
                "auc_mean": float(np.mean(list(each.values()))),
                "auc_pooled": auc_by_set(logits, known, ["all"] * len(known))["all"],
            },
            "versions": {name: version(name) for name in ("torch", "transformers", "scikit-learn", "numpy")}
            | {"python": platform.python_version()},
            "licence": licence,
        },
    )


def _blocks(
    chosen: Mapping[View, Sequence[int]],
) -> tuple[tuple[PooledLayer, ...], list[npt.NDArray[np.int64]]]:
    """Return the blocks to read, and the positions of each view's among them."""
    blocks = tuple(PooledLayer(layer, *view) for view, layers in chosen.items() for layer in layers)
    return blocks, [np.array([i for i, b in enumerate(blocks) if b[1:] == view]) for view in chosen]


def _recipe(views: Mapping[View, tuple[tuple[int, ...], float]]) -> str:
    """Say in words how a probe was made, for its model card."""
    pooled = {"mean": "the mean over", "last": "the last token of"}
    read = ", ".join(f"{pooled[p]} the {s} at layers {list(layers)}" for (s, p), (layers, _) in views.items())
    weights = ", ".join(f"{p} of {s} {weight:.2f}" for (s, p), (_, weight) in views.items())
    return (
        f"{read}; per layer standardised, {_PCA} principal components and logistic regression with C={_C}, averaged "
        "with one that has an intercept a data set; logits averaged over the layers; these weighted and calibrated "
        f"by logistic regression on held-out logits ({weights})"
    )


def _states(
    proxy: LocalProxy,
    examples: Sequence[Example],
    spec: HiddenSpec,
    draft: DraftKind,
    tokens: int,
    report: Report | None,
) -> Floats:
    """Read the examples chunk by chunk, exactly as a gate would; shape (n, blocks, hidden size)."""
    say = report or (lambda what, done, total: None)
    drafts = drafts_for(proxy, examples, draft, tokens, say)
    found: list[Floats] = []
    for start in range(0, len(examples), _CHUNK):
        some = slice(start, start + _CHUNK)
        values = [{"question": e.question} for e in examples[some]]
        states = proxy.hidden(ANSWER, values, drafts[some] if drafts is not None else None, spec.blocks)
        found += [h.states for h in states]
        say("reading hidden states", len(found), len(examples))
    return np.stack(found)
