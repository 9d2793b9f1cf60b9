"""The table of abilities that ships: how much LLMs know, by their recorded answers and by published figures.

    python benchmarks/abilities.py --data FOLDER [--save | --measure]

The folder holds ``adaptive_llama31_8b.*.dev.jsonl``, ``more/`` and ``strong/``. Abilities are fitted together with a
knowledge head, on answers whose licence allows it; Llama-3.1-8B-Instruct has 0. LLMs without such answers are read
off published figures by a regression. Hidden states are kept where `heads` keeps them.

With ``--measure``: how near the shipped gate comes to what LLMs know, by their recorded answers.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from base import CONSOLE, argument_parser, print_table, read_records
from head_fit import HeadExamples, HeadsRecipe, fit_known, logistic
from heads import (
    CACHE,
    GOALS,
    KNOWN_WEIGHTS,
    LAYERS,
    THRESHOLD,
    fact_states,
    key,
    kinds_of,
    p_known,
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
from rgate_integrations.gates.artifacts import HeadsArtifact
from rgate_integrations.gates.folder import read_gate
from rgate_integrations.gates.probability import logits
from rgate_integrations.tuning.ability import estimate_ability
from rgate_integrations.tuning.evaluation import auc, expected_calibration_error

WHOLE = ("adarague", "calib", "qa-eval")
MOST_QUESTIONS = 1_000  # of every other source
MOST_ANSWERS = 300  # of a source, set and LLM, in a fit
GROUP_SD = 0.6  # of the level of a source and set: prompts and judges differ
ROUNDS = 3
LONG_TAIL = ("simpleqa", "entity_questions")
PAGE = Path(__file__).parents[1] / "docs" / "reference" / "abilities.md"


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


def write_page(table: dict[str, dict]) -> None:
    """Write the table into the documentation: a row a family, its ablest LLM first."""
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
"""Answers without a licence, of which nothing that ships is made."""
LEAST, MOST = 100, 600  # answers of a cell
USUAL_SD = 0.4  # of an ability in the table
TOP = {"a twentieth": 0.05, "a tenth": 0.1, "a fifth": 0.2, "all": 1.0}
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
        kept = fact_states(cache)
        kept.fill((question, "") for question in questions)
        states = read_question_states(questions, cache)
        return cls(
            kinds_of(questions, shipped, cache),
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
    cells, published = read_cells(data, cache, shipped), Published(data / "strong")
    table = read_abilities()
    known = {cell.llm: table[table_name(cell.llm)] for cell in cells if table_name(cell.llm) in table}
    rng = np.random.default_rng(0)
    rows = []
    for cell in cells:
        size = 2 ** published.of(cell.llm).params_b
        strength = "small" if size < SMALL else "between" if size < STRONG else "strong"
        if cell.what in LONG_TAIL:
            strength = "long tail"
        mean, sd, _ = published.ability(published.of(cell.llm), known, cell.llm)
        mean -= sd  # gates decide by the lower end, as `rgate_integrations.gates.ability` does
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
    named = pd.DataFrame(rows).query("`known by` == 'its name'").groupby("LLMs").mean(numeric_only=True)
    tops = [[strength, *(f"{named[column][strength]:.1%}" for column in TOP)] for strength in named.index]
    print_table(["right of the questions with the highest P(known)", *TOP], tops)
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
    } | {name: right[p >= np.quantile(p, 1 - share)].mean() for name, share in TOP.items()}


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
    table = build_table(answers, Published(arguments.data / "strong"))
    for name, line in table.items():
        CONSOLE.print(f"{name:40} {line['theta']:5.2f} ± {line['sd']:.2f}  {line['source'][:80]}")
    if arguments.save:
        TABLE.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
        write_page(table)


if __name__ == "__main__":
    main()
