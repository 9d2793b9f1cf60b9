"""Does it tell more to compare a begun answer with the passages? And could some passages be dropped? Two tries.

    python benchmarks/begun_and_found.py --data DIR [--record benchmarks/out/served]

The record is that of ``benchmarks/served.py``, with both of its parts; DIR holds the corpora. The first table is
cross-validated, on features that any LLM with log-probabilities gives: those of the begun answer, P(the passages hold
the answer), and how much of the begun answer the passages have. No gate has a part in it. The second one drops
passages that have less of the question's words than a share of what the best one has.
"""

import argparse
import json
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from holds import read_corpora
from look_first import BEGUN, CONSOLE, LEAST, OUT, SEED
from rich.table import Table
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import StratifiedKFold, cross_val_predict
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from rgate_integrations.artifacts.helps import read_helps
from rgate_integrations.evidence.search import FoundPassage, search_features, weight_of, words_of
from rgate_integrations.gates.calibrated import logits
from rgate_integrations.index import Passage
from rgate_integrations.runtime.files import read_jsonl
from rgate_integrations.runtime.text import contains_answer, is_correct

FOLDS, REPEATS, STRENGTH = 5, 5, 0.3
SHARES = (0.3, 0.5, 0.7, 0.9)
_NAME = re.compile(r"\b[A-Z][\w'-]*|\d[\d,.]*")


@dataclass(frozen=True)
class Pairs:
    """Questions with a gold answer that have both arms.

    Attributes:
        direct: Whether the LLM was right without passages, shape (n,).
        read: Whether it was right with them, shape (n,).
        logprobs: Sum, least and mean log-probability of what was begun, and its length, shape (n, 4).
        holds: Logit of P(the passages hold the answer), shape (n, 1).
        begun: How much of what was begun the passages have, shape (n, 3).
        cover: Share of the question's words that each passage has, shape (n, passages).
        gold: Whether a passage has a gold answer, shape (n, passages).
        length: Words of each passage, shape (n, passages).
    """

    direct: np.ndarray
    read: np.ndarray
    logprobs: np.ndarray
    holds: np.ndarray
    begun: np.ndarray
    cover: np.ndarray
    gold: np.ndarray
    length: np.ndarray


def begun_features(question: str, begun: str, passages: list[FoundPassage]) -> list[float]:
    """Return how much of a begun answer's own words one passage has, and all; and the share of names they lack."""
    asked = words_of(question)
    weights = {word: weight_of(word) for word in words_of(begun) - asked}
    total = sum(weights.values()) or 1.0
    read = [words_of(f"{passage.title} {passage.text}") for passage in passages]
    shares = [sum(weights[word] for word in weights if word in words) / total for words in read]
    everything = frozenset[str]().union(*read)
    names = words_of(" ".join(_NAME.findall(begun))) & weights.keys()
    together = sum(weights[word] for word in weights if word in everything) / total
    return [max(shares, default=0.0), together, len(names - everything) / max(1, len(names))]


def read_pairs(record: Path, llm: Path, passages: dict[str, Passage]) -> Pairs | None:
    """Read what is recorded of an LLM; None if that is too little."""
    asked = {}
    for part in ("test", "train"):
        asked |= {q["id"]: q for _, q in read_jsonl(record / f"questions.{part}.jsonl") if q["gold_answers"]}
    arms: dict[str, dict[str, dict]] = {"direct": {}, "passages": {}}
    for line in llm.read_text().split("\n")[:-1]:  # the last one may still be written
        call = json.loads(line)
        if call["meta"]["arm"] in arms and call["meta"]["id"] in asked:
            arms[call["meta"]["arm"]][call["meta"]["id"]] = call
    names = [name for name in arms["direct"] if name in arms["passages"]]
    if len(names) < LEAST:
        return None
    rows = [_row(asked[name], arms["direct"][name], arms["passages"][name], passages) for name in names]
    return Pairs(*(np.array(column) for column in zip(*rows, strict=True)))


def _row(asked: dict, direct: dict, read: dict, passages: dict[str, Passage]) -> tuple:
    question, gold = asked["question"], asked["gold_answers"]
    shown = [passages[name] for name in read["meta"]["passages"]]
    found = [FoundPassage(passage.text, passage.title) for passage in shown]
    tokens = direct["tokens"][:BEGUN]
    values = np.array([min(token["logprob"], 0.0) for token in tokens] or [0.0])
    holds = read_helps().p_contains_answer(search_features(question, found)[None])
    return (
        is_correct(direct["text"], gold),
        is_correct(read["text"], gold),
        [values.sum(), values.min(), values.mean(), len(tokens)],
        logits(holds),
        begun_features(question, "".join(token["token"] for token in tokens), found),
        [search_features(question, [each])[0] for each in found],
        [any(contains_answer(passage.searchable, answer) for answer in gold) for passage in shown],
        [len(passage.text.split()) for passage in shown],
    )


def show_features(pairs: Pairs) -> None:
    """Print how well models of several features tell what is right, and whether passages help or hurt."""
    unlike = pairs.direct != pairs.read
    table = Table(
        title=f"AUC, cross-validated, of {len(pairs.direct)}; {unlike.sum()} of them differ",
        title_justify="left",
        box=None,
    )
    for column in ("features", "right alone", "right with passages", "helps, not hurts"):
        table.add_column(column, justify="left" if column == "features" else "right")
    base = np.c_[pairs.logprobs, pairs.holds]
    sets = {
        "log-probabilities": pairs.logprobs,
        "and P(hold)": base,
        "and the words of both": np.c_[base, pairs.begun[:, :2]],
        "and missing names": np.c_[base, pairs.begun],
    }
    for name, features in sets.items():
        alone, read = _held_out(features, pairs.direct), _held_out(features, pairs.read)
        gain = roc_auc_score(pairs.read[unlike], (read - alone)[unlike])
        scores = (roc_auc_score(pairs.direct, alone), roc_auc_score(pairs.read, read), gain)
        table.add_row(name, *(f"{score:.3f}" for score in scores))
    CONSOLE.print(table)


def _held_out(features: np.ndarray, right: np.ndarray) -> np.ndarray:
    found = np.zeros(len(right))
    for repeat in range(REPEATS):
        folds = StratifiedKFold(FOLDS, shuffle=True, random_state=SEED + repeat)
        model = make_pipeline(StandardScaler(), LogisticRegression(C=STRENGTH, max_iter=2_000))
        found += cross_val_predict(model, features, right, cv=folds, method="predict_proba")[:, 1]
    return found / REPEATS


def show_dropped(pairs: Pairs) -> None:
    """Print what is lost and spared where passages that have few of the question's words are dropped."""
    table = Table(title="passages dropped one by one", title_justify="left", box=None)
    for column in ("kept from", "passages kept", "words kept", "questions that lose their gold answer"):
        table.add_column(column, justify="right")
    had = pairs.gold.any(axis=1)
    for share in SHARES:
        kept = pairs.cover >= share * pairs.cover.max(axis=1, keepdims=True)
        lost = had & ~(pairs.gold & kept).any(axis=1)
        words = (pairs.length * kept).sum() / pairs.length.sum()
        table.add_row(
            f"{share:.0%} of the best", f"{kept.mean():.0%}", f"{words:.0%}", f"{lost.sum()} of {had.sum()}"
        )
    CONSOLE.print(table)
    flat = pairs.cover[had]
    CONSOLE.print(
        f"AUC of the share of words for 'has the gold answer': {_within(flat, pairs.gold[had]):.3f}"
    )


def _within(scores: np.ndarray, gold: np.ndarray) -> float:
    """Return the AUC within a question, the mean of all that have passages of both sorts."""
    mixed = [row for row in range(len(gold)) if 0 < gold[row].mean() < 1]
    return float(np.mean([roc_auc_score(gold[row], scores[row]) for row in mixed]))


def main() -> None:
    """Run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--record", type=Path, default=OUT / "served")
    arguments = parser.parse_args()
    passages = {p.id: p for corpus in read_corpora(arguments.data).values() for p in corpus}
    for llm in sorted(arguments.record.glob("*.jsonl")):
        if llm.name.startswith(("questions", "searches")):
            continue
        pairs = read_pairs(arguments.record, llm, passages)
        if pairs is None:
            CONSOLE.print(f"{llm.stem}: fewer than {LEAST} questions in both arms")
        else:
            CONSOLE.print(llm.stem)
            show_features(pairs)
            show_dropped(pairs)


if __name__ == "__main__":
    main()
