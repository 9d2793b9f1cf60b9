"""The demo: six questions go through a gated LangChain chain, and through the same chain that always retrieves.

Run it with `make demo`. The LLM is Qwen2.5-Coder-0.5B on llama.cpp, in its quantised file. The passages are 10,033
leads of encyclopaedia articles.
"""

import re
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from demo_search import RerankedBM25
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import Document
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import Runnable, RunnablePassthrough
from llama_server import ServedChat, gguf, serving
from rich.console import Console
from rich.table import Table

from rgate_integrations import load_gate
from rgate_integrations.index import read_passages
from rgate_integrations.index.embedder import SentenceEmbedder
from rgate_integrations.langchain import IndexRetriever, RetrievalGate
from rgate_integrations.models.download import cache_dir, corpus_path

LLM = "qwen2.5-coder-0.5b-instruct"

# Each question with what a right answer contains. The first four are common knowledge. The corpus answers the others.
RIGHT = {
    "What is the capital of France?": "Paris",
    "Who wrote Romeo and Juliet?": "Shakespeare",
    "What is the largest planet in the solar system?": "Jupiter",
    "What is the chemical symbol for gold?": "Au",
    "When was the Neolithic town of Çatalhöyük founded?": "7500",
    "What is the atomic number of rhenium?": "75",
}
QUESTIONS = list(RIGHT)


# --- the application, and the one line that gates it -----------------------------------------------------------


def build_chains(llm: ServedChat, search: RerankedBM25) -> tuple[Runnable, Runnable]:
    """Return an ordinary RAG chain, and the gated one."""
    retriever = IndexRetriever(index=search, k=2)
    with_passages = ChatPromptTemplate.from_template("{context}\n\nAnswer in one sentence: {question}")
    alone = ChatPromptTemplate.from_template("Answer in one sentence: {question}")
    inputs = {"context": retriever | join_documents, "question": RunnablePassthrough()}

    rag_chain = inputs | with_passages | llm | StrOutputParser()
    llm_chain = alone | llm | StrOutputParser()
    gate = RetrievalGate(llm_name=LLM)
    gated = gate.route(retrieve=rag_chain, direct=llm_chain, answer_first=True)
    return rag_chain, gated


def join_documents(documents: list[Document]) -> str:
    return "\n\n".join(document.page_content for document in documents)


# --- asking and counting ---------------------------------------------------------------------------------------


class DecisionPrinter(BaseCallbackHandler):
    """Prints each decision before its answer, and counts the retrievals."""

    retrieved = 0

    def on_custom_event(self, name: str, data: Any, **context: Any) -> None:
        """Print the gate's event; ignore all others."""
        if name != "retrieval_gate":
            return
        self.retrieved += data["retrieve"]
        word = "retrieve" if data["retrieve"] else "skip retrieval"
        say(f"  {word}: {data['reason']}")
        dropped = data.get("partial_answer", {}).get("tokens_dropped")
        if dropped:
            say(f"  (the LLM began to answer: {dropped} tokens are dropped)")


@dataclass
class Costs:
    """Time, tokens and right answers of one way to answer, so far."""

    seconds: float = 0.0
    read: int = 0
    written: int = 0
    right: int = 0

    def ask(
        self, chain: Runnable, llm: ServedChat, question: str, shown: DecisionPrinter | None = None
    ) -> None:
        """Answer a question, and print the answer as it is written if the decision is ``shown``."""
        llm.calls.clear()
        answer = ""
        start = time.perf_counter()
        for chunk in chain.stream(question, {"callbacks": [shown] if shown else []}):
            if shown and chunk:
                say(chunk if answer else f"  {chunk.lstrip()}", end="")
            answer += chunk
        self.seconds += time.perf_counter() - start
        if shown:
            say()
        self.read += sum(call["prompt"] for call in llm.calls)
        self.written += sum(call["written"] for call in llm.calls)
        self.right += bool(re.search(rf"\b{RIGHT[question]}\b", answer))


def say(text: str = "", end: str = "\n") -> None:
    print(text, end=end, flush=True)


def main() -> None:
    say(f"Starting {LLM} on llama.cpp, and the gate.")
    with ThreadPoolExecutor(1) as pool:
        loading = pool.submit(load)  # takes seconds, as the server does
        with serving(gguf(LLM), slots=1, context=2048) as url:
            compare(ServedChat(url=url), loading.result())


def load() -> RerankedBM25:
    """Load the gate's models and the search's, all of which load when they are first used."""
    load_gate().decide("What is the capital of Burkina Faso?")
    passages = list(read_passages(corpus_path("encyclopedia-leads")))
    search = RerankedBM25(passages, SentenceEmbedder(), cache_dir() / "demo-vectors-e5.safetensors")
    search.search(["What is the capital of Burkina Faso?"])
    return search


def compare(llm: ServedChat, search: RerankedBM25) -> None:
    """Ask every question both ways, in turns and with different questions: neither warms the other's cache."""
    rag_chain, gated_chain = build_chains(llm, search)
    llm.invoke("Hello.")
    always, gated, shown = Costs(), Costs(), DecisionPrinter()
    shifted = QUESTIONS[3:] + QUESTIONS[:3]
    for question, other in zip(QUESTIONS, shifted, strict=True):
        say(f"\n{question}")
        gated.ask(gated_chain, llm, question, shown)
        search.embed_candidates(other)
        always.ask(rag_chain, llm, other)
    report(always, gated, shown.retrieved)


def report(always: Costs, gated: Costs, retrieved: int) -> None:
    """Print the table of both ways."""
    count = len(QUESTIONS)
    table = Table(
        title=f"{count} questions, measured just now", title_justify="left", box=None, padding=(0, 2)
    )
    for column in ("", "retrieved", "seconds", "LLM read", "LLM wrote", "right"):
        table.add_column(column, justify="left" if column == "" else "right")
    for name, spent, searches in (("always retrieving", always, count), ("gated", gated, retrieved)):
        tokens = (f"{spent.read:,} tokens", f"{spent.written:,} tokens")
        table.add_row(
            name, f"{searches} of {count}", f"{spent.seconds:.1f}", *tokens, f"{spent.right} of {count}"
        )
    say()
    Console(width=88).print(table)
    say(
        f"\nGated: {format_change(gated.seconds, always.seconds)} time;"
        f" the LLM read {format_change(gated.read, always.read)}."
        "\nFour of these six questions are common knowledge; with fewer of them, a gate saves less."
        "\nThe times are those of this machine now. The passages' vectors were made before, as in any index."
        "\nSix questions say nothing about quality: docs/benchmarks has thousands."
    )


def format_change(now: float, before: float) -> str:
    """Return the relative change, such as ``25% less``."""
    less = 1 - now / before
    return f"{less:.0%} less" if less >= 0 else f"{-less:.0%} more"


if __name__ == "__main__":
    main()
