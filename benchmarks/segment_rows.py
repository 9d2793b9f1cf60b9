"""Training rows of the kind heads besides clean requests: segments of requests in frames, and of conversations.

Each piece of a request in a frame (`mixtures`) has a kind, so each segment gets a label. The heads learn that pasted
text and courtesies need no passages. The frames themselves predict nothing.
"""

import math
import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dialogues import make_dialogues
from labels import KIND_OF, read_adarague, read_practical, read_template_labels
from mixtures import COURTESY, GIVEN, Mixture, mix, read_prose
from templates import make_requests

from rgate_integrations.runtime.segments import segments

SEED = 21
MIXTURES, PARAGRAPHS, DIALOGUES = 8_000, 300, (0, 1, 2)  # of the last, the seeds
SHARES = {
    "private": 0.29,
    "fresh": 0.14,
    "obscure": 0.07,
    "common": 0.16,
    "task": 0.2,
    "given": 0.06,
    "knowledge": 0.08,
}
FROM_SOURCES = (
    0.3  # share of requests from recorded sources, if these have the kind; the others are from templates
)
MIN_PASTED, MAX_PASTED = 40, 500  # characters that are pasted
MAX_PASTED_SEGMENTS = 5  # segments of pasted text from one request
NEEDY = ("private", "fresh", "obscure")
TRAINED_ON = (
    "log",
    "trace",
    "code",
    "config",
    "thread",
    "letter",
    "chat",
    "ticket",
    "table",
    "list",
    "clause",
    "product",
    "story",
    "math",
    "prose",
    "biology",
    "recipe",
    "json",
    "sql",
    "sport",
    "biography",
    "economics",
    "console",
    "calendar",
    "forum",
    "csv",
    "terms",
    "verse",
    "geography",
    "yaml",
)
"""The frames that train the shipped heads; the others only measure."""
_NEEDIEST = ("private", "fresh", "obscure", "knowledge", "common", COURTESY, GIVEN)


@dataclass(frozen=True)
class SegmentRow:
    """One segment of a request.

    Attributes:
        text: The request.
        index: Index of the segment.
        kind: Name of its kind; see `kind_rows.KINDS`. Empty if it is not certain: only the whole has a kind.
        weight: How much the row counts.
        whole: The kind of the whole request, as `labels.Label.what`.
        source: Where the request is from: a generator, a file or folder of templates, or a recorded source.
        history: The earlier turns.
    """

    text: str
    index: int
    kind: str
    weight: float
    whole: str
    source: str
    history: str = ""


def make_training_mixtures(data: Path) -> Iterator[Mixture]:
    """Yield the requests in frames that train; the draws are seeded."""
    draw = random.Random(SEED)
    prose = read_prose(data, slice(3_000, 8_000))
    by_template: dict[str, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
    for request in make_requests():
        by_template[request.kind][request.template].append(request.question)
    recorded: dict[str, list[str]] = defaultdict(list)
    for label in read_practical(data):
        # Requests of Self-Instruct already contain pasted text.
        if label.ships and label.source != "yizhongw/self-instruct":
            recorded[label.what].append(label.question)
    for label in read_adarague(data):
        recorded["knowledge"].append(label.question)
    for _ in range(MIXTURES):
        kind = draw.choices(list(SHARES), list(SHARES.values()))[0]
        if kind == "given":
            question = ""
        elif kind not in by_template or (kind in recorded and draw.random() < FROM_SOURCES):
            question = draw.choice(recorded[kind])
        else:
            question = draw.choice(by_template[kind][draw.choice(list(by_template[kind]))])
        frame = draw.choice(TRAINED_ON) if kind == "given" or draw.random() < 0.9 else "none"
        position = "none" if frame == "none" else draw.choice(("before", "after", "around"))
        length = int(math.exp(draw.uniform(math.log(MIN_PASTED), math.log(MAX_PASTED))))
        yield mix(question, kind, frame, position, length, draw, prose)


def label_segments(mixture: Mixture, source: str = "mixtures", history: str = "") -> Iterator[SegmentRow]:
    """Yield the segments of a request, without given text that is not drawn."""
    kinds = match_kinds(mixture)
    needy = find_segments(mixture.kind, kinds) if mixture.kind in NEEDY else []
    pasted = [index for index in find_segments(GIVEN, kinds) if len(kinds[index]) == 1]
    draw = random.Random(len(mixture.text))
    drawn = draw.sample(pasted, min(MAX_PASTED_SEGMENTS, len(pasted)))
    for index, segment_kinds in enumerate(kinds):
        if not segment_kinds:
            continue
        kind = min(segment_kinds, key=_NEEDIEST.index)
        if kind == GIVEN and index not in drawn:
            continue
        weight = 0.5 if kind in (GIVEN, COURTESY) else 1.0
        # If a request that needs passages spans several segments, it is unclear which of them need the passages.
        name = "" if kind in NEEDY and len(needy) > 1 else KIND_OF[kind]
        yield SegmentRow(mixture.text, index, name, weight, mixture.kind, source, history)


def find_segments(kind: str, kinds: list[set[str]]) -> list[int]:
    """Return the indices of the segments that contain a piece of a kind."""
    return [index for index, segment_kinds in enumerate(kinds) if kind in segment_kinds]


def label_whole(question: str, kind: str, source: str) -> list[SegmentRow]:
    """Return all segments of a request, each labelled with the kind of the whole request."""
    return [
        SegmentRow(question, index, KIND_OF[kind], 0.5, kind, source)
        for index in range(len(segments(question)))
    ]


def match_kinds(mixture: Mixture) -> list[set[str]]:
    """Return for each segment the kinds of the pieces that it overlaps."""
    kinds: list[set[str]] = []
    ends, flat = [], ""
    for segment in segments(mixture.text):
        flat += f" {segment}" if flat else segment
        ends.append(len(flat))
        kinds.append(set())
    begin = 0
    for piece in mixture.pieces:
        text = " ".join(piece.text.split())
        begin = max(flat.find(text, begin), begin)
        end = begin + len(text)
        start = 0
        for index, segment_end in enumerate(ends):
            if begin < segment_end and start < end:
                kinds[index].add(piece.kind)
            start = segment_end + 1
        begin = end
    return kinds


def read_segment_rows(data: Path) -> list[SegmentRow]:
    """Return the rows from requests in frames, paragraphs, tasks and dialogues."""
    rows: list[SegmentRow] = []
    for mixture in make_training_mixtures(data):
        rows += label_segments(mixture)
    for text in read_prose(data, slice(3_000, 8_000))[:PARAGRAPHS]:
        rows += label_whole(text[:MAX_PASTED], GIVEN, "prose")
    for label in (*read_practical(data), *read_template_labels()):
        # If the whole needs no passages, no part of it does.
        if label.ships and label.what == COURTESY:
            pieces = label_whole(label.question, label.what, label.source)
            rows += pieces if len(pieces) > 1 else []
    for seed in DIALOGUES:
        for dialogue in make_dialogues(seed, part="train"):
            if len(segments(dialogue.message)) == 1:
                history = "\n".join(dialogue.history)
                kind = KIND_OF[dialogue.kind]
                rows.append(SegmentRow(dialogue.message, 0, kind, 1.0, dialogue.kind, "dialogues", history))
    return rows
