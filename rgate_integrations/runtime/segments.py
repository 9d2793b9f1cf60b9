"""Splits a request into segments, which are judged one by one, and a text that holds a conversation into turns."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from typing import TypeAlias

import numpy as np

from rgate_integrations.runtime.arrays import Float32Array
from rgate_integrations.runtime.text import UNSPACED

Range: TypeAlias = tuple[int, int]
"""Start and end of a range of characters or tokens, as in a slice."""

LAYOUT = 11
"""Number of columns of `layout`."""

QUESTION_MARKS = ("?", "？", "؟", "\u037e")
"""Question marks: Latin, full-width, Arabic and Greek."""
_GREEK_WORD = re.compile("[\u0370-\u03ff\u1f00-\u1fff]{2}")
# Quoted text, to keep; or a conjunction before a verb or question word that begins a request of at least four words:
# English, German, Dutch, French, Spanish, Italian and Portuguese.
_JOINED = re.compile(
    r"""("[^"]*"|“[^”]*”|«[^»]*»|„[^“]*“)"""
    r"|,?\s+(?:(?:and|then|&)\s+(?:(?:also|then|please)\s+)*(?=(?:tell|give|show|list|add|find|send|let|who|whose|what"
    r"|when|where|which|why|how|is|are|do|does|did|can|could|will|was|were|has|have)\b(?:\s+\S+){3})"
    r"|(?:und|en)\s+(?=(?:sag|sage|nenne?|gib|zeige?|wer|wessen|was|wann|wo|welche\w*|warum|wie|wieviel\w*|ist|sind|hat|kann"
    r"|zeg|geef|noem|toon|wie|wat|wanneer|waar|welke?|waarom|hoe|hoeveel)\b(?:\s+\S+){3})"
    r"|et\s+(?=(?:dis|donne|montre|qui|que|quand|où|quel\w*|pourquoi|comment|combien|est-ce)\b(?:\s+\S+){3})"
    r"|[ye]\s+(?=(?:dime|dame|muéstrame|quién|qué|cuándo|dónde|cuál\w*|cómo|cuánt\w+|por qué"
    r"|dimmi|dammi|mostrami|chi|che|quando|dove|quale?|come|quant\w+|perché"
    r"|me diga|diga|quem|quando|onde|qual|quais|como|por que)\b(?:\s+\S+){3}))",
    re.IGNORECASE,
)
_MAX_JOINED_CHARS = 500
# Begins or ends like a line of code in Python, C, Java, JavaScript and their relatives.
_CODE_LINE = re.compile(
    r"^\s*(?:def \w|class \w|return\b|import \w|from \S+ import|(?:(?:el)?if|for|while)\b.*[:{]$|else:|try:|@\w|>>> "
    r"|(?:except|with)\b.*:$|raise \w|#include|function\b|const |let \w+ =|var |public |private |func |fn |\})"
    r"|[;{}]\s*$|^\s*[\w.\[\]'\"]+(?::\s*\w+)?\s*[-+*/|]?=\s*\S"
)
_MIN_CODE_LINES, _MIN_WORDS_OUTSIDE = 3, 6
_FENCES = ("```", "~~~")
USER, ASSISTANT = "user: ", "assistant: "
"""How the turns of a history begin."""

_CLOSERS = "\"')]*_”’»」』）"
_OPENERS = "\"'([*_“‘«「『（¿¡"
_ENDS = (*QUESTION_MARKS, "!", "！", ";", "；", "؛")
_STOPS = (".", "．", "…", "。", "।", "۔")
_UNSPACED = re.compile(
    rf"(?<=[。！？；])(?=[^\s。！？；{re.escape(_CLOSERS)}])|(?<=\w[?!؟;؛])(?=[^\W\d_]{{2,}}[\s'’])"
)
"""Ends of sentences without a space: in scripts that use none, and in hasty typing, but not in URLs."""
_FIRST_MARKER = re.compile(r"\(?[1a]\)|1\.|•")  # of a list within a line
# The number of an item, such as "1." or "**Q1.**", which belongs to what follows.
_MARKER = re.compile(r"[*_(]*[Qq#]?\d{1,3}\.[*_)]*")
_NEXT_MARKER = str.maketrans("12345678abcdefg", "23456789bcdefgh")
_MAX_AROUND_QUESTIONS = 2  # such as "Hi, I have a few questions." and "Thanks!"
_MIN_ITEM_WORDS = 2  # without the marker: in "articles (a) and (b)", there are no items
_LABEL = re.compile(r"[A-Z][a-z]+:$")  # such as "Hint:"
_BEFORE_NAME = re.compile(r"[a-z]{2,3}|from|into|with")  # in "translate into German:", that is no label
# German, Spanish, Polish, French, Italian, Portuguese, Hindi and Arabic
FOREIGN_ABBREVIATIONS = (
    r"(?i:ca|nr|\w+str|bzw|ggf|vgl|evtl|bspw|inkl|bzgl|zzgl|[ds]ra|avda|págs?|núm|aprox|EE|UU|ul|inż|mgr|godz|tzw"
    r"|av|bd|tél|dott|sigg?|pag|डॉ|प्रो|रु|[دأمص])"
)
# "Dr. Smith", "e.g. this", "No. 5": the full stop does not end the sentence.
_ABBREVIATION = re.compile(
    rf"(?:[A-Z][a-z]{{0,2}}|[a-z]|\w(?:\.\w)+|vs|etc|no|(?i:approx|incl|dept|govt|univ|corp|assn|prof|sept|напр)"
    rf"|{FOREIGN_ABBREVIATIONS})\.$"
)
# "3. März", "der 1. FC": German ordinals, which have a full stop.
_ORDINAL = re.compile(
    r"(?:.* )?\d{1,2}\. (?:Jan(?:uar|\.)|Feb(?:ruar|\.)|März|April|Mai|Juni|Juli|August|Sept(?:ember|\.)"
    r"|Okt(?:ober|\.)|Nov(?:ember|\.)|Dez(?:ember|\.)|Jahrhundert|Jh\.|Weltkrieg).*"
    r"|(?:de[rmn]|vom|zum) \d{1,3}\. [A-ZÄÖÜ].*"
)
_LAST_WORD = re.compile(
    r"(?:^|\W)[^\W\d_]{4,}\)?[.।]$"
)  # of a sentence before one in lower case; no "well..."
BLANK_LINE = re.compile(r"\n[^\S\n]*\n")
_MAX_WORDS = 60  # longer sentences are cut, because a mean over more words says little about any of them


@dataclass(frozen=True)
class Segmented:
    """A request, split into segments (sentences or lines, see `segments`), and the earlier turns.

    Attributes:
        lines: Its segments, line by line; at least one line.
        history: The earlier turns, each followed by a line feed; may be empty.
    """

    lines: tuple[tuple[str, ...], ...]
    history: str = ""

    @classmethod
    def from_text(cls, text: str, history: Sequence[str] = ()) -> Segmented:
        """Split a request into segments; ``history`` holds the earlier turns, oldest first."""
        return cls(tuple(map(tuple, split_lines(text))), "".join(f"{turn}\n" for turn in history))

    @property
    def segments(self) -> tuple[str, ...]:
        """All segments in order."""
        return tuple(chain.from_iterable(self.lines))

    @property
    def stands_alone(self) -> bool:
        """Whether the request is a single segment, without earlier turns."""
        return not self.history and len(self.segments) == 1


def segments(text: str, abbreviation: re.Pattern[str] = _ABBREVIATION) -> list[str]:
    r"""Return the segments of a text in order, with runs of white space replaced by one space.

    A segment is a sentence, a part before a semicolon, an item of a list within a line ("1) … 2) …"), or a line; one
    of more than 60 words is cut into several. A full stop after a word that ``abbreviation`` matches does not end a
    sentence. Among others, the default matches any capitalised word of up to three letters, because in a request one
    segment too many costs more than one too few.

    >>> segments("Hi Anna, it rained. When is my bill due?\nThanks!")
    ['Hi Anna, it rained.', 'When is my bill due?', 'Thanks!']
    """
    return [segment for line in split_lines(text, abbreviation) for segment in line]


def split_lines(text: str, abbreviation: re.Pattern[str] = _ABBREVIATION) -> list[list[str]]:
    """Return the segments of each non-empty line; see `segments`."""
    lines = []
    for line in text.splitlines():
        words = _UNSPACED.sub(" ", line).split()
        line_segments, begin, item, next_marker = [], 0, 0, ""
        for i, word in enumerate(words[:-1], start=1):
            # Within a sentence, "1." may be an ordinal, as in "am 1. Mai".
            if word == next_marker or (_FIRST_MARKER.fullmatch(word) and (word[-1] != "." or i - 1 == begin)):
                item, next_marker = i, word.translate(_NEXT_MARKER)
            is_next_item = words[i] == next_marker and i - item >= _MIN_ITEM_WORDS
            is_marker = i - 1 == begin and _MARKER.fullmatch(word)
            is_ordinal = word[-1] == "." and _ORDINAL.fullmatch(" ".join(words[max(i - 2, begin) : i + 1]))
            ends = not is_marker and not is_ordinal and _ends(word, words[i], abbreviation)
            if is_next_item or ends or i - begin >= _MAX_WORDS:
                line_segments.append(" ".join(words[begin:i]))
                begin = i
        if words:
            lines.append([*line_segments, " ".join(words[begin:])])
    return lines


def split_joined(text: str) -> str:
    r"""Return a line that joins requests by words such as "and tell me" with a line feed between these; others as is.

    >>> split_joined("Sort 3, 1, 2, and tell me who approved invoice 12.")
    'Sort 3, 1, 2\ntell me who approved invoice 12.'
    >>> split_joined("Who wrote Faust and Egmont?")
    'Who wrote Faust and Egmont?'
    """
    if "\n" in text or len(text) > _MAX_JOINED_CHARS:
        return text
    return _JOINED.sub(lambda match: match[1] or "\n", text)


def outside_code(text: str) -> str:
    r"""Return a text without its lines from the first line of code to the last.

    It is empty unless at least three lines are code, and at least six words are outside.

    >>> code = "def f(x):\n    y = x\n    return y"
    >>> outside_code(f"{code}\n\nWhich team owns it these days?"), outside_code(f"{code}\n\nWhy?")
    ('Which team owns it these days?', '')
    """
    lines = text.splitlines()
    code = [number for number, line in enumerate(lines) if _CODE_LINE.search(line)]
    if len(code) < _MIN_CODE_LINES:
        return ""
    rest = [*lines[: code[0]], *lines[code[-1] + 1 :]]
    outside = "\n".join(line for line in rest if line.strip() and not line.lstrip().startswith(_FENCES))
    return outside if count_words(outside) >= _MIN_WORDS_OUTSIDE else ""


def is_question(text: str) -> bool:
    """Return whether a text ends in a question mark, also before brackets, quotes, markup, emoji and the like.

    In Greek, a semicolon is one.

    >>> is_question("**Shall I?** 😊"), is_question("Πού;"), is_question("Where; when."), is_question("Why? Because.")
    (True, True, False, False)
    """
    last = next((at for at in range(len(text) - 1, -1, -1) if text[at].isalnum()), -1)
    marks = (*QUESTION_MARKS, ";") if _GREEK_WORD.search(text) else QUESTION_MARKS
    return any(mark in text[last + 1 :] for mark in marks)


def count_questions(texts: Sequence[str]) -> int:
    """Return how many segments are questions."""
    return sum(map(is_question, texts))


def lists_questions(texts: Sequence[str]) -> bool:
    """Return whether segments are a list of questions, with up to two sentences around it; a transcript is none.

    >>> lists_questions(["Two things.", "1. What is dns?", "2. Who owns it?", "3. Since when?", "Thanks!"])
    True
    """
    questions = count_questions(texts)
    others = len(texts) - questions
    is_list = questions >= (3 if others else 2) and others <= _MAX_AROUND_QUESTIONS
    return is_list and not any(map(_TURN.match, texts))


def drop_repeated(text: str) -> str:
    r"""Return a request that is pasted twice or three times only once; any other text as it is.

    Repeated segments within other text stay: they are part of what a task is about.

    >>> drop_repeated("When is it due? When is it due?"), drop_repeated("Sort:\nb\nb")
    ('When is it due?', 'Sort:\nb\nb')
    """
    parts = segments(text)
    for times in (2, 3):
        once = parts[: len(parts) // times]
        if once * times == parts:
            return "\n".join(once) or text
    return text


def _ends(word: str, following: str, abbreviation: re.Pattern[str]) -> bool:
    """Return whether a sentence ends between two words."""
    bare = word.rstrip(_CLOSERS)
    if bare.endswith(_ENDS) or (_LABEL.match(following) and not _BEFORE_NAME.fullmatch(word)):
        return True
    if not bare.endswith(_STOPS) or abbreviation.match(bare.lstrip(_OPENERS)):
        return False
    first = following.lstrip(_OPENERS)[:1]
    if not first.islower():  # rather than "upper case", because many scripts have no capitals
        return first.isalnum()
    # In hasty typing, sentences begin in lower case; after a short word, the full stop may be an abbreviation's.
    return _LAST_WORD.search(bare) is not None


def join_segments(lines: Sequence[Sequence[str]]) -> tuple[str, list[Range]]:
    """Join the segments of each line, see `split_lines`, into one text; return it with each segment's range in it."""
    ranges: list[Range] = []
    begin = 0
    for segment in chain.from_iterable(lines):
        ranges.append((begin, begin + len(segment)))
        begin += len(segment) + 1  # the space or line feed after it
    return "\n".join(map(" ".join, lines)), ranges


def count_words(text: str) -> int:
    """Return roughly the number of words; in scripts without spaces, such as Chinese, two characters count as one."""
    return len(text.split()) + len(UNSPACED.findall(text)) // 2


def user_turns(history: Sequence[str]) -> Iterator[tuple[str, Sequence[str]]]:
    """Yield each run of user turns as one text, with the turns before it, from the latest run to the first."""
    before = history
    for is_user, run in groupby(reversed(history), key=lambda turn: turn.startswith(USER)):
        turns = [turn.removeprefix(USER) for turn in run]
        before = before[: -len(turns)]
        if is_user:
            yield "\n".join(reversed(turns)), before


def layout(text: str) -> Float32Array:
    """Return features of the layout and appearance of each segment, shape (segments, 11).

    They distinguish pasted material, which comes in blocks of lines, from a question. For a segment, they are: number
    of lines of its paragraph and of segments of its line (logarithms), whether it is the first, whether it is the
    last, whether it ends in a question mark, number of words (logarithm), share of letters and spaces, whether it
    begins with a capital, whether it begins with a non-letter, number of all segments (logarithm), and whether its
    paragraph is a single line.
    """
    rows = []
    paragraphs = [split_lines(paragraph) for paragraph in BLANK_LINE.split(text)]
    for paragraph in paragraphs:
        for line in paragraph:
            for segment in line:
                plain = sum(character.isalpha() or character == " " for character in segment)
                first = segment[:1]
                rows.append(
                    (
                        np.log1p(len(paragraph)),
                        np.log1p(len(line)),
                        0.0,
                        0.0,
                        segment.endswith(QUESTION_MARKS),  # not `is_question`: heads learned from this
                        np.log1p(count_words(segment)),
                        plain / len(segment),
                        first.isupper(),
                        not first.isalpha(),
                        0.0,
                        len(paragraph) == 1,
                    )
                )
    features = np.array(rows, np.float32).reshape(-1, LAYOUT)
    if len(features):
        features[0, 2] = features[-1, 3] = 1.0
        features[:, 9] = np.log1p(len(features))
    return features


# --- conversations -------------------------------------------------------------------------------------------------

_ROLES = {
    "user": r"user|human|customer|client|utilisateur|usuario|utente|nutzer|benutzer|пользователь|用户|ユーザー",
    "assistant": r"assistant|ai|bot|chatbot|agent|model|chatgpt|asistente|assistente|ассистент|助手|アシスタント",
    "system": r"system",
}
_ANY = "|".join(f"(?P<{{0}}_{role}>{names})" for role, names in _ROLES.items())
_TURN = re.compile(
    # <|im_start|>user, <|start_header_id|>user<|end_header_id|>, <start_of_turn>user, <|user|>
    rf"(?:<\|im_start\|>|<\|start_header_id\|>|<start_of_turn>|<\|)(?:{_ANY.format('token')})(?:<\|end_header_id\|>|\|>|$)"
    r"|(?P<inst_user>\[INST\])|(?P<inst_assistant>\[/INST\])"
    # USER:, **Human:**, ### User:, ||>User:
    rf"|^[^\w\n]{{0,6}}(?:{_ANY.format('label')})[^\w\n:：]{{0,3}}[:：][*_]*",
    re.IGNORECASE | re.MULTILINE,
)
_QUESTION_LABEL = re.compile(r"[^\w\n]{0,6}(?:question|query|q)[^\w\n:：]{0,3}[:：][*_]*", re.IGNORECASE)
_END = re.compile(r"<\|im_end\|>|<\|eot_id\|>|<end_of_turn>|<\|end\|>|<\|begin_of_text\|>|</?s>|<bos>")
_MAX_WORDS_BEFORE = 40  # with more words before the first turn, the text is a prompt, not a conversation


def split_transcript(text: str) -> tuple[str, tuple[str, ...]] | None:
    r"""Return the user's last, unanswered message of a conversation, and the turns before it, oldest first.

    The turns are lines such as ``user: …`` and ``assistant: …``, as in `rgate_integrations.decision.Request`.

    Any other text gives None. System turns are left out. If the text ends with an empty assistant turn (``AI:``), up
    to 40 words before the first turn are left out, too; more words, or a question among them, give None. Without that
    turn, the result is None if there are any such words, because they may be a task about the transcript, or if the
    assistant never answers.

    >>> split_transcript("Human: Hi!\nAI: Hello!\nHuman: When is it due?\nAI:")
    ('When is it due?', ('user: Hi!', 'assistant: Hello!'))
    >>> split_transcript("Find a title for this chat.\n\nUser: Hi!\nAI: Hello!\nUser: When is it due?")
    """
    before, turns = _split_turns(text)
    # A prompt that ends in "AI:" asks the model to continue.
    is_open = turns[-1:] == [("assistant", "")]
    turns = [(role, words) for role, words in turns if words and role != "system"]
    has_answer = any(role == "assistant" for role, _ in turns)
    if not turns or turns[-1][0] != "user" or len(before.split()) > _MAX_WORDS_BEFORE:
        return None
    if count_questions(segments(before)) or (not is_open and (before or not has_answer)):
        return None
    return turns[-1][1], tuple(f"{role}: {words}" for role, words in turns[:-1])


def drop_label(text: str) -> str:
    r"""Return a message of one line without a label such as ``User:`` or ``Question:``; any other text as it is.

    >>> drop_label("Human: And how often?"), drop_label("user: root, password: x\nWhy?")
    ('And how often?', 'user: root, password: x\nWhy?')
    """
    line = text.strip()
    label = None if "\n" in line else _TURN.match(line) or _QUESTION_LABEL.match(line)
    if label is None or _role(label) not in ("user", ""):
        return text
    return line[label.end() :].strip() or text


def split_history(text: str) -> list[tuple[str, str]]:
    r"""Return the (role, text) turns of an earlier conversation; text before the first label is the assistant's.

    >>> split_history("Human: Hi!\nAI: Hello!"), split_history("They greeted each other.")
    ([('user', 'Hi!'), ('assistant', 'Hello!')], [('assistant', 'They greeted each other.')])
    """
    before, turns = _split_turns(text)
    return [(role, words) for role, words in [("assistant", before), *turns] if words]


def label_turns(lines: Sequence[str]) -> list[tuple[str, str]]:
    """Return the (role, text) turns of a conversation with one turn per line, oldest first; empty ones are left out.

    A line without a label is by the speaker of the line before it. If no line has one, the speakers take turns, and
    the last line is the assistant's.

    >>> label_turns(["Human: Hi!", "AI: Hello!"]) == label_turns(["Hi!", "Hello!"])
    True
    """
    labels = [_TURN.match(line) for line in lines]
    is_labelled = any(labels)  # once: a client may send millions of lines
    speaker = "assistant"
    turns = []
    for index, (label, line) in enumerate(zip(labels, lines, strict=True)):
        if label is not None:
            speaker = _role(label)
        elif not is_labelled:
            speaker = "assistant" if (len(lines) - index) % 2 else "user"
        turns.append((speaker, line[label.end() if label else 0 :].strip()))
    return [(role, words) for role, words in turns if words]


def _split_turns(text: str) -> tuple[str, list[tuple[str, str]]]:
    """Return the text before the first label, and the (role, text) turns."""
    labels = list(_TURN.finditer(text))
    starts = [label.start() for label in labels] + [len(text)]
    turns = []
    for label, end in zip(labels, starts[1:], strict=True):
        turns.append((_role(label), _END.sub(" ", text[label.end() : end]).strip()))
    return _END.sub(" ", text[: starts[0]]).strip(), turns


def _role(label: re.Match[str]) -> str:
    return str(label.lastgroup or "").rpartition("_")[2]
