"""Trains the gate for begun answers, and measures it on questions that it has not seen.

    python benchmarks/begun.py --data FOLDER [--runs FOLDER] [--compare] [--cache FOLDER] [--save FOLDER]

One probe reads the question and the first 8, 16, 32 or 64 tokens of the LLM's answer alike: each recorded answer is
cut to each of these lengths. ``--compare`` also tries probes that were trained on one length alone. All are
cross-validated by question cluster. ``--runs`` has recorded calls of small LLMs with token log-probabilities
(``LLM.jsonl`` and ``questions.PART.jsonl``, see `served.py`): a small head that weighs them is fitted on the part
``train``, whose questions are the probe's own (so the probe's held-out scores are used), and measured on the part
``test`` and, if the data folder has them, on the answers of six LLMs about songs, which have no licence and train
nothing.
"""

import argparse
import gzip
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from heads import CONSOLE, FOLDS, OUT, SEED, Kept, ece, key
from labels import LLAMA, SETS, clustered, read_adarague
from rich.table import Table
from sklearn.metrics import roc_auc_score

from rgate_integrations.files import read_jsonl
from rgate_integrations.index.embedder import SentenceEmbedder
from rgate_integrations.prompts import ANSWER
from rgate_integrations.proxy.base import PooledLayer
from rgate_integrations.proxy.hidden import layer_numbers, layer_states, pooled, spans_of
from rgate_integrations.proxy.local import DEFAULT_MODEL, LocalProxy
from rgate_integrations.proxy.model_runner import ModelRunner
from rgate_integrations.proxy.reading import PoolStates
from rgate_integrations.saved.probe import LogprobHead, ProbeArtifact, save_probe
from rgate_integrations.text import is_correct
from rgate_integrations.training.heads import HeadExamples, HeadsRecipe, fit_known, logistic

CUTS = (8, 16, 32, 64)
DEEP = (16, 18, 20, 22)
LAYERS = (
    *(PooledLayer(n, "draft", "mean") for n in DEEP),
    *(PooledLayer(n, "draft", "last") for n in DEEP),
    PooledLayer(18, "prompt", "last"),
)
SHARES = (*(1 / len(DEEP) for _ in DEEP), *(0.15 / len(DEEP) for _ in DEEP), 0.4)
"""How much each layer's logit counts: chosen on the folds, where values nearby are as good."""
BETWEEN = "\n\n"  # question and answer, in the name of what is kept
LEAST, SCALES = -20.0, (1.0, 8.0, 1.0, 0.3)
"""The lowest log-probability that counts; and about how far the probe's logit, sum, minimum and mean are spread."""


class BegunStates(PoolStates):
    """Reads each answer once, and pools it as it was after each of the cuts: a shorter one is its beginning."""

    def run_batch(self, indices):  # noqa: ANN001, ANN201, D102
        numbers = layer_numbers(LAYERS)
        batch = self.runner.batch([self.sequences[i] for i in indices], self.prefix, numbers)
        states = layer_states(self.runner.model.base_model, batch.inputs, numbers)
        found = []
        for row, i in enumerate(indices):
            own = batch.row_states(states, row, self.lengths[i])
            prompt = len(self.rows[i].ids)
            for cut in CUTS:
                spans = spans_of(self.rows[i].question, prompt, min(cut, len(self.texts[i])))
                found.append(pooled(own, spans, LAYERS))
        return np.stack(found).reshape(len(indices), len(CUTS), len(LAYERS), -1)


@dataclass(frozen=True)
class Answers:
    """Recorded answers; n of them.

    Attributes:
        states: Shape (n, cuts, layers, hidden size).
        known: Whether they are right, shape (n,).
        sets: Data set, or LLM, of each.
        questions: The questions.
    """

    states: np.ndarray
    known: np.ndarray
    sets: np.ndarray
    questions: list[str]


def read_states(cache: Path, pairs: list[tuple[str, str]]) -> np.ndarray:
    """Return the states of questions and answers, computed where they are not kept yet."""
    names = [" ".join(question.split()) + BETWEEN + text for question, text in pairs]
    kept = Kept(cache / "begun")
    if any(key(name) not in kept.vectors for name in names):
        proxy = LocalProxy(DEFAULT_MODEL, dtype="bfloat16", max_batch_size=32).load()
        kept.fill(names, lambda some: _read(proxy.runner, some), part=512)
    return np.stack([kept.vectors[key(name)] for name in names])


def _read(runner: ModelRunner, names: list[str]) -> list[np.ndarray]:
    rows, texts = [], []
    for name in names:
        question, _, text = name.partition(BETWEEN)
        text = runner.encoder.cut(text, CUTS[-1]) or text
        row = runner.encoder.encode(ANSWER, {"question": question})
        rows.append(row)
        texts.append(runner.encoder.continuation(row, runner.encoder.plain(text.strip())))
    return runner.run(BegunStates(runner, ANSWER, rows, texts, LAYERS))


@dataclass(frozen=True)
class Probe:
    """A probe: its weights, shape (layers, hidden size), and the line that calibrates it."""

    weight: np.ndarray
    slope: float = 1.0
    intercept: float = 0.0

    def __call__(self, states: np.ndarray) -> np.ndarray:
        """Return the logits, shape (n, cuts)."""
        raw = np.einsum("nclh,lh->nc", states.astype(np.float32), self.weight)
        return self.slope * raw + self.intercept

    def calibrated(self, slope: float, intercept: float) -> "Probe":
        """Return it with its logits mapped by a line."""
        return replace(self, slope=slope * self.slope, intercept=slope * self.intercept + intercept)


def fit(answers: Answers, chosen: np.ndarray, cuts: list[int]) -> Probe:
    """Fit a probe on some answers, cut to some of the lengths; not calibrated."""
    states = answers.states[chosen][:, cuts]
    n = len(states) * len(cuts)
    known, sets = np.repeat(answers.known[chosen], len(cuts)), np.repeat(answers.sets[chosen], len(cuts))
    nothing = np.full(n, "")
    rows = HeadExamples(
        states.reshape(n, *states.shape[2:]), nothing, known, nothing, sets, np.full(n, 1 / len(cuts))
    )
    layers = [PooledLayer(i, "draft", "mean") for i in range(len(LAYERS))]  # one view, so alike
    weight, _ = fit_known(rows, layers, HeadsRecipe())
    probe = Probe(weight * len(LAYERS) * np.array(SHARES, np.float32)[:, None])
    # The folds' probes have zeros of their own; the mean over what each was fitted on is one that they share.
    return replace(probe, intercept=-float(probe(states).mean()))


def cross_validated(answers: Answers, fold: np.ndarray, cuts: list[int]) -> tuple[np.ndarray, list[Probe]]:
    """Return held-out logits, shape (n, cuts), and each fold's probe."""
    logits = np.zeros((len(answers.known), len(CUTS)))
    probes = []
    for number in range(FOLDS):
        probes.append(fit(answers, fold != number, cuts))
        logits[fold == number] = probes[-1](answers.states[fold == number])
    return logits, probes


def line_of(logits: np.ndarray, known: np.ndarray) -> tuple[float, float]:
    """Fit the line that calibrates logits of all cuts, shape (n, cuts)."""
    n = logits.size
    label, weight = np.repeat(known, logits.shape[1]), np.full(n, 1 / logits.shape[1])
    slope, intercept = logistic(logits.reshape(n, 1), np.ones((n, 1)), label, weight, 1e-3, np.zeros(n))
    return float(slope[0]), float(intercept[0])


def aucs(logits: np.ndarray, answers: Answers) -> list[float]:
    """Return the AUC of each set."""
    found = []
    for name in SETS:
        own = answers.sets == name
        found.append(float(roc_auc_score(answers.known[own], logits[own])))
    return found


# --- log-probabilities ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Runs:
    """Answers of small LLMs with their log-probabilities.

    Attributes:
        answers: The answers; ``sets`` are the LLMs.
        logprobs: Log-probability of each token, a row an answer.
        part: ``train``, ``test`` or ``songs``.
    """

    answers: Answers
    logprobs: list[list[float]]
    part: np.ndarray

    def features(self, text: np.ndarray) -> np.ndarray:
        """Return the probe's logit, and sum, minimum and mean of the log-probabilities; shape (n, cuts, 4)."""
        found = np.zeros((*text.shape, 4))
        for row, values in enumerate(self.logprobs):
            for place, cut in enumerate(CUTS):
                read = np.maximum(values[:cut], LEAST)
                found[row, place] = text[row, place], read.sum(), read.min(), read.mean()
        return found


def read_runs(runs: Path | None, data: Path, cache: Path) -> Runs | None:
    """Read recorded calls with their log-probabilities, and the songs."""
    found = [*_songs(data), *(_calls(runs) if runs is not None else ())]
    if not found:
        return None
    pairs = [(question, text) for question, text, *_ in found]
    _, _, llms, parts, known, logprobs = zip(*found, strict=True)
    states = read_states(cache, pairs)
    answers = Answers(states, np.array(known), np.array(llms), [question for question, _ in pairs])
    return Runs(answers, list(logprobs), np.array(parts))


def _songs(data: Path) -> Iterator[tuple]:
    path = data / "songs_six_llms.dev.jsonl.gz"
    if not path.exists():
        return
    for line in gzip.decompress(path.read_bytes()).decode().splitlines():
        record = json.loads(line)
        for llm, answer in record["answers"].items():
            if answer["text"].strip() and answer["token_probs"]:
                logprobs = np.log(np.maximum(answer["token_probs"], 1e-9)).tolist()
                text = answer["text"].strip()
                yield record["question"].strip(), text, llm, "songs", float(answer["correct"]), logprobs


def _calls(runs: Path) -> Iterator[tuple]:
    questions = {}
    for part in ("train", "test"):
        path = runs / f"questions.{part}.jsonl"
        if path.exists():
            questions |= {record["id"]: record for _, record in read_jsonl(path)}
    for path in sorted(runs.glob("qwen*.jsonl")):
        for line in path.read_text(encoding="utf-8").split("\n")[:-1]:  # the last may still be written
            call = json.loads(line)
            asked = questions.get(call["meta"]["id"])
            if call["meta"]["arm"] == "direct" and asked and asked["gold_answers"] and call["tokens"]:
                right = float(is_correct(call["text"], asked["gold_answers"]))
                logprobs = [token["logprob"] for token in call["tokens"]]
                text = call["text"].strip()
                yield asked["question"].strip(), text, call["llm"], call["meta"]["part"], right, logprobs


def fit_logprobs(
    features: np.ndarray, known: np.ndarray, names: tuple[int, ...] = (0, 1, 2, 3)
) -> np.ndarray:
    """Return weights of the features, shape (4,), and a bias behind them; those that are not named weigh 0.

    A token that was less probable never speaks for knowledge: what would get a negative weight is left out.
    """
    n = features.shape[0] * features.shape[1]
    label, weight = np.repeat(known, features.shape[1]), np.full(n, 1 / features.shape[1])
    while True:
        scales = np.array([SCALES[i] for i in names])
        scaled = features.reshape(n, 4)[:, names] / scales
        weights, bias = logistic(scaled, np.ones((n, 1)), label, weight, 1.0, np.zeros(n))
        if (weights >= 0).all():
            break
        names = tuple(name for name, value in zip(names, weights, strict=True) if value > weights.min())
    found = np.zeros(5)
    found[list(names)] = weights / scales
    found[4] = bias[0]
    return found


def judge_runs(
    runs: Runs, probe: Probe, probes: list[Probe], fold_of: dict[str, int]
) -> tuple[LogprobHead | None, dict]:
    """Fit the head for log-probabilities on the part ``train``; returns it, and what it was made of.

    The probe was trained on these questions, with another LLM's labels: each is scored by its fold's probe.
    """
    text = probe(runs.answers.states)
    for row in np.flatnonzero(runs.part == "train"):
        text[row] = probes[fold_of[runs.answers.questions[row]]](runs.answers.states[[row]])[0]
    features = runs.features(text)
    train = runs.part == "train"
    table = Table(
        title="AUC over whole answers; what words alone and both would skip, and how much of that is right",
        title_justify="left",
        box=None,
    )
    names = ("words", "sum", "minimum", "mean", "log-probs", "both", "skipped", "right", "skipped", "right")
    for column in ("LLM", "questions", "right", *names):
        table.add_column(column, justify="left" if column == "LLM" else "right")
    enough = train.sum() >= 50
    both = fit_logprobs(features[train], runs.answers.known[train]) if enough else np.zeros(5)
    alone = fit_logprobs(features[train], runs.answers.known[train], (1, 2, 3)) if enough else np.zeros(5)
    for part in ("train", "test", "songs"):
        for llm in np.unique(runs.answers.sets[runs.part == part]):
            own = (runs.part == part) & (runs.answers.sets == llm)
            known, last = runs.answers.known[own], features[own][:, -1]
            scores = [last[:, i] for i in range(4)] + [last @ alone[:4], last @ both[:4]]
            if len(np.unique(known)) < 2:
                continue
            values = [f"{roc_auc_score(known, score):.3f}" for score in scores]
            for p_logit in (last[:, 0], last @ both[:4] + both[4]):
                skips = p_logit >= 0
                right = f"{known[skips].mean():.0%}" if skips.any() else ""
                values += [f"{skips.mean():.0%}", right]
            table.add_row(f"{llm} ({part})", str(int(own.sum())), f"{known.mean():.0%}", *values)
    CONSOLE.print(table)
    learned = [runs.answers.questions[row] for row in np.flatnonzero(train)]
    facts = {
        "n": int(train.sum()),
        "sha256": hashlib.sha256(json.dumps(sorted(learned)).encode()).hexdigest(),
        "known": float(runs.answers.known[train].mean()) if train.any() else None,
        "llms": sorted(set(runs.answers.sets[train].tolist())),
    }
    return (LogprobHead(*map(float, both)) if enough else None), facts


# --- all of it -----------------------------------------------------------------------------------------------


def read_answers(data: Path, cache: Path) -> tuple[Answers, np.ndarray, list[dict]]:
    """Return the six sets' answers, the fold of each question, and the records."""
    records = [
        record for name in SETS for _, record in read_jsonl(data / f"adaptive_llama31_8b.{name}.dev.jsonl")
    ]
    labels = list(read_adarague(data))
    embedded = Kept(cache / "embeddings").fill([each.question for each in labels], SentenceEmbedder().embed)
    vectors = np.stack([embedded[key(each.question)] for each in labels]).astype(np.float32)
    clusters = np.array([each.cluster for each in clustered(labels, vectors)])
    fold = np.random.default_rng(SEED).integers(0, FOLDS, clusters.max() + 1)[clusters]
    pairs = [(each["question"].strip(), each["closed_book_text"].strip()) for each in records]
    answers = Answers(
        read_states(cache, pairs),
        np.array([each.known for each in labels]),
        np.array([each.what for each in labels]),
        [question for question, _ in pairs],
    )
    return answers, fold, records


def main() -> None:
    """Run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--runs", type=Path, help="recorded calls with log-probabilities")
    parser.add_argument("--cache", type=Path, default=OUT, help="where hidden states are kept")
    parser.add_argument("--compare", action="store_true", help="also probes that were trained on one length")
    parser.add_argument("--save", type=Path)
    arguments = parser.parse_args()
    answers, fold, records = read_answers(arguments.data, arguments.cache)
    table = Table(
        title="AUC, mean of the six sets, held out by question cluster", title_justify="left", box=None
    )
    for column in ("trained on", *(f"{cut} tokens" for cut in CUTS)):
        table.add_column(column, justify="left" if column == "trained on" else "right")
    everywhere = list(range(len(CUTS)))
    logits, probes = cross_validated(answers, fold, everywhere)
    means = [np.mean(aucs(logits[:, place], answers)) for place in everywhere]
    table.add_row("all four lengths", *(f"{mean:.3f}" for mean in means))
    slope, intercept = line_of(logits, answers.known)
    p = 1 / (1 + np.exp(-(slope * logits + intercept)))
    each = {
        str(cut): dict(zip(SETS, aucs(logits[:, place], answers), strict=True))
        for place, cut in enumerate(CUTS)
    }
    CONSOLE.print(
        {cut: {name: round(value, 3) for name, value in found.items()} for cut, found in each.items()}
    )
    CONSOLE.print({f"ECE at {cut}": round(ece(p[:, i], answers.known), 3) for i, cut in enumerate(CUTS)})
    whole = fit(answers, np.ones(len(fold), bool), everywhere)
    probe = whole.calibrated(slope, intercept)
    fold_of = dict(zip(answers.questions, fold.tolist(), strict=True))
    probes = [each.calibrated(slope, intercept) for each in probes]
    runs = read_runs(arguments.runs, arguments.data, arguments.cache)
    head, facts = judge_runs(runs, probe, probes, fold_of) if runs is not None else (None, {})
    CONSOLE.print(head)
    if arguments.compare:
        for place in (2, 3):
            scores = cross_validated(answers, fold, [place])[0]
            means = [np.mean(aucs(scores[:, each], answers)) for each in everywhere]
            table.add_row(f"{CUTS[place]} tokens alone", *(f"{mean:.3f}" for mean in means))
    CONSOLE.print(table)
    if arguments.save is not None:
        metrics = {
            "auc": each["64"],
            "auc_mean": float(np.mean(list(each["64"].values()))),
            "auc_pooled": float(roc_auc_score(answers.known, logits[:, -1])),
            "auc_mean_by_tokens": {cut: float(np.mean(list(found.values()))) for cut, found in each.items()},
        }
        _save(arguments.save, answers, probe, head, metrics, facts, records)


def _save(
    folder: Path,
    answers: Answers,
    probe: Probe,
    head: LogprobHead | None,
    metrics: dict,
    runs: dict,
    records: list[dict],
) -> None:
    questions = sorted(answers.questions)
    data = [
        {
            "name": "adarague",
            "licence": "MIT",
            "sha256": hashlib.sha256(json.dumps(questions).encode()).hexdigest(),
            "n": len(records),
            "known": float(answers.known.mean()),
            "llms": [LLAMA],
        }
    ]
    if head is not None:
        data.append({"name": "own runs on those questions (log-probabilities)", "licence": "MIT", **runs})
    artifact = ProbeArtifact(
        weight=probe.weight.astype(np.float32),
        bias=0.0,
        layers=LAYERS,
        tokens=CUTS[-1],
        source="recorded",
        base_model=DEFAULT_MODEL,
        llm=LLAMA,
        slope=probe.slope,
        intercept=probe.intercept,
        logprobs=head,
        fingerprint=LocalProxy(DEFAULT_MODEL).load().fingerprint,
        provenance={
            "label": "closed_book_correct",
            "seed": SEED,
            "folds": FOLDS,
            "recipe": f"python benchmarks/begun.py: answers cut to {CUTS} tokens; {HeadsRecipe()}; shares {SHARES}",
            "data": data,
            "metrics": metrics,
            "licence": "Apache-2.0",
        },
    )
    CONSOLE.print(f"saved: {save_probe(artifact, folder)}")


if __name__ == "__main__":
    main()
