"""Training options and the papers' recipes, drafts and labels to learn from, and linear probes of hidden states."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import chain
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from rgate_integrations.decision import Draft, valid_choice, valid_count
from rgate_integrations.errors import NoAnswerError
from rgate_integrations.gates.artifacts import ProbeArtifact
from rgate_integrations.gates.papers.verdicts import certainty
from rgate_integrations.models.base import (
    HasStates,
    LanguageModel,
    PooledLayer,
    Pooling,
    Proxy,
    Span,
    middle_layers,
)
from rgate_integrations.models.proxies import language_model, read_states
from rgate_integrations.prompts import ANSWER, SHORT_ANSWER, PromptTemplate, answer_prompt
from rgate_integrations.runtime.arrays import BoolArray, Float32Array, Float64Array
from rgate_integrations.runtime.records import read_records
from rgate_integrations.runtime.text import is_correct, normalise_answers
from rgate_integrations.tuning.arms import ModelArm, sampling_arms
from rgate_integrations.tuning.collection import Progress, cached_answers, in_chunks, no_progress
from rgate_integrations.tuning.evaluation import MAX_SEED, fold_metrics, question_folds
from rgate_integrations.tuning.questions import (
    LABEL,
    DataFile,
    DraftKind,
    Question,
    all_examples,
    check_labels,
    read_examples,
    recorded_drafts,
)


@dataclass(frozen=True)
class Recipe:
    """Hyperparameters of fine-tuning on pairs of a prompt and its target.

    Attributes:
        epochs: Passes over the pairs.
        learning_rate: Peak learning rate.
        batch_size: Pairs per optimizer step.
        rank: LoRA rank.
        alpha: LoRA scaling.
        dropout: LoRA dropout.
        schedule: Name of a learning rate schedule in transformers.
        warmup: Share of the steps for warm-up, in [0, 1].
        per_device: Pairs per forward pass; a step may take several passes.
    """

    epochs: float
    learning_rate: float
    batch_size: int = 16
    rank: int = 8
    alpha: int = 16
    dropout: float = 0.05
    schedule: str = "linear"
    warmup: float = 0.0
    per_device: int = 8


RECIPES: dict[str, Recipe] = {
    "slimplm": Recipe(epochs=2, learning_rate=1e-4),
    "ik": Recipe(epochs=1, learning_rate=1e-4),
    "adapt": Recipe(epochs=3, learning_rate=3e-4, batch_size=128),
    "boundary": Recipe(epochs=3, learning_rate=1e-5, batch_size=4, schedule="cosine", warmup=0.02),
    "rewriter": Recipe(epochs=2, learning_rate=1e-4),
}
"""The papers' settings, by gate: SlimPLM section 4.4, IK section 3.1, ADAPT-LLM section 4.3, KBM appendix. Where a
paper fine-tunes all weights, we use LoRA of rank 8; where it names no batch size, 16 pairs per step."""


@dataclass(frozen=True)
class TrainingOptions:
    """Options for training a gate, and details for its model card.

    Attributes:
        draft: ``"proxy"`` reads the proxy's own drafts, ``"recorded"`` the LLM's, ``"none"`` only the question.
        tokens: Number of draft tokens to read, at least 1.
        folds: Number of folds of the cross-validation that measures and calibrates a probe; at least 2.
        seed: Seed of all random choices.
        label: Name of the label, its key in the data, such as ``"closed_book_correct"``.
        labelled_by: Source of the labels, for the model card; empty if they came with the data.
        llm: Name of the LLM whose answers were labelled.
        system: System message of the prompt for drafts and answers (probes only); None keeps the default.
        recipe: Hyperparameters of fine-tuning; when None, those of the gate's paper (`RECIPES`).

    Raises:
        ConfigurationError: ``draft`` is not one of `DraftKind`, or a number is out of range.
    """

    draft: DraftKind = "proxy"
    tokens: int = 32
    folds: int = 5
    seed: int = 0
    label: str = LABEL
    labelled_by: str = ""
    llm: str = "the LLM of the training data"
    system: str | None = None
    recipe: Recipe | None = None

    def __post_init__(self) -> None:
        valid_choice(self.draft, "draft", get_args(DraftKind))
        for name, least in {"tokens": 1, "folds": 2, "seed": 0}.items():
            valid_count(getattr(self, name), name, least=least, most=MAX_SEED)

    @property
    def prompt(self) -> PromptTemplate:
        """The prompt with which drafts are written."""
        return answer_prompt(self.system)

    @property
    def reads(self) -> dict[str, Any]:
        """The parameters ``tokens`` and ``source`` of the trained gate, which say what drafts it reads."""
        if self.draft == "none":
            return {"tokens": 0, "source": "proxy"}
        return {"tokens": self.tokens, "source": self.draft}

    def provenance(self, files: Sequence[DataFile], recipe: str, metrics: dict[str, Any]) -> dict[str, Any]:
        """Return the provenance of a trained gate, as JSON values.

        Args:
            files: The training data.
            recipe: How it was trained, in words or JSON.
            metrics: Metrics of the cross-validation; empty without one.
        """
        versions = {"python": platform.python_version()}
        for package in ("torch", "transformers", "peft", "scikit-learn", "numpy"):
            with suppress(PackageNotFoundError):  # a probe of the encoder needs no transformers
                versions[package] = version(package)
        return {
            "label": f"{self.label} of {self.labelled_by}" if self.labelled_by else self.label,
            "seed": self.seed,
            "folds": self.folds if metrics else 0,
            "recipe": recipe,
            "data": list(map(DataFile.as_provenance, files)),
            "metrics": metrics,
            "versions": versions,
            "licence": "that of the training data",
        }


def drafts_for(
    proxy: Proxy, questions: Sequence[Question], options: TrainingOptions, progress: Progress = no_progress
) -> list[Draft] | None:
    """Return one draft per question, or None if ``options.draft`` is ``"none"``.

    The proxy's drafts are cached, so a restarted run resumes. Recorded ones are cut to ``options.tokens``.

    Raises:
        DataFormatError: ``options.draft`` is ``"recorded"``, and a question has no recorded draft.
        EvidenceError: The proxy must write drafts, but cannot generate text.
        ServerError: The proxy failed to write a draft.
        NoAnswerError: The proxy was cut off while it was still thinking.
    """
    recorded = recorded_drafts(questions, options.draft)
    if options.draft == "none":
        return None
    if options.draft == "proxy":
        arm = ModelArm(language_model(proxy), tokens=options.tokens, prompt=options.prompt)
        answers = cached_answers("drafts", {"direct": arm}, questions, progress)
        return [drafts["direct"] for drafts in answers]
    drafts = []
    for draft in filter(None, recorded):
        head = proxy.truncate(draft.text, options.tokens)
        # `truncate` returns None for a draft that is short enough.
        drafts.append(Draft(text=(head or draft.text).strip(), source="recorded", finished=head is None))
    return drafts


# --- labels by a model's own answers -------------------------------------------------------------------------------

SampledLabel = Literal["accuracy", "certainty"]
"""``accuracy``: the share of samples that are right, which needs gold answers. ``certainty``: how much they agree."""

SELF_LABEL = "own_answer_correct"
"""Name of the label that is true if the most likely answer contains a gold answer."""

SAMPLES = 30
"""Number of sampled answers per question, at temperature 1, as in the KBM paper (section 2.2)."""


def needs_sampling(paths: Sequence[Path], label: str) -> bool:
    """Return whether answers must be sampled: ``label`` is a `SampledLabel`, and no line of the files has it yet."""
    records = chain.from_iterable(map(read_records, paths))
    return label in get_args(SampledLabel) and not any(label in record.fields for record in records)


def label_own_answers(
    paths: Sequence[Path],
    proxy: LanguageModel,
    label: str = SELF_LABEL,
    *,
    prompt: PromptTemplate = ANSWER,
    seed: int = 0,
    progress: Progress = no_progress,
) -> list[DataFile]:
    """Read questions, let a model answer them, label each by its answers, and return one `DataFile` per path.

    The answers are cached, so a restarted run resumes. Prompt, temperature and length of samples are those of the
    ``boundary`` gate.

    Args:
        paths: JSONL files, plain or gzipped, with ``question`` and, except for certainty, ``gold_answers``.
        proxy: The model whose knowledge is labelled.
        label: `SELF_LABEL`, or a `SampledLabel`.
        prompt: Prompt for the model's most likely answer, with `SELF_LABEL`.
        seed: Seed of the samples.
        progress: Progress callback: ``(label, done, total)``.

    Raises:
        DataFormatError: A file cannot be read or has no new question, or a line lacks a key; the message names the
            file.
        ServerError: The model could not answer a question.
        NoAnswerError: The model was cut off while it was still thinking.
    """
    questions = []
    for record in chain.from_iterable(map(read_records, paths)):
        question = Question.from_record(record)
        if not question.gold and label != "certainty":
            raise record.error(
                'gold_answers is missing: add it, or use label="certainty" (--label certainty, without --self-label)'
            )
        questions.append(question)
    if label == SELF_LABEL:
        answers = cached_answers("answers", {"direct": ModelArm(proxy, prompt=prompt)}, questions, progress)
    else:
        # The same settings as the boundary gate, which learns to predict these labels.
        arm = ModelArm(proxy, tokens=16, prompt=SHORT_ANSWER)
        answers = cached_answers("samples", sampling_arms(arm, SAMPLES, seed), questions, progress)
    targets = {}
    for question, drafts in zip(questions, answers, strict=True):
        texts = [draft.text for draft in drafts.values()]
        if label == "certainty":
            targets[question.text] = sampled_certainty(texts)
        else:
            # The accuracy label of the KBM paper, section 2.2: the share of samples that are right.
            targets[question.text] = sum(is_correct(text, question.gold) for text in texts) / len(texts)
    return read_examples(paths, label, targets)


def sampled_certainty(samples: Sequence[str]) -> float:
    """Return the certainty label: how much sampled answers agree, in [0, 1].

    It is `boundary.certainty` of the answers' counts (KBM paper, equations 1 and 2). It is 0 if each sample is empty,
    a refusal or a tool call.
    """
    try:
        texts = normalise_answers(samples)
    except NoAnswerError:
        return 0.0
    return certainty(list(Counter(texts).values()))


# --- probes -------------------------------------------------------------------------------------------------------

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
