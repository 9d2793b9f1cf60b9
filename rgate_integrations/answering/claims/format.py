"""Parse and print the tagged claims that SlimPLM's query rewriter writes, in both published forms.

The paper (section 3.3) writes ``<Claim> text <Query> text ...``. The annotated data (appendix, table 8) write
``<Claims> <Claim(text)> <Search(True)> <Query(text)> ... </Claims>`` and, for the question itself, the same
with ``<Question(text)>`` inside ``<Questions> ... </Questions>``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from rgate_integrations.decision import Frozen

ClaimKind = Literal["claim", "question"]
TagStyle = Literal["annotated", "paper"]

_NAMES = r"Claims?|Questions?|SubQuestion|Search|NeedSearch|Query"
_MARK = re.compile(rf"<[</\s]*(?P<name>(?:{_NAMES})\b)?", re.IGNORECASE)
_BLOCK = re.compile(r"<\s*(Claim|Question|SubQuestion)\s*(?=[(>])", re.IGNORECASE)
_TEXT = rf"((?:(?!</?\s*(?:{_NAMES})\b|\)\s*>).)+)"
_TAGGED = {
    "text": re.compile(rf"<\s*(?:Claim|Question|SubQuestion)\s*\({_TEXT}\)\s*>", re.IGNORECASE | re.DOTALL),
    "query": re.compile(rf"<\s*Query\s*\({_TEXT}\)\s*>", re.IGNORECASE | re.DOTALL),
    "plain text": re.compile(rf"<\s*(?:Claim|Question|SubQuestion)\s*>{_TEXT}", re.IGNORECASE | re.DOTALL),
    "plain query": re.compile(rf"<\s*Query\s*>{_TEXT}", re.IGNORECASE | re.DOTALL),
}
_SEARCH = re.compile(r"<\s*(?:Need)?Search\s*\(\s*(True|False)\s*\)\s*>", re.IGNORECASE)


class Claim(Frozen):
    """One self-contained statement of a draft, or one sub-question of the question.

    Attributes:
        text: The statement or sub-question, on one line.
        query: The search query for it, on one line; None when the rewriter gave none.
        needs_search: What the rewriter said about searching for it; None when it said nothing.
        kind: ``"claim"`` of the draft or sub-``"question"`` of the question.
    """

    text: str = Field(min_length=1)
    query: str | None = None
    needs_search: bool | None = None
    kind: ClaimKind = "claim"


def parse_claims(text: str) -> list[Claim]:
    """Read tagged claims out of a model's output, in either form or a mixture.

    Never raises: text without tags has no claims, and a block that cannot be read costs that block only.
    Every text and query returned stands in ``text``, up to white space.

    >>> [c.query for c in parse_claims("<Claim> Paris is in France. <Query> Paris country")]
    ['Paris country']
    """
    starts = list(_BLOCK.finditer(text))
    ends = [start.start() for start in starts[1:]] + [len(text)]
    claims = []
    for start, end in zip(starts, ends, strict=False):
        block = text[start.start() : end]
        statement = _first(block, "text") or _first(block, "plain text")
        if statement is None:
            continue
        search = _SEARCH.search(block)
        claim = Claim(
            text=statement,
            query=_first(block, "query") or _first(block, "plain query"),
            needs_search=None if search is None else search.group(1).lower() == "true",
            kind="claim" if start.group(1).lower() == "claim" else "question",
        )
        claims.append(claim)
    return claims


def _first(block: str, what: str) -> str | None:
    """Return the first text of a kind in a block, on one line; None where it is missing or empty."""
    match = _TAGGED[what].search(block)
    if match is None:
        return None
    return " ".join(match.group(1).split()) or None


def print_claims(claims: Sequence[Claim], style: TagStyle = "annotated") -> str:
    """Print claims with tags. ``parse_claims`` reads back what the style can express.

    The paper's style has no place for `Claim.needs_search` and for sub-questions, which it leaves out.
    """
    if style == "paper":
        return " ".join(_plain_block(claim) for claim in claims if claim.kind == "claim")
    parts = []
    for kind, tag in (("question", "Question"), ("claim", "Claim")):
        blocks = [_block(claim, tag) for claim in claims if claim.kind == kind]
        if blocks:
            parts.append(f"<{tag}s> {' '.join(blocks)} </{tag}s>")
    return " ".join(parts)


def _plain_block(claim: Claim) -> str:
    query = f" <Query> {claim.query}" if claim.query else ""
    return f"<Claim> {claim.text}{query}"


def _block(claim: Claim, tag: str) -> str:
    search = "" if claim.needs_search is None else f" <Search({claim.needs_search})>"
    query = "" if claim.query is None else f" <Query({claim.query})>"
    return f"<{tag}({claim.text})>{search}{query}"


def without_tags(text: str) -> str:
    """Take the tags' opening marks out of a text, so that quoting it in a prompt cannot plant claims."""
    # With all that stands before the name: what is left of a mark inside a mark could be one again.
    return _MARK.sub(lambda mark: " " if mark["name"] else mark.group(), text)
