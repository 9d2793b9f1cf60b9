"""Model cards: what a trained gate is, in Markdown."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rgate_integrations.training.artifact import ProbeArtifact


def probe_card(artifact: ProbeArtifact, name: str) -> str:
    """Return the model card of a probe, in Markdown."""
    draft = (
        f"the first {artifact.tokens} tokens of a draft ({artifact.source})"
        if artifact.tokens
        else "no draft"
    )
    layers = ", ".join(str(n) for n in sorted({layer for layer, _, _ in artifact.blocks}))
    poolings = " and ".join(dict.fromkeys(pooling for _, _, pooling in artifact.blocks))
    early = artifact.early_exit
    facts = artifact.provenance
    lines = [
        *_head(name, artifact.base_model, artifact.llm, draft, facts, artifact.threshold),
        f"- **Method**: linear probe on {poolings} hidden states of layers {layers}.",
        *(
            [f"- **Early exit**: no draft from P(known) {early.p_known:.2f} of the question alone."]
            if early
            else []
        ),
        *_data(facts),
        *_quality(facts),
        f'Use it as `load_gate("{name}")`. Scores for another LLM are a guess: calibrate on your own data.',
        "",
    ]
    return "\n".join(lines)


def adapter_card(name: str, method: str, config: dict[str, Any]) -> str:
    """Return the model card of a gate with an adapter, in Markdown.

    Args:
        name: Name of the gate.
        method: Name of its method.
        config: What is in its ``gate.json``.
    """
    facts, tokens = config["provenance"], config["parameters"].get("tokens")
    reads = f"{tokens} tokens of a draft" if tokens else "nothing else"
    lines = [
        *_head(name, config["base_model"], config["llm"], reads, facts, config["threshold"]),
        f"- **Method**: `{method}`, {'activated ' if config['parameters'].get('follow_up') else ''}LoRA adapter.",
        *_data(facts),
        *_quality(facts),
        f'Use it as `load_gate("{name}")`. Scores for another LLM are a guess: calibrate on your own data.',
        "",
    ]
    return "\n".join(lines)


def _head(
    name: str, base_model: str, llm: str, reads: str, facts: dict[str, Any], threshold: float
) -> list[str]:
    return [
        f"# {name}",
        "",
        "A retrieval gate of `rgate-integrations`: P(the LLM answers rightly without retrieval).",
        "",
        f"- **Base model**: {base_model}; reads the question and {reads}.",
        f"- **Judges**: {llm}.",
        f"- **Label**: {facts.get('label', 'unknown')}. **Seed**: {facts.get('seed')}.",
        f"- **Recipe**: {facts.get('recipe', 'unknown')}",
        f"- **Licence of the weights**: {facts.get('licence', 'that of the training data')}.",
        f"- **Default threshold**: {threshold:.3f}.",
    ]


def _data(facts: dict[str, Any]) -> list[str]:
    rows = (
        f"- {d['name']}: {d['n']} questions, {d['known']:.1%} known, sha256 `{d['sha256'][:16]}`"
        for d in facts["data"]
    )
    return ["", "## Training data", "", *rows, ""]


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
    ]
