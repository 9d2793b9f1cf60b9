"""Tells a text that a request quotes from what the request says about it."""

from __future__ import annotations

import re
from typing import NamedTuple

from rgate_integrations.runtime.segments import count_words, is_question, segments

_QUOTATION = re.compile(
    r"\"{3}([^\"]+)\"{3}|\"([^\"]+)\"|[“„”]([^“„”]+)[“”]|«([^«»]+)»|»([^«»]+)«|「([^「」]+)」|『([^『』]+)』"
)
_INTRODUCED = re.compile(r"([^:：\n]{3,80}(?::(?=\s)|：))\s*(\S.*)", re.DOTALL)
_MIN_WORDS, _MAX_WORDS_ABOUT, _MAX_WORDS_INTRODUCING, _MAX_WORDS_OF_QUESTION = 4, 25, 12, 6
_MAX_WORDS_OF_TOPIC = 2
_MAX_WORDS_ASKED = 40  # longer statements are probably text to work on
_MAX_CHARS, _MAX_QUOTATIONS = 4_000, 3  # JSON has more
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
    asks: bool = False
    """Whether the text has a question in quotation marks, or is only questions after a colon."""


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
    quoted: list[str] = []

    def cut(match: re.Match[str]) -> str:
        content = next(filter(None, match.groups()))
        if not _is_text(content):
            return match.group()
        quoted.append(content)
        return PLACE

    about = _QUOTATION.sub(cut, text)
    asks = any(is_question(each) for content in quoted for each in segments(content))
    marked = Quotation(about, "\n".join(map(_ask, quoted)), is_marked=True, asks=asks)
    found = marked if quoted else _split_plain(text)
    return found if count_words(found.about) <= _MAX_WORDS_ABOUT else Quotation("", "")


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
            # "German office: when does it close?" has a topic before the colon.
            is_topic = count_words(introduced[1]) <= _MAX_WORDS_OF_TOPIC
            asks = not is_topic and all(map(is_question, segments(introduced[2])))
            return Quotation(about, _ask(introduced[2]), is_marked=True, asks=asks)
    elif question and _is_text(content := " ".join(before)) and count_words(content) <= _MAX_WORDS_ASKED:
        return Quotation(f"{PLACE}{question}", _ask(content))
    return Quotation("", "")


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
