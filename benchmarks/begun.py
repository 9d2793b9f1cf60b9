"""Trains the gate for begun answers, and measures it on questions that it has not seen.

    python benchmarks/begun.py --data FOLDER [--runs FOLDER] [--cache FOLDER] [--save FOLDER]

One probe reads the question and the first 8, 16, 32 or 64 tokens of the LLM's answer alike: each recorded answer is
cut to each of these lengths. All figures are held out by question cluster, also those of the ensemble with the gate
for the question alone, which is the default for begun answers: run `heads.py` with the same cache first.

``--runs`` has recorded calls of small LLMs with token log-probabilities (``LLM.jsonl`` and ``questions.PART.jsonl``,
see `served.py`): a small head that weighs them is fitted on the part ``train``, whose questions are the probe's own
(so probes that were trained without the question's set score them), and measured on the other parts and, if the data
folder has them, on the answers of six LLMs about songs.
"""

import hashlib
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import base
import numpy as np
from base import SETS
from begun_states import CUTS, DEEP, LAYERS, Answers, read_states
from head_fit import HeadExamples, HeadsRecipe, fit_known, logistic
from heads import CACHE, FOLDS, SEED, Kept, alone, ece, key
from labels import LLAMA, clustered, read_adarague
from logprobs import Runs, cross_validated_head, fit_head, judged, read_runs, show_knowledge, together
from sklearn.metrics import roc_auc_score

from rgate_integrations.gates.artifacts import LogprobHead, ProbeArtifact
from rgate_integrations.gates.folder import read_gate, save_gate
from rgate_integrations.index.embedder import SentenceEmbedder
from rgate_integrations.models.base import PooledLayer
from rgate_integrations.models.local import DEFAULT_MODEL, LocalProxy

SHARES = (*(1 / len(DEEP) for _ in DEEP), *(0.15 / len(DEEP) for _ in DEEP), 0.4)
"""How much each layer's logit counts: chosen on the folds, where values nearby are as good."""


@dataclass(frozen=True)
class Probe:
    """A probe: its weights, shape (layers, hidden size), and the line that calibrates it."""

    weight: np.ndarray
    slope: float = 1.0
    intercept: float = 0.0

    def __call__(self, states: np.ndarray) -> np.ndarray:
        """Return the logits, shape (n, cuts)."""
        raw = np.einsum("nclh,lh->nc", states.astype(np.float32), self.weight)
        return self.slope * raw + self.intercept

    def calibrated(self, slope: float, intercept: float) -> "Probe":
        """Return it with its logits mapped by a line."""
        return replace(self, slope=slope * self.slope, intercept=slope * self.intercept + intercept)


def fit(answers: Answers, chosen: np.ndarray) -> Probe:
    """Fit a probe on some answers, cut to all lengths; not calibrated."""
    states = answers.states[chosen]
    cuts, n = len(CUTS), len(states) * len(CUTS)
    known, sets = np.repeat(answers.known[chosen], cuts), np.repeat(answers.sets[chosen], cuts)
    nothing = np.full(n, "")
    rows = HeadExamples(
        states.reshape(n, *states.shape[2:]), nothing, known, np.zeros(n), sets, np.full(n, 1 / cuts)
    )
    layers = [PooledLayer(i, "draft", "mean") for i in range(len(LAYERS))]  # one view, so alike
    weight, _ = fit_known(rows, layers, HeadsRecipe())
    probe = Probe(weight * len(LAYERS) * np.array(SHARES, np.float32)[:, None])
    # The folds' probes have zeros of their own; the mean over what each was fitted on is one that they share.
    return replace(probe, intercept=-float(probe(states).mean()))


def cross_validated(answers: Answers, fold: np.ndarray) -> np.ndarray:
    """Return held-out logits, shape (n, cuts)."""
    logits = np.zeros((len(answers.known), len(CUTS)))
    for number in range(FOLDS):
        probe = fit(answers, fold != number)
        logits[fold == number] = probe(answers.states[fold == number])
    return logits


def line_of(logits: np.ndarray, known: np.ndarray) -> tuple[float, float]:
    """Fit the line that calibrates logits of all cuts, shape (n, cuts)."""
    n = logits.size
    label, weight = np.repeat(known, logits.shape[1]), np.full(n, 1 / logits.shape[1])
    slope, intercept = logistic(logits.reshape(n, 1), np.ones((n, 1)), label, weight, 1e-3, np.zeros(n))
    return float(slope[0]), float(intercept[0])


def aucs(logits: np.ndarray, answers: Answers) -> list[float]:
    """Return the AUC of each set."""
    found = []
    for name in SETS:
        own = answers.sets == name
        found.append(float(roc_auc_score(answers.known[own], logits[own])))
    return found


# --- log-probabilities ---------------------------------------------------------------------------------------


def judge_runs(
    runs: Runs, probe: Probe, without: dict[str, Probe], fold_of: dict[str, int]
) -> tuple[LogprobHead, dict]:
    """Fit the head for log-probabilities on the part ``train``; returns it, and what it was made of.

    The probe was trained on these questions, with another LLM's labels, so each is scored by a probe that has not
    seen its whole set. By one that has seen the rest of the set, words seem to tell more than they do of questions
    unlike those, and the head weighs them too much.

    Args:
        runs: The runs.
        probe: Scores the other parts.
        without: For each set the probe that was trained on the other sets.
        fold_of: The fold of each question of the part ``train``, for held-out figures.
    """
    text = probe(runs.answers.states)
    train = np.flatnonzero(runs.part == "train")
    for name, other in without.items():
        own = train[runs.kind[train] == name]
        text[own] = other(runs.answers.states[own])
    fold = np.array([fold_of[runs.answers.questions[row]] for row in train])
    features, question, known = runs.features(text), runs.question, runs.answers.known
    head = fit_head(features[train], question.part(train), known[train])
    shipped: Any = read_gate("default-answer")
    ways = {
        "question and words": together(question, text),
        "as shipped": together(question, judged(shipped.logprobs, features)),
        "all": together(question, judged(head, features)),
    }
    ways["all"][train] = cross_validated_head(features[train], question.part(train), known[train], fold)
    show_knowledge(runs, features, ways)
    learned = [runs.answers.questions[row] for row in train]
    facts = {
        "n": len(train),
        "sha256": hashlib.sha256(json.dumps(sorted(learned)).encode()).hexdigest(),
        "known": float(known[train].mean()),
        "llms": sorted(set(runs.answers.sets[train].tolist())),
    }
    return head, facts


# --- all of it -----------------------------------------------------------------------------------------------


def read_answers(data: Path, cache: Path) -> tuple[Answers, np.ndarray]:
    """Return the six sets' answers, and the fold of each question."""
    labels = list(read_adarague(data))
    embedded = Kept(cache / "embeddings").fill([each.question for each in labels], SentenceEmbedder().embed)
    vectors = np.stack([embedded[key(each.question)] for each in labels]).astype(np.float32)
    clusters = np.array([each.cluster for each in clustered(labels, vectors)])
    fold = np.random.default_rng(SEED).integers(0, FOLDS, clusters.max() + 1)[clusters]
    pairs = []
    for name in SETS:
        for record in base.read_answers(data, name):
            pairs.append((record["question"].strip(), record["closed_book_text"].strip()))
    answers = Answers(
        read_states(cache, pairs),
        np.array([each.known for each in labels]),
        np.array([each.what for each in labels]),
        [question for question, _ in pairs],
    )
    return answers, fold


def show_sets(ways: dict[str, np.ndarray], answers: Answers) -> None:
    """Print the AUC of each set, and the calibration, of log-odds by way, shape (n, cuts) each."""
    rows = []
    for name, logits in ways.items():
        p = 1 / (1 + np.exp(-logits))
        for place, cut in enumerate(CUTS):
            each = aucs(logits[:, place], answers)
            values = [f"{value:.3f}" for value in (*each, np.mean(each), ece(p[:, place], answers.known))]
            rows.append([name, str(cut), *values])
    base.print_table(["", "tokens", *SETS, "mean", "ECE"], rows, "AUC, held out by question cluster")


def _means(logits: np.ndarray, answers: Answers) -> dict[str, float]:
    """Return the mean AUC of the sets at each cut."""
    return {str(cut): float(np.mean(aucs(logits[:, place], answers))) for place, cut in enumerate(CUTS)}


def main() -> None:
    """Run."""
    parser = base.argument_parser(__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--runs", type=Path, help="recorded calls with log-probabilities")
    parser.add_argument("--cache", type=Path, default=CACHE, help="where hidden states are kept")
    parser.add_argument("--save", type=Path)
    arguments = parser.parse_args()
    answers, fold = read_answers(arguments.data, arguments.cache)
    logits = cross_validated(answers, fold)
    slope, intercept = line_of(logits, answers.known)
    words = slope * logits + intercept
    both = together(alone(answers.questions, arguments.cache), words)
    show_sets({"words": words, "question and words": both}, answers)
    probe = fit(answers, np.ones(len(fold), bool)).calibrated(slope, intercept)
    head, facts = None, {}
    if arguments.runs is not None:
        fold_of = dict(zip(answers.questions, fold.tolist(), strict=True))
        runs = read_runs(arguments.runs, arguments.data, arguments.cache)
        without = {}
        for name in np.unique(runs.kind[runs.part == "train"]):
            other = fit(answers, answers.sets != name)
            without[name] = other.calibrated(slope, intercept)
        head, facts = judge_runs(runs, probe, without, fold_of)
        base.CONSOLE.print(head)
    if arguments.save is not None:
        whole = aucs(words[:, -1], answers)
        metrics = {
            "auc": dict(zip(SETS, whole, strict=True)),
            "auc_mean": float(np.mean(whole)),
            "auc_pooled": float(roc_auc_score(answers.known, words[:, -1])),
            "auc_mean_by_tokens": _means(words, answers),
            "auc_mean_with_default_heads": _means(both, answers),
        }
        _save(arguments.save, answers, probe, head, metrics, facts)


def _save(
    folder: Path,
    answers: Answers,
    probe: Probe,
    head: LogprobHead | None,
    metrics: dict,
    runs: dict,
) -> None:
    questions = sorted(answers.questions)
    data = [
        {
            "name": "adarague",
            "licence": "MIT",
            "sha256": hashlib.sha256(json.dumps(questions).encode()).hexdigest(),
            "n": len(answers.known),
            "known": float(answers.known.mean()),
            "llms": [LLAMA],
        }
    ]
    if head is not None:
        data.append({"name": "own runs on those questions (log-probabilities)", "licence": "MIT", **runs})
    artifact = ProbeArtifact(
        weight=probe.weight.astype(np.float32),
        bias=0.0,
        layers=LAYERS,
        tokens=CUTS[-1],
        source="recorded",
        base_model=DEFAULT_MODEL,
        llm=LLAMA,
        slope=probe.slope,
        intercept=probe.intercept,
        logprobs=head,
        fingerprint=LocalProxy(DEFAULT_MODEL).fingerprint,
        provenance={
            "label": "closed_book_correct",
            "seed": SEED,
            "folds": FOLDS,
            "recipe": f"python benchmarks/begun.py: answers cut to {CUTS} tokens; {HeadsRecipe()}; shares {SHARES}",
            "data": data,
            "metrics": metrics,
            "licence": "Apache-2.0",
        },
    )
    base.CONSOLE.print(f"saved: {save_gate(artifact, folder)}")


if __name__ == "__main__":
    main()
