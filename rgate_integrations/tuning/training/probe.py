"""Trains a linear probe on the proxy's hidden states: reads the questions, cross-validates, fits on everything."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rgate_integrations.errors import ConfigurationError
from rgate_integrations.gates.artifacts.probe import EarlyExit, ProbeArtifact
from rgate_integrations.models.base import PooledLayer, Pooling, Span, middle_layers
from rgate_integrations.models.local import LocalProxy
from rgate_integrations.runtime.arrays import BoolArray, Float32Array, Float64Array
from rgate_integrations.tuning.collection import Progress, silent
from rgate_integrations.tuning.training.examples import DataFile, Example, check_labels
from rgate_integrations.tuning.training.linear import (
    COMPONENTS,
    REGULARISATION,
    LinearProbe,
    combine,
    cross_validate,
    fit_probe,
    fold_metrics,
    question_folds,
)
from rgate_integrations.tuning.training.own import DraftKind, TrainingOptions, drafts_for

_CHUNK = 256
_VIEWS: dict[DraftKind, tuple[tuple[Span, Pooling], ...]] = {
    "none": (("question", "mean"),),
    "proxy": (("draft", "mean"), ("question", "mean")),
    # a recorded answer is often whole: its last token sums it up
    "recorded": (("draft", "mean"), ("draft", "last"), ("question", "mean")),
}
"""What each kind of draft is read by. The question comes last: the early exit is its probe."""


def train_probe(
    files: Sequence[DataFile],
    proxy: LocalProxy,
    options: TrainingOptions | None = None,
    *,
    layers: Sequence[int] | None = None,
    progress: Progress = silent,
) -> ProbeArtifact:
    """Train a probe: read the questions with the proxy, cross-validate, then fit on everything.

    Args:
        files: The examples.
        proxy: The model whose hidden states are read.
        options: What is read, and how the result is described; at least 2 folds.
        layers: Hidden layers to read; the middle ones by default.
        progress: Told what is being done, how far it is, and how far it goes.

    Raises:
        DataFormatError: All labels are the same, or there are fewer questions than folds.
        ConfigurationError: There are fewer than 2 folds.
    """
    options = options or TrainingOptions()
    folds = 5 if options.folds is None else options.folds
    if folds < 2:
        raise ConfigurationError("A probe is calibrated on held-out folds.", hint="folds >= 2")
    examples = [e for f in files for e in f.examples]
    known, sets = check_labels(examples, folds), [e.dataset for e in examples]
    views = _choose_views(proxy, options.draft, layers)
    states = _states(proxy, examples, views, options, progress)
    held_out = np.stack([cross_validate(part, known, folds, options.seed, sets) for part in states], axis=1)
    logits = _combine_held_out(held_out, known, folds, options.seed)
    weights, bias = combine(held_out, known)
    probes = [fit_probe(part, known, options.seed, sets) for part in states]
    weighted = []
    for probe, weight in zip(probes, weights, strict=True):
        weighted.append(probe.weight * weight)
        bias += probe.bias * float(weight)
    reads_drafts = options.draft == "proxy"
    early_exit = _early_exit(probes[-1], held_out[:, -1], logits, known) if reads_drafts else None
    return ProbeArtifact(
        weight=np.concatenate(weighted).astype(np.float32),
        bias=bias,
        layers=tuple(layer for view in views for layer in view.pooled_layers),
        tokens=0 if options.draft == "none" else options.tokens,
        source="recorded" if options.draft == "recorded" else "proxy",
        base_model=proxy.name,
        llm=options.llm,
        early_exit=early_exit,
        system=options.system,
        prompts={options.prompt.name: options.prompt.hash},
        fingerprint=proxy.fingerprint,
        provenance=options.provenance(
            files,
            folds=folds,
            recipe=_recipe(views, weights),
            metrics=fold_metrics(logits, known, sets),
            packages=("torch", "transformers", "scikit-learn", "numpy"),
        ),
    )


def _choose_views(proxy: LocalProxy, draft: DraftKind, layers: Sequence[int] | None) -> list[_View]:
    """Return what is read, by the kind of draft; the middle layers unless others are given."""
    views = []
    for span, pooling in _VIEWS[draft]:
        views.append(_View(span, pooling, tuple(layers or middle_layers(proxy.num_layers, span))))
    return views


def _combine_held_out(held_out: Float64Array, known: BoolArray, folds: int, seed: int) -> Float64Array:
    """Weight the views by a second cross-validation, so that no question weights itself; logits, shape (n,)."""
    logits = np.zeros(len(known))
    for train, test in question_folds(len(known), folds, seed):
        weights, bias = combine(held_out[train], known[train])
        logits[test] = held_out[test] @ weights + bias
    return logits


@dataclass(frozen=True)
class _View:
    """Hidden states that one probe reads: of some tokens, pooled, at some layers."""

    span: Span
    pooling: Pooling
    layers: tuple[int, ...]

    @property
    def pooled_layers(self) -> tuple[PooledLayer, ...]:
        return tuple(PooledLayer(layer, self.span, self.pooling) for layer in self.layers)


def _states(
    proxy: LocalProxy,
    examples: Sequence[Example],
    views: Sequence[_View],
    options: TrainingOptions,
    progress: Progress,
) -> list[Float32Array]:
    """Read the examples chunk by chunk, exactly as a gate would; for each view (n, layers, hidden size)."""
    drafts = drafts_for(proxy, examples, options.draft, options.tokens, progress, options.prompt)
    layers = [layer for view in views for layer in view.pooled_layers]
    found: list[Float32Array] = []
    for start in range(0, len(examples), _CHUNK):
        values = [{"question": e.question} for e in examples[start : start + _CHUNK]]
        given = None if drafts is None else drafts[start : start + _CHUNK]
        found += [hidden.states for hidden in proxy.hidden(options.prompt, values, given, layers)]
        progress("reading hidden states", len(found), len(examples))
    ends = np.cumsum([len(view.layers) for view in views])
    return np.split(np.stack(found), ends[:-1], axis=1)


def _early_exit(
    probe: LinearProbe, held_out: Float64Array, logits: Float64Array, known: BoolArray
) -> EarlyExit | None:
    """Calibrate the probe of the question alone, and find from where on it needs no draft.

    That is the lowest probability from which on it is right as often as the whole gate is when that skips, both
    held out; None if there is none.

    Args:
        probe: The probe of the question alone.
        held_out: Its held-out logits, shape (n,).
        logits: Held-out logits of the whole gate, shape (n,).
        known: The labels, shape (n,).
    """
    (slope,), intercept = combine(held_out[:, None], known)
    p = 1 / (1 + np.exp(-(slope * held_out + intercept)))
    skipped = logits >= 0
    if not skipped.any():
        return None
    for lowest in np.arange(0.5, 0.95, 0.05):
        sure = p >= lowest
        if sure.any() and known[sure].mean() >= known[skipped].mean():
            weight = (probe.weight * slope).astype(np.float32)
            return EarlyExit(weight, float(probe.bias * slope + intercept), round(float(lowest), 2))
    return None


def _recipe(views: Sequence[_View], weights: Float64Array) -> str:
    """Say in words how a probe was made, for its model card."""
    pooled = {"mean": "the mean over", "last": "the last token of"}
    read, weighted = [], []
    for view, weight in zip(views, weights, strict=True):
        read.append(f"{pooled[view.pooling]} the {view.span} at layers {list(view.layers)}")
        weighted.append(f"{view.pooling} of {view.span} {weight:.2f}")
    return (
        f"{', '.join(read)}; per layer standardised, {COMPONENTS} principal components and logistic regression with "
        f"C={REGULARISATION}, averaged with one that has an intercept a data set; logits averaged over the layers; "
        f"these weighted and calibrated by logistic regression on held-out logits ({', '.join(weighted)})"
    )
