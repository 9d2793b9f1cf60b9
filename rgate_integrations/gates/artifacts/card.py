"""Model cards: what a saved gate is, in Markdown."""

from __future__ import annotations

import html
from typing import Any

from rgate_integrations.gates.artifacts.gate_file import SavedGate


def model_card(gate: SavedGate, name: str) -> str:
    """Return the card of a saved gate, as its folder's ``README.md``.

    Args:
        gate: The gate.
        name: What it is called.
    """
    facts = gate.provenance
    lines = [
        f"# {plain(name)}",
        "",
        "A retrieval gate of `rgate-integrations`: P(the LLM answers rightly without retrieval).",
        "",
        f"- **Method**: `{gate.method}`; reads the {gate.reads}.",
        f"- **Base model**: {plain(gate.base_model) or 'none'}.",
        f"- **Judges**: {plain(gate.llm) or 'any LLM'}.",
        f"- **Label**: {facts.get('label', 'unknown')}. **Seed**: {facts.get('seed')}.",
        f"- **Recipe**: {facts.get('recipe', 'unknown')}",
        f"- **Licence of the weights**: {facts.get('licence', 'that of the training data')}.",
        f"- **Default threshold**: {gate.threshold:.3f}.",
        "",
        *_data(facts.get("data", [])),
        *_quality(facts),
        f'Use it as `load_gate("{plain(name)}")`. Scores for another LLM are a guess: calibrate on your own data.',
        "",
    ]
    return "\n".join(lines)


def plain(name: str) -> str:
    """Return a name for Markdown: on one line, and without HTML of its own, which pages would run."""
    return html.escape(" ".join(name.split()), quote=False)


def _data(files: list[dict[str, Any]]) -> list[str]:
    lines = ["## Training data", ""]
    for file in files:
        facts = [f"{file['n']} questions"]
        if file.get("known") is not None:  # some sources say only what kind of request it is
            facts.append(f"{file['known']:.1%} known")
        if file.get("llms"):
            facts.append(f"answers of {', '.join(file['llms'])}")
        if file.get("licence"):
            facts.append(file["licence"])
        lines.append(f"- {file['name']}: {', '.join(facts)}, sha256 `{file['sha256'][:16]}`")
    return [*lines, ""]


def _quality(facts: dict[str, Any]) -> list[str]:
    metrics = facts.get("metrics")
    if not metrics:
        return []
    lines = [
        f"## Quality ({facts.get('folds')}-fold cross-validation, AUC of P(known) for the label)",
        "",
        "| set | AUC |",
        "|---|---|",
        *(f"| {name} | {value:.3f} |" for name, value in metrics["auc"].items()),
        f"| **mean of the sets** | **{metrics['auc_mean']:.3f}** |",
        f"| pooled | {metrics['auc_pooled']:.3f} |",
        "",
    ]
    if "retrieved" in metrics:
        shares = ", ".join(f"{kind} {share:.1%}" for kind, share in metrics["retrieved"].items())
        lines += [
            f"Practical requests, each source scored by a gate that was trained without it: AUC "
            f"{metrics['auc_requests']:.3f} for skip or retrieve; retrieved at the default threshold: {shares}.",
            "",
        ]
    return lines
