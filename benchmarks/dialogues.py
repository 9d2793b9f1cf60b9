"""Conversations whose last message depends on the turns before it.

``templates/dialogues.txt`` explains the syntax of its frames. A message such as "And for Peru?" has the kind of the
turn before it, whatever that is; a standalone question keeps its kind. So neither the message nor the earlier turns
alone give the kind away, and half of each frame needs passages.
"""

import random
import re
from dataclasses import dataclass
from functools import cache

from templates import FOLDER, fill, read_lines, read_words, vary

NEEDY, OTHERS = ("private", "fresh", "obscure"), ("task", "common")
PER_GROUP = 10  # dialogues of a frame that need passages, and as many that do not
TEST_LINES = slice(2, None, 3)
"""Where a whole question is drawn, every third template is reserved for the test part."""
FOLLOW_UPS = (
    "(make it|",
    "(continue|",
    "(say|repeat|",
    "(what|who|where|when|why|how) (about|is|was|did) (that one|",
    "(and|what about|",
    "(why|since when|",
    "(earlier you said|",
)
"""Templates of requests that refer to earlier turns. Dialogues leave them out: their frames set those turns."""
_REQUEST = re.compile(r"@(\w+)(?::(\w+))?")
_SLOT = re.compile(r"\{(\w+?)(2?)\}")
_SMALL_TALK = (
    "Hello! How can I help you?",
    "Hi, what can I do for you?",
    "Welcome back! What is your question?",
)
_MAX_TURNS = 5


@dataclass(frozen=True)
class Dialogue:
    """A message and the turns before it.

    Attributes:
        turns: Role (``user`` or ``assistant``) and text of the one to five turns before, oldest first.
        message: The last message, of the user.
        kind: What the message asks for after these turns: task, common, obscure, fresh or private.
        frame: Name of its frame.
    """

    turns: tuple[tuple[str, str], ...]
    message: str
    kind: str
    frame: str

    @property
    def history(self) -> tuple[str, ...]:
        """The turns as lines: ``user: …``, ``assistant: …``."""
        return tuple(f"{role}: {text}" for role, text in self.turns)

    @property
    def needs_passages(self) -> bool:
        """Whether the message needs passages."""
        return self.kind in NEEDY


@dataclass(frozen=True)
class Frame:
    """A section of `templates/dialogues.txt`.

    Attributes:
        name: The heading.
        part: ``train`` or ``test``.
        before: Kind and template of possible earlier turns.
        messages: Kind and template of the messages; without a kind, a message has that of the earlier turns.
    """

    name: str
    part: str
    before: list[tuple[str, str]]
    messages: list[tuple[str, str]]

    def choices(self, kind: str) -> list[tuple[str, str, str]]:
        """Return all (kind of the earlier turns, their template, message) in which the message asks for a kind."""
        choices = []
        for message_kind, message in self.messages:
            for before_kind, before in self.before:
                if kind == (message_kind or before_kind):
                    choices.append((before_kind, before, message))
        return choices


def make_dialogues(seed: int = 0, part: str = "train", per_group: int = PER_GROUP) -> list[Dialogue]:
    """Return dialogues of all frames of a part; the same seed gives the same ones.

    Args:
        seed: Seed.
        part: ``train`` or ``test``; they share no frame.
        per_group: How many of each frame need passages; as many do not.
    """
    unique: dict[tuple[tuple[str, ...], str], Dialogue] = {}
    for frame in read_frames():
        if frame.part != part:
            continue
        draw = random.Random(f"{seed} {frame.name}")
        for group in (NEEDY, OTHERS):
            kinds = [kind for kind in group if frame.choices(kind)]
            for i in range(per_group):
                dialogue = _make_dialogue(frame, kinds[i % len(kinds)], draw)
                unique[dialogue.history, dialogue.message] = dialogue
    return list(unique.values())


def read_frames() -> list[Frame]:
    """Return the frames, in the order of the file."""
    return _read_sections()[1:]


@cache
def _read_sections() -> list[Frame]:
    """Return the section of generic answers, and then the frames."""
    sections: list[Frame] = []
    for line in read_lines(FOLDER / "dialogues.txt"):
        if line.startswith("["):
            name, _, part = line.strip("[]").partition(" ")
            sections.append(Frame(name, part or "train", [], []))
            continue
        head, _, text = line.partition(": ")
        if head.startswith("say"):
            sections[-1].messages.append((head[len("say ") :], text))
        else:
            sections[-1].before.append((head, text))
    return sections


def _make_dialogue(frame: Frame, kind: str, draw: random.Random) -> Dialogue:
    before_kind, before, message = draw.choice(frame.choices(kind))
    bound: dict[str, str] = {}
    turns = _make_turns(before, before_kind, frame.part, draw, bound)
    text = _fill_template(message, frame.part, draw, bound)
    room = _MAX_TURNS - len(turns)
    if room >= 2 and draw.random() < 0.3:
        turns = [*_make_turns("@any", "any", frame.part, draw, {}), *turns]
    elif room >= 1 and draw.random() < 0.2:
        turns = [("assistant", draw.choice(_SMALL_TALK)), *turns]
    elif " > " not in before and draw.random() < 0.15:
        # Some applications keep only the user's messages; an answer that the message refers to must stay.
        turns = turns[:1]
    return Dialogue(tuple(turns), vary(text, draw), kind, frame.name)


def _make_turns(
    template: str, kind: str, part: str, draw: random.Random, bound: dict[str, str]
) -> list[tuple[str, str]]:
    """Return the turns of a template; adds a generic answer if the last is the user's."""
    template = re.sub("@any", lambda _: f"@{draw.choice(NEEDY + OTHERS)}", template)
    texts = template.split(" > ")
    if len(texts) % 2:
        request = _REQUEST.search(texts[-1])
        answered = (request[1] if request else kind, "any")
        texts.append(
            draw.choice([text for answer_kind, text in _read_sections()[0].before if answer_kind in answered])
        )
    turns = []
    for i, text in enumerate(texts):
        message = _fill_template(text, part, draw, bound)
        turns.append(("user", vary(message, draw)) if i % 2 == 0 else ("assistant", message))
    return turns


def _fill_template(template: str, part: str, draw: random.Random, bound: dict[str, str]) -> str:
    """Fill a template; a slot repeats the word that it was bound to, and ``{slot2}`` takes another one."""
    open_slots = _open_slots()
    text = fill(template, open_slots, draw)
    text = _REQUEST.sub(lambda match: fill(_draw_template(match, part, draw), open_slots, draw), text)

    def word(slot: re.Match[str]) -> str:
        name, other = slot[1] + slot[2], slot[1] if slot[2] else slot[1] + "2"
        if name not in bound:
            words = [candidate for candidate in read_words()[slot[1]] if candidate != bound.get(other)]
            bound[name] = draw.choice(words)
        return bound[name]

    return _SLOT.sub(word, text)


@cache
def _open_slots() -> dict[str, list[str]]:
    """Return a word list for `fill` that leaves every slot as it is."""
    names = [*read_words(), *(f"{name}2" for name in read_words())]
    return {name: [f"{{{name}}}"] for name in names}


def _draw_template(reference: re.Match[str], part: str, draw: random.Random) -> str:
    """Draw a template for ``@KIND`` or ``@KIND:slot``; its alternatives are resolved, its slots are not."""
    kind, slot = reference[1], f"{{{reference[2]}}}"
    templates = [
        template for template in read_lines(FOLDER / f"{kind}.txt") if not template.startswith(FOLLOW_UPS)
    ]
    if not reference[2]:
        test_templates = templates[TEST_LINES]
        return draw.choice(
            test_templates
            if part == "test"
            else [template for template in templates if template not in test_templates]
        )
    while True:
        text = fill(
            draw.choice([template for template in templates if slot in template]), _open_slots(), draw
        )
        if slot in text:
            return text
