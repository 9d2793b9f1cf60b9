"""Text as the field compares it: normalised answers, which of them are right; and text of others in a log."""

from __future__ import annotations

import re
import string
from collections.abc import Sequence
from urllib.parse import unquote

from rgate_integrations.errors import NoAnswerError
from rgate_integrations.runtime.replies import describe_non_answer

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_LONGEST_IN_LOG = 300  # characters
_LONGEST_WORD = 32  # characters; what is longer may be a key
_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2}|.)")
_WORD = re.compile(r"\w+")
_PART = re.compile(r"[^\W\d_]+|\d+")  # of a word: "who_wrote_hamlet" has three
_JSON_ESCAPE = re.compile(
    rb"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(u[dD][89a-fA-F][0-9a-fA-F]{2})|.)",
    re.DOTALL,
)


def normalise(text: str) -> str:
    """Lower-case a text and drop punctuation, English articles and extra white space (SQuAD's normalisation).

    >>> normalise("The  Beatles, (band)")
    'beatles band'
    """
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def encodable(text: str) -> str:
    """Replace halves of surrogate pairs, which have no bytes in UTF-8 and which tokenizers refuse, by ``?``."""
    return text.encode("utf-8", errors="replace").decode()


def replace_surrogates(content: bytes) -> bytes:
    r"""Return JSON whose escapes name no half of a surrogate pair: some parsers refuse all of a message with one.

    >>> print(replace_surrogates(rb'["\ud83d\ude00", "\ud83d", "\\ud83d"]').decode())
    ["\ud83d\ude00", "\ufffd", "\\ud83d"]
    """
    return _JSON_ESCAPE.sub(lambda escape: rb"\ufffd" if escape[1] else escape[0], content)


def redact(message: object, *private: object) -> str:
    r"""Return a message for a log: one line, at most 300 characters, without words of private texts.

    Errors of libraries quote what they were given, whole, cut or escaped. Their line feeds would forge lines.

    Args:
        message: The message, or an exception that has it.
        *private: The texts, such as a question.

    >>> redact("cannot parse 'Who wrote Hamlet?'\nERROR forged", "Who wrote Hamlet?")
    "cannot parse '… … …?' ERROR forged"
    """
    text = " ".join(map(str, private)).casefold()
    words = set(_PART.findall(text))

    def mask(found: re.Match[str]) -> str:
        return "…" if len(found.group()) > _LONGEST_WORD else _PART.sub(mask_part, found.group())

    def mask_part(found: re.Match[str]) -> str:
        part = found.group().casefold()
        return "…" if part in words or (len(part) > 2 and part in text) else found.group()

    # Words are cut after they are masked: a part of one would not be recognised.
    shown = _ESCAPE.sub(" ", unquote(str(message)[: 4 * _LONGEST_IN_LOG]))  # errors of HTTP quote URLs
    printable = "".join(character if character.isprintable() else " " for character in shown)
    return _WORD.sub(mask, " ".join(printable.split()))[:_LONGEST_IN_LOG]


def normalise_answers(answers: Sequence[str]) -> list[str]:
    """Normalise answers that will be compared with each other.

    What is no answer is made different from all others: two LLM samples that say nothing, or refuse, do not agree.

    Raises:
        NoAnswerError: None is an answer.
    """
    texts = ["" if describe_non_answer(answer) else normalise(answer) for answer in answers]
    if not any(texts):
        raise NoAnswerError(f"None of {len(texts)} samples is an answer.")
    return [text or f"\0{i}" for i, text in enumerate(texts)]


def contains_answer(text: str, answer: str) -> bool:
    """Whether a normalised answer occurs in a normalised text, on token boundaries.

    An answer that normalises to nothing is never contained.

    >>> contains_answer("I do not know", "no"), contains_answer("No, it is not.", "no")
    (False, True)
    """
    inner = normalise(answer)
    return bool(inner) and f" {inner} " in f" {normalise(text)} "


def is_correct(answer: str, gold: Sequence[str]) -> bool:
    """Whether an answer contains a gold answer. Every label of this package that is not given is made here.

    Gold answers that normalise to nothing never match.

    >>> is_correct("I do not know.", ["no"]), is_correct("No, it is not.", ["no", "never"])
    (False, True)
    """
    return any(contains_answer(answer, each) for each in gold)


def matching_ratio(text: str, answers: Sequence[str]) -> float:
    """Return the share of gold answers that a text contains (SlimPLM, equation 2), on token boundaries.

    Answers that normalise to nothing do not count. 0.0 when none is left.
    """
    contained = [contains_answer(text, answer) for answer in answers if normalise(answer)]
    return sum(contained) / max(len(contained), 1)
