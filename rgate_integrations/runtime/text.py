"""Compares answers after SQuAD's normalisation, replaces lone surrogates, and redacts texts for logs."""

from __future__ import annotations

import re
import string
from collections.abc import Sequence
from functools import cache
from urllib.parse import unquote

from rgate_integrations.errors import NoAnswerError
from rgate_integrations.runtime.letters import UNSPACED
from rgate_integrations.runtime.replies import describe_non_answer

_ARTICLES = re.compile(r"\b(a|an|the)\b")
# As SQuAD does, "U.S." is "us". LLMs write typographic quotes and hyphens; gold answers, ASCII.
_DROPPED = string.punctuation + "‘’‚“”„«»´‐‑–"
_SEPARATORS = "—…،؛؟۔।。、・「」『』《》（），：；！？"  # no white space follows them
_PUNCTUATION = str.maketrans(dict.fromkeys(_DROPPED, "") | dict.fromkeys(_SEPARATORS, " "))
_MAX_LOGGED = 300  # characters
_MAX_WORD = 32  # characters; a longer word may be an API key
_SAY_NOTHING = re.compile(
    "an?|the|and|or|not?|of|in|on|at|to|for|from|with|by|as|is|are|was|be|its?|this|that|what|which|who|how"
    "|do(?:es)?|did|can|could|must|has|have|one|all|if|but|out|up|per|than|when|where|why|after|before|s"
)
"""Words that reveal nothing about a private text, and that log messages need."""
# Not every letter after a backslash: it may begin the name of a folder.
_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|x[0-9a-fA-F]{2}|[bfnrt\W_])")
_WORD = re.compile(r"\w+")
_PART = re.compile(r"[^\W\d_]+|\d+")  # the parts of a word: "who_wrote_hamlet" has three


def normalise(text: str) -> str:
    """Return a text in lower case, without punctuation, English articles and extra white space, as SQuAD does.

    Em dashes, and Arabic, Indian, Chinese and Japanese punctuation, count as white space.

    Examples:
        >>> normalise("The  Beatles, (band)")
        'beatles band'
    """
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def encodable(text: str) -> str:
    """Return a text with ``?`` for lone surrogates (halves of an emoji), which UTF-8 and tokenizers reject."""
    return text.encode("utf-8", errors="replace").decode()


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
    text = " ".join(map(str, private)).casefold()

    @cache
    def is_private(part: str) -> bool:
        if _SAY_NOTHING.fullmatch(part):
            return False
        if len(part) > 2:  # also inside a longer word, which the library may have cut
            return part in text
        same = r"\d" if part.isdecimal() else r"[^\W\d_]"
        return re.search(rf"{part}(?!{same})(?<!{same}{part})", text) is not None

    def mask(word: re.Match[str]) -> str:
        return "…" if len(word.group()) > _MAX_WORD else _PART.sub(mask_part, word.group())

    def mask_part(part: re.Match[str]) -> str:
        return "…" if is_private(part.group().casefold()) else part.group()

    # Truncate last, because half of a private word would not be recognised.
    plain = _ESCAPE.sub(" ", unquote(str(message)[: 4 * _MAX_LOGGED]))  # HTTP errors quote URLs
    printable = "".join(character if character.isprintable() else " " for character in plain)
    return _WORD.sub(mask, " ".join(printable.split()))[:_MAX_LOGGED]


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

    An answer that is empty once normalised is never contained. In scripts without spaces between words, such as
    Chinese, an answer of several characters may occur anywhere.

    Examples:
        >>> contains_answer("I do not know", "no"), contains_answer("No, it is not.", "no")
        (False, True)
    """
    inner, outer = normalise(answer), normalise(text)
    if len(inner) > 1 and UNSPACED.search(inner):
        inner, outer = (" ".join(UNSPACED.sub(r" \g<0> ", each).split()) for each in (inner, outer))
    return bool(inner) and f" {inner} " in f" {outer} "


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
