"""Labelled rows of requests about own matters, which no LLM knows, and of look-alikes, alone and in paragraphs."""

import random
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from templates import FOLDER, fill
from text_frames import join_sentences, read_topics
from text_rows import (
    DEFAULT_PER_TEMPLATE,
    GROUPS,
    HELD_OUT_LANGUAGES,
    PARTS,
    TRAIN,
    UNSPACED,
    Asks,
    TextRow,
    assign_part,
    read_general,
    read_language,
    read_sections,
    read_slots,
    vary_style,
)

PARAGRAPH = "/paragraph"
"""End of the frame of a paragraph."""

_LEARNED = 5  # of a language's eight sentences of a story; the others are held out
_SHORTEST, _LONGEST = 1, 14  # sentences around a request
_ENDS = {"zh": "？？。", "ja": "？？。", "hi": "??।", "ar": "؟؟.", "fa": "؟؟."}


def make_source_rows(seed: int) -> Iterator[TextRow]:
    """Yield common questions whose answer should come from a source of the asker's own, and look-alikes.

    The headings of ``sources.txt`` are ``language own``, whose frames name a source that the LLM has not read, and
    ``language public``, whose frames do not. The part of the frame is also that of the question in it. The pieces of
    a row are the frame, of the row's kind, and the question, which is "common".
    """
    questions = {part: Asks(part) for part in PARTS}
    general = {
        part: [
            line
            for at, line in enumerate(read_general())
            if (assign_part(at, False) == TRAIN) == (part == TRAIN)
        ]
        for part in PARTS
    }
    words = read_slots(read_sections(FOLDER / "howto.txt"))
    for heading, frames in read_sections(FOLDER / "sources.txt").items():
        language, _, whose = heading.partition(" ")
        kind = {"own": "private", "public": "common"}[whose]
        for number, frame in enumerate(frames):
            part = assign_part(number, language in HELD_OUT_LANGUAGES)
            name = f"sources/{language}/{whose}/{number}"
            draw = random.Random(f"{seed} {name}")
            for _ in range(DEFAULT_PER_TEMPLATE):
                if language == "en" and draw.random() < 0.3:
                    question = fill(draw.choice(general[part]), words, draw)
                else:
                    question = questions[part].draw("common", draw, language)
                if draw.random() < 0.5:
                    question = question[0].lower() + question[1:]
                plain = frame.replace("{q}", question)
                text = vary_style(plain, language, draw)
                pieces = [(text, kind)]
                if text == plain:
                    before, _, after = frame.partition("{q}")
                    pieces = [(before.strip(), kind), (question, "common"), (after.strip(), kind)]
                pieces = [piece for piece in pieces if piece[0]]
                yield TextRow(text, kind, language, name, f"sources:{language}", part, tuple(pieces))


def make_local_rows(seed: int) -> Iterator[TextRow]:
    """Yield short requests about an application's own matters, which they do not name, and look-alikes.

    The headings of ``local.txt`` are ``language local`` and ``language general``.
    """
    for heading, requests in read_sections(FOLDER / "local.txt").items():
        language, _, section = heading.partition(" ")
        kind = {"local": "private", "general": "common"}[section]
        for number, request in enumerate(requests):
            part = assign_part(number, language in HELD_OUT_LANGUAGES)
            name = f"local/{language}/{section}/{number}"
            draw = random.Random(f"{seed} {name}")
            for text in dict.fromkeys([request, vary_style(request, language, draw)]):
                yield TextRow(text, kind, language, name, f"local:{language}", part, ((text, kind),))


ROWS = {"own_source": make_source_rows, "local": make_local_rows}
"""Makers of rows by the kind of own matter."""


def make_paragraphs(rows: Iterable[TextRow], seed: int) -> Iterator[TextRow]:
    """Yield paragraphs around requests about own matters, or look-alikes: two around each English one."""
    by_frame = {row.frame: row for row in rows}  # one row of each
    for row in by_frame.values():
        for number in range(2 if row.language == "en" else 1):
            yield surround(row, random.Random(f"{seed} {row.frame} {number}"))


def make_message_rows() -> Iterator[TextRow]:
    """Yield messages that tell something and ask something.

    The headings of ``messages.txt`` are a language and "own", "general", "task" or "fresh". Brackets mark what asks.
    """
    kinds = {"own": "private", "general": "common", "task": "task", "fresh": "fresh"}
    for heading, messages in read_sections(FOLDER / "messages.txt").items():
        language, _, section = heading.partition(" ")
        kind = kinds[section]
        for number, message in enumerate(messages):
            parts = re.split(r"\[\[|\]\]", message.replace("\\n", "\n"))
            # What is asked stands between the other parts.
            pieces = [(text.strip(), kind if at % 2 else "given") for at, text in enumerate(parts)]
            frame = f"messages/{language}/{section}/{number}{PARAGRAPH}"
            part = assign_part(number, language in HELD_OUT_LANGUAGES)
            used = tuple(piece for piece in pieces if piece[0])
            yield TextRow("".join(parts), kind, language, frame, f"local:{language}", part, used)


def read_own_rows(trains: bool = True) -> dict[str, list[TextRow]]:
    """Return requests about own matters and look-alikes, alone and in paragraphs, by the kind of own matter.

    Args:
        trains: Whether to return those that train, or those that are held out.
    """
    by_kind = {}
    for name, make_rows in ROWS.items():
        rows = [row for row in make_rows(0) if (row.part == TRAIN) == trains]
        by_kind[name] = [*rows, *make_paragraphs(rows, 0)]
    by_kind["local"] += [row for row in make_message_rows() if (row.part == TRAIN) == trains]
    return by_kind


def surround(row: TextRow, draw: random.Random) -> TextRow:
    """Return a paragraph around a request, on one line or on several, perhaps with a task on the paragraph.

    Its pieces are sentences, which need nothing, and those of the request.
    """
    request = list(row.pieces)
    if request[-1][0][-1:].isalnum():
        request[-1] = (request[-1][0] + draw.choice(_ENDS.get(row.language, "??.")), request[-1][1])
    story = draw_story(row.language, row.part, draw)
    stated = read_sections(FOLDER / "stated.txt")
    for name, kind, share in (("stated", "given", 0.5), ("task", "task", 0.15)):
        lines = _select(stated.get(f"{row.language} {name}", []), row.part)
        while lines and draw.random() < share:
            story.insert(draw.randrange(len(story) + 1), (draw.choice(lines), kind))
    at = draw.choice((0, len(story), draw.randrange(len(story) + 1)))
    space = "" if row.language in UNSPACED else " "
    sentences = [*story[:at], (space.join(text for text, _ in request), row.kind), *story[at:]]
    frame = row.frame + PARAGRAPH
    made = list(join_sentences(sentences, row.kind, row.language, frame, row.group, row.part, draw))
    return replace(draw.choice(made), pieces=(*story[:at], *request, *story[at:]), pair="")


def draw_story(language: str, part: str, draw: random.Random) -> list[tuple[str, str]]:
    """Draw sentences that ask nothing, each with the kind "given"."""
    length = round(_SHORTEST * (_LONGEST / _SHORTEST) ** draw.random())
    if language == "en":
        sentences: list[str] = []
        while len(sentences) < length:
            topic = draw.choice(read_topics(part))
            start = draw.randrange(max(len(topic.story) - 2, 1))
            sentences += topic.story[start:]
    else:
        story = read_language(language)["story"]
        sentences = story if part == GROUPS else story[:_LEARNED] if part == TRAIN else story[_LEARNED:]
        start = draw.randrange(max(len(sentences) - length, 0) + 1)
        sentences = sentences[start:]
    return [(sentence, "given") for sentence in sentences[:length]]


def _select(lines: Sequence[str], part: str) -> list[str]:
    """Return the lines of a part; those held out from training are every fifth."""
    return [
        line for number, line in enumerate(lines) if (assign_part(number, False) == TRAIN) == (part == TRAIN)
    ]
