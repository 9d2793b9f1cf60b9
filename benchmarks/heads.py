"""Fits the heads that predict whether an LLM knows a fact, on states of both models, and cross-validates them.

    python benchmarks/heads.py --data FOLDER                    the six sets, cross-validated
    python benchmarks/heads.py --data FOLDER --save GATE        also fits on everything that ships, and saves it

The folder contains ``practical.dev.jsonl``, ``adaptive_llama31_8b.*.dev.jsonl``, ``more/`` and ``strong/``. Fact
heads that were fitted without the question's cluster judge the six sets, as the gate does. The kind heads are those
of the gate (see `kinds`); they never learn from these labels. Hidden states are cached under
``benchmarks/out/heads``, or ``--cache FOLDER``. The first run takes a quarter of an hour.
"""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import pandas as pd
from base import CONSOLE, OUT, SETS, argument_parser, checksum, print_table
from encoder_states import FACT_LAYERS, KIND_LAYERS, EncoderStates
from head_fit import HeadExamples, HeadsRecipe, calibrate_heads, fit_facts, fit_line
from labels import LLAMA, cluster_questions, read_abilities, read_labels, read_template_labels, table_name
from sklearn.linear_model import LogisticRegression
from text_rows import TRAIN
from training_text import make_training_rows

from rgate_integrations.engine.loading import DEFAULT_GATE
from rgate_integrations.gates.folder import read_gate, save_gate
from rgate_integrations.gates.heads import HeadsGate
from rgate_integrations.gates.heads_artifact import (
    Detector,
    FactHeads,
    HeadsArtifact,
    Kind,
    may_reader_change,
    p_answered,
)
from rgate_integrations.gates.probability import sigmoids
from rgate_integrations.models.base import PooledLayer
from rgate_integrations.models.catalog import DEFAULT_MODEL
from rgate_integrations.models.encoder import ENCODER
from rgate_integrations.models.reader import Reader
from rgate_integrations.runtime.segments import layout
from rgate_integrations.tuning.evaluation import auc

CACHE = OUT / "heads"
FOLDS, SEED = 5, 0
MAX_ANSWERS = 5_000  # of a source
THRESHOLD = 0.62  # finds more private and fresh requests than 0.5, for somewhat more retrieval
MARGIN: float = HeadsGate.model_fields["margin"].default
LAYERS = (
    PooledLayer(14, "question", "mean"),
    PooledLayer(16, "question", "mean"),
    PooledLayer(18, "question", "mean"),
    PooledLayer(18, "all", "last"),  # where the answer is about to begin
)
FIRST_LAYERS = tuple(PooledLayer(layer, "question", "mean") for layer in FACT_LAYERS)
PRACTICAL = (
    "clinc/oos-eval",
    "PolyAI-LDN/task-specific-datasets",
    "yizhongw/self-instruct",
    "realtimeqa/realtimeqa_public",
    "written for this benchmark",
)
SKIPS = ("task", "common")
GOALS = {"private": 0.98, "fresh": 0.98, "obscure": 0.90, "common": 0.15, "task": 0.10}
"""The share of each kind that should be retrieved: at least of the first three, at most of the others."""
KNOWN_WEIGHTS = {
    "adarague": 1.0,
    "wack": 0.1,
    "qa-eval": 0.01,
    "calib": 0.01,
    "simpleqa": 0.005,
    "halueval": 0.01,
    "gemma-2b": 0.1,
    "templates": 0.001,
}
"""How much an answer of each source counts; the others only measure."""

HELD_OUT = "held_out_sets.csv"
"""File in the cache with the held-out results on the six sets, for `judge_alone`."""

Line: TypeAlias = tuple[float, float]
"""Slope and intercept that calibrate the logits of P(a fact is known)."""


@dataclass(frozen=True)
class Rows:
    """Training rows, one for each question and LLM that answered it.

    Attributes:
        labels: The columns of `labels.Label`, and ``cluster``: questions that ask nearly the same share a fold.
        closer: The examples with the reader's states.
        first: The examples with the encoder's states.
    """

    labels: pd.DataFrame
    closer: HeadExamples
    first: HeadExamples

    @classmethod
    def from_labels(
        cls, labels: pd.DataFrame, states: dict[str, np.ndarray], encoder_states: EncoderStates
    ) -> "Rows":
        """Combine labels with the reader's states, by `hash_question`, and with the encoder's."""
        weight = labels.source.map(KNOWN_WEIGHTS).fillna(0.0)
        weight[labels.what.str.endswith("(low quality)")] = 0.0
        rows = labels.assign(weight=weight)[(weight > 0) & labels.known.notna() & labels.ships]
        drawn = (
            rows.sample(frac=1.0, random_state=SEED)
            .groupby("source", sort=False)
            .head(MAX_ANSWERS)
            .sort_index()
        )
        # The drawn rows carry the weight of the whole source.
        share = drawn.source.map(drawn.source.value_counts() / rows.source.value_counts())
        rows = drawn.assign(weight=drawn.weight / share)
        abilities = rows.llm.map(table_name).map(read_abilities()).fillna(0.0)
        columns = (
            rows.known.to_numpy(),
            abilities.to_numpy(),
            rows.group.to_numpy(str),
            rows.weight.to_numpy(),
        )
        closer = np.stack([states[hash_question(question)] for question in rows.question])
        first = np.stack([encoder_states.whole(question) for question in rows.question])
        return cls(rows.reset_index(drop=True), HeadExamples(closer, *columns), HeadExamples(first, *columns))

    def fit(self, chosen: np.ndarray) -> tuple[FactHeads, FactHeads]:
        """Fit the encoder's heads and the reader's on the chosen rows."""
        return (
            fit_facts(self.first.rows(chosen), FIRST_LAYERS, ENCODER, HeadsRecipe()),
            fit_facts(self.closer.rows(chosen), LAYERS, DEFAULT_MODEL, HeadsRecipe()),
        )


def hash_question(question: str) -> str:
    """Return the key of a question in the caches."""
    return hashlib.sha256(question.encode()).hexdigest()[:16]


class VectorCache:
    """Vectors of questions, cached on disk in parts, so that a stopped run resumes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.vectors: dict[str, np.ndarray] = {}
        for path in sorted(folder.glob("*.npz")):
            part = np.load(path)
            self.vectors.update(zip(part["keys"].tolist(), part["vectors"], strict=True))

    def fill(
        self, questions: list[str], compute: Callable[[list[str]], Any], part: int = 1024
    ) -> dict[str, np.ndarray]:
        """Compute the vectors that the cache lacks; returns all vectors by key."""
        missing = list(
            {hash_question(q): q for q in questions if hash_question(q) not in self.vectors}.values()
        )
        missing.sort(key=len)  # rows of similar length share a batch
        self.folder.mkdir(parents=True, exist_ok=True)
        for start in range(0, len(missing), part):
            batch = missing[start : start + part]
            vectors = np.asarray(compute(batch)).astype(np.float16)
            keys = [hash_question(q) for q in batch]
            np.savez(self.folder / f"{keys[0]}.npz", keys=np.array(keys), vectors=vectors)
            self.vectors.update(zip(keys, vectors, strict=True))
        return self.vectors


def read_rows(data: Path, cache: Path) -> Rows:
    """Read all labels and their states; computes those that the cache lacks."""
    labels = pd.DataFrame(map(vars, read_labels(data)))
    labels = labels[labels.known.notna()].reset_index(drop=True)
    states = read_question_states(labels.question.tolist(), cache)
    encoder_states = fact_states(cache)
    encoder_states.fill((question, "") for question in labels.question)
    # Many LLMs answered the same questions; cluster each question once.
    unique = labels.groupby("question", sort=False, as_index=False).last()
    clusters = pd.Series(cluster_questions(unique, embed(unique, encoder_states)), index=unique.question)
    labels["cluster"] = labels.question.map(clusters)
    return Rows.from_labels(labels, states, encoder_states)


def fact_states(cache: Path) -> EncoderStates:
    """Return the cache of the encoder's states that fact heads read and that questions are compared by."""
    return EncoderStates(cache / "encoder", FACT_LAYERS)


def embed(labels: pd.DataFrame, encoder_states: EncoderStates) -> np.ndarray:
    """Return the encoder's vector of each question, shape (n, 384), normalised; zeros for templates."""
    vectors = np.zeros((len(labels), 384), np.float32)
    for row, (question, source) in enumerate(zip(labels.question, labels.source, strict=True)):
        if source != "templates":
            vector = encoder_states.whole(question)[-1].astype(np.float32)
            vectors[row] = vector / np.linalg.norm(vector)
    return vectors


def read_question_states(
    questions: list[str], cache: Path, layers: Sequence[PooledLayer] = LAYERS, name: str = "states"
) -> dict[str, np.ndarray]:
    """Return the reader's states of questions by `hash_question`; computes those that the cache lacks."""
    reader = Reader.shared()

    def read(batch: list[str]) -> np.ndarray:
        return np.stack([row.states for row in reader.pool(list(map(reader.encode, batch)), layers)])

    return VectorCache(cache / name).fill(questions, read)


class QuestionKinds(NamedTuple):
    """The probability of each kind for each segment of a question, shape (segments, kinds).

    Attributes:
        first: By the encoder.
        closer: By both models; the same if there are several segments.
    """

    first: np.ndarray
    closer: np.ndarray


def predict_kinds(questions: Iterable[str], shipped: HeadsArtifact, cache: Path) -> list[QuestionKinds]:
    """Return the probabilities of the kinds of English questions."""
    questions = list(questions)
    encoder_states = EncoderStates(cache / "encoder", KIND_LAYERS)
    encoder_states.fill((question, "") for question in questions)
    reader_states = read_question_states(questions, cache)
    kinds = []
    for question in questions:
        states, whole = encoder_states.segments(question), encoder_states.whole(question)[: len(FACT_LAYERS)]
        alone = len(states) == 1
        first = shipped.kind_probabilities(states, layout(question), whole, in_context=not alone)
        closer = shipped.reconsider(first, reader_states[hash_question(question)]) if alone else first
        kinds.append(QuestionKinds(first, closer))
    return kinds


def estimate_p_known(
    kind_list: Sequence[Kind], kinds: list[QuestionKinds], first: np.ndarray, closer: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the gate's P(known) of English questions, and whether the reader reads each, shape (n,) each.

    Args:
        kind_list: The kinds.
        kinds: The probabilities of the kinds of each question.
        first: The encoder's logits that the fact is known, shape (n,).
        closer: The reader's logits, shape (n,).
    """
    p, is_read = np.zeros(len(kinds)), np.zeros(len(kinds), bool)
    for i, shares in enumerate(kinds):
        alone = len(shares.first) == 1
        is_read[i] = may_reader_change(
            kind_list, shares.first, first[i : i + 1], THRESHOLD, MARGIN, alone=alone
        )
        logits, probabilities = (closer, shares.closer) if is_read[i] else (first, shares.first)
        p[i] = p_answered(kind_list, probabilities, sigmoids(logits[i : i + 1])).min()
    return p, is_read


def judge_sets(rows: Rows, shipped: HeadsArtifact, cache: Path) -> tuple[pd.DataFrame, Line, Line]:
    """Judge the six sets by heads that were fitted without the question's cluster.

    Returns:
        The results, and the lines that calibrate the encoder's heads and the reader's. Columns of the results:
        question, what: From the labels.
        label: Whether the LLM's answer is right.
        first, closer: Calibrated logits that the fact is known, by the encoder and by the reader.
        p, read: P(known), and whether the reader read the question.
        always, if_known: Probability of the kinds that are always answered, and of those that need a known fact.
    """
    labels = rows.labels
    fold = assign_folds(labels.cluster.to_numpy())
    tried = (labels.source == "adarague").to_numpy()
    logits = np.zeros((2, len(labels)))
    for number in range(FOLDS):
        mask = tried & (fold == number)
        for row, heads, examples in zip(
            logits, rows.fit(fold != number), (rows.first, rows.closer), strict=True
        ):
            row[mask] = heads.known_logits(examples.states[mask], 0.0)
    results = labels.loc[tried, ["question", "what"]].assign(label=labels.known[tried])
    lines = [fit_line(row[tried][:, None], results.label.to_numpy()) for row in logits]
    first, closer = [slope * row[tried] + shift for row, (slope, shift) in zip(logits, lines, strict=True)]
    kinds = predict_kinds(results.question, shipped, cache)
    p, is_read = estimate_p_known(shipped.segments.kinds, kinds, first, closer)
    shares = [sum_answerable(shipped.segments.kinds, question_kinds.closer) for question_kinds in kinds]
    results[["always", "if_known"]] = shares
    return results.assign(first=first, closer=closer, p=p, read=is_read), *lines


def sum_answerable(kind_list: Sequence[Kind], kinds: np.ndarray) -> tuple[float, float]:
    """Return the probability of the kinds that are always answered, and of those answered if the fact is known."""
    mean = kinds.mean(axis=0)
    answerable = np.array([kind.answerable for kind in kind_list])
    return float(mean[answerable == "always"].sum()), float(mean[answerable == "if_known"].sum())


def assign_folds(clusters: np.ndarray) -> np.ndarray:
    """Return the fold of each row; a cluster is never split."""
    return np.random.default_rng(SEED).integers(0, FOLDS, clusters.max() + 1)[clusters]


def fit_english(encoder_states: EncoderStates) -> tuple[np.ndarray, float, float]:
    """Fit a classifier of English; returns weights, bias, and the share of held-out foreign texts that it recognises.

    Romanised requests and those in several languages at once count as foreign.
    """
    rows = [row for row in make_training_rows() if row.source == "languages"]
    english = [label.question for label in read_template_labels()]
    texts = [row.text for row in rows if row.part == TRAIN] + english
    held_out_texts = [row.text for row in rows if row.part != TRAIN]
    encoder_states.fill((text, "") for text in texts + held_out_texts)
    states = np.stack([encoder_states.whole(text).ravel() for text in texts]).astype(np.float32)
    model = LogisticRegression(C=1e-3, max_iter=1_000, class_weight="balanced")
    mean, scale = states.mean(axis=0), states.std(axis=0) + 1e-6
    model.fit((states - mean) / scale, np.arange(len(texts)) >= len(texts) - len(english))
    weight = model.coef_[0] / scale
    bias = float(model.intercept_[0] - weight @ mean)
    is_foreign = (
        np.stack([encoder_states.whole(text).ravel() for text in held_out_texts]).astype(np.float32) @ weight
        + bias
        < 0
    )
    return weight.reshape(len(FIRST_LAYERS), -1).astype(np.float32), bias, float(is_foreign.mean())


@dataclass(frozen=True)
class QuestionScores:
    """Scores of n questions without an answer.

    Attributes:
        logits: Log-odds of P(known), shape (n,).
        depends: How much P(known) depends on the LLM's knowledge, in [0, 1], shape (n,); see
            `HeadsGate.depends_on_knowledge`.
    """

    logits: np.ndarray
    depends: np.ndarray

    def part(self, chosen: np.ndarray) -> "QuestionScores":
        """Return the scores of the chosen questions, by a mask or by indices."""
        return QuestionScores(self.logits[chosen], self.depends[chosen])


def judge_alone(questions: list[str], cache: Path) -> QuestionScores:
    """Return the scores of questions without an answer, with the reader reading every question.

    Questions of the six sets get the held-out scores that `main` saved; the shipped heads judge the others.
    """
    shipped: Any = read_gate(DEFAULT_GATE)
    kind_list = shipped.segments.kinds
    held_out = (
        pd.read_csv(cache / HELD_OUT, keep_default_na=False).drop_duplicates("question").set_index("question")
    )
    unseen = [question for question in dict.fromkeys(questions) if question not in held_out.index]
    states = read_question_states(unseen, cache)
    closer = held_out.closer.to_dict()
    for question in unseen:
        known = shipped.facts.known_logits(
            states[hash_question(question)][None], *shipped.facts.default_ability
        )
        closer[question] = float(known[0])
    p, depends = [], []
    for question, kinds in zip(questions, predict_kinds(questions, shipped, cache), strict=True):
        p.append(p_answered(kind_list, kinds.closer, sigmoids(np.array([closer[question]]))).min())
        always, if_known = sum_answerable(kind_list, kinds.closer)
        depends.append(if_known / (if_known + always))
    clipped = np.clip(p, 1e-6, 1 - 1e-6)
    return QuestionScores(np.log(clipped / (1 - clipped)), np.array(depends))


def compute_figures(results: pd.DataFrame) -> dict:
    """Return the figures of the six sets as JSON values."""
    by_set = results.groupby("what")
    aucs = {name: auc(rows.p, rows.label) for name, rows in by_set}
    return {
        "auc": aucs,
        "auc_mean": float(np.mean(list(aucs.values()))),
        "auc_pooled": auc(results.p, results.label),
        "retrieved_sets": {name: float((rows.p < THRESHOLD).mean()) for name, rows in by_set},
        "ece": {name: _compute_ece(rows) for name, rows in by_set} | {"sets": _compute_ece(results)},
    }


def _compute_ece(results: pd.DataFrame) -> float:
    return ece(results.p.to_numpy(), results.label.to_numpy())


def ece(p: np.ndarray, label: np.ndarray, bins: int = 10) -> float:
    """Return the expected calibration error of probabilities, in bins of equal size."""
    order = np.argsort(p)
    gaps = 0.0
    for part in np.array_split(order, bins):
        if len(part):
            gaps += len(part) * abs(p[part].mean() - label[part].mean())
    return float(gaps / len(p))


def show_metrics(metrics: dict, title: str) -> None:
    """Print the figures of `compute_figures` here and in `kinds`."""
    rows, errors = [], metrics["ece"]
    for kind, goal in GOALS.items():
        sign = "≤" if kind in SKIPS else "≥"
        retrieved = f"{metrics['retrieved'][kind]:.1%}"
        rows.append([kind, "", retrieved, f"{sign} {goal:.0%}", f"{errors[kind]:.3f}"])
    requests_error = f"{errors['requests']:.3f}"
    rows.append(["all requests", f"{metrics['auc_requests']:.3f}", "", "≥ 0.980", requests_error])
    for source, value in metrics["auc_without_source"].items():
        rows.append([f"without {source}", f"{value:.3f}", "", "≥ 0.950", ""])
    rows += _set_rows(metrics)
    print_table(["", "AUC", "retrieved", "goal", "ECE"], rows, title)


def _set_rows(metrics: dict) -> list[list[str]]:
    rows, errors = [], metrics["ece"]
    for name in SETS:
        retrieved = f"{metrics['retrieved_sets'][name]:.1%}"
        rows.append([name, f"{metrics['auc'][name]:.3f}", retrieved, "", f"{errors[name]:.3f}"])
    rows.append(["mean of the six sets", f"{metrics['auc_mean']:.3f}", "", "", f"{errors['sets']:.3f}"])
    return rows


def train(
    rows: Rows, shipped: HeadsArtifact, lines: Sequence[Line], metrics: dict, cache: Path
) -> HeadsArtifact:
    """Fit on every row, calibrate, and record the provenance."""
    first, closer = [
        calibrate_heads(heads, *line)
        for heads, line in zip(rows.fit(np.ones(len(rows.labels), bool)), lines, strict=True)
    ]
    weight, bias, accuracy = fit_english(fact_states(cache))
    CONSOLE.print(f"other languages, templates held out, that are recognised: {accuracy:.1%}")
    all_metrics = dict(shipped.provenance["metrics"])
    all_metrics |= metrics | {"ece": all_metrics["ece"] | metrics["ece"]}
    kinds_recipe = shipped.provenance["recipe"].partition("; kinds")
    provenance = shipped.provenance | {
        "label": "kind of request; answered rightly without retrieval",
        "seed": SEED,
        "folds": FOLDS,
        "recipe": f"python benchmarks/heads.py: {HeadsRecipe()}; weights {KNOWN_WEIGHTS}"
        + "".join(kinds_recipe[1:]),
        "data": [*_describe_sources(rows.labels), *_select_other_data(rows.labels, shipped)],
        "metrics": all_metrics,
        "licence": "Apache-2.0",
    }
    # These heads have no news weights yet; run `news` afterwards.
    return replace(
        shipped,
        first_facts=first,
        facts=closer,
        english=Detector(weight, bias),
        threshold=THRESHOLD,
        llm=LLAMA,
        provenance=provenance,
    )


def _describe_sources(labels: pd.DataFrame) -> list[dict[str, Any]]:
    data = []
    for (source, licence), rows in labels.groupby(["source", "licence"], sort=False):
        questions = rows.question.unique()
        data.append(
            {
                "name": source,
                "licence": licence,
                "sha256": checksum(questions),
                "n": len(questions),
                "known": float(rows.known.mean()),
                "llms": sorted(rows.llm[rows.llm != ""].unique()),
            }
        )
    return data


def _select_other_data(labels: pd.DataFrame, shipped: HeadsArtifact) -> list[dict[str, Any]]:
    """Return the data that the gate's other heads learned from."""
    from_labels = set(zip(labels.source, labels.licence, strict=True))
    return [
        entry for entry in shipped.provenance["data"] if (entry["name"], entry["licence"]) not in from_labels
    ]


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--cache", type=Path, default=CACHE, help="folder of cached hidden states")
    parser.add_argument("--save", type=Path)
    arguments = parser.parse_args()
    rows = read_rows(arguments.data, arguments.cache)
    shipped: Any = read_gate(arguments.save or DEFAULT_GATE)
    results, *lines = judge_sets(rows, shipped, arguments.cache)
    results.to_csv(arguments.cache / HELD_OUT, index=False)
    metrics = compute_figures(results)
    print_table(["", "AUC", "retrieved", "", "ECE"], _set_rows(metrics), f"held out, threshold {THRESHOLD}")
    agreed = (results.p >= THRESHOLD) == (
        results.always + results.if_known * sigmoids(results.closer.to_numpy()) >= THRESHOLD
    )
    CONSOLE.print(
        f"read by the reader: {results.read.mean():.1%}; decided as if it read all: {agreed.mean():.1%}"
    )
    if arguments.save is not None:
        save_gate(train(rows, shipped, lines, metrics, arguments.cache), arguments.save)


if __name__ == "__main__":
    main()
