"""The table of abilities that ships: how much LLMs know, by their recorded answers and by published figures.

    python benchmarks/abilities.py --data FOLDER [--save | --measure]

The folder holds ``adaptive_llama31_8b.*.dev.jsonl``, ``more/`` and ``strong/``. Abilities are fitted together with a
knowledge head, on answers whose licence allows it; Llama-3.1-8B-Instruct has 0. LLMs without such answers are read
off published figures by a regression. Hidden states are kept where `heads` keeps them.

With ``--measure``: how near the shipped gate comes to what LLMs know, by their recorded answers.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from base import CONSOLE, argument_parser, print_table, read_records
from encoder_states import EncoderStates
from head_fit import HeadExamples, HeadsRecipe, fit_known, logistic
from heads import CACHE, GOALS, KNOWN_WEIGHTS, LAYERS, THRESHOLD, key, kinds_of, p_known, read_question_states
from labels import (
    LLAMA,
    TABLE,
    TABLE_NAMES,
    Source,
    read_abilities,
    read_adarague,
    read_practical,
    read_record,
    read_recorded,
    table_name,
)

from rgate_integrations.engine.loading import DEFAULT_GATE
from rgate_integrations.gates.ability import Ability
from rgate_integrations.gates.artifacts import HeadsArtifact
from rgate_integrations.gates.folder import read_gate
from rgate_integrations.gates.probability import logits
from rgate_integrations.tuning.ability import estimate_ability
from rgate_integrations.tuning.evaluation import auc, expected_calibration_error

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
        labels: The columns of `labels.Label`.
        states: Hidden states of the questions, shape (n, layers, hidden size).
    """

    labels: pd.DataFrame
    states: np.ndarray

    @classmethod
    def read(cls, data: Path, cache: Path) -> "Answers":
        """Read answers to at most `MOST_QUESTIONS` of a source, those that come first by their hash."""
        labels = pd.DataFrame(map(vars, [*read_adarague(data), *read_recorded(data)]))
        asked = labels[["source", "question"]].drop_duplicates()
        asked = asked.sort_values("question", key=lambda questions: questions.map(key))
        few = asked.groupby("source").cumcount() < MOST_QUESTIONS
        labels = labels.merge(asked[few | asked.source.isin(WHOLE)])
        labels = labels[~labels.what.str.endswith("(low quality)")].reset_index(drop=True)
        states = read_question_states(labels.question.tolist(), cache)
        return cls(labels, np.stack([states[key(question)] for question in labels.question]))

    def fit(self, abilities: dict[str, float]) -> np.ndarray:
        """Fit a knowledge head, at most `MOST_ANSWERS` of a cell; returns its logits for ability 0, shape (n,)."""
        rng = np.random.default_rng(0)
        rows, weights = [], []
        cells = self.labels.group + "|" + self.labels.llm
        for _, cell in self.labels.groupby(cells):
            drawn = rng.permutation(cell.index)[:MOST_ANSWERS]
            rows.append(drawn)
            # What was drawn stands for all.
            weight = KNOWN_WEIGHTS[cell.source.iloc[0]] * len(cell) / len(drawn)
            weights.append(np.full(len(drawn), weight))
        part = np.concatenate(rows)
        labels = self.labels.loc[part]
        examples = HeadExamples(
            self.states[part],
            labels.known.to_numpy(),
            labels.llm.map(abilities).to_numpy(),
            labels.group.to_numpy(str),
            np.concatenate(weights),
        )
        weight, bias = fit_known(examples, LAYERS, HeadsRecipe())
        return np.einsum("nlh,lh->n", self.states.astype(np.float32), weight) + bias

    def linked(self) -> list[str]:
        """Return the LLMs whose labels say how they compare: those that answered more than the long tail."""
        labels = self.labels
        usual = ~labels.what.isin(LONG_TAIL) & ~labels.llm.str.endswith("(selected)")
        return sorted(labels.llm[usual].unique())


class Published:
    """Published figures of LLMs, and what they say of ability.

    Accuracies are taken as log-odds, and numbers of parameters as logarithms, so that lines fit. Each figure has a
    line of its own, from the LLMs that have both it and labels; they are combined by how well they predict an LLM
    that was left out.
    """

    def __init__(self, path: Path) -> None:
        table = pd.read_csv(path, index_col="llm")
        other_set = table.notes.str.contains("Verified|contamination", na=False)
        table.loc[other_set, "simpleqa"] = math.nan  # SimpleQA Verified is another set
        self.urls = table.source_url
        self.figures = table[[*COLUMNS]].astype(float)
        for column in COLUMNS[:-1]:
            share = self.figures[column] / 100
            self.figures[column] = np.log(share / (1 - share))
        self.figures["params_b"] = np.log2(self.figures["params_b"])

    def of(self, llm: str) -> np.ndarray:
        """Return the figures of an LLM by the name that labels give it; NaN where there are none."""
        name = TABLE_NAMES.get(llm, llm)
        if name in self.figures.index:
            return self.figures.loc[name].to_numpy()
        figures = np.full(len(COLUMNS), math.nan)
        figures[-1] = math.log2(SIZES.get(llm, math.nan))
        return figures

    def ability(
        self, figures: np.ndarray, measured: dict[str, float], without: str = ""
    ) -> tuple[float, float, str]:
        """Return mean and standard deviation of the ability that figures say, and the names of those figures."""
        others = [llm for llm in measured if llm != without]
        thetas = np.array([measured[llm] for llm in others])
        table = np.stack([self.of(llm) for llm in others])
        found = {}
        for number, column in enumerate(COLUMNS):
            both = ~np.isnan(table[:, number])
            if both.sum() >= 3 and not math.isnan(figures[number]):
                slope = SLOPES.get(column, LOGITS)
                found[column] = _line(table[both, number], thetas[both], figures[number], slope)
        # What size says is said again, and better, by figures that were measured.
        if len(found) > 1:
            found.pop("params_b", None)
        if not found:
            return 0.0, 1.0, ""
        means, sds = np.array(list(found.values())).T
        precisions = 1 / sds**2
        # They err alike, so that two of them say less than two independent ones would.
        sd = max(math.sqrt(2 / (1 + len(found)) * len(found) / precisions.sum()), LEAST_RESIDUAL)
        return float(means @ precisions / precisions.sum()), sd, ", ".join(found)


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
    llms, llm = np.unique(answers.labels.llm.to_numpy(str), return_inverse=True)
    groups, group = np.unique(answers.labels.group.to_numpy(str), return_inverse=True)
    means, sds = np.array([prior[name] for name in llms]).T
    columns = np.hstack([np.eye(len(llms))[llm] * sds[llm, None], np.eye(len(groups))[group] * GROUP_SD])
    nothing = np.zeros((len(llm), 0))
    offset = logits + means[llm]
    found, _ = logistic(columns, nothing, answers.labels.known.to_numpy(), np.ones(len(llm)), 1.0, offset)
    thetas = means + found[: len(llms)] * sds
    p = 1 / (1 + np.exp(-(offset + columns @ found)))
    information = np.bincount(llm, p * (1 - p))
    sets = answers.labels.groupby("llm").group.nunique()[llms].to_numpy()
    of_labels = 1 / np.maximum(information, 1e-6) + GROUP_SD**2 / sets
    total = np.sqrt(1 / (1 / of_labels + 1 / sds**2))
    return dict(zip(llms.tolist(), zip(thetas.tolist(), total.tolist(), strict=True), strict=True))


def fit_together(answers: Answers, published: Published) -> dict[str, tuple[float, float]]:
    """Fit head and abilities in turns; returns mean and standard deviation by LLM. Llama-3.1-8B-Instruct has 0."""
    thetas = dict.fromkeys(sorted(answers.labels.llm.unique()), 0.0)
    links = answers.linked()
    found: dict[str, tuple[float, float]] = {}
    for _ in range(ROUNDS):
        logits = answers.fit(thetas)
        measured = {llm: thetas[llm] for llm in links}
        prior = {}
        for llm in thetas:
            prior[llm] = published.ability(published.of(llm), measured, llm)[:2]
        prior[LLAMA] = (0.0, 0.2)
        fitted = fit_abilities(answers, logits, prior)
        for llm, (mean, sd) in fitted.items():
            thetas[llm] = mean - fitted[LLAMA][0]
            found[llm] = (thetas[llm], sd)
    return found


def build_table(answers: Answers, published: Published) -> dict[str, dict]:
    """Return ability, uncertainty and source of every LLM that there are labels or figures of."""
    abilities = fit_together(answers, published)
    found: dict[str, tuple[float, float, str]] = {}
    measured = {}
    for llm in answers.linked():
        mean, sd = abilities[llm]
        measured[llm] = mean
        sources = sorted(answers.labels.source[answers.labels.llm == llm].unique())
        found[table_name(llm)] = (mean, sd, f"recorded answers ({', '.join(sources)})")
    for name in published.figures.index:
        mean, sd, columns = published.ability(published.of(name), measured)
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
        questions: What was asked, as `Asked` holds it.
        right: Whether it answered rightly, shape (n,).
    """

    llm: str
    what: str
    easiness: np.ndarray
    questions: "Asked"
    right: np.ndarray


@dataclass(frozen=True)
class Asked:
    """Questions as both models have read them.

    Attributes:
        kinds: The probability of each kind for each segment of each question.
        first: The encoder's states, shape (n, layers, hidden size).
        closer: The reader's.
    """

    kinds: list[np.ndarray]
    first: np.ndarray
    closer: np.ndarray

    @classmethod
    def read(cls, questions: list[str], cache: Path, shipped: HeadsArtifact) -> "Asked":
        """Read questions, or find what was kept of them."""
        kept = EncoderStates(cache / "encoder")
        kept.fill((question, "") for question in questions)
        states = read_question_states(questions, cache)
        return cls(
            kinds_of(questions, shipped, kept),
            np.stack([kept.whole(question) for question in questions]),
            np.stack([states[key(question)] for question in questions]),
        )

    def part(self, chosen: np.ndarray) -> "Asked":
        """Return some of the questions."""
        return Asked([self.kinds[i] for i in chosen], self.first[chosen], self.closer[chosen])

    def p_known(self, shipped: HeadsArtifact, theta: float, sd: float) -> np.ndarray:
        """Return P(an LLM of some ability knows the answer) of each, as the gate finds it."""
        first = shipped.first_facts.known_logits(self.first, theta, sd)
        closer = logits(shipped.facts.p_fact_known(self.closer, theta, sd))
        return p_known(shipped.segments.kinds, self.kinds, first, closer)[0]


def read_cells(data: Path, cache: Path, shipped: HeadsArtifact) -> list[Cell]:
    """Read the cells with at least `LEAST` answers; of those with more than `MOST`, some that are drawn."""
    records = [*read_adarague(data), *read_recorded(data)]
    for source in MEASURED_ONLY:
        for record in read_records(data / source.path):
            records += read_record(record, source)
    labels = pd.DataFrame(map(vars, records))
    clear = labels.known.isin((0.0, 1.0)) & ~labels.llm.str.endswith("(selected)")
    labels = labels[clear & ~labels.what.str.contains("low")]
    labels = labels.drop_duplicates(["llm", "what", "question"], keep="last")
    labels["cell"] = labels.groupby(["llm", "what"], sort=False).ngroup()
    labels["key"] = labels.question.map(key)
    drawn = labels.sort_values(["cell", "key"]).groupby("cell").head(MOST)
    drawn = drawn.reset_index(drop=True)
    asked = Asked.read(drawn.question.tolist(), cache, shipped)
    cells = []
    for _, cell in drawn.groupby("cell"):
        if len(cell) >= LEAST:
            own = asked.part(cell.index.to_numpy())
            easiness = shipped.facts.known_logits(own.closer, 0.0)
            cells.append(Cell(cell.llm.iloc[0], cell.what.iloc[0], easiness, own, cell.known.to_numpy()))
    return cells


def measure(data: Path, cache: Path) -> None:
    """Print, by strength of the LLM and by what is known of it, how near P(known) comes to its answers."""
    shipped: Any = read_gate(DEFAULT_GATE)
    facts = shipped.facts
    cells, published = read_cells(data, cache, shipped), Published(data / "strong" / "abilities.csv")
    table = read_abilities()
    known = {cell.llm: table[table_name(cell.llm)] for cell in cells if table_name(cell.llm) in table}
    rng = np.random.default_rng(0)
    rows = []
    for cell in cells:
        size = 2 ** published.of(cell.llm)[-1]
        strength = "small" if size < SMALL else "between" if size < STRONG else "strong"
        if cell.what in LONG_TAIL:
            strength = "long tail"
        mean, sd, _ = published.ability(published.of(cell.llm), known, cell.llm)
        abilities = {"nobody": facts.default_ability, "its name": (mean, sd)}
        others = [each for each in cells if each.llm == cell.llm and each.what != cell.what]
        if others:
            easiness = np.concatenate([each.easiness for each in others])
            right = np.concatenate([each.right for each in others])
            asked = rng.permutation(len(right))[:100]
            prior = Ability(cell.llm, mean, max(sd, 0.5), "")
            found = estimate_ability(prior, easiness[asked], facts.ability_slope, right[asked])
            abilities["100 answers"] = (found.theta, found.sd)
        for by, ability in abilities.items():
            p = cell.questions.p_known(shipped, *ability)
            rows.append({"LLMs": strength, "known by": by, **_figures(p, cell.right)})
    printed = []
    for (strength, by), cells_of in pd.DataFrame(rows).groupby(["LLMs", "known by"]):
        mean_of = cells_of.mean(numeric_only=True)
        hits = mean_of.hits / mean_of.skipped
        row = [strength, by, f"{len(cells_of)}", f"{mean_of.right:.1%}", f"{mean_of.off:.3f}"]
        printed.append(
            [*row, f"{mean_of.ece:.3f}", f"{mean_of.skipped:.1%}", f"{hits:.1%}", f"{mean_of.auc:.3f}"]
        )
    columns = ["LLMs", "known by", "cells", "right alone", "|P - right|", "ECE", "skipped"]
    print_table([*columns, "of these right", "AUC"], printed)
    measure_practical(data, cache, shipped)


def measure_practical(data: Path, cache: Path, shipped: HeadsArtifact) -> None:
    """Print how much of each kind of practical requests is retrieved for, by the LLM's ability."""
    labels = pd.DataFrame(map(vars, read_practical(data)))
    table = read_abilities()
    abilities = (min(table.values()), 0.0, 1.0, 2.0, max(table.values()))
    rows = []
    for kind in GOALS:
        questions = labels.question[labels.what == kind].tolist()
        asked = Asked.read(questions, cache, shipped)
        row = [kind, str(len(questions))]
        for theta in abilities:
            p = asked.p_known(shipped, theta, USUAL_SD)
            row.append(f"{np.mean(p < THRESHOLD):.1%}")
        rows.append(row)
    print_table(["retrieved, by ability", "of", *(f"{theta:+.1f}" for theta in abilities)], rows)


def _figures(p: np.ndarray, right: np.ndarray) -> dict[str, float]:
    skipped = p >= THRESHOLD
    return {
        "right": right.mean(),
        "off": abs(p.mean() - right.mean()),
        "ece": expected_calibration_error(p, right),
        "skipped": skipped.mean(),
        "hits": (skipped & (right > 0)).mean(),
        "auc": auc(p, right),
    }


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
    table = build_table(answers, Published(arguments.data / "strong" / "abilities.csv"))
    for name, line in table.items():
        CONSOLE.print(f"{name:40} {line['theta']:5.2f} ± {line['sd']:.2f}  {line['source'][:80]}")
    if arguments.save:
        TABLE.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
