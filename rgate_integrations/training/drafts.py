"""Drafts to train on: the proxy's own, written once and kept, or what the LLM is recorded to have written."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Literal

from rgate_integrations.decision import Draft
from rgate_integrations.errors import ConfigurationError, DataFormatError
from rgate_integrations.files import JsonlLog
from rgate_integrations.prompts import ANSWER
from rgate_integrations.proxy.base import Proxy
from rgate_integrations.proxy.download import cache_dir
from rgate_integrations.training.examples import Example

DraftKind = Literal["proxy", "recorded", "none"]
Report = Callable[[str, int, int], None]
_CHUNK = 256


def drafts_for(
    proxy: Proxy, examples: Sequence[Example], kind: DraftKind, tokens: int, report: Report
) -> list[Draft] | None:
    """Return a draft an example, or None for the question alone.

    Raises:
        DataFormatError: Recorded drafts are asked for, and some examples have none.
    """
    if kind == "none":
        return None
    if kind == "proxy":
        return cached_drafts(proxy, [e.question for e in examples], tokens, report)
    if kind != "recorded":
        raise ConfigurationError(f"draft must be proxy, recorded or none, not {kind!r}.")
    if not all(e.text for e in examples):
        raise DataFormatError("Some questions have no closed_book_text.", hint='Use draft="proxy" or "none".')
    return [recorded_draft(proxy, e.text, tokens) for e in examples]


def cached_drafts(proxy: Proxy, questions: Sequence[str], tokens: int, report: Report) -> list[Draft]:
    """Return the proxy's drafts, written in chunks to a file of the cache: a restart continues where it was.

    A line that a kill left half written is dropped and its draft written again.
    """
    name = hashlib.sha256(f"{proxy.name}|{ANSWER.hash}|{tokens}".encode()).hexdigest()[:16]
    log = JsonlLog(cache_dir() / "drafts" / f"{name}.jsonl")
    known = {record["question"]: Draft.model_validate(record["draft"]) for record in log.values()}
    missing = [q for q in dict.fromkeys(questions) if q not in known]
    for start in range(0, len(missing), _CHUNK):
        some = missing[start : start + _CHUNK]
        written = proxy.generate(ANSWER, [{"question": q} for q in some], tokens=tokens)
        new = dict(zip(some, written, strict=True))
        log.append({"question": q, "draft": draft.model_dump(mode="json")} for q, draft in new.items())
        known |= new
        report("writing drafts", len(questions) - len(missing) + start + len(some), len(questions))
    return [known[q] for q in questions]


def recorded_draft(proxy: Proxy, text: str, tokens: int) -> Draft:
    """Return the first tokens of a recorded text, counted by the proxy's tokenizer."""
    head = proxy.cut(text, tokens)
    return Draft(text=(head or text).strip(), source="recorded", finished=head is None)
