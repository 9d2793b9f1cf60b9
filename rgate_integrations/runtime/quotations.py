"""Tells a text that a request quotes from what the request says about it."""

from __future__ import annotations

import re

from rgate_integrations.runtime.segments import count_words, is_question, segments

_QUOTATION = re.compile(
    r"\"{3}([^\"]+)\"{3}|\"([^\"]+)\"|[“„”]([^“„”]+)[“”]|«([^«»]+)»|»([^«»]+)«|「([^「」]+)」|『([^『』]+)』"
)
_INTRODUCED = re.compile(r"([^:：\n]{3,80}(?::(?=\s)|：))\s*(\S.*)", re.DOTALL)
_MIN_WORDS, _MAX_WORDS_ABOUT, _MAX_WORDS_INTRODUCING, _MAX_WORDS_OF_QUESTION = 4, 25, 12, 6
_MAX_WORDS_ASKED = 40  # longer statements are probably text to work on
_MAX_CHARS, _MAX_QUOTATIONS = 4_000, 3  # JSON has more
PLACE = "…"
"""Stands for the quoted text in what a request says about it."""


def split_quotation(text: str) -> tuple[str, str]:
    """Return what a request says about a text, with "…" in its place, and the text; ("", "") if there is none.

    The text is in quotation marks, follows a colon, or comes, in at most 40 words, before a short question that ends
    the request. It has at least four words, what is said about it at most 25. In at most 40 words, the statements
    become questions, unless there are others.

    >>> split_quotation('My boss wrote: "The office is closed in May." Is she right?')
    ('My boss wrote: … Is she right?', 'The office is closed in May?')
    >>> split_quotation("Ann says the office is closed. Is that true?")
    ('… Is that true?', 'Ann says the office is closed?')
    >>> split_quotation("Who wrote Hamlet?")
    ('', '')
    """
    if len(text) > _MAX_CHARS or len(_QUOTATION.findall(text)) > _MAX_QUOTATIONS:
        return "", ""
    quoted: list[str] = []

    def cut(match: re.Match[str]) -> str:
        content = next(filter(None, match.groups()))
        if not _is_text(content):
            return match.group()
        quoted.append(content)
        return PLACE

    about = _QUOTATION.sub(cut, text)
    if not quoted:
        about, *quoted = _split_plain(text)
    if not quoted or count_words(about) > _MAX_WORDS_ABOUT:
        return "", ""
    return about, "\n".join(map(_ask, quoted))


def _split_plain(text: str) -> tuple[str, ...]:
    """Return what `split_quotation` does, for a text without quotation marks; only ("",) if there is none."""
    *before, last = segments(text) or [""]
    # A question with numbers ("What is 17 times 23?") is about these.
    asks = (
        is_question(last) and count_words(last) <= _MAX_WORDS_OF_QUESTION and not any(map(str.isdigit, last))
    )
    question = f" {last}" if asks and not any(map(is_question, before)) else ""
    introduced = _INTRODUCED.fullmatch(text.strip())
    if introduced and count_words(introduced[1]) <= _MAX_WORDS_INTRODUCING:
        about, content = f"{introduced[1]} {PLACE}{question}", introduced[2]
    else:
        about, content = f"{PLACE}{question}", " ".join(before) if question else ""
        if count_words(content) > _MAX_WORDS_ASKED:
            return ("",)
    return (about, content) if _is_text(content) else ("",)


def _is_text(text: str) -> bool:
    return count_words(text) >= _MIN_WORDS and any(map(str.isalnum, text))


def _ask(text: str) -> str:
    """Return a text with each statement as a question; unchanged if it is long, or has a question before its end."""
    texts = segments(text)
    if count_words(text) > _MAX_WORDS_ASKED or any(map(is_question, texts[:-1])):
        return text.strip()
    return " ".join(each if is_question(each) else f"{each.rstrip('.!。！।…;； ')}?" for each in texts)
