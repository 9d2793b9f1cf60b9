"""What might make the default gate's heads better, each attempt held out like the figures of `heads`.

    python benchmarks/head_attempts.py --data FOLDER [--cache FOLDER]            the knowledge head
    python benchmarks/head_attempts.py --data FOLDER [--cache FOLDER] --kinds    the head for kinds of requests
    python benchmarks/head_attempts.py --data FOLDER [--cache FOLDER] --bias     requests whose kind is in doubt

Knowledge: AUC of P(known), cross-validated by question cluster on the six sets of an 8B LLM; and, for questions that
every LLM or none answers (the benchmark's own, never trained on here), AUC of telling these two apart. Kinds: what is
retrieved for at the gate's threshold, each source of practical requests by heads that were trained without it. Hidden
states and held-out scores are those that `heads` keeps in the same cache.
"""

import argparse
from dataclasses import replace
from pathlib import Path

import numpy as np
from heads import (
    CONSOLE,
    FOLDS,
    GOALS,
    KINDS,
    KNOWN_WEIGHTS,
    LAYERS,
    OUT,
    SEED,
    THRESHOLD,
    Calibration,
    HeldOut,
    LeftOut,
    Rows,
    read_rows,
)
from labels import LLAMA, SETS
from rich.table import Table
from sklearn.metrics import roc_auc_score

from rgate_integrations.models.local import DEFAULT_MODEL
from rgate_integrations.training.heads import HeadExamples, HeadsRecipe, fit_heads, fit_known

OWN = {"adarague": 1.0}
LABELS = {
    "the six sets alone": OWN,
    "and TriviaQA of the base model, weight 0.1": OWN | {"wack": 0.1},
    "and TriviaQA of the base model, weight 0.3": OWN | {"wack": 0.3},
    "and three OpenAI models on NQ and TriviaQA, 0.05": OWN | {"qa-eval": 0.05},
    "and templates of common and obscure questions, 0.03": OWN | {"templates": 0.03},
    "and templates of common and obscure questions, 0.1": OWN | {"templates": 0.1},
    "all that ship": KNOWN_WEIGHTS,
}
STATES = {
    "mean over the question, layers 14, 16, 18": [0, 1, 2],
    "last token before the answer, layer 18": [3],
    "both": [0, 1, 2, 3],
}
SHARES = (0.125, 0.25, 0.5, 1.0)
BIASES = ((0.0, 0.0), (0.5, 0.0), (0.5, 0.4), (0.5, 0.8), (1.0, 0.4), (2.0, 0.4), (3.0, 0.4))
EVERY = STATES["both"]
KIND_ATTEMPTS = {
    "a quarter of the templates": (EVERY, HeadsRecipe(), 0.25),
    "half of the templates": (EVERY, HeadsRecipe(), 0.5),
    "all templates, as shipped": (EVERY, HeadsRecipe(), 1.0),
    "the question's mean alone": (STATES["mean over the question, layers 14, 16, 18"], HeadsRecipe(), 1.0),
    "layer 18 alone": ([2, 3], HeadsRecipe(), 1.0),
    "a fifth of the penalty": (EVERY, HeadsRecipe(kind_penalty=12.0), 1.0),
    "five times the penalty": (EVERY, HeadsRecipe(kind_penalty=300.0), 1.0),
    "256 components": (EVERY, HeadsRecipe(kind_components=256), 1.0),
}


class Attempts:
    """Held-out scores of knowledge heads on the six sets."""

    def __init__(self, rows: Rows) -> None:
        self.sources, self.clusters, self.what = map(rows.column, ("source", "cluster", "what"))
        self.examples = rows.examples
        self.labelled = ~np.isnan(self.examples.known)
        self.tested = (self.sources == "adarague") & self.labelled
        self.extreme = (self.sources == "written for this benchmark") & np.isin(
            self.what, ("common", "obscure")
        )
        fold = np.random.default_rng(SEED).integers(0, FOLDS, self.clusters.max() + 1)
        self.fold = fold[self.clusters]

    def scores(self, weights: dict[str, float], columns: list[int], share: float = 1.0) -> np.ndarray:
        """Return the logits of the tested rows and, by the mean of the folds' heads, of the extreme ones.

        Args:
            weights: Weight of each source.
            columns: Which states are read.
            share: How many of the rows are trained on.
        """
        weight = np.array([weights.get(source, 0.0) for source in self.sources])
        drawn = np.random.default_rng(SEED).random(len(weight)) < share
        scores = np.zeros(len(weight))
        for number in range(FOLDS):
            training = self.labelled & (weight > 0) & (self.fold != number) & drawn
            chosen = self._rows(training, columns, weight)
            known, bias = fit_known(chosen, [LAYERS[c] for c in columns], HeadsRecipe())
            for part, times in ((self.tested & (self.fold == number), 1.0), (self.extreme, 1 / FOLDS)):
                states = self.examples.states[part][:, columns].astype(np.float64)
                scores[part] += times * (np.einsum("nlh,lh->n", states, known) + bias)
        return scores

    def auc(self, scores: np.ndarray) -> list[str]:
        """Return the AUC of each set, their mean, all sets together, and that of common against obscure questions."""
        known = self.examples.known
        found = []
        for name in SETS:
            own = self.tested & (self.what == name)
            found.append(float(roc_auc_score(known[own], scores[own])))
        found.append(float(np.mean(found)))
        found.append(float(roc_auc_score(known[self.tested], scores[self.tested])))
        found.append(float(roc_auc_score(self.what[self.extreme] == "common", scores[self.extreme])))
        return [f"{value:.3f}" for value in found]

    def _rows(self, chosen: np.ndarray, columns: list[int], weight: np.ndarray) -> HeadExamples:
        part = self.examples.rows(chosen)
        return HeadExamples(
            part.states[:, columns], part.kinds, part.known, part.abilities, part.groups, weight[chosen]
        )


def try_knowledge(rows: Rows) -> None:
    """Print which states, whose labels, how many of them, and how much is learned within the sets."""
    attempts = Attempts(rows)
    table = Table(title=f"what {LLAMA} knows, by the question alone", title_justify="left", box=None)
    for column in ("", *SETS, "mean", "pooled", "common / obscure"):
        table.add_column(column, justify="right" if column else "left")
    for name, columns in STATES.items():
        table.add_row(name, *attempts.auc(attempts.scores(OWN, columns)))
    for name, weights in LABELS.items():
        table.add_row(name, *attempts.auc(attempts.scores(weights, EVERY)))
    for share in SHARES:
        table.add_row(f"{share:.1%} of the six sets", *attempts.auc(attempts.scores(OWN, EVERY, share)))
    CONSOLE.print(table)


def try_kinds(rows: Rows, cache: Path) -> None:
    """Print what other states, strengths and numbers of templates do to practical requests."""
    left_out = LeftOut.of(rows)
    line = Calibration.of(HeldOut.read(cache, "sets"))
    weight, bias = rows.fit_known(~left_out.asked)
    known = np.einsum("nlh,lh->n", rows.examples.states[left_out.asked].astype(np.float64), weight) + bias
    about = [rows.column(name)[left_out.asked] for name in ("question", "what", "source")]
    table = Table(
        title=f"practical requests: retrieved for at {THRESHOLD}; tasks where 98 % of private ones are",
        title_justify="left",
        box=None,
    )
    for column in ("", "AUC", *GOALS, "tasks at 98 %"):
        table.add_column(column, justify="right" if column else "left")
    for name, (columns, recipe, share) in KIND_ATTEMPTS.items():
        kinds = _kinds(rows, left_out, columns, recipe, share)
        question, what, source = about
        label = left_out.label[left_out.asked]
        p = HeldOut(question, what, source, kinds[left_out.asked], known, label).p_known(line)
        retrieved = [f"{(p[what == kind] < THRESHOLD).mean():.1%}" for kind in GOALS]
        cautious = np.quantile(p[what == "private"], 0.98)
        tasks = (p[what == "task"] < cautious).mean()
        table.add_row(name, f"{roc_auc_score(label, p):.3f}", *retrieved, f"{tasks:.1%}")
    CONSOLE.print(table)


def try_bias(cache: Path) -> None:
    """Print what biases of the kinds bring and cost, from the held-out scores that `heads` kept."""
    requests, sets = HeldOut.read(cache, "requests"), HeldOut.read(cache, "sets")
    line = Calibration.of(sets)
    table = Table(title="biases of kinds, in log-odds", title_justify="left", box=None)
    for column in ("knowledge", "never", "six sets", "trivia", "requests", *GOALS):
        table.add_column(column, justify="right")
    recipe = HeadsRecipe()
    for knowledge, never in BIASES:
        shifts = {
            "always": 0.0,
            "if known": knowledge - recipe.knowledge_bias,
            "never": never - recipe.never_bias,
        }
        p, of_sets = (_shifted(found, shifts).p_known(line) for found in (requests, sets))
        auc = {
            name: roc_auc_score(sets.label[sets.what == name], of_sets[sets.what == name]) for name in SETS
        }
        aucs = (np.mean(list(auc.values())), auc["trivia"], roc_auc_score(requests.label, p))
        retrieved = [f"{(p[requests.what == kind] < THRESHOLD).mean():.1%}" for kind in GOALS]
        table.add_row(f"{knowledge:g}", f"{never:g}", *[f"{value:.3f}" for value in aucs], *retrieved)
    CONSOLE.print(table)


def _shifted(found: HeldOut, shifts: dict[str, float]) -> HeldOut:
    """Return held-out scores with other biases, by how a kind is served."""
    weights = found.kinds * [np.exp(shifts[kind.served]) for kind in KINDS]
    return replace(found, kinds=weights / weights.sum(axis=1, keepdims=True))


def _kinds(
    rows: Rows, left_out: LeftOut, columns: list[int], recipe: HeadsRecipe, share: float
) -> np.ndarray:
    """Return held-out probabilities of the kinds; a share of the templates is trained on, each in whole."""
    clusters = rows.column("cluster")
    drawn = np.random.default_rng(SEED).random(clusters.max() + 1)[clusters] < share
    usable = rows.usable & (drawn | (rows.column("source") != "templates")) & (rows.examples.kinds != "")
    found = np.zeros((len(rows.labels), len(KINDS)))
    for part, training in zip(left_out.parts, left_out.training, strict=True):
        chosen = rows.examples.rows(training & usable)
        chosen = replace(chosen, states=chosen.states[:, columns])
        nothing = (np.zeros(chosen.states.shape[1:], np.float32), 0.0)  # the knowledge head is not asked
        layers = [LAYERS[column] for column in columns]
        heads = fit_heads(chosen, layers, KINDS, LLAMA, DEFAULT_MODEL, recipe, nothing)
        found[part] = heads.kind_probabilities(rows.examples.states[part][:, columns])
    return found


def main() -> None:
    """Run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--cache", type=Path, default=OUT, help="where hidden states are kept")
    parser.add_argument("--kinds", action="store_true", help="try the head for kinds of requests")
    parser.add_argument("--bias", action="store_true", help="try what a kind in doubt is taken for")
    arguments = parser.parse_args()
    if arguments.bias:
        try_bias(arguments.cache)
        return
    rows = read_rows(arguments.data, everything=False, cache=arguments.cache)
    if arguments.kinds:
        try_kinds(rows, arguments.cache)
    else:
        try_knowledge(rows)


if __name__ == "__main__":
    main()
