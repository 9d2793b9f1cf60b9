"""Log-probabilities beside words: runs of LLMs that tell them, and the head that weighs them, for `begun`.

The runs are those of `served`: LLM.jsonl, with questions.train.jsonl and questions.test.jsonl.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from base import print_table, read_records
from begun_states import CUTS, Answers, read_states
from head_fit import logistic
from heads import Alone, alone
from sklearn.metrics import roc_auc_score

from rgate_integrations.gates.answer import AnswerGate
from rgate_integrations.gates.artifacts import LogprobHead
from rgate_integrations.runtime.files import JsonlLog
from rgate_integrations.runtime.text import is_correct

PENALTY = 1.0
WEIGHT = float(AnswerGate.model_fields["weight"].default)
LEAST, SCALES = -20.0, (1.0, 8.0, 1.0, 0.3)
"""The lowest log-probability that counts; and about how far the probe's logit, sum, minimum and mean are spread."""


@dataclass(frozen=True)
class Runs:
    """Answers of LLMs with their log-probabilities, and what was said of them without.

    Attributes:
        answers: The answers; ``sets`` are the LLMs.
        logprobs: Log-probability of each token, a row an answer.
        part: ``train``, ``test`` or ``songs``.
        kind: Data set, or kind of question.
        question: What the question alone says, by heads that have not seen it.
    """

    answers: Answers
    logprobs: list[list[float]]
    part: np.ndarray
    kind: np.ndarray
    question: Alone

    def features(self, text: np.ndarray) -> np.ndarray:
        """Return the probe's logit, and sum, minimum and mean of the log-probabilities; shape (n, cuts, 4)."""
        found = np.zeros((*text.shape, 4))
        for row, values in enumerate(self.logprobs):
            for place, cut in enumerate(CUTS):
                read = np.maximum(values[:cut], LEAST)
                found[row, place] = text[row, place], read.sum(), read.min(), read.mean()
        return found


def read_runs(runs: Path, data: Path, cache: Path) -> Runs:
    """Read recorded calls with their log-probabilities, and the songs."""
    found = [*_songs(data), *_calls(runs)]
    pairs = [(question, text) for question, text, *_ in found]
    _, _, llms, parts, kinds, known, logprobs = zip(*found, strict=True)
    questions = [question for question, _ in pairs]
    answers = Answers(read_states(cache, pairs), np.array(known), np.array(llms), questions)
    return Runs(answers, list(logprobs), np.array(parts), np.array(kinds), alone(questions, cache))


def _songs(data: Path) -> Iterator[tuple]:
    """Read the answers of six LLMs about songs, which have no licence and train nothing."""
    path = data / "songs_six_llms.dev.jsonl.gz"
    if not path.exists():
        return
    for record in read_records(path):
        for llm, answer in record["answers"].items():
            if answer["text"].strip() and answer["token_probs"]:
                logprobs = np.log(np.maximum(answer["token_probs"], 1e-9)).tolist()
                text = answer["text"].strip()
                right = float(answer["correct"])
                yield record["question"].strip(), text, llm, "songs", "songs", right, logprobs


def _calls(runs: Path) -> Iterator[tuple]:
    questions = {}
    for part in ("train", "test"):
        path = runs / f"questions.{part}.jsonl"
        if path.exists():
            questions |= {record["id"]: record for record in read_records(path)}
    for path in sorted(runs.glob("qwen*.jsonl")):
        for call in JsonlLog(path).values():
            asked = questions.get(call["meta"]["id"])
            if (
                call["meta"]["arm"] != "direct"
                or asked is None
                or not call["tokens"]
                or not asked["gold_answers"]
            ):
                continue
            right = float(is_correct(call["text"], asked["gold_answers"]))
            logprobs = [token["logprob"] for token in call["tokens"]]
            about = (call["llm"], asked["part"], asked["kind"])
            yield asked["question"].strip(), call["text"].strip(), *about, right, logprobs


# --- the head ------------------------------------------------------------------------------------------------


def fit_head(features: np.ndarray, question: Alone, known: np.ndarray) -> LogprobHead:
    """Fit the head so that it is right together with the question, as `AnswerGate` weighs the two.

    A token that was less probable never speaks for knowledge: what would get a negative weight is left out.

    Args:
        features: What `Runs.features` returned, shape (n, cuts, 4).
        question: What the question alone says.
        known: The labels, shape (n,).
    """
    n, cuts, _ = features.shape
    label, counts = np.repeat(known, cuts), np.full(n * cuts, 1 / cuts)
    weight = np.repeat(WEIGHT * question.depends, cuts)
    given = (1 - weight) * np.repeat(question.logits, cuts)
    names = [0, 1, 2, 3]
    while True:
        scales = np.array(SCALES)[names]
        scaled = features.reshape(n * cuts, 4)[:, names] / scales * weight[:, None]
        weights, bias = logistic(scaled, weight[:, None], label, counts, PENALTY, given)
        if (weights >= 0).all():
            break
        del names[int(np.argmin(weights))]
    found = np.zeros(4)
    found[names] = weights / scales
    text, total, least, mean = map(float, found)
    return LogprobHead(text, total, least, mean, bias=float(bias[0]))


def judged(head: LogprobHead, features: np.ndarray) -> np.ndarray:
    """Return the log-odds of the gate for begun answers, shape (n, cuts)."""
    weights = np.array([head.text, head.total, head.least, head.mean])
    return features @ weights + head.bias


def together(question: Alone, begun: np.ndarray) -> np.ndarray:
    """Return the log-odds of `AnswerGate`, which is the default for begun answers, shape (n, cuts)."""
    weight = WEIGHT * question.depends[:, None]
    return (1 - weight) * question.logits[:, None] + weight * begun


def cross_validated_head(
    features: np.ndarray, question: Alone, known: np.ndarray, fold: np.ndarray
) -> np.ndarray:
    """Return the gate's held-out log-odds, shape (n, cuts): each fold by a head that was fitted without it."""
    found = np.zeros(features.shape[:2])
    for number in np.unique(fold):
        own = fold == number
        head = fit_head(features[~own], question.part(~own), known[~own])
        found[own] = together(question.part(own), judged(head, features[own]))
    return found


# --- what it brings ------------------------------------------------------------------------------------------


def show_knowledge(runs: Runs, features: np.ndarray, ways: dict[str, np.ndarray]) -> None:
    """Print, for each LLM against its own correctness, how well each evidence and each way ranks.

    Args:
        runs: The runs.
        features: What `Runs.features` returned.
        ways: Log-odds by the name of the way, shape (n, cuts) each.
    """
    rows = []
    for part in ("train", "test", "songs"):
        for llm in np.unique(runs.answers.sets[runs.part == part]):
            own = (runs.part == part) & (runs.answers.sets == llm)
            known = runs.answers.known[own]
            if len(np.unique(known)) < 2:
                continue
            scores = [runs.question.logits[own], *features[own][:, -1].T]
            scores += [way[own][:, -1] for way in ways.values()]
            aucs = [f"{roc_auc_score(known, score):.3f}" for score in scores]
            rows.append([f"{llm} ({part})", str(len(known)), f"{known.mean():.0%}", *aucs])
    columns = ["LLM", "answers", "right", "question", "words", "sum", "lowest", "mean", *ways]
    print_table(columns, rows, "AUC over whole answers")
