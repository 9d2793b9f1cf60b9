"""Tells a text that a request quotes from what the request says about it."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import NamedTuple

from rgate_integrations.runtime.segments import (
    count_words,
    is_question,
    lists_questions,
    segments,
    split_lines,
)

_QUOTATION = re.compile(
    r"\"{3}([^\"]+)\"{3}|\"([^\"]+)\"|[“„”]([^“„”]+)[“”]|«([^«»]+)»|»([^«»]+)«|「([^「」]+)」|『([^『』]+)』"
)
_TAGGED = re.compile(r"(<[^<>\s]{1,20}>\s*)\S.*")
_LABELLED = re.compile(r"([^:：]{1,150}(?::(?=\s)|：)\s*)\S.*")
_INTRODUCED = re.compile(r"([^:：\n]{3,80}(?::(?=\s)|：))\s*(\S.*)", re.DOTALL)
_MIN_WORDS, _MAX_WORDS_ABOUT, _MAX_WORDS_INTRODUCING, _MAX_WORDS_OF_QUESTION = 4, 25, 12, 6
_MAX_WORDS_ASKED = 40  # longer statements are probably text to work on
_MAX_CHARS, _MAX_QUOTATIONS = 4_000, 3  # JSON has more
_MAX_AROUND = 3  # segments that may be questions; more of them list what is asked
_ENDS = ".!。！।…;； "
PLACE = "…"
"""Stands for the quoted text in what a request says about it."""


class Quotation(NamedTuple):
    """A text in a request, and what the request says about it; both "" if there is none."""

    about: str
    """The request with `PLACE` for the text."""
    text: str
    """The text; its statements are questions if these are at most 40 words, unless there are others."""
    is_marked: bool = False
    """Whether quotation marks or a colon tell where the text is."""


def split_quotation(text: str) -> Quotation:
    """Split a request into a text that it quotes and what it says about it.

    The text is in quotation marks, follows a colon, or comes, in at most 40 words, before a short question that ends
    the request. It has at least four words, what is said about it at most 25.

    >>> split_quotation('My boss wrote: "The office is closed in May." Is she right?')[:2]
    ('My boss wrote: … Is she right?', 'The office is closed in May?')
    >>> split_quotation("Ann says the office is closed. Is that true?")[:2]
    ('… Is that true?', 'Ann says the office is closed?')
    >>> split_quotation("Who wrote Hamlet?").text
    ''
    """
    if len(text) > _MAX_CHARS or len(_QUOTATION.findall(text)) > _MAX_QUOTATIONS:
        return Quotation("", "")
    about, quoted = _split_quoted(text)
    marked = Quotation(about, "\n".join(map(_ask, quoted)), is_marked=True)
    found = marked if quoted else _split_plain(text)
    return found if count_words(found.about) <= _MAX_WORDS_ABOUT else Quotation("", "")


def _split_quoted(text: str) -> tuple[str, list[str]]:
    """Return a text with `PLACE` for what it has in quotation marks, at least four words, and these texts."""
    quoted: list[str] = []

    def cut(match: re.Match[str]) -> str:
        content = next(filter(None, match.groups()))
        if not _is_text(content):
            return match.group()
        quoted.append(content)
        return PLACE

    return _QUOTATION.sub(cut, text), quoted


def _split_plain(text: str) -> Quotation:
    """Return what `split_quotation` does, for a text without quotation marks."""
    *before, last = segments(text) or [""]
    # A question with numbers ("What is 17 times 23?") is about these.
    asks = (
        is_question(last) and count_words(last) <= _MAX_WORDS_OF_QUESTION and not any(map(str.isdigit, last))
    )
    question = f" {last}" if asks and not any(map(is_question, before)) else ""
    introduced = _INTRODUCED.fullmatch(text.strip())
    if introduced and count_words(introduced[1]) <= _MAX_WORDS_INTRODUCING:
        if _is_text(introduced[2]):
            about = f"{introduced[1]} {PLACE}{'' if introduced[2] == last else question}"
            return Quotation(about, _ask(introduced[2]), is_marked=True)
    elif question and _is_text(content := " ".join(before)) and count_words(content) <= _MAX_WORDS_ASKED:
        return Quotation(f"{PLACE}{question}", _ask(content))
    return Quotation("", "")


def leave_out(text: str, indices: Collection[int]) -> str:
    r"""Return a request with `PLACE` for a text in it; "" if it seems to have none, or lists questions.

    The text is what the request has in quotation marks, if none of some segments is outside. Otherwise, it goes from
    the first of these to the last, without a label or a tag at its beginning.

    Args:
        text: The request.
        indices: Indices of the segments in `rgate_integrations.runtime.segments.segments`.

    >>> leave_out("Is this a complaint? Yes or no.\nMessage: When do you close?", [2])
    'Is this a complaint? Yes or no.\nMessage: …'
    """
    texts = segments(text)
    quoting, quoted = _split_quoted(text)
    if len(texts) > _MAX_AROUND and lists_questions(texts):
        return ""
    if len(texts) == 1 and not any(
        is_question(each) for content in quoted or texts for each in segments(content)
    ):
        return ""  # "Two columns, English and Dutch: the mail that Ann sent" has no text
    outside = {each for each in segments(quoting) if PLACE not in each}
    if quoting != text and not outside.intersection(texts[i] for i in indices):
        return quoting
    first, last = min(indices, default=0), max(indices, default=-1)
    if not indices or any(_split_quoted(each)[1] for each in texts[first : last + 1]):
        return ""
    marked = _LABELLED.fullmatch(texts[first]) or _TAGGED.fullmatch(texts[first])
    lines: list[str] = []
    number = 0
    for line in split_lines(text):
        kept = []
        for segment in line:
            if not first <= number <= last:
                kept.append(segment)
            elif number == first:
                kept.append(f"{marked[1]}{PLACE}" if marked else PLACE)
            number += 1
        lines += [" ".join(kept)] * bool(kept)
    rest = "\n".join(lines)
    # "Who approved it? Translate “see you” into Dutch." has two requests, and "It shows E14. How do I correct this?"
    # is about the matter of what it tells.
    # Before "It is urgent.", on a line of its own, a question is no text to work on.
    is_beside = _QUOTATION.search(text) or any(line.startswith(f"{PLACE} ") for line in lines) or first == 0
    return rest if any(map(str.isalpha, rest)) and (marked or not is_beside) else ""


def _is_text(text: str) -> bool:
    return count_words(text) >= _MIN_WORDS and any(map(str.isalnum, text))


def _ask(text: str) -> str:
    """Return a text with each statement as a question; unchanged if it is long, or has a question before its end."""
    texts = segments(text)
    if count_words(text) > _MAX_WORDS_ASKED or any(map(is_question, texts[:-1])):
        return text.strip()
    # Of several, one without a mark at its end is a greeting, a name or a heading.
    return " ".join(
        each if is_question(each) or (len(texts) > 1 and each[-1] not in _ENDS) else f"{each.rstrip(_ENDS)}?"
        for each in texts
    )
