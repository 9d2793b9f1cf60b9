"""Drafts to train on: the proxy's own, written once and kept, or what the LLM is recorded to have written."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal, TypeAlias, get_args

from rgate_integrations.decision import Draft
from rgate_integrations.errors import ConfigurationError, DataFormatError
from rgate_integrations.models.base import Proxy
from rgate_integrations.models.download import cache_dir
from rgate_integrations.prompts import ANSWER, PromptTemplate
from rgate_integrations.runtime.files import JsonlLog
from rgate_integrations.runtime.locks import locked
from rgate_integrations.training.examples import Example

DraftKind = Literal["proxy", "recorded", "none"]
"""Whose drafts are read: the proxy's own, what the LLM is recorded to have written, or none: the question alone."""

Progress: TypeAlias = Callable[[str, int, int], None]
"""Told what is being done, how far it is, and how far it goes."""

_CHUNK = 256


def valid_draft_kind(kind: str) -> None:
    """Check a kind of draft that a user gave.

    Raises:
        ConfigurationError: It is none.
    """
    if kind not in get_args(DraftKind):
        raise ConfigurationError(f"draft must be proxy, recorded or none, not {kind!r}.")


def silent(what: str, done: int, total: int) -> None:
    """Tell nobody: the `Progress` of who wants none."""


def drafts_for(
    proxy: Proxy,
    examples: Sequence[Example],
    kind: DraftKind,
    tokens: int,
    progress: Progress = silent,
    prompt: PromptTemplate = ANSWER,
) -> list[Draft] | None:
    """Return a draft an example, or None for the question alone.

    Raises:
        DataFormatError: Recorded drafts are asked for, and some examples have none.
    """
    valid_draft_kind(kind)
    if kind == "none":
        return None
    if kind == "proxy":
        return cached_drafts(proxy, [e.question for e in examples], tokens, progress, prompt)
    if not all(e.text for e in examples):
        raise DataFormatError("Some questions have no closed_book_text.", hint='Use draft="proxy" or "none".')
    return [recorded_draft(proxy, e.text, tokens) for e in examples]


def cached_drafts(
    proxy: Proxy,
    questions: Sequence[str],
    tokens: int,
    progress: Progress = silent,
    prompt: PromptTemplate = ANSWER,
) -> list[Draft]:
    """Return the proxy's drafts, written in chunks to a file of the cache: a restart continues where it was."""
    # By weights, not by name alone: another model may lie in the same folder by now.
    made_with = f"{proxy.name}|{proxy.fingerprint}|{prompt.hash}|{tokens}"
    name = hashlib.sha256(made_with.encode()).hexdigest()[:16]
    path = cache_dir() / "drafts" / f"{name}.jsonl"
    wait = partial(progress, "waiting for another training that writes the same drafts", 0, len(questions))
    with locked(path, waiting=wait):
        return _written_or_kept(JsonlLog(path), proxy, questions, tokens, progress, prompt)


def _written_or_kept(
    log: JsonlLog,
    proxy: Proxy,
    questions: Sequence[str],
    tokens: int,
    progress: Progress,
    prompt: PromptTemplate,
) -> list[Draft]:
    drafts = {}
    for record in log.values():
        try:
            drafts[record["question"]] = Draft.model_validate(record["draft"])
        except (TypeError, LookupError, ValueError) as error:
            raise not_ours(log) from error
    missing = [q for q in dict.fromkeys(questions) if q not in drafts]
    for start in range(0, len(missing), _CHUNK):
        chunk = missing[start : start + _CHUNK]
        written = proxy.generate(prompt, [{"question": q} for q in chunk], tokens=tokens)
        new = dict(zip(chunk, written, strict=True))
        log.append({"question": q, "draft": draft.model_dump(mode="json")} for q, draft in new.items())
        drafts |= new
        progress("writing drafts", len(questions) - len(missing) + start + len(chunk), len(questions))
    return [drafts[q] for q in questions]


def not_ours(log: JsonlLog) -> DataFormatError:
    """Build the error for a file of the cache that holds something else than was written to it."""
    return DataFormatError(
        f"{str(log.path)!r} holds something else than what is kept there.",
        hint="Remove the file: it is made anew.",
    )


def recorded_draft(proxy: Proxy, text: str, tokens: int) -> Draft:
    """Return the first tokens of a recorded text, counted by the proxy's tokenizer."""
    head = proxy.truncate(text, tokens)
    return Draft(text=(head or text).strip(), source="recorded", finished=head is None)
