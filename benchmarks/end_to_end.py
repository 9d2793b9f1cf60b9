"""What a gate saves, end to end: every way to answer as a chain, with an LLM that costs something.

    python benchmarks/end_to_end.py --limit 40                                  (make bench)
    python benchmarks/end_to_end.py --data DIR --llm qwen2.5-coder-1.5b-instruct --limit 400 [--recorded]

DIR holds the question sets and corpora that `mixture` names; without it the questions are those of
``requests.jsonl``, and the encyclopaedia leads are searched. The LLM runs on a llama.cpp server, or is any
OpenAI-compatible one by ``--url``. Every call is made once and kept (see `served`), so a run that was stopped goes
on, and one with ``--recorded`` asks nothing: it takes the questions that are in the record.

An LLM's time is counted from its tokens, at the speed of the fastest tenth of the recorded calls, and what gate,
search and chains take is their CPU time, so that other work on the machine changes neither. ``--times recorded``
takes the clock instead, for an idle machine.
"""

import argparse
import contextlib
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from answer_tables import by_kind, overview
from langchain_core.callbacks import BaseCallbackHandler
from mixture import Question
from rich.console import Console
from rich.table import Table
from served import (
    OUT,
    Clock,
    NotRecorded,
    Record,
    RecordedChat,
    Speed,
    both_arms,
    open_index,
    questions,
    server,
)
from ways import Ways

from rgate_integrations.prompts import ANSWER_WITH_PASSAGES
from rgate_integrations.runtime.text import is_correct, normalise, token_f1

CONSOLE = Console(width=230, highlight=False)
PRICES = Path(__file__).parent / "prices.json"


@dataclass
class Answered:
    """One question, answered in one way.

    Attributes:
        way: The way.
        id: The question.
        kind: Its kind.
        right: Whether a gold answer is contained, on word boundaries; None where there is none.
        exact: Whether the answer is a gold answer; None where there is none.
        f1: The best token F1 with a gold answer; None where there is none.
        retrieved: Whether the answer was written from passages.
        calls: Calls of the LLM.
        prompt: Tokens that the LLM read.
        written: Tokens that it wrote.
        first: Seconds to the first token that the user sees.
        total: Seconds to the end.
        search: Seconds of searching in it.
        gate: Seconds that are neither the LLM's nor the search's: gate and chain.
        p_known: What the gate said; None without a gate.
        text: The answer.
    """

    way: str
    id: str
    kind: str
    right: bool | None
    exact: bool | None
    f1: float | None
    retrieved: bool
    calls: int
    prompt: int
    written: int
    first: float
    total: float
    search: float
    gate: float
    p_known: float | None
    text: str


@dataclass(eq=False)
class Listener(BaseCallbackHandler):
    """Notes what a gate decides and how long the search takes."""

    now: Callable[[], float]
    p_known: list[float] = field(default_factory=list)
    search: float = 0.0
    _begun: dict[Any, float] = field(default_factory=dict)

    def on_custom_event(self, name: str, data: Any, **kwargs: Any) -> None:
        """Note a decision."""
        if name == "retrieval_gate":
            self.p_known.append(data["p_known"])

    def on_retriever_start(self, serialized: Any, query: str, *, run_id: Any, **kwargs: Any) -> None:
        """Note when a search begins."""
        self._begun[run_id] = self.now()

    def on_retriever_end(self, documents: Any, *, run_id: Any, **kwargs: Any) -> None:
        """Note when it ends."""
        self.search += self.now() - self._begun.pop(run_id)


def answer(
    chain: Any, way: str, chat: RecordedChat, question: Question, now: Callable[[], float]
) -> Answered:
    """Answer one question in one way."""
    clock: Clock = chat.clock
    clock.calls.clear()
    listener = Listener(now)
    start, first, pieces = now(), None, []
    for piece in chain.stream(question.question, {"callbacks": [listener]}):
        if piece and first is None:
            first = now() - start + clock.seconds
        pieces.append(piece)
    own, text = now() - start, "".join(pieces)
    gate = max(0.0, own - listener.search)
    total = own + clock.seconds
    read = [call["system"] == ANSWER_WITH_PASSAGES.system for call in clock.calls]
    right, exact, f1 = judged(text, question.gold_answers)
    return Answered(
        way=way,
        id=question.id,
        kind=question.kind,
        right=right,
        exact=exact,
        f1=f1,
        retrieved=any(read),
        calls=len(clock.calls),
        prompt=clock.total("prompt"),
        written=clock.total("written"),
        first=total if first is None else first,
        total=total,
        search=listener.search,
        gate=gate,
        p_known=listener.p_known[0] if listener.p_known else None,
        text=text,
    )


def judged(text: str, gold: tuple[str, ...]) -> tuple[bool | None, bool | None, float | None]:
    """Return whether an answer is right, whether it is exactly that, and its F1; None where there is no answer."""
    if not gold:
        return None, None, None
    f1 = max(token_f1(normalise(text), normalise(each)) for each in gold)
    return is_correct(text, gold), is_correct(text, gold, "exact_match"), f1


def oracle(never: Answered, always: Answered) -> Answered:
    """Return the answer that retrieves only where that alone is right, and knows so at no cost."""
    best = always if always.right and not never.right else never
    return Answered(**{**asdict(best), "way": "oracle"})


def run(
    ways: Ways, chat: RecordedChat, asked: list[Question], now: Callable[[], float]
) -> Iterator[Answered]:
    """Answer all questions in all ways; a way without its calls in the record leaves the question out."""
    chains = ways.chains(chat)
    for name, chain in chains.items():  # loads the models
        with contextlib.suppress(NotRecorded):
            answer(chain, name, chat, asked[0], now)
    for number, question in enumerate(asked):
        CONSOLE.print(f"{number + 1} of {len(asked)}", end="\r")
        found = {}
        for name, chain in chains.items():
            chat.meta.update(id=question.id, kind=question.kind, part=question.part, arm=name, passages=[])
            try:
                found[name] = answer(chain, name, chat, question, now)
            except NotRecorded:
                continue
        if "never" in found and "always" in found:
            yield from found.values()
            yield oracle(found["never"], found["always"])


def whole(answers: list[Answered]) -> list[Answered]:
    """Return the ways that answered every question: which ones a way lacks is no matter of chance."""
    counts = Counter(each.way for each in answers)
    for way, count in counts.items():
        if count < counts["always"]:
            CONSOLE.print(
                f"Left out: {way}. The record has its calls for {count} of {counts['always']} questions."
            )
    return [each for each in answers if counts[each.way] == counts["always"]]


def show(title: str, rows: list[dict[str, str]]) -> None:
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1))
    for i, column in enumerate(rows[0]):
        table.add_column(column, justify="right" if i else "left")
    for row in rows:
        table.add_row(*row.values())
    CONSOLE.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--llm", default="qwen2.5-coder-0.5b-instruct")
    parser.add_argument("--url", help="an OpenAI-compatible server, instead of one that is started here")
    parser.add_argument("--data", type=Path, help="folder with the question sets")
    parser.add_argument("--out", type=Path, default=OUT / "served", help="where the record is")
    parser.add_argument("--index", type=Path, help="where the index is, or goes")
    parser.add_argument("--limit", type=int, help="how many questions")
    parser.add_argument("--threads", type=int, default=0, help="of the server; 0: one a core")
    parser.add_argument("--recorded", action="store_true", help="ask the LLM nothing")
    parser.add_argument("--times", choices=("steady", "recorded"), default="steady")
    parser.add_argument(
        "--speed", type=float, nargs=2, help="tokens read and written a second, if they are known better"
    )
    parser.add_argument("--ways", nargs="+", help="these ways only; never and always are always there")
    parser.add_argument("--prices", type=Path, default=PRICES, help="prices of tokens")
    arguments = parser.parse_args()
    record = Record(arguments.out / f"{arguments.llm}.jsonl", arguments.llm)
    asked = chosen(arguments, record)
    home = arguments.index or OUT / ("index-mixture" if arguments.data else "index-leads")
    ways = Ways(open_index(home, arguments.data), arguments.data, only=arguments.ways)
    with server(arguments.llm, arguments.url, arguments.threads, needed=not arguments.recorded) as url:
        chat = RecordedChat(record=record, url=url, clock=Clock())
        answers = timed(arguments, ways, chat, asked)
    kept = OUT / f"end_to_end.{arguments.llm}.json"
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_text(json.dumps([asdict(each) for each in answers], indent=0) + "\n")
    report(answers, arguments.llm, json.loads(arguments.prices.read_text()))


def chosen(arguments: argparse.Namespace, record: Record) -> list[Question]:
    """Return the questions to ask: the first ones, of those in the record if no other can be asked."""
    asked = questions(arguments.out, arguments.data, "test" if arguments.data else "requests")
    if arguments.recorded:
        asked = both_arms(record, asked)
    return asked[: arguments.limit]


def timed(
    arguments: argparse.Namespace, ways: Ways, chat: RecordedChat, asked: list[Question]
) -> list[Answered]:
    """Answer all questions in all ways, by the clock that was chosen."""
    if arguments.times == "recorded":
        return list(run(ways, chat, asked, time.perf_counter))
    if not arguments.recorded:  # the speed is known once everything is in the record
        list(run(ways, chat, asked, time.process_time))
    chat.speed = Speed(*arguments.speed) if arguments.speed else Speed.of(chat.record.calls.values())
    CONSOLE.print(f"The LLM reads {chat.speed.read:.0f} and writes {chat.speed.written:.0f} tokens a second.")
    return list(run(ways, chat, asked, time.process_time))


def report(answers: list[Answered], llm: str, prices: dict[str, Any]) -> None:
    """Print the tables."""
    complete = whole(answers)
    tables = {
        f"{llm}, {_count(complete)} questions": overview(complete, prices["prices"]),
        "Right, % (retrieved, %), by kind of question": by_kind(complete),
    }
    for title, rows in tables.items():
        show(title, rows)


def _count(answers: list[Answered]) -> int:
    return len({each.id for each in answers})


if __name__ == "__main__":
    main()
