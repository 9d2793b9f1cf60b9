"""Do the passages hold the answer? Fits the model of P(helps) that ships, on searches with known answers.

    python benchmarks/holds.py --data DIR [--save rgate_integrations/weights/look-first]

No LLM has a part in it. DIR holds the recorded questions adaptive_llama31_8b.*.dev.jsonl, practical.dev.jsonl, and
the corpora hotpot_2wiki, slimplm and retrievalqa with their questions. The passages of a search hold the answer if a
gold answer occurs in them, on word boundaries; questions with answers such as "yes" are left out. Corpora and
questions of SlimPLM and RetrievalQA only measure.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

import numpy as np
from base import CONSOLE, SETS, argument_parser, print_table, read_answers, read_records
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score

from rgate_integrations.gates.passage_utility import (
    FEATURES,
    FILE,
    READ,
    FoundPassage,
    PassageUtilityModel,
    search_features,
)
from rgate_integrations.index import BM25Index, Passage
from rgate_integrations.models.download import PASSAGES, cached_path
from rgate_integrations.runtime.files import write_folder
from rgate_integrations.runtime.text import contains_answer

MULTIHOP = ("hotpotqa", "2wikimultihopqa")
# Small corpora: the contexts of ten questions; four of them and four others are asked.
SMALL, AT_ONCE, ASKED = 150, 10, 4
TEMPLATED = 500
TEMPLATES = ("What is {}?", "Who is {}?", "What is {} known for?", "Tell me about {}.", "When did {} begin?")
SEED, FOLDS, STRENGTH = 0, 5, 0.3
REQUESTS = 0.3  # weight of a practical request, of which there are many
READING, DISTRACTION = 0.7, 0.2
"""Until they are fitted to an LLM's own runs."""


@dataclass(frozen=True)
class Searched:
    """What a search found.

    Attributes:
        question: The question.
        gold: Its gold answers.
        kind: The question set, or ``practical``.
        corpus: What was searched; ``unseen: …`` only measures.
        passages: Ids of what was found, best first.
    """

    question: str
    gold: tuple[str, ...]
    kind: str
    corpus: str
    passages: tuple[str, ...]

    def held(self, passages: dict[str, Passage]) -> bool | None:
        """Whether the passages hold the answer; None if that cannot be told."""
        if self.kind == "practical":
            return False
        if self.kind == "template":
            return any(passages[name].title == self.gold[0] for name in self.passages)
        telling = [g for g in self.gold if len(g) > 2 and g.lower() != "yes"]
        telling = [g for g in telling if not contains_answer(self.question, g)]
        if not telling:
            return None
        text = "\n".join(passages[name].searchable for name in self.passages)
        return any(contains_answer(text, g) for g in telling)


def read_corpora(data: Path) -> dict[str, list[Passage]]:
    """Read all corpora, by name, but for empty passages."""
    leads = cached_path("encyclopedia-leads")
    if leads is None:
        raise FileNotFoundError("Run: rgate download encyclopedia-leads")
    paths = {"leads": leads / PASSAGES}
    for name in ("hotpot_2wiki", "slimplm", "retrievalqa"):
        paths[name] = data / f"corpus.{name}.jsonl.gz"
    corpora = {}
    for name, path in paths.items():
        prefix = "r-" if name == "retrievalqa" else ""  # the others' ids differ
        corpora[name] = []
        for record in read_records(path):
            if record["text"].strip():
                corpora[name].append(Passage(f"{prefix}{record['id']}", record["text"], record["title"]))
    return corpora


def search_all(data: Path, corpora: dict[str, list[Passage]]) -> Iterator[Searched]:
    """Search everything."""
    asked = []
    for name in SETS:
        asked += read_answers(data, name)
    requests = read_records(data / "practical.dev.jsonl")
    for request in requests:
        request |= {"dataset": "practical", "gold_answers": []}
    both = corpora["hotpot_2wiki"] + corpora["leads"]
    yield from search(asked + requests, BM25Index(both), "large")
    outside = [r for r in asked if r["dataset"] in ("nq", "trivia", "squad")]
    yield from search(outside, BM25Index(corpora["leads"]), "leads")
    yield from search(templates(corpora), BM25Index(both), "large")
    yield from search(templates(corpora), BM25Index(corpora["leads"]), "leads")
    multihop = [r for r in asked if r["dataset"] in MULTIHOP]
    by_id = {passage.id: passage for passage in corpora["hotpot_2wiki"]}
    rng = np.random.default_rng(SEED)
    for _ in range(SMALL):
        chosen = rng.choice(len(multihop), AT_ONCE, replace=False)
        context = {}
        for row in chosen:
            context.update({name: by_id[name] for name in multihop[row]["context_ids"] if name in by_id})
        others = rng.choice(len(multihop), ASKED, replace=False)
        some = [multihop[row] for row in (*chosen[:ASKED], *others)]
        yield from search(some, BM25Index(list(context.values())), "a hundred passages")
    unseen = read_records(data / "retrievalqa.jsonl")
    yield from search(unseen, BM25Index(corpora["retrievalqa"]), "unseen: RetrievalQA")
    unseen = read_records(data / "judgment_llama2_7b_v0118.jsonl") + read_records(data / "claims_gpt4.jsonl")
    unseen = [r for r in unseen if r["dataset"] in ("musique", "2wikimultihopqa")]
    yield from search(unseen, BM25Index(corpora["slimplm"]), "unseen: SlimPLM")


def templates(corpora: dict[str, list[Passage]]) -> Iterator[dict]:
    """Give short questions about the titles of passages: a large corpus has them, the leads have few of them."""
    rng = np.random.default_rng(SEED)
    titles = sorted({passage.title for passage in corpora["hotpot_2wiki"] if passage.title})
    for title in rng.choice(titles, TEMPLATED, replace=False):
        asked = TEMPLATES[rng.integers(len(TEMPLATES))].format(title)
        yield {"question": asked, "gold_answers": [str(title)], "dataset": "template"}


def search(records: Iterable[dict], index: BM25Index, corpus: str) -> Iterator[Searched]:
    """Search for the questions of some records."""
    for record in records:
        (hits,) = index.search([record["question"]], READ)
        gold = tuple(record["gold_answers"])
        found = tuple(hit.passage.id for hit in hits)
        yield Searched(record["question"], gold, record["dataset"], corpus, found)


@dataclass(frozen=True)
class Rows:
    """Searches whose label can be told.

    Attributes:
        searches: The searches.
        features: Shape (n, features).
        held: Whether the passages hold the answer, shape (n,).
        weight: Shape (n,).
        fold: Shape (n,); the same for the same question, whatever was searched.
    """

    searches: list[Searched]
    features: np.ndarray
    held: np.ndarray
    weight: np.ndarray
    fold: np.ndarray

    @classmethod
    def of(cls, searches: Iterable[Searched], passages: dict[str, Passage]) -> "Rows":
        """Make rows of searches."""
        kept, features, held, weight, fold = [], [], [], [], []
        for each in searches:
            label = each.held(passages)
            if label is None:
                continue
            found = [FoundPassage(passages[name].text, passages[name].title) for name in each.passages]
            kept.append(each)
            held.append(label)
            features.append(search_features(each.question, found))
            weight.append(REQUESTS if each.kind == "practical" else 1.0)
            fold.append(crc32(each.question.encode()) % FOLDS)
        return cls(kept, np.array(features), np.array(held), np.array(weight), np.array(fold))

    def where(self, attribute: str) -> np.ndarray:
        """Return an attribute of every search."""
        return np.array([getattr(each, attribute) for each in self.searches])

    @property
    def unseen(self) -> np.ndarray:
        """Which rows only measure."""
        return np.char.startswith(self.where("corpus"), "unseen")

    def fit(self, chosen: np.ndarray) -> PassageUtilityModel:
        """Fit on some rows: a logistic regression of standardised features."""
        mean, scale = self.features[chosen].mean(axis=0), self.features[chosen].std(axis=0)
        standard = (self.features[chosen] - mean) / scale
        fitted = LogisticRegression(C=STRENGTH, max_iter=1_000)
        fitted.fit(standard, self.held[chosen], sample_weight=self.weight[chosen])
        weights = fitted.coef_[0] / scale
        return PassageUtilityModel(
            features=FEATURES,
            weights=tuple(float(weight) for weight in weights),
            bias=float(fitted.intercept_[0] - weights @ mean),
            reading=READING,
            distraction=DISTRACTION,
        )

    def held_out(self) -> np.ndarray:
        """Return P(holds) of every row: by question, and by all that trains for what only measures."""
        p_contains_answer = np.zeros(len(self.searches))
        for number in range(FOLDS):
            part = self.fold == number
            p_contains_answer[part] = self.fit(~part & ~self.unseen).p_contains_answer(self.features[part])
        p_contains_answer[self.unseen] = self.fit(~self.unseen).p_contains_answer(self.features[self.unseen])
        return p_contains_answer


def show(rows: Rows, p_contains_answer: np.ndarray) -> dict[str, float]:
    """Print how well the labels are told apart; returns the AUC of each corpus and set."""
    corpora, kinds, found, table = rows.where("corpus"), rows.where("kind"), {}, []
    for corpus in dict.fromkeys(corpora):
        for kind in (*dict.fromkeys(kinds[corpora == corpus]), "all"):
            own = (corpora == corpus) & ((kinds == kind) | (kind == "all"))
            held, p = rows.held[own], p_contains_answer[own]
            shown = ""
            if 0 < held.mean() < 1:
                auc = float(roc_auc_score(held, p))
                found[f"{corpus}: {kind}"] = round(auc, 3)
                shown = f"{auc:.3f}"
            table.append([corpus, kind, str(len(p)), f"{held.mean():.1%}", f"{p.mean():.1%}", shown])
    columns = ["corpus", "questions", "n", "hold it", "mean P", "AUC"]
    print_table(columns, table, "P(the passages hold the answer), held out by question")
    return found


def main() -> None:
    """Run."""
    parser = argument_parser(__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--save", type=Path)
    arguments = parser.parse_args()
    corpora = read_corpora(arguments.data)
    passages = {}
    for corpus in corpora.values():
        passages.update({passage.id: passage for passage in corpus})
    rows = Rows.of(search_all(arguments.data, corpora), passages)
    found = show(rows, rows.held_out())
    model = rows.fit(~rows.unseen)
    for name, weight in zip(model.features, model.weights, strict=True):
        CONSOLE.print(f"{name:12} {weight:7.3f}")
    if arguments.save is not None:
        trained = int((~rows.unseen).sum())
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
            "auc": found,
        }
        saved = model.model_copy(update={"provenance": provenance})
        write_folder(arguments.save, {FILE: saved.model_dump_json(indent=1), "README.md": card(provenance)})


def card(provenance: dict) -> str:
    """Return the model card."""
    lines = [f"| {name} | {auc:.3f} |" for name, auc in provenance["auc"].items()]
    return "\n".join(
        [
            "# look-first",
            "",
            "P(the LLM answers rightly with these passages), from the words of question and passages and P(known).",
            "",
            f"- **Label**: {provenance['label']}; {provenance['searches']:,} searches. No LLM has a part in it.",
            f"- **Recipe**: `{provenance['recipe']}`",
            f"- **Data**: {'; '.join(provenance['data'])}.",
            f"- **Reading** {READING}, **distraction** {DISTRACTION}: set, not fitted; another LLM has others.",
            f"- **Licence of the weights**: {provenance['licence']}.",
            "",
            "| corpus: questions (unseen: had no part in training) | AUC |",
            "|---|---|",
            *lines,
            "",
        ]
    )


if __name__ == "__main__":
    main()
