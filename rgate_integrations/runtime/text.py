"""Compares answers after SQuAD's normalisation, redacts texts for logs, and converts requests to plain letters.

In plain letters, full-width, bold and similar letters become ordinary ones; invisible characters and runs of emoji
are dropped. Encoded text is detected.
"""

from __future__ import annotations

import base64
import binascii
import html
import logging
import re
import string
import unicodedata
from collections.abc import Sequence
from urllib.parse import unquote

from rgate_integrations.errors import NoAnswerError
from rgate_integrations.runtime.replies import describe_non_answer

IDEOGRAPHS = "\u3040-\u30ff\u3400-\u9fff"
"""Kana and Han characters, for a regular expression."""
MARKS = "".join(chr(code) for code in range(0x300, 0xE00) if unicodedata.category(chr(code))[0] == "M")
"""Vowel signs, viramas and accents, for a regular expression: parts of words that ``\\w`` does not match.

Thai, Khmer and other scripts without spaces are left out: cut at vowel signs, parts of a clause can at least match.
"""
UNSPACED = re.compile(rf"[{IDEOGRAPHS}\u0e00-\u0eff]")
"""Matches a character of a script without spaces between words, such as Japanese or Thai."""
# What may follow a Korean name within its word.
_PARTICLES = (
    "(?:은|는|이|가|을|를|의|에|에서|에는|도|로|으로|와|과|만|까지|부터"
    "|입니다|이다|였다|이었다|이에요|예요|이며|이고)"
)

logger = logging.getLogger("rgate_integrations")
"""The logger of the whole package. What users wrote, or a server said, goes through `redact` first."""

_ARTICLES = re.compile(r"\b(a|an|the)\b(?![+#])")
# As SQuAD does, "U.S." is "us". LLMs write typographic quotes and hyphens; gold answers, ASCII.
_DROPPED = string.punctuation + "‘’‚“”„«»´‐‑–٬"
_SEPARATORS = "—…،؛؟۔।。、・「」『』《》（），：；！？"  # no white space follows them
# Ligatures, full-width letters, and the digits of all scripts. NFKC would change others: "10²" is not "102".
_PLAIN = {
    chr(code): unicodedata.normalize("NFKC", chr(code))
    for code in (*range(0xFB00, 0xFB07), *range(0xFF41, 0xFF5B))
}
_DIGITS = {
    chr(code): str(unicodedata.decimal(chr(code)))
    for code in (*range(0x660, 0x1C60), *range(0xFF10, 0xFF1A))
    if chr(code).isdecimal()
}
_PUNCTUATION = str.maketrans(_PLAIN | _DIGITS | dict.fromkeys(_DROPPED, "") | dict.fromkeys(_SEPARATORS, " "))
# Unlike SQuAD's, because "1.5" is not "15", "-5" is not "5", and "C++" is not "C".
_MEANT = re.compile(
    r"""(
    (?<=\d)[.٫](?=\d)
    | (?<=\b0),(?=\d)
    | (?<=\d),(?=\d)(?!\d{3}(?!\d))  # before three digits, it separates thousands
    | (?<!\w)[-−–](?=\d)
    | (?<=[^\W\d_])(?:\+\+|\#)
    )""",
    re.VERBOSE,
)
_MEANT_FORMS = str.maketrans(",٫−–", "..--")
_MAX_LOGGED = 300  # characters
_SAY_NOTHING = re.compile(
    "an?|the|and|or|not?|of|in|on|at|to|for|from|with|by|as|is|are|was|be|its?|this|that|what|which|who|how"
    "|do(?:es)?|did|can|could|must|has|have|one|all|if|but|out|up|per|than|when|where|why|after|before|s"
)
"""Words that reveal nothing about a private text, and that log messages need."""
# Not every letter after a backslash: it may begin the name of a folder.
_ESCAPE = re.compile(r"\\+(?:u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|x[0-9a-fA-F]{2}|[bfnrt\W_])")
_LONG_WORD = re.compile(r"\w{33,}")  # may be an API key
_PART = re.compile(r"[^\W\d_]+|\d+")  # the parts of a word: "who_wrote_hamlet" has three


def normalise(text: str) -> str:
    """Return a text in lower case, without punctuation, English articles and extra white space, as SQuAD does.

    Em dashes, and Arabic, Indian, Chinese and Japanese punctuation, count as white space. Decimal points, minus
    signs, and the symbols of C++ and C# are kept. It makes no difference how accents, ligatures, full-width
    letters and digits are encoded.

    Examples:
        >>> normalise("The  Beatles, (band)"), normalise("-1,000.5"), normalise("C++")
        ('beatles band', '-1000.5', 'c++')
    """
    # Text from PDF files has soft hyphens and, like that from Macs, accents that are characters of their own.
    parts = _MEANT.split(unicodedata.normalize("NFC", _INVISIBLE.sub("", text)).lower())
    parts[::2] = [part.translate(_PUNCTUATION) for part in parts[::2]]
    parts[1::2] = [part.translate(_MEANT_FORMS) for part in parts[1::2]]
    return " ".join(_ARTICLES.sub(" ", "".join(parts)).split())


def encodable(text: str) -> str:
    """Return a text with ``?`` for lone surrogates (halves of an emoji), which UTF-8 and tokenizers reject."""
    return text.encode("utf-8", errors="replace").decode()


def tidy(text: str) -> str:
    """Return a text without white space around it, and with NUL bytes, as in pasted data, as spaces; `encodable`."""
    return encodable(text.replace("\0", " ").strip())


def redact(message: object, *private: object) -> str:
    r"""Make a message safe for a log: one line of at most 300 characters, without telling words of private texts.

    Libraries quote their input in errors, in full, truncated or escaped. Line feeds in it could forge log lines.
    Words of more than 32 characters, which may be keys, are masked, too.

    Args:
        message: The message, or an exception.
        *private: The private texts, such as a question.

    Examples:
        >>> redact("cannot parse 'Who wrote Hamlet?'\nERROR forged", "Who wrote Hamlet?")
        "cannot parse 'Who … …?' ERROR forged"
    """
    text = _same_letters(" ".join(map(str, private))).casefold()
    private_parts = set(_PART.findall(text))

    def mask(match: re.Match[str]) -> str:
        part = match.group().casefold()
        # The library may have cut a word, so longer parts are also private inside one.
        is_private = part in text if len(part) > 2 else part in private_parts
        return "…" if is_private and not _SAY_NOTHING.fullmatch(part) else match.group()

    plain = _ESCAPE.sub(" ", unquote(str(message)[: 4 * _MAX_LOGGED]))  # HTTP errors quote URLs
    letters = _same_letters(plain)  # gates read plain letters, and their errors quote these
    printable = "".join(character if character.isprintable() else " " for character in letters)
    safe = _LONG_WORD.sub("…", " ".join(printable.split()))
    # Truncate last, because half of a private word would not be recognised.
    return _PART.sub(mask, safe)[:_MAX_LOGGED]


def _same_letters(text: str) -> str:
    """Return a text with one form of each letter, however it is encoded, and without invisible characters."""
    return unicodedata.normalize("NFKC", _INVISIBLE.sub("", text))


def normalise_answers(answers: Sequence[str]) -> list[str]:
    """Return answers in a normalised form, in which answers that agree are equal; see `normalise`.

    Each empty text, refusal and tool call becomes unique, so that two of them never count as agreeing.

    Raises:
        NoAnswerError: No text is an answer.
    """
    texts = ["" if describe_non_answer(answer) else normalise(answer) for answer in answers]
    if not any(texts):
        raise NoAnswerError(
            f"None of the {len(texts)} samples is an answer: each is empty, a refusal or a tool call.",
            hint="Try another model, or allow more tokens per sample.",
        )
    return [text or f"\0{i}" for i, text in enumerate(texts)]


def contains_answer(text: str, answer: str) -> bool:
    """Return whether an answer occurs in a text, as whole words, after both are normalised.

    An answer that is empty once normalised is never contained. Chinese, Japanese and Thai may touch other
    words, so an answer of several of their characters may occur anywhere. A Korean particle may follow an answer. In
    a date such as 10月3日, only the year is an answer.

    Examples:
        >>> contains_answer("I do not know", "no"), contains_answer("No, it is not.", "no")
        (False, True)
    """
    inner, outer = normalise(answer), normalise(text)
    if not UNSPACED.fullmatch(inner):
        inner, outer = (" ".join(UNSPACED.sub(r" \g<0> ", each).split()) for each in (inner, outer))
    in_date = "(?! ?[年月日년월일])" if inner.isdecimal() and len(inner) != len("1998") else ""
    attached = rf"{_PARTICLES}(?!\S)" if "가" <= inner[-1:] <= "힣" else "[가-힣]"
    return (
        bool(inner)
        and re.search(rf"(?<!\S){re.escape(inner)}{in_date}(?:(?!\S)|{attached})", outer) is not None
    )


def is_correct(answer: str, gold: Sequence[str]) -> bool:
    """Return whether an answer contains one of the gold answers, see `contains_answer`; False if there are none.

    Examples:
        >>> is_correct("I do not know.", ["no"]), is_correct("No, it is not.", ["no", "never"])
        (False, True)
    """
    return any(contains_answer(answer, text) for text in gold)


def matching_ratio(text: str, answers: Sequence[str]) -> float:
    """Return the share of gold answers that a text contains as whole words (SlimPLM, equation 2).

    Answers that normalise to nothing are ignored; the ratio is 0.0 if none remain.
    """
    contained = [contains_answer(text, answer) for answer in answers if normalise(answer)]
    return sum(contained) / max(len(contained), 1)


# --- letters ---------------------------------------------------------------------------------------------------

# Minimum number of consecutive escapes that count as hidden text. Fewer occur in ordinary text.
_MIN_ESCAPES = 12
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
_ENTITY = re.compile(
    r"&(?:nbsp|amp|lt|gt|quot|apos|[lr][sd]quo|hellip|[mn]dash|#39|#160|#x27|#8217);"
)  # no hidden words
_EMOJI_NAME = re.compile(r"(?<!\S):[a-z+][a-z0-9_+-]*:(?!\S)")
_ADDRESSEE = re.compile(r"^\s*<@[!&]?\w+>[\s,:]*")  # a bot, as Slack and Discord write it
_ADDRESS = re.compile(r"\b(?:https?://|www\.)\S+", re.IGNORECASE)
_ENCODED = {
    "HTML entities": re.compile(
        rf"(?:&(?:#\d{{1,7}}|#[xX][0-9a-fA-F]{{1,6}}|\w{{1,8}});\s?){{{_MIN_ESCAPES},}}"
    ),
    "percent escapes": re.compile(rf"(?:%[0-9a-fA-F]{{2}}\s?){{{_MIN_ESCAPES},}}"),
    "backslash escapes": re.compile(
        rf"(?:\\(?:u[0-9a-fA-F]{{4}}|u\{{[0-9a-fA-F]{{1,6}}\}}|U[0-9a-fA-F]{{8}}|x[0-9a-fA-F]{{2}})\s?){{{_MIN_ESCAPES},}}"
    ),
    "base64": re.compile(r"[A-Za-z0-9+/_-]{16,}={0,2}"),
}
_CODE_POINT = re.compile(r"\\[uUx]\{?([0-9a-fA-F]{2,8})\}?")


def plain_text(text: str) -> str:
    r"""Return a text in the plain letters that a person sees; the text itself if nothing would remain.

    Examples:
        >>> plain_text("Ｗｈｅｎ is my 𝐛𝐢𝐥\u200b𝐥 due? 😀😀😀😀")
        'When is my bill due?'
        >>> plain_text("<@U02AB3> when&#39;s it&nbsp;due? :pray:")
        "when's it due?"
    """
    seen = _ENTITY.sub(lambda entity: html.unescape(entity[0]).replace("\xa0", " "), text)
    text = _EMOJI_NAME.sub("", _ADDRESSEE.sub("", seen)).strip() or text
    # The usual case, which needs none of this.
    if text.isascii():
        return text
    # Punctuation is kept as is: NFKC would turn the full-width marks that end Chinese sentences into ASCII.
    parts = _MARKS.split(_INVISIBLE.sub("", text))
    parts[::2] = [unicodedata.normalize("NFKC", part) for part in parts[::2]]
    return _EMOJI_RUN.sub(" ", "".join(parts)).strip() or text


def detect_encoding(text: str) -> str:
    """Return the encoding in which a text hides words from models, such as ``base64``; empty if it hides none.

    Examples:
        >>> detect_encoding("Please answer: V2hlbiBpcyBteSBiaWxsIGR1ZT8=")
        'base64'
    """
    text = _ADDRESS.sub(" ", text)  # a URL may be full of escapes without hiding anything
    for name, pattern in _ENCODED.items():
        for match in pattern.finditer(text):
            hidden = _decode(name, match.group())
            letters = sum(character.isalpha() for character in hidden)
            # Only what decodes to words counts: mostly letters and spaces.
            if letters >= _MIN_ESCAPES - 4 and letters + hidden.count(" ") >= 0.75 * len(hidden):
                return name
    return ""


def _decode(name: str, text: str) -> str:
    """Decode a text from the encoding ``name``; empty if that is impossible."""
    if name == "HTML entities":
        return html.unescape(text)
    if name == "percent escapes":
        return unquote("".join(text.split()), errors="ignore")
    if name == "backslash escapes":
        codes = [int(code, 16) for code in _CODE_POINT.findall(text)]
        if max(codes) < 256:  # usually the bytes of UTF-8
            return bytes(codes).decode(errors="ignore")
        return "".join(chr(code) for code in codes if code < 0x110000)
    unpadded = text.rstrip("=").translate(str.maketrans("-_", "+/"))
    try:
        return base64.b64decode(unpadded + "=" * (-len(unpadded) % 4)).decode()
    except (binascii.Error, UnicodeDecodeError):
        return ""
