"""Fits the shipped table of abilities: how much LLMs know, by recorded answers and by published figures.

    python benchmarks/abilities.py --data FOLDER [--save | --measure]

FOLDER contains ``adaptive_llama31_8b.*.dev.jsonl``, ``more/`` and ``strong/``. Abilities are fitted together with a
knowledge head, on answers whose licence allows it; Llama-3.1-8B-Instruct has 0. A regression on published figures
gives the abilities of LLMs without such answers. Hidden states share the cache of `heads`.

``--measure`` compares the shipped gate's P(known) with the recorded answers of LLMs.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from base import CONSOLE, argument_parser, print_table, read_records
from head_fit import HeadExamples, HeadsRecipe, fit_known, fit_logistic
from heads import (
    CACHE,
    GOALS,
    KNOWN_WEIGHTS,
    LAYERS,
    THRESHOLD,
    QuestionKinds,
    estimate_p_known,
    fact_states,
    hash_question,
    predict_kinds,
    read_question_states,
)
from labels import (
    LLAMA,
    TABLE,
    Source,
    read_abilities,
    read_adarague,
    read_practical,
    read_record,
    read_recorded,
    table_name,
)
from published import Published

from rgate_integrations.engine.loading import DEFAULT_GATE
from rgate_integrations.gates.ability import Ability
from rgate_integrations.gates.folder import read_gate
from rgate_integrations.gates.heads_artifact import HeadsArtifact
from rgate_integrations.gates.probability import logits
from rgate_integrations.tuning.ability import estimate_ability
from rgate_integrations.tuning.evaluation import auc, expected_calibration_error

WHOLE = ("adarague", "calib", "qa-eval")
MAX_QUESTIONS = 1_000  # of every other source
MAX_FIT_ANSWERS = 300  # of a source, set and LLM, in a fit
GROUP_SD = 0.6  # of a source and set's level, since prompts and judges differ
ROUNDS = 3
LONG_TAIL = ("simpleqa", "entity_questions")
PAGE = Path(__file__).parents[1] / "docs" / "reference" / "abilities.md"


@dataclass(frozen=True)
class Answers:
    """Closed-book answers of LLMs whose licence permits shipping, one a row.

    Attributes:
        labels: The columns of `labels.Label`.
        states: Hidden states of the questions, shape (n, layers, hidden size).
    """

    labels: pd.DataFrame
    states: np.ndarray

    @classmethod
    def read(cls, data: Path, cache: Path) -> "Answers":
        """Read answers to at most `MAX_QUESTIONS` of a source, those with the lowest hashes."""
        labels = pd.DataFrame(map(vars, [*read_adarague(data), *read_recorded(data)]))
        sourced = labels[["source", "question"]].drop_duplicates()
        sourced = sourced.sort_values("question", key=lambda questions: questions.map(hash_question))
        few = sourced.groupby("source").cumcount() < MAX_QUESTIONS
        labels = labels.merge(sourced[few | sourced.source.isin(WHOLE)])
        labels = labels[~labels.what.str.endswith("(low quality)")].reset_index(drop=True)
        states = read_question_states(labels.question.tolist(), cache)
        return cls(labels, np.stack([states[hash_question(question)] for question in labels.question]))

    def fit(self, abilities: dict[str, float]) -> np.ndarray:
        """Fit a knowledge head on up to `MAX_FIT_ANSWERS` a cell; returns its logits for ability 0, shape (n,)."""
        rng = np.random.default_rng(0)
        rows, weights = [], []
        cells = self.labels.group + "|" + self.labels.llm
        for _, cell in self.labels.groupby(cells):
            drawn = rng.permutation(cell.index)[:MAX_FIT_ANSWERS]
            rows.append(drawn)
            # The drawn rows carry the weight of the whole cell.
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

    def find_linked(self) -> list[str]:
        """Return the LLMs whose labels are comparable: those with answers to more than the long tail."""
        labels = self.labels
        usual = ~labels.what.isin(LONG_TAIL) & ~labels.llm.str.endswith("(selected)")
        return sorted(labels.llm[usual].unique())


def fit_abilities(
    answers: Answers, logits: np.ndarray, prior: dict[str, tuple[float, float]]
) -> dict[str, tuple[float, float]]:
    """Fit abilities and the levels of sources and sets, with a prior for each LLM.

    Args:
        answers: The labelled answers.
        logits: The knowledge head's logits for ability 0, shape (n,).
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
    coefficients, _ = fit_logistic(
        columns, nothing, answers.labels.known.to_numpy(), np.ones(len(llm)), 1.0, offset
    )
    thetas = means + coefficients[: len(llms)] * sds
    p = 1 / (1 + np.exp(-(offset + columns @ coefficients)))
    information = np.bincount(llm, p * (1 - p))
    sets = answers.labels.groupby("llm").group.nunique()[llms].to_numpy()
    label_variance = 1 / np.maximum(information, 1e-6) + GROUP_SD**2 / sets
    total_sd = np.sqrt(1 / (1 / label_variance + 1 / sds**2))
    return dict(zip(llms.tolist(), zip(thetas.tolist(), total_sd.tolist(), strict=True), strict=True))


def fit_together(answers: Answers, published: Published) -> dict[str, tuple[float, float]]:
    """Fit head and abilities alternately; returns mean and standard deviation by LLM, 0 for Llama-3.1-8B-Instruct."""
    thetas = dict.fromkeys(sorted(answers.labels.llm.unique()), 0.0)
    links = answers.find_linked()
    abilities: dict[str, tuple[float, float]] = {}
    for _ in range(ROUNDS):
        logits = answers.fit(thetas)
        measured = {llm: thetas[llm] for llm in links}
        prior = {}
        for llm in thetas:
            prior[llm] = published.estimate(published.get_figures(llm), measured, llm)[:2]
        prior[LLAMA] = (0.0, 0.2)
        fitted = fit_abilities(answers, logits, prior)
        for llm, (mean, sd) in fitted.items():
            thetas[llm] = mean - fitted[LLAMA][0]
            abilities[llm] = (thetas[llm], sd)
    return abilities


def build_table(answers: Answers, published: Published) -> dict[str, dict]:
    """Return ability, uncertainty and source of every LLM with labels or figures."""
    abilities = fit_together(answers, published)
    entries: dict[str, tuple[float, float, str]] = {}
    measured = {}
    for llm in answers.find_linked():
        mean, sd = abilities[llm]
        measured[llm] = mean
        sources = sorted(answers.labels.source[answers.labels.llm == llm].unique())
        entries[table_name(llm)] = (mean, sd, f"recorded answers ({', '.join(sources)})")
    for name in published.figures.index:
        mean, sd, columns = published.estimate(published.get_figures(name), measured)
        if columns and name.lower() not in entries:
            urls = published.urls[name].replace(" ; ", ", ")
            entries[name.lower()] = (mean, sd, f"published {columns}: {urls}")
    table = {}
    for name in sorted(entries):
        mean, sd, source = entries[name]
        table[name] = {"theta": round(mean, 2), "sd": round(sd, 2), "source": source}
    return table


def write_page(table: dict[str, dict]) -> None:
    """Write the table into the docs: one row a family, its ablest LLM first."""
    families: dict[str, list[tuple[float, str]]] = {}
    for name, line in table.items():
        lower_end = line["theta"] - line["sd"]
        families.setdefault(re.split("[^a-z]", name)[0], []).append((-lower_end, name))
    rows = []
    for family, llms in families.items():
        listed = ", ".join(f"`{name}` {-theta:+.1f}" for theta, name in sorted(llms))
        rows.append(f"| {family} | {listed} |\n")
    text, head, _ = PAGE.read_text(encoding="utf-8").partition("|---|---|\n")
    PAGE.write_text(text + head + "".join(rows), encoding="utf-8")


MEASURED_ONLY = (
    Source("more/dba_multihop_ten_llms.jsonl.gz", "dba", "none"),
    Source("more/faclens_nq_eq.jsonl.gz", "faclens", "none"),
)
"""Answers without a licence; nothing that ships is made from them."""
MIN_ANSWERS, MAX_CELL_ANSWERS = 100, 600  # answers of a cell
USUAL_SD = 0.4  # of an ability in the table
TOP = {"a twentieth": 0.05, "a tenth": 0.1, "a fifth": 0.2, "all": 1.0}
STRONG, SMALL = 70.0, 14.0  # billions of parameters; LLMs of unpublished size count as strong


@dataclass(frozen=True)
class Cell:
    """One LLM's answers to one set of questions.

    Attributes:
        llm: The LLM.
        what: The set.
        easiness: Logit of P(known) at ability 0, shape (n,).
        questions: The questions' features.
        right: Whether each answer is right, shape (n,).
    """

    llm: str
    what: str
    easiness: np.ndarray
    questions: "QuestionFeatures"
    right: np.ndarray


@dataclass(frozen=True)
class QuestionFeatures:
    """What both models read from questions.

    Attributes:
        kinds: The probabilities of the kinds of each question.
        first: The encoder's states, shape (n, layers, hidden size).
        closer: The reader's states, shape (n, layers, hidden size).
    """

    kinds: list[QuestionKinds]
    first: np.ndarray
    closer: np.ndarray

    @classmethod
    def read(cls, questions: list[str], cache: Path, shipped: HeadsArtifact) -> "QuestionFeatures":
        """Compute the features of questions, or take them from the cache."""
        encoder_states = fact_states(cache)
        encoder_states.fill((question, "") for question in questions)
        reader_states = read_question_states(questions, cache)
        return cls(
            predict_kinds(questions, shipped, cache),
            np.stack([encoder_states.whole(question) for question in questions]),
            np.stack([reader_states[hash_question(question)] for question in questions]),
        )

    def part(self, chosen: np.ndarray) -> "QuestionFeatures":
        """Return the features of the chosen questions, by index."""
        return QuestionFeatures([self.kinds[i] for i in chosen], self.first[chosen], self.closer[chosen])

    def p_known(self, shipped: HeadsArtifact, theta: float, sd: float) -> np.ndarray:
        """Return the gate's P(known) of each question for an LLM of some ability, shape (n,)."""
        first = shipped.first_facts.known_logits(self.first, theta, sd)
        closer = logits(shipped.facts.p_fact_known(self.closer, theta, sd))
        return estimate_p_known(shipped.segments.kinds, self.kinds, first, closer)[0]


def read_cells(data: Path, cache: Path, shipped: HeadsArtifact) -> list[Cell]:
    """Read the cells with at least `MIN_ANSWERS` answers; keeps the first `MAX_CELL_ANSWERS` of a cell, by hash."""
    records = [*read_adarague(data), *read_recorded(data)]
    for source in MEASURED_ONLY:
        for record in read_records(data / source.path):
            records += read_record(record, source)
    labels = pd.DataFrame(map(vars, records))
    clear = labels.known.isin((0.0, 1.0)) & ~labels.llm.str.endswith("(selected)")
    labels = labels[clear & ~labels.what.str.contains("low")]
    labels = labels.drop_duplicates(["llm", "what", "question"], keep="last")
    labels["cell"] = labels.groupby(["llm", "what"], sort=False).ngroup()
    labels["key"] = labels.question.map(hash_question)
    drawn = labels.sort_values(["cell", "key"]).groupby("cell").head(MAX_CELL_ANSWERS)
    drawn = drawn.reset_index(drop=True)
    features = QuestionFeatures.read(drawn.question.tolist(), cache, shipped)
    cells = []
    for _, cell in drawn.groupby("cell"):
        if len(cell) >= MIN_ANSWERS:
            cell_features = features.part(cell.index.to_numpy())
            easiness = shipped.facts.known_logits(cell_features.closer, 0.0)
            cells.append(
                Cell(cell.llm.iloc[0], cell.what.iloc[0], easiness, cell_features, cell.known.to_numpy())
            )
    return cells


def measure(data: Path, cache: Path) -> None:
    """Print how well P(known) matches recorded answers, by the LLM's strength and by the source of its ability."""
    shipped: Any = read_gate(DEFAULT_GATE)
    facts = shipped.facts
    cells, published = read_cells(data, cache, shipped), Published(data / "strong")
    table = read_abilities()
    measured_abilities = {
        cell.llm: table[table_name(cell.llm)] for cell in cells if table_name(cell.llm) in table
    }
    rng = np.random.default_rng(0)
    rows = []
    for cell in cells:
        size = 2 ** published.get_figures(cell.llm).params_b
        strength = "small" if size < SMALL else "between" if size < STRONG else "strong"
        if cell.what in LONG_TAIL:
            strength = "long tail"
        mean, sd, _ = published.estimate(published.get_figures(cell.llm), measured_abilities, cell.llm)
        mean -= sd  # gates decide by the lower end, as `rgate_integrations.gates.ability` does
        abilities = {"nothing": facts.default_ability, "its name": (mean, sd)}
        other_cells = [other for other in cells if other.llm == cell.llm and other.what != cell.what]
        if other_cells:
            easiness = np.concatenate([other.easiness for other in other_cells])
            right = np.concatenate([other.right for other in other_cells])
            sample = rng.permutation(len(right))[:100]
            prior = Ability(cell.llm, mean, max(sd, 0.5), "")
            estimate = estimate_ability(prior, easiness[sample], facts.ability_slope, right[sample])
            abilities["100 answers"] = (estimate.theta, estimate.sd)
        for basis, ability in abilities.items():
            p = cell.questions.p_known(shipped, *ability)
            rows.append({"LLMs": strength, "known by": basis, **_compute_figures(p, cell.right)})
    printed = []
    for (strength, basis), group in pd.DataFrame(rows).groupby(["LLMs", "known by"]):
        means = group.mean(numeric_only=True)
        hits = means.hits / means.skipped
        row = [strength, basis, f"{len(group)}", f"{means.right:.1%}", f"{means.off:.3f}"]
        printed.append([*row, f"{means.ece:.3f}", f"{means.skipped:.1%}", f"{hits:.1%}", f"{means.auc:.3f}"])
    columns = ["LLMs", "known by", "cells", "right alone", "|P - right|", "ECE", "skipped"]
    print_table([*columns, "of these right", "AUC"], printed)
    named = pd.DataFrame(rows).query("`known by` == 'its name'").groupby("LLMs").mean(numeric_only=True)
    tops = [[strength, *(f"{named[column][strength]:.1%}" for column in TOP)] for strength in named.index]
    print_table(["right of the questions with the highest P(known)", *TOP], tops)
    measure_practical(data, cache, shipped)


def measure_practical(data: Path, cache: Path, shipped: HeadsArtifact) -> None:
    """Print the share of each kind of practical requests that the gate retrieves for, by the LLM's ability."""
    labels = pd.DataFrame(map(vars, read_practical(data)))
    table = read_abilities()
    abilities = (min(table.values()), 0.0, 1.0, 2.0, max(table.values()))
    rows = []
    for kind in GOALS:
        questions = labels.question[labels.what == kind].tolist()
        features = QuestionFeatures.read(questions, cache, shipped)
        row = [kind, str(len(questions))]
        for theta in abilities:
            p = features.p_known(shipped, theta, USUAL_SD)
            row.append(f"{np.mean(p < THRESHOLD):.1%}")
        rows.append(row)
    print_table(["retrieved, by ability", "of", *(f"{theta:+.1f}" for theta in abilities)], rows)


def _compute_figures(p: np.ndarray, correct: np.ndarray) -> dict[str, float]:
    skipped = p >= THRESHOLD
    return {
        "right": correct.mean(),
        "off": abs(p.mean() - correct.mean()),
        "ece": expected_calibration_error(p, correct),
        "skipped": skipped.mean(),
        "hits": (skipped & (correct > 0)).mean(),
        "auc": auc(p, correct),
    } | {name: correct[p >= np.quantile(p, 1 - share)].mean() for name, share in TOP.items()}


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--cache", type=Path, default=CACHE, help="folder of cached hidden states")
    parser.add_argument("--save", action="store_true", help="write the table that ships")
    parser.add_argument("--measure", action="store_true", help="measure the shipped gate, and fit nothing")
    arguments = parser.parse_args()
    if arguments.measure:
        measure(arguments.data, arguments.cache)
        return
    answers = Answers.read(arguments.data, arguments.cache)
    table = build_table(answers, Published(arguments.data / "strong"))
    for name, line in table.items():
        CONSOLE.print(f"{name:40} {line['theta']:5.2f} ± {line['sd']:.2f}  {line['source'][:80]}")
    if arguments.save:
        TABLE.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
        write_page(table)


if __name__ == "__main__":
    main()
