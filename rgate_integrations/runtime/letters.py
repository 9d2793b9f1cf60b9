"""Letters as models read them: compatibility forms folded, what is invisible and runs of emoji left out."""

from __future__ import annotations

import base64
import binascii
import html
import re
import unicodedata
from urllib.parse import unquote

_FEWEST = 12
"""Escapes in a row, and letters in a base64 text, from which text is hidden."""
# Full-width marks stand in ordinary Chinese and Japanese, where they end sentences.
_MARKS = re.compile("([\u2026\u3001-\u303f\uff01\uff08\uff09\uff0c\uff1a\uff1b\uff1f\uff5e-\uff65])")
# Unicode's Default_Ignorable_Code_Point. Scripts from Hebrew to Khmer and Meetei are spelt with the joiners.
_INVISIBLE = re.compile(
    "[\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b\u200e\u200f\u202a-\u202e\u2060-\u206f\u3164"
    "\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufff8\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff]"
    "|(?<![\u0590-\u1cff\ua800-\uabff])[\u200c\u200d]"
)
_EMOJI_RUN = re.compile("(?:[\u2600-\u27bf\u2b00-\u2bff\U0001f000-\U0001faff]\\s*){3,}")
_ADDRESS = re.compile(r"\b(?:https?://|www\.)\S+", re.IGNORECASE)
_ENCODED = {
    "HTML entities": re.compile(rf"(?:&(?:#\d{{1,7}}|#[xX][0-9a-fA-F]{{1,6}}|\w{{1,8}});\s?){{{_FEWEST},}}"),
    "percent escapes": re.compile(rf"(?:%[0-9a-fA-F]{{2}}\s?){{{_FEWEST},}}"),
    "backslash escapes": re.compile(
        rf"(?:\\(?:u[0-9a-fA-F]{{4}}|u\{{[0-9a-fA-F]{{1,6}}\}}|U[0-9a-fA-F]{{8}}|x[0-9a-fA-F]{{2}})\s?){{{_FEWEST},}}"
    ),
    "base64": re.compile(r"[A-Za-z0-9+/_-]{16,}={0,2}"),
}
_ESCAPE = re.compile(r"\\[uUx]\{?([0-9a-fA-F]{2,8})\}?")


def plain_text(text: str) -> str:
    r"""Return a text as it looks to a reader, in plain letters; the text itself if nothing were left of it.

    >>> plain_text("Ｗｈｅｎ is my 𝐛𝐢𝐥\u200b𝐥 due? 😀😀😀😀")
    'When is my bill due?'
    """
    if text.isascii():
        return text
    parts = _MARKS.split(_INVISIBLE.sub("", text))
    parts[::2] = [unicodedata.normalize("NFKC", part) for part in parts[::2]]
    return _EMOJI_RUN.sub(" ", "".join(parts)).strip() or text


def find_original(text: str, part: str) -> str:
    """Return what a part of a plain text is in the text that it was made of; the part if it is not found.

    >>> find_original("𝐇𝐢! Ｗｈｅｎ is it due?", "When is it due?")
    'Ｗｈｅｎ is it due?'
    """
    if part in text:
        return part
    letters, places = [], []
    for place, character in enumerate(text):
        for letter in _letters(character):
            letters.append(letter)
            places.append(place)
    searched = _letters(part)
    begin = "".join(letters).find(searched)
    if begin < 0 or not searched:
        return part
    first, last = places[begin], places[begin + len(searched) - 1]
    return text[first : last + 1] + re.match(r"[^\w\s]*", text[last + 1 :])[0]  # type: ignore[index]  # may be empty


def _letters(text: str) -> str:
    return "".join(filter(str.isalnum, unicodedata.normalize("NFKD", text)))


def detect_encoding(text: str) -> str:
    """Return how text is written that stands in a text and that no model reads, such as ``base64``; empty if none is.

    >>> detect_encoding("Please answer: V2hlbiBpcyBteSBiaWxsIGR1ZT8=")
    'base64'
    """
    text = _ADDRESS.sub(" ", text)
    for name, pattern in _ENCODED.items():
        for found in pattern.finditer(text):
            if _is_prose(_decoded(name, found.group())):
                return name
    return ""


def _decoded(name: str, text: str) -> str:
    """Return a text of one of the encodings; empty if it is none."""
    if name == "HTML entities":
        return html.unescape(text)
    if name == "percent escapes":
        return unquote("".join(text.split()), errors="ignore")
    if name == "backslash escapes":
        codes = [int(code, 16) for code in _ESCAPE.findall(text)]
        if max(codes) < 256:  # bytes, as a rule
            return bytes(codes).decode(errors="ignore")
        return "".join(chr(code) for code in codes if code < 0x110000)
    unpadded = text.rstrip("=").translate(str.maketrans("-_", "+/"))
    try:
        return base64.b64decode(unpadded + "=" * (-len(unpadded) % 4)).decode()
    except (binascii.Error, UnicodeDecodeError):
        return ""


def _is_prose(text: str) -> bool:
    """Return whether a text is made of letters and spaces, as words are."""
    letters = sum(character.isalpha() for character in text)
    return letters >= _FEWEST - 4 and letters + text.count(" ") >= 0.75 * len(text)
