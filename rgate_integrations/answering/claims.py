"""Claims of a draft, and the two tag formats for them that the authors of SlimPLM published."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from rgate_integrations.decision import Frozen, Text


class Claim(Frozen):
    """A self-contained statement of a draft, or a sub-question of the question.

    Attributes:
        text: The statement or sub-question, on one line.
        query: The search query for it, on one line; None without one.
        needs_search: Whether the claim needs a search, according to the rewriter; None if it does not say.
        kind: ``"claim"`` for a statement, ``"question"`` for a sub-question.
    """

    text: Text = Field(min_length=1)
    query: Text | None = None
    needs_search: bool | None = None
    kind: Literal["claim", "question"] = "claim"


# The paper (section 3.3) writes ``<Claim> text <Query> text ...``. The annotated data (appendix, table 8) write
# ``<Claims> <Claim(text)> <Search(True)> <Query(text)> ... </Claims>`` and, for the question itself, the same with
# ``<Question(text)>`` inside ``<Questions> ... </Questions>``.
_NAMES = r"Claims?|Questions?|SubQuestion|Search|NeedSearch|Query"
_MARK = re.compile(rf"<[</\s]*(?P<name>(?:{_NAMES})\b)?", re.IGNORECASE)
_BLOCK = re.compile(r"<\s*(Claim|Question|SubQuestion)\s*(?=[(>])", re.IGNORECASE)
_TEXT = rf"((?:(?!</?\s*(?:{_NAMES})\b|\)\s*>).)+)"
_TAGGED = r"<\s*(?:{name})\s*(?:\({text}\)\s*>|>{text})"
_STATEMENT = re.compile(
    _TAGGED.format(name="Claim|Question|SubQuestion", text=_TEXT), re.IGNORECASE | re.DOTALL
)
_QUERY = re.compile(_TAGGED.format(name="Query", text=_TEXT), re.IGNORECASE | re.DOTALL)
_SEARCH = re.compile(r"<\s*(?:Need)?Search\s*\(\s*(True|False)\s*\)\s*>", re.IGNORECASE)


def parse_claims(text: str) -> list[Claim]:
    """Return the tagged claims in a model's output, in either format of SlimPLM's authors or a mixture.

    Never raises: text without tags has no claims, and malformed blocks are skipped. Apart from white space, every
    claim and query is a substring of ``text``.

    Examples:
        >>> parse_claims("<Claim> Paris is in France. <Query> Paris country")[0].query
        'Paris country'
    """
    # A block lasts until the next one starts, so a malformed block cannot swallow its successors.
    starts = list(_BLOCK.finditer(text))
    ends = [start.start() for start in starts[1:]] + [len(text)]
    claims = []
    for start, end in zip(starts, ends, strict=False):
        block = text[start.start() : end]
        statement = _first(_STATEMENT, block)
        if statement is None:
            continue
        search = _SEARCH.search(block)
        claim = Claim(
            text=statement,
            query=_first(_QUERY, block),
            needs_search=None if search is None else search.group(1).lower() == "true",
            kind="claim" if start.group(1).lower() == "claim" else "question",
        )
        claims.append(claim)
    return claims


def _first(tagged: re.Pattern[str], block: str) -> str | None:
    """Return the text that the pattern ``tagged`` finds first in a block, on one line; None if missing or empty."""
    match = tagged.search(block)
    if match is None:
        return None
    return " ".join((match.group(1) or match.group(2)).split()) or None


def format_claims(claims: Sequence[Claim]) -> str:
    """Return claims in the format of SlimPLM's training data, which writes sub-questions like claims; "" for none."""
    blocks = []
    for claim in claims:
        block = f"<Claim({claim.text})>"
        if claim.needs_search is not None:
            block += f" <Search({claim.needs_search})>"
        if claim.query is not None:
            block += f" <Query({claim.query})>"
        blocks.append(block)
    return f"<Claims> {' '.join(blocks)} </Claims>" if blocks else ""


def without_tags(text: str) -> str:
    """Return a text without openings of tags, such as ``<Query``, so that quoting it in a prompt plants no claims."""
    # The pattern includes everything before the name: otherwise the rest of a nested tag could form a tag again.
    return _MARK.sub(lambda mark: " " if mark["name"] else mark.group(), text)
