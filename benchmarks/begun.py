"""Trains the gate for partial answers, and measures it on questions that it has not seen.

    python benchmarks/begun.py --data FOLDER --runs FOLDER [--cache FOLDER] [--save FOLDER]

One probe reads the question and the first 8, 16, 32 or 64 tokens of the LLM's answer: each recorded answer is cut to
each of these lengths. All figures are held out by question cluster. That includes the ensemble with the gate for the
question alone, the default for partial answers. Run `heads.py` with the same cache first.

``--runs`` holds recorded calls of small LLMs with token log-probabilities (``LLM.jsonl`` and
``questions.PART.jsonl``, see `served.py`). A small head that weighs them is fitted on the part ``train``. The probe
learned from the same questions, so probes that were trained without the question's set score them. The head is
measured on the other parts and, if the data folder has them, on the answers of six LLMs about songs.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import base
import numpy as np
import pandas as pd
from base import SETS
from begun_states import CUTS, DEEP, LAYERS, Answers, read_states
from head_fit import HeadExamples, HeadsRecipe, fit_known, fit_line
from heads import CACHE, FOLDS, SEED, assign_folds, ece, embed, fact_states, judge_alone
from labels import LLAMA, cluster_questions, read_adarague
from logprobs import (
    Runs,
    build_features,
    combine_log_odds,
    cross_validate_head,
    fit_head,
    read_runs,
    score_features,
    show_knowledge,
)

from rgate_integrations.gates.artifacts import LogprobHead, ProbeArtifact
from rgate_integrations.gates.folder import save_gate
from rgate_integrations.models.base import PooledLayer
from rgate_integrations.models.catalog import DEFAULT_MODEL
from rgate_integrations.models.reader import FINGERPRINT
from rgate_integrations.tuning.evaluation import auc

SHARES = (*(1 / len(DEEP) for _ in DEEP), *(0.15 / len(DEEP) for _ in DEEP), 0.4)
"""How much each layer's logit counts. Chosen on the folds; nearby values are as good."""


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

    def calibrate(self, slope: float, intercept: float) -> "Probe":
        """Return a probe whose logits are mapped by a line."""
        return replace(self, slope=slope * self.slope, intercept=slope * self.intercept + intercept)


def fit_probe(answers: Answers, chosen: np.ndarray) -> Probe:
    """Fit an uncalibrated probe on the chosen answers, cut to all lengths."""
    states = answers.states[chosen]
    cuts, n = len(CUTS), len(states) * len(CUTS)
    labels, sets = np.repeat(answers.known[chosen], cuts), np.repeat(answers.sets[chosen], cuts)
    rows = HeadExamples(states.reshape(n, *states.shape[2:]), labels, np.zeros(n), sets, np.full(n, 1 / cuts))
    layers = [
        PooledLayer(i, "draft", "mean") for i in range(len(LAYERS))
    ]  # one view: all layers count the same
    weight, _ = fit_known(rows, layers, HeadsRecipe())
    probe = Probe(weight * len(LAYERS) * np.array(SHARES, np.float32)[:, None])
    # Each fold's probe has its own zero; centring on its training answers makes them comparable.
    return replace(probe, intercept=-float(probe(states).mean()))


def cross_validate(answers: Answers, fold: np.ndarray) -> np.ndarray:
    """Return held-out logits, shape (n, cuts)."""
    logits = np.zeros((len(answers.known), len(CUTS)))
    for number in range(FOLDS):
        probe = fit_probe(answers, fold != number)
        logits[fold == number] = probe(answers.states[fold == number])
    return logits


def measure_aucs(logits: np.ndarray, answers: Answers) -> list[float]:
    """Return the AUC of each set."""
    return [auc(logits[answers.sets == name], answers.known[answers.sets == name]) for name in SETS]


# --- log-probabilities ---------------------------------------------------------------------------------------


def judge_runs(
    runs: Runs, probe: Probe, without: dict[str, Probe], fold_of: dict[str, int]
) -> tuple[LogprobHead, dict]:
    """Fit the head for log-probabilities on the part ``train``; returns it, and a summary of its training data.

    The probe was trained on these questions, with another LLM's labels. So a probe that has not seen a question's
    set scores it. A probe that has seen the rest of the set would make words look more telling than they are for
    unlike questions, and the head would weigh them too much.

    Args:
        runs: The runs.
        probe: Scores the other parts.
        without: For each set, the probe that was trained on the other sets.
        fold_of: The fold of each question of the part ``train``, for held-out figures.
    """
    text = probe(runs.states)
    train = (runs.calls.part == "train").to_numpy()
    for name, unseen_probe in without.items():
        rows = train & (runs.calls.kind == name).to_numpy()
        text[rows] = unseen_probe(runs.states[rows])
    evidence = build_features(runs.calls.logprobs, text)
    labels, training_calls = runs.calls.known.to_numpy(), runs.calls[train]
    head = fit_head(evidence[train], runs.question.part(train), labels[train])
    default = combine_log_odds(runs.question, score_features(head, evidence))
    fold = training_calls.question.map(fold_of).to_numpy()
    default[train] = cross_validate_head(evidence[train], runs.question.part(train), labels[train], fold)
    show_knowledge(runs, evidence, default)
    return head, {
        "n": len(training_calls),
        "sha256": base.checksum(training_calls.question),
        "known": float(labels[train].mean()),
        "llms": sorted(training_calls.llm.unique()),
    }


# --- the command ---------------------------------------------------------------------------------------------


def read_answers(data: Path, cache: Path) -> tuple[Answers, np.ndarray]:
    """Return the answers to the six sets, and the fold of each question."""
    labels = pd.DataFrame(map(vars, read_adarague(data)))
    encoder_states = fact_states(cache)
    encoder_states.fill((question, "") for question in labels.question)
    fold = assign_folds(cluster_questions(labels, embed(labels, encoder_states)))
    pairs = []
    for name in SETS:
        for record in base.read_answers(data, name):
            pairs.append((record["question"].strip(), record["closed_book_text"].strip()))
    states = read_states(cache, pairs)
    questions = [question for question, _ in pairs]
    return Answers(states, labels.known.to_numpy(), labels.what.to_numpy(str), questions), fold


def show_sets(ways: dict[str, np.ndarray], answers: Answers) -> None:
    """Print each set's AUC and the calibration error, of log-odds by their name, shape (n, cuts) each."""
    rows = []
    for name, logits in ways.items():
        p = 1 / (1 + np.exp(-logits))
        for column, cut in enumerate(CUTS):
            set_aucs = measure_aucs(logits[:, column], answers)
            values = [
                f"{value:.3f}" for value in (*set_aucs, np.mean(set_aucs), ece(p[:, column], answers.known))
            ]
            rows.append([name, str(cut), *values])
    base.print_table(["", "tokens", *SETS, "mean", "ECE"], rows, "AUC, held out by question cluster")


def main() -> None:
    parser = base.argument_parser(__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--runs", type=Path, required=True, help="recorded calls with log-probabilities")
    parser.add_argument("--cache", type=Path, default=CACHE, help="folder of cached hidden states")
    parser.add_argument("--save", type=Path)
    arguments = parser.parse_args()
    answers, fold = read_answers(arguments.data, arguments.cache)
    logits = cross_validate(answers, fold)
    slope, intercept = fit_line(logits, answers.known)
    words = slope * logits + intercept
    combined = combine_log_odds(judge_alone(answers.questions, arguments.cache), words)
    show_sets({"words": words, "question and words": combined}, answers)
    probe = fit_probe(answers, np.ones(len(fold), bool)).calibrate(slope, intercept)
    runs = read_runs(arguments.runs, arguments.data, arguments.cache)
    without = {}
    for name in runs.calls.kind[runs.calls.part == "train"].unique():
        without[name] = fit_probe(answers, answers.sets != name).calibrate(slope, intercept)
    fold_of = dict(zip(answers.questions, fold.tolist(), strict=True))
    head, facts = judge_runs(runs, probe, without, fold_of)
    base.CONSOLE.print(head)
    if arguments.save is not None:
        by_set = measure_aucs(words[:, -1], answers)
        by_tokens, with_heads = {}, {}
        for column, cut in enumerate(CUTS):
            by_tokens[str(cut)] = float(np.mean(measure_aucs(words[:, column], answers)))
            with_heads[str(cut)] = float(np.mean(measure_aucs(combined[:, column], answers)))
        metrics = {
            "auc": dict(zip(SETS, by_set, strict=True)),
            "auc_mean": float(np.mean(by_set)),
            "auc_pooled": auc(words[:, -1], answers.known),
            "auc_mean_by_tokens": by_tokens,
            "auc_mean_with_default_heads": with_heads,
        }
        save(arguments.save, answers, probe, head, metrics, facts)


def save(folder: Path, answers: Answers, probe: Probe, head: LogprobHead, metrics: dict, runs: dict) -> None:
    """Save the gate with its provenance."""
    data = [
        {
            "name": "adarague",
            "licence": "MIT",
            "sha256": base.checksum(answers.questions),
            "n": len(answers.known),
            "known": float(answers.known.mean()),
            "llms": [LLAMA],
        },
        {"name": "own runs on those questions (log-probabilities)", "licence": "MIT", **runs},
    ]
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
        fingerprint=FINGERPRINT,
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
