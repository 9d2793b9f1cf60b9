"""What might make the knowledge head of the default gate better: which states, whose labels, how many of them.

    python benchmarks/head_attempts.py --data FOLDER

AUC of P(known), cross-validated by question cluster on the six sets of an 8B LLM; and, for questions that every LLM
or none answers (the benchmark's own, never trained on here), AUC of telling these two apart. The states are those
that `heads` keeps.
"""

import argparse
from pathlib import Path

import numpy as np
from heads import CONSOLE, FOLDS, LAYERS, OUT, SEED, Rows, read_rows
from labels import LLAMA, SETS
from rich.table import Table
from sklearn.metrics import roc_auc_score

from rgate_integrations.training.heads import HeadExamples, HeadsRecipe, fit_known

OWN = {"adarague": 1.0}
LABELS = {
    "the six sets alone": OWN,
    "and TriviaQA of the base model, weight 0.1": OWN | {"wack": 0.1},
    "and TriviaQA of the base model, weight 0.3": OWN | {"wack": 0.3},
    "and three OpenAI models on NQ and TriviaQA, 0.05": OWN | {"qa-eval": 0.05},
    "and templates of common and obscure questions, 0.03": OWN | {"templates": 0.03},
    "and templates of common and obscure questions, 0.1": OWN | {"templates": 0.1},
    "all of these, as shipped": OWN | {"wack": 0.15, "qa-eval": 0.03, "templates": 0.01},
}
STATES = {
    "mean over the question, layers 14, 16, 18": [0, 1, 2],
    "last token before the answer, layer 18": [3],
    "both": [0, 1, 2, 3],
}
SHARES = (0.125, 0.25, 0.5, 1.0)


class Attempts:
    """Held-out AUC of knowledge heads on the six sets."""

    def __init__(self, rows: Rows) -> None:
        self.sources, self.clusters, self.what = map(rows.column, ("source", "cluster", "what"))
        self.examples = rows.examples
        self.labelled = ~np.isnan(self.examples.known)
        self.tested = (self.sources == "adarague") & self.labelled
        fold = np.random.default_rng(SEED).integers(0, FOLDS, self.clusters.max() + 1)
        self.fold = fold[self.clusters]

    def auc(self, weights: dict[str, float], columns: list[int], share: float = 1.0) -> list[str]:
        """Return the AUC of each set, their mean, and that of common against obscure questions."""
        weight = np.array([weights.get(source, 0.0) for source in self.sources])
        drawn = np.random.default_rng(SEED).random(len(weight)) < share
        extreme = (self.sources == "written for this benchmark") & np.isin(self.what, ("common", "obscure"))
        scores = np.zeros(len(weight))
        for number in range(FOLDS):
            training = self.labelled & (weight > 0) & (self.fold != number) & drawn
            heads = fit_known(
                self._rows(training, columns, weight), [LAYERS[c] for c in columns], HeadsRecipe()
            )
            for part, times in ((self.tested & (self.fold == number), 1.0), (extreme, 1 / FOLDS)):
                states = self.examples.states[part][:, columns].astype(np.float64)
                scores[part] += times * np.einsum("nlh,lh->n", states, heads[0])
        found = []
        for name in SETS:
            own = self.tested & (self.what == name)
            found.append(float(roc_auc_score(self.examples.known[own], scores[own])))
        found.append(float(np.mean(found)))
        found.append(float(roc_auc_score(self.what[extreme] == "common", scores[extreme])))
        return [f"{value:.3f}" for value in found]

    def _rows(self, chosen: np.ndarray, columns: list[int], weight: np.ndarray) -> HeadExamples:
        part = self.examples.rows(chosen)
        return HeadExamples(
            part.states[:, columns], part.kinds, part.known, part.llms, part.groups, weight[chosen]
        )


def main() -> None:
    """Run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--cache", type=Path, default=OUT, help="where hidden states are kept")
    arguments = parser.parse_args()
    attempts = Attempts(read_rows(arguments.data, everything=False, cache=arguments.cache))
    table = Table(title=f"what {LLAMA} knows, by the question alone", title_justify="left", box=None)
    for column in ("", *SETS, "mean", "common / obscure"):
        table.add_column(column, justify="right" if column else "left")
    for name, columns in STATES.items():
        table.add_row(name, *attempts.auc(OWN, columns))
    for name, weights in LABELS.items():
        table.add_row(name, *attempts.auc(weights, STATES["both"]))
    for share in SHARES:
        table.add_row(f"{share:.1%} of the six sets", *attempts.auc(OWN, STATES["both"], share))
    CONSOLE.print(table)


if __name__ == "__main__":
    main()
