"""ADAPT-LLM: an LLM that asks for context; see `papers`."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from begun import CUTS
from paper_data import (
    ARMS,
    Arms,
    Options,
    SixSets,
    held_out_question,
    on_six_sets,
    question_probe,
    question_states,
    random_folds,
    read_rows,
    read_six_sets,
)
from paper_tables import (
    UNTESTED,
    Claim,
    PaperTable,
    Part,
    auc_difference,
    difference,
    gap_of,
    mean_auc,
    share,
)

PAPER = "ADAPT-LLM"
BINS = 5
LEAST, EMPTY = 1e-9, -1e4
"""The least probability of a token, and what an empty answer gets."""

# --- what it brings ------------------------------------------------------------------------------------------


def ways_part(six: SixSets) -> Part:
    """Answer never, always and adaptively with retrieval (table 1)."""
    arms, n = six.arms, len(six.sets)
    p = six.calibrated(six.question())
    read = six.calibrated(six.answer(CUTS.index(32)))
    best = six.best(p)
    rows = [
        arms.row("never retrieve", np.zeros(n, bool)),
        arms.row("always retrieve", np.ones(n, bool)),
        arms.row("adaptive, question alone, below 0.5", p < 0.5),
        arms.row("adaptive, question alone, best threshold", best),
        arms.row("adaptive, 32 tokens, below 0.5", read < 0.5),
        arms.row("adaptive, 32 tokens, best threshold", six.best(read)),
        arms.row("oracle", arms.rag & ~arms.closed),
    ]
    caption = (
        f"Recorded answers of an 8B LLM to {n:,} questions of six sets. A probe on smollm2's states asks "
        "for context in the LLM's place; held out by question cluster. The best threshold is chosen on "
        "the other folds."
    )
    against_never = difference(arms.right(p < 0.5), arms.closed)
    against_always = difference(arms.right(p < 0.5), arms.rag)
    at_best = difference(arms.right(best), arms.rag)
    return PaperTable("ways", caption, ARMS, rows), [
        Claim(
            PAPER,
            "adaptive retrieval is more right than none",
            "40.3 against 28.0 % (Llama-3.1-8B, PopQA)",
            f"{against_never.points} points",
            against_never.verdict(),
        ),
        Claim(
            PAPER,
            "adaptive retrieval is more right than always retrieving",
            "40.3 against 38.6 %",
            f"{against_always.points} points below 0.5; {at_best.points} at the best threshold",
            at_best.verdict(),
        ),
    ]


def split_part(six: SixSets) -> Part:
    """Tell questions with `<RET>` from those without (table 2)."""
    ways = {
        "question alone": six.calibrated(six.question()) < 0.5,
        "32 tokens": six.calibrated(six.answer(CUTS.index(32))) < 0.5,
    }
    return split(ways, six.arms)


def split(ways: dict[str, np.ndarray], arms: Arms) -> Part:
    """Return how right both arms are where a gate asks for context, and where it does not.

    Args:
        ways: Whether each gate asks; the first one is the one of the claims.
        arms: Which answers are right.
    """
    rows = [
        ["the paper: Llama-3.1-8B, trained on NQ", "86.9", "33.9", "20.3", "65.0", "77.6"],
        ["the paper: trained on SQuAD", "83.7", "34.3", "14.3", "67.2", "78.0"],
    ]
    for name, asks in ways.items():
        cells = []
        for part in (asks, ~asks):
            cells += [
                f"{100 * right[part].mean():.1f}" if part.any() else "" for right in (arms.rag, arms.closed)
            ]
        rows.append([f"here: {name}", f"{100 * asks.mean():.1f}", *cells])
    columns = [
        "gate",
        "`<RET>`, %",
        "`<RET>`: right with context, %",
        "without, %",
        "no `<RET>`: right with context, %",
        "without, %",
    ]
    asks = next(iter(ways.values()))
    helped = difference(arms.rag[asks], arms.closed[asks].astype(float))
    spoiled = difference(arms.closed[~asks], arms.rag[~asks].astype(float))
    sure = share(arms.closed[~asks])
    caption = "Where the gate asks for context (`<RET>`), and where it does not; the same questions."
    return PaperTable("split", caption, columns, rows), [
        Claim(
            PAPER,
            "where it asks for context, context helps",
            "33.9 against 20.3 %",
            f"{helped.points} points",
            helped.verdict(),
        ),
        Claim(
            PAPER,
            "where it does not ask, context would do harm",
            "65.0 with context against 77.6 %",
            f"{spoiled.points} points more without context",
            spoiled.verdict(),
        ),
        Claim(
            PAPER,
            "where it does not ask, more than 77 % of the answers are right",
            "77.6 and 78.0 %",
            sure.per_cent,
            sure.verdict(0.77),
        ),
    ]


def sets_part(six: SixSets) -> Part:
    """Return each set's rate of `<RET>`, and the two-prompt training set of its recorded answers (section 3.1)."""
    asks = six.calibrated(six.question()) < 0.5
    rows = []
    for name in dict.fromkeys(six.sets.tolist()):
        inside = six.sets == name
        closed, rag, own = six.arms.closed[inside], six.arms.rag[inside], asks[inside]
        right, wrong = int(closed.sum()), int((~closed).sum())
        rows.append(
            [
                name,
                f"{100 * closed.mean():.1f}",
                f"{100 * rag.mean():.1f}",
                f"{100 * own.mean():.1f}",
                f"{100 * np.where(own, rag, closed).mean():.1f}",
                str(right),
                str(wrong),
            ]
        )
    columns = [
        "set",
        "never, %",
        "always, %",
        "`<RET>`, %",
        "adaptive, %",
        "answers to learn",
        "`<RET>` to learn",
    ]
    caption = (
        "By set: the rate of `<RET>` of the gate on the question alone, and what the paper's two prompts would teach "
        "with these recorded answers: the answer where the LLM was right, else `<RET>`, and as often the answer from "
        "context."
    )
    return PaperTable("sets", caption, columns, rows), []


# --- popularity ----------------------------------------------------------------------------------------------


def read_songs(options: Options) -> list[dict]:
    """Return the questions about songs that six LLMs answered."""
    return read_rows(options.data / "songs_six_llms.dev.jsonl.gz")[: options.limit]


def own_words(row: dict, llm: str) -> float:
    """Return the sum of an answer's token log-probabilities; that of an empty answer is the lowest there is."""
    probabilities = row["answers"][llm]["token_probs"]
    if not probabilities:
        return EMPTY
    return float(np.log(np.maximum(probabilities, LEAST)).sum())


def popularity_part(options: Options) -> Part:
    """Compare popularity with what a gate sees, for six LLMs (section 4.7)."""
    rows = read_songs(options)
    llms = list(rows[0]["answers"])
    states = question_states([row["question"].strip() for row in rows], options.cache)
    popularity = np.array([row["popularity"] for row in rows], float)
    right = {llm: np.array([row["answers"][llm]["correct"] for row in rows]) for llm in llms}
    words = {llm: np.array([own_words(row, llm) for row in rows]) for llm in llms}
    return by_popularity(states, popularity, right, words)


def by_popularity(
    states: np.ndarray, popularity: np.ndarray, right: dict[str, np.ndarray], words: dict[str, np.ndarray]
) -> Part:
    """Return how well popularity, question and own words tell what an LLM knows.

    Args:
        states: smollm2's states of the questions.
        popularity: Popularity of what each question is about.
        right: Whether each LLM's answer is right.
        words: Sum of the log-probabilities of each LLM's answer.
    """
    fold = random_folds(len(popularity))
    one = np.zeros(len(popularity))
    rows, gains = [], []
    for llm, known in right.items():
        question = held_out_question(states, known.astype(float), one, fold)
        cells = []
        scores = (popularity, question, words[llm])
        for score in scores:
            cells.append(f"{mean_auc(score, known, one):.3f}")
        for score in scores:
            cells.append(f"{100 * known[np.argsort(-score, kind='stable')[: len(known) // 2]].mean():.1f}")
        rows.append([llm, f"{100 * known.mean():.1f}", *cells])
        gains.append(auc_difference(words[llm], popularity, known, one))
    caption = (
        f"{len(popularity):,} questions about songs. AUC for the LLM being right: the song's popularity, "
        "a probe on the question (smollm2, held out in five folds), and the sum of the LLM's own token "
        "log-probabilities; and how many per cent are right of the half for which each would not "
        "retrieve."
    )
    columns = [
        "LLM",
        "right, %",
        "AUC: popularity",
        "question",
        "own words",
        "right of the unretrieved half, %: popularity",
        "question",
        "own words",
    ]
    weakest = min(gains, key=lambda gain: gain.low)
    claim = Claim(
        PAPER,
        "an LLM's own judgment is as good as popularity, without knowing it",
        "37.9 against 37.2 % right, at 80 and 99.9 % retrieval",
        f"own words against popularity, weakest of {len(gains)} LLMs: AUC {weakest.change}",
        weakest.verdict(),
    )
    return PaperTable("popularity", caption, columns, rows), [claim]


def bins_part(options: Options) -> Part:
    """Count `<RET>` by popularity (figure 2)."""
    rows = read_songs(options)
    popularity = np.array([row["popularity"] for row in rows], float)
    llms = list(rows[0]["answers"])
    right = np.mean([[row["answers"][llm]["correct"] for row in rows] for llm in llms], axis=0)
    words = np.array([[own_words(row, llm) for row in rows] for llm in llms])
    known = np.array([[row["answers"][llm]["correct"] for row in rows] for llm in llms])
    asks = np.mean(
        [own <= np.quantile(own, 1 - truth.mean()) for own, truth in zip(words, known, strict=True)], axis=0
    )
    six = read_six_sets(options)
    probe = question_probe(six.states, six.arms.closed, six.sets)
    states = question_states([row["question"].strip() for row in rows], options.cache)
    foreign = probe(states[:, None])[:, 0]
    return bins(
        popularity,
        right,
        {"own words": asks, "gate of another LLM": foreign <= np.quantile(foreign, asks.mean())},
    )


def bins(popularity: np.ndarray, right: np.ndarray, asks: dict[str, np.ndarray]) -> Part:
    """Return by popularity how right LLMs are, and how often gates ask for context.

    Args:
        popularity: Popularity of what each question is about.
        right: Share of the LLMs that are right.
        asks: Whether, or how often, each gate asks; the first one is the one of the claims.
    """
    order = np.argsort(popularity, kind="stable")
    rows = []
    for part in np.array_split(order, BINS):
        low, high = popularity[part].min(), popularity[part].max()
        cells = [f"{100 * each[part].mean():.1f}" for each in asks.values()]
        rows.append([f"{low:.0f} to {high:.0f}", str(len(part)), f"{100 * right[part].mean():.1f}", *cells])
    popular = np.zeros(len(order), bool)
    popular[order[len(order) // 2 :]] = True
    own = next(iter(asks.values())).astype(float)
    fewer, knows = gap_of(own, ~popular), gap_of(right, popular)
    caption = (
        "By popularity, in five equal parts: how many per cent of six LLMs' answers are right, and how "
        "often gates ask for context. By its own words each LLM asks as often as it is wrong."
    )
    columns = ["popularity", "questions", "right, %", *(f"`<RET>`, %: {name}" for name in asks)]
    return PaperTable("bins", caption, columns, rows), [
        Claim(
            PAPER,
            "LLMs know popular things better",
            "figure only",
            f"{knows.points} points more right in the popular half",
            knows.verdict(),
        ),
        Claim(
            PAPER,
            "an LLM asks more often for context about unpopular things, without seeing popularity",
            "figure only",
            f"{fewer.points} points more in the unpopular half",
            fewer.verdict(),
        ),
    ]


PARTS: dict[str, Callable[[Options], Part]] = {
    "ways": on_six_sets(ways_part),
    "split": on_six_sets(split_part),
    "sets": on_six_sets(sets_part),
    "popularity": popularity_part,
    "bins": bins_part,
}

UNTESTABLE = [
    Claim(
        PAPER,
        "with gold passages the same LLM answers far better than with retrieved ones",
        "NQ: 70.9 against 28.5 %",
        "the passages of the recorded runs are not known",
        UNTESTED,
    ),
    Claim(
        PAPER,
        "adaptive retrieval answers as well as a popularity threshold",
        "37.9 against 37.2 %",
        "no recorded answers with retrieval to questions whose popularity is known",
        UNTESTED,
    ),
]
