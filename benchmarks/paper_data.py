"""What `papers` measures on: recorded answers of LLMs, with hidden states of smollm2 and held-out scores.

Hidden states are kept in the folders of `heads` and `begun`, so that what these have computed is not computed again.
"""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from begun import Answers, Probe, line_of, read_states
from begun import fit as fit_begun
from heads import FOLDS, LAYERS, SEED, Kept, key
from labels import SETS, clustered, read_adarague
from paper_tables import Part, difference

from rgate_integrations.gates.papers.popularity import fit_cutoff
from rgate_integrations.index.embedder import SentenceEmbedder
from rgate_integrations.models.local import DEFAULT_MODEL, LocalProxy
from rgate_integrations.prompts import ANSWER
from rgate_integrations.runtime.files import JsonlLog
from rgate_integrations.training.heads import HeadExamples, HeadsRecipe, fit_known

OUT = Path(__file__).parent / "out" / "papers"
PART = 50
"""Judgments that are made, and kept, at a time."""


@dataclass(frozen=True)
class Options:
    """How a pipeline runs.

    Attributes:
        data: The folder with the question sets.
        cache: Where hidden states are kept.
        out: Where judgments of gates are kept.
        index: The index to search in.
        limit: Questions a data set or source; None for all.
    """

    data: Path
    cache: Path
    out: Path = OUT
    index: Path | None = None
    limit: int | None = None


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the records of a JSONL file, also a gzipped one."""
    content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return [json.loads(line) for line in content.decode().split("\n") if line]


def mixed(rows: Sequence[dict[str, Any]], limit: int | None) -> list[dict[str, Any]]:
    """Return rows in an order that depends on their ids alone, or the first ones of it."""
    found = sorted(rows, key=lambda row: str(row["id"]))
    random.Random(SEED).shuffle(found)  # noqa: S311
    return found[:limit]


# --- evidence -------------------------------------------------------------------------------------------------


@cache
def kept_vectors(folder: Path) -> Kept:
    """Return the vectors that are kept in a folder, read once."""
    return Kept(folder)


def question_states(questions: list[str], home: Path) -> np.ndarray:
    """Return smollm2's states of questions, shape (n, layers, hidden size); what is not kept is computed."""
    kept = kept_vectors(home / "states")
    if any(key(question) not in kept.vectors for question in questions):
        proxy = LocalProxy(DEFAULT_MODEL, max_batch_size=64)

        def read(some: list[str]) -> np.ndarray:
            values = [{"question": " ".join(question.split())} for question in some]
            return np.stack([each.states for each in proxy.hidden(ANSWER, values, None, LAYERS)])

        kept.fill(questions, read, part=256)
    return np.stack([kept.vectors[key(question)] for question in questions])


def embeddings(questions: list[str], home: Path) -> np.ndarray:
    """Return MiniLM's embeddings of questions, shape (n, d), normalised."""
    kept = kept_vectors(home / "embeddings")
    if any(key(question) not in kept.vectors for question in questions):
        kept.fill(questions, SentenceEmbedder().embed)
    return np.stack([kept.vectors[key(question)] for question in questions]).astype(np.float32)


def judgments(path: Path, ids: Sequence[str], judge: Callable[[list[int]], list[float]]) -> np.ndarray:
    """Return a gate's number for each item, asked for where it is not kept yet.

    Args:
        path: Where they are kept; a run that was stopped goes on from there.
        ids: One an item.
        judge: Gets positions of items, returns their numbers.
    """
    log = JsonlLog(path)
    done = dict(log.values())
    missing = [place for place, name in enumerate(ids) if name not in done]
    for start in range(0, len(missing), PART):
        some = missing[start : start + PART]
        new = list(zip([ids[place] for place in some], judge(some), strict=True))
        log.append(new)
        done.update(new)
        print(f"{path.stem}: {start + len(some)} of {len(missing)}", flush=True)
    return np.array([done[name] for name in ids], float)


# --- probes -------------------------------------------------------------------------------------------------


def question_probe(states: np.ndarray, known: np.ndarray, groups: np.ndarray) -> Probe:
    """Fit a probe on questions alone: the default gate's knowledge head, by its recipe.

    Args:
        states: Shape (n, layers, hidden size).
        known: Labels, or shares of right answers, shape (n,).
        groups: Data set of each, which get intercepts of their own.
    """
    nothing = np.full(len(known), "")
    rows = HeadExamples(
        states, nothing, np.asarray(known, float), np.zeros(len(known)), groups, np.ones(len(known))
    )
    weight, _ = fit_known(rows, LAYERS, HeadsRecipe())
    probe = Probe(weight)
    return Probe(weight, 1.0, -float(probe(states[:, None]).mean()))


def held_out_question(
    states: np.ndarray, known: np.ndarray, groups: np.ndarray, fold: np.ndarray, size: int | None = None
) -> np.ndarray:
    """Return held-out logits of question probes, shape (n,), each fitted on all other folds, or some of them.

    Args:
        states: Shape (n, layers, hidden size).
        known: The labels.
        groups: Data set of each.
        fold: Fold of each.
        size: How many questions to train on; None for all of the other folds.
    """
    logits = np.zeros(len(known))
    for number in np.unique(fold):
        chosen = training_rows(fold != number, size)
        probe = question_probe(states[chosen], known[chosen], groups[chosen])
        logits[fold == number] = probe(states[fold == number][:, None])[:, 0]
    return logits


def held_out_begun(answers: Answers, fold: np.ndarray, place: int, size: int | None = None) -> np.ndarray:
    """Return held-out logits of probes on answers that are cut to one length; see `held_out_question`."""
    logits = np.zeros(len(answers.known))
    for number in np.unique(fold):
        probe = fit_begun(answers, training_rows(fold != number, size), [place])
        own = fold == number
        logits[own] = probe(answers.states[own][:, [place]])[:, 0]
    return logits


def training_rows(allowed: np.ndarray, size: int | None) -> np.ndarray:
    """Return the positions of the allowed rows, or of as many drawn at random."""
    places = np.flatnonzero(allowed)
    if size is None or size >= len(places):
        return places
    return np.random.default_rng(SEED).permutation(places)[:size]


def calibrated(logits: np.ndarray, known: np.ndarray, fold: np.ndarray) -> np.ndarray:
    """Return P(known) for held-out logits; each fold's line is fitted on the other folds."""
    p = np.zeros(len(logits))
    for number in np.unique(fold):
        own = fold == number
        slope, intercept = line_of(logits[~own][:, None], known[~own])
        p[own] = 1 / (1 + np.exp(-(slope * logits[own] + intercept)))
    return p


def best_decisions(p: np.ndarray, arms: Arms, fold: np.ndarray) -> np.ndarray:
    """Return whether to retrieve, by the threshold that gives most right answers on the other folds."""
    retrieve = np.zeros(len(p), bool)
    for number in np.unique(fold):
        own = fold == number
        cutoff = fit_cutoff(p[~own], arms.closed[~own].tolist(), arms.rag[~own].tolist())
        retrieve[own] = p[own] < cutoff
    return retrieve


def random_folds(n: int) -> np.ndarray:
    """Return a fold for each of n questions."""
    return np.random.default_rng(SEED).permutation(np.arange(n) % FOLDS)


def nearest_vote(vectors: np.ndarray, known: np.ndarray, fold: np.ndarray, k: int = 5) -> np.ndarray:
    """Return SKR-kNN's vote of the k nearest labelled questions of other folds, as P(known); ties retrieve."""
    p = np.zeros(len(known))
    for number in np.unique(fold):
        own, other = np.flatnonzero(fold == number), np.flatnonzero(fold != number)
        near = np.argsort(-(vectors[own] @ vectors[other].T), axis=1, kind="stable")[:, :k]
        p[own] = known[other][near].sum(axis=1) / (k + 1)
    return p


# --- the six sets -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Arms:
    """Whether the answers without and with retrieval are right, shape (n,)."""

    closed: np.ndarray
    rag: np.ndarray

    def right(self, retrieve: np.ndarray) -> np.ndarray:
        """Return whether the answer is right that the decisions chose."""
        return np.where(retrieve, self.rag, self.closed)

    def at_random(self, rate: float) -> np.ndarray:
        """Return the expected right answers of random decisions that retrieve at a rate."""
        return (1 - rate) * self.closed + rate * self.rag

    def row(self, name: str, retrieve: np.ndarray) -> list[str]:
        """Return the cells `ARMS` of a table."""
        right, rate = self.right(retrieve), float(retrieve.mean())
        against_random = "" if rate in (0, 1) else difference(right, self.at_random(rate)).points
        against_always = "" if rate == 1 else difference(right, self.rag).points
        return [name, f"{100 * right.mean():.1f}", f"{100 * rate:.0f}", against_random, against_always]


ARMS = ["", "right, %", "retrieved, %", "points against random at that rate [95 %]", "points against always"]


@dataclass(frozen=True, eq=False)
class SixSets:
    """Recorded answers of an 8B LLM to questions of six sets; n of them.

    Attributes:
        arms: Which answers are right.
        sets: Data set of each.
        fold: Fold of each; questions that ask nearly the same share one.
        states: smollm2's states of the questions, shape (n, layers, hidden size).
        begun: The answers, with smollm2's states of their beginnings.
        vectors: MiniLM's embeddings of the questions, shape (n, d).
    """

    arms: Arms
    sets: np.ndarray
    fold: np.ndarray
    states: np.ndarray
    begun: Answers
    vectors: np.ndarray

    def question(self, size: int | None = None) -> np.ndarray:
        """Return held-out logits from the question alone, trained on ``size`` questions."""
        return _question_logits(self, size)

    def answer(self, place: int, size: int | None = None) -> np.ndarray:
        """Return held-out logits from question and answer, cut to the length at a place of `begun.CUTS`."""
        return _answer_logits(self, place, size)

    def calibrated(self, logits: np.ndarray) -> np.ndarray:
        """Return P(known) of held-out logits."""
        return calibrated(logits, self.arms.closed, self.fold)

    def best(self, p: np.ndarray) -> np.ndarray:
        """Return whether to retrieve, by the threshold that is best on the other folds."""
        return best_decisions(p, self.arms, self.fold)


@cache  # several parts ask for the same
def _question_logits(six: SixSets, size: int | None) -> np.ndarray:
    return held_out_question(six.states, six.arms.closed, six.sets, six.fold, size)


@cache
def _answer_logits(six: SixSets, place: int, size: int | None) -> np.ndarray:
    return held_out_begun(six.begun, six.fold, place, size)


@cache
def read_six_sets(options: Options) -> SixSets:
    """Read the six sets, the first ``limit`` questions of each."""
    records: list[dict[str, Any]] = []
    for name in SETS:
        rows = read_rows(options.data / f"adaptive_llama31_8b.{name}.dev.jsonl")
        records += rows[: options.limit]
    questions = [record["question"].strip() for record in records]
    chosen = set(questions)
    labels = {each.question: each for each in read_adarague(options.data) if each.question in chosen}
    vectors = embeddings(questions, options.cache)
    clusters = np.array([each.cluster for each in clustered([labels[q] for q in questions], vectors)])
    fold = np.random.default_rng(SEED).integers(0, FOLDS, clusters.max() + 1)[clusters]
    arms = Arms(
        np.array([record["closed_book_correct"] for record in records]),
        np.array([record["rag_correct"] for record in records]),
    )
    pairs = [(q, record["closed_book_text"].strip()) for q, record in zip(questions, records, strict=True)]
    sets = np.array([record["dataset"] for record in records])
    begun = Answers(read_states(options.cache, pairs), arms.closed.astype(float), sets, questions)
    return SixSets(arms, sets, fold, question_states(questions, options.cache), begun, vectors)


def on_six_sets(part: Callable[[SixSets], Part]) -> Callable[[Options], Part]:
    """Return a part of a pipeline that reads the six sets."""
    return lambda options: part(read_six_sets(options))
