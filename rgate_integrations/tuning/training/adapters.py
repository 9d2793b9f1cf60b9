"""Trains the gates that are LoRA adapters: from labelled questions to pairs, folds and a saved gate."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np

from rgate_integrations import load_gate
from rgate_integrations.decision import Draft
from rgate_integrations.errors import ConfigurationError
from rgate_integrations.gates.artifacts.folder import save_adapter
from rgate_integrations.gates.artifacts.gate_file import SavedGate
from rgate_integrations.models.local import shared_proxy
from rgate_integrations.runtime.arrays import BoolArray, Float64Array, PositionArray
from rgate_integrations.tuning.collection import Progress, silent
from rgate_integrations.tuning.training.examples import DataFile, Example, check_labels
from rgate_integrations.tuning.training.linear import auc_by_set, fold_metrics, question_folds
from rgate_integrations.tuning.training.own import SampledLabel, TrainingOptions, drafts_for
from rgate_integrations.tuning.training.trainer import RECIPES, Recipe, fine_tune, pairs_for, verdict_prompt

ADAPTER_GATES = ("ik", "slimplm", "adapt", "boundary")
_READ_DRAFTS = ("ik", "slimplm")


@dataclass(frozen=True)
class AdapterOptions(TrainingOptions):
    """Options of fine-tuning, beside those of every training.

    Attributes:
        recipe: How to fine-tune; the paper's settings when None.
        resume: Continue a run that was killed.
    """

    recipe: Recipe | None = None
    resume: bool = False


def train_adapter(
    gate: str,
    files: Sequence[DataFile],
    model: str,
    out: Path,
    options: AdapterOptions | None = None,
    *,
    progress: Progress = silent,
    show: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Fine-tune a gate on labelled questions, cross-validate it if asked, and save it.

    Args:
        gate: One of `ADAPTER_GATES`.
        files: The labelled questions.
        model: Base model: catalogue name, folder or Hub id.
        out: Folder for the trained gate; `load_gate` takes it.
        options: What is read, how it is trained and described; drafts are for `ik` and `slimplm` only.
        progress: Told what is being done, how far it is, and how far it goes.
        show: Told the result of each fold.

    Returns:
        The metrics of the cross-validation; empty without one.

    Raises:
        ConfigurationError: The gate is not trained so, or not with these options.
        DataFormatError: All labels are the same, or there are fewer questions than folds.
    """
    options = options or AdapterOptions()
    _check(gate, options)
    folds = options.folds or 0
    examples: list[Example] = []
    for file in files:
        examples += file.examples
    known = check_labels(examples, folds)
    proxy = shared_proxy(model)
    drafts = None
    if gate in _READ_DRAFTS:
        drafts = drafts_for(proxy, examples, options.draft, options.tokens, progress)
    parameters = _parameters(gate, options)
    recipe = options.recipe or RECIPES[gate]
    training = _Training(gate, model, examples, drafts, parameters, recipe, options, progress)
    metrics: dict[str, Any] = {}
    if folds:
        p = _cross_validate(training, known, folds, show)
        metrics = fold_metrics(p, known, [e.dataset for e in examples])
    training.fit(np.arange(len(examples)), out, options.resume)
    provenance = options.provenance(
        files,
        folds=folds,
        recipe=json.dumps(asdict(recipe)),
        metrics=metrics,
        packages=("torch", "transformers", "peft"),
    )
    save_adapter(training.describe(proxy.fingerprint, provenance), out)
    return metrics


@dataclass(frozen=True)
class _Training:
    """A gate with what it is trained on: fits an adapter to some of the questions, and judges others with it."""

    gate: str
    model: str
    examples: Sequence[Example]
    drafts: Sequence[Draft] | None
    parameters: dict[str, Any]
    recipe: Recipe
    options: AdapterOptions
    progress: Progress

    def part(self, positions: PositionArray) -> tuple[list[Example], list[Draft] | None]:
        """Return some of the questions, and their drafts if the gate reads them."""
        drafts = None if self.drafts is None else [self.drafts[i] for i in positions]
        return [self.examples[i] for i in positions], drafts

    def fit(self, positions: PositionArray, folder: Path, resume: bool = False) -> None:
        """Fine-tune on some of the questions."""
        fine_tune(
            pairs_for(self.gate, *self.part(positions)),
            self.model,
            folder,
            self.recipe,
            seed=self.options.seed,
            resume=resume,
            progress=self.progress,
        )

    def p_known(self, adapter: Path, positions: PositionArray) -> list[float]:
        """Return P(known) of some of the questions by a trained adapter."""
        examples, drafts = self.part(positions)
        trained = load_gate(self.gate, proxy=self.model, adapter=str(adapter), **self.parameters)
        decisions = trained.decide_batch([example.question for example in examples], drafts=drafts)
        return [decision.p_known for decision in decisions]

    def describe(self, fingerprint: str, provenance: dict[str, Any]) -> SavedGate:
        """Return what the gate's file says of it."""
        prompt = verdict_prompt(self.gate, self.drafts is not None)
        return SavedGate(
            method=self.gate,
            prompts={prompt.name: prompt.hash},
            parameters=self.parameters,
            base_model=self.model,
            fingerprint=fingerprint,
            llm=self.options.llm,
            provenance=provenance,
        )


def _check(gate: str, options: AdapterOptions) -> None:
    if gate not in ADAPTER_GATES:
        raise ConfigurationError(f"{gate!r} is not trained by fine-tuning.", hint=", ".join(ADAPTER_GATES))
    if gate == "slimplm" and options.draft == "none":
        raise ConfigurationError("The slimplm gate judges a draft.", hint="--draft proxy or recorded")


def _parameters(gate: str, options: AdapterOptions) -> dict[str, Any]:
    """Return the parameters of the gate that fit what it was trained on."""
    found: dict[str, Any] = {}
    if gate in _READ_DRAFTS:
        found["tokens"] = 0 if options.draft == "none" else options.tokens
        found["source"] = "recorded" if options.draft == "recorded" else "proxy"
    if gate == "boundary" and options.label in get_args(SampledLabel):
        found["label"] = options.label
    return found


def _cross_validate(
    training: _Training, known: BoolArray, folds: int, show: Callable[[str], None] | None
) -> Float64Array:
    """Return for each question P(known) by an adapter that was trained without its fold."""
    p = np.zeros(len(known))
    splits = question_folds(len(known), folds, training.options.seed)
    for number, (fit, test) in enumerate(splits, start=1):
        with tempfile.TemporaryDirectory(prefix="rgate-fold-", ignore_cleanup_errors=True) as folder:
            # Each fold has a folder of its own: an adapter that is loaded is known by its path.
            training.fit(fit, Path(folder) / "gate")
            p[test] = training.p_known(Path(folder) / "gate", test)
        auc = auc_by_set(p[test], known[test], ["all"] * len(test)).get("all", float("nan"))
        if show is not None:
            show(f"fold {number} of {folds}: AUC {auc:.3f} on {len(test)} questions")
    return p
