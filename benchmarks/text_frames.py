"""Labelled rows of requests in frames: tasks with content, paragraphs, turns, helper prompts, wrapped prompts."""

import json
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TypeVar

from templates import FOLDER, fill
from text_rows import (
    ASKED,
    FRAMES,
    GROUPS,
    HELD_OUT_LANGUAGES,
    NEEDY,
    TRAIN,
    Asks,
    Sections,
    TextRow,
    assign_part,
    end_sentence,
    list_languages,
    read_language,
    read_sections,
    read_slots,
    vary_style,
)

CONTENTS = {"private": "private", "fresh": "fresh", "particular": "particular", "none": "task"}
"""What a task depends on, and the kind of the whole."""
_LISTS = ("topic", "event", "facts", "pair", "content")
_SLOT = re.compile(r"\{([a-z_]+)\}")
_WRITTEN_OUT = 0.3
"""The share of pasted texts and conversations that come whole from the templates, instead of being composed."""
_POSITIONS = ("beginning", "middle", "end")
_SHORTEST, _LONGEST = 20, 400  # words of a paragraph
_BREAKS = ("\n", "\n\n", "\r\n")
_LANGUAGE_TURNS = (
    ("also", "", ASKED),
    ("retry", "failed", ASKED),
    ("next", "short", (*NEEDY, "common")),
    ("accept", "offer", NEEDY),
    ("accept", "more", ("task",) * len(NEEDY)),
)
"""Sections of the last message and of the answer before it, and the kinds of the request before that."""

Pieces = tuple[tuple[str, str], ...]
_T = TypeVar("_T")


@cache
def get_asks(part: str) -> Asks:
    """Return the cached `Asks` of a part."""
    return Asks(part)


def select_part(values: Sequence[_T], part: str) -> list[_T]:
    """Return a part's share of some values: one of four is held out from training."""
    if len(values) < 4:
        return list(values)
    return [value for number, value in enumerate(values) if (number % 4 == 3) == (part != TRAIN)]


# Tasks


def make_work_rows(seed: int) -> Iterator[TextRow]:
    """Yield tasks that depend on something private, fresh or particular, or on nothing; frames predict nothing."""
    sections = read_sections(FOLDER / "work.txt")
    slots = read_slots(sections)
    for heading, frames in sections.items():
        name = heading.removesuffix(" test")
        if heading == "words" or name.split(" ")[0] in _LISTS:
            continue
        for number, template in enumerate(frames):
            part = assign_part(number, heading.endswith(" test"))
            frame = f"work/{name}/{number}"
            draw = random.Random(f"{seed} {frame}")
            kinds = ASKED if name == "question" else CONTENTS
            for kind in kinds:
                # Fewer rows of needy kinds: there are more of these kinds.
                for _ in range(2 if kind in NEEDY else 5):
                    text, whole_kind = _make_task(template, kind, sections, slots, part, draw)
                    text = vary_style(text, "en", draw)
                    yield TextRow(text, whole_kind, "en", frame, f"task:{name}", part, ((text, whole_kind),))
    yield from _make_answer_rows(seed)


def _make_task(
    template: str,
    kind: str,
    sections: Sections,
    slots: dict[str, list[str]],
    part: str,
    draw: random.Random,
) -> tuple[str, str]:
    """Fill a frame with content of a kind; returns the text and the kind of the whole text."""
    if "{ask}" in template:
        return fill(template, slots | {"ask": [get_asks(part).draw_question(kind, draw)]}, draw), kind
    content = {}
    for name in _LISTS:
        content[name] = select_part(sections[f"{name} {kind}"], part)
    return fill(template, slots | content, draw), CONTENTS[kind]


def _make_answer_rows(seed: int) -> Iterator[TextRow]:
    """Yield tasks in other languages that contain a question."""
    for language in list_languages():
        for number, template in enumerate(read_language(language).get("answer", [])):
            part = GROUPS if language in HELD_OUT_LANGUAGES else (TRAIN, FRAMES)[number % 2]
            frame = f"work/answer-{language}/{number}"
            draw = random.Random(f"{seed} {frame}")
            for kind in ASKED:
                for _ in range(2):
                    question = get_asks(part).draw_question(kind, draw, language)
                    text = template.replace("{ask}", question)
                    yield TextRow(text, kind, language, frame, f"language:{language}", part, ((text, kind),))


# Paragraphs


@dataclass(frozen=True)
class Topic:
    """The topic of a paragraph.

    Attributes:
        name: The heading.
        part: "train" or "groups".
        story: Sentences that ask nothing.
        asks: Requests that fit the topic, by kind.
    """

    name: str
    part: str
    story: list[str] = field(default_factory=list)
    asks: dict[str, list[str]] = field(default_factory=dict)


@cache
def read_topics(part: str) -> list[Topic]:
    """Return the topics of a part; other parts than train share the held-out topics."""
    matching = []
    for heading, lines in read_sections(FOLDER / "paragraphs.txt").items():
        topic = Topic(heading.removesuffix(" test"), GROUPS if heading.endswith(" test") else TRAIN)
        for line in lines:
            kind, colon, ask = line.partition(": ")
            if colon and kind in ASKED:
                topic.asks.setdefault(kind, []).append(ask)
            else:
                topic.story.append(line)
        if topic.asks and (topic.part == TRAIN) == (part == TRAIN):
            matching.append(topic)
    return matching


def make_paragraph_rows(seed: int, per_kind: int = 3) -> Iterator[TextRow]:
    """Yield paragraphs of 20 to 400 words twice: on one line, and with line breaks."""
    for topic in (*read_topics(TRAIN), *read_topics(GROUPS)):
        draw = random.Random(f"{seed} {topic.name}")
        for kind in (*topic.asks, "given"):
            for number in range(per_kind):
                position = _POSITIONS[number % len(_POSITIONS)]
                sentences = _make_paragraph(topic, kind, position, draw)
                frame = f"paragraphs/{topic.name}/{kind}-{position}"
                yield from join_sentences(
                    sentences, kind, "en", frame, f"topic:{topic.name}", topic.part, draw
                )
    yield from _make_language_paragraphs(seed)


def _make_paragraph(topic: Topic, kind: str, position: str, draw: random.Random) -> list[tuple[str, str]]:
    """Return the sentences of a paragraph, each with its kind."""
    sections = read_sections(FOLDER / "paragraphs.txt")
    length = _SHORTEST * (_LONGEST / _SHORTEST) ** draw.random()
    others = [other for other in read_topics(topic.part) if other is not topic]
    story = list(topic.story[draw.choice((0, 0, 1, 3)) :])
    for other in draw.sample(others, 2):
        story += other.story
    chosen: list[str] = []
    while story and sum(len(sentence.split()) for sentence in chosen) < length - 8:
        chosen.append(story.pop(0))
    sentences = [(sentence, "given") for sentence in chosen]
    if kind != "given":
        question = fill(draw.choice(topic.asks[kind]), {}, draw)
        insert_at = {"beginning": 0, "middle": (len(chosen) + 1) // 2, "end": len(chosen)}[position]
        sentences.insert(insert_at, (question, kind))
        if kind in NEEDY and draw.random() < 0.2:
            easy = draw.choice(("common", "task"))
            sentences.insert(draw.randrange(len(sentences) + 1), (draw.choice(topic.asks[easy]), easy))
    if draw.random() < 0.25:
        sentences.insert(0, (draw.choice(sections["opening"]), "thanks"))
    if draw.random() < 0.25:
        sentences.append((draw.choice(sections["closing"]), "thanks"))
    if draw.random() < 0.12:  # as speech is written down
        sentences = [
            (re.sub(r"[,.?!;:]", "", text).lower(), sentence_kind) for text, sentence_kind in sentences
        ]
    return sentences


def join_sentences(
    sentences: list[tuple[str, str]],
    kind: str,
    language: str,
    frame: str,
    group: str,
    part: str,
    draw: random.Random,
) -> Iterator[TextRow]:
    """Yield the same sentences on one line and on several."""
    space = "" if language in ("zh", "ja") else " "
    breaks = [draw.choice((space, *_BREAKS)) for _ in sentences]
    if len(breaks) > 1 and not any("\n" in line_break for line_break in breaks[1:]):
        breaks[draw.randrange(1, len(breaks))] = "\n"
    lines = "".join(mark + text for mark, (text, _) in zip(breaks, sentences, strict=True)).strip()
    flat = space.join(text for text, _ in sentences)
    pair = f"{frame}/{draw.getrandbits(32):08x}"
    pieces = tuple((text.strip(), kind) for text, kind in sentences)
    for text in dict.fromkeys((flat, lines)):
        yield TextRow(text, kind, language, frame, group, part, pieces, pair=pair)


def _make_language_paragraphs(seed: int) -> Iterator[TextRow]:
    """Yield paragraphs in other languages."""
    for language in list_languages():
        story = read_language(language).get("story")
        if not story:
            continue
        for part in (GROUPS,) if language in HELD_OUT_LANGUAGES else (TRAIN, FRAMES):
            draw = random.Random(f"{seed} {language} {part}")
            for number, kind in enumerate((*ASKED, "given") * (2 if part == TRAIN else 1)):
                position = _POSITIONS[number % len(_POSITIONS)]
                available = story if part == GROUPS else story[:5] if part == TRAIN else story[5:]
                start = draw.randrange(len(available) - 1)
                sentences = [(text, "given") for text in available[start : start + draw.randint(2, 5)]]
                if kind != "given":
                    insert_at = {"beginning": 0, "middle": len(sentences) // 2, "end": len(sentences)}[
                        position
                    ]
                    sentences.insert(
                        insert_at, (end_sentence(get_asks(part).draw(kind, draw, language), language), kind)
                    )
                frame = f"paragraphs/{language}-{part}/{kind}-{position}"
                yield from join_sentences(
                    sentences, kind, language, frame, f"language:{language}", part, draw
                )


# Turns


def make_turn_rows(seed: int) -> Iterator[TextRow]:
    """Yield messages whose meaning depends on the turns before them."""
    sections = read_sections(FOLDER / "turns.txt")
    slots = read_slots(sections)
    for heading, templates in sections.items():
        if heading == "words":
            continue
        name, kind = heading.removesuffix(" test").rsplit(" ", 1)
        for number, template in enumerate(templates):
            part = assign_part(number, heading.endswith(" test"))
            frame = f"turns/{name}/{number}"
            draw = random.Random(f"{seed} {frame}")
            kinds = {"asked": ASKED, "needy": NEEDY}.get(kind, (kind,))
            for row_kind in [repeated for repeated in kinds for _ in range(18 // len(kinds))]:
                asks = get_asks(part)
                if kind in ("asked", "needy"):
                    ask = asks.draw(row_kind, draw)
                else:
                    ask = asks.draw_question(draw.choice((*NEEDY, "common")), draw)
                request = {"ask": [ask], "other": [asks.draw("task", draw)]}
                words = {slot: select_part(values, part) for slot, values in slots.items()}
                turns = [fill(turn, words | request, draw) for turn in template.split(" > ")]
                yield _make_last_turn(turns, row_kind, "en", frame, f"turns:{name}", part)
    yield from _make_language_turns(seed)


def _make_last_turn(turns: list[str], kind: str, language: str, frame: str, group: str, part: str) -> TextRow:
    roles = {"U": "user", "A": "assistant"}
    history = tuple(f"{roles[turn[0]]}: {turn[2:]}" for turn in turns[:-1])
    text = turns[-1].removeprefix("U ")
    return TextRow(text, kind, language, frame, group, part, ((text, kind),), history)


def _make_language_turns(seed: int) -> Iterator[TextRow]:
    """Yield retries, remarks and replies to offers in other languages."""
    for language in list_languages():
        sections = read_language(language)
        for name, before, kinds in _LANGUAGE_TURNS:
            if name not in sections or (before and before not in sections):
                continue
            for part in (GROUPS,) if language in HELD_OUT_LANGUAGES else (TRAIN, FRAMES):
                frame = f"turns/{language}-{name}-{before}/{part}"
                draw = random.Random(f"{seed} {frame}")
                wordings = sections[name][0].strip("()").split("|")
                if part != GROUPS:
                    wordings = select_part(wordings, part)
                for kind in kinds * (2 if part == TRAIN else 1):
                    turns = [f"U {get_asks(part).draw(kind, draw, language)}"]
                    if before:
                        turns.append(f"A {fill(sections[before][0], {}, draw)}")
                    turns.append(f"U {draw.choice(wordings)}")
                    yield _make_last_turn(turns, kind, language, frame, f"language:{language}", part)


# Prompts that programs write


@cache
def read_blocks(path: Path) -> Sections:
    """Return the blocks of each section: ``[[name]]`` begins a section, a line ``%`` separates blocks."""
    sections: Sections = {}
    for section in path.read_text(encoding="utf-8").split("\n[[")[1:]:
        name, _, text = section.partition("]]\n")
        sections[name] = [block.strip("\n") for block in text.split("\n%\n")]
    return sections


@dataclass(frozen=True)
class Pasted:
    """Draws what programs paste into prompts, from the values of one part."""

    part: str
    draw: random.Random
    language: str = ""

    @property
    def _helpers(self) -> Sections:
        return read_blocks(FOLDER / "helpers.txt")

    def draw_kind(self) -> str:
        """Draw a kind; two of three would need passages outside the prompt."""
        return self.draw.choice(NEEDY if self.draw.random() < 0.65 else ("common", "task"))

    def draw_question(self, kind: str = "") -> str:
        """Draw a request of a kind."""
        asks = get_asks(self.part)
        language = self.language or asks.draw_language(self.draw)
        return asks.draw(kind or self.draw_kind(), self.draw, language)

    def draw_block(self, name: str) -> str:
        """Draw a block of pasted text: code, diff, files, reply, result, schema or speech."""
        return self.draw.choice(select_part(self._helpers[f"given {name}"], self.part))

    def draw_text(self) -> str:
        """Draw some sentences, often followed by a question."""
        if not self.language and self.draw.random() < _WRITTEN_OUT:
            return self.draw_block("text")
        topic = self.draw.choice(read_topics(self.part))
        start = self.draw.randrange(len(topic.story) - 3)
        sentences = topic.story[start : start + self.draw.randint(3, 8)]
        if self.draw.random() < 0.6:
            question = fill(self.draw.choice(topic.asks[self.draw.choice(list(topic.asks))]), {}, self.draw)
            sentences = [*sentences, question]
        return " ".join(sentences)

    def draw_passages(self) -> str:
        """Draw two or three numbered passages."""
        facts = self.draw.sample(read_facts(self.part), self.draw.randint(2, 3))
        return "\n".join(f"[{i}] {passage}" for i, (_, passage, _) in enumerate(facts, 1))

    def draw_chat(self, last: str = "") -> str:
        """Compose a conversation of one to four exchanges; ``last`` is an unanswered request at its end."""
        if not last and not self.language and self.draw.random() < _WRITTEN_OUT:
            return self.draw_block("chat")
        turns = []
        asks = get_asks(self.part)
        language = self.language or asks.draw_language(self.draw)
        for _ in range(self.draw.randint(1, 3 if last else 4)):
            kind = self.draw_kind()
            turns.append(("user", asks.draw(kind, self.draw, language)))
            turns.append(("assistant", self._draw_reply(kind, language)))
        if last:
            turns.append(("user", last))
        if self.draw.random() < 0.1:
            return json.dumps([{"role": role, "content": text} for role, text in turns], ensure_ascii=False)
        formats = select_part(self._helpers["chat formats"][0].split("\n"), self.part)
        user, assistant = self.draw.choice(formats).replace("\\n", "\n").split(" | ")
        space = "" if user.endswith("\n") else " "
        marks = {"user": user.strip(" ") + space, "assistant": assistant.strip(" ") + space}
        between = self.draw.choice(("\n", "\n\n"))
        return between.join(marks[role] + text for role, text in turns)

    def _draw_reply(self, kind: str, language: str) -> str:
        sections = {} if language == "en" else read_language(language)
        section = "more" if kind == "task" else self.draw.choice(("failed", "offer"))
        if section in sections:
            return fill(sections[section][0], {}, self.draw)
        return self.draw_block("done" if kind == "task" else "reply")

    def draw_values(self, slots: Sequence[str]) -> dict[str, str]:
        """Return a value for each slot of a prompt of `templates/helpers.txt`."""
        pairs = select_part(self._helpers["given answered"][0].split("\n"), self.part)
        question, _, answer = self.draw.choice(pairs).partition(" >> ")
        whole = self.draw.choice(read_topics(self.part)).story
        start = self.draw.randrange(len(whole) - 3)
        values = {
            "asked": question,
            "told": answer,
            "whole": " ".join(whole),
            "piece": " ".join(whole[start : start + 3]),
        }
        return {slot: values[slot] if slot in values else self.draw_value(slot) for slot in slots}

    def draw_value(self, slot: str) -> str:
        """Draw a value for one slot."""
        if slot in ("code", "diff", "files", "result", "schema", "speech", "wish"):
            return self.draw_block(slot)
        if slot == "lang":
            words = self._helpers["words"][0].removeprefix("lang: ")
            return self.draw.choice(words.split(" | "))
        if slot.endswith("_start"):
            whole = self.draw_value(slot.removesuffix("_start"))
            return whole[: int(len(whole) * self.draw.uniform(0.3, 0.8))].rstrip()
        writers = {
            "chat": self.draw_chat,
            "text": self.draw_text,
            "question": self.draw_question,
            "passages": self.draw_passages,
        }
        return writers[slot]()


@cache
def read_facts(part: str) -> list[tuple[str, str, str]]:
    """Return kind, passage and a question that the passage answers; one of four is held out."""
    facts = []
    for line in select_part(read_blocks(FOLDER / "wrapped.txt")["facts"][0].split("\n"), part):
        kind, _, fact = line.partition(": ")
        passage, _, question = fact.partition(" >> ")
        facts.append((kind, passage, question))
    return facts


def make_helper_rows(seed: int, per_wording: int = 3) -> Iterator[TextRow]:
    """Yield helper prompts: instructions about text in the prompt, which need no passages."""
    for heading, wordings in read_blocks(FOLDER / "helpers.txt").items():
        if heading in ("words", "chat formats") or heading.startswith("given "):
            continue
        name, _, language = heading.removesuffix(" test").partition(" / ")
        for number, wording in enumerate(wordings):
            part = assign_part(number, heading.endswith(" test"))
            frame = f"helpers/{name}/{language}{number}"
            pasted = Pasted(part, random.Random(f"{seed} {frame}"), language)
            for _ in range(per_wording):
                values = pasted.draw_values(_SLOT.findall(wording))
                pieces = _fill_pieces(wording, values, {})
                text = "".join(piece for piece, _ in pieces)
                yield TextRow(
                    text, "task", language or "en", frame, f"helper:{name}", part, _drop_blank(pieces)
                )


def make_wrapped_rows(seed: int) -> Iterator[TextRow]:
    """Yield prompts around a question: with or without context, as a transcript, or simply wrapped."""
    for heading, wordings in read_blocks(FOLDER / "wrapped.txt").items():
        if heading in ("words", "facts", "off-topic"):
            continue
        name, _, language = heading.removesuffix(" test").removesuffix("-more").partition(" / ")
        for number, wording in enumerate(wordings):
            part = assign_part(number, heading.endswith(" test"))
            frame = f"wrapped/{heading.removesuffix(' test').replace(' / ', '-')}/{number}"
            pasted = Pasted(part, random.Random(f"{seed} {frame}"), language)
            cases = _make_context_cases(pasted) if name == "context" else _make_request_cases(pasted)
            for kind, values in cases:
                if wording.startswith('{"'):
                    values = {
                        slot: json.dumps(text, ensure_ascii=False)[1:-1] for slot, text in values.items()
                    }
                asking = kind if kind in ASKED else "task"
                pieces = _fill_pieces(wording, values, {"question": asking, "chat_open": asking})
                text = "".join(piece for piece, _ in pieces)
                yield TextRow(
                    text, kind, language or "en", frame, f"wrapped:{name}", part, _drop_blank(pieces)
                )


def _make_request_cases(pasted: Pasted) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield kind and values of prompts with a request; all kinds are equally frequent."""
    for kind in ASKED * 3:
        question = pasted.draw_question(kind)
        yield (
            kind,
            {"question": question, "chat": pasted.draw_chat(), "chat_open": pasted.draw_chat(question)},
        )


def _make_context_cases(pasted: Pasted) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield kind and values of prompts whose context has the answer, and as many with an empty or foreign context."""
    blocks, draw = read_blocks(FOLDER / "wrapped.txt"), pasted.draw
    facts = read_facts(pasted.part)
    for kind, passage, question in draw.sample(facts, min(6, len(facts))):
        foreign = draw.sample(
            select_part(blocks["off-topic"][0].split("\n"), pasted.part), draw.randint(1, 2)
        )
        if draw.random() < 0.4:
            foreign.append(pasted.draw_text())
        context = draw.sample([passage, *foreign[1:]], len(foreign))
        yield "task", {"context": "\n".join(context), "question": question}
        nothing = draw.choice(blocks["words"][0].removeprefix("nothing: ").split(" | "))
        empty = draw.random() < 0.5
        yield kind, {"context": nothing if empty else "\n".join(foreign), "question": question}


def _fill_pieces(wording: str, values: dict[str, str], kinds: dict[str, str]) -> Pieces:
    """Return the pieces of a prompt: its own words, which are a task, and the filled slots."""
    pieces = []
    for number, part in enumerate(_SLOT.split(wording)):
        pieces.append((values[part], kinds.get(part, "given")) if number % 2 else (part, "task"))
    return tuple(pieces)


def _drop_blank(pieces: Pieces) -> Pieces:
    """Strip the pieces and drop blank ones."""
    return tuple((text.strip(), kind) for text, kind in pieces if text.strip())
