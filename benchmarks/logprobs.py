"""Runs of LLMs with token log-probabilities, and the head that weighs these with the words, for `begun`.

`served` records the runs: LLM.jsonl, with questions.train.jsonl and questions.test.jsonl.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from base import print_table, read_records
from begun_states import CUTS, read_states
from head_fit import fit_logistic
from heads import QuestionScores, judge_alone

from rgate_integrations.gates.artifacts import LogprobHead
from rgate_integrations.gates.composite import AnswerGate
from rgate_integrations.runtime.jsonl import JsonlLog
from rgate_integrations.runtime.text import is_correct
from rgate_integrations.tuning.evaluation import auc

PENALTY = 1.0
WEIGHT = float(AnswerGate.model_fields["weight"].default)
MIN_LOGPROB, SCALES = -20.0, (1.0, 8.0, 1.0, 0.3)
"""The lowest log-probability that counts; typical spreads of the probe's logit, and of sum, minimum and mean."""


@dataclass(frozen=True)
class Runs:
    """n answers of LLMs with log-probabilities, and the evidence of the other models.

    Attributes:
        calls: One row an answer: its ``question``, ``text`` and ``llm``, the ``part`` (train, test or songs), the
            ``kind`` of the question or its data set, whether the answer is right (``known``), and the ``logprobs`` of
            its tokens.
        states: Hidden states, shape (n, cuts, layers, hidden size).
        question: P(known) from the question alone, by heads that have not seen it.
    """

    calls: pd.DataFrame
    states: np.ndarray
    question: QuestionScores


def build_features(logprobs: Iterable[list[float]], text: np.ndarray) -> np.ndarray:
    """Return the probe's logit, and sum, minimum and mean of the log-probabilities, shape (n, cuts, 4).

    Args:
        logprobs: Log-probabilities of each answer's tokens.
        text: The probe's logit, shape (n, cuts).
    """
    table = np.zeros((*text.shape, 4))
    for row, values in enumerate(logprobs):
        for column, cut in enumerate(CUTS):
            counted = np.maximum(values[:cut], MIN_LOGPROB)
            table[row, column] = text[row, column], counted.sum(), counted.min(), counted.mean()
    return table


def read_runs(runs: Path, data: Path, cache: Path) -> Runs:
    """Read recorded calls with their log-probabilities, and the songs."""
    calls = pd.DataFrame([*_read_songs(data), *_read_calls(runs)])
    states = read_states(cache, list(zip(calls.question, calls.text, strict=True)))
    return Runs(calls, states, judge_alone(calls.question.tolist(), cache))


def _read_songs(data: Path) -> Iterator[dict]:
    """Yield the answers of six LLMs about songs; they have no licence and only measure."""
    path = data / "songs_six_llms.dev.jsonl.gz"
    for record in read_records(path) if path.exists() else ():
        for llm, answer in record["answers"].items():
            if answer["text"].strip() and answer["token_probs"]:
                yield {
                    "question": record["question"].strip(),
                    "text": answer["text"].strip(),
                    "llm": llm,
                    "part": "songs",
                    "kind": "songs",
                    "known": float(answer["correct"]),
                    "logprobs": np.log(np.maximum(answer["token_probs"], 1e-9)).tolist(),
                }


def _read_calls(runs: Path) -> Iterator[dict]:
    questions = {}
    for path in (runs / "questions.train.jsonl", runs / "questions.test.jsonl"):
        if path.exists():
            questions |= {record["id"]: record for record in read_records(path)}
    for path in sorted(runs.glob("qwen*.jsonl")):
        for call in JsonlLog(path).values():
            question = questions.get(call["meta"]["id"])
            if question is None or call["meta"]["arm"] != "direct":
                continue
            tokens = [token for _, tokens in call["chunks"] for token in tokens]
            if tokens and question["gold_answers"]:
                yield {
                    "question": question["question"].strip(),
                    "text": call["text"].strip(),
                    "llm": call["llm"],
                    "part": question["part"],
                    "kind": question["kind"],
                    "known": float(is_correct(call["text"], question["gold_answers"])),
                    "logprobs": [token["logprob"] for token in tokens],
                }


# --- the head ------------------------------------------------------------------------------------------------


def fit_head(features: np.ndarray, question: QuestionScores, known: np.ndarray) -> LogprobHead:
    """Fit the head jointly with the question's log-odds, as `AnswerGate` weighs the two.

    A less probable token is never evidence of knowledge: a feature that would get a negative weight is dropped.

    Args:
        features: Shape (n, cuts, 4); see `build_features`.
        question: P(known) from the question alone.
        known: The labels, shape (n,).
    """
    n, cuts, _ = features.shape
    label, counts = np.repeat(known, cuts), np.full(n * cuts, 1 / cuts)
    weight = np.repeat(WEIGHT * question.depends, cuts)
    offset = (1 - weight) * np.repeat(question.logits, cuts)
    names = [0, 1, 2, 3]
    while True:
        scales = np.array(SCALES)[names]
        scaled = features.reshape(n * cuts, 4)[:, names] / scales * weight[:, None]
        weights, bias = fit_logistic(scaled, weight[:, None], label, counts, PENALTY, offset)
        if (weights >= 0).all():
            break
        del names[int(np.argmin(weights))]
    coefficients = np.zeros(4)
    coefficients[names] = weights / scales
    text, total, least, mean = map(float, coefficients)
    return LogprobHead(text, total, least, mean, bias=float(bias[0]))


def score_features(head: LogprobHead, features: np.ndarray) -> np.ndarray:
    """Return the log-odds of the gate for partial answers, shape (n, cuts)."""
    weights = np.array([head.text, head.total, head.least, head.mean])
    return features @ weights + head.bias


def combine_log_odds(question: QuestionScores, answer: np.ndarray) -> np.ndarray:
    """Return the log-odds of `AnswerGate`, the default for partial answers, shape (n, cuts)."""
    weight = WEIGHT * question.depends[:, None]
    return (1 - weight) * question.logits[:, None] + weight * answer


def cross_validate_head(
    features: np.ndarray, question: QuestionScores, known: np.ndarray, fold: np.ndarray
) -> np.ndarray:
    """Return the gate's held-out log-odds, shape (n, cuts): a head fitted without the fold scores each fold."""
    log_odds = np.zeros(features.shape[:2])
    for number in np.unique(fold):
        held_out = fold == number
        head = fit_head(features[~held_out], question.part(~held_out), known[~held_out])
        log_odds[held_out] = combine_log_odds(
            question.part(held_out), score_features(head, features[held_out])
        )
    return log_odds


# --- figures -------------------------------------------------------------------------------------------------


def show_knowledge(runs: Runs, feature_values: np.ndarray, default: np.ndarray) -> None:
    """Print for each LLM how well each kind of evidence and the default gate rank its answers.

    Args:
        runs: The runs.
        feature_values: Shape (n, cuts, 4); see `build_features`.
        default: The gate's log-odds, shape (n, cuts).
    """
    calls = runs.calls.assign(
        question=runs.question.logits,
        words=feature_values[:, -1, 0],
        total=feature_values[:, -1, 1],
        default=default[:, -1],
    )
    rows = []
    for (part, llm), group in calls.groupby(["part", "llm"]):
        row = [f"{llm} ({part})", str(len(group)), f"{group.known.mean():.0%}"]
        for evidence in ("question", "words", "total", "default"):
            row.append(f"{auc(group[evidence], group.known):.3f}")
        rows.append(row)
    columns = ["LLM", "answers", "right", "question", "words", "sum", "default"]
    print_table(columns, rows, "AUC over whole answers")
