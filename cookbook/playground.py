"""A local web page that shows a gate's decision, the passages, and both answers.

pip install "rgate-integrations[faiss,local]" "gradio>=6"
rgate download smollm2-135m-reader smollm2-135m-instruct multilingual-e5-small encyclopedia-leads
python cookbook/playground.py
"""

from __future__ import annotations

import argparse
from typing import Any

import gradio

from rgate_integrations import Decision, DecisionEngine, load_gate
from rgate_integrations.answering.drafting import write_answers
from rgate_integrations.cli.corpus import open_index
from rgate_integrations.index.retriever import Retriever
from rgate_integrations.models.base import LanguageModel
from rgate_integrations.models.local import shared_proxy

EXAMPLES = [
    "What is the capital of France?",
    "Which river flows through the city of Yakutsk?",
    "Where was the composer Aarno Maliniemi born?",
    "What did we decide about the staging server on Monday?",
]


def verdict(decision: Decision | None, threshold: float) -> dict[str, float] | None:
    """Return P(known), labelled with the decision."""
    if decision is None:
        return None
    way = "retrieve" if decision.p_known < threshold else "answer directly"
    return {f"{way}: P(known)": decision.p_known}


def build(gate: DecisionEngine, llm: LanguageModel, index: Retriever) -> gradio.Blocks:
    """Make the page.

    Args:
        gate: Decides.
        llm: Answers, without and with passages.
        index: Searched, whatever the gate decides.
    """

    def ask(question: str, threshold: float) -> tuple[Any, ...]:
        decision = gate.decide(question)
        (hits,) = index.search([question], 3)
        passages = [[hit.passage.title, hit.passage.text, round(hit.score, 2)] for hit in hits]
        # The question alone, and with the passages.
        alone, informed = write_answers(llm, [question] * 2, [[], [hit.passage for hit in hits]])
        return decision, verdict(decision, threshold), decision.reason, alone.text, informed.text, passages

    # Nothing is uploaded to this page, so uploads are refused beyond the smallest size and removed at once.
    with gradio.Blocks(title="rgate playground", analytics_enabled=False, delete_cache=(60, 60)) as page:
        gradio.Markdown("# Does the LLM know?\nA gate decides whether passages are needed.")
        decision = gradio.State()
        question = gradio.Textbox(label="Question", autofocus=True, submit_btn="Ask")
        gradio.Examples(EXAMPLES, question)
        threshold = gradio.Slider(0, 1, gate.threshold, step=0.01, label="Threshold: retrieve below it")
        verdict_label = gradio.Label(label="P(known) decides")
        reason = gradio.Textbox(label="Because")
        with gradio.Row():
            alone = gradio.Textbox(label="Answer without passages", lines=3)
            informed = gradio.Textbox(label="Answer with passages", lines=3)
        passages = gradio.Dataframe(headers=["title", "text", "score"], label="Passages", wrap=True)
        question.submit(
            ask, [question, threshold], [decision, verdict_label, reason, alone, informed, passages]
        )
        threshold.change(verdict, [decision, threshold], verdict_label)
    return page


def main() -> None:
    """Serve the page on the loopback address."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gate", help="a gate's name or folder; the default gate if none")
    parser.add_argument("--llm", default="smollm2-135m-instruct", help="catalogue name, folder or Hub id")
    parser.add_argument("--port", type=int, default=7860)
    arguments = parser.parse_args()
    index = open_index(None)
    page = build(load_gate(arguments.gate), shared_proxy(arguments.llm), index)
    page.launch(server_name="127.0.0.1", server_port=arguments.port, max_file_size="1kb")


if __name__ == "__main__":
    main()
