"""What to search for instead of a message that may be a follow-up, such as "And when?"."""

from __future__ import annotations

from collections.abc import Sequence

from rgate_integrations.engine.follow_ups import is_follow_up
from rgate_integrations.runtime.segments import QUESTION_MARKS, count_words, segments
from rgate_integrations.runtime.transcripts import split_transcript

_USER = "user: "
# Remarks such as "Try again." or "Yes, go on." contain nothing to search for.
_MAX_REMARK_WORDS = 3
# An embedder reads a few hundred tokens: a longer earlier turn would push the question out.
_MAX_EARLIER_CHARACTERS = 400
# A message may have 16 million characters: reading them all would take seconds.
MAX_READ_CHARACTERS = 100_000


def list_search_texts(question: str, history: Sequence[str] = ()) -> list[str]:
    r"""Return the texts to search for: the question alone, and after the user's last turn.

    Without an earlier turn of the user, only the question is searched for; after one, a question of up to three words
    or an English follow-up (`is_follow_up`) is not searched for alone.

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
    earlier = [turn.removeprefix(_USER) for turn in history if turn.startswith(_USER)]
    if not earlier:
        return [question]
    asking = [turn for turn in earlier if _is_searchable(turn)]
    last = (asking or earlier)[-1]
    if len(last) > MAX_READ_CHARACTERS:
        half = MAX_READ_CHARACTERS // 2
        last = f"{last[:half]}\n{last[-half:]}"
    if len(last) > _MAX_EARLIER_CHARACTERS:
        asked = " ".join(segment for segment in segments(last) if segment.endswith(QUESTION_MARKS))
        last = (asked or last)[:_MAX_EARLIER_CHARACTERS]
    joined = f"{last}\n{question}"
    return [question, joined] if _is_searchable(question) and not is_follow_up(question) else [joined]


def _is_searchable(turn: str) -> bool:
    return count_words(turn[:_MAX_EARLIER_CHARACTERS]) > _MAX_REMARK_WORDS
