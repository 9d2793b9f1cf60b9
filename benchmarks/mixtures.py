"""Requests with pasted text and courtesies around them: a greeting, a log, a mail, a table.

`mix` puts a request into a frame of ``templates/frames.txt``. Each piece of the result is labelled with its kind.
Every frame gets requests of every kind, so that the frame predicts nothing.
"""

import itertools
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from base import read_records
from templates import FOLDER, fill, read_words

GIVEN, COURTESY = "given", "task"
"""The kinds of pasted text and of courtesies, which need no passages."""
AROUND = ("opening", "closing", "bridge", "given")
_MONTHS = ("01", "03", "05", "06", "09", "10", "11", "12")
_FILES = (
    "orders",
    "billing",
    "sync",
    "auth",
    "mailer",
    "index",
    "report",
    "cart",
    "upload",
    "scheduler",
    "metrics",
)
_NAMES = (
    "load",
    "parse",
    "handle_row",
    "update",
    "fetch_all",
    "merge",
    "flush",
    "resolve",
    "render",
    "checkout",
)
_TYPO = 0.08  # of the words, in a request with typos


@dataclass(frozen=True)
class Piece:
    """A part of a request: its text, and its kind (see `labels`) or `GIVEN`."""

    text: str
    kind: str


@dataclass(frozen=True)
class Mixture:
    """A request in a frame.

    Attributes:
        text: The whole message.
        pieces: Its parts, in order.
        kind: The kind of the request.
        frame: Name of the frame.
        position: Of the pasted text: before, after, around, or none.
        request: The request, without the typos that it has in the text.
    """

    text: str
    pieces: tuple[Piece, ...]
    kind: str
    frame: str
    position: str
    request: str = ""


@cache
def read_frames() -> dict[str, list[str]]:
    """Return the blocks of each frame."""
    by_frame: dict[str, list[str]] = {}
    blocks: list[str] = []
    text = re.sub(r"^# .*\n", "", (FOLDER / "frames.txt").read_text(encoding="utf-8"), flags=re.MULTILINE)
    for block in text.split("\n\n"):
        heading = re.match(r"\s*\[([a-z]+)\]\n", block)
        if heading and heading[1] not in by_frame and heading[1] != "f":
            blocks = by_frame.setdefault(heading[1], [])
            block = block[heading.end() :]
        if block.strip():
            blocks.append(block.strip("\n"))
    for name in AROUND:
        by_frame[name] = "\n".join(by_frame[name]).splitlines()
    return by_frame


def list_frames() -> list[str]:
    """Return the names of the frames, without the courtesies' sections."""
    return [name for name in read_frames() if name not in AROUND]


def read_prose(data: Path, part: slice) -> list[str]:
    """Return paragraphs of ``corpus.hotpot_2wiki.jsonl.gz`` (Wikipedia, CC BY-SA), cut to 1,200 characters."""
    texts = [record["text"] for record in read_records(data / "corpus.hotpot_2wiki.jsonl.gz")[part]]
    return [text[:1_200] for text in texts if len(text) > 120]


def draw_pasted(frame: str, length: int, draw: random.Random, prose: Sequence[str] = ()) -> str:
    """Return about ``length`` characters of text as people paste it.

    Args:
        frame: Name of a frame.
        length: In characters; at least one block.
        draw: Source of randomness.
        prose: Paragraphs that the frame ``prose`` draws from, besides its own.
    """
    blocks: list[str] = []
    while not blocks or sum(map(len, blocks)) < length:
        if frame == "prose" and prose and draw.random() < 0.8:
            blocks.append(draw.choice(prose))
        else:
            blocks.append(_fill_block(draw.choice(read_frames()[frame]), draw))
    return draw.choice(("\n", "\n\n")).join(blocks)


def mix(
    request: str,
    kind: str,
    frame: str,
    position: str,
    length: int,
    draw: random.Random,
    prose: Sequence[str] = (),
) -> Mixture:
    """Put a request into a frame.

    Args:
        request: The request; empty for an instruction about the pasted text.
        kind: Its kind.
        frame: Name of the frame.
        position: Of the pasted text: ``before``, ``after``, ``around`` or ``none``.
        length: Of the pasted text, in characters.
        draw: Source of randomness.
        prose: See `draw_pasted`.
    """
    if not request:
        request, kind = _draw_line("given", draw), COURTESY
    original = request
    if draw.random() < 0.12:
        request = _add_typos(request, draw)
    half = length // 2 if position == "around" else length
    pieces = _draw_courtesies("opening", draw)
    if position in ("before", "around"):
        pieces += _draw_pasted_piece(frame, half, draw, prose)
        pieces += _draw_bridge(draw)
    pieces.append(Piece(request, kind))
    if position in ("after", "around"):
        pieces += _draw_pasted_piece(frame, half, draw, prose)
    pieces += _draw_courtesies("closing", draw)
    text = pieces[0].text
    for piece, following in itertools.pairwise(pieces):
        together = GIVEN not in (piece.kind, following.kind) and piece.text[-1] in ".!?:,"
        text += draw.choice((" ", " ", "\n")) if together else draw.choice(("\n", "\n\n", "\n\n"))
        text += following.text
    return Mixture(text, tuple(pieces), kind, frame, position, original)


def _draw_courtesies(name: str, draw: random.Random) -> list[Piece]:
    if draw.random() >= 0.45:
        return []
    return [Piece(_draw_line(name, draw), COURTESY) for _ in range(draw.choice((1, 1, 2)))]


def _draw_pasted_piece(frame: str, length: int, draw: random.Random, prose: Sequence[str]) -> list[Piece]:
    bridge = _draw_bridge(draw)
    return [*bridge, Piece(draw_pasted(frame, length, draw, prose), GIVEN)]


def _draw_bridge(draw: random.Random) -> list[Piece]:
    return [Piece(_draw_line("bridge", draw), COURTESY)] if draw.random() < 0.35 else []


def _draw_line(name: str, draw: random.Random) -> str:
    return _fill_block(draw.choice(read_frames()[name]), draw)


def _fill_block(block: str, draw: random.Random) -> str:
    digits = {
        "month": draw.choice(_MONTHS),
        "file": draw.choice(_FILES),
        "word_py": draw.choice(_NAMES),
        "host": f"{draw.choice(('web', 'db', 'app'))}-{draw.randint(1, 9)}",
    }
    block = re.sub(r"\{(month|file|word_py|host)\}", lambda match: digits[match[1]], block)
    sizes = {
        "dd": (10, 59),
        "hh": (10, 23),
        "mm": (10, 59),
        "ss": (10, 59),
        "digit": (1, 9),
        "port": (1024, 65535),
    }
    block = re.sub(r"\{(dd|hh|mm|ss|digit|port)\}", lambda match: str(draw.randint(*sizes[match[1]])), block)
    block = re.sub(r"\{hex\}", lambda _: f"{draw.getrandbits(32):08x}", block)
    block = re.sub(
        r"\{ip\}", lambda _: f"10.{draw.randint(0, 9)}.{draw.randint(0, 255)}.{draw.randint(1, 254)}", block
    )
    return "\n".join(fill(line, read_words(), draw, keep_spaces=True) for line in block.split("\n"))


def _add_typos(text: str, draw: random.Random) -> str:
    words = text.split(" ")
    for i, word in enumerate(words):
        if len(word) > 3 and word.isalpha() and draw.random() < _TYPO:
            at = draw.randrange(1, len(word) - 1)
            words[i] = word[:at] + word[at + 1] + word[at] + word[at + 2 :]
    return " ".join(words)
