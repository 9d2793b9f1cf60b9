"""An LLM that judges itself: by the hidden states and log-probabilities of its own answer; see `papers`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from begun import CUTS, Answers, read_states
from heads import Kept, key
from labels import SETS
from paper_data import Options, held_out_begun, held_out_question, read_rows, read_six_sets
from paper_tables import Claim, PaperTable, Part, auc_difference, auc_estimate

from rgate_integrations.models.base import PooledLayer
from rgate_integrations.models.local import LocalProxy
from rgate_integrations.prompts import ANSWER
from rgate_integrations.runtime.files import JsonlLog
from rgate_integrations.runtime.text import is_correct
from rgate_integrations.training.heads import logistic

PAPER = "IK"
LLM = "qwen2.5-coder-0.5b-instruct"
ASKED = 200
"""Questions a set."""
TOKENS = 32
DEEP = (13, 14, 16, 18)
"""As far up this LLM, of 24 layers, as the layers that probes read of smollm2, of 30."""
ANSWER_LAYERS = (
    *(PooledLayer(n, "draft", "mean") for n in DEEP),
    *(PooledLayer(n, "draft", "last") for n in DEEP),
    PooledLayer(14, "prompt", "last"),
)
LAYERS = (*ANSWER_LAYERS, *(PooledLayer(n, "question", "mean") for n in DEEP[:3]))
LEAST = -20.0
"""The lowest log-probability that counts."""


@dataclass(frozen=True)
class Own:
    """Answers of the LLM to n questions, and what tells whether they are right.

    Attributes:
        known: Whether they are right, shape (n,).
        sets: Data set of each.
        fold: Fold of each.
        question: smollm2's states of the questions, shape (n, layers, hidden size).
        text: The answers with smollm2's states of them.
        states: The LLM's own states, as `LAYERS`, shape (n, layers, hidden size).
        logprobs: First, sum, least and mean of the log-probabilities of the tokens, shape (n, 4).
    """

    known: np.ndarray
    sets: np.ndarray
    fold: np.ndarray
    question: np.ndarray
    text: Answers
    states: np.ndarray
    logprobs: np.ndarray


def own_part(options: Options) -> Part:
    """Compare ways to judge the answers of a 0.5B LLM."""
    return compared(read_own(options))


def read_own(options: Options) -> Own:
    """Let the LLM answer, and read what tells whether it is right; what is kept is not done again."""
    options = replace(options, limit=min(ASKED, options.limit or ASKED))
    six = read_six_sets(options)
    records = []
    for name in SETS:
        records += read_rows(options.data / f"adaptive_llama31_8b.{name}.dev.jsonl")[: options.limit]
    questions = six.begun.questions
    drafts, states = written(questions, options.cache / "own", options.out / "self.answers.jsonl")
    texts = [draft["text"] for draft in drafts]
    known = np.array(
        [is_correct(text, row["gold_answers"]) for text, row in zip(texts, records, strict=True)]
    )
    # An answer may be empty. smollm2 then reads what stands for none.
    pairs = [(question, text.strip() or ".") for question, text in zip(questions, texts, strict=True)]
    text = Answers(read_states(options.cache, pairs), known.astype(float), six.sets, questions)
    logprobs = np.array([_features(draft["logprobs"]) for draft in drafts])
    return Own(known, six.sets, six.fold, six.states, text, states, logprobs)


def written(questions: list[str], states: Path, answers: Path) -> tuple[list[dict], np.ndarray]:
    """Return the LLM's answers, and the states of the passes that wrote them, shape (n, layers, hidden size).

    Args:
        questions: What is asked.
        states: Folder where states are kept.
        answers: File where answers are kept, which have their text and log-probabilities.
    """
    kept, log = Kept(states), JsonlLog(answers)
    if any(key(question) not in kept.vectors for question in questions):
        proxy = LocalProxy(LLM, dtype="bfloat16", max_batch_size=16)

        def write(some: list[str]) -> np.ndarray:
            values = [{"question": " ".join(question.split())} for question in some]
            found = proxy.generate_hidden(ANSWER, values, tokens=TOKENS, layers=LAYERS)
            # First the answers: states that are kept have their answers, also after a kill.
            log.append(
                {"key": key(question), "text": draft.text, "logprobs": draft.logprobs}
                for question, (draft, _) in zip(some, found, strict=True)
            )
            return np.stack([hidden.states for _, hidden in found])

        kept.fill(questions, write, part=48)
    by_key = {draft["key"]: draft for draft in log.values()}
    names = [key(question) for question in questions]
    return [by_key[name] for name in names], np.stack([kept.vectors[name] for name in names])


def _features(logprobs: list[float] | None) -> tuple[float, float, float, float]:
    values = np.maximum(logprobs or [LEAST], LEAST)
    return float(values[0]), float(values.sum()), float(values.min()), float(values.mean())


def compared(own: Own) -> Part:
    """Return the table of all ways, and what becomes of the claim."""
    scores = ways(own)
    rows = [
        [name, str(auc_estimate(score, own.known, own.sets)), _gain(scores["smollm2, its text"], score, own)]
        for name, score in scores.items()
    ]
    caption = (
        f"{LLM} answers {len(own.known):,} questions of the six sets, with at most {TOKENS} tokens, and is right on "
        f"{100 * own.known.mean():.1f} %. AUC for that, mean of the sets, held out by question cluster: every probe "
        "is fitted to these labels, on the other folds."
    )
    table = PaperTable(
        "itself", caption, ["judged by", "AUC [95 %]", "against smollm2 reading its text"], rows
    )
    gain = auc_difference(scores["own states"], scores["smollm2, its text"], own.known, own.sets)
    claim = Claim(
        PAPER,
        "the LLM itself judges its answer, by its own states",
        "(the classifier is the LLM with an adapter; no other model was tried)",
        f"own states of a 0.5B LLM against a 135M model that reads its text: AUC {gain.change}",
        gain.verdict(),
    )
    return table, [claim]


def _gain(baseline: np.ndarray, score: np.ndarray, own: Own) -> str:
    return "" if score is baseline else auc_difference(score, baseline, own.known, own.sets).change


def ways(own: Own) -> dict[str, np.ndarray]:
    """Return held-out logits of each way to judge, shape (n,) each."""
    known = own.known.astype(float)
    answer, question = len(ANSWER_LAYERS), range(len(ANSWER_LAYERS) - 1, len(LAYERS))
    # The order of `heads.LAYERS`: means over the question, then the last token before the answer.
    own_question = own.states[:, [*question[1:], question[0]]]
    own_answer = Answers(own.states[:, None, :answer], known, own.sets, own.text.questions)
    text = held_out_begun(own.text, own.fold, CUTS.index(TOKENS))
    states = held_out_begun(own_answer, own.fold, 0)
    return {
        "smollm2, the question alone": held_out_question(own.question, known, own.sets, own.fold),
        "own states, the question alone": held_out_question(own_question, known, own.sets, own.fold),
        "smollm2, its text": text,
        "own states": states,
        "own log-probabilities": fitted(own.logprobs, own),
        "smollm2, its text, and own log-probabilities": fitted(np.column_stack([text, own.logprobs]), own),
        "own states and log-probabilities": fitted(np.column_stack([states, own.logprobs]), own),
        "all of these": fitted(np.column_stack([text, states, own.logprobs]), own),
    }


def fitted(features: np.ndarray, own: Own) -> np.ndarray:
    """Return held-out logits of a logistic regression, with an intercept for each data set."""
    inside = (own.sets[:, None] == np.unique(own.sets)[None, :]).astype(float)
    logits = np.zeros(len(features))
    for number in np.unique(own.fold):
        rest = own.fold != number
        mean, scale = features[rest].mean(axis=0), features[rest].std(axis=0) + 1e-6
        standard = (features - mean) / scale
        n = int(rest.sum())
        weight, _ = logistic(
            standard[rest], inside[rest], own.known[rest].astype(float), np.ones(n), 1.0, np.zeros(n)
        )
        logits[~rest] = standard[~rest] @ weight
    return logits


PARTS: dict[str, Callable[[Options], Part]] = {"itself": own_part}

UNTESTABLE: list[Claim] = []
