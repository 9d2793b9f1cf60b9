"""A mixture of questions that no shipped gate was trained on, and the passages that answer them.

``read_mixture`` reads the question sets of a folder (see its README for sources and licences):

==============  ==========  =====================================================================================
kind            share       from
==============  ==========  =====================================================================================
2wiki           20 %        2WikiMultihopQA, SlimPLM's part: the passages are in the corpus
musique         15 %        MuSiQue, SlimPLM's part: the passages are in the corpus
hop             15 %        the first hops of these, asked alone: the passages are in the corpus
trivia          15 %        TriviaQA, SlimPLM's part, and Open Trivia QA to fill it up: most passages are not
nq              15 %        Natural Questions, a part of the training set: most passages are not
common          10 %        what every LLM knows, from ``requests.jsonl`` beside this file
task            10 %        needs no knowledge, from the same; one in three has no one right answer
==============  ==========  =====================================================================================

A question is left out if a shipped gate was trained on it, or on one with nearly the same words. The order is
seeded and spreads every kind evenly, so that any prefix of it is a fair sample of the whole.

``read_training`` returns questions that gates *were* trained on. They are for training, never for the test.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from base import read_answers, read_records
from labels import read_labels

from rgate_integrations.index import Passage, read_passages
from rgate_integrations.models.download import corpus_path

SHARES = {"2wiki": 20, "musique": 15, "hop": 15, "trivia": 15, "nq": 15, "common": 10, "task": 10}
TRAINING_SHARES = {"hotpotqa": 35, "2wikimultihopqa": 25, "trivia": 20, "nq": 20}
SLIMPLM = ("claims_gpt4", "judgment_llama2_7b_v0118", "judgment_llama2_7b")
SEED, NEAR = 0, 0.75


@dataclass(frozen=True)
class Question:
    """A question with its gold answers.

    Attributes:
        id: Unique.
        kind: See the module.
        question: The text.
        gold_answers: Any of them is right; empty if there is no short right answer.
        part: ``"test"``, or ``"train"`` if gates were trained on it.
        source: The question set.
    """

    id: str
    kind: str
    question: str
    gold_answers: tuple[str, ...]
    part: str
    source: str


def read_mixture(data: Path | None, total: int = 600, seed: int = SEED) -> list[Question]:
    """Return the test questions in their order.

    Args:
        data: The folder with the question sets; None for the requests beside this file alone.
        total: Maximum number of questions. A kind with fewer than its share contributes all of them.
        seed: Seed of choice and order.
    """
    if data is None:
        return draw_in_order(_read_requests(), {"common": 50, "task": 50}, total, seed)
    kinds = {
        "2wiki": _read_slimplm(data, "2wikimultihopqa", "2wiki"),
        "musique": _read_slimplm(data, "musique", "musique"),
        "hop": _read_first_hops(data),
        "trivia": _read_slimplm(data, "trivia", "trivia"),
        "nq": _read_nq(data),
        **_read_requests(),
    }
    trained_on = NearDuplicates(label.question for label in read_labels(data))
    for kind, questions in kinds.items():
        kinds[kind] = [question for question in questions if question.question not in trained_on]
    quota = total * SHARES["trivia"] // 100
    trivia = {question.id: question for question in kinds["trivia"]}
    for question in _read_open_trivia(data):
        if len(trivia) < quota and question.question not in trained_on:
            trivia[question.id] = question
    kinds["trivia"] = list(trivia.values())
    return draw_in_order(kinds, SHARES, total, seed)


def read_training(data: Path, total: int = 600, seed: int = SEED) -> list[Question]:
    """Return questions with recorded answers of an 8B LLM, in order; the shipped gates were trained on them."""
    kinds = {}
    for name in TRAINING_SHARES:
        records = read_answers(data, name)
        kinds[name] = [_make_question(r["id"], name, r, "train", "adarague") for r in records]
    return draw_in_order(kinds, TRAINING_SHARES, total, seed)


def read_corpus(data: Path | None) -> list[Passage]:
    """Return all passages: the encyclopaedia leads and, with a folder, its two corpora."""
    paths = [corpus_path("encyclopedia-leads")]
    if data is not None:
        paths = [data / "corpus.hotpot_2wiki.jsonl.gz", data / "corpus.slimplm.jsonl.gz", *paths]
    return [passage for path in paths for passage in read_passages(path)]


class NearDuplicates:
    """An index of questions; contains a question if one of them has nearly the same words."""

    def __init__(self, questions: Iterable[str]) -> None:
        self._words = list({_tokenize(question) for question in questions})
        self._rows: dict[str, list[int]] = defaultdict(list)
        for row, words in enumerate(self._words):
            for word in words:
                self._rows[word].append(row)

    def __contains__(self, question: str) -> bool:
        words = _tokenize(question)
        by_rarity = sorted(words, key=lambda word: len(self._rows.get(word, ())))
        # A near duplicate lacks at most a quarter of the words, so it has one of any quarter of them plus one.
        for word in by_rarity[: 1 + int(len(words) * (1 - NEAR))]:
            for row in self._rows.get(word, ()):
                other = self._words[row]
                if len(words & other) >= NEAR * len(words | other):
                    return True
        return False


def draw_in_order(
    kinds: dict[str, list[Question]], shares: dict[str, int], total: int, seed: int
) -> list[Question]:
    """Draw each kind by its share, and spread every kind evenly over the order."""
    rng = np.random.default_rng(seed)
    positioned = []
    for kind, share in shares.items():
        quota = total * share // 100
        unique = list({question.id: question for question in kinds[kind]}.values())
        chosen = [unique[row] for row in rng.permutation(len(unique))[:quota]]
        shift = rng.random()
        for number, question in enumerate(chosen):
            # Positions follow the requested share, so that a kind that runs out does not change the prefix.
            positioned.append(((number + shift) / quota, question))
    positioned.sort(key=lambda pair: pair[0])
    return [question for _, question in positioned]


def _read_slimplm(data: Path, dataset: str, kind: str) -> list[Question]:
    questions = []
    for name in SLIMPLM:
        for record in read_records(data / f"{name}.jsonl"):
            if record["dataset"] == dataset and record["gold_answers"]:
                questions.append(_make_question(record["id"], kind, record, "test", "slimplm"))
    return questions


def _read_first_hops(data: Path) -> list[Question]:
    """Return the hops of multi-hop questions that stand alone, without a reference such as #1."""
    questions = {}
    for name in SLIMPLM[:2]:
        for record in read_records(data / f"{name}.jsonl"):
            for number, hop in enumerate(record.get("question_decomposition") or ()):
                if "#" in hop["question"]:
                    continue
                hop_record = {"question": _phrase_question(hop["question"]), "gold_answers": [hop["answer"]]}
                questions[hop_record["question"]] = _make_question(
                    f"{record['id']}.{number}", "hop", hop_record, "test", "slimplm"
                )
    return list(questions.values())


def _phrase_question(hop: str) -> str:
    """Turn a relation, such as ``Green >> performer``, into a question."""
    if ">>" not in hop:
        return hop
    subject, relation = map(str.strip, hop.split(">>"))
    return _RELATIONS.get(relation, "What is the {relation} of {subject}?").format(
        subject=subject, relation=relation
    )


_RELATIONS = {
    "performer": "Who is the performer of {subject}?",
    "place of birth": "Where was {subject} born?",
    "place of death": "Where did {subject} die?",
    "located in the administrative territorial entity": "In which administrative area is {subject} located?",
    "country": "In which country is {subject}?",
    "headquarters location": "Where is the headquarters of {subject}?",
    "member of sports team": "Which sports team is {subject} a member of?",
    "lyrics by": "Who wrote the lyrics of {subject}?",
    "director": "Who directed {subject}?",
    "author": "Who is the author of {subject}?",
    "educated at": "Where was {subject} educated?",
    "part of": "What is {subject} a part of?",
}


def _read_open_trivia(data: Path) -> Iterator[Question]:
    """Yield the questions that make sense without their multiple-choice options."""
    for record in read_records(data / "open_trivia.questions.jsonl.gz"):
        question, gold = record["question"], record["gold_answers"]
        is_open = re.match(r"(who|what|where|when|in (what|which)|how many)\b", question.lower())
        names_options = re.search(r"\b(these|this|following|not|all of|picture|quiz)\b", question.lower())
        is_short = len(gold) == 1 and len(gold[0]) > 2 and len(gold[0].split()) <= 3
        if is_open and not names_options and is_short and question.endswith("?") and len(question) < 150:
            yield _make_question(record["id"], "trivia", record, "test", "open trivia")


def _read_nq(data: Path) -> list[Question]:
    questions = []
    for record in read_records(data / "nq_train_part.questions.jsonl.gz"):
        if all(len(answer.split()) <= 5 for answer in record["gold_answers"]):
            questions.append(_make_question(record["id"], "nq", record, "test", "natural questions"))
    return questions


def _read_requests() -> dict[str, list[Question]]:
    by_kind: dict[str, list[Question]] = {"common": [], "task": []}
    for record in read_records(Path(__file__).parent / "requests.jsonl"):
        by_kind[record["kind"]].append(
            _make_question(record["id"], record["kind"], record, "test", "written here")
        )
    return by_kind


def _make_question(name: str, kind: str, record: dict[str, Any], part: str, source: str) -> Question:
    gold = tuple(dict.fromkeys(record["gold_answers"]))
    return Question(f"{kind}:{name}", kind, record["question"].strip(), gold, part, source)


def _tokenize(question: str) -> frozenset[str]:
    return frozenset(re.findall(r"\w+", question.casefold()))
