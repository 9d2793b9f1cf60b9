"""What a cascade spares: bands chosen on half of the questions, measured on the other half.

    python benchmarks/cascade.py --data FILE.jsonl ... [--draft proxy]

The files are those of attempts.py, whose kept hidden states and held-out logits are used: two minutes on two cores.
LayerStates that are not kept are computed first (about half an hour; with --draft proxy the drafts too, ten minutes).
First comes a probe of the question alone, second one of the question and 32 draft tokens: the LLM's recorded ones,
or the proxy's own. Each is calibrated by logistic regression on the other folds, as in training.

Of each threshold it prints one split, with paired 95 % bootstrap intervals, and the means over many splits.
"""

import argparse
from pathlib import Path

import numpy as np
from attempts import SMOL, Attempts
from rich.console import Console
from rich.table import Table

from rgate_integrations.calibration import BandOptions
from rgate_integrations.calibration.bands import Band, cascaded, choose_band
from rgate_integrations.evaluation.metrics import auc, paired_interval
from rgate_integrations.files import read_jsonl
from rgate_integrations.training.folds import question_folds
from rgate_integrations.training.linear import combine

CONSOLE = Console(width=140, highlight=False)
KINDS = {"no more retrieval": 0.0, "any retrieval": 1.0}  # how much the retrieval rate may grow
THRESHOLDS = ("0.5 (calibrated)", "as right as always", "retrieves for 60 %")


class Cascade:
    """Held-out P(known) of both stages, and which arms are right; all of shape (questions,)."""

    def __init__(self, paths: list[Path], draft: str) -> None:
        attempts = Attempts(paths)
        rag = {r["question"].strip(): bool(r["rag_correct"]) for p in paths for _, r in read_jsonl(p)}
        self.closed = attempts.known
        self.rag = np.array([rag[e.question] for e in attempts.examples])
        question = attempts.probe(SMOL, "question")
        self.first = self.calibrated(question)
        self.second = self.calibrated(attempts.probe(SMOL, "draft", 32, "mean", draft), question)

    def calibrated(self, *logits: np.ndarray) -> np.ndarray:
        """P(known) by the weights of the other folds."""
        columns, p = np.column_stack(logits), np.zeros(len(self.closed))
        for train, test in question_folds(len(p), 5, 0):
            weights, bias = combine(columns[train], self.closed[train])
            p[test] = 1 / (1 + np.exp(-(columns[test] @ weights + bias)))
        return p

    def threshold(self, kind: str, seed: int) -> float:
        """A threshold of the second stage, from the half that chooses."""
        chosen = np.random.default_rng(seed).permutation(len(self.closed))[: round(len(self.closed) / 2)]
        p = self.second[chosen]
        if kind == THRESHOLDS[0]:
            return 0.5
        if kind == THRESHOLDS[2]:
            return float(np.quantile(p, 0.6))
        order = np.argsort(p)  # the fewest retrievals that are enough
        gain = self.rag[chosen][order].astype(int) - self.closed[chosen][order]
        right = self.closed[chosen].sum() + np.append(0, np.cumsum(gain))
        return float(np.append(p[order], 1.01)[np.argmax(right >= self.rag[chosen].sum())])

    def band(self, threshold: float, more_retrieval: float, loss: float, seed: int) -> Band:
        """The band of one split."""
        options = BandOptions(loss=loss, more_retrieval=more_retrieval, seed=seed)
        return choose_band(self.first, self.second, threshold, self.closed, self.rag, options)

    def show(self, kind: str, bands: dict[str, Band], seed: int) -> None:
        """Every policy on the half that chose nothing."""
        n, threshold = len(self.closed), bands["no more retrieval"].threshold
        test = np.random.default_rng(seed).permutation(n)[round(n / 2) :]
        policies = {
            "never": (np.zeros(n, bool), None),
            "always": (np.ones(n, bool), None),
            "first for all": (self.first < threshold, 1.0),
            "second for all": (self.second < threshold, 0.0),
        }
        for name, band in bands.items():
            p = cascaded(self.first, self.second, band.low, band.high)
            policies[f"cascade, {name}: {band.low:.2f} to {band.high:.2f}"] = (
                p < threshold,
                band.early_exit_rate,
            )
        table = Table(f"{kind} ({threshold:.3f})", box=None)
        for column in ("right %", "retrieved %", "no draft %", "points against second for all"):
            table.add_column(column, justify="right")
        right = {k: np.where(r, self.rag, self.closed)[test].astype(float) for k, (r, _) in policies.items()}
        for name, (retrieve, early_exit_rate) in policies.items():
            difference = right[name] - right["second for all"]
            low, high = paired_interval(difference, seed=seed)
            table.add_row(
                name,
                f"{100 * right[name].mean():.1f}",
                f"{100 * retrieve[test].mean():.1f}",
                "" if early_exit_rate is None else f"{100 * early_exit_rate:.1f}",
                f"{100 * difference.mean():+.1f} [{100 * low:+.1f}, {100 * high:+.1f}]"
                if difference.any()
                else "",
            )
        CONSOLE.print(table)
        CONSOLE.print(f"{len(test)} questions. {bands['no more retrieval'].promise}\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, nargs="+", required=True)
    parser.add_argument("--draft", choices=("recorded", "proxy"), default="recorded")
    parser.add_argument("--loss", type=float, default=0.005)
    parser.add_argument("--splits", type=int, default=50)
    arguments = parser.parse_args()
    cascade, loss = Cascade(arguments.data, arguments.draft), arguments.loss
    aucs = (f"{name} {auc(p, cascade.closed):.3f}" for name, p in vars(cascade).items() if p.dtype == float)
    CONSOLE.print(f"AUC, pooled: {', '.join(aucs)}\n")
    summary = Table(f"means of {arguments.splits} splits", "allowed", box=None)
    columns = ("from", "to", "no draft %", "least", "retrieved %", "more", "points", "sd")
    for column in (*columns, f"lost <= {100 * loss:.1f}", "shown"):
        summary.add_column(column, justify="right")
    for kind in THRESHOLDS:
        found: dict[str, list[Band]] = {name: [] for name in KINDS}
        for seed in range(arguments.splits):
            threshold = cascade.threshold(kind, seed)
            for name, more in KINDS.items():
                found[name].append(cascade.band(threshold, more, loss, seed))
        cascade.show(kind, {name: bands[0] for name, bands in found.items()}, 0)
        for name, bands in found.items():
            difference = 100 * np.array([b.difference for b in bands])
            summary.add_row(
                kind,
                name,
                f"{np.mean([b.low for b in bands]):.2f}",
                f"{np.mean([b.high for b in bands]):.2f}",
                f"{100 * np.mean([b.early_exit_rate for b in bands]):.1f}",
                f"{100 * min(b.early_exit_rate for b in bands):.1f}",
                f"{100 * np.mean([b.retrieval_rate for b in bands]):.1f}",
                f"{100 * np.mean([b.retrieval_difference for b in bands]):+.1f}",
                f"{difference.mean():+.2f}",
                f"{difference.std():.2f}",
                f"{(difference >= -100 * loss).sum()} of {len(bands)}",
                f"{sum(b.kept for b in bands)} of {len(bands)}",
            )
    CONSOLE.print(summary)


if __name__ == "__main__":
    main()
