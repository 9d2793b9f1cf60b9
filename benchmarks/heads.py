"""Fits what tells whether an LLM knows a fact, on the reader's states, and measures it on what it has not seen.

    python benchmarks/heads.py --data FOLDER                    cross-validated: the six sets, and practical requests
    python benchmarks/heads.py --data FOLDER --save GATE        also fits on everything that ships, and saves it

The folder holds ``practical.dev.jsonl``, ``adaptive_llama31_8b.*.dev.jsonl``, ``more/`` and ``strong/``. Practical
requests are scored by heads that were trained without the whole source that they come from, the six sets by heads
that were trained without the question's cluster; both by the same recipe. Hidden states are kept under
``benchmarks/out/heads``, or ``--cache FOLDER``: the first run takes a quarter of an hour.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pandas as pd
from base import OUT, SETS, argument_parser, checksum, print_table
from head_fit import (
    HeadExamples,
    HeadsRecipe,
    calibrated_heads,
    fit_heads,
    fit_known,
    fit_line,
)
from labels import LLAMA, clusters_of, read_abilities, read_labels, table_name

from rgate_integrations.engine.loading import DEFAULT_GATE
from rgate_integrations.gates.artifacts import FactHeads, Kind, p_answered
from rgate_integrations.gates.folder import read_gate, save_gate
from rgate_integrations.index.embedder import MINILM, SentenceEmbedder
from rgate_integrations.models.catalog import DEFAULT_MODEL, READER
from rgate_integrations.models.download import download
from rgate_integrations.models.pooling import PooledLayer
from rgate_integrations.models.reader import shared_reader
from rgate_integrations.tuning.evaluation import auc

CACHE = OUT / "heads"
FOLDS, SEED = 5, 0
THRESHOLD = 0.62  # more private and fresh requests are found than at 0.5, for somewhat more retrieval
LAYERS = (
    PooledLayer(14, "question", "mean"),
    PooledLayer(16, "question", "mean"),
    PooledLayer(18, "question", "mean"),
    PooledLayer(18, "all", "last"),  # where the answer is about to begin
)
KINDS = (
    Kind("no_knowledge", "always", "needs no knowledge from outside"),
    Kind("common_knowledge", "always", "asks for what every LLM knows"),
    Kind("knowledge", "if_known", "asks about a fact"),
    Kind("obscure_knowledge", "never", "asks about something hardly anybody knows"),
    Kind("private", "never", "asks about documents, data or a conversation that the LLM has not seen"),
    Kind("fresh", "never", "asks about something that changes with time"),
    Kind("other_language", "never", "is not in plain English, all that the gate reads well"),
)
NAMES = [kind.name for kind in KINDS]
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
    "simpleqa": 1.0,
    "halueval": 0.5,
    "gemma-2b": 0.1,
    "templates": 0.01,
}
"""How much an answer of each source counts; the others only measure."""


Known: TypeAlias = tuple[np.ndarray, float]
Line: TypeAlias = tuple[float, float]
"""Slope and intercept that map the knowledge head's logits."""


@dataclass(frozen=True)
class Rows:
    """Labels as the fit takes them: a row for a kind, and a row for each LLM that tried.

    Attributes:
        labels: The columns of `labels.Label`, and ``cluster``: questions that ask nearly the same share a fold.
        examples: The same rows.
    """

    labels: pd.DataFrame
    examples: HeadExamples

    @classmethod
    def of(cls, labels: pd.DataFrame, states: dict[str, np.ndarray]) -> "Rows":
        """Make rows of labels, and of the hidden states by `key` of the question."""
        weight = labels.source.map(KNOWN_WEIGHTS).fillna(0.0)
        weight[labels.what.str.endswith("(low quality)")] = 0.0
        of_kind = labels[labels.kind != ""].assign(known=np.nan, weight=1.0)
        tried = labels.assign(kind="", weight=weight)[(weight > 0) & labels.known.notna()]
        rows = pd.concat([of_kind, tried]).sort_index(kind="stable")
        abilities = rows.llm.map(table_name).map(read_abilities()).fillna(0.0)
        examples = HeadExamples(
            np.stack([states[key(question)] for question in rows.question]),
            rows.kind.to_numpy(str),
            rows.known.to_numpy(),
            abilities.to_numpy(),
            rows.group.to_numpy(str),
            rows.weight.to_numpy(),
        )
        return cls(rows, examples)

    def fit(self, chosen: np.ndarray, known: Known | None = None) -> FactHeads:
        """Fit heads on those of some rows that may ship; the knowledge head may be fitted already."""
        part = self.examples.rows(chosen & self.labels.ships.to_numpy())
        return fit_heads(part, LAYERS, KINDS, DEFAULT_MODEL, HeadsRecipe(), known)

    def fit_known(self, chosen: np.ndarray) -> Known:
        """Fit the knowledge head alone."""
        labelled = self.labels.ships & self.labels.known.notna()
        return fit_known(self.examples.rows(chosen & labelled.to_numpy()), LAYERS, HeadsRecipe())


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
    """Read all labels and their hidden states, computed where they are not kept in the cache yet."""
    labels = pd.DataFrame(map(vars, read_labels(data)))
    states = read_question_states(labels.question.tolist(), cache)
    # Many LLMs answered the same questions, and each question is clustered once.
    asked = labels.groupby("question", sort=False, as_index=False).last()
    clusters = pd.Series(clusters_of(asked, embed(asked, cache)), index=asked.question)
    labels["cluster"] = labels.question.map(clusters)
    return Rows.of(labels, states)


def embed(labels: pd.DataFrame, cache: Path) -> np.ndarray:
    """Return MiniLM's embedding of each question, shape (n, 384); zeros for templates, where none is read."""
    recorded = np.flatnonzero(labels.source != "templates")
    questions = labels.question.iloc[recorded].tolist()
    kept = Kept(cache / "embeddings").fill(questions, SentenceEmbedder(MINILM).embed)
    vectors = np.zeros((len(labels), 384), np.float32)
    vectors[recorded] = np.stack([kept[key(question)] for question in questions])
    return vectors


def read_question_states(
    questions: list[str], cache: Path, layers: Sequence[PooledLayer] = LAYERS, name: str = "states"
) -> dict[str, np.ndarray]:
    """Return the hidden states of questions by `key`, computed where they are not kept in the cache yet."""
    reader = shared_reader(download(READER))

    def read(some: list[str]) -> np.ndarray:
        return np.stack([each.states for each in reader.hidden(some, None, layers)])

    return Kept(cache / name).fill(questions, read)


def save_held_out(held: pd.DataFrame, cache: Path, name: str) -> None:
    """Keep held-out results for `alone`."""
    cache.mkdir(parents=True, exist_ok=True)
    held.to_csv(cache / f"held_out_{name}.csv", index=False)


def read_held_out(cache: Path, name: str) -> pd.DataFrame:
    """Read what `save_held_out` kept."""
    path = cache / f"held_out_{name}.csv"
    return pd.read_csv(path, keep_default_na=False, float_precision="round_trip")


def p_known(held: pd.DataFrame, line: Line) -> np.ndarray:
    """Return P(the LLM alone serves the request well) of held-out results."""
    slope, intercept = line
    known = 1 / (1 + np.exp(-(slope * held.known.to_numpy() + intercept)))
    shares = np.stack([kind.share_answered(known) for kind in KINDS], axis=1)
    return (held[NAMES].to_numpy() * shares).sum(axis=1)


def line_of(sets: pd.DataFrame) -> Line:
    """Fit the line that calibrates the knowledge head on held-out questions of the six sets."""
    return fit_line(sets.known.to_numpy()[:, None], sets.label.to_numpy())


def held_out_requests(rows: Rows) -> pd.DataFrame:
    """Score each practical source by heads that were trained without it, and without what is near it."""
    labels = rows.labels
    asked = labels.source.isin(PRACTICAL) & (labels.kind != "")
    # No practical request has a part in the knowledge head, so that one is enough for all.
    fitted = rows.fit_known(~asked.to_numpy())
    found = []
    for source in PRACTICAL:
        own = asked & (labels.source == source)
        rest = (labels.source != source) & ~labels.cluster.isin(labels.cluster[own])
        found.append(_held_out(rows, own, rest, labels.what.isin(SKIPS).astype(float), fitted))
    return pd.concat(found).sort_index(kind="stable")


def held_out_sets(rows: Rows) -> pd.DataFrame:
    """Score the six sets by question cluster."""
    labels = rows.labels
    fold = folds_of(labels.cluster.to_numpy())
    tried = (labels.source == "adarague") & labels.known.notna()
    found = []
    for number in range(FOLDS):
        found.append(_held_out(rows, tried & (fold == number), fold != number, labels.known))
    return pd.concat(found).sort_index(kind="stable")


def folds_of(clusters: np.ndarray) -> np.ndarray:
    """Return the fold of each row: that of its cluster."""
    return np.random.default_rng(SEED).integers(0, FOLDS, clusters.max() + 1)[clusters]


def _held_out(
    rows: Rows, part: pd.Series, rest: np.ndarray | pd.Series, label: pd.Series, fitted: Known | None = None
) -> pd.DataFrame:
    """Return what heads that are fitted on the rest say of a part.

    Columns:
        question, what, source: Those of the labels.
        NAMES: Probabilities of the kinds.
        known: Logits of the knowledge head.
        label: Whether it should be skipped, or was answered rightly.
    """
    heads = rows.fit(np.asarray(rest), fitted)
    states = rows.examples.states[part.to_numpy()]
    held = rows.labels.loc[part, ["question", "what", "source"]]
    held[NAMES] = heads.kind_probabilities(states)
    return held.assign(known=heads.known_logits(states, theta=0.0), label=label[part])


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
    """Return what the question alone says.

    Questions that `main` scored are held out; the others are scored by the shipped heads.
    """
    sets, requests = read_held_out(cache, "sets"), read_held_out(cache, "requests")
    held = pd.concat([sets, requests])
    found = _said(held.question, p_known(held, line_of(sets)), held[NAMES].to_numpy())
    found = found[~found.index.duplicated(keep="last")]
    others = [each for each in dict.fromkeys(questions) if each not in found.index]
    if others:
        shipped: Any = read_gate(DEFAULT_GATE)
        heads = shipped.facts
        states = read_question_states(others, cache)
        rows = np.stack([states[key(each)] for each in others])
        kinds = heads.kind_probabilities(rows)
        p = p_answered(heads.kinds, kinds, heads.p_fact_known(rows, *heads.default_ability))
        found = pd.concat([found, _said(others, p, kinds)])
    asked = found.loc[questions]
    p = np.clip(asked.p.to_numpy(), 1e-6, 1 - 1e-6)
    return Alone(np.log(p / (1 - p)), asked.depends.to_numpy())


def _said(questions: Any, p: np.ndarray, kinds: np.ndarray) -> pd.DataFrame:
    """Return P(known) and how much it depends on knowledge, by question; ``kinds`` has the shape (n, kinds)."""
    answerable = np.array([kind.answerable for kind in KINDS])
    if_known = kinds[:, answerable == "if_known"].sum(axis=1)
    always = kinds[:, answerable == "always"].sum(axis=1)
    return pd.DataFrame({"p": p, "depends": if_known / (if_known + always)}, index=questions)


def measured(requests: pd.DataFrame, sets: pd.DataFrame, line: Line) -> dict:
    """Return all figures as JSON values."""
    requests = requests.assign(p=p_known(requests, line))
    sets = sets.assign(p=p_known(sets, line))
    sources = {}
    for source in np.unique(requests.source):
        own = requests.source == source
        label = requests.label[own]
        if label.nunique() == 1:  # one kind only: against all requests of the other side
            own |= requests.label != label.iloc[0]
        sources[str(source)] = _auc(requests[own])
    by_kind, by_set, errors = requests.groupby("what"), sets.groupby("what"), {}
    errors |= by_kind.apply(_ece)[list(GOALS)].to_dict()
    errors |= by_set.apply(_ece)[list(SETS)].to_dict()
    errors |= {"requests": _ece(requests), "sets": _ece(sets)}
    aucs = by_set.apply(_auc)[list(SETS)]
    return {
        "auc": aucs.to_dict(),
        "auc_mean": float(np.mean(aucs.tolist())),
        "auc_pooled": _auc(sets),
        "auc_requests": _auc(requests),
        "auc_without_source": sources,
        "retrieved": by_kind.apply(_retrieved)[list(GOALS)].to_dict(),
        "retrieved_sets": by_set.apply(_retrieved)[list(SETS)].to_dict(),
        "ece": errors,
    }


def _auc(held: pd.DataFrame) -> float:
    return auc(held.p, held.label)


def _ece(held: pd.DataFrame) -> float:
    return ece(held.p.to_numpy(), held.label.to_numpy())


def _retrieved(held: pd.DataFrame) -> float:
    return float((held.p < THRESHOLD).mean())


def ece(p: np.ndarray, label: np.ndarray, bins: int = 10) -> float:
    """Return the expected calibration error of probabilities, in bins of like size."""
    order = np.argsort(p)
    gaps = 0.0
    for part in np.array_split(order, bins):
        if len(part):
            gaps += len(part) * abs(p[part].mean() - label[part].mean())
    return float(gaps / len(p))


def show_metrics(metrics: dict, title: str) -> None:
    """Print what `measured` returned."""
    rows, errors = [], metrics["ece"]
    for kind, goal in GOALS.items():
        sign = "≤" if kind in SKIPS else "≥"
        retrieved = f"{metrics['retrieved'][kind]:.1%}"
        rows.append([kind, "", retrieved, f"{sign} {goal:.0%}", f"{errors[kind]:.3f}"])
    of_requests = f"{errors['requests']:.3f}"
    rows.append(["all requests", f"{metrics['auc_requests']:.3f}", "", "≥ 0.980", of_requests])
    for source, value in metrics["auc_without_source"].items():
        rows.append([f"without {source}", f"{value:.3f}", "", "≥ 0.950", ""])
    for name, value in metrics["auc"].items():
        retrieved = f"{metrics['retrieved_sets'][name]:.1%}"
        rows.append([name, f"{value:.3f}", retrieved, "", f"{errors[name]:.3f}"])
    rows.append(
        ["mean of the six sets", f"{metrics['auc_mean']:.3f}", "", "≥ 0.685", f"{errors['sets']:.3f}"]
    )
    print_table(["", "AUC", "retrieved", "goal", "ECE"], rows, title)


def train(rows: Rows, metrics: dict, line: Line, folder: Path) -> None:
    """Fit on every row that ships, calibrate, and save with all that is known about the data."""
    heads = calibrated_heads(rows.fit(rows.labels.ships.to_numpy()), *line)
    data = []
    shipping = rows.labels[rows.labels.ships]
    for (source, licence), labels in shipping.groupby(["source", "licence"], sort=False):
        questions = labels.question.unique()
        known = labels.known.dropna().to_numpy()
        data.append(
            {
                "name": source,
                "licence": licence,
                "sha256": checksum(questions),
                "n": len(questions),
                "known": float(known.mean()) if len(known) else None,
                "llms": sorted(labels.llm[labels.llm != ""].unique()),
            }
        )
    provenance = {
        "label": "kind of request; answered rightly without retrieval",
        "seed": SEED,
        "folds": FOLDS,
        "recipe": f"python benchmarks/heads.py: {HeadsRecipe()}; weights {KNOWN_WEIGHTS}",
        "data": data,
        "metrics": metrics,
        "licence": "Apache-2.0",
    }
    shipped: Any = read_gate(folder)
    save_gate(replace(shipped, facts=heads, threshold=THRESHOLD, llm=LLAMA, provenance=provenance), folder)


def main() -> None:
    """Run."""
    parser = argument_parser(__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--cache", type=Path, default=CACHE, help="where hidden states are kept")
    parser.add_argument("--save", type=Path)
    arguments = parser.parse_args()
    rows = read_rows(arguments.data, arguments.cache)
    requests, sets = held_out_requests(rows), held_out_sets(rows)
    save_held_out(requests, arguments.cache, "requests")
    save_held_out(sets, arguments.cache, "sets")
    line = line_of(sets)
    metrics = measured(requests, sets, line)
    show_metrics(metrics, f"held out, threshold {THRESHOLD}")
    if arguments.save is not None:
        train(rows, metrics, line, arguments.save)


if __name__ == "__main__":
    main()
