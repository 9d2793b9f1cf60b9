"""What a gate saves end to end: every way to answer, as a chain with a real LLM.

    python benchmarks/end_to_end.py --limit 40                                  (make bench)
    python benchmarks/end_to_end.py --data DIR --llm qwen2.5-coder-1.5b-instruct --limit 400 [--recorded]

DIR contains the question sets and corpora that `mixture` names. Without it, the questions are those of
``requests.jsonl``, and the chains search the encyclopaedia leads. The LLM runs on a llama.cpp server. Every call is
made once and recorded (see `served`), so a stopped run resumes. ``--recorded`` makes no call: it takes the questions
that are in the record.

The LLM's time is computed from its tokens, at the speed of the fastest tenth of the recorded calls. Gate, search and
chains count their CPU time. So other work on the machine changes neither.
"""

import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from base import CONSOLE, OUT, argument_parser, mean_interval, print_table
from langchain_core.output_parsers import StrOutputParser
from langchain_core.runnables import Runnable, RunnableLambda, RunnablePassthrough
from mixture import Question
from served import (
    K,
    NotRecorded,
    Record,
    RecordedChat,
    Speed,
    both_arms,
    closed_book,
    open_index,
    questions,
    server,
    with_passages,
)

from rgate_integrations import AnswerFirst, load_gate
from rgate_integrations.engine.loading import DEFAULT_GATES
from rgate_integrations.index.retriever import Retriever
from rgate_integrations.langchain import IndexRetriever, RetrievalGate
from rgate_integrations.prompts import ANSWER_WITH_PASSAGES
from rgate_integrations.runtime.text import is_correct

HELD = 32
MAX_MISSING = 0.05
"""Share of questions of which a way's calls may be missing in the record."""


def chains(index: Retriever, chat: RecordedChat, llm_name: str) -> dict[str, Runnable[Any, Any]]:
    """Return every way to answer with a chat model and a search, by name, except the oracle."""
    never = RunnableLambda(closed_book) | chat | StrOutputParser()
    inputs = {"documents": IndexRetriever(index=index, k=K), "question": RunnablePassthrough()}
    always = inputs | RunnableLambda(with_passages) | chat | StrOutputParser()
    first_look = load_gate(llm_name=llm_name, on_error="raise")
    alone = RetrievalGate(first_look)
    partial = RetrievalGate(load_gate(DEFAULT_GATES["llm"], llm_name=llm_name, on_error="raise"))
    # FLARE's trigger (Jiang et al. 2023): the least probable token of a partial answer.
    weakest = RetrievalGate(load_gate("token_probability", tokens=HELD, on_error="raise"))
    options = AnswerFirst(tokens=HELD, question_gate=first_look)
    without_question_gate = AnswerFirst(tokens=HELD, question_gate=None)
    arms = {"retrieve": always, "direct": never}
    return {
        "never": never,
        "always": always,
        "gate, question alone": alone.route(**arms),
        "look first": alone.route(**arms, look_first=True),
        "look first, then answer first": partial.route(**arms, look_first=True, answer_first=options),
        "answer first": partial.route(**arms, answer_first=options),
        "answer first, FLARE's trigger": weakest.route(**arms, answer_first=without_question_gate),
    }


def answer(chain: Any, chat: RecordedChat, question: Question) -> dict[str, Any]:
    """Answer one question in one way.

    Returns:
        The ``kind`` of the question; whether the answer contains a gold answer, on word boundaries (``right``; NaN
        without gold answers); whether the answer was written from passages (``retrieved``); the LLM's ``calls``, and
        the tokens that it read (``prompt``); seconds to the ``first`` token that the user sees, and in ``total``.
    """
    chat.calls.clear()
    start = time.process_time()
    first, text = None, ""
    for piece in chain.stream(question.question):
        if piece and first is None:
            first = time.process_time() - start + chat.seconds
        text += piece
    total = time.process_time() - start + chat.seconds
    calls = pd.DataFrame(chat.calls)
    return {
        "kind": question.kind,
        "right": float(is_correct(text, question.gold_answers)) if question.gold_answers else math.nan,
        "retrieved": (calls.system == ANSWER_WITH_PASSAGES.system).any(),
        "calls": len(calls),
        "prompt": calls.prompt.sum(),
        "first": total if first is None else first,
        "total": total,
    }


def run(
    index: Retriever, chat: RecordedChat, selected: list[Question], llm_name: str
) -> dict[str, pd.DataFrame]:
    """Answer all questions in all ways.

    On another machine, a search may rank two passages otherwise, so that the record lacks a call. Such a question is
    left out in all ways, and so is a way that lacks many.

    Returns:
        For each way the results of `answer`, one row a question.
    """
    tables, lacking = {}, set()
    for name, chain in chains(index, chat, llm_name).items():
        answers: list[dict[str, Any]] = []
        missing = set()
        for question in (selected[0], *selected):  # the first time, it loads the models
            chat.meta.update(id=question.id, arm=name)
            try:
                answers.append(answer(chain, chat, question))
            except NotRecorded:
                missing.add(question.id)
                answers.append({})
        if len(missing) > MAX_MISSING * len(selected):
            CONSOLE.print(f"Left out: {name}. The record lacks the calls of {len(missing)} questions.")
            continue
        lacking |= missing
        tables[name] = pd.DataFrame(answers[1:])
    recorded = [question.id not in lacking for question in selected]
    tables = {name: table[recorded].reset_index(drop=True) for name, table in tables.items()}
    # The oracle retrieves only if nothing but passages gives the right answer, and knows that at no cost.
    never, always = tables["never"], tables["always"]
    helps = (always.right == 1) & (never.right == 0)
    tables["oracle"] = pd.concat([always[helps], never[~helps]]).sort_index()
    return tables


def show(tables: dict[str, pd.DataFrame], title: str) -> None:
    """Print what each way costs and how often it is right, and its accuracy by kind of question."""
    kinds = sorted(tables["always"].kind.unique())
    rows, by_kind = [], []
    for way, answers in tables.items():
        gain = (answers.right - tables["always"].right).dropna().to_numpy()
        low, high = 100 * np.array(mean_interval(gain))
        points = "" if way == "always" else f"{100 * gain.mean():+.1f} [{low:+.1f}, {high:+.1f}]"
        row = [way, f"{100 * answers.right.mean():.1f}", points, f"{100 * answers.retrieved.mean():.0f}"]
        row += [f"{answers.calls.mean():.2f}", f"{answers.prompt.mean():.0f}"]
        for seconds in (answers["first"], answers["total"]):
            median, slow = seconds.quantile([0.5, 0.95])
            row.append(f"{median:.2f}, {slow:.2f}")
        rows.append(row)
        means = 100 * answers.groupby("kind")[["right", "retrieved"]].mean()
        cells = [f"{means.right[kind]:.0f} ({means.retrieved[kind]:.0f})" for kind in kinds]
        by_kind.append([way, *cells])
    title += f", {len(tables['always'])} questions"
    columns = ["way", "right, %", "points vs. always [95 %]", "retrieved, %", "LLM calls", "read"]
    print_table([*columns, "first token, s (p50, p95)", "total, s (p50, p95)"], rows, title)
    print_table(["way", *kinds], by_kind, "Right, % (retrieved, %), by kind of question")


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--llm", default="qwen2.5-coder-0.5b-instruct")
    parser.add_argument("--data", type=Path, help="folder with the question sets")
    parser.add_argument("--out", type=Path, default=OUT / "served", help="folder of the record")
    parser.add_argument("--limit", type=int, help="how many questions")
    parser.add_argument("--recorded", action="store_true", help="ask the LLM nothing")
    parser.add_argument(
        "--speed", type=float, nargs=2, help="tokens read and written a second, if they are known better"
    )
    parser.add_argument("--named", action="store_true", help="tell the gate the LLM's name")
    arguments = parser.parse_args()
    llm_name = arguments.llm if arguments.named else ""
    data = arguments.data
    record = Record(arguments.out / f"{arguments.llm}.jsonl", arguments.llm)
    selected = questions(arguments.out, data, "test" if data else "requests")
    if arguments.recorded:
        selected = both_arms(record, selected)
    selected = selected[: arguments.limit]
    index = open_index(data)
    with server("" if arguments.recorded else arguments.llm) as url:
        chat = RecordedChat(record=record, url=url)
        if not arguments.recorded:  # the speed is known once everything is in the record
            run(index, chat, selected, llm_name)
    chat.speed = Speed(*arguments.speed) if arguments.speed else Speed.of(record.calls.values())
    CONSOLE.print(f"The LLM reads {chat.speed.read:.0f} and writes {chat.speed.written:.0f} tokens a second.")
    show(run(index, chat, selected, llm_name), arguments.llm)


if __name__ == "__main__":
    main()
