"""The demo: eight questions from well known to obscure, gated by a real proxy model, then a LangChain chain.

Run it with `make demo`, or `python cookbook/demo.py` after `rgate download`.
"""

import time
from statistics import mean

from langchain_chain import build_chain
from rich.console import Console

from rgate_integrations import load_gate
from rgate_integrations.cli.ask import DEFAULT_LLM, Answered, Pipeline, open_index, open_llm, panel
from rgate_integrations.decision import Decision
from rgate_integrations.evaluation import StageTimes

QUESTIONS = [
    "What is the capital of France?",
    "Who wrote Romeo and Juliet?",
    "What is the largest planet in the solar system?",
    "What is the chemical symbol for gold?",
    "When was the Neolithic town of Çatalhöyük founded?",
    "Which river flows through the city of Yakutsk?",
    "What is the melting point of the element rhenium?",
    "Where was the composer Aarno Maliniemi born?",
]


def always_retrieve(pipeline: Pipeline, question: str) -> float:
    """Answer with passages whatever the question, as a plain RAG chain does; returns milliseconds."""
    from rgate_integrations.answer import answer_all

    start = time.perf_counter()
    hits = pipeline.index.search([question], pipeline.k)[0]
    decision = Decision(question=question, retrieve=True, p_known=0.0)
    answer_all(pipeline.llm, [decision], [[hit.passage for hit in hits]])
    return (time.perf_counter() - start) * 1e3


def main() -> None:
    console = Console(highlight=False)
    gate = load_gate()
    pipeline = Pipeline(gate, open_index(None, console), open_llm(DEFAULT_LLM, gate.proxy, console))
    with console.status("loading models"):
        pipeline.warm_up()

    gated: list[Answered] = []
    always_ms = 0.0
    for n, question in enumerate(QUESTIONS):
        if n % 2:  # take turns, so that neither way always meets warm caches
            always_ms += always_retrieve(pipeline, question)
        gated.append(pipeline.ask(question))
        console.print(panel(gated[-1]))
        if not n % 2:
            always_ms += always_retrieve(pipeline, question)

    console.print("\nThe same gate in a LangChain chain, its batch decided in one model call:", style="bold")
    chain = build_chain(pipeline)
    asked = [QUESTIONS[0], QUESTIONS[-1]]
    for question, answer in zip(asked, chain.batch(asked), strict=True):
        console.print(f"  {question}\n    {answer}", markup=False)

    direct = [a for a in gated if not a.decision.retrieve]
    times = StageTimes(
        gate=mean(a.timings["gate"] + a.timings["claims"] for a in gated),
        direct=mean(a.timings["answer"] for a in direct) if direct else 0.0,
        rag=always_ms / len(QUESTIONS),
    )
    skipped = sum(not a.decision.retrieve for a in gated)
    gated_ms = sum(sum(a.timings.values()) for a in gated)
    change = 1 - gated_ms / always_ms
    verdict = f"{change:.0%} less time" if change >= 0 else f"{-change:.0%} more time"
    console.print(
        f"\n{skipped} of {len(QUESTIONS)} questions skipped retrieval: {gated_ms / 1e3:.1f} s gated, "
        f"{always_ms / 1e3:.1f} s always retrieving, {verdict}.\n"
        f"With these times the gate pays below a retrieval rate of {times.break_even():.0%}; the slower the LLM "
        "reads passages, the higher.",
        style="bold",
        soft_wrap=True,
    )


if __name__ == "__main__":
    main()
