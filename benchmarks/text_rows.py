"""Labelled rows made from template files, here of single requests: languages, facts, how-to questions, keywords.

Templates are as in `templates`: ``(a|b)`` is one of the alternatives and ``{word}`` is one of a list, here of the
section ``[words]`` of the same file. Every row names its template and says whether the template is held out.
"""

import json
import random
import re
import unicodedata
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from dialogues import FOLLOW_UPS, TEST_LINES
from templates import FOLDER, fill, read_lines, read_words

LANGUAGES = FOLDER / "languages"
FACTS = FOLDER / "facts"
HELD_OUT_LANGUAGES = ("ko", "uk", "fi", "vi", "id", "fa", "ru-latn")
"""Languages that are held out entirely."""
NEEDY = ("private", "fresh", "obscure", "particular")
NEEDLESS = ("common", "task", "thanks", "given")
KNOWLEDGE = "knowledge"
KINDS = (*NEEDY, *NEEDLESS, KNOWLEDGE)
ASKED = (*NEEDY, "common", "task")
"""Kinds of requests that are put into frames."""
TRAIN, FRAMES, GROUPS = "train", "frames", "groups"
PARTS = (TRAIN, FRAMES, GROUPS)
HELD_OUT_EVERY = 5
"""One of this many templates in a section is held out."""

_PER_TEMPLATE = {"thanks": 10}
DEFAULT_PER_TEMPLATE = 5
_GENERAL = {"general": "common"}
_POLITE = 0.18
_LATIN = ("de", "fr", "es", "it", "pt", "nl", "pl", "tr", "sv", "cs", "hu", "fi", "vi", "id")
_NO_TYPOS = ("zh", "ja", "ko", "hi")
UNSPACED = ("zh", "ja")
_UNMARKED = str.maketrans(
    {"ł": "l", "Ł": "L", "đ": "d", "Đ": "D", "ı": "i", "ß": "ss", "ø": "o", "¿": "", "¡": ""}
)
_CJK = "\u2e80"
_QUOTES = '"”“»’」』 '
_ENDS = "?.!？。！؟।"
_HEADING = re.compile(r"\[([^\[\]]+)\]")


@dataclass(frozen=True)
class TextRow:
    """One labelled text.

    Attributes:
        text: The text to judge: a request, or the last message of a conversation.
        kind: One of `KINDS`. "particular" is what only one product's or field's sources say, "obscure" a fact that no
            LLM knows, "knowledge" one that some know; "given" is text that asks nothing.
        language: ISO code; "-latn" if romanised, "mixed" for several at once.
        frame: ``file/section/number`` of its template.
        group: What may be held out as a whole: a language, a field, a topic, a kind of helper, a frame of turns.
        part: "train", "frames" (the template is held out) or "groups" (the whole group is).
        pieces: The text's parts in order, each with its kind.
        history: The earlier turns, as ``user: …`` and ``assistant: …``.
        pair: The same for rows that differ only in white space; empty for others.
    """

    text: str
    kind: str
    language: str
    frame: str
    group: str
    part: str
    pieces: tuple[tuple[str, str], ...]
    history: tuple[str, ...] = ()
    pair: str = ""

    @property
    def needs_passages(self) -> bool:
        """Whether it needs passages."""
        return self.kind in NEEDY

    @property
    def source(self) -> str:
        """Name of its template's file."""
        return self.frame.split("/")[0]


Sections = dict[str, list[str]]


@cache
def read_sections(path: Path) -> Sections:
    """Return the lines of each section; a repeated heading continues its section."""
    sections: Sections = defaultdict(list)
    name = ""
    for line in read_lines(path):
        heading = _HEADING.fullmatch(line)
        if heading:
            name = heading[1]
        else:
            sections[name].append(line)
    return dict(sections)


def read_slots(sections: Sections) -> dict[str, list[str]]:
    """Return the words of each slot of a file."""
    slots = {}
    for line in sections.get("words", []):
        name, _, words = line.partition(": ")
        slots[name] = words.split(" | ")
    return slots


def assign_part(number: int, group_held_out: bool) -> str:
    """Return the part of a template, by its index in its section."""
    if group_held_out:
        return GROUPS
    return FRAMES if number % HELD_OUT_EVERY == HELD_OUT_EVERY - 1 else TRAIN


def assign_language_part(language: str, number: int) -> str:
    """Return the part of a language's template; languages hold out different indices, so no meaning is missing."""
    shift = list_languages().index(language)
    return assign_part(number + shift, language in HELD_OUT_LANGUAGES)


def drop_duplicates(rows: Iterator[TextRow]) -> list[TextRow]:
    """Return each text once, from the first template that makes it."""
    by_text: dict[tuple[str, tuple[str, ...]], TextRow] = {}
    for row in rows:
        by_text.setdefault((row.text, row.history), row)
    return list(by_text.values())


@cache
def list_languages() -> list[str]:
    """Return the codes of all languages that have a file."""
    return sorted(path.stem for path in LANGUAGES.glob("*.txt"))


def read_language(language: str) -> Sections:
    """Return the templates of a language by kind."""
    return read_sections(LANGUAGES / f"{language}.txt")


def make_language_rows(seed: int) -> Iterator[TextRow]:
    """Yield single requests in other languages."""
    for language in list_languages():
        sections = read_language(language)
        slots = read_slots(sections)
        for section in (*NEEDY, "common", "task", "thanks", "general"):
            kind = _GENERAL.get(section, section)
            for number, template in enumerate(sections.get(section, [])):
                part = assign_language_part(language, number)
                frame = f"languages/{language}/{section}/{number}"
                draw = random.Random(f"{seed} {frame}")
                for _ in range(_PER_TEMPLATE.get(kind, DEFAULT_PER_TEMPLATE)):
                    request = vary_style(fill(template, slots, draw), language, draw)
                    pieces: tuple[tuple[str, str], ...] = ((request, kind),)
                    if kind != "thanks" and draw.random() < _POLITE:
                        pieces = _add_courtesies(request, kind, language, part, draw)
                    text = ("" if language in UNSPACED else " ").join(piece for piece, _ in pieces)
                    yield TextRow(text, kind, language, frame, f"language:{language}", part, pieces)


def _add_courtesies(
    request: str, kind: str, language: str, part: str, draw: random.Random
) -> tuple[tuple[str, str], ...]:
    """Put courtesies around a request; every third courtesy is held out."""
    wrappers = read_language(language).get("polite", [])
    if part != GROUPS:
        wrappers = [wrapper for i, wrapper in enumerate(wrappers) if (i % 3 == 2) == (part == FRAMES)]
    if not wrappers:
        return ((request, kind),)
    before, _, after = draw.choice(wrappers).partition("~")
    if after.strip() and draw.random() < 0.8:
        request = end_sentence(request, language)
    pieces = ((before.strip(), "thanks"), (request, kind), (after.strip(), "thanks"))
    return tuple(piece for piece in pieces if piece[0])


def make_fact_rows(seed: int) -> Iterator[TextRow]:
    """Yield fact questions in other languages than English, which some, no or all LLMs can answer."""
    frames, fillers = _read_facts("frames"), _read_facts("fillers")
    spoken = sorted({frame["language"] for frame in frames})
    numbers: dict[str, int] = defaultdict(int)
    for frame in [*frames, *_read_facts("common")]:
        language, kind = frame["language"], frame.get("kind", "common").removesuffix("_knowledge")
        template = frame.get("frame") or frame["question"]
        number = numbers[f"{language}/{kind}"]
        numbers[f"{language}/{kind}"] += 1
        part = assign_part(number + spoken.index(language), language in HELD_OUT_LANGUAGES)
        name = f"facts/{language}/{kind}/{number}"
        draw = random.Random(f"{seed} {name}")
        for _ in range(DEFAULT_PER_TEMPLATE):
            text = vary_style(
                _fill_slot(template, frame.get("needs", ()), fillers, language, draw), language, draw
            )
            yield TextRow(text, kind, language, name, f"language:{language}", part, ((text, kind),))


def _read_facts(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in read_lines(FACTS / f"{name}.jsonl")]


def _fill_slot(
    template: str, needs: Sequence[str], fillers: list[dict[str, Any]], language: str, draw: random.Random
) -> str:
    slot = re.search(r"\{(\w+)\}", template)
    if slot is None:
        return template
    fitting = [
        candidate
        for candidate in fillers
        if candidate["slot"] == slot[1] and set(needs) <= set(candidate["tags"])
    ]
    filler = draw.choice(fitting)
    return template.replace(slot[0], filler["scripts"].get(language, filler["value"]))


def make_field_rows(name: str, seed: int) -> Iterator[TextRow]:
    """Yield the rows of ``howto`` or ``keywords``, whose headings are ``field kind`` or ``field kind test``."""
    sections = read_sections(FOLDER / f"{name}.txt")
    slots = read_slots(sections)
    for heading, templates in sections.items():
        if heading == "words":
            continue
        held_out = heading.endswith(" test")
        field, _, section = heading.removesuffix(" test").rpartition(" ")
        kind = _GENERAL.get(section, section)
        for number, template in enumerate(templates):
            frame = f"{name}/{field}/{number}"
            draw = random.Random(f"{seed} {frame}")
            part = assign_part(number, held_out)
            for _ in range(10):
                text = fill(template, slots, draw)
                if name == "howto":
                    text = vary_style(text[0].upper() + text[1:], "en", draw)
                elif kind == "thanks" and draw.random() < 0.5:
                    text = text[0].upper() + text[1:]
                yield TextRow(text, kind, "en", frame, f"field:{field}", part, ((text, kind),))


def read_general() -> list[str]:
    """Return the how-to questions that every LLM can answer."""
    sections = read_sections(FOLDER / "howto.txt")
    return [line for heading, lines in sections.items() if heading.endswith(" general") for line in lines]


def vary_style(text: str, language: str, draw: random.Random) -> str:
    """Vary the style: some texts in lower case without punctuation, some without accents, some with a typo."""
    style = draw.random()
    if style < 0.25:
        if language == "tr":
            text = text.replace("I", "ı").replace("İ", "i")
        return text.lower().strip(_ENDS + "¿¡ ")
    if style < 0.33 and language in _LATIN:
        return remove_accents(text, language, draw)
    if style < 0.39 and language not in _NO_TYPOS:
        return add_typo(text, draw)
    return text.upper() if style > 0.985 and language in (*_LATIN, "en", "ru") else text


def end_sentence(text: str, language: str) -> str:
    """Add a full stop if the text has no final punctuation."""
    if text.rstrip(_QUOTES)[-1:] in _ENDS:
        return text
    return text + {"zh": "。", "ja": "。", "hi": "।"}.get(language, ".")


def remove_accents(text: str, language: str, draw: random.Random) -> str:
    """Remove accents, as on a keyboard without them; German umlauts often become two letters."""
    if language == "de" and draw.random() < 0.6:
        for umlaut, plain in (("ä", "ae"), ("ö", "oe"), ("ü", "ue"), ("Ä", "Ae"), ("Ö", "Oe"), ("Ü", "Ue")):
            text = text.replace(umlaut, plain)
    letters = unicodedata.normalize("NFD", text.translate(_UNMARKED))
    return "".join(letter for letter in letters if not unicodedata.combining(letter))


def add_typo(text: str, draw: random.Random) -> str:
    """Swap, drop or double a letter inside a long word."""
    words = text.split(" ")
    long = [i for i, word in enumerate(words) if len(word) > 4 and word.isalpha() and max(word) < _CJK]
    if not long:
        return text
    index = draw.choice(long)
    word = words[index]
    at = draw.randrange(1, len(word) - 2)
    words[index] = draw.choice(
        (
            word[:at] + word[at + 1] + word[at] + word[at + 2 :],
            word[:at] + word[at + 1 :],
            word[: at + 1] + word[at:],
        )
    )
    return " ".join(words)


class Asks:
    """Draws requests of a part, by kind and language, for frames.

    English requests come from the templates of `templates.KINDS`, of which every third is held out, and from the
    how-to questions. Requests in other languages come from their language's file.
    """

    def __init__(self, part: str) -> None:
        self._templates: dict[tuple[str, str], list[str]] = defaultdict(list)
        self._slots = {"en": read_words() | read_slots(read_sections(FOLDER / "howto.txt"))}
        for kind in ("private", "fresh", "obscure", "common", "task"):
            lines = [line for line in read_lines(FOLDER / f"{kind}.txt") if not line.startswith(FOLLOW_UPS)]
            tested = lines[TEST_LINES]
            self._templates["en", kind] = [line for line in lines if (line in tested) == (part != TRAIN)]
        for heading, howtos in read_sections(FOLDER / "howto.txt").items():
            if heading.removesuffix(" test").endswith("particular"):
                parts = [assign_part(i, heading.endswith(" test")) for i in range(len(howtos))]
                self._add("en", "particular", howtos, parts, part)
        for language in list_languages():
            sections = read_language(language)
            self._slots[language] = read_slots(sections)
            for kind in ASKED:
                templates = sections.get(kind, [])
                parts = [assign_language_part(language, i) for i in range(len(templates))]
                self._add(language, kind, templates, parts, part)
        self.languages = [
            code for code in self._slots if code != "en" and self._templates.get((code, "private"))
        ]

    def _add(self, language: str, kind: str, templates: list[str], parts: list[str], part: str) -> None:
        for template, template_part in zip(templates, parts, strict=True):
            if (template_part == TRAIN) == (part == TRAIN):
                self._templates[language, kind].append(template)

    def draw(self, kind: str, draw: random.Random, language: str = "en") -> str:
        """Draw a request of a kind, spelled carefully."""
        text = fill(draw.choice(self._templates[language, kind]), self._slots[language], draw)
        return text[0].upper() + text[1:] if language == "en" else text

    def draw_question(self, kind: str, draw: random.Random, language: str = "en") -> str:
        """Draw a request of a kind that ends with a question mark; after 40 draws, any request."""
        for _ in range(40):
            text = self.draw(kind, draw, language)
            if text.endswith(("?", "？", "؟")):
                break
        return text

    def draw_language(self, draw: random.Random, english: float = 0.7) -> str:
        """Draw English with probability ``english``, else another language that has all kinds."""
        if draw.random() < english:
            return "en"
        full = [code for code in self.languages if all(self._templates.get((code, kind)) for kind in ASKED)]
        return draw.choice(full)
