"""How well P(known) follows the ability of the LLM, and the table of abilities.

    python benchmarks/abilities.py --data FOLDER                    the measure
    python benchmarks/abilities.py --data FOLDER --table            fits the shipped table, and prints it
    python benchmarks/abilities.py --data FOLDER --head FOLDER      fits the knowledge head of a saved gate again

The folder holds ``adaptive_llama31_8b.*.dev.jsonl``, ``more/`` and ``strong/``. A cell is an LLM and a set of
questions. What scores it was fitted without the set and without the LLM's family, on answers whose licence allows it;
of SimpleQA, half of the questions train and the others measure. The LLM's ability is, by turns, unknown, read off
published figures by a regression that leaves the LLM out, and updated by 30 or 100 of its answers to other sets. The
kinds of requests are those of the shipped gate. Hidden states are kept where `heads` keeps them.
"""

import argparse
import csv
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from head_fit import HeadExamples, HeadsRecipe, fit_known, logistic
from heads import CONSOLE, KNOWN_WEIGHTS, LAYERS, OUT, THRESHOLD, ece, key, read_question_states
from labels import LLAMA, TABLE, TABLE_NAMES, Label, read_abilities, read_adarague, read_recorded, table_name
from rich.table import Table
from sklearn.metrics import roc_auc_score

from rgate_integrations.artifacts.folder import read_gate, save_gate
from rgate_integrations.artifacts.heads import HeadsArtifact
from rgate_integrations.engine.loading import DEFAULT_GATE

WHOLE = ("adarague", "calib", "qa-eval", "dba", "llm-eval")
MOST_QUESTIONS = 1_000  # of every other source
MOST_ANSWERS = 300  # of a cell, in a fit
LEAST_ANSWERS = 100  # of a cell that is measured
GROUP_SD = 0.6  # of the level of a source and set: prompts and judges differ
LEAST_RESIDUAL = 0.4
ANCHORS = (30, 100)
ROUNDS = 3
GRID = np.linspace(-5, 6, 221)
COLUMNS = ("simpleqa", "triviaqa", "nq", "mmlu", "params_b")
SLOPES = {"params_b": (0.33, 0.1)}
"""What a line's slope is drawn to, and how far it may be from it: about one logit for ten times the parameters."""
LOGITS = (1.0, 0.25)
"""That of the log-odds of an accuracy: in the one-parameter model they grow as the ability does."""
LONG_TAIL = ("simpleqa", "entity_questions")
SMALL = 14.0  # billions of parameters
STRONG = 70.0
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
FAMILIES = ("gpt", "llama", "gemma", "mi", "claude", "phi", "qwen", "gemini", "deepseek")


@dataclass(frozen=True)
class Answers:
    """Closed-book answers of LLMs, one a row.

    Attributes:
        labels: Question, source, set, LLM and whether it was right.
        states: Hidden states of the question, shape (n, layers, hidden size).
        source, what, llm, group, known, ships: Columns of the labels.
    """

    labels: list[Label]
    states: np.ndarray
    source: np.ndarray
    what: np.ndarray
    llm: np.ndarray
    group: np.ndarray
    known: np.ndarray
    ships: np.ndarray

    @classmethod
    def read(cls, data: Path, cache: Path) -> "Answers":
        """Read all answers, and the hidden states of their questions."""
        labels = [*read_adarague(data), *read_recorded(data, everything=True)]
        # Where the source chose the share of right answers, the level cannot be compared.
        labels = _drawn([each for each in labels if each.ships or not each.llm.endswith("(selected)")])
        states = read_question_states([label.question for label in labels], cache)
        columns = [
            np.array([getattr(label, name) for label in labels])
            for name in ("source", "what", "llm", "group", "known", "ships")
        ]
        return cls(labels, np.stack([states[key(label.question)] for label in labels]), *columns)

    @property
    def trains(self) -> np.ndarray:
        """Which rows may train what ships, and are worth it."""
        poor = np.char.endswith(self.what, "(low quality)")
        return self.ships & ~poor

    @property
    def cells(self) -> np.ndarray:
        """The cell of each row: source, set and LLM."""
        return np.char.add(np.char.add(self.group, "|"), self.llm)

    def fit(self, chosen: np.ndarray, abilities: dict[str, float]) -> tuple[np.ndarray, float]:
        """Fit a knowledge head on some rows, at most `MOST_ANSWERS` of a cell."""
        rng = np.random.default_rng(0)
        rows, weights = [], []
        for cell in np.unique(self.cells[chosen]):
            own = np.flatnonzero(chosen & (self.cells == cell))
            rows.append(rng.permutation(own)[:MOST_ANSWERS])
            # What was drawn stands for all.
            weights += [KNOWN_WEIGHTS[self.source[own[0]]] * len(own) / len(rows[-1])] * len(rows[-1])
        part = np.concatenate(rows)
        examples = HeadExamples(
            self.states[part],
            np.full(len(part), ""),
            self.known[part],
            np.array([abilities.get(llm, 0.0) for llm in self.llm[part]]),
            self.group[part],
            np.array(weights),
        )
        return fit_known(examples, LAYERS, HeadsRecipe())


def _drawn(labels: list[Label]) -> list[Label]:
    """Leave out what is beyond `MOST_QUESTIONS` of a source: the questions that come last by their hash."""
    questions: dict[str, set[str]] = {}
    for label in labels:
        questions.setdefault(label.source, set()).add(label.question)
    drawn = {
        source: found if source in WHOLE else set(sorted(found, key=key)[:MOST_QUESTIONS])
        for source, found in questions.items()
    }
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
        return np.array(
            [math.nan] * (len(COLUMNS) - 1) + [math.log2(SIZES[llm]) if llm in SIZES else math.nan]
        )

    def size(self, llm: str) -> float:
        """Return billions of parameters; infinite where the maker does not say, as the large ones do not."""
        size = 2 ** self.of(llm)[-1]
        return math.inf if math.isnan(size) else float(size)

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
    answers: Answers, logits: np.ndarray, chosen: np.ndarray, prior: dict[str, tuple[float, float]]
) -> dict[str, tuple[float, float]]:
    """Fit abilities and the levels of sources and sets to answers, with a prior an LLM.

    Args:
        answers: The rows.
        logits: What the knowledge head says for ability 0, shape (n,).
        chosen: The rows to fit on.
        prior: Mean and standard deviation by LLM.

    Returns:
        Mean and standard deviation by LLM.
    """
    llms, llm = np.unique(answers.llm[chosen], return_inverse=True)
    groups, group = np.unique(answers.group[chosen], return_inverse=True)
    means, sds = np.array([prior.get(name, (0.0, 1.0)) for name in llms]).T
    columns = np.hstack(
        [
            np.eye(len(llms))[llm] * sds[llm, None],
            np.eye(len(groups))[group] * GROUP_SD,
        ]
    )
    nothing = np.zeros((len(llm), 0))
    offset = logits[chosen] + means[llm]
    found, _ = logistic(columns, nothing, answers.known[chosen], np.ones(len(llm)), 1.0, offset)
    thetas = means + found[: len(llms)] * sds
    p = 1 / (1 + np.exp(-(offset + columns @ found)))
    information = np.bincount(llm, p * (1 - p))
    sets = np.array([len(np.unique(group[llm == number])) for number in range(len(llms))])
    of_labels = 1 / np.maximum(information, 1e-6) + GROUP_SD**2 / sets
    total = np.sqrt(1 / (1 / of_labels + 1 / sds**2))
    return {str(name): (float(t), float(s)) for name, t, s in zip(llms, thetas, total, strict=True)}


@dataclass(frozen=True)
class Fitted:
    """A knowledge head, and the abilities that it was fitted with: mean and standard deviation by LLM."""

    weight: np.ndarray
    bias: float
    abilities: dict[str, tuple[float, float]]

    def logits(self, states: np.ndarray) -> np.ndarray:
        """Return the logit of an LLM of ability 0 for each question."""
        return np.einsum("nlh,lh->n", states.astype(np.float32), self.weight) + self.bias


def fit_together(answers: Answers, published: Published) -> Fitted:
    """Fit head and abilities in turns, on what may ship; Llama-3.1-8B-Instruct has 0."""
    chosen = answers.trains
    thetas = {str(llm): 0.0 for llm in np.unique(answers.llm[chosen])}
    links = _linked(answers, chosen)
    for _ in range(ROUNDS):
        weight, bias = answers.fit(chosen, thetas)
        head = Fitted(weight, bias, {})
        measured = {llm: theta for llm, theta in thetas.items() if llm in links}
        prior = {llm: published.ability(published.of(llm), measured, llm)[:2] for llm in thetas}
        prior[LLAMA] = (0.0, 0.2)
        found = fit_abilities(answers, head.logits(answers.states), chosen, prior)
        shift = found[LLAMA][0]
        found = {llm: (mean - shift, sd) for llm, (mean, sd) in found.items()}
        thetas = {llm: mean for llm, (mean, _) in found.items()}
    return Fitted(weight, bias + shift, found)


def _linked(answers: Answers, chosen: np.ndarray) -> set[str]:
    """Return the LLMs whose labels say how they compare: those that answered more than the long tail."""
    usual = chosen & ~np.isin(answers.what, LONG_TAIL) & ~np.char.endswith(answers.llm, "(selected)")
    return set(np.unique(answers.llm[usual]).tolist())


@dataclass(frozen=True)
class Gate:
    """What scores the questions of a cell.

    Attributes:
        always: P(the kinds that every LLM serves), shape (n,).
        if_known: P(the kinds that it serves if it knows the fact), shape (n,).
        logits: Those of an LLM of ability 0, shape (n,).
    """

    always: np.ndarray
    if_known: np.ndarray
    logits: np.ndarray

    def part(self, rows: np.ndarray) -> "Gate":
        """Return some rows."""
        return Gate(self.always[rows], self.if_known[rows], self.logits[rows])

    def p_known(self, theta: float | np.ndarray, sd: float) -> np.ndarray:
        """Return P(known) of each question; of several abilities, shape (abilities, n)."""
        logits = (self.logits + np.asarray(theta)[..., None]) / math.sqrt(1 + math.pi / 8 * sd**2)
        return self.always + self.if_known / (1 + np.exp(-logits))

    def updated(self, known: np.ndarray, theta: float, sd: float) -> tuple[float, float]:
        """Return mean and standard deviation of an ability after some answers to questions of other sets."""
        p = np.clip(self.p_known(GRID, 0.0), 1e-6, 1 - 1e-6)
        right = known >= 0.5
        likelihood = np.log(p[:, right]).sum(axis=1) + np.log(1 - p[:, ~right]).sum(axis=1)
        log_posterior = likelihood - (GRID - theta) ** 2 / (2 * sd**2)
        posterior = np.exp(log_posterior - log_posterior.max())
        posterior /= posterior.sum()
        mean = float(posterior @ GRID)
        return mean, float(math.sqrt(posterior @ (GRID - mean) ** 2 + GROUP_SD**2))


@dataclass(frozen=True)
class Cell:
    """The figures of one cell, by how the ability is known."""

    llm: str
    what: str
    accuracy: float
    right: np.ndarray
    p_known: dict[str, np.ndarray]


def measure(answers: Answers, published: Published, table: dict[str, float]) -> list[Cell]:
    """Score all cells."""
    shipped: Any = read_gate(DEFAULT_GATE)
    kinds = shipped.kind_probabilities(answers.states)
    served = [
        np.array([kind.answerable == name for kind in shipped.kinds]) for name in ("always", "if_known")
    ]
    always, if_known = (kinds[:, chosen].sum(axis=1) for chosen in served)
    abilities = {llm: table.get(table_name(llm), 0.0) for llm in np.unique(answers.llm).tolist()}
    measured = {llm: abilities[llm] for llm in sorted(_linked(answers, answers.trains))}
    odd = np.array([int(key(label.question), 16) % 2 == 1 for label in answers.labels])
    fitted: dict[tuple[str, str], np.ndarray] = {}
    cells = []
    for name in np.unique(answers.cells):
        rows = np.flatnonzero((answers.cells == name) & ~(odd & np.isin(answers.what, LONG_TAIL)))
        llm, what = str(answers.llm[rows[0]]), str(answers.what[rows[0]])
        skip = what.endswith("(low quality)") or llm.endswith("(selected)")
        if skip or len(rows) < LEAST_ANSWERS:
            continue
        family = _family(llm) if (answers.trains & (answers.llm == llm)).any() else ""
        of_set = what if (answers.trains & (answers.what == what)).any() else ""
        if (family, of_set) not in fitted:
            families = (
                np.array([_family(each) for each in answers.llm])
                if family
                else np.full(len(answers.llm), "-")
            )
            chosen = answers.trains & (families != family) & (answers.what != of_set)
            if of_set in LONG_TAIL:
                chosen |= answers.trains & (families != family) & (answers.what == of_set) & odd
            head = Fitted(*answers.fit(chosen, abilities), {})
            fitted[family, of_set] = head.logits(answers.states)
            CONSOLE.print(f"{len(fitted)} heads", end="\r")
        gate = Gate(always, if_known, fitted[family, of_set])
        theta, sd, _ = published.ability(published.of(llm), measured, llm)
        own = gate.part(rows)
        found = {"unknown": own.p_known(*shipped.default_ability), "by name": own.p_known(theta, sd)}
        others = np.flatnonzero(
            (answers.llm == llm) & (answers.what != what) & ~np.char.endswith(answers.what, "(low quality)")
        )
        for n in ANCHORS:
            if len(others) >= n:
                drawn = np.random.default_rng(0).permutation(others)[:n]
                found[f"{n} answers"] = own.p_known(
                    *gate.part(drawn).updated(answers.known[drawn], theta, sd)
                )
        right = answers.known[rows] >= 0.5
        cells.append(Cell(llm, what, float(right.mean()), right, found))
    return cells


def _family(llm: str) -> str:
    name = llm.lower().replace("chatgpt", "gpt").replace("meta-", "").replace("text-davinci", "gpt")
    return next((family for family in FAMILIES if name.startswith(family)), name)


def show_cells(cells: list[Cell], published: Published) -> None:
    """Print one line a class of LLMs and way of knowing the ability; and all cells."""
    table = Table(title=f"threshold {THRESHOLD}", title_justify="left", box=None)
    columns = (
        "LLMs",
        "ability",
        "cells",
        "accuracy",
        "|P - acc.|",
        "ECE",
        "skipped",
        "of these right",
        "AUC",
    )
    for column in columns:
        table.add_column(column, justify="left" if column in ("LLMs", "ability") else "right")
    ways = dict.fromkeys(way for cell in cells for way in cell.p_known)
    for title, chosen in _classes(cells, published).items():
        for way in ways:
            own = [cell for cell in chosen if way in cell.p_known]
            if own:
                table.add_row(title, way, *_figures(own, way))
    CONSOLE.print(table)
    for cell in cells:
        means = "  ".join(
            f"{way} {p.mean():.2f}/{(p >= THRESHOLD).mean():.0%}" for way, p in cell.p_known.items()
        )
        CONSOLE.print(
            f"{cell.llm:28} {cell.what:18} n {len(cell.right):5} right {cell.accuracy:.2f}  {means}"
        )


def _classes(cells: list[Cell], published: Published) -> dict[str, list[Cell]]:
    usual = [cell for cell in cells if cell.what not in LONG_TAIL]
    return {
        "strong": [cell for cell in usual if published.size(cell.llm) >= STRONG],
        "between": [cell for cell in usual if SMALL <= published.size(cell.llm) < STRONG],
        "small": [cell for cell in usual if published.size(cell.llm) < SMALL],
        "all, long tail": [cell for cell in cells if cell.what in LONG_TAIL],
    }


def _figures(cells: list[Cell], way: str) -> Iterable[str]:
    off, calibration, skipped, right, aucs = [], [], [], [], []
    for cell in cells:
        p = cell.p_known[way]
        off.append(abs(p.mean() - cell.accuracy))
        calibration.append(ece(p, cell.right.astype(float)))
        skipped.append((p >= THRESHOLD).mean())
        right.append((cell.right & (p >= THRESHOLD)).mean())
        if 0 < cell.accuracy < 1:
            aucs.append(roc_auc_score(cell.right, p))
    of_skipped = np.sum(right) / np.sum(skipped) if np.sum(skipped) else math.nan
    accuracy = np.mean([cell.accuracy for cell in cells])
    yield from (f"{len(cells)}", f"{accuracy:.1%}", f"{np.mean(off):.3f}", f"{np.mean(calibration):.3f}")
    yield from (f"{np.mean(skipped):.1%}", f"{of_skipped:.1%}", f"{np.mean(aucs):.3f}")


def table_of(fitted: Fitted, answers: Answers, published: Published) -> dict[str, dict]:
    """Return ability, uncertainty and source of every LLM that there are labels or figures of."""
    linked = _linked(answers, answers.trains)
    measured = {llm: mean for llm, (mean, _) in fitted.abilities.items() if llm in linked}
    found: dict[str, dict] = {}
    for llm in sorted(linked):
        mean, sd = fitted.abilities[llm]
        sources = sorted(set(answers.source[answers.trains & (answers.llm == llm)].tolist()))
        found[table_name(llm)] = _line_of(mean, sd, f"recorded answers ({', '.join(sources)})")
    for name, figures in published.figures.items():
        mean, sd, columns = published.ability(figures, measured)
        if columns and name.lower() not in found:
            urls = published.urls[name].replace(" ; ", ", ")
            found[name.lower()] = _line_of(mean, sd, f"published {columns}: {urls}")
    return dict(sorted(found.items()))


def _line_of(mean: float, sd: float, source: str) -> dict:
    return {"theta": round(mean, 2), "sd": round(sd, 2), "source": source}


def refit_head(folder: Path, fitted: Fitted) -> HeadsArtifact:
    """Put a knowledge head into a saved gate; its metrics stay those of the head before, until `heads` measures."""
    heads: Any = read_gate(folder)
    note = f"python benchmarks/abilities.py --head: {HeadsRecipe()}; weights {KNOWN_WEIGHTS}"
    return replace(
        heads,
        known_weight=fitted.weight.astype(np.float32),
        known_bias=fitted.bias,
        ability_slope=1.0,
        provenance=heads.provenance | {"knowledge": note},
    )


def main() -> None:
    """Run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--cache", type=Path, default=OUT, help="where hidden states are kept")
    parser.add_argument("--table", action="store_true", help="fit the table of abilities that ships")
    parser.add_argument(
        "--head", type=Path, help="folder of a saved gate, whose knowledge head is fitted again"
    )
    arguments = parser.parse_args()
    answers = Answers.read(arguments.data, arguments.cache)
    published = Published(arguments.data / "strong" / "abilities.csv")
    if arguments.table or arguments.head:
        fitted = fit_together(answers, published)
        table = table_of(fitted, answers, published)
        for name, line in table.items():
            CONSOLE.print(f"{name:40} {line['theta']:5.2f} ± {line['sd']:.2f}  {line['source'][:80]}")
        if arguments.table:
            TABLE.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
        if arguments.head:
            save_gate(refit_head(arguments.head, fitted), arguments.head)
        return
    show_cells(measure(answers, published, read_abilities()), published)


if __name__ == "__main__":
    main()
