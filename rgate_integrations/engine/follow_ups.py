"""Follow-ups, such as "And how tall is he?": detects them, and says what to search for instead.

If earlier turns are given, a gate that reads them judges the message with them, and any other gate retrieves. If none
are given, a message that refers back retrieves, unless a gate that was trained on conversations is sure.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from rgate_integrations.decision import Request
from rgate_integrations.runtime.closings import closing_sentences, question_before
from rgate_integrations.runtime.segments import (
    USER,
    count_words,
    drop_label,
    is_question,
    segments,
    split_transcript,
)

REFERS_BACK = "The question refers to earlier turns, which the gate did not see."
UNREAD = "The question follows earlier turns, which the gate does not read: rewrite it to stand alone."

MIN_P_KNOWN_IF_REFERS_BACK = 0.95
"""A message that refers back retrieves below this P(known) if the gate was trained on conversations, and always with
any other gate. Gates trained on conversations reach this value for thanks, but not for follow-ups."""
_MAX_CHARACTERS = 400  # a longer question usually names its subject
_AFTERTHOUGHT = re.compile(
    r"^(?:and|but|or|what about|how about)\b"
    r"|^(?:really|who|what|when|where|why|how|why not|how so|how come|which one|tell me more|go on)\W*$",
    re.IGNORECASE,
)
_PRONOUN = re.compile(
    r"\b(?:he|she|him|her|his|hers|they|them|their|theirs|it|its|this|that|these|those)\b", re.IGNORECASE
)
_DEMONSTRATIVES = frozenset(["this", "that", "these", "those"])
_PLURALS = frozenset(["they", "them", "their", "theirs"])
# A pronoun right after an auxiliary or a preposition refers to something outside its clause.
_AUXILIARY = r"is|was|are|were|be|been|does|do|did|has|have|had|can|could|will|would|should|may|might|must"
_AFTER_AUXILIARY = re.compile(
    rf"\b(?:{_AUXILIARY}|about|after|against|at|before|between|by|for|from|in|of|on|than|to|with)\W*$",
    re.IGNORECASE,
)
# "Why do people lie to their friends?": a plural more often refers to something in its own clause.
_PLURAL_AFTER_AUXILIARY = re.compile(rf"\b(?:{_AUXILIARY}|about|by|of)\W*$", re.IGNORECASE)
# "What do cats eat and why do they purr?": an earlier clause names the subject.
_EARLIER_CLAUSE = re.compile(
    r"(?:\w+\W+){3,}?(?:and|but|or|so|if|when|while|because)\b|(?:\w+\s+){2,}\w+[,;:.?!]\s", re.IGNORECASE
)
# "How long does it take to …", "Is it true that …", "Why does it rain?": here "it" refers to nothing.
_DUMMY = re.compile(r"^\W*\w+\s+(?:to|that|for|if|when)\b|^\W*(?:rain|snow|hail|storm)", re.IGNORECASE)
_TIME_EXPRESSION = re.compile(r"\b(?:time|day|date|month|year|season)\s+(?:is|was)\s*$", re.IGNORECASE)
# "What do they speak in Brazil?": here "they" means people in general.
_PLACE = re.compile(r"\b(?:in|at|on)\s+(?:the\s+)?[A-Z]")
_NAME = re.compile(r"[\"“\d]|(?<=\s)(?!I\b)[A-Z]")  # a quotation, a number, or a capital within a sentence

# Remarks such as "Try again." or "Yes, go on." contain nothing to search for.
_MAX_REMARK_WORDS = 3
_MAX_REPLY_WORDS = 8  # a longer reply to the assistant's question says what it is about
# A reply that begins like this may accept an offer; one of nothing else only accepts it.
_YES = (
    r"(?:(?:yes|yeah|yep|yup|sure|ok|okay|please do|go ahead|of course|ja|jawohl|gerne?|klar|graag|oui|ouais"
    r"|d['’]accord|volontiers|s[íì]|claro|vale|certo|va bene|sim|да|конечно|давай\w*|tak|dobrze|ναι|ええ|네|예)\b"
    r"|[好是对行](?:[的啊吧呀]|\b)|はい(?:(?=お)|\b))"
)
_POLITE = (
    r"(?:(?:please|thanks|thank you|bitte|danke|sehr|merci|s['’]il (?:vous|te) pla[îi]t|por favor|gracias"
    r"|per favore|grazie|obrigad[oa]|пожалуйста|спасибо|proszę|dziękuję|alsjeblieft|dank je|παρακαλώ)\b"
    r"|[请谢麻烦你您]+|お願い\w*|ぜひ|부탁\w*|감사\w*)"
)
_MAY_ACCEPT = re.compile(rf"\W*{_YES}", re.IGNORECASE)
_ACCEPTS = re.compile(rf"\W*{_YES}(?:\W*(?:{_YES}|{_POLITE}))*\W*", re.IGNORECASE)
# An embedder reads a few hundred tokens: a longer earlier turn would push the question out.
_MAX_EARLIER_CHARACTERS = 400
# A message may have 16 million characters: reading them all would take seconds.
MAX_READ_CHARACTERS = 100_000


def is_follow_up(question: str) -> bool:
    """Return whether a question refers to something that it does not name.

    It only recognises English wording, misses some follow-ups, and mistakes some complete questions for follow-ups.

    >>> is_follow_up("And how tall is he?"), is_follow_up("How tall is Napoleon, and when did he die?")
    (True, False)
    """
    if len(question.strip()) > _MAX_CHARACTERS:
        return False
    text = drop_label(question).strip()
    return bool(_AFTERTHOUGHT.search(text)) or any(_is_unresolved(text, each) for each in _pronouns(text))


def missing_context(request: Request, *, reads_history: bool) -> str:
    """Return why a gate cannot understand a question, as a sentence; empty if it can.

    Args:
        request: The question, with the turns before it if they are known.
        reads_history: Whether the gate reads those turns.
    """
    # With earlier turns, any message may refer to them, whatever its wording.
    if request.history:
        return "" if reads_history else UNREAD
    return REFERS_BACK if is_follow_up(request.question) else ""


def list_search_texts(question: str, history: Sequence[str] = ()) -> list[str]:
    r"""Return the texts to search for: the question alone, and after the user's last turn.

    Without an earlier turn of the user, only the question is searched for; after one, a question of up to three words
    or an English follow-up (`is_follow_up`) is not searched for alone.

    A short reply to a question or offer of the assistant, such as "Yes, please" or "I would like that", is searched
    for together with it; "yes" and the like may accept a statement, too ("I can also look it up."). A reply that
    names something after the "yes", and any other of up to three words, is also searched for alone; a longer one
    without a "yes" only as if nothing was offered.

    Earlier turns of up to three words, such as "Try again.", are skipped if there are longer ones. A very long
    earlier turn, such as a file that a coding client sends, is shortened to its questions, or else to its beginning;
    of one with more than 100,000 characters, the middle is not read. A question that is a pasted transcript of at
    most as many characters is split into its turns.

    >>> list_search_texts("And for children?", ["user: What is the dose of Pantol?", "assistant: 20 mg."])
    ['What is the dose of Pantol?\nAnd for children?']

    Args:
        question: The question.
        history: The earlier turns, oldest first: ``user: …`` and ``assistant: …``.
    """
    if not history and len(question) <= MAX_READ_CHARACTERS:
        question, history = split_transcript(question) or (question, history)
    texts = _after_last_turn(question, history)
    if is_question(question) or count_words(question) > _MAX_REPLY_WORDS:
        return texts
    may_accept = _MAY_ACCEPT.match(question) is not None
    is_answer = _ACCEPTS.fullmatch(question) is not None or any(_pronouns(question))
    offer = question_before(history) or (" ".join(closing_sentences(history)) if may_accept else "")
    # Whoever names something after an offer may well want something else.
    if not offer or (question in texts and not (is_answer or may_accept)):
        return texts
    with_offer = _after_last_turn(f"{offer.strip('*_')}\n{question}", history)[:1]
    return with_offer if is_answer or not question.strip() else [*with_offer, question]


def _pronouns(text: str) -> Iterator[re.Match[str]]:
    """Yield the pronouns of a text; "IT" is one only among other capitals."""
    return (found for found in _PRONOUN.finditer(text) if found.group() != "IT" or text.isupper())


def _after_last_turn(question: str, history: Sequence[str]) -> list[str]:
    """Return the question, if it may stand alone, and the question after the user's last turn, if there is one."""
    earlier = [turn.removeprefix(USER) for turn in history if turn.startswith(USER)]
    if not earlier:
        return [question]
    asking = [turn for turn in earlier if _is_searchable(turn)]
    last = (asking or earlier)[-1]
    if len(last) > MAX_READ_CHARACTERS:
        half = MAX_READ_CHARACTERS // 2
        last = f"{last[:half]}\n{last[-half:]}"
    if len(last) > _MAX_EARLIER_CHARACTERS:
        asked = " ".join(segment for segment in segments(last) if is_question(segment))
        last = (asked or last)[:_MAX_EARLIER_CHARACTERS]
    joined = f"{last}\n{question}"
    return [question, joined] if _is_searchable(question) and not is_follow_up(question) else [joined]


def _is_unresolved(text: str, pronoun: re.Match[str]) -> bool:
    """Return whether a pronoun refers to something that the question does not name."""
    word = pronoun.group().lower()
    before, after = text[: pronoun.start()], text[pronoun.end() :]
    if _NAME.search(before) or _EARLIER_CLAUSE.match(before):
        return False
    is_last = not re.search(r"\w", after)
    if word in _DEMONSTRATIVES:
        return is_last
    is_dummy = word == "it" and (_DUMMY.search(after) or _TIME_EXPRESSION.search(before))
    if is_dummy or (word == "they" and _PLACE.search(after)):
        return False
    after_auxiliary = _PLURAL_AFTER_AUXILIARY if word in _PLURALS else _AFTER_AUXILIARY
    return is_last or not before or after_auxiliary.search(before) is not None


def _is_searchable(turn: str) -> bool:
    return count_words(turn[:_MAX_EARLIER_CHARACTERS]) > _MAX_REMARK_WORDS
