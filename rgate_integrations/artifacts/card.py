"""Model cards: what a trained gate is, in Markdown."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ModelCard:
    """What the card of a trained gate says.

    Attributes:
        name: Name of the gate.
        base_model: The model that it reads with.
        reads: What it reads beside the question, in words.
        llm: The LLM whose knowledge it judges.
        threshold: Default threshold.
        method: How it works: lines of Markdown.
        provenance: What ``gate.json`` keeps under this name.
    """

    name: str
    base_model: str
    reads: str
    llm: str
    threshold: float
    method: Sequence[str]
    provenance: dict[str, Any]

    def text(self) -> str:
        """Return the card."""
        facts = self.provenance
        lines = [
            f"# {plain(self.name)}",
            "",
            "A retrieval gate of `rgate-integrations`: P(the LLM answers rightly without retrieval).",
            "",
            f"- **Base model**: {plain(self.base_model)}; reads the question and {self.reads}.",
            f"- **Judges**: {plain(self.llm)}.",
            f"- **Label**: {facts.get('label', 'unknown')}. **Seed**: {facts.get('seed')}.",
            f"- **Recipe**: {facts.get('recipe', 'unknown')}",
            f"- **Licence of the weights**: {facts.get('licence', 'that of the training data')}.",
            f"- **Default threshold**: {self.threshold:.3f}.",
            *self.method,
            *_data(facts),
            *_quality(facts),
            f'Use it as `load_gate("{self.name}")`. Scores for another LLM are a guess: calibrate on your own data.',
            "",
        ]
        return "\n".join(lines)


def plain(name: str) -> str:
    """Return a name for Markdown: on one line, and without HTML of its own, which pages would run."""
    return html.escape(" ".join(name.split()), quote=False)


def _data(facts: dict[str, Any]) -> list[str]:
    lines = ["", "## Training data", ""]
    for data in facts["data"]:
        facts_of_it = [f"{data['n']} questions"]
        if data["known"] is not None:  # some sources say only what kind of request it is
            facts_of_it.append(f"{data['known']:.1%} known")
        if data.get("llms"):
            facts_of_it.append(f"answers of {', '.join(data['llms'])}")
        if data.get("licence"):
            facts_of_it.append(data["licence"])
        lines.append(f"- {data['name']}: {', '.join(facts_of_it)}, sha256 `{data['sha256'][:16]}`")
    return [*lines, ""]


def _quality(facts: dict[str, Any]) -> list[str]:
    metrics = facts.get("metrics")
    if not metrics:
        return ["## Quality", "", "Not measured: trained without cross-validation.", ""]
    return [
        f"## Quality ({facts.get('folds')}-fold cross-validation, AUC of P(known) for the label)",
        "",
        "| set | AUC |",
        "|---|---|",
        *(f"| {name} | {value:.3f} |" for name, value in metrics["auc"].items()),
        f"| **mean of the sets** | **{metrics['auc_mean']:.3f}** |",
        f"| pooled | {metrics['auc_pooled']:.3f} |",
        "",
        *_requests(metrics),
    ]


def _requests(metrics: dict[str, Any]) -> list[str]:
    """Say how often a gate that was tested on requests of several kinds retrieves."""
    if "retrieved" not in metrics:
        return []
    shares = ", ".join(f"{kind} {share:.1%}" for kind, share in metrics["retrieved"].items())
    return [
        f"Practical requests, each source scored by a gate that was trained without it: AUC "
        f"{metrics['auc_requests']:.3f} for skip or retrieve; retrieved at the default threshold: {shares}.",
        "",
    ]
