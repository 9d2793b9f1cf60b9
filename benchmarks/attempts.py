"""What might make a shipped gate better: other evidence, another model, more data. AUC, cross-validated by question.

    python benchmarks/attempts.py --data FILE.jsonl ... [--plot FILE.svg]

The files hold recorded answers (``question``, ``closed_book_text``, ``closed_book_correct``, ``rag_correct``,
``dataset``). Hidden states are kept under benchmarks/out/attempts/, so that a second run prints at once; the first
takes about an hour on two cores. They belong to these six files: delete them before a run on others. The plot shows
accuracy by retrieval rate, of held-out scores.
"""

import argparse
import re
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from rgate_integrations.index.embedder import SentenceEmbedder
from rgate_integrations.models.base import PooledLayer
from rgate_integrations.models.local import shared_proxy
from rgate_integrations.prompts import ANSWER
from rgate_integrations.runtime.files import read_jsonl
from rgate_integrations.training.drafts import drafts_for
from rgate_integrations.training.examples import Example, read_examples
from rgate_integrations.training.folds import auc_by_set, question_folds
from rgate_integrations.training.linear import cross_validate, fit_probe

OUT = Path(__file__).parent / "out" / "attempts"
CONSOLE = Console(width=120, highlight=False)
SMOL, QWEN = "smollm2-135m-instruct", "qwen2.5-coder-0.5b-instruct"
LAYERS = {
    (SMOL, "question"): (14, 16, 18),
    (SMOL, "draft"): (14, 16, 18, 20, 22),
    (QWEN, "question"): (10, 14, 16),
    (QWEN, "draft"): (10, 12, 14, 16, 18, 20, 22),
}
SETS = ("nq", "trivia", "squad", "hotpotqa", "musique", "2wikimultihopqa")
WORDS = ("who", "what", "when", "where", "which", "how", "are", "is", "in", "were", "did")


class Attempts:
    """Held-out logits of each kind of evidence, and what they are worth together."""

    def __init__(self, paths: list[Path]) -> None:
        # Kept states are rows: they must fit the questions whatever the order of the files.
        self.examples: list[Example] = sorted(
            (e for f in read_examples(paths) for e in f.examples),
            key=lambda e: (*SETS, e.dataset).index(e.dataset),
        )
        self.known = np.array([e.known for e in self.examples])
        self.sets = [e.dataset for e in self.examples]
        self._logits: dict[tuple, np.ndarray] = {}

    def states(
        self, model: str, span: str, tokens: int, pooling: str, source: str = "recorded"
    ) -> np.ndarray:
        """Hidden states of the model, shape (questions, layers, hidden size), over the LLM's or its own draft."""
        path = OUT / f"{model}.{span}.{tokens}.{pooling}{'' if source == 'recorded' else '.own'}.npy"
        if not path.exists():
            proxy, found = shared_proxy(model), []
            layers = [PooledLayer(layer, span, pooling) for layer in LAYERS[model, span]]
            for at in range(0, len(self.examples), 160):
                some = self.examples[at : at + 160]
                kind = source if tokens else "none"
                drafts = drafts_for(proxy, some, kind, tokens)
                values = [{"question": e.question} for e in some]
                found += [h.states.astype(np.float16) for h in proxy.hidden(ANSWER, values, drafts, layers)]
                CONSOLE.print(f"{path.stem}: {len(found)} of {len(self.examples)}", end="\r")
            OUT.mkdir(parents=True, exist_ok=True)
            np.save(path, np.stack(found))
        return np.load(path).astype(np.float32)

    def probe(
        self, model: str, span: str, tokens: int = 0, pooling: str = "mean", source: str = "recorded"
    ) -> np.ndarray:
        """Held-out logits of a probe on them."""
        key = (model, span, tokens, pooling, source)
        if key not in self._logits:
            states = self.states(*key)
            self._logits[key] = cross_validate(states, self.known, 5, 0, self.sets)
        return self._logits[key]

    def together(self, *columns: np.ndarray) -> tuple[float, float]:
        """AUC of a logistic regression on held-out logits and features: mean of the sets, pooled."""
        return self._auc(self.held_out(*columns))

    def words(self) -> np.ndarray:
        """Held-out logits of character n-grams of the question."""
        texts, found = [e.question for e in self.examples], np.zeros(len(self.known))
        for train, test in question_folds(len(self.known), 5, 0):
            ngrams = TfidfVectorizer(analyzer="char_wb", ngram_range=(2, 5), sublinear_tf=True, min_df=2)
            fitted = LogisticRegression(C=3, max_iter=500).fit(
                ngrams.fit_transform([texts[i] for i in train]), self.known[train]
            )
            found[test] = fitted.decision_function(ngrams.transform([texts[i] for i in test]))
        return found

    def surface(self) -> np.ndarray:
        """Features of the question's text: length, capitals, digits, question word."""
        rows = []
        for e in self.examples:
            words = e.question.split()
            capitals = sum(w[0].isupper() for w in words[1:])
            begins = [e.question.lower().startswith(w) for w in WORDS]
            rows.append([len(words), capitals, len(re.findall(r"\d", e.question)), *begins])
        return np.array(rows, float)

    def curve(self, shares: tuple[float, ...]) -> list[tuple[int, float, float]]:
        """(training questions, mean of the sets, pooled) of the 64-token probe for growing shares of the data."""
        views = [self.states(SMOL, "draft", 64, pooling) for pooling in ("mean", "last")]
        rows = []
        for share in shares:
            found = np.zeros(len(self.known))
            for train, test in question_folds(len(self.known), 5, 0):
                some = np.random.default_rng(0).permutation(train)[: int(len(train) * share)]
                for states in views:
                    names = [self.sets[i] for i in some]
                    found[test] += fit_probe(states[some], self.known[some], 0, names)(states[test])
            rows.append((round(len(self.known) * 0.8 * share), *self._auc(found)))
        return rows

    def held_out(self, *columns: np.ndarray) -> np.ndarray:
        """Held-out scores of several probes together."""
        features, found = np.column_stack(columns), np.zeros(len(self.known))
        for train, test in question_folds(len(self.known), 5, 1):
            model = make_pipeline(StandardScaler(), LogisticRegression(C=0.05))
            found[test] = model.fit(features[train], self.known[train]).decision_function(features[test])
        return found

    def _auc(self, scores: np.ndarray) -> tuple[float, float]:
        each = auc_by_set(scores, self.known, self.sets)
        return float(np.mean(list(each.values()))), auc_by_set(scores, self.known, ["all"] * len(scores))[
            "all"
        ]


def plot(a: Attempts, paths: list[Path], target: Path) -> None:
    """In-accuracy by retrieval rate: the scores of two shipped gates' kinds, random decisions, and the two ends."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "rgate", "svg.fonttype": "none"})
    import matplotlib.pyplot as plt

    rag = {r["question"].strip(): bool(r["rag_correct"]) for p in paths for _, r in read_jsonl(p)}
    opened = np.array([rag[e.question] for e in a.examples])
    figure, axis = plt.subplots(figsize=(6.4, 3.6))
    rates = np.arange(len(opened) + 1) / len(opened)
    views = {
        "the LLM's own first 64 tokens": ("draft", 64, "mean"),
        "the question alone": ("question", 0, "mean"),
    }
    for name, view in views.items():
        columns = [a.probe(SMOL, *view)] + ([a.probe(SMOL, "draft", 64, "last")] if view[1] else [])
        order = np.argsort(a.held_out(*columns))  # the least known first
        gain = np.concatenate([[0], np.cumsum(opened[order].astype(float) - a.known[order])])
        axis.plot(100 * rates, 100 * (a.known.sum() + gain) / len(opened), label=f"gate: {name}")
    never, always = 100 * a.known.mean(), 100 * opened.mean()
    axis.plot([0, 100], [never, always], "--", color="gray", label="random decisions")
    axis.axhline(always, color="gray", lw=0.8)
    axis.text(1, always + 0.15, "always retrieving", fontsize=8)
    axis.set(xlabel="questions retrieved for, %", ylabel="answered rightly, %")
    axis.legend(fontsize=8, loc="lower right")
    figure.tight_layout()
    figure.savefig(target, metadata={"Date": None})
    best = {k: round(float(v), 1) for k, v in {"never": never, "always": always}.items()}
    CONSOLE.print(best, "oracle", round(100 * float(np.mean(opened | a.known)), 1))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, nargs="+", required=True)
    parser.add_argument("--plot", type=Path, help="write an SVG")
    arguments = parser.parse_args()
    a = Attempts(arguments.data)
    if arguments.plot:
        plot(a, arguments.data, arguments.plot)
    question = a.probe(SMOL, "question")
    recorded, recorded_qwen = a.probe(SMOL, "draft", 32), a.probe(QWEN, "draft", 32)
    answer, last = a.probe(SMOL, "draft", 64), a.probe(SMOL, "draft", 64, "last")
    qwen_question = a.probe(QWEN, "question")
    qwen = (a.probe(QWEN, "draft", 64), a.probe(QWEN, "draft", 64, "last"), qwen_question)
    embedded = SentenceEmbedder().embed([e.question for e in a.examples])[:, None]
    embedding = cross_validate(embedded, a.known, 5, 0, a.sets)
    length = np.log1p([len(e.text.split()) for e in a.examples])
    attempts = {
        "question: smollm2": (question,),
        "question: qwen": (qwen_question,),
        "question: both models": (question, qwen_question),
        "question: smollm2 and MiniLM's embedding": (question, embedding),
        "question: smollm2 and length, capitals, digits, question word": (question, a.surface()),
        "question: character n-grams alone": (a.words(),),
        "32 tokens: smollm2": (recorded, question),
        "32 tokens: qwen": (recorded_qwen, qwen_question),
        "32 tokens: both models": (recorded, question, recorded_qwen, qwen_question),
        "64 tokens: smollm2, mean": (answer, question),
        "64 tokens: smollm2, mean and last token": (answer, last, question),
        "64 tokens: smollm2 and the length of the answer": (answer, last, question, length),
        "64 tokens: qwen, mean and last token": qwen,
        "64 tokens: both models": (answer, last, question, *qwen),
    }
    table = Table("evidence", box=None)
    for column in ("mean of the sets", "pooled"):
        table.add_column(column, justify="right")
    for name, columns in attempts.items():
        table.add_row(name, *(f"{v:.3f}" for v in a.together(*columns)))
    CONSOLE.print(table)
    table = Table("training questions (64 tokens, smollm2)", box=None)
    for column in ("mean of the sets", "pooled"):
        table.add_column(column, justify="right")
    for n, *values in a.curve((0.125, 0.25, 0.5, 1.0)):
        table.add_row(str(n), *(f"{v:.3f}" for v in values))
    CONSOLE.print(table)


if __name__ == "__main__":
    main()
