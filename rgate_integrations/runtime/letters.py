"""Converts text to plain letters for models, and detects encoded text.

Full-width, bold and similar letters become plain ones; invisible characters and runs of emoji are dropped.
"""

from __future__ import annotations

import base64
import binascii
import html
import re
import unicodedata
from urllib.parse import unquote

IDEOGRAPHS = "\u3040-\u30ff\u3400-\u9fff"
"""Kana and Han characters, for a regular expression."""
UNSPACED = re.compile(rf"[{IDEOGRAPHS}\u0e00-\u0eff]")
"""Matches a character of a script without spaces between words, such as Japanese or Thai."""

# Minimum number of consecutive escapes that count as hidden text. Fewer occur in ordinary text.
_FEWEST = 12
# Full-width punctuation, which ends sentences in ordinary Chinese and Japanese.
_MARKS = re.compile("([\u2026\u3001-\u303f\uff01\uff08\uff09\uff0c\uff1a\uff1b\uff1f\uff5e-\uff65])")
# Unicode's Default_Ignorable_Code_Point. Scripts from Hebrew to Khmer and Meetei need zero-width
# joiners and non-joiners for spelling, so these are kept there.
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
    r"""Return a text in the plain letters that a person sees; the text itself if nothing would remain.

    >>> plain_text("Ｗｈｅｎ is my 𝐛𝐢𝐥\u200b𝐥 due? 😀😀😀😀")
    'When is my bill due?'
    """
    # The usual case, which needs none of this.
    if text.isascii():
        return text
    # Punctuation is kept as is: NFKC would turn the full-width marks that end Chinese sentences into ASCII.
    parts = _MARKS.split(_INVISIBLE.sub("", text))
    parts[::2] = [unicodedata.normalize("NFKC", part) for part in parts[::2]]
    return _EMOJI_RUN.sub(" ", "".join(parts)).strip() or text


def detect_encoding(text: str) -> str:
    """Return the encoding in which a text hides words from models, such as ``base64``; empty if it hides none.

    >>> detect_encoding("Please answer: V2hlbiBpcyBteSBiaWxsIGR1ZT8=")
    'base64'
    """
    text = _ADDRESS.sub(" ", text)  # a URL may be full of escapes without hiding anything
    for name, pattern in _ENCODED.items():
        for match in pattern.finditer(text):
            hidden = _decode(name, match.group())
            letters = sum(character.isalpha() for character in hidden)
            # Only what decodes to words counts: mostly letters and spaces.
            if letters >= _FEWEST - 4 and letters + hidden.count(" ") >= 0.75 * len(hidden):
                return name
    return ""


def _decode(name: str, text: str) -> str:
    """Decode a text from the encoding ``name``; empty if that is impossible."""
    if name == "HTML entities":
        return html.unescape(text)
    if name == "percent escapes":
        return unquote("".join(text.split()), errors="ignore")
    if name == "backslash escapes":
        codes = [int(code, 16) for code in _ESCAPE.findall(text)]
        if max(codes) < 256:  # usually the bytes of UTF-8
            return bytes(codes).decode(errors="ignore")
        return "".join(chr(code) for code in codes if code < 0x110000)
    unpadded = text.rstrip("=").translate(str.maketrans("-_", "+/"))
    try:
        return base64.b64decode(unpadded + "=" * (-len(unpadded) % 4)).decode()
    except (binascii.Error, UnicodeDecodeError):
        return ""
