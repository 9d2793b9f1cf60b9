"""Messages that cannot be understood alone: follow-ups such as "And how tall is he?".

One rule for all that decides: where the gate reads the turns before a message, it decides; where there are turns that
it does not read, it retrieves; without any, a message whose words refer back retrieves, unless a gate that was
trained on turns is sure of it.
"""

from __future__ import annotations

import re

from rgate_integrations.decision import Request

REFERS_BACK = "The question refers to something that was said before, which the gate did not see."
UNREAD = "The question follows earlier turns, which the gate does not read: condense it first."

MIN_P_KNOWN_IF_REFERS_BACK = 0.95
"""A message whose words refer back retrieves below this P(known): a gate trained on turns is sure of thanks, not
of follow-ups."""
_LONGEST = 400  # characters: a longer question brings along what it is about
_AFTERTHOUGHT = re.compile(
    r"^(?:and|but|or|what about|how about)\b"
    r"|^(?:really|who|what|when|where|why|how|why not|how so|how come|which one|tell me more|go on)\W*$",
    re.IGNORECASE,
)
_PRONOUN = re.compile(
    r"\b(?:he|she|him|her|his|hers|they|them|their|theirs|it|its|this|that|these|those)\b", re.IGNORECASE
)
_DEMONSTRATIVES = frozenset(["this", "that", "these", "those"])
# Auxiliaries and prepositions: what a pronoun right after them stands for is not in its clause.
_AUXILIARY = r"is|was|are|were|be|been|does|do|did|has|have|had|can|could|will|would|should|may|might|must"
_AFTER_AUXILIARY = re.compile(
    rf"\b(?:{_AUXILIARY}|about|after|against|at|before|between|by|for|from|in|of|on|than|to|with)\W*$",
    re.IGNORECASE,
)
# "Why do people lie to their friends?": a plural is rather in the same clause.
_PLURALS = frozenset(["they", "them", "their", "theirs"])
_PLURAL_AFTER_AUXILIARY = re.compile(rf"\b(?:{_AUXILIARY}|about|by|of)\W*$", re.IGNORECASE)
# "What do cats eat and why do they purr?": an earlier clause has the word.
_EARLIER_CLAUSE = re.compile(
    r"(?:\w+\W+){3,}?(?:and|but|or|so|if|when|while|because)\b|(?:\w+\s+){2,}\w+[,;:.?!]\s", re.IGNORECASE
)
# "How long does it take to …", "Is it true that …", "Why does it rain?": here "it" stands for nothing.
_DUMMY = re.compile(r"^\W*\w+\s+(?:to|that|for|if|when)\b|^\W*(?:rain|snow|hail|storm)", re.IGNORECASE)
_TIME_EXPRESSION = re.compile(r"\b(?:time|day|date|month|year|season)\s+(?:is|was)\s*$", re.IGNORECASE)
# "What do they speak in Brazil?": people in general.
_PLACE = re.compile(r"\b(?:in|at|on)\s+(?:the\s+)?[A-Z]")
_NAME = re.compile(r"[\"“\d]|(?<=\s)(?!I\b)[A-Z]")  # quoted, a number, or a capital that begins no sentence


def is_follow_up(question: str) -> bool:
    """Whether a question refers to something that it does not name, as a follow-up does.

    It looks at English wording alone, so it misses some, and takes some whole questions for follow-ups.

    >>> is_follow_up("And how tall is he?"), is_follow_up("How tall is Napoleon, and when did he die?")
    (True, False)
    """
    text = question.strip()
    if len(text) > _LONGEST:
        return False
    if _AFTERTHOUGHT.search(text):
        return True
    return any(_is_unresolved(text, pronoun) for pronoun in _PRONOUN.finditer(text))


def missing_context(request: Request, *, reads_history: bool) -> str:
    """Return why a gate cannot understand a question; empty if it can.

    Args:
        request: The question, with the turns before it if they are known.
        reads_history: Whether the gate reads them.
    """
    if request.history and not reads_history:
        return UNREAD
    if not request.history and is_follow_up(request.question):
        return REFERS_BACK
    return ""


def _is_unresolved(text: str, pronoun: re.Match[str]) -> bool:
    """Whether nothing in the question says whom or what a pronoun stands for."""
    word = pronoun.group().lower()
    before, after = text[: pronoun.start()], text[pronoun.end() :]
    if _NAME.search(before) or _EARLIER_CLAUSE.match(before):
        return False
    is_last = not re.search(r"\w", after)
    if word in _DEMONSTRATIVES:
        return is_last
    if word == "it" and (_DUMMY.search(after) or _TIME_EXPRESSION.search(before)):
        return False
    if word == "they" and _PLACE.search(after):
        return False
    after_auxiliary = _PLURAL_AFTER_AUXILIARY if word in _PLURALS else _AFTER_AUXILIARY
    return is_last or not before or after_auxiliary.search(before) is not None
