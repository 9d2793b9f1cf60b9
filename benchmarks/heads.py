"""Fits the heads that predict whether an LLM knows a fact, on states of both models, and measures them held out.

    python benchmarks/heads.py --data FOLDER                    the six sets, cross-validated
    python benchmarks/heads.py --data FOLDER --save GATE        also fits on everything that ships, and saves it

The folder holds ``practical.dev.jsonl``, ``adaptive_llama31_8b.*.dev.jsonl``, ``more/`` and ``strong/``. The six sets
are judged as the gate does, by heads that were fitted without the question's cluster; the kinds are those of the gate
(see `kinds`), which never learned what is known. Hidden states are kept under ``benchmarks/out/heads``, or
``--cache FOLDER``: the first run takes a quarter of an hour.
"""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pandas as pd
from base import CONSOLE, OUT, SETS, argument_parser, checksum, print_table
from encoder_states import OF_FACTS, OF_KINDS, EncoderStates
from head_fit import HeadExamples, HeadsRecipe, calibrate_heads, fit_facts, fit_line
from labels import LLAMA, cluster_questions, read_abilities, read_labels, read_template_labels, table_name
from sklearn.linear_model import LogisticRegression
from text_rows import TRAIN
from training_text import make_training_rows

from rgate_integrations.engine.loading import DEFAULT_GATE
from rgate_integrations.gates.artifacts import FactHeads, HeadsArtifact, Kind, p_answered
from rgate_integrations.gates.folder import read_gate, save_gate
from rgate_integrations.gates.heads import HeadsGate
from rgate_integrations.gates.probability import sigmoids
from rgate_integrations.models.catalog import DEFAULT_MODEL, READER
from rgate_integrations.models.download import download
from rgate_integrations.models.encoder import ENCODER
from rgate_integrations.models.pooling import PooledLayer
from rgate_integrations.models.reader import shared_reader
from rgate_integrations.runtime.segments import layout
from rgate_integrations.tuning.evaluation import auc

CACHE = OUT / "heads"
FOLDS, SEED = 5, 0
MOST_ANSWERS = 5_000  # of a source
THRESHOLD = 0.62  # more private and fresh requests are found than at 0.5, for somewhat more retrieval
MARGIN: float = HeadsGate.model_fields["margin"].default
LAYERS = (
    PooledLayer(14, "question", "mean"),
    PooledLayer(16, "question", "mean"),
    PooledLayer(18, "question", "mean"),
    PooledLayer(18, "all", "last"),  # where the answer is about to begin
)
FIRST_LAYERS = tuple(PooledLayer(layer, "question", "mean") for layer in OF_FACTS)
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
    "wack": 0.05,
    "qa-eval": 0.1,
    "calib": 0.1,
    "simpleqa": 0.1,
    "halueval": 0.1,
    "gemma-2b": 0.1,
    "templates": 0.01,
}
"""How much an answer of each source counts; the others only measure."""

HELD_OUT = "held_out_sets.csv"
"""What `main` keeps of the six sets for `alone`."""

Line: TypeAlias = tuple[float, float]
"""Slope and intercept that map logits of knowing a fact."""


@dataclass(frozen=True)
class Rows:
    """Labels as the fit takes them: a row for each question and LLM that tried it.

    Attributes:
        labels: The columns of `labels.Label`, and ``cluster``: questions that ask nearly the same share a fold.
        closer: With the reader's states.
        first: With the encoder's.
    """

    labels: pd.DataFrame
    closer: HeadExamples
    first: HeadExamples

    @classmethod
    def of(cls, labels: pd.DataFrame, states: dict[str, np.ndarray], kept: EncoderStates) -> "Rows":
        """Make rows of labels, and of the reader's states by `key` of the question and the encoder's."""
        weight = labels.source.map(KNOWN_WEIGHTS).fillna(0.0)
        weight[labels.what.str.endswith("(low quality)")] = 0.0
        rows = labels.assign(weight=weight)[(weight > 0) & labels.known.notna() & labels.ships]
        drawn = (
            rows.sample(frac=1.0, random_state=SEED)
            .groupby("source", sort=False)
            .head(MOST_ANSWERS)
            .sort_index()
        )
        # What was drawn stands for all.
        share = drawn.source.map(drawn.source.value_counts() / rows.source.value_counts())
        rows = drawn.assign(weight=drawn.weight / share)
        abilities = rows.llm.map(table_name).map(read_abilities()).fillna(0.0)
        columns = (
            rows.known.to_numpy(),
            abilities.to_numpy(),
            rows.group.to_numpy(str),
            rows.weight.to_numpy(),
        )
        closer = np.stack([states[key(question)] for question in rows.question])
        first = np.stack([kept.whole(question) for question in rows.question])
        return cls(rows.reset_index(drop=True), HeadExamples(closer, *columns), HeadExamples(first, *columns))

    def fit(self, chosen: np.ndarray) -> tuple[FactHeads, FactHeads]:
        """Fit the encoder's heads and the reader's on some rows."""
        return (
            fit_facts(self.first.rows(chosen), FIRST_LAYERS, ENCODER, HeadsRecipe()),
            fit_facts(self.closer.rows(chosen), LAYERS, DEFAULT_MODEL, HeadsRecipe()),
        )


def key(question: str) -> str:
    """Return what a question's hidden states are kept under."""
    return hashlib.sha256(question.encode()).hexdigest()[:16]


class Kept:
    """Vectors of questions that are kept on disk, in parts, so that a run that was stopped goes on."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.vectors: dict[str, np.ndarray] = {}
        for path in sorted(folder.glob("*.npz")):
            part = np.load(path)
            self.vectors.update(zip(part["keys"].tolist(), part["vectors"], strict=True))

    def fill(
        self, questions: list[str], compute: Callable[[list[str]], Any], part: int = 1024
    ) -> dict[str, np.ndarray]:
        """Compute what is missing; returns all vectors by key."""
        missing = list({key(q): q for q in questions if key(q) not in self.vectors}.values())
        missing.sort(key=len)  # rows of like length share a batch
        self.folder.mkdir(parents=True, exist_ok=True)
        for start in range(0, len(missing), part):
            some = missing[start : start + part]
            vectors = np.asarray(compute(some)).astype(np.float16)
            keys = [key(q) for q in some]
            np.savez(self.folder / f"{keys[0]}.npz", keys=np.array(keys), vectors=vectors)
            self.vectors.update(zip(keys, vectors, strict=True))
        return self.vectors


def read_rows(data: Path, cache: Path) -> Rows:
    """Read all labels and their states, computed where they are not kept in the cache yet."""
    labels = pd.DataFrame(map(vars, read_labels(data)))
    labels = labels[labels.known.notna()].reset_index(drop=True)
    states = read_question_states(labels.question.tolist(), cache)
    kept = fact_states(cache)
    kept.fill((question, "") for question in labels.question)
    # Many LLMs answered the same questions, and each question is clustered once.
    asked = labels.groupby("question", sort=False, as_index=False).last()
    clusters = pd.Series(cluster_questions(asked, embed(asked, kept)), index=asked.question)
    labels["cluster"] = labels.question.map(clusters)
    return Rows.of(labels, states, kept)


def fact_states(cache: Path) -> EncoderStates:
    """Return the encoder's states that facts are judged and questions compared by."""
    return EncoderStates(cache / "encoder", OF_FACTS)


def embed(labels: pd.DataFrame, kept: EncoderStates) -> np.ndarray:
    """Return the encoder's vector of each question, shape (n, 384), normalised; zeros for templates."""
    vectors = np.zeros((len(labels), 384), np.float32)
    for row, (question, source) in enumerate(zip(labels.question, labels.source, strict=True)):
        if source != "templates":
            vector = kept.whole(question)[-1].astype(np.float32)
            vectors[row] = vector / np.linalg.norm(vector)
    return vectors


def read_question_states(
    questions: list[str], cache: Path, layers: Sequence[PooledLayer] = LAYERS, name: str = "states"
) -> dict[str, np.ndarray]:
    """Return the hidden states of questions by `key`, computed where they are not kept in the cache yet."""
    reader = shared_reader(download(READER))

    def read(some: list[str]) -> np.ndarray:
        return np.stack([each.states for each in reader.hidden(some, None, layers)])

    return Kept(cache / name).fill(questions, read)


def kinds_of(questions: Iterable[str], shipped: HeadsArtifact, cache: Path) -> list[np.ndarray]:
    """Return the probability of each kind for each segment of each question, shape (segments, kinds)."""
    questions = list(questions)
    kept = EncoderStates(cache / "encoder", OF_KINDS)
    kept.fill((question, "") for question in questions)
    found = []
    for question in questions:
        states = kept.segments(question)
        found.append(shipped.kind_probabilities(states, layout(question), in_context=len(states) > 1))
    return found


def p_known(
    of_segments: Sequence[Kind], kinds: list[np.ndarray], first: np.ndarray, closer: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return P(known) of English questions, as the gate finds it, and which the reader reads, shape (n,) each.

    Args:
        of_segments: The kinds.
        kinds: The probability of each for each segment of each question.
        first: The encoder's logits that the fact is known, shape (n,).
        closer: The reader's.
    """
    p, read = np.zeros(len(kinds)), np.zeros(len(kinds), bool)
    for i, own in enumerate(kinds):
        if_unknown, if_known = [
            p_answered(of_segments, own, known).min()
            for known in (np.zeros(1), sigmoids(first[i : i + 1] + MARGIN))
        ]
        read[i] = if_unknown < THRESHOLD <= if_known
        logits = closer if read[i] else first
        p[i] = p_answered(of_segments, own, sigmoids(logits[i : i + 1])).min()
    return p, read


def held_out_sets(rows: Rows, shipped: HeadsArtifact, cache: Path) -> tuple[pd.DataFrame, Line, Line]:
    """Judge the six sets by heads that were fitted without the question's cluster.

    Returns:
        What was found, and the lines that calibrate the encoder's heads and the reader's. Columns:
        question, what: Those of the labels.
        label: Whether it was answered rightly.
        first, closer: Calibrated logits that the fact is known, by the encoder and by the reader.
        p, read: P(known), and whether the reader read the question.
        always, if_known: The share of the kinds that are always answered, and of those that are if the fact is known.
    """
    labels = rows.labels
    fold = folds_of(labels.cluster.to_numpy())
    tried = (labels.source == "adarague").to_numpy()
    logits = np.zeros((2, len(labels)))
    for number in range(FOLDS):
        own = tried & (fold == number)
        for found, heads, examples in zip(
            logits, rows.fit(fold != number), (rows.first, rows.closer), strict=True
        ):
            found[own] = heads.known_logits(examples.states[own], 0.0)
    held = labels.loc[tried, ["question", "what"]].assign(label=labels.known[tried])
    lines = [fit_line(found[tried][:, None], held.label.to_numpy()) for found in logits]
    first, closer = [
        slope * found[tried] + shift for found, (slope, shift) in zip(logits, lines, strict=True)
    ]
    kinds = kinds_of(held.question, shipped, cache)
    p, read = p_known(shipped.segments.kinds, kinds, first, closer)
    shares = [shares_of(shipped.segments.kinds, own) for own in kinds]
    held[["always", "if_known"]] = shares
    return held.assign(first=first, closer=closer, p=p, read=read), *lines


def shares_of(of_segments: Sequence[Kind], kinds: np.ndarray) -> tuple[float, float]:
    """Return the share of the kinds that are always answered, and of those that are if the fact is known."""
    mean = kinds.mean(axis=0)
    answerable = np.array([kind.answerable for kind in of_segments])
    return float(mean[answerable == "always"].sum()), float(mean[answerable == "if_known"].sum())


def folds_of(clusters: np.ndarray) -> np.ndarray:
    """Return the fold of each row: that of its cluster."""
    return np.random.default_rng(SEED).integers(0, FOLDS, clusters.max() + 1)[clusters]


def fit_english(kept: EncoderStates) -> tuple[np.ndarray, float, float]:
    """Fit a classifier of English; returns weights, bias, and its accuracy on languages left out.

    Requests in several languages at once, and romanised ones, count as others.
    """
    rows = [row for row in make_training_rows() if row.source == "languages"]
    english = [label.question for label in read_template_labels()]
    texts = [row.text for row in rows if row.part == TRAIN] + english
    tested = [row.text for row in rows if row.part != TRAIN]
    kept.fill((text, "") for text in texts + tested)
    states = np.stack([kept.whole(text).ravel() for text in texts]).astype(np.float32)
    model = LogisticRegression(C=1e-3, max_iter=1_000, class_weight="balanced")
    mean, scale = states.mean(axis=0), states.std(axis=0) + 1e-6
    model.fit((states - mean) / scale, np.arange(len(texts)) >= len(texts) - len(english))
    weight = model.coef_[0] / scale
    bias = float(model.intercept_[0] - weight @ mean)
    others = np.stack([kept.whole(text).ravel() for text in tested]).astype(np.float32) @ weight + bias < 0
    return weight.reshape(len(FIRST_LAYERS), -1).astype(np.float32), bias, float(others.mean())


@dataclass(frozen=True)
class Alone:
    """What the question alone says, of n questions.

    Attributes:
        logits: Log-odds of P(known), shape (n,).
        depends: How much it depends on knowledge, in [0, 1], shape (n,); see `HeadsGate.depends_on_knowledge`.
    """

    logits: np.ndarray
    depends: np.ndarray

    def part(self, chosen: np.ndarray) -> "Alone":
        """Return some of the questions."""
        return Alone(self.logits[chosen], self.depends[chosen])


def alone(questions: list[str], cache: Path) -> Alone:
    """Return what the question alone says where the reader reads every question.

    Questions of the six sets are held out, as `main` kept them; the others are judged by the shipped heads.
    """
    shipped: Any = read_gate(DEFAULT_GATE)
    of_segments = shipped.segments.kinds
    held = (
        pd.read_csv(cache / HELD_OUT, keep_default_na=False).drop_duplicates("question").set_index("question")
    )
    others = [each for each in dict.fromkeys(questions) if each not in held.index]
    states = read_question_states(others, cache)
    closer = held.closer.to_dict()
    for question in others:
        known = shipped.facts.known_logits(states[key(question)][None], *shipped.facts.default_ability)
        closer[question] = float(known[0])
    p, depends = [], []
    for question, kinds in zip(questions, kinds_of(questions, shipped, cache), strict=True):
        p.append(p_answered(of_segments, kinds, sigmoids(np.array([closer[question]]))).min())
        always, if_known = shares_of(of_segments, kinds)
        depends.append(if_known / (if_known + always))
    clipped = np.clip(p, 1e-6, 1 - 1e-6)
    return Alone(np.log(clipped / (1 - clipped)), np.array(depends))


def measured(held: pd.DataFrame) -> dict:
    """Return the figures of the six sets as JSON values."""
    by_set = held.groupby("what")
    aucs = {name: auc(own.p, own.label) for name, own in by_set}
    return {
        "auc": aucs,
        "auc_mean": float(np.mean(list(aucs.values()))),
        "auc_pooled": auc(held.p, held.label),
        "retrieved_sets": {name: float((own.p < THRESHOLD).mean()) for name, own in by_set},
        "ece": {name: _ece(own) for name, own in by_set} | {"sets": _ece(held)},
    }


def _ece(held: pd.DataFrame) -> float:
    return ece(held.p.to_numpy(), held.label.to_numpy())


def ece(p: np.ndarray, label: np.ndarray, bins: int = 10) -> float:
    """Return the expected calibration error of probabilities, in bins of like size."""
    order = np.argsort(p)
    gaps = 0.0
    for part in np.array_split(order, bins):
        if len(part):
            gaps += len(part) * abs(p[part].mean() - label[part].mean())
    return float(gaps / len(p))


def show_metrics(metrics: dict, title: str) -> None:
    """Print what `measured` returned, and what `kinds` measured."""
    rows, errors = [], metrics["ece"]
    for kind, goal in GOALS.items():
        sign = "≤" if kind in SKIPS else "≥"
        retrieved = f"{metrics['retrieved'][kind]:.1%}"
        rows.append([kind, "", retrieved, f"{sign} {goal:.0%}", f"{errors[kind]:.3f}"])
    of_requests = f"{errors['requests']:.3f}"
    rows.append(["all requests", f"{metrics['auc_requests']:.3f}", "", "≥ 0.980", of_requests])
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
    """Fit on every row, calibrate, and say all that is known about the data."""
    first, closer = [
        calibrate_heads(heads, *line)
        for heads, line in zip(rows.fit(np.ones(len(rows.labels), bool)), lines, strict=True)
    ]
    weight, bias, accuracy = fit_english(fact_states(cache))
    CONSOLE.print(f"other languages, templates held out, that are recognised: {accuracy:.1%}")
    known = dict(shipped.provenance["metrics"])
    known |= metrics | {"ece": known["ece"] | metrics["ece"]}
    kinds_recipe = shipped.provenance["recipe"].partition("; kinds")
    provenance = shipped.provenance | {
        "label": "kind of request; answered rightly without retrieval",
        "seed": SEED,
        "folds": FOLDS,
        "recipe": f"python benchmarks/heads.py: {HeadsRecipe()}; weights {KNOWN_WEIGHTS}"
        + "".join(kinds_recipe[1:]),
        "data": [*_sources(rows.labels), *_other_data(rows.labels, shipped)],
        "metrics": known,
        "licence": "Apache-2.0",
    }
    # Of news they say what `news` finds afterwards.
    return replace(
        shipped,
        first_facts=first,
        facts=closer,
        english_weight=weight,
        english_bias=bias,
        threshold=THRESHOLD,
        llm=LLAMA,
        provenance=provenance,
    )


def _sources(labels: pd.DataFrame) -> list[dict[str, Any]]:
    data = []
    for (source, licence), own in labels.groupby(["source", "licence"], sort=False):
        questions = own.question.unique()
        data.append(
            {
                "name": source,
                "licence": licence,
                "sha256": checksum(questions),
                "n": len(questions),
                "known": float(own.known.mean()),
                "llms": sorted(own.llm[own.llm != ""].unique()),
            }
        )
    return data


def _other_data(labels: pd.DataFrame, shipped: HeadsArtifact) -> list[dict[str, Any]]:
    """Return what the other heads of the gate have learned from."""
    own = set(zip(labels.source, labels.licence, strict=True))
    return [each for each in shipped.provenance["data"] if (each["name"], each["licence"]) not in own]


def main() -> None:
    """Run."""
    parser = argument_parser(__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--cache", type=Path, default=CACHE, help="where hidden states are kept")
    parser.add_argument("--save", type=Path)
    arguments = parser.parse_args()
    rows = read_rows(arguments.data, arguments.cache)
    shipped: Any = read_gate(arguments.save or DEFAULT_GATE)
    held, *lines = held_out_sets(rows, shipped, arguments.cache)
    held.to_csv(arguments.cache / HELD_OUT, index=False)
    metrics = measured(held)
    print_table(["", "AUC", "retrieved", "", "ECE"], _set_rows(metrics), f"held out, threshold {THRESHOLD}")
    agreed = (held.p >= THRESHOLD) == (
        held.always + held.if_known * sigmoids(held.closer.to_numpy()) >= THRESHOLD
    )
    CONSOLE.print(
        f"read by the reader: {held.read.mean():.1%}; decided as if it read all: {agreed.mean():.1%}"
    )
    if arguments.save is not None:
        save_gate(train(rows, shipped, lines, metrics, arguments.cache), arguments.save)


if __name__ == "__main__":
    main()
