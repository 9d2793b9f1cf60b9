"""The table of abilities that ships: how much LLMs know, by their recorded answers and by published figures.

    python benchmarks/abilities.py --data FOLDER [--save | --measure]

The folder holds ``adaptive_llama31_8b.*.dev.jsonl``, ``more/`` and ``strong/``. Abilities are fitted together with a
knowledge head, on answers whose licence allows it; Llama-3.1-8B-Instruct has 0. LLMs without such answers are read
off published figures by a regression. Hidden states are kept where `heads` keeps them.

With ``--measure``: how near the shipped gate comes to what LLMs know, by their recorded answers.
"""

import csv
import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from base import CONSOLE, argument_parser, print_table, read_records
from head_fit import HeadExamples, HeadsRecipe, fit_known, logistic
from heads import CACHE, GOALS, KNOWN_WEIGHTS, LAYERS, THRESHOLD, key, read_question_states
from labels import (
    LLAMA,
    TABLE,
    TABLE_NAMES,
    Label,
    Source,
    read_abilities,
    read_adarague,
    read_practical,
    read_record,
    read_recorded,
    table_name,
)
from sklearn.metrics import roc_auc_score

from rgate_integrations import load_gate
from rgate_integrations.gates.ability import Ability
from rgate_integrations.gates.artifacts import HeadsArtifact, p_answered
from rgate_integrations.gates.heads import HeadsGate
from rgate_integrations.tuning.ability import estimate_ability

WHOLE = ("adarague", "calib", "qa-eval")
MOST_QUESTIONS = 1_000  # of every other source
MOST_ANSWERS = 300  # of a source, set and LLM, in a fit
GROUP_SD = 0.6  # of the level of a source and set: prompts and judges differ
LEAST_RESIDUAL = 0.4
ROUNDS = 3
COLUMNS = ("simpleqa", "triviaqa", "nq", "mmlu", "params_b")
SLOPES = {"params_b": (0.33, 0.1)}
"""What a line's slope is drawn to, and how far it may be from it: about one logit for ten times the parameters."""
LOGITS = (1.0, 0.25)
"""That of the log-odds of an accuracy: in the one-parameter model they grow as the ability does."""
LONG_TAIL = ("simpleqa", "entity_questions")
SIZES = {
    "Llama-2-7B-chat": 7.0,
    "Meta-Llama-3.1-8B": 8.0,
    "Mistral-7B-Instruct-v0.2": 7.2,
    "Mistral-7B-Instruct-v0.3": 7.2,
    "Mixtral-8x7B-Instruct-v0.1": 46.7,
    "Phi-3-small-128k-instruct": 7.4,
    "Qwen3-8B": 8.2,
    "gemma-2b-it": 2.5,
    "llama2-13b-base": 13.0,
    "llama2-13b-chat": 13.0,
    "llama2-70b-base": 70.0,
    "llama2-70b-chat": 70.0,
    "llama2-7b-base": 7.0,
    "mistral-7B": 7.2,
    "mistral-7b-chat": 7.2,
    "text-davinci-003": 175.0,
}
"""Billions of parameters of LLMs that the table of published figures lacks."""


@dataclass(frozen=True)
class Answers:
    """Closed-book answers of LLMs that may train what ships, one a row.

    Attributes:
        states: Hidden states of the question, shape (n, layers, hidden size).
        source, what, llm, group, known: Columns of the labels, shape (n,).
    """

    states: np.ndarray
    source: np.ndarray
    what: np.ndarray
    llm: np.ndarray
    group: np.ndarray
    known: np.ndarray

    @classmethod
    def read(cls, data: Path, cache: Path) -> "Answers":
        """Read all answers, and the hidden states of their questions."""
        labels = _drawn([*read_adarague(data), *read_recorded(data)])
        labels = [label for label in labels if not label.what.endswith("(low quality)")]
        states = read_question_states([label.question for label in labels], cache)
        columns = []
        for name in ("source", "what", "llm", "group", "known"):
            columns.append(np.array([getattr(label, name) for label in labels]))
        return cls(np.stack([states[key(label.question)] for label in labels]), *columns)

    def fit(self, abilities: dict[str, float]) -> np.ndarray:
        """Fit a knowledge head, at most `MOST_ANSWERS` of a cell; returns its logits for ability 0, shape (n,)."""
        rng = np.random.default_rng(0)
        cells = np.char.add(np.char.add(self.group, "|"), self.llm)
        rows, weights = [], []
        for cell in np.unique(cells):
            own = np.flatnonzero(cells == cell)
            drawn = rng.permutation(own)[:MOST_ANSWERS]
            rows.append(drawn)
            # What was drawn stands for all.
            weights.append(np.full(len(drawn), KNOWN_WEIGHTS[self.source[own[0]]] * len(own) / len(drawn)))
        part = np.concatenate(rows)
        examples = HeadExamples(
            self.states[part],
            np.full(len(part), ""),
            self.known[part],
            np.array([abilities[llm] for llm in self.llm[part]]),
            self.group[part],
            np.concatenate(weights),
        )
        weight, bias = fit_known(examples, LAYERS, HeadsRecipe())
        return np.einsum("nlh,lh->n", self.states.astype(np.float32), weight) + bias

    def linked(self) -> set[str]:
        """Return the LLMs whose labels say how they compare: those that answered more than the long tail."""
        usual = ~np.isin(self.what, LONG_TAIL) & ~np.char.endswith(self.llm, "(selected)")
        return set(np.unique(self.llm[usual]).tolist())


def _drawn(labels: list[Label]) -> list[Label]:
    """Leave out what is beyond `MOST_QUESTIONS` of a source: the questions that come last by their hash."""
    drawn: dict[str, set[str]] = {}
    for source in {label.source for label in labels}:
        found = {label.question for label in labels if label.source == source}
        drawn[source] = found if source in WHOLE else set(sorted(found, key=key)[:MOST_QUESTIONS])
    return [label for label in labels if label.question in drawn[label.source]]


class Published:
    """Published figures of LLMs, and what they say of ability.

    Accuracies are taken as log-odds, and numbers of parameters as logarithms, so that lines fit. Each figure has a
    line of its own, from the LLMs that have both it and labels; they are combined by how well they predict an LLM
    that was left out.
    """

    def __init__(self, path: Path) -> None:
        self.figures: dict[str, np.ndarray] = {}
        self.urls: dict[str, str] = {}
        with path.open(encoding="utf-8") as file:
            for row in csv.DictReader(file):
                values = [float(row[column]) if row[column] else math.nan for column in COLUMNS]
                if "Verified" in row["notes"] or "contamination" in row["notes"]:
                    values[0] = math.nan  # SimpleQA Verified is another set
                self.figures[row["llm"]] = np.array([*map(_logit, values[:-1]), math.log2(values[-1])])
                self.urls[row["llm"]] = row["source_url"]

    def of(self, llm: str) -> np.ndarray:
        """Return the figures of an LLM by the name that labels give it; NaN where there are none."""
        name = TABLE_NAMES.get(llm, llm)
        if name in self.figures:
            return self.figures[name]
        figures = np.full(len(COLUMNS), math.nan)
        figures[-1] = math.log2(SIZES.get(llm, math.nan))
        return figures

    def ability(
        self, figures: np.ndarray, measured: dict[str, float], without: str = ""
    ) -> tuple[float, float, str]:
        """Return mean and standard deviation of the ability that figures say, and the names of those figures."""
        others = {llm: theta for llm, theta in measured.items() if llm != without}
        thetas = np.array(list(others.values()))
        table = np.stack([self.of(llm) for llm in others])
        found = []
        for number, column in enumerate(COLUMNS):
            both = ~np.isnan(table[:, number])
            if both.sum() >= 3 and not math.isnan(figures[number]):
                slope = SLOPES.get(column, LOGITS)
                mean, sd = _line(table[both, number], thetas[both], figures[number], slope)
                found.append((mean, sd, column))
        # What size says is said again, and better, by figures that were measured.
        if len(found) > 1:
            found = [each for each in found if each[2] != "params_b"]
        if not found:
            return 0.0, 1.0, ""
        precisions = np.array([1 / sd**2 for _, sd, _ in found])
        means = np.array([mean for mean, _, _ in found])
        # They err alike, so that two of them say less than two independent ones would.
        sd = max(math.sqrt(2 / (1 + len(found)) * len(found) / precisions.sum()), LEAST_RESIDUAL)
        return float(means @ precisions / precisions.sum()), sd, ", ".join(name for _, _, name in found)


def _logit(percent: float) -> float:
    share = percent / 100
    return math.log(share / (1 - share)) if not math.isnan(percent) else math.nan


def _line(x: np.ndarray, y: np.ndarray, at: float, slope: tuple[float, float]) -> tuple[float, float]:
    """Return what a line predicts at a point, and its leave-one-out error, which grows beyond the points."""
    mean, sd = slope
    design = np.stack([np.ones(len(x)), x - x.mean()], axis=1)
    gram = design.T @ design + np.diag([0.0, (LEAST_RESIDUAL / sd) ** 2])
    rest = y - mean * design[:, 1]
    coefficients = np.linalg.solve(gram, design.T @ rest)
    leverage = np.einsum("ni,ij,nj->n", design, np.linalg.inv(gram), design)
    residuals = (rest - design @ coefficients) / (1 - leverage)
    error = max(math.sqrt(np.mean(residuals**2)), LEAST_RESIDUAL)
    here = np.array([1.0, at - x.mean()])
    spread = math.sqrt(1 + here @ np.linalg.solve(gram, here))
    return float(here @ coefficients + mean * here[1]), error * spread


def fit_abilities(
    answers: Answers, logits: np.ndarray, prior: dict[str, tuple[float, float]]
) -> dict[str, tuple[float, float]]:
    """Fit abilities and the levels of sources and sets to answers, with a prior an LLM.

    Args:
        answers: The rows.
        logits: What the knowledge head says for ability 0, shape (n,).
        prior: Mean and standard deviation by LLM.

    Returns:
        Mean and standard deviation by LLM.
    """
    llms, llm = np.unique(answers.llm, return_inverse=True)
    groups, group = np.unique(answers.group, return_inverse=True)
    means, sds = np.array([prior[name] for name in llms]).T
    columns = np.hstack([np.eye(len(llms))[llm] * sds[llm, None], np.eye(len(groups))[group] * GROUP_SD])
    nothing = np.zeros((len(llm), 0))
    offset = logits + means[llm]
    found, _ = logistic(columns, nothing, answers.known, np.ones(len(llm)), 1.0, offset)
    thetas = means + found[: len(llms)] * sds
    p = 1 / (1 + np.exp(-(offset + columns @ found)))
    information = np.bincount(llm, p * (1 - p))
    sets = np.array([len(np.unique(group[llm == number])) for number in range(len(llms))])
    of_labels = 1 / np.maximum(information, 1e-6) + GROUP_SD**2 / sets
    total = np.sqrt(1 / (1 / of_labels + 1 / sds**2))
    return {str(name): (float(t), float(s)) for name, t, s in zip(llms, thetas, total, strict=True)}


def fit_together(answers: Answers, published: Published) -> dict[str, tuple[float, float]]:
    """Fit head and abilities in turns; returns mean and standard deviation by LLM. Llama-3.1-8B-Instruct has 0."""
    thetas = {str(llm): 0.0 for llm in np.unique(answers.llm)}
    links = answers.linked()
    found: dict[str, tuple[float, float]] = {}
    for _ in range(ROUNDS):
        logits = answers.fit(thetas)
        measured = {llm: theta for llm, theta in thetas.items() if llm in links}
        prior = {}
        for llm in thetas:
            mean, sd, _ = published.ability(published.of(llm), measured, llm)
            prior[llm] = (mean, sd)
        prior[LLAMA] = (0.0, 0.2)
        fitted = fit_abilities(answers, logits, prior)
        shift = fitted[LLAMA][0]
        found = {llm: (mean - shift, sd) for llm, (mean, sd) in fitted.items()}
        thetas = {llm: mean for llm, (mean, _) in found.items()}
    return found


def table_of(answers: Answers, published: Published) -> dict[str, dict]:
    """Return ability, uncertainty and source of every LLM that there are labels or figures of."""
    abilities = fit_together(answers, published)
    found: dict[str, tuple[float, float, str]] = {}
    measured = {}
    for llm in sorted(answers.linked()):
        mean, sd = abilities[llm]
        measured[llm] = mean
        sources = sorted(set(answers.source[answers.llm == llm].tolist()))
        found[table_name(llm)] = (mean, sd, f"recorded answers ({', '.join(sources)})")
    for name, figures in published.figures.items():
        mean, sd, columns = published.ability(figures, measured)
        if columns and name.lower() not in found:
            urls = published.urls[name].replace(" ; ", ", ")
            found[name.lower()] = (mean, sd, f"published {columns}: {urls}")
    table = {}
    for name in sorted(found):
        mean, sd, source = found[name]
        table[name] = {"theta": round(mean, 2), "sd": round(sd, 2), "source": source}
    return table


MEASURED_ONLY = (
    Source("more/dba_multihop_ten_llms.jsonl.gz", "dba", "none"),
    Source("more/faclens_nq_eq.jsonl.gz", "faclens", "none"),
)
"""Answers without a licence, of which nothing that ships is made."""
LEAST, MOST = 100, 600  # answers of a cell
USUAL_SD = 0.4  # of an ability in the table
STRONG, SMALL = 70.0, 14.0  # billions of parameters; large providers publish none, and count as strong


@dataclass(frozen=True)
class Cell:
    """One LLM's answers to one set of questions.

    Attributes:
        llm, what: The LLM, and the set.
        easiness: The logit of knowledge at ability 0, shape (n,).
        states: Hidden states, shape (n, layers, hidden size).
        right: Whether it answered rightly, shape (n,).
    """

    llm: str
    what: str
    easiness: np.ndarray
    states: np.ndarray
    right: np.ndarray


def read_cells(data: Path, cache: Path, heads: HeadsArtifact) -> list[Cell]:
    """Read the cells with at least `LEAST` answers; of those with more than `MOST`, some that are drawn."""
    by_cell: dict[tuple[str, str], dict[str, float]] = {}
    labels = [*read_adarague(data), *read_recorded(data)]
    for source in MEASURED_ONLY:
        for record in read_records(data / source.path):
            labels += read_record(record, source)
    for label in labels:
        if label.known in (0.0, 1.0) and not label.llm.endswith("(selected)") and "low" not in label.what:
            by_cell.setdefault((label.llm, label.what), {})[label.question] = label.known
    drawn = {cell: sorted(of.items(), key=lambda each: key(each[0]))[:MOST] for cell, of in by_cell.items()}
    drawn = {cell: some for cell, some in drawn.items() if len(some) >= LEAST}
    asked = sorted({question for some in drawn.values() for question, _ in some})
    states = read_question_states(asked, cache)
    cells = []
    for (llm, what), some in drawn.items():
        own = np.stack([states[key(question)] for question, _ in some])
        right = np.array([known for _, known in some])
        cells.append(Cell(llm, what, heads.known_logits(own, 0.0), own, right))
    return cells


def measure(data: Path, cache: Path) -> None:
    """Print, by strength of the LLM and by what is known of it, how near P(known) comes to its answers."""
    gate = load_gate(on_error="raise").gate
    if not isinstance(gate, HeadsGate):
        raise TypeError("The default gate has no heads.")
    heads = gate.trained
    cells, published = read_cells(data, cache, heads), Published(data / "strong" / "abilities.csv")
    table = read_abilities()
    known = {llm: table[table_name(llm)] for llm in {cell.llm for cell in cells} if table_name(llm) in table}
    rng = np.random.default_rng(0)
    rows: dict[tuple[str, str], list[list[float]]] = {}
    for cell in cells:
        size = 2 ** published.of(cell.llm)[-1]
        strength = "small" if size < SMALL else "between" if size < STRONG else "strong"
        strength = "long tail" if cell.what in LONG_TAIL else strength
        mean, sd, _ = published.ability(published.of(cell.llm), known, cell.llm)
        abilities = {"nobody": heads.default_ability, "its name": (mean, sd)}
        others = [each for each in cells if each.llm == cell.llm and each.what != cell.what]
        if others:
            easiness, right = (
                np.concatenate([getattr(o, name) for o in others]) for name in ("easiness", "right")
            )
            asked = rng.permutation(len(right))[:100]
            prior = Ability(cell.llm, mean, max(sd, 0.5), "")
            found = estimate_ability(prior, easiness[asked], heads.ability_slope, right[asked])
            abilities["100 answers"] = (found.theta, found.sd)
        for by, ability in abilities.items():
            known = heads.p_fact_known(cell.states, *ability)
            p = p_answered(heads.kinds, heads.kind_probabilities(cell.states), known)
            rows.setdefault((strength, by), []).append(_figures(p, cell.right))
    printed = []
    for (strength, by), found in sorted(rows.items()):
        right, off, ece, skipped, hits, auc = np.nanmean(np.array(found), axis=0)
        shares = f"{skipped:.1%}", f"{hits / skipped:.1%}", f"{auc:.3f}"
        printed.append([strength, by, str(len(found)), f"{right:.1%}", f"{off:.3f}", f"{ece:.3f}", *shares])
    columns = [
        "LLMs",
        "known by",
        "cells",
        "right alone",
        "|P - right|",
        "ECE",
        "skipped",
        "of these right",
        "AUC",
    ]
    print_table(columns, printed)
    measure_practical(data, cache, heads)


def measure_practical(data: Path, cache: Path, heads: HeadsArtifact) -> None:
    """Print how much of each kind of practical requests is retrieved for, by the LLM's ability."""
    labels = list(read_practical(data))
    states = read_question_states([label.question for label in labels], cache)
    table = read_abilities()
    abilities = (min(table.values()), 0.0, 1.0, 2.0, max(table.values()))
    rows = []
    for kind in GOALS:
        own = np.stack([states[key(label.question)] for label in labels if label.what == kind])
        kinds = heads.kind_probabilities(own)
        known = [
            p_answered(heads.kinds, kinds, heads.p_fact_known(own, theta, USUAL_SD)) for theta in abilities
        ]
        rows.append([kind, str(len(own)), *(f"{np.mean(p < THRESHOLD):.1%}" for p in known)])
    print_table(["retrieved, by ability", "of", *(f"{theta:+.1f}" for theta in abilities)], rows)


def _figures(p: np.ndarray, right: np.ndarray) -> list[float]:
    """Return share right, its distance to mean P, ECE, share skipped, share skipped and right, AUC."""
    bins = np.minimum((p * 10).astype(int), 9)
    ece = sum(abs((p - right)[bins == number].sum()) for number in range(10)) / len(p)
    skipped = p >= THRESHOLD
    auc = roc_auc_score(right, p) if 0 < right.mean() < 1 else math.nan
    return [
        right.mean(),
        abs(p.mean() - right.mean()),
        ece,
        skipped.mean(),
        (skipped & (right > 0)).mean(),
        auc,
    ]


def main() -> None:
    """Run."""
    parser = argument_parser(__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--cache", type=Path, default=CACHE, help="where hidden states are kept")
    parser.add_argument("--save", action="store_true", help="write the table that ships")
    parser.add_argument("--measure", action="store_true", help="measure the shipped gate, and fit nothing")
    arguments = parser.parse_args()
    if arguments.measure:
        measure(arguments.data, arguments.cache)
        return
    answers = Answers.read(arguments.data, arguments.cache)
    table = table_of(answers, Published(arguments.data / "strong" / "abilities.csv"))
    for name, line in table.items():
        CONSOLE.print(f"{name:40} {line['theta']:5.2f} ± {line['sd']:.2f}  {line['source'][:80]}")
    if arguments.save:
        TABLE.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
