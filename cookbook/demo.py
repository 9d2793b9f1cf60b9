"""The demo: eight questions from well known to obscure, gated by a real proxy model, then a LangChain chain.

Run it with `make demo`, or `python cookbook/demo.py` after `rgate download`.
"""

from dataclasses import replace
from statistics import mean

from langchain_chain import build_chain

from rgate_integrations import load_gate
from rgate_integrations.cli.ask import panel
from rgate_integrations.cli.opening import open_pipeline
from rgate_integrations.cli.options import DEFAULT_GATE
from rgate_integrations.cli.output import Terminal
from rgate_integrations.evaluation.break_even import StageTimes
from rgate_integrations.pipeline import Answered

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


def main() -> None:
    console = Terminal()
    pipeline = open_pipeline(DEFAULT_GATE, console)
    # What a plain RAG application does: passages for every question, found by the question alone.
    always = replace(pipeline, gate=load_gate("constant:always"), claims=False)

    gated: list[Answered] = []
    plain: list[Answered] = []
    for n, question in enumerate(QUESTIONS):
        if n % 2:  # take turns, so that neither way always meets warm caches
            plain.append(always.ask(question))
        gated.append(pipeline.ask(question))
        console.print(panel(gated[-1]))
        if not n % 2:
            plain.append(always.ask(question))

    console.print("\nThe same gate in a LangChain chain, its batch decided in one model call:", style="bold")
    chain = build_chain(pipeline)
    asked = [QUESTIONS[0], QUESTIONS[-1]]
    for question, answer in zip(asked, chain.batch(asked), strict=True):
        console.print(f"  {question}\n    {answer}", markup=False)

    skipped = [answered for answered in gated if not answered.decision.retrieve]
    times = StageTimes(
        gate=mean(answered.timings["gate"] + answered.timings["claims"] for answered in gated),
        direct=mean(answered.timings["answer"] for answered in skipped) if skipped else 0.0,
        rag=total_ms(plain) / len(QUESTIONS),
    )
    gated_ms, always_ms = total_ms(gated), total_ms(plain)
    change = 1 - gated_ms / always_ms
    verdict = f"{change:.0%} less time" if change >= 0 else f"{-change:.0%} more time"
    console.print(
        f"\n{len(skipped)} of {len(QUESTIONS)} questions skipped retrieval: {gated_ms / 1e3:.1f} s gated, "
        f"{always_ms / 1e3:.1f} s always retrieving, {verdict}.\n"
        f"With these times the gate pays below a retrieval rate of {times.break_even():.0%}; the slower the LLM "
        "reads passages, the higher.",
        style="bold",
        soft_wrap=True,
    )


def total_ms(answered: list[Answered]) -> float:
    return sum(sum(each.timings.values()) for each in answered)


if __name__ == "__main__":
    main()
