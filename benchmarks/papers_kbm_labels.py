"""KBM's soft labels: made of sampled answers, and what probes learn from them; see `papers_kbm`."""

from __future__ import annotations

from functools import partial

import numpy as np
from paper_data import Options, held_out_question, mixed, question_states, random_folds, read_rows
from paper_tables import Claim, PaperTable, Part, auc_difference, auc_estimate, estimated

from rgate_integrations.errors import EvidenceError
from rgate_integrations.training.labels import sampled_accuracy, sampled_certainty

PAPER = "KBM"
TAU = 0.9
ASKED = 1_000
"""Questions that probes are taught."""


def soft_labels(row: dict) -> tuple[float, float, float]:
    """Return accuracy and certainty of sampled answers; certainty also by the number of samples."""
    accuracy = sampled_accuracy(row["samples"], row["gold_answers"])
    try:
        by_kind = sampled_certainty(row["samples"])
        by_count = sampled_certainty(row["samples"], "samples")
    except EvidenceError:  # all are empty: nothing is known
        return accuracy, 0.0, 0.0
    return accuracy, by_kind, by_count


def labels_part(options: Options) -> Part:
    """Make soft labels of ten samples a question (section 2.2)."""
    sources = {
        "NQ, a small LLM": mixed(read_rows(options.data / "more" / "nq_open_200.jsonl.gz"), options.limit)
    }
    for llm, rows in short_samples(options).items():
        sources[f"TriviaQA and SciQ, {llm}"] = rows
    return label_statistics({name: [soft_labels(row) for row in rows] for name, rows in sources.items()})


def short_samples(options: Options) -> dict[str, list[dict]]:
    """Return questions with ten short sampled answers, by LLM."""
    rows = [
        row
        for row in read_rows(options.data / "more" / "kalash_triviaqa_sciq.jsonl.gz")
        if row["samples"] and row["gold_answers"] and row["overlap"] is None
    ]
    llms = dict.fromkeys(row["llm"] for row in rows)
    return {llm: mixed([row for row in rows if row["llm"] == llm], options.limit) for llm in llms}


def label_statistics(
    labels: dict[str, list[tuple[float, float, float]]],
) -> Part:
    """Return how the two kinds of labels go together.

    Args:
        labels: Accuracy, certainty, and certainty by the number of samples, of each question of a source.
    """
    rows, first = [], None
    for name, values in labels.items():
        accuracy, certain, by_count = np.array(values, float).T
        together = estimated(partial(_correlation, accuracy, certain), np.zeros(len(values)))
        first = first or together
        known, sure = accuracy >= TAU, certain >= TAU
        rows.append(
            [
                name,
                f"{len(values):,}",
                f"{accuracy.mean():.3f}",
                f"{certain.mean():.3f}",
                f"{100 * known.mean():.1f}",
                f"{100 * sure.mean():.1f}",
                f"{100 * np.mean(by_count >= TAU):.1f}",
                f"{100 * np.mean(known == sure):.1f}",
                str(together),
            ]
        )
    columns = [
        "questions of, answers of",
        "questions",
        "mean accuracy",
        "mean certainty",
        f"accuracy ≥ {TAU}, %",
        f"certainty ≥ {TAU}, %",
        "the same, by samples, %",
        "labels agree, %",
        "Pearson [95 %]",
    ]
    caption = (
        "Labels from 10 sampled answers a question (the paper has 30). The questions of TriviaQA and "
        "SciQ were chosen by their authors: half of the right answers are uncertain ones, and half of "
        "the wrong ones certain, so that their correlation is not that of all questions."
    )
    assert first is not None  # noqa: S101
    claim = Claim(
        PAPER,
        "accuracy and certainty of samples go together",
        "Pearson 0.64",
        f"Pearson {first} on questions that were not chosen by it",
        first.verdict(),
    )
    return PaperTable("labels", caption, columns, rows), [claim]


def _correlation(first: np.ndarray, second: np.ndarray, rows: np.ndarray) -> float:
    with np.errstate(invalid="ignore"):
        return float(np.corrcoef(first[rows], second[rows])[0, 1])


def soft_part(options: Options) -> Part:
    """Train on either label, and judge against right answers."""
    llm, rows = next(iter(short_samples(options).items()))
    rows = rows[:ASKED]
    states = question_states([row["question"].strip() for row in rows], options.cache)
    right = np.array([row["closed_book_correct"] for row in rows])
    sets = np.array([row["dataset"] for row in rows])
    labels = np.array([soft_labels(row) for row in rows])
    return soft_labels_compared(llm, states, right, sets, labels)


def soft_labels_compared(
    llm: str, states: np.ndarray, right: np.ndarray, sets: np.ndarray, labels: np.ndarray
) -> Part:
    """Return what probes learn from each label.

    Args:
        llm: Name of the LLM.
        states: smollm2's states of the questions.
        right: Whether the LLM's own answer is right.
        sets: Data set of each.
        labels: Accuracy and certainty in the first two columns.
    """
    fold = random_folds(len(right))
    taught = {
        "its answer is right": right.astype(float),
        "accuracy of samples": labels[:, 0],
        f"accuracy ≥ {TAU}": (labels[:, 0] >= TAU).astype(float),
        "certainty of samples": labels[:, 1],
        f"certainty ≥ {TAU}": (labels[:, 1] >= TAU).astype(float),
    }
    rows, scores = [], {}
    for name, label in taught.items():
        scores[name] = held_out_question(states, label, sets, fold)
        rows.append([name, str(auc_estimate(scores[name], right, sets))])
    rows.append(["(no training: accuracy of samples itself)", str(auc_estimate(labels[:, 0], right, sets))])
    rows.append(["(no training: certainty of samples itself)", str(auc_estimate(labels[:, 1], right, sets))])
    better = auc_difference(scores["accuracy of samples"], scores["certainty of samples"], right, sets)
    caption = (
        f"Probes on the question alone, taught by different labels of {llm} ({len(right):,} questions of "
        "TriviaQA and SciQ, held out in five folds); AUC for its answer being right. Right and wrong, "
        "certain and uncertain answers are equally many by choice of the authors, which takes from "
        "certainty much of its worth."
    )
    claim = Claim(
        PAPER,
        "accuracy labels spare more retrieval than certainty labels, as they tell better what is known",
        "67.5 % against 86.6 % retrieval",
        f"AUC {better.change} for right answers, on questions chosen against certainty",
        better.verdict(),
    )
    return PaperTable("soft", caption, ["taught by", "AUC, mean of the sets [95 %]"], rows), [claim]
