"""What looking first brings, from the recorded calls of an LLM in both arms: what is right, and what is read.

    python benchmarks/look_first.py --data DIR [--record benchmarks/out/served]

The record is that of ``benchmarks/served.py``: questions.test.jsonl, and for each LLM its answers without and with
the passages that a hybrid search of 22,610 found. No gate and no model was trained on these questions. DIR holds the
corpora; see `holds`.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from base import OUT, argument_parser, mean_interval, print_table, read_records
from holds import read_corpora

from rgate_integrations import Draft, load_gate
from rgate_integrations.answering.answer_first import AnswerFirst
from rgate_integrations.answering.look_first import LookFirst, is_never_known
from rgate_integrations.engine.loading import DEFAULT_GATES
from rgate_integrations.gates.artifacts.passage_utility import read_utility_model
from rgate_integrations.gates.evidence.search import FoundPassage, search_features
from rgate_integrations.index import Passage
from rgate_integrations.runtime.files import JsonlLog
from rgate_integrations.runtime.text import is_correct

BEGUN = 32  # tokens of an answer that are judged
GAINS = (0.0, 0.1)
BANDS = ((0.0, 1.0), (0.15, 1.0), (0.2, 1.0), (0.3, 1.0), (0.4, 1.0), (0.3, 0.95), (0.3, 0.9), (0.3, 0.8))
COVERED = ("2wiki", "hop", "musique")  # kinds of questions whose passages are in the corpus


@dataclass(frozen=True)
class Runs:
    """The recorded questions of one LLM that have both arms and a gold answer.

    Attributes:
        llm: Its name.
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

    def helps(self, p_known: np.ndarray) -> np.ndarray:
        """Return P(helps) for some P(known)."""
        return read_utility_model().p_helps(self.p_contains_answer, p_known)

    def right(self, retrieve: np.ndarray) -> np.ndarray:
        """Return which answers are right if these questions are retrieved for."""
        return np.where(retrieve, self.read, self.direct)

    def tokens(self, retrieve: np.ndarray, begun: np.ndarray | bool = False) -> np.ndarray:
        """Return how many prompt tokens are read; a begun answer's come on top where it is stopped."""
        extra = np.where(retrieve & begun, self.direct_tokens, 0)
        return np.where(retrieve, self.read_tokens, self.direct_tokens) + extra


def read_runs(record: Path, llm: Path, passages: dict[str, Passage]) -> Runs:
    """Read what is recorded of an LLM."""
    asked = {each["id"]: each for each in read_records(record / "questions.test.jsonl")}
    arms: dict[str, dict[str, dict]] = {"direct": {}, "passages": {}}
    for call in JsonlLog(llm).values():
        if call["meta"]["arm"] in arms:
            arms[call["meta"]["arm"]][call["meta"]["id"]] = call
    questions, drafts, features, kinds, rights, lengths = [], [], [], [], [], []
    for name, question in asked.items():
        if not question["gold_answers"] or name not in arms["direct"] or name not in arms["passages"]:
            continue
        direct, read = arms["direct"][name], arms["passages"][name]
        questions.append(question["question"])
        drafts.append(_draft(direct))
        found = []
        for passage in read["meta"]["passages"]:
            found.append(FoundPassage(passages[passage].text, passages[passage].title))
        features.append(search_features(question["question"], found))
        kinds.append(question["kind"])
        rights.append([is_correct(call["text"], question["gold_answers"]) for call in (direct, read)])
        lengths.append((direct["prompt_tokens"], read["prompt_tokens"]))
    gate, judge = load_gate(on_error="raise"), load_gate(DEFAULT_GATES["llm"], on_error="raise")
    alone = gate.decide_batch(questions)
    begun = judge.decide_batch(questions, drafts=drafts)
    right, tokens = np.array(rights).T, np.array(lengths).T
    return Runs(
        llm.stem,
        np.array(kinds),
        right[0],
        right[1],
        tokens[0],
        tokens[1],
        np.array([decision.p_known for decision in alone]),
        np.array([decision.p_known for decision in begun]),
        read_utility_model().p_contains_answer(np.array(features)),
        np.array([is_never_known(decision) for decision in alone]),
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
    least = np.full(len(runs.kind), options.abstain_below)
    begun = ~settled & (runs.helps(least) - options.min_gain > least)
    p_known = np.where(begun, runs.p_begun, runs.p_known)
    return looked(name, runs, p_known, runs.helps(p_known), options, begun)


def ways(runs: Runs) -> list[Way]:
    """Return all ways."""
    n = len(runs.kind)
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


def show(runs: Runs) -> None:
    """Print the tables of an LLM: of all questions, and of those whose passages are in the corpus and are not."""
    covered = np.isin(runs.kind, COVERED)
    parts = {"all": covered | True, "passages in the corpus": covered, "mostly not in the corpus": ~covered}
    for name, part in parts.items():
        rows = []
        for way in ways(runs):
            right = runs.right(way.retrieve)[part]
            tokens = runs.tokens(way.retrieve, way.begun)[part].mean()
            difference = right.astype(float) - runs.read[part]
            low, high = mean_interval(difference)
            row = [way.name, f"{right.mean():.1%}", f"{difference.mean():+.1%} [{low:+.1%}, {high:+.1%}]"]
            of_always = tokens / runs.read_tokens[part].mean()
            rows.append([*row, f"{way.retrieve[part].mean():.0%}", f"{tokens:.0f}", f"{of_always:.0%}"])
        columns = ["way", "right", "against always", "retrieved", "prompt tokens", "of always"]
        print_table(columns, rows, f"{runs.llm}, {name}, {part.sum()} questions")


def by_band(runs: Runs) -> None:
    """Print what answer first does with other bands of the first look: what it begins, and what it stops."""
    rows = []
    judged_unknown = runs.p_begun < runs.threshold_begun
    for low, high in BANDS:
        unclear = (runs.p_known >= low) & (runs.p_known < high)
        at_once = runs.p_known >= high
        retrieve = np.where(unclear, judged_unknown, runs.p_known < low)
        row = [f"{low:.2f}, {high:.2f}", f"{runs.right(retrieve).mean():.1%}"]
        row += [f"{share.mean():.0%}" for share in (retrieve, unclear, unclear & retrieve)]
        rows.append([*row, f"{at_once.sum()} ({(at_once & judged_unknown).sum()})"])
    columns = ["band", "right", "retrieved", "begun", "stopped", "known at once (of them judged unknown)"]
    print_table(columns, rows, f"{runs.llm}, answer first, by band")


def main() -> None:
    """Run."""
    parser = argument_parser(__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--record", type=Path, default=OUT / "served")
    arguments = parser.parse_args()
    passages = {}
    for corpus in read_corpora(arguments.data).values():
        passages.update({passage.id: passage for passage in corpus})
    for llm in sorted(arguments.record.glob("*.jsonl")):
        if not llm.name.startswith("questions"):
            runs = read_runs(arguments.record, llm, passages)
            show(runs)
            by_band(runs)


if __name__ == "__main__":
    main()
