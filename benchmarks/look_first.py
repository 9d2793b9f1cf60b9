"""What looking first brings, from the recorded calls of an LLM in both arms: what is right, and what is read.

    python benchmarks/look_first.py --data DIR [--record benchmarks/out/served]
    python benchmarks/look_first.py --speed INDEX      how long a look takes on an index

The record is that of ``benchmarks/served.py``: questions.test.jsonl, and for each LLM its answers without and with
the passages that a hybrid search of 22,610 found. No gate and no model was trained on these questions. DIR holds the
corpora; see `holds`.
"""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from holds import read_corpora
from rich.console import Console
from rich.table import Table

from rgate_integrations import Draft, load_gate
from rgate_integrations.answering.answer_first import AnswerFirst
from rgate_integrations.answering.look_first import LookFirst, is_never_known, p_helps_of
from rgate_integrations.artifacts.passage_utility import PassageUtilityModel, read_utility_model
from rgate_integrations.engine.loading import DEFAULT_GATES
from rgate_integrations.evidence.search import FoundPassage, search_features
from rgate_integrations.index import HybridIndex, Passage, PassageIndex
from rgate_integrations.runtime.files import read_jsonl
from rgate_integrations.runtime.text import is_correct

OUT = Path(__file__).parent / "out"
CONSOLE = Console(width=140)
RESAMPLES, SEED, BEGUN, TIMED = 2_000, 0, 32, 100
GAINS = (0.0, 0.1)
BANDS = ((0.0, 1.0), (0.15, 1.0), (0.2, 1.0), (0.3, 1.0), (0.4, 1.0), (0.3, 0.95), (0.3, 0.9), (0.3, 0.8))
AT_ONCE = 16  # questions, after which what was computed is kept
LEAST = 60  # questions of an LLM, without which no table is printed
COVERED = ("2wiki", "hop", "musique")  # kinds of questions whose passages are in the corpus


@dataclass(frozen=True)
class Runs:
    """The recorded questions of one LLM that have both arms and a gold answer.

    Attributes:
        llm: Its name.
        questions: The questions.
        kind: Their kinds, shape (n,).
        direct: Whether it was right without passages, shape (n,).
        read: Whether it was right with them, shape (n,).
        direct_tokens: Length of the prompt without them, shape (n,).
        read_tokens: Length of the prompt with them, shape (n,).
        p_known: P(known) by the question alone, shape (n,).
        p_begun: P(known) by the begun answer, shape (n,).
        p_contains_answer: P(the passages hold the answer), shape (n,).
        never_known: Whether the gate says that no LLM can know it, shape (n,).
        threshold: That of the default gate for the question alone.
        threshold_begun: That of the default gate for begun answers.
    """

    llm: str
    questions: list[str]
    kind: np.ndarray
    direct: np.ndarray
    read: np.ndarray
    direct_tokens: np.ndarray
    read_tokens: np.ndarray
    p_known: np.ndarray
    p_begun: np.ndarray
    p_contains_answer: np.ndarray
    never_known: np.ndarray
    threshold: float
    threshold_begun: float

    def helps(self, p_known: np.ndarray, model: PassageUtilityModel | None = None) -> np.ndarray:
        """Return P(helps) for some P(known), by the shipped model or another."""
        return (model or read_utility_model()).p_helps(self.p_contains_answer, p_known)

    def right(self, retrieve: np.ndarray) -> np.ndarray:
        """Return which answers are right if these questions are retrieved for."""
        return np.where(retrieve, self.read, self.direct)

    def tokens(self, retrieve: np.ndarray, begun: np.ndarray | bool = False) -> np.ndarray:
        """Return how many prompt tokens are read; a begun answer's come on top where it is stopped."""
        extra = np.where(retrieve & begun, self.direct_tokens, 0)
        return np.where(retrieve, self.read_tokens, self.direct_tokens) + extra


@dataclass
class Kept:
    """Numbers of texts that take long to compute, kept in a file."""

    path: Path
    values: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.path.is_file():
            self.values = json.loads(self.path.read_text())

    def of(self, keys: Sequence[str], compute: Callable[[list[int]], list[float]]) -> np.ndarray:
        """Return a number a key; `compute` gets the places of those that are not there."""
        missing = [place for place, key in enumerate(keys) if key not in self.values]
        self.path.parent.mkdir(exist_ok=True)
        for start in range(0, len(missing), AT_ONCE):
            some = missing[start : start + AT_ONCE]
            for place, value in zip(some, compute(some), strict=True):
                self.values[keys[place]] = value
            self.path.write_text(json.dumps(self.values))
        return np.array([self.values[key] for key in keys])


def read_runs(record: Path, llm: Path, passages: dict[str, Passage]) -> Runs | None:
    """Read what is recorded of an LLM; None if that is too little."""
    asked = {q["id"]: q for _, q in read_jsonl(record / "questions.test.jsonl") if q["gold_answers"]}
    arms: dict[str, dict[str, dict]] = {"direct": {}, "passages": {}}
    for line in llm.read_text().split("\n")[:-1]:  # the last one may still be written
        call = json.loads(line)
        if call["meta"].get("arm") in arms and call["meta"]["id"] in asked:
            arms[call["meta"]["arm"]][call["meta"]["id"]] = call
    ids = [name for name in asked if name in arms["direct"] and name in arms["passages"]]
    if len(ids) < LEAST:
        return None
    direct, read = ([arms[arm][name] for name in ids] for arm in ("direct", "passages"))
    questions = [asked[name]["question"] for name in ids]
    gate, judge = load_gate(on_error="raise"), load_gate(DEFAULT_GATES["llm"], on_error="raise")
    features = []
    for question, call in zip(questions, read, strict=True):
        found = [passages[name] for name in call["meta"]["passages"]]
        features.append(search_features(question, [FoundPassage(p.text, p.title) for p in found]))

    def known(places: list[int]) -> list[float]:
        return [d.p_known for d in gate.decide_batch([questions[place] for place in places])]

    def never(places: list[int]) -> list[float]:
        made = gate.decide_batch([questions[place] for place in places])
        return [float(is_never_known(decision)) for decision in made]

    def begun(places: list[int]) -> list[float]:
        drafts = [_draft(direct[place]) for place in places]
        return [d.p_known for d in judge.decide_batch([questions[p] for p in places], drafts=drafts)]

    def right(calls: list[dict]) -> np.ndarray:
        return np.array([is_correct(c["text"], asked[c["meta"]["id"]]["gold_answers"]) for c in calls])

    return Runs(
        llm.stem,
        questions,
        np.array([asked[name]["kind"] for name in ids]),
        right(direct),
        right(read),
        np.array([call["prompt_tokens"] for call in direct]),
        np.array([call["prompt_tokens"] for call in read]),
        Kept(OUT / "look-first.known.json").of(questions, known),
        Kept(OUT / f"look-first.begun.{llm.stem}.json").of(questions, begun),
        read_utility_model().p_contains_answer(np.array(features)),
        Kept(OUT / "look-first.never.json").of(questions, never) > 0,
        gate.threshold,
        judge.threshold,
    )


def _draft(call: dict) -> Draft:
    tokens = tuple(token["token"] for token in call["tokens"])
    logprobs = tuple(min(token["logprob"], 0.0) for token in call["tokens"])
    whole = Draft(text=call["text"].strip(), tokens=tokens, logprobs=logprobs, source="llm")
    return whole.head(BEGUN)


# --- the tables ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Way:
    """A way to decide.

    Attributes:
        name: Its name.
        retrieve: For which questions it retrieves, shape (n,).
        begun: For which an answer is begun first, shape (n,).
    """

    name: str
    retrieve: np.ndarray
    begun: np.ndarray | bool = False


def looked(
    name: str,
    runs: Runs,
    p_known: np.ndarray,
    p_helps: np.ndarray,
    options: LookFirst,
    begun: np.ndarray | bool = False,
) -> Way:
    """Return a way that looks first, by the rule of `rgate_integrations.answering.look_first.decided`."""
    neither = np.maximum(p_known, p_helps) < options.abstain_below
    helpful = runs.never_known | (p_helps - options.min_gain > p_known)
    return Way(name, np.where(neither, options.on_abstain == "retrieve", helpful), begun)


def look_and_answer(name: str, runs: Runs, options: LookFirst) -> Way:
    """Return the way that looks first and answers first, by the rule of `look_first.settled`."""
    low, high = AnswerFirst().retrieve_below, AnswerFirst().answer_above
    first = looked("", runs, runs.p_known, runs.helps(runs.p_known), options).retrieve
    settled = runs.never_known | (first & (runs.p_known < low)) | (~first & (runs.p_known >= high))
    least = np.full(len(runs.questions), options.abstain_below)
    begun = ~settled & (runs.helps(least) - options.min_gain > least)
    p_known = np.where(begun, runs.p_begun, runs.p_known)
    return looked(name, runs, p_known, runs.helps(p_known), options, begun)


def ways(runs: Runs) -> list[Way]:
    """Return all ways."""
    n = len(runs.questions)
    helps = runs.helps(runs.p_known)
    low, high = AnswerFirst().retrieve_below, AnswerFirst().answer_above
    unclear = (runs.p_known >= low) & (runs.p_known < high)  # what is clear at the first look is not judged
    answered = np.where(unclear, runs.p_begun < runs.threshold_begun, runs.p_known < low)
    found = [
        Way("never", np.zeros(n, bool)),
        Way("always", np.ones(n, bool)),
        Way("gate, question alone", runs.p_known < runs.threshold),
        Way("answer first", answered, unclear),
    ]
    for gain in GAINS:
        options = LookFirst(min_gain=gain)
        found.append(looked(f"look first, min_gain={gain}", runs, runs.p_known, helps, options))
        found.append(look_and_answer(f"look first + answer first, min_gain={gain}", runs, options))
    return [*found, Way("oracle", runs.read & ~runs.direct)]


def interval(difference: np.ndarray) -> tuple[float, float]:
    """Return the 95 % interval of a mean of paired differences, by bootstrap."""
    rng = np.random.default_rng(SEED)
    rows = rng.integers(0, len(difference), (RESAMPLES, len(difference)))
    low, high = np.quantile(difference[rows].mean(axis=1), (0.025, 0.975))
    return float(low), float(high)


def show(runs: Runs) -> None:
    """Print the tables of an LLM: of all questions, and of those whose passages are in the corpus and are not."""
    covered = np.isin(runs.kind, COVERED)
    parts = {"all": covered | True, "passages in the corpus": covered, "mostly not in the corpus": ~covered}
    for name, part in parts.items():
        CONSOLE.print(table_of(runs, ways(runs), part, f"{runs.llm}, {name}"))
    by_band(runs)


def table_of(runs: Runs, chosen: Sequence[Way], part: np.ndarray, title: str) -> Table:
    """Return what every way gets right and reads, of some of the questions."""
    table = Table(title=f"{title}, {part.sum()} questions", title_justify="left", box=None)
    for column in ("way", "right %", "against always", "retrieved %", "prompt tokens", "of always %"):
        table.add_column(column, justify="left" if column == "way" else "right")
    most = runs.tokens(np.ones(len(part), bool))[part].mean()
    for way in chosen:
        right = runs.right(way.retrieve)[part]
        tokens = runs.tokens(way.retrieve, way.begun)[part].mean()
        difference = right.astype(float) - runs.read[part]
        low, high = interval(difference)
        table.add_row(
            way.name,
            f"{right.mean():.1%}",
            f"{difference.mean():+.1%} [{low:+.1%}, {high:+.1%}]",
            f"{way.retrieve[part].mean():.0%}",
            f"{tokens:.0f}",
            f"{tokens / most:.0%}",
        )
    return table


def by_band(runs: Runs) -> None:
    """Print what answer first does with other bands of the first look: what it begins, and what it stops."""
    table = Table(title="answer first, by band", title_justify="left", box=None)
    for column in (
        "band",
        "right %",
        "retrieved %",
        "begun %",
        "stopped %",
        "known at once, of them judged unknown",
    ):
        table.add_column(column, justify="right")
    judged_unknown = runs.p_begun < runs.threshold_begun
    for low, high in BANDS:
        unclear = (runs.p_known >= low) & (runs.p_known < high)
        at_once = runs.p_known >= high
        retrieve = np.where(unclear, judged_unknown, runs.p_known < low)
        table.add_row(
            f"{low:.2f}, {high:.2f}",
            f"{runs.right(retrieve).mean():.1%}",
            f"{retrieve.mean():.0%}",
            f"{unclear.mean():.0%}",
            f"{(unclear & retrieve).mean():.0%}",
            f"{at_once.sum()}, {(at_once & judged_unknown).sum()}",
        )
    CONSOLE.print(table)


# --- speed -------------------------------------------------------------------------------------------------------


def show_speed(home: Path) -> None:
    """Print how long a search and a look take at batch 1, for questions made of the titles of an index."""
    index = HybridIndex(PassageIndex.load(home))
    titles = [passage.title for passage in index.dense][:: max(1, len(index) // TIMED)][:TIMED]
    index.search(["warm"], 5)
    times: dict[str, list[float]] = {"embed the question": [], "search": [], "look": []}
    for title in titles:
        question = f"Who was the first owner of {title}?"
        began = time.perf_counter()
        index.dense.embed_queries([question])
        embedded = time.perf_counter()
        (hits,) = index.search([question], 5)  # the question is embedded already
        searched = time.perf_counter()
        found = [FoundPassage(hit.passage.text, hit.passage.title) for hit in hits]
        p_helps_of(question, found, 0.5, LookFirst())
        times["embed the question"].append(embedded - began)
        times["search"].append(searched - embedded)
        times["look"].append(time.perf_counter() - searched)
    for step, seconds in times.items():
        CONSOLE.print(f"{step:20} median {1e3 * np.median(seconds):6.2f} ms, of {len(seconds)}")


def main() -> None:
    """Run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path)
    parser.add_argument("--record", type=Path, default=OUT / "served")
    parser.add_argument("--speed", type=Path)
    arguments = parser.parse_args()
    if arguments.speed is not None:
        show_speed(arguments.speed)
    if arguments.data is not None:
        show_record(arguments.data, arguments.record)


def show_record(data: Path, record: Path) -> None:
    """Print the tables of every LLM that has enough questions."""
    passages = {p.id: p for corpus in read_corpora(data).values() for p in corpus}
    for llm in sorted(record.glob("*.jsonl")):
        if llm.name.startswith(("questions", "searches")):
            continue
        runs = read_runs(record, llm, passages)
        if runs is None:
            CONSOLE.print(f"{llm.stem}: fewer than {LEAST} questions in both arms")
        else:
            show(runs)


if __name__ == "__main__":
    main()
