"""What the gates that are LoRA adapters learn to write, and the papers' recipes for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rgate_integrations.answering.claims import Claim, parse_claims, print_claims
from rgate_integrations.answering.rewriting import REWRITE
from rgate_integrations.decision import Draft
from rgate_integrations.errors import DataFormatError
from rgate_integrations.gates.papers.boundary import BOUNDARY_QUESTION
from rgate_integrations.gates.papers.verdicts import (
    CONTEXT_PROMPT,
    IK_DRAFT,
    IK_QUESTION,
    JUDGMENT,
    PARAMETRIC_PROMPT,
    RET,
    TARGETS,
)
from rgate_integrations.prompts import PromptTemplate
from rgate_integrations.runtime.records import Record, read_records
from rgate_integrations.tuning.own import Recipe
from rgate_integrations.tuning.questions import Example


@dataclass(frozen=True)
class Pair:
    """A prompt and the text that should continue it.

    Attributes:
        prompt: The template.
        values: Its fields.
        target: What the model should write.
        weight: Weight of the pair in the loss; a soft label is two pairs.
        ends: Whether the end of the turn follows the target; verdicts are only ever scored.
    """

    prompt: PromptTemplate
    values: Mapping[str, str]
    target: str
    weight: float = 1.0
    ends: bool = True


RECIPES: dict[str, Recipe] = {
    "slimplm": Recipe(epochs=2, learning_rate=1e-4),
    "ik": Recipe(epochs=1, learning_rate=1e-4),
    "adapt": Recipe(epochs=3, learning_rate=3e-4, batch_size=128),
    "boundary": Recipe(epochs=3, learning_rate=1e-5, batch_size=4, schedule="cosine", warmup=0.02),
    "rewriter": Recipe(epochs=2, learning_rate=1e-4),
}
"""The papers' settings: SlimPLM section 4.4, IK section 3.1, ADAPT-LLM section 4.3, KBM appendix; where a paper
fine-tunes all weights or names no batch size, LoRA of rank 8 and 16 pairs a step."""

_VERDICTS = {
    "ik": ("Yes", "No"),
    "slimplm": TARGETS,
    "boundary": ("known", "unknown"),
}
"""What a gate writes for a known question, and for an unknown one."""

PROMPTS = {
    "ik": IK_QUESTION,
    "slimplm": JUDGMENT,
    "adapt": PARAMETRIC_PROMPT,
    "boundary": BOUNDARY_QUESTION,
}
"""The prompt of each gate that is trained by fine-tuning, before a draft is read."""


def verdict_prompt(gate: str, drafted: bool) -> PromptTemplate:
    """Return the prompt under which a trained gate gives its verdict."""
    if gate == "ik" and drafted:
        return IK_DRAFT
    return PROMPTS[gate]


def pairs_for(gate: str, example: Example, draft: Draft | None) -> list[Pair]:
    """Turn a labelled question into what a gate learns to write.

    A soft label becomes two weighted pairs. ADAPT-LLM's two-prompt set (section 3.1, algorithm 1): the gold
    answer where the LLM was right; ``<RET>``, and the gold answer given the context, where it was wrong.

    Args:
        gate: ``"ik"``, ``"slimplm"``, ``"adapt"`` or ``"boundary"``.
        example: The question.
        draft: Its draft, for gates that read drafts, or None.

    Raises:
        DataFormatError: ADAPT-LLM needs gold answers, and the question has none.
    """
    question = example.question
    values = {"question": question.text}
    if gate != "adapt":
        prompt = verdict_prompt(gate, draft is not None)
        known, unknown = _VERDICTS[gate]
        if draft is not None:
            values["draft"] = draft.text
        ends = gate == "slimplm"
        pairs = [
            Pair(prompt, values, known, example.target, ends),
            Pair(prompt, values, unknown, 1 - example.target, ends),
        ]
        return [pair for pair in pairs if pair.weight > 0]
    if not question.gold:
        raise DataFormatError(
            f"{question.text[:60]!r} has no gold_answers.", hint="ADAPT-LLM learns to answer: give them."
        )
    if example.known:
        return [Pair(PARAMETRIC_PROMPT, values, question.gold[0])]
    pairs = [Pair(PARAMETRIC_PROMPT, values, RET)]
    if question.context:
        pairs.append(Pair(CONTEXT_PROMPT, {**values, "context": question.context}, question.gold[0]))
    return pairs


def rewriter_pairs(paths: Sequence[Path]) -> list[Pair]:
    """Read annotated claims (SlimPLM, section 3.3) as pairs for the claim rewriter.

    Each line needs ``question``, ``closed_book_text`` (the heuristic answer) and ``claims``: a list of objects
    with ``claim``, ``query`` and ``needs_search``; or ``rewritten``: the tagged text itself.
    """
    pairs = []
    for path in paths:
        for record in read_records(path, hint='Each line needs "question", "closed_book_text", "claims".'):
            values = {"question": record.text("question"), "draft": record.optional_text("closed_book_text")}
            tagged = record.optional_text("rewritten") or _tagged(record)
            if tagged:
                pairs.append(Pair(REWRITE, values, tagged))
    return pairs


def _tagged(record: Record) -> str:
    """Return claims as the rewriter should write them; empty where that text could not be read back."""
    annotated = record.fields.get("claims")
    if not isinstance(annotated, list):
        raise record.wrong("no claims")
    claims = []
    for fields in annotated:
        each = Record(record.where, fields if isinstance(fields, dict) else {}, record.hint)
        text, needs_search = each.optional_text("claim"), each.fields.get("needs_search")
        if not text:
            continue
        if needs_search is not None and not isinstance(needs_search, bool):
            raise each.wrong("needs_search is neither true nor false")
        query = each.optional_text("query") or text
        claims.append(
            Claim(text=" ".join(text.split()), query=" ".join(query.split()), needs_search=needs_search)
        )
    printed = print_claims(claims)
    if len(parse_claims(printed)) != len(claims):
        return ""
    return printed
