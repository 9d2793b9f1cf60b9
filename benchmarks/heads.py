"""Trains the default gate's heads, and measures them on what they have not seen.

    python benchmarks/heads.py --data FOLDER                    cross-validated: practical requests and the six sets
    python benchmarks/heads.py --data FOLDER --save FOLDER      also fits on everything that ships, and saves the gate

The folder holds ``practical.dev.jsonl``, ``adaptive_llama31_8b.*.dev.jsonl``, ``more/`` and ``strong/``. Practical
requests are scored by heads that were trained without the whole source that they come from, the six sets by heads
that were trained without the question's cluster; both by the same recipe. Hidden states are kept under
``benchmarks/out/heads``, or ``--cache FOLDER``: the first run takes a quarter of an hour.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from base import OUT, SETS, argument_parser, print_table
from head_fit import (
    HeadExamples,
    HeadsRecipe,
    calibrated_heads,
    fit_heads,
    fit_known,
    logistic,
)
from labels import LLAMA, Label, clustered, read_abilities, read_labels, table_name
from sklearn.metrics import roc_auc_score

from rgate_integrations.engine.loading import DEFAULT_GATE
from rgate_integrations.gates.artifacts import HeadsArtifact, Kind, p_answered
from rgate_integrations.gates.folder import read_gate, save_gate
from rgate_integrations.index.embedder import SentenceEmbedder
from rgate_integrations.models.base import PooledLayer
from rgate_integrations.models.download import download
from rgate_integrations.models.local import DEFAULT_MODEL, shared_proxy
from rgate_integrations.models.reader import READER, shared_reader

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
        labels: One a row.
        examples: The same rows.
    """

    labels: list[Label]
    examples: HeadExamples

    @classmethod
    def of(cls, labels: list[Label], states: dict[str, np.ndarray]) -> "Rows":
        """Make rows of labels, and of the hidden states by `key` of the question."""
        rows = []
        for label in labels:
            if label.kind:
                rows.append(replace(label, known=float("nan"), weight=1.0))
            poor = label.what.endswith("(low quality)")
            weight = 0.0 if poor else KNOWN_WEIGHTS.get(label.source, 0.0)
            if weight and not np.isnan(label.known):
                rows.append(replace(label, kind="", weight=weight))
        abilities = read_abilities()
        examples = HeadExamples(
            np.stack([states[key(row.question)] for row in rows]),
            np.array([row.kind for row in rows]),
            np.array([row.known for row in rows]),
            np.array([abilities.get(table_name(row.llm), 0.0) for row in rows]),
            np.array([row.group for row in rows]),
            np.array([row.weight for row in rows]),
        )
        return cls(rows, examples)

    def column(self, name: str) -> np.ndarray:
        """Return one attribute of every label."""
        return np.array([getattr(label, name) for label in self.labels])

    def fit(self, chosen: np.ndarray, known: Known | None = None) -> HeadsArtifact:
        """Fit heads on those of some rows that may ship; the knowledge head may be fitted already."""
        part = self.examples.rows(chosen & self.column("ships"))
        return fit_heads(part, LAYERS, KINDS, LLAMA, DEFAULT_MODEL, HeadsRecipe(), known)

    def fit_known(self, chosen: np.ndarray) -> Known:
        """Fit the knowledge head alone."""
        part = self.examples.rows(chosen & self.column("ships") & ~np.isnan(self.examples.known))
        return fit_known(part, LAYERS, HeadsRecipe())


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
    labels = read_labels(data)
    states = read_question_states([label.question for label in labels], cache)
    recorded = [label.question for label in labels if label.source != "templates"]
    embedded = Kept(cache / "embeddings").fill(recorded, SentenceEmbedder().embed)
    nothing = np.zeros_like(next(iter(embedded.values())))
    # Many LLMs answered the same questions, and each question is clustered once.
    asked = list({label.question: label for label in labels}.values())
    vectors = np.stack([embedded.get(key(each.question), nothing) for each in asked]).astype(np.float32)
    cluster_of = {each.question: each.cluster for each in clustered(asked, vectors)}
    return Rows.of([replace(label, cluster=cluster_of[label.question]) for label in labels], states)


def read_question_states(
    questions: list[str], cache: Path, layers: Sequence[PooledLayer] = LAYERS, name: str = "states"
) -> dict[str, np.ndarray]:
    """Return the hidden states of questions by `key`, computed where they are not kept in the cache yet."""
    reader = shared_reader(download(READER))

    def read(some: list[str]) -> np.ndarray:
        return np.stack([each.states for each in reader.hidden(some, None, layers)])

    return Kept(cache / name).fill(questions, read)


@dataclass(frozen=True)
class HeldOut:
    """Held-out results of some rows.

    Attributes:
        questions: The requests.
        what: Kind of request or data set of each.
        source: Its source.
        kinds: Probabilities of the kinds, shape (n, kinds).
        known: Logits of the knowledge head, shape (n,).
        label: Whether it should be skipped, or was answered rightly.
    """

    questions: np.ndarray
    what: np.ndarray
    source: np.ndarray
    kinds: np.ndarray
    known: np.ndarray
    label: np.ndarray

    def save(self, cache: Path, name: str) -> None:
        """Keep them for `alone`."""
        cache.mkdir(parents=True, exist_ok=True)
        np.savez(cache / f"held_out_{name}.npz", **vars(self))

    @classmethod
    def read(cls, cache: Path, name: str) -> "HeldOut":
        """Read what `save` kept."""
        return cls(**np.load(cache / f"held_out_{name}.npz"))

    def p_known(self, line: Line) -> np.ndarray:
        """Return P(the LLM alone serves the request well)."""
        slope, intercept = line
        known = 1 / (1 + np.exp(-(slope * self.known + intercept)))
        shares = np.stack([kind.share_answered(known) for kind in KINDS], axis=1)
        return (self.kinds * shares).sum(axis=1)


def line_of(sets: HeldOut) -> Line:
    """Fit the line that calibrates the knowledge head on held-out questions of the six sets."""
    one, n = np.ones((len(sets.known), 1)), len(sets.known)
    slope, intercept = logistic(sets.known[:, None], one, sets.label, np.ones(n), 1e-3, np.zeros(n))
    return float(slope[0]), float(intercept[0])


def held_out_requests(rows: Rows) -> HeldOut:
    """Score each practical source by heads that were trained without it, and without what is near it."""
    sources, clusters = rows.column("source"), rows.column("cluster")
    asked = np.isin(sources, PRACTICAL) & (rows.examples.kinds != "")
    parts, training = [], []
    for source in PRACTICAL:
        own = asked & (sources == source)
        parts.append(own)
        training.append((sources != source) & ~np.isin(clusters, clusters[own]))
    skip = np.isin(rows.column("what"), SKIPS).astype(float)
    # No practical request has a part in the knowledge head, so that one is enough for all.
    return _held_out(rows, parts, training, skip, rows.fit_known(~asked))


def held_out_sets(rows: Rows) -> HeldOut:
    """Score the six sets by question cluster."""
    clusters = rows.column("cluster")
    fold = np.random.default_rng(SEED).integers(0, FOLDS, clusters.max() + 1)[clusters]
    tried = (rows.column("source") == "adarague") & ~np.isnan(rows.examples.known)
    parts = [tried & (fold == number) for number in range(FOLDS)]
    return _held_out(rows, parts, [fold != number for number in range(FOLDS)], rows.examples.known)


def _held_out(
    rows: Rows,
    parts: list[np.ndarray],
    training: list[np.ndarray],
    label: np.ndarray,
    fitted: Known | None = None,
) -> HeldOut:
    kinds = np.zeros((len(rows.labels), len(KINDS)))
    known = np.zeros(len(rows.labels))
    for part, rest in zip(parts, training, strict=True):
        if part.any():
            heads = rows.fit(rest, fitted)
            kinds[part] = heads.kind_probabilities(rows.examples.states[part])
            known[part] = heads.known_logits(rows.examples.states[part], theta=0.0)
    asked = np.any(parts, axis=0)
    question, what, source = (rows.column(name)[asked] for name in ("question", "what", "source"))
    return HeldOut(question, what, source, kinds[asked], known[asked], label[asked])


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
    sets, requests = HeldOut.read(cache, "sets"), HeldOut.read(cache, "requests")
    line = line_of(sets)
    found: dict[str, tuple[float, float]] = {}
    for part in (sets, requests):
        values = zip(part.p_known(line).tolist(), _depends(part.kinds).tolist(), strict=True)
        found |= dict(zip(part.questions.tolist(), values, strict=True))
    others = [each for each in dict.fromkeys(questions) if each not in found]
    if others:
        heads: Any = read_gate(DEFAULT_GATE)
        states = read_question_states(others, cache)
        rows = np.stack([states[key(each)] for each in others])
        known = heads.p_fact_known(rows, *heads.default_ability)
        kinds = heads.kind_probabilities(rows)
        values = zip(p_answered(heads.kinds, kinds, known).tolist(), _depends(kinds).tolist(), strict=True)
        found |= dict(zip(others, values, strict=True))
    p, depends = np.array([found[each] for each in questions]).T
    p = np.clip(p, 1e-6, 1 - 1e-6)
    return Alone(np.log(p / (1 - p)), depends)


def _depends(kinds: np.ndarray) -> np.ndarray:
    """Return how much it depends on knowledge, by the kinds' probabilities, shape (n, kinds)."""
    if_known = kinds[:, [kind.answerable == "if_known" for kind in KINDS]].sum(axis=1)
    always = kinds[:, [kind.answerable == "always" for kind in KINDS]].sum(axis=1)
    return if_known / (if_known + always)


def measured(requests: HeldOut, sets: HeldOut, line: Line) -> dict:
    """Return all figures as JSON values."""
    of_requests, of_sets = requests.p_known(line), sets.p_known(line)
    sources = {}
    for source in np.unique(requests.source):
        own = requests.source == source
        if len(np.unique(requests.label[own])) == 1:  # one kind only: against all requests of the other side
            own |= requests.label != requests.label[own][0]
        sources[str(source)] = float(roc_auc_score(requests.label[own], of_requests[own]))
    aucs, retrieved, retrieved_sets, errors = {}, {}, {}, {}
    for kind in GOALS:
        own = requests.what == kind
        retrieved[kind] = float((of_requests[own] < THRESHOLD).mean())
        errors[kind] = ece(of_requests[own], requests.label[own])
    for name in SETS:
        own = sets.what == name
        aucs[name] = float(roc_auc_score(sets.label[own], of_sets[own]))
        retrieved_sets[name] = float((of_sets[own] < THRESHOLD).mean())
        errors[name] = ece(of_sets[own], sets.label[own])
    errors["requests"] = ece(of_requests, requests.label)
    errors["sets"] = ece(of_sets, sets.label)
    return {
        "auc": aucs,
        "auc_mean": float(np.mean(list(aucs.values()))),
        "auc_pooled": float(roc_auc_score(sets.label, of_sets)),
        "auc_requests": float(roc_auc_score(requests.label, of_requests)),
        "auc_without_source": sources,
        "retrieved": retrieved,
        "retrieved_sets": retrieved_sets,
        "ece": errors,
    }


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
        rows.append(
            [kind, "", f"{metrics['retrieved'][kind]:.1%}", f"{sign} {goal:.0%}", f"{errors[kind]:.3f}"]
        )
    pooled = errors.get("requests", float("nan"))
    rows.append(["all requests", f"{metrics['auc_requests']:.3f}", "", "≥ 0.980", f"{pooled:.3f}"])
    for source, value in metrics["auc_without_source"].items():
        rows.append([f"without {source}", f"{value:.3f}", "", "≥ 0.950", ""])
    for name, value in metrics["auc"].items():
        retrieved = f"{metrics['retrieved_sets'][name]:.1%}"
        rows.append([name, f"{value:.3f}", retrieved, "", f"{errors[name]:.3f}"])
    pooled = errors.get("sets", float("nan"))
    rows.append(["mean of the six sets", f"{metrics['auc_mean']:.3f}", "", "≥ 0.685", f"{pooled:.3f}"])
    print_table(["", "AUC", "retrieved", "goal", "ECE"], rows, title)


def train(rows: Rows, metrics: dict, line: Line, folder: Path) -> None:
    """Fit on every row that ships, calibrate, and save with all that is known about the data."""
    heads = calibrated_heads(rows.fit(rows.column("ships")), *line)
    sources: dict[tuple[str, str], list[Label]] = {}
    for label in rows.labels:
        if label.ships and (label.kind or not np.isnan(label.known)):
            sources.setdefault((label.source, label.licence), []).append(label)
    data = []
    for (source, licence), labels in sources.items():
        questions = sorted({label.question for label in labels})
        known = [label.known for label in labels if not np.isnan(label.known)]
        data.append(
            {
                "name": source,
                "licence": licence,
                "sha256": hashlib.sha256(json.dumps(questions).encode()).hexdigest(),
                "n": len(questions),
                "known": float(np.mean(known)) if known else None,
                "llms": sorted({label.llm for label in labels if label.llm}),
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
    found = replace(heads, threshold=THRESHOLD, fingerprint=shared_proxy().fingerprint, provenance=provenance)
    save_gate(found, folder)


def main() -> None:
    """Run."""
    parser = argument_parser(__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--cache", type=Path, default=CACHE, help="where hidden states are kept")
    parser.add_argument("--save", type=Path)
    arguments = parser.parse_args()
    rows = read_rows(arguments.data, arguments.cache)
    requests, sets = held_out_requests(rows), held_out_sets(rows)
    requests.save(arguments.cache, "requests")
    sets.save(arguments.cache, "sets")
    line = line_of(sets)
    metrics = measured(requests, sets, line)
    show_metrics(metrics, f"held out, threshold {THRESHOLD}")
    if arguments.save is not None:
        train(rows, metrics, line, arguments.save)


if __name__ == "__main__":
    main()
