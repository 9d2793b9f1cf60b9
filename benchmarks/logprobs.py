"""Log-probabilities beside words: runs of LLMs that tell them, and the head that weighs them, for `begun`.

    python benchmarks/logprobs.py --data FOLDER --runs FOLDER --llm NAME [--part requests] [--limit N]

asks an LLM on a llama.cpp server questions that gates were trained on (``train``), or practical requests
(``requests``), each alone, and keeps its answers in ``FOLDER/NAME.jsonl``, as `served.py` does. `begun.py` reads
them.
"""

import argparse
import gzip
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from begun_states import CUTS, Answers, read_states
from head_fit import logistic
from heads import CONSOLE, GOALS, SEED, SKIPS, THRESHOLD, Alone, alone, ece
from mixture import Question
from rich.table import Table
from sklearn.metrics import roc_auc_score

from rgate_integrations.artifacts.probe import LogprobHead
from rgate_integrations.gates.answer import AnswerGate
from rgate_integrations.runtime.files import read_jsonl
from rgate_integrations.runtime.text import is_correct

HELD_BACK = CUTS.index(32)  # what `answer_first` holds back
PENALTY = 1.0
WEIGHT = float(AnswerGate.model_fields["weight"].default)
LEAST, SCALES = -20.0, (1.0, 8.0, 1.0, 0.3)
"""The lowest log-probability that counts; and about how far the probe's logit, sum, minimum and mean are spread."""


@dataclass(frozen=True)
class Runs:
    """Answers of LLMs with their log-probabilities, and what was said of them without.

    Attributes:
        answers: The answers; ``sets`` are the LLMs. Of requests, ``known`` is whether retrieval should be skipped.
        logprobs: Log-probability of each token, a row an answer.
        part: ``train``, ``test``, ``requests`` or ``songs``.
        kind: Data set, or kind of request.
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
    for line in gzip.decompress(path.read_bytes()).decode().splitlines():
        record = json.loads(line)
        for llm, answer in record["answers"].items():
            if answer["text"].strip() and answer["token_probs"]:
                logprobs = np.log(np.maximum(answer["token_probs"], 1e-9)).tolist()
                text = answer["text"].strip()
                right = float(answer["correct"])
                yield record["question"].strip(), text, llm, "songs", "songs", right, logprobs


def _calls(runs: Path) -> Iterator[tuple]:
    questions = {}
    for part in ("train", "test", "requests"):
        path = runs / f"questions.{part}.jsonl"
        if path.exists():
            questions |= {record["id"]: record for _, record in read_jsonl(path)}
    for path in sorted(runs.glob("qwen*.jsonl")):
        for line in path.read_text(encoding="utf-8").split("\n")[:-1]:  # the last may still be written
            call = json.loads(line)
            asked = questions.get(call["meta"]["id"])
            if call["meta"]["arm"] != "direct" or asked is None or not call["tokens"]:
                continue
            if asked["part"] == "requests":
                right = float(asked["kind"] in SKIPS)
            elif asked["gold_answers"]:
                right = float(is_correct(call["text"], asked["gold_answers"]))
            else:
                continue
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


def judged(head: LogprobHead | None, features: np.ndarray) -> np.ndarray:
    """Return the log-odds of the gate for begun answers, shape (n, cuts); without a head by the words alone."""
    if head is None:
        return features[..., 0]
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


@dataclass(frozen=True)
class Judged:
    """Runs with the log-odds of each way to judge them.

    Attributes:
        runs: The runs.
        features: What `Runs.features` returned.
        ways: Log-odds by the name of the way, shape (n, cuts) each.
    """

    runs: Runs
    features: np.ndarray
    ways: dict[str, np.ndarray]

    def show_knowledge(self) -> None:
        """Print, for each LLM against its own correctness, how well each evidence and each way ranks."""
        table = Table(title="AUC over whole answers", title_justify="left", box=None)
        table.add_column("LLM")
        for column in ("answers", "right", "question", "words", "sum", "lowest", "mean", *self.ways):
            table.add_column(column, justify="right")
        calibration = Table(title="skipped at 0.5 (right), and ECE", title_justify="left", box=None)
        for column in ("LLM", *self.ways):
            calibration.add_column(column, justify="right" if column != "LLM" else "left")
        for part in ("train", "test", "songs"):
            for llm in np.unique(self.runs.answers.sets[self.runs.part == part]):
                own = (self.runs.part == part) & (self.runs.answers.sets == llm)
                known = self.runs.answers.known[own]
                if len(np.unique(known)) < 2:
                    continue
                evidence = [self.runs.question.logits[own], *self.features[own][:, -1].T]
                whole = [way[own][:, -1] for way in self.ways.values()]
                aucs = [f"{roc_auc_score(known, score):.3f}" for score in (*evidence, *whole)]
                name = f"{llm} ({part})"
                table.add_row(name, str(len(known)), f"{known.mean():.0%}", *aucs)
                calibration.add_row(name, *(_skipped(logits, known) for logits in whole))
        CONSOLE.print(table)
        CONSOLE.print(calibration)

    def show_requests(self) -> None:
        """Print how many practical requests of each kind are retrieved for."""
        requests = self.runs.part == "requests"
        for llm in np.unique(self.runs.answers.sets[requests]):
            table = Table(title=f"practical requests, {llm}: retrieved for", title_justify="left", box=None)
            for column in ("kind", "requests", "goal", f"question alone, {THRESHOLD}", *self.ways):
                table.add_column(column, justify="right" if column != "kind" else "left")
            for kind, goal in GOALS.items():
                own = requests & (self.runs.answers.sets == llm) & (self.runs.kind == kind)
                if not own.any():
                    continue
                cut = float(np.log(THRESHOLD / (1 - THRESHOLD)))
                shares = [(self.runs.question.logits[own] < cut).mean()]
                shares += [(way[own][:, HELD_BACK] < 0).mean() for way in self.ways.values()]
                sign = "≤" if kind in SKIPS else "≥"
                cells = [f"{share:.1%}" for share in shares]
                table.add_row(kind, str(int(own.sum())), f"{sign} {goal:.0%}", *cells)
            CONSOLE.print(table)


def _skipped(logits: np.ndarray, known: np.ndarray) -> str:
    skips = logits >= 0
    right = f"{known[skips].mean():.0%}" if skips.any() else "none"
    return f"{skips.mean():.0%} ({right}), {ece(1 / (1 + np.exp(-logits)), known):.3f}"


# --- asking --------------------------------------------------------------------------------------------------


def practical_requests(data: Path) -> list[Question]:
    """Return practical requests, so that any beginning of them has as many of each kind as there are."""
    kinds: dict[str, list[Question]] = {kind: [] for kind in GOALS}
    for _, record in read_jsonl(data / "practical.dev.jsonl"):
        about = ("requests", record["source"])
        kinds[record["kind"]].append(Question(record["id"], record["kind"], record["question"], (), *about))
    rng = np.random.default_rng(SEED)
    placed = []
    for asked in kinds.values():
        placed += [(number, asked[row]) for number, row in enumerate(rng.permutation(len(asked)))]
    placed.sort(key=lambda pair: pair[0])
    return [question for _, question in placed]


def main() -> None:
    """Run."""
    from served import Record, RecordedChat, Searches, collect, questions, server

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--runs", type=Path, required=True)
    parser.add_argument("--llm", default="qwen2.5-coder-0.5b-instruct")
    parser.add_argument("--part", choices=("train", "requests"), default="requests")
    parser.add_argument("--limit", type=int)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    path = arguments.runs / "questions.requests.jsonl"
    if arguments.part == "requests" and not path.exists():
        arguments.runs.mkdir(parents=True, exist_ok=True)
        rows = [json.dumps(asdict(each), ensure_ascii=False) for each in practical_requests(arguments.data)]
        path.write_text("".join(row + "\n" for row in rows), encoding="utf-8")
    asked = questions(arguments.runs, arguments.data, arguments.part)[: arguments.limit]
    record = Record(arguments.runs / f"{arguments.llm}.jsonl", arguments.llm)
    searches = Searches(arguments.runs, arguments.runs / "no-index", None)  # none is made
    with server(arguments.llm, None, arguments.threads) as url:
        collect(RecordedChat(record=record, url=url), asked, searches, ["direct"])


if __name__ == "__main__":
    main()
