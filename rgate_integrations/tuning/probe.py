"""Trains linear probes on a proxy's hidden states, and cross-validates, weights and combines them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np

from rgate_integrations.gates.artifacts import ProbeArtifact
from rgate_integrations.models.base import HasStates, PooledLayer, Pooling, Span, middle_layers
from rgate_integrations.models.proxies import read_states
from rgate_integrations.runtime.arrays import BoolArray, Float32Array, Float64Array
from rgate_integrations.tuning.collection import Progress, in_chunks, no_progress
from rgate_integrations.tuning.evaluation import fold_metrics, question_folds
from rgate_integrations.tuning.questions import DataFile, DraftKind, Question, all_examples, check_labels
from rgate_integrations.tuning.training import TrainingOptions, drafts_for

COMPONENTS = 128
"""Number of principal components to keep per layer."""

REGULARISATION = 0.005
"""scikit-learn's C, the inverse of the regularisation strength."""

_UNREGULARISED = 100.0  # a feature this large needs only a small weight, which regularisation hardly shrinks
_TINY = 1e-6  # avoids a division by zero for constant features
_RECIPE = (
    f"per layer: standardised, {COMPONENTS} principal components and logistic regression with C={REGULARISATION}, "
    "averaged with one that has an intercept per data set; logits averaged over the layers, weighted and calibrated "
    "by logistic regression on held-out logits"
)
_VIEWS: dict[DraftKind, tuple[tuple[Span, Pooling], ...]] = {
    "none": (("question", "mean"),),
    "proxy": (("draft", "mean"), ("question", "mean")),
    # A recorded answer is often complete, so its last token summarises it.
    "recorded": (("draft", "mean"), ("draft", "last"), ("question", "mean")),
}
"""The views for each kind of draft. A view is a span and a pooling, and has its own probe."""


def train_probe(
    files: Sequence[DataFile],
    proxy: HasStates,
    options: TrainingOptions,
    *,
    progress: Progress = no_progress,
) -> ProbeArtifact:
    """Train a probe, a linear classifier of a proxy's hidden states: cross-validate it, then fit it to all questions.

    Args:
        files: The examples.
        proxy: The model whose hidden states are read.
        options: Drafts to read, folds, and details for the model card.
        progress: Progress callback: ``(label, done, total)``.

    Raises:
        DataFormatError: All labels are the same, a label has fewer questions than there are folds, or a
            recorded draft is missing.
        EvidenceError: The proxy must write drafts, but it cannot generate text, or was cut off while thinking.
        ServerError: The proxy failed to write a draft.
        MissingDependencyError: scikit-learn is not installed.
    """
    examples = all_examples(files)
    known = check_labels(examples, options.folds)
    questions = [example.question for example in examples]
    sets = [question.dataset for question in questions]
    views = [
        [PooledLayer(depth, span, pooling) for depth in middle_layers(proxy.num_layers, span)]
        for span, pooling in _VIEWS[options.draft]
    ]
    states = _read_states(proxy, questions, views, options, progress)
    held_out = np.stack(
        [cross_validate(view, known, options.folds, options.seed, sets) for view in states], axis=1
    )
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import cross_val_predict

    # Weights and calibrates the views. It is cross-validated again, so that no label affects its question's logit.
    combination = LogisticRegression(C=1e6)
    splits = list(question_folds(len(known), options.folds, options.seed))
    logits = cross_val_predict(combination, held_out, known, cv=splits, method="decision_function")
    combination.fit(held_out, known)
    bias = float(combination.intercept_[0])
    weighted = []
    for view, share in zip(states, combination.coef_[0], strict=True):
        weight, view_bias = fit_probe(view, known, options.seed, sets)
        weighted.append(weight * share)
        bias += view_bias * float(share)
    return ProbeArtifact(
        weight=np.concatenate(weighted).astype(np.float32),
        bias=bias,
        layers=tuple(chain.from_iterable(views)),
        base_model=proxy.name,
        llm=options.llm,
        system=options.system,
        prompts={options.prompt.name: options.prompt.hash},
        fingerprint=proxy.fingerprint,
        provenance=options.provenance(files, _RECIPE, fold_metrics(logits, known, sets)),
        **options.reads,
    )


def _read_states(
    proxy: HasStates,
    questions: Sequence[Question],
    views: Sequence[Sequence[PooledLayer]],
    options: TrainingOptions,
    progress: Progress,
) -> list[Float32Array]:
    """Return the hidden states of each view, shape (n, layers, hidden size), read as the trained gate will read them.

    A view is the list of layers that one probe reads, pooled over one span; see `_VIEWS`.
    """
    drafts = drafts_for(proxy, questions, options, progress)
    layers = list(chain.from_iterable(views))
    states: list[Float32Array] = []
    for chunk in in_chunks(range(len(questions)), "reading hidden states", progress):
        values = [{"question": questions[index].text} for index in chunk]
        chunk_drafts = drafts and [drafts[index] for index in chunk]
        states += [read.states for read in read_states(proxy, options.prompt, values, chunk_drafts, layers)]
    return np.split(np.stack(states), np.cumsum(list(map(len, views)))[:-1], axis=1)


def fit_probe(
    states: Float32Array, known: BoolArray, seed: int, sets: Sequence[str]
) -> tuple[Float32Array, float]:
    """Fit one regularised logistic regression per layer, on components of standardised states, and average them.

    With several data sets, each layer is fitted twice, without and with a free intercept for each set. The weights of
    the two fits are averaged, and the first fit's intercept is kept. The second fit learns what separates known from
    unknown within a set, not which set a question is from. All these steps are linear, so the result folds into one
    weight vector per layer.

    Args:
        states: Shape (n, layers, hidden size).
        known: The labels, shape (n,).
        seed: Seed of the solver.
        sets: The data set of each question.

    Returns:
        Weight, shape (layers, hidden size), and bias: the logit is the sum of ``weight * states``, plus the bias.
    """
    names = np.asarray(sets)
    in_set = names[:, None] == np.unique(names)[None, :]
    weights, biases = np.zeros(states.shape[1:]), np.zeros(states.shape[1])
    for layer in range(len(biases)):
        weights[layer], biases[layer] = _fit_layer(states[:, layer].astype(np.float64), known, seed, in_set)
    return (weights / len(weights)).astype(np.float32), float(biases.mean())


def _fit_layer(
    states: Float64Array, known: BoolArray, seed: int, in_set: BoolArray
) -> tuple[Float64Array, float]:
    """Fit one layer's states, shape (n, hidden size); return weight, shape (hidden size,), and bias.

    ``in_set`` says from which data set each question is, shape (n, sets).
    """
    from sklearn.decomposition import PCA
    from sklearn.linear_model import LogisticRegression

    mean, scale = states.mean(axis=0), states.std(axis=0) + _TINY
    # The full solver is deterministic, unlike the randomised one.
    pca = PCA(min(COMPONENTS, *states.shape), svd_solver="full")
    components = pca.fit_transform((states - mean) / scale)
    model = LogisticRegression(C=REGULARISATION, max_iter=2_000, random_state=seed).fit(components, known)
    coefficients, intercept = model.coef_[0], float(model.intercept_[0])
    if in_set.shape[1] > 1:
        model.fit(np.hstack([components, _UNREGULARISED * in_set]), known)
        coefficients = (coefficients + model.coef_[0, : components.shape[1]]) / 2
    # Back from components to states: x -> coefficients @ components_ @ ((x - mean) / scale - pca.mean_) + intercept
    projected = pca.components_.T @ coefficients
    weight = projected / scale
    return weight, intercept - float(mean @ weight) - float(pca.mean_ @ projected)


def cross_validate(
    states: Float32Array, known: BoolArray, folds: int, seed: int, sets: Sequence[str]
) -> Float64Array:
    """Return the logit of each question from a probe fitted without the question's fold, shape (n,)."""
    logits = np.zeros(len(known))
    names = np.asarray(sets)
    for train, test in question_folds(len(known), folds, seed):
        weight, bias = fit_probe(states[train], known[train], seed, names[train].tolist())
        logits[test] = np.einsum("nlh,lh->n", states[test].astype(np.float64), weight) + bias
    return logits
