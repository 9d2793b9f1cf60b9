"""The requests of `traffic`, the passages that their applications search, and counts of decisions."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from base import read_records
from corpus_domains import read_docstrings

from rgate_integrations.decision import Request
from rgate_integrations.index import Passage, read_passages
from rgate_integrations.models.download import corpus_path
from rgate_integrations.tuning.evaluation import wilson

FOLDER = Path(__file__).parent / "traffic"
APPLICATIONS = {
    "library": "docs assistant of a software library",
    "helpdesk": "help desk of a company",
    "encyclopedia": "general assistant over an encyclopaedia",
}
LIBRARY = "networkx"
K = 5


@dataclass(frozen=True)
class LabelledRequest:
    """A request to an application.

    Attributes:
        id: Unique.
        kind: One of the kinds that the README of ``traffic/`` lists.
        needs_passages: Whether an LLM needs passages to answer it.
        request: The question and its earlier turns.
        gold_answers: Any of them is right; empty if there is no short right answer.
    """

    id: str
    kind: str
    needs_passages: bool
    request: Request
    gold_answers: tuple[str, ...] = ()

    @property
    def query(self) -> str:
        """The search query: the user's turn before, and the question."""
        earlier = [line.removeprefix("user: ") for line in self.request.history if line.startswith("user: ")]
        return " ".join([*earlier[-1:], self.request.question])


@dataclass(frozen=True)
class Choice:
    """A way's decision about one request, and what deciding cost.

    Attributes:
        retrieve: Whether passages are read.
        seconds: Time that it took.
        prompt: Tokens that an LLM read for it.
        written: Tokens that an LLM wrote for it.
        calls: Calls of an LLM.
    """

    retrieve: bool
    seconds: float = 0.0
    prompt: int = 0
    written: int = 0
    calls: int = 0


Decide = Callable[[LabelledRequest], Choice]
Choices = dict[str, list[Choice]]


def read_traffic(application: str) -> list[LabelledRequest]:
    """Return the requests to an application."""
    requests = []
    for record in read_records(FOLDER / f"{application}.jsonl"):
        request = Request(record["question"], history=record.get("history", ()))
        gold = tuple(record.get("gold_answers", ()))
        requests.append(
            LabelledRequest(record["id"], record["kind"], record["needs_passages"], request, gold)
        )
    return requests


def read_corpus(application: str) -> list[Passage]:
    """Return the passages that an application searches."""
    if application == "library":
        texts = read_docstrings(LIBRARY)
        return [Passage(str(number), text) for number, text in enumerate(texts)]
    if application == "helpdesk":
        records = read_records(FOLDER / "handbook.jsonl")
        return [Passage(str(i), record["text"], record["title"]) for i, record in enumerate(records)]
    return list(read_passages(corpus_path("encyclopedia-leads")))


def pick(requests: Sequence[LabelledRequest], limit: int | None) -> list[LabelledRequest]:
    """Return at most ``limit`` requests, spread evenly over the day's kinds."""
    if limit is None or limit >= len(requests):
        return list(requests)
    return [requests[number * len(requests) // limit] for number in range(limit)]


def count_skipped(
    requests: Sequence[LabelledRequest], choices: Sequence[Choice], *, needs_passages: bool
) -> tuple[int, int]:
    """Return how many requests with a label were skipped, and how many there are."""
    skipped = [
        not choice.retrieve
        for labelled, choice in zip(requests, choices, strict=True)
        if labelled.needs_passages == needs_passages
    ]
    return sum(skipped), len(skipped)


def share_cell(skipped: int, n: int) -> str:
    """Return a share and its interval in percent, for a table."""
    if not n:
        return ""
    low, high = wilson(skipped / n, n)
    return f"{100 * skipped / n:.1f} [{100 * low:.1f}, {100 * high:.1f}]"
