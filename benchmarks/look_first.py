"""What looking first brings, from the recorded calls of an LLM in both arms: what is right, and what is read.

    python benchmarks/look_first.py --data DIR [--record benchmarks/out/served]
    python benchmarks/look_first.py --speed INDEX      how long a look takes on an index
    python benchmarks/look_first.py --picture FILE     the three outcomes, as an SVG

The record is that of ``benchmarks/served.py``: questions.test.jsonl, and for each LLM its answers without and with
the passages that a hybrid search of 22,610 found. No gate and no model was trained on these questions. DIR holds the
corpora; see `holds`. Rows that are fitted to the LLM are cross-fitted: no question decides about itself.
"""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from zlib import crc32

import numpy as np
from holds import FOLDS, read_corpora
from rich.console import Console
from rich.table import Table
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score

from rgate_integrations import Draft, load_gate
from rgate_integrations.answering.answer_first import AnswerFirst
from rgate_integrations.answering.look_first import LookFirst, is_never_known, p_helps_of
from rgate_integrations.artifacts.helps import PassageUtilityModel, read_helps
from rgate_integrations.engine.loading import DEFAULT_GATES
from rgate_integrations.evidence.search import FoundPassage, search_features
from rgate_integrations.gates.calibrated import logits
from rgate_integrations.index import HybridIndex, Passage, PassageIndex
from rgate_integrations.runtime.files import read_jsonl
from rgate_integrations.runtime.text import is_correct

OUT = Path(__file__).parent / "out"
CONSOLE = Console(width=140)
RESAMPLES, SEED, BEGUN, TIMED = 2_000, 0, 32, 100
GRID = np.linspace(0.0, 1.0, 41)
GAINS = (0.0, 0.05, 0.1, 0.15)
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
        return (model or read_helps()).p_helps(self.p_contains_answer, p_known)

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
        read_helps().p_contains_answer(np.array(features)),
        Kept(OUT / "look-first.never.json").of(questions, never) > 0,
        gate.threshold,
        judge.threshold,
    )


def _draft(call: dict) -> Draft:
    tokens = tuple(token["token"] for token in call["tokens"])
    logprobs = tuple(min(token["logprob"], 0.0) for token in call["tokens"])
    whole = Draft(text=call["text"].strip(), tokens=tokens, logprobs=logprobs, source="llm")
    return whole.head(BEGUN)


# --- fitted to the LLM -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fitted:
    """P(known) and P(helps), fitted to an LLM without the question that they are about.

    Attributes:
        p_known: Calibrated, shape (n,).
        p_helps: Shape (n,).
        reading: Mean over the folds; see `PassageUtilityModel`.
        distraction: The same.
    """

    p_known: np.ndarray
    p_helps: np.ndarray
    reading: float
    distraction: float

    @classmethod
    def of(cls, runs: Runs, p_known: np.ndarray) -> "Fitted":
        """Fit a line of the logit for P(known), and two numbers for P(helps)."""
        fold = np.array([crc32(question.encode()) % FOLDS for question in runs.questions])
        known, helps, numbers = np.zeros(len(fold)), np.zeros(len(fold)), []
        for part in (fold == number for number in range(FOLDS)):
            line = LogisticRegression().fit(logits(p_known[~part])[:, None], runs.direct[~part])
            calibrated = line.predict_proba(logits(p_known)[:, None])[:, 1]
            model = fit_helps(runs.p_contains_answer[~part], calibrated[~part], runs.read[~part])
            known[part] = calibrated[part]
            helps[part] = model.p_helps(runs.p_contains_answer[part], calibrated[part])
            numbers.append((model.reading, model.distraction))
        reading, distraction = np.mean(numbers, axis=0)
        return cls(known, helps, float(reading), float(distraction))

    @classmethod
    def to_another(cls, runs: Runs, p_known: np.ndarray, other: Runs, other_known: np.ndarray) -> "Fitted":
        """Fit the same to the runs of another LLM."""
        line = LogisticRegression().fit(logits(other_known)[:, None], other.direct)
        theirs, known = (line.predict_proba(logits(p)[:, None])[:, 1] for p in (other_known, p_known))
        model = fit_helps(other.p_contains_answer, theirs, other.read)
        return cls(known, model.p_helps(runs.p_contains_answer, known), model.reading, model.distraction)


def fit_helps(p_contains_answer: np.ndarray, p_known: np.ndarray, right: np.ndarray) -> PassageUtilityModel:
    """Return the model with the reading and the distraction under which the answers are most likely."""
    best, chosen = -np.inf, read_helps()
    for reading in GRID:
        for distraction in GRID:
            numbers = {"reading": float(reading), "distraction": float(distraction)}
            model = read_helps().model_copy(update=numbers)
            p = np.clip(model.p_helps(p_contains_answer, p_known), 1e-3, 1 - 1e-3)
            likelihood = float(np.log(np.where(right, p, 1 - p)).sum())
            if likelihood > best:
                best, chosen = likelihood, model
    return chosen


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


def ways(runs: Runs, fitted: Fitted, begun: Fitted, other: Runs | None) -> list[Way]:
    """Return all ways; those that are fitted to another LLM only if there is one."""
    n = len(runs.questions)
    saving = LookFirst(on_abstain="direct")
    helps = runs.helps(runs.p_known)
    low, high = AnswerFirst().retrieve_below, AnswerFirst().answer_above
    unclear = (runs.p_known >= low) & (runs.p_known < high)  # what is clear at the first look is not judged
    answered = np.where(unclear, runs.p_begun < runs.threshold_begun, runs.p_known < low)
    return [
        Way("never", np.zeros(n, bool)),
        Way("always", np.ones(n, bool)),
        Way("gate, question alone", runs.p_known < runs.threshold),
        Way("answer first", answered, unclear),
        looked("look first", runs, runs.p_known, helps, LookFirst()),
        looked("  neither: direct", runs, runs.p_known, helps, saving),
        *(looked(f"  min_gain={g}", runs, runs.p_known, helps, LookFirst(min_gain=g)) for g in GAINS[1:]),
        looked("  fitted", runs, fitted.p_known, fitted.p_helps, LookFirst()),
        *(
            look_and_answer(f"look first + answer first, min_gain={g}", runs, LookFirst(min_gain=g))
            for g in GAINS
        ),
        looked("  fitted, every answer begun", runs, begun.p_known, begun.p_helps, LookFirst(), True),
        *(fitted_to_another(runs, other) if other is not None else ()),
        Way("oracle", runs.read & ~runs.direct),
    ]


def fitted_to_another(runs: Runs, other: Runs) -> list[Way]:
    """Return the ways that are fitted to the answers of another LLM."""
    alone = Fitted.to_another(runs, runs.p_known, other, other.p_known)
    begun = Fitted.to_another(runs, runs.p_begun, other, other.p_begun)
    return [
        looked("look first, fitted to the other LLM", runs, alone.p_known, alone.p_helps, LookFirst()),
        looked("  and every answer begun", runs, begun.p_known, begun.p_helps, LookFirst(), True),
    ]


def interval(difference: np.ndarray) -> tuple[float, float]:
    """Return the 95 % interval of a mean of paired differences, by bootstrap."""
    rng = np.random.default_rng(SEED)
    rows = rng.integers(0, len(difference), (RESAMPLES, len(difference)))
    low, high = np.quantile(difference[rows].mean(axis=1), (0.025, 0.975))
    return float(low), float(high)


def show(runs: Runs, other: Runs | None) -> None:
    """Print the tables of an LLM: of all questions, and of those whose passages are in the corpus and are not."""
    fitted, begun = Fitted.of(runs, runs.p_known), Fitted.of(runs, runs.p_begun)
    scores = {
        "-P(known), question alone": -runs.p_known,
        "-P(known), begun answer": -runs.p_begun,
        "P(the passages hold the answer)": runs.p_contains_answer,
        "P(helps) - P(known)": runs.helps(runs.p_known) - runs.p_known,
        "P(helps) - P(known), fitted": fitted.p_helps - fitted.p_known,
        "P(helps) - P(known), begun answer": runs.helps(runs.p_begun) - runs.p_begun,
        "P(helps) - P(known), begun answer, fitted": begun.p_helps - begun.p_known,
    }
    covered = np.isin(runs.kind, COVERED)
    parts = {"all": covered | True, "passages in the corpus": covered, "mostly not in the corpus": ~covered}
    for name, part in parts.items():
        CONSOLE.print(table_of(runs, ways(runs, fitted, begun, other), part, f"{runs.llm}, {name}"))
        unlike = part & (runs.read != runs.direct)
        helped = int((runs.read & unlike).sum())
        CONSOLE.print(
            f"Passages help {helped} questions and hurt {int(unlike.sum()) - helped}. AUC of telling which:"
        )
        for score, values in scores.items():
            CONSOLE.print(f"  {score:42} {roc_auc_score(runs.read[unlike], values[unlike]):.3f}")
        print()
    numbers = f"reading {fitted.reading:.2f}, distraction {fitted.distraction:.2f}"
    CONSOLE.print(
        f"Fitted by the question alone: {numbers}; AUC of P(holds) for right with passages "
        f"{roc_auc_score(runs.read, runs.p_contains_answer):.3f}."
    )
    by_band(runs)
    by_kind(runs)


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


def by_kind(runs: Runs) -> None:
    """Print both arms and what looking first does, by kind of question."""
    look = looked("", runs, runs.p_known, runs.helps(runs.p_known), LookFirst()).retrieve
    table = Table(title="by kind", title_justify="left", box=None)
    columns = (
        "kind",
        "n",
        "never",
        "always",
        "look first",
        "against always",
        "retrieved",
        "P(known)",
        "P(holds)",
    )
    for column in columns:
        table.add_column(column, justify="left" if column == "kind" else "right")
    right = runs.right(look)
    for kind in np.unique(runs.kind):
        own = runs.kind == kind
        difference = right[own].astype(float) - runs.read[own]
        low, high = interval(difference)
        shares = [f"{share[own].mean():.0%}" for share in (runs.direct, runs.read, right)]
        against = f"{difference.mean():+.0%} [{low:+.0%}, {high:+.0%}]"
        means = [f"{share[own].mean():.0%}" for share in (look, runs.p_known, runs.p_contains_answer)]
        table.add_row(str(kind), str(int(own.sum())), *shares, against, *means)
    CONSOLE.print(table)


# --- speed and picture -------------------------------------------------------------------------------------------


def show_speed(home: Path) -> None:
    """Print how long a search and a look take at batch 1, for questions made of the titles of an index."""
    index = HybridIndex(PassageIndex.load(home))
    titles = [passage.title for passage in index.dense][:: max(1, len(index) // TIMED)][:TIMED]
    times = Times()
    index.search(["warm"], 5)
    for title in titles:
        question = f"Who was the first owner of {title}?"
        times.begin()
        index.dense.embed_queries([question])
        times.end("embed the question")
        (hits,) = index.search([question], 5)  # the question is embedded already
        times.end("search")
        found = [FoundPassage(hit.passage.text, hit.passage.title) for hit in hits]
        p_helps_of(question, found, 0.5, LookFirst())
        times.end("look")
    times.show()


@dataclass
class Times:
    """Milliseconds that steps took: by the clock, and of the processor, which other work does not lengthen."""

    steps: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    _began: tuple[float, float] = (0.0, 0.0)

    def begin(self) -> None:
        """Begin the first step."""
        self._began = (time.perf_counter(), time.process_time())

    def end(self, name: str) -> None:
        """End a step, and begin the next one."""
        now = (time.perf_counter(), time.process_time())
        spent = (now[0] - self._began[0], now[1] - self._began[1])
        self.steps.setdefault(name, []).append((spent[0] * 1_000, spent[1] * 1_000))
        self.begin()

    def show(self) -> None:
        """Print the least and the median of each step."""
        for name, spent in self.steps.items():
            least, median = np.min(spent, axis=0), np.median(spent, axis=0)
            CONSOLE.print(
                f"{name:20} clock: least {least[0]:6.2f} ms, median {median[0]:6.2f} ms; "
                f"processor: least {least[1]:6.2f} ms, median {median[1]:6.2f} ms; of {len(spent)}"
            )


def picture(options: LookFirst, size: int = 300) -> str:
    """Return the three outcomes over P(known) and P(helps), as an SVG."""
    edge, border = size + 60, 40
    low = options.abstain_below * size
    top, bottom, right = 20, 20 + size, border + size
    areas = (
        ("#dbeafe", f"{border},{bottom} {border},{top} {right},{top}", "with passages", 0.3, 0.25),
        ("#dcfce7", f"{border},{bottom} {right},{top} {right},{bottom}", "direct", 0.68, 0.72),
        (
            "#f3f4f6",
            f"{border},{bottom} {border},{bottom - low} {border + low},{bottom - low} {border + low},{bottom}",
            "",
            0,
            0,
        ),
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {edge} {edge}" width="{edge}" '
        'font-family="sans-serif" font-size="13">',
        f'<rect width="{edge}" height="{edge}" fill="white"/>',
    ]
    for colour, points, name, x, y in areas:
        parts.append(f'<polygon points="{points}" fill="{colour}" stroke="#6b7280"/>')
        if name:
            parts.append(f'<text x="{border + x * size:.0f}" y="{top + y * size:.0f}">{name}</text>')
    parts += [
        f'<text x="{border + low + 6:.0f}" y="{bottom - 8}">neither</text>',
        f'<text x="{border + size / 2 - 30:.0f}" y="{bottom + 28}">P(known)</text>',
        f'<text transform="translate(24 {top + size / 2 + 30:.0f}) rotate(-90)">P(helps)</text>',
        f'<text x="{border - 4}" y="{bottom + 14}">0</text><text x="{right - 8}" y="{bottom + 14}">1</text>',
        f'<text x="{border - 12}" y="{top + 10}">1</text>',
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def main() -> None:
    """Run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path)
    parser.add_argument("--record", type=Path, default=OUT / "served")
    parser.add_argument("--speed", type=Path)
    parser.add_argument("--picture", type=Path)
    arguments = parser.parse_args()
    if arguments.picture is not None:
        arguments.picture.write_text(picture(LookFirst()))
    if arguments.speed is not None:
        show_speed(arguments.speed)
    if arguments.data is not None:
        show_record(arguments.data, arguments.record)


def show_record(data: Path, record: Path) -> None:
    """Print the tables of every LLM that has enough questions."""
    passages = {p.id: p for corpus in read_corpora(data).values() for p in corpus}
    found = []
    for llm in sorted(record.glob("*.jsonl")):
        if llm.name.startswith(("questions", "searches")):
            continue
        runs = read_runs(record, llm, passages)
        if runs is None:
            CONSOLE.print(f"{llm.stem}: fewer than {LEAST} questions in both arms")
        else:
            found.append(runs)
    for runs in found:
        show(runs, next((other for other in found if other is not runs), None))


if __name__ == "__main__":
    main()
