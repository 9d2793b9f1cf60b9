"""Do the passages contain the answer? Fits the shipped model of P(helps), on searches with known answers.

    python benchmarks/holds.py --data DIR [--save rgate_integrations/weights/look-first]

No LLM is involved. DIR contains the recorded questions adaptive_llama31_8b.*.dev.jsonl, practical.dev.jsonl, and the
corpora hotpot_2wiki, slimplm and retrievalqa with their questions. Passages contain the answer if a gold answer
occurs in them, on word boundaries; questions with answers such as "yes" are left out. SlimPLM and RetrievalQA only
measure.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias
from zlib import crc32

import numpy as np
import pandas as pd
from base import CONSOLE, SETS, argument_parser, print_table, read_answers, read_records
from sklearn.linear_model import LogisticRegression

from rgate_integrations.gates.passage_utility import (
    FILE,
    READ,
    SEARCH_FEATURES,
    PassageUtilityModel,
    search_features,
)
from rgate_integrations.index import BM25Index, Passage
from rgate_integrations.models.download import corpus_path
from rgate_integrations.runtime.files import write_folder
from rgate_integrations.runtime.text import contains_answer
from rgate_integrations.tuning.evaluation import auc

MULTIHOP = ("hotpotqa", "2wikimultihopqa")
# Small corpora: the contexts of ten questions. Four of these questions and four others search it.
SMALL, AT_ONCE, ASKED = 150, 10, 4
TEMPLATED = 500
TEMPLATES = ("What is {}?", "Who is {}?", "What is {} known for?", "Tell me about {}.", "When did {} begin?")
SEED, FOLDS, STRENGTH = 0, 5, 0.3
REQUESTS = 0.3  # weight of a practical request; there are many
READING, DISTRACTION = 0.7, 0.2
"""Defaults, until they are fitted to an LLM's own runs."""


Search: TypeAlias = dict[str, Any]
"""A search: the ``question``, its ``gold`` answers, its ``kind`` (the question set, practical or template), the
``corpus`` (``unseen: …`` only measures), and the ``passages`` that were found, best first."""


def holds_answer(search: Search) -> bool | None:
    """Return whether the passages contain the answer; None if that cannot be told."""
    if search["kind"] == "practical":
        return False
    if search["kind"] == "template":
        return any(passage.title == search["gold"][0] for passage in search["passages"])
    telling = []
    for gold in search["gold"]:
        if len(gold) > 2 and gold.lower() != "yes" and not contains_answer(search["question"], gold):
            telling.append(gold)
    if not telling:
        return None
    text = "\n".join(passage.searchable for passage in search["passages"])
    return any(contains_answer(text, gold) for gold in telling)


def read_corpora(data: Path) -> dict[str, list[Passage]]:
    """Return the passages of each corpus, by its name; drops empty ones."""
    paths = {"leads": corpus_path("encyclopedia-leads")}
    for name in ("hotpot_2wiki", "slimplm", "retrievalqa"):
        paths[name] = data / f"corpus.{name}.jsonl.gz"
    corpora = {}
    for name, path in paths.items():
        corpora[name] = []
        for record in read_records(path):
            if record["text"].strip():
                corpora[name].append(Passage(str(record["id"]), record["text"], record["title"]))
    return corpora


def search_all(data: Path) -> Iterator[Search]:
    """Search every corpus with its questions."""
    corpora = read_corpora(data)
    questions = []
    for name in SETS:
        questions += read_answers(data, name)
    requests = read_records(data / "practical.dev.jsonl")
    for request in requests:
        request |= {"dataset": "practical", "gold_answers": []}
    large = corpora["hotpot_2wiki"] + corpora["leads"]
    yield from search(questions + requests, BM25Index(large), "large")
    outside = [r for r in questions if r["dataset"] in ("nq", "trivia", "squad")]
    yield from search(outside, BM25Index(corpora["leads"]), "leads")
    yield from search(make_template_questions(corpora), BM25Index(large), "large")
    yield from search(make_template_questions(corpora), BM25Index(corpora["leads"]), "leads")
    multihop = [r for r in questions if r["dataset"] in MULTIHOP]
    by_id = {passage.id: passage for passage in corpora["hotpot_2wiki"]}
    rng = np.random.default_rng(SEED)
    for _ in range(SMALL):
        chosen = rng.choice(len(multihop), AT_ONCE, replace=False)
        names = dict.fromkeys(name for row in chosen for name in multihop[row]["context_ids"])
        context = [by_id[name] for name in names if name in by_id]
        other_rows = rng.choice(len(multihop), ASKED, replace=False)
        batch = [multihop[row] for row in (*chosen[:ASKED], *other_rows)]
        yield from search(batch, BM25Index(context), "a hundred passages")
    unseen = read_records(data / "retrievalqa.jsonl")
    yield from search(unseen, BM25Index(corpora["retrievalqa"]), "unseen: RetrievalQA")
    unseen = read_records(data / "judgment_llama2_7b_v0118.jsonl") + read_records(data / "claims_gpt4.jsonl")
    unseen = [r for r in unseen if r["dataset"] in ("musique", "2wikimultihopqa")]
    yield from search(unseen, BM25Index(corpora["slimplm"]), "unseen: SlimPLM")


def make_template_questions(corpora: dict[str, list[Passage]]) -> Iterator[dict]:
    """Yield short questions about titles of passages: the large corpus contains all of them, the leads a few."""
    rng = np.random.default_rng(SEED)
    titles = sorted({passage.title for passage in corpora["hotpot_2wiki"] if passage.title})
    for title in rng.choice(titles, TEMPLATED, replace=False):
        question = TEMPLATES[rng.integers(len(TEMPLATES))].format(title)
        yield {"question": question, "gold_answers": [str(title)], "dataset": "template"}


def search(records: Iterable[dict], index: BM25Index, corpus: str) -> Iterator[Search]:
    """Yield the search of each record's question."""
    for record in records:
        (hits,) = index.search([record["question"]], READ)
        yield {
            "question": record["question"],
            "gold": record["gold_answers"],
            "kind": record["dataset"],
            "corpus": corpus,
            "passages": [hit.passage for hit in hits],
        }


@dataclass(frozen=True)
class Rows:
    """Labelled searches, one a row.

    Attributes:
        table: ``kind`` and ``corpus``; whether the passages contain the answer (``holds``); ``weight``; ``fold``,
            which depends on the question alone; and ``unseen``, true for rows that only measure.
        features: Shape (n, features).
    """

    table: pd.DataFrame
    features: np.ndarray

    @classmethod
    def from_searches(cls, searches: Iterable[Search]) -> "Rows":
        """Label searches and compute their features; drops those without a label."""
        rows, features = [], []
        for record in searches:
            holds = holds_answer(record)
            if holds is None:
                continue
            row = {"kind": record["kind"], "corpus": record["corpus"], "holds": holds}
            row["weight"] = REQUESTS if record["kind"] == "practical" else 1.0
            row["fold"] = crc32(record["question"].encode()) % FOLDS
            rows.append(row)
            features.append(search_features(record["question"], record["passages"]))
        table = pd.DataFrame(rows)
        return cls(table.assign(unseen=table.corpus.str.startswith("unseen")), np.array(features))

    def fit(self, chosen: pd.Series) -> PassageUtilityModel:
        """Fit a logistic regression on the standardised features of the chosen rows."""
        features, table = self.features[chosen], self.table[chosen]
        mean, scale = features.mean(axis=0), features.std(axis=0)
        fitted = LogisticRegression(C=STRENGTH, max_iter=1_000)
        fitted.fit((features - mean) / scale, table.holds, sample_weight=table.weight)
        weights = fitted.coef_[0] / scale
        return PassageUtilityModel(
            weights=tuple(weights.tolist()),
            bias=float(fitted.intercept_[0] - weights @ mean),
            reading=READING,
            distraction=DISTRACTION,
        )

    def predict_held_out(self) -> np.ndarray:
        """Return held-out P(holds), shape (n,): cross-validated by question; unseen rows by the fit on all others."""
        unseen, fold = self.table.unseen, self.table.fold
        p_contains_answer = self.fit(~unseen).p_contains_answer(self.features)
        for number in range(FOLDS):
            part = (fold == number) & ~unseen
            model = self.fit((fold != number) & ~unseen)
            p_contains_answer[part] = model.p_contains_answer(self.features[part])
        return p_contains_answer


def show(rows: Rows) -> dict[str, float]:
    """Print the AUC and calibration; returns the AUC of each corpus and question set."""
    table = rows.table.assign(p=rows.predict_held_out())
    aucs, printed = {}, []
    for corpus, searches in table.groupby("corpus", sort=False):
        for kind in (*searches.kind.unique(), "all"):
            group = searches if kind == "all" else searches[searches.kind == kind]
            area = auc(group.p, group.holds)
            if not math.isnan(area):
                aucs[f"{corpus}: {kind}"] = round(area, 3)
            numbers = f"{group.holds.mean():.1%}", f"{group.p.mean():.1%}", f"{area:.3f}"
            printed.append([corpus, kind, str(len(group)), *numbers])
    columns = ["corpus", "questions", "n", "hold it", "mean P", "AUC"]
    print_table(columns, printed, "P(the passages hold the answer), held out by question")
    return aucs


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--save", type=Path)
    arguments = parser.parse_args()
    rows = Rows.from_searches(search_all(arguments.data))
    aucs = show(rows)
    model = rows.fit(~rows.table.unseen)
    for name, weight in zip(SEARCH_FEATURES, model.weights, strict=True):
        CONSOLE.print(f"{name:12} {weight:7.3f}")
    if arguments.save is not None:
        trained = int((~rows.table.unseen).sum())
        provenance = {
            "recipe": "python benchmarks/holds.py",
            "label": "a gold answer occurs in the passages",
            "searches": trained,
            "data": [
                "AdaRAGUE, MIT",
                "practical requests, CC0, CC BY 3.0, CC BY 4.0, Apache-2.0",
                "templates",
            ],
            "licence": "Apache-2.0",
            "auc": aucs,
        }
        saved = model.model_copy(update={"provenance": provenance})
        write_folder(
            arguments.save, {FILE: saved.model_dump_json(indent=1), "README.md": format_card(provenance)}
        )


def format_card(provenance: dict) -> str:
    """Return the model card."""
    card = f"""# look-first

P(the LLM answers correctly with these passages), from P(known) and the words of the question and the passages.

- **Label**: {provenance["label"]}; {provenance["searches"]:,} searches. No LLM is involved.
- **Recipe**: `{provenance["recipe"]}`
- **Data**: {"; ".join(provenance["data"])}.
- **Reading** {READING}, **distraction** {DISTRACTION}: how often the LLM finds an answer in the passages, and how
  often passages without it mislead an LLM that knows it. Both are guesses.
- **Licence of the weights**: {provenance["licence"]}.

In the table, *large* has 18,438 passages, *leads* is an encyclopaedia; *unseen* corpora took no part in training.

| corpus: questions | AUC of P(the passages hold the answer) |
|---|---|
"""
    for name, area in provenance["auc"].items():
        card += f"| {name} | {area:.3f} |\n"
    return card


if __name__ == "__main__":
    main()
