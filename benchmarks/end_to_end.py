"""The gate in a running application: latency and tokens, and the routers that LangChain and LlamaIndex suggest.

    python benchmarks/end_to_end.py [--data FILE.jsonl]           (or, without the data: make bench)

Four chains answer the demo's questions from the demo's index with the same small LLM, in turns: never retrieving,
always, gated, and gated with the search running while the gate thinks. With labelled questions (``question``,
``closed_book_correct``) the same small model also routes as an LLM router does: LlamaIndex's ``LLMSingleSelector``,
and a LangChain prompt that asks for one word. The tables are printed and written to benchmarks/out/end_to_end.json.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from langchain_core.runnables import Runnable, RunnableLambda
from rich.console import Console
from rich.table import Table

from rgate_integrations import load_gate
from rgate_integrations.cli.opening import open_index
from rgate_integrations.evaluation.metrics import auc
from rgate_integrations.langchain import IndexRetriever, RetrievalGate
from rgate_integrations.prompts import ANSWER, ANSWER_WITH_PASSAGES
from rgate_integrations.proxy.local import shared_proxy
from rgate_integrations.saved.probe import read_probe
from rgate_integrations.training.examples import read_examples

COOKBOOK = Path(__file__).parent.parent / "cookbook"
OUT = Path(__file__).parent / "out" / "end_to_end.json"
CONSOLE = Console(width=110, highlight=False)
LLM = "smollm2-135m-instruct"


class Counting:
    """The LLM, and how many prompt tokens were sent to it."""

    def __init__(self) -> None:
        self.llm, self.tokens = shared_proxy(LLM), 0

    def closed(self, question: str) -> str:
        """Answer from memory."""
        return self._said(ANSWER, {"question": question})

    def opened(self, found: dict[str, Any]) -> str:
        """Answer from documents."""
        passages = "\n\n".join(d.page_content for d in found["documents"])
        return self._said(ANSWER_WITH_PASSAGES, {"question": found["question"], "passages": passages})

    def _said(self, prompt: Any, values: dict[str, str]) -> str:
        (draft,) = self.llm.generate(prompt, [values], tokens=48)
        self.tokens += draft.prompt_tokens
        return draft.text


def chains(llm: Counting) -> dict[str, Runnable[Any, Any]]:
    retriever = IndexRetriever(index=open_index(None, CONSOLE), k=3)
    always = {"documents": retriever, "question": lambda q: q} | RunnableLambda(llm.opened)
    never = RunnableLambda(llm.closed)
    gate = RetrievalGate()
    return {
        "never retrieving": never,
        "always retrieving": always,
        "gated": gate.route(retrieve=always, direct=never),
        "gated, speculative": gate.route(retrieve=always, direct=never, speculative=True),
    }


def applications(rounds: int) -> list[dict]:
    sys.path.insert(0, str(COOKBOOK))
    from demo import QUESTIONS

    llm = Counting()
    ways = chains(llm)
    for chain in ways.values():
        chain.invoke("Is this a question?")
    times: dict[str, list[float]] = {name: [] for name in ways}
    tokens = dict.fromkeys(ways, 0)
    for n in range(rounds):
        for question in QUESTIONS:
            in_turn = list(ways.items())
            if not n % 2:  # so that no way always comes after the same other one
                in_turn.reverse()
            for name, chain in in_turn:
                before, start = llm.tokens, time.perf_counter()
                chain.invoke(question)
                times[name].append(time.perf_counter() - start)
                tokens[name] += llm.tokens - before
    asked = rounds * len(QUESTIONS)
    return [
        {
            "way": name,
            "mean latency, ms": round(1e3 * statistics.mean(t), 1),
            "against always": round(statistics.mean(t) / statistics.mean(times["always retrieving"]), 2),
            "tokens sent to the LLM, a question": round(tokens[name] / asked, 1),
        }
        for name, t in times.items()
    ]


def llm_selector(asked: list[str]) -> list[float]:
    """LlamaIndex's router: the LLM picks a tool by its description; what cannot be parsed retrieves."""
    from llama_index.core.selectors import LLMSingleSelector
    from llama_index.core.tools import ToolMetadata
    from llama_index_engine import SmallLLM

    selector = LLMSingleSelector.from_defaults(llm=SmallLLM())
    tools = [
        ToolMetadata(name="direct", description="Answers well-known facts from memory, without documents."),
        ToolMetadata(name="docs", description="Searches documents for what is not known from memory."),
    ]
    scores = []
    for question in asked:
        try:
            scores.append(float(selector.select(tools, question).ind == 0))
        except Exception:
            scores.append(0.0)
    return scores


def prompt_router(asked: list[str]) -> list[float]:
    """The LangChain way: a prompt that asks the chat model for one word."""
    from langchain_core.prompts import ChatPromptTemplate
    from local_models import SmallChat

    prompt = ChatPromptTemplate.from_template(
        "Can you answer this question from memory? Reply with one word, direct if you can or retrieve if documents "
        "must be searched.\n\nQuestion: {question}"
    )
    chain = prompt | SmallChat().bind(max_tokens=4)
    return [float("direct" in chain.invoke({"question": q}).text.lower()) for q in asked]


def routers(data: list[Path], n: int) -> list[dict]:
    sys.path.insert(0, str(COOKBOOK))
    examples = [e for f in read_examples(data) for e in f.examples]
    chosen = np.random.default_rng(0).permutation(len(examples))[:n]
    asked, known = [examples[i].question for i in chosen], np.array([examples[i].known for i in chosen])
    gate = load_gate()
    ways = {
        "the default gate, one by one (the first 50)": lambda q: [gate.decide(x).p_known for x in q[:50]],
        "the default gate, one batch": lambda q: [d.p_known for d in gate.decide_batch(q)],
        "LangChain prompt router": prompt_router,
        "LlamaIndex LLMSingleSelector": llm_selector,
    }
    rows = []
    for name, way in ways.items():
        way(asked[:1])
        start = time.perf_counter()
        scores = np.array(way(asked))
        labels = known[: len(scores)]
        rows.append(
            {
                "way": name,
                "ms a question": round(1e3 * (time.perf_counter() - start) / len(scores), 1),
                "AUC": round(auc(scores, labels), 3) if len(set(labels.tolist())) == 2 else None,
                "right": round(float(np.mean((scores >= 0.5) == labels)), 3),
                "skips": round(float(np.mean(scores >= 0.5)), 3),
            }
        )
    return rows


def show(title: str, rows: list[dict]) -> None:
    table = Table(title=title, title_justify="left", box=None)
    for i, column in enumerate(rows[0]):
        table.add_column(column, justify="right" if i else "left")
    for row in rows:
        table.add_row(*(str(v) for v in row.values()))
    CONSOLE.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--data", type=Path, nargs="+", help="JSONL of labelled questions")
    parser.add_argument("--questions", type=int, default=200, help="how many of them")
    arguments = parser.parse_args()
    found = {"applications": applications(arguments.rounds)}
    show("Eight questions, three passages each", found["applications"])
    if arguments.data:
        found["routers"] = routers(arguments.data, arguments.questions)
        each = read_probe("default").provenance["metrics"]["auc"]
        held_out = ", ".join(f"{name} {value:.2f}" for name, value in each.items())
        CONSOLE.print(f"The default gate's AUC on questions that it was not trained on: {held_out}")
        show(f"{arguments.questions} labelled questions, routed by the same small model", found["routers"])
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
