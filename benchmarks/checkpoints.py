"""Where a begun answer should be judged, and in which band it is clear: measured on recorded answers.

    python benchmarks/answer_first.py --checkpoints --data DIR

What the judge sees are the first 8, 16 and 32 tokens of what an 8B LLM is recorded to have answered. The shipped
judge was trained on these questions, so each is scored by probes of the same recipe that were fitted without its
fold: on 32 tokens, and then on all three lengths, much as the shipped one. The first look is such a probe of the
question alone. Hidden states are kept in benchmarks/out/begun: the first run takes half an hour.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from labels import SETS
from rich import box
from rich.console import Console
from rich.table import Table
from sklearn.metrics import roc_auc_score

from rgate_integrations.decision import Draft
from rgate_integrations.models.base import PooledLayer
from rgate_integrations.models.local import DEFAULT_MODEL, LocalProxy, shared_proxy
from rgate_integrations.prompts import ANSWER
from rgate_integrations.runtime.files import read_jsonl
from rgate_integrations.training.drafts import recorded_draft
from rgate_integrations.training.folds import question_folds
from rgate_integrations.training.linear import combine, fit_probe

OUT = Path(__file__).parent / "out" / "begun"
CONSOLE = Console(width=150, highlight=False)
CUTS, FOLDS, SEED, THRESHOLD = (8, 16, 32), 5, 0, 0.5
VIEWS = (("draft", "mean", 14, 22), ("draft", "last", 14, 22), ("question", "mean", 14, 18))
LAYERS = [
    [PooledLayer(layer, span, pooling) for layer in range(first, last + 1, 2)]
    for span, pooling, first, last in VIEWS
]
BANDS = ((0.0, 1.0), (0.05, 0.9), (0.1, 0.9), (0.1, 0.8), (0.15, 0.8), (0.2, 0.8), (0.2, 0.7), (0.3, 0.7))
ONE_LOOK = [(low, 0.8) for low in (0.05, 0.1, 0.15, 0.2, 0.3)]  # a single checkpoint needs no upper end
CHUNK = 256


@dataclass(frozen=True)
class Recorded:
    """Recorded answers, one a row.

    Attributes:
        questions: The questions.
        sets: Where each is from.
        closed: Whether the LLM alone was right.
        opened: Whether it was right with passages.
        drafts: What it had written at each of `CUTS`.
        lengths: How many tokens that is, shape (rows, cuts).
    """

    questions: list[str]
    sets: list[str]
    closed: np.ndarray
    opened: np.ndarray
    drafts: list[list[Draft]]
    lengths: np.ndarray

    @classmethod
    def read(cls, data: Path, proxy: LocalProxy) -> "Recorded":
        """Read the six sets."""
        records = []
        for name in SETS:
            records += [record for _, record in read_jsonl(data / f"adaptive_llama31_8b.{name}.dev.jsonl")]
        drafts, lengths = [], []
        for record in records:
            cuts = [recorded_draft(proxy, record["closed_book_text"], cut) for cut in CUTS]
            drafts.append(cuts)
            lengths.append(counted(proxy, record["closed_book_text"]))
        return cls(
            questions=[record["question"] for record in records],
            sets=[record["dataset"] for record in records],
            closed=np.array([record["closed_book_correct"] for record in records], bool),
            opened=np.array([record["rag_correct"] for record in records], bool),
            drafts=drafts,
            lengths=np.minimum(np.array(lengths)[:, None], CUTS),
        )

    def states(self, cut: int, proxy: LocalProxy) -> np.ndarray:
        """Return hidden states of question and begun answer, shape (rows, layers, hidden size)."""
        OUT.mkdir(parents=True, exist_ok=True)
        layers = [layer for view in LAYERS for layer in view]
        found = []
        for start in range(0, len(self.questions), CHUNK):
            path = OUT / f"{CUTS[cut]}-{start}.npy"
            if not path.exists():
                rows = range(start, min(start + CHUNK, len(self.questions)))
                values = [{"question": self.questions[row]} for row in rows]
                read = proxy.hidden(ANSWER, values, [self.drafts[row][cut] for row in rows], layers)
                made = path.with_suffix(".part.npy")
                np.save(made, np.stack([each.states for each in read]).astype(np.float16))
                made.rename(path)
                CONSOLE.print(f"{CUTS[cut]} tokens: {rows.stop} of {len(self.questions)} read")
            found.append(np.load(path))
        return np.concatenate(found)


def counted(proxy: LocalProxy, text: str) -> int:
    """Return how many tokens a text has, up to the last of `CUTS`."""
    for tokens in range(1, CUTS[-1]):
        if proxy.cut(text, tokens) is None:
            return tokens
    return CUTS[-1]


@dataclass(frozen=True)
class Scores:
    """P(known) of each row: of the question alone, shape (rows,), and at each of `CUTS`, shape (rows, cuts)."""

    look: np.ndarray
    judged: np.ndarray

    @classmethod
    def held_out(cls, recorded: Recorded, states: Sequence[np.ndarray], fitted_on: Sequence[int]) -> "Scores":
        """Score each row by probes that were fitted without its fold, and weighted without it.

        Args:
            recorded: The rows.
            states: Their hidden states at each of `CUTS`.
            fitted_on: The places of the cuts that the probes are fitted on, together.
        """
        known, names = recorded.closed, np.array(recorded.sets)
        ends = np.cumsum([len(view) for view in LAYERS])[:-1]
        views = [np.split(each, ends, axis=1) for each in states]
        logits = np.zeros((len(known), len(CUTS), len(VIEWS)))
        for train, test in question_folds(len(known), FOLDS, SEED):
            rows = np.tile(train, len(fitted_on))
            for view in range(len(VIEWS)):
                fitted = np.concatenate([views[cut][view][train] for cut in fitted_on]).astype(np.float32)
                probe = fit_probe(fitted, known[rows], SEED, names[rows].tolist())
                for cut in range(len(CUTS)):
                    logits[test, cut, view] = probe(views[cut][view][test].astype(np.float32))
        look, judged = np.zeros(len(known)), np.zeros((len(known), len(CUTS)))
        for train, test in question_folds(len(known), FOLDS, SEED):
            own = np.concatenate([logits[train, cut] for cut in fitted_on])
            weights, bias = combine(own, known[np.tile(train, len(fitted_on))])
            judged[test] = logits[test] @ weights + bias
            slope, intercept = combine(logits[train, -1, -1:], known[train])
            look[test] = logits[test, -1, -1:] @ slope + intercept
        return cls(1 / (1 + np.exp(-look)), 1 / (1 + np.exp(-judged)))


@dataclass(frozen=True)
class Outcome:
    """What became of each row: whether it was retrieved for, and how many tokens were held back until then."""

    retrieve: np.ndarray
    held: np.ndarray


def outcome(
    recorded: Recorded, scores: Scores, cuts: Sequence[int], band: tuple[float, float], look: bool
) -> Outcome:
    """Decide each row as `answer_first` does."""
    low, high = band
    retrieve = scores.look < low if look else np.zeros(len(scores.look), bool)
    undecided, held = ~retrieve, np.zeros(len(retrieve))
    for cut in cuts:
        at = CUTS.index(cut)
        known = scores.judged[:, at]
        clear = (known < low) | (known >= high) | (recorded.lengths[:, at] < cut)
        if cut == cuts[-1]:
            clear = np.ones_like(clear)
        now = undecided & clear
        retrieve = np.where(now, known < THRESHOLD, retrieve)
        held = np.where(now, recorded.lengths[:, at], held)
        undecided = undecided & ~clear
    return Outcome(retrieve, held)


def row(recorded: Recorded, found: Outcome) -> list[str]:
    right = np.where(found.retrieve, recorded.opened, recorded.closed).mean()
    rate = found.retrieve.mean()
    never, always = recorded.closed.mean(), recorded.opened.mean()
    by_chance = never + rate * (always - never)
    known = ~found.retrieve
    return [
        f"{right:.1%}",
        f"{rate:.1%}",
        f"{100 * (right - by_chance):+.2f}",
        f"{found.held[known].mean():.1f}" if known.any() else "",
        f"{(found.held * found.retrieve).mean():.1f}",
    ]


def show_checkpoints(data: Path) -> None:
    """Print the tables."""
    proxy = shared_proxy(DEFAULT_MODEL)
    recorded = Recorded.read(data, proxy)
    states = [recorded.states(cut, proxy) for cut in reversed(range(len(CUTS)))][::-1]
    never, always = recorded.closed.mean(), recorded.opened.mean()
    CONSOLE.print(f"\n{len(recorded.questions)} questions; never {never:.1%}, always {always:.1%} right")
    last = [len(CUTS) - 1]
    for title, fitted_on in (("32 tokens", last), ("8, 16 and 32 tokens", range(len(CUTS)))):
        CONSOLE.print(f"\nA judge fitted on {title}\n")
        show(recorded, Scores.held_out(recorded, states, fitted_on))


def show(recorded: Recorded, scores: Scores) -> None:
    table = made("judged at", "AUC, mean of the sets", "pooled", "right if judged known", "judged known")
    table.add_row("question alone", *quality(recorded, scores.look))
    for at, cut in enumerate(CUTS):
        table.add_row(f"{cut} tokens", *quality(recorded, scores.judged[:, at]))
    CONSOLE.print(table)
    table = made(
        "tokens", "first look", "band", "right", "retrieved", "over chance", "held (known)", "dropped (all)"
    )
    for cuts in ((8,), (16,), (32,)):
        table.add_row(
            str(cuts[0]), "", "", *row(recorded, outcome(recorded, scores, cuts, (0.0, 1.0), False))
        )
    for cuts, bands in (((32,), ONE_LOOK), ((8, 16, 32), BANDS)):
        for low, high in bands:
            found = outcome(recorded, scores, cuts, (low, high), True)
            table.add_row(", ".join(map(str, cuts)), "yes", f"{low:.2f}, {high:.2f}", *row(recorded, found))
    CONSOLE.print(table)


def quality(recorded: Recorded, known: np.ndarray) -> list[str]:
    names = np.array(recorded.sets)
    each = [roc_auc_score(recorded.closed[names == name], known[names == name]) for name in np.unique(names)]
    skipped = known >= THRESHOLD
    return [
        f"{np.mean(each):.3f}",
        f"{roc_auc_score(recorded.closed, known):.3f}",
        f"{recorded.closed[skipped].mean():.1%}",
        f"{skipped.mean():.1%}",
    ]


def made(*heads: str) -> Table:
    table = Table(box=box.MARKDOWN)
    for place, head in enumerate(heads):
        table.add_column(head, justify="right" if place else "left", no_wrap=True)
    return table
