"""Finds what ends an assistant's turn: a question or offer, which the user's next message may answer."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rgate_integrations.runtime.segments import ASSISTANT, USER, count_words, is_question, segments

_MAX_TURN_WORDS, _MIN_KEPT_WORDS = 60, 20
_MAX_TURN_CHARS = 2_000  # at each end of a turn, what is split into sentences
# "If you like, I can look it up": an offer, in the languages of `_JOINED`.
_OFFER = re.compile(
    r"\b(?:if you(?:['’]d| would)? (?:like|want|wish|prefer)|(?:if|whether) I should|want me to"
    r"|(?:wenn|falls) (?:du|sie) (?:es |das )?(?:möchte|mag|mög|will|woll|wünsch)\w*|ob ich|als (?:je|u) wilt?"
    r"|si (?:vous|tu) (?:le )?(?:voul|veu|souhait|préfér)\w*|si (?:lo )?(?:quier|dese|prefier)\w*"
    r"|se (?:lo )?(?:vuo|desider|preferis|quiser|desej|preferir)\w*)\b",
    re.IGNORECASE,
)
# A question to the user, in more languages; "And at night? It rests." is none.
_TO_USER = re.compile(
    r"\b(?:I|me|you|your|ich|mir|du|dir|dich|Sie|Ihnen|Ihre?|ik|je|jij|jouw?|u|uw|moi|tu|te|toi|vous|votre|yo|usted|su"
    r"|quieres?|deseas?|io|lei|vuoi|vuole|desidera|você|quer|deseja|вы|вам|вас|мне|ты|тебе|chcesz|mam|να)\b|[我你您]|ましょう|ますか|까요",
    re.IGNORECASE,
)
# "Just let me know!": what may follow a question that waits for an answer; a statement answers the question itself.
_INVITES = re.compile(
    r"\b(?:let me know|just (?:say|ask|tell)|tell me|say so|(?:happy|glad) to|feel free|sag|sagen sie|gerne?|melde"
    r"|dime|dígame|avís\w+|encantad[oa]|con gusto|dites|dis-|n['’]hésite|avec plaisir|fammi|mi faccia|dimmi"
    r"|volentieri|é só|me diga|me avise|laat|zeg|graag|скажите|дайте знать|буду рада?|daj|proszę|powiedz|chętnie"
    r"|πείτε|πες)\b"
    r"|告诉我|随时|乐意|教えて|お知らせ|お気軽|喜んで|말씀|알려",
    re.IGNORECASE,
)
_MAX_AFTER_QUESTION, _MAX_CLOSING_WORDS = 2, 6  # such as "Just let me know!"


def closing_question(text: str, *, before_any: bool = False) -> str:
    """Return the question or offer that ends the assistant's turn; empty if there is none.

    Up to two invitations of at most six words may follow a question to the user; with ``before_any``, up to two
    of any length may follow any question.

    >>> closing_question("It is blue. Shall I look up why? Just say so!"), closing_question("And red? It is longer.")
    ('Shall I look up why?', '')
    """
    waits = True
    for after, segment in enumerate(_last_sentences(text)):
        is_asked = is_question(segment) and (not after or before_any or (waits and _TO_USER.search(segment)))
        if is_asked or _OFFER.search(segment):
            return segment
        waits = waits and _INVITES.search(segment) is not None
        if not before_any and count_words(segment) > _MAX_CLOSING_WORDS:
            break
    return ""


def question_before(history: Sequence[str], *, before_any: bool = False) -> str:
    """Return the `closing_question` of the last turn, if that turn is the assistant's; empty otherwise."""
    return closing_question(_last_answer(history), before_any=before_any)


def closing_sentences(history: Sequence[str]) -> list[str]:
    """Return the last sentence of the assistant's last turn, and those before it while only invitations follow."""
    kept: list[str] = []
    for sentence in _last_sentences(_last_answer(history)):
        kept.insert(0, sentence)
        if count_words(sentence) > _MAX_CLOSING_WORDS or not _INVITES.search(sentence):
            break
    return kept


def _last_answer(history: Sequence[str]) -> str:
    is_answer = bool(history) and history[-1].startswith(ASSISTANT)
    return history[-1].removeprefix(ASSISTANT) if is_answer else ""


def _last_sentences(text: str) -> list[str]:
    """Return up to three sentences with words, the last first."""
    ends = [each for each in segments(text.rstrip()[-_MAX_TURN_CHARS:]) if any(map(str.isalnum, each))]
    return ends[: -2 - _MAX_AFTER_QUESTION : -1]


def shorten_turn(turn: str) -> str:
    """Return a turn of more than 60 words as its beginning and end; a shorter one unchanged.

    Kept are the first sentences, with at least 20 words, and the user's last one or the assistant's
    `closing_question`. With a whole long answer in its history, a follow-up would take ten times as long to read, and
    the decision about it would be worse (``benchmarks/conversations.py long``).

    Args:
        turn: The turn, beginning with ``user: `` or ``assistant: ``.
    """
    # Counting the words of many megabytes would take seconds.
    if len(turn) <= 2 * _MAX_TURN_CHARS and count_words(turn) <= _MAX_TURN_WORDS:
        return turn
    kept: list[str] = []
    for sentence in segments(turn[:_MAX_TURN_CHARS]):
        kept.append(sentence)
        if count_words(" ".join(kept)) >= _MIN_KEPT_WORDS:
            break
    last = segments(turn.rstrip()[-_MAX_TURN_CHARS:])[-1] if turn.startswith(USER) else closing_question(turn)
    if last and last not in kept:
        kept.append(last)
    return " ".join(kept)
