"""What each fine-tuned gate learns to write: pairs of a prompt and its continuation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rgate_integrations.claims.format import Claim, parse_claims, print_claims
from rgate_integrations.claims.rewriter import REWRITE
from rgate_integrations.decision import Draft
from rgate_integrations.errors import DataFormatError
from rgate_integrations.gates.papers.adapt import CONTEXT_PROMPT, PARAMETRIC_PROMPT, RET
from rgate_integrations.gates.papers.boundary import BOUNDARY_QUESTION
from rgate_integrations.gates.papers.ik import IK_DRAFT, IK_QUESTION
from rgate_integrations.gates.papers.slimplm import JUDGMENT, TARGETS
from rgate_integrations.prompts import PromptTemplate
from rgate_integrations.runtime.records import Record, read_records
from rgate_integrations.training.examples import Example
from rgate_integrations.training.trainer import Pair

_VERDICTS = {
    "ik": ("Yes", "No"),
    "slimplm": TARGETS,
    "boundary": ("known", "unknown"),
}
"""What a gate writes for a known question, and for an unknown one."""

_CLAIMS = 'Each line needs "question", "closed_book_text", "claims".'


def verdict_prompt(gate: str, drafted: bool) -> PromptTemplate:
    """Return the prompt under which a trained gate gives its verdict."""
    if gate == "ik":
        return IK_DRAFT if drafted else IK_QUESTION
    return {"slimplm": JUDGMENT, "adapt": PARAMETRIC_PROMPT, "boundary": BOUNDARY_QUESTION}[gate]


def pairs_for(gate: str, examples: Sequence[Example], drafts: Sequence[Draft] | None) -> list[Pair]:
    """Turn labelled questions into what a gate learns to write.

    A soft label becomes two weighted pairs. ADAPT-LLM's two-prompt set (section 3.1, algorithm 1): the gold
    answer where the LLM was right; ``<RET>``, and the gold answer given the context, where it was wrong.

    Args:
        gate: ``"ik"``, ``"slimplm"``, ``"adapt"`` or ``"boundary"``.
        examples: The questions.
        drafts: One a question for gates that read drafts, or None.

    Raises:
        DataFormatError: ADAPT-LLM needs gold answers, and some questions have none.
    """
    if gate == "adapt":
        return [pair for example in examples for pair in _two_prompts(example)]
    prompt = verdict_prompt(gate, drafts is not None)
    known, unknown = _VERDICTS[gate]
    pairs = []
    for i, example in enumerate(examples):
        values = {"question": example.question}
        if drafts is not None:
            values["draft"] = drafts[i].text
        for verdict, weight in ((known, example.target), (unknown, 1 - example.target)):
            if weight > 0:
                pairs.append(Pair(prompt, values, verdict, weight, ends=gate == "slimplm"))
    return pairs


def _two_prompts(example: Example) -> list[Pair]:
    if not example.gold:
        raise DataFormatError(
            f"{example.question[:60]!r} has no gold_answers.", hint="ADAPT-LLM learns to answer: give them."
        )
    values = {"question": example.question}
    if example.known:
        return [Pair(PARAMETRIC_PROMPT, values, example.gold[0])]
    asks = Pair(PARAMETRIC_PROMPT, values, RET)
    if not example.context:
        return [asks]
    return [asks, Pair(CONTEXT_PROMPT, {**values, "context": example.context}, example.gold[0])]


def rewriter_pairs(paths: Sequence[Path]) -> list[Pair]:
    """Read annotated claims (SlimPLM, section 3.3) as pairs for the claim rewriter.

    Each line needs ``question``, ``closed_book_text`` (the heuristic answer) and ``claims``: a list of objects
    with ``claim``, ``query`` and ``needs_search``; or ``rewritten``: the tagged text itself.
    """
    pairs = []
    for path in paths:
        for record in read_records(path, hint=_CLAIMS):
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
        each = Record(record.where, record.number, fields if isinstance(fields, dict) else {}, record.hint)
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
    return printed if len(parse_claims(printed)) == len(claims) else ""
