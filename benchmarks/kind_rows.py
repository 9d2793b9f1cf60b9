"""What the kinds of segments are fitted on, and what the two fits share (`kinds`, `adapted_kinds`)."""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from labels import Label, read_adarague, read_practical, read_template_labels
from mixtures import Mixture, Piece
from news import read_questions
from segment_rows import SegmentRow, label_segments, make_training_mixtures, read_segment_rows
from templates import LICENCE
from text_rows import TRAIN, TextRow
from training_text import make_training_rows

from rgate_integrations.gates.artifacts import Kind, KindHead
from rgate_integrations.models.pooling import PooledLayer
from rgate_integrations.runtime.segments import layout

KINDS = (
    Kind("no_knowledge", "always", "needs no knowledge from outside"),
    Kind("common_knowledge", "always", "asks for common knowledge"),
    Kind("knowledge", "if_known", "asks about a fact"),
    Kind("obscure_knowledge", "never", "asks about something hardly anybody knows"),
    Kind("private", "never", "asks about documents, data or a conversation that the LLM has not seen"),
    Kind("fresh", "never", "asks about something that changes with time"),
    Kind("given", "always", "is text to work on"),
)
NAMES = [kind.name for kind in KINDS]
UNITS, DROPOUT, SMOOTHING = 384, 0.5, 0.02
SAID_AS = {"particular": "obscure", "thanks": "task"}
"""The kinds of `text_rows` that the heads do not tell apart from others."""
OF_NEWS = {"news": "fresh", "settled": "knowledge"}
"""What the templates of `news` ask for: news that nobody dates, and facts that do not change."""
CLEAN = 1.5
"""How much more a request that stands alone counts than a segment of one in a frame."""


def text_segments(rows: Sequence[TextRow]) -> Iterator[SegmentRow]:
    """Yield the segments of requests in many languages and frames whose kind is known."""
    for row in rows:
        pieces = tuple(Piece(text, SAID_AS.get(kind, kind)) for text, kind in row.pieces)
        mixture = Mixture(row.text, pieces, SAID_AS.get(row.kind, row.kind), "", "")
        history = "\n".join(row.history)
        for segment in label_segments(mixture):
            yield replace(segment, history=history)


def labelled_requests(data: Path) -> tuple[list[Label], list[SegmentRow]]:
    """Return what trains: requests that stand alone, and segments of others."""
    labels = [*read_adarague(data), *read_practical(data), *read_template_labels()]
    clean = [label for label in labels if label.ships and label.kind and label.what != "language"]
    for question, source, _ in read_questions(data):
        # Those of the six sets are among the labels.
        if source in OF_NEWS:
            clean.append(Label(question, source, LICENCE, True, OF_NEWS[source], weight=0.5))
    segments = [row for row in read_segment_rows(data) if row.kind in NAMES]
    segments += text_segments([row for row in make_training_rows() if row.part == TRAIN])
    return clean, segments


def layout_of_clean(question: str) -> np.ndarray:
    """Return the layout of a request that counts as one segment, however many sentences it has."""
    found = layout(" ".join(question.split()))[0]
    return np.concatenate([np.log1p([1, 1]), [1, 1], found[4:9], np.log1p([1]), [1]]).astype(np.float32)


def containing(questions: Collection[str], data: Path) -> set[str]:
    """Return the requests in frames that one of some questions stands in."""
    asked = {plain(question) for question in questions}
    framed = {mixture.text for mixture in make_training_mixtures(data)}
    words = {text: plain(text) for text in framed}
    return {text for text, own in words.items() if any(question in own for question in asked)}


def plain(text: str) -> str:
    """Return the words alone."""
    return " ".join(re.findall(r"\w+", text.casefold()))


def make_head(
    layers: Sequence[int],
    hidden: torch.nn.Linear,
    output: torch.nn.Linear,
    standard: tuple[np.ndarray, np.ndarray],
    biases: Mapping[str, float],
) -> KindHead:
    """Return a head in the form that is saved.

    Args:
        layers: The layers that it reads.
        hidden: Its first layer.
        output: Its second.
        standard: Means and scales that the inputs were standardised by, which fold into the first layer.
        biases: Added to the logits of kinds, by whether an LLM answers them.
    """
    mean, scale = standard
    of_states = hidden.weight.detach().numpy() / scale
    kinds = []
    for kind, bias in zip(KINDS, output.bias.tolist(), strict=True):
        kinds.append(replace(kind, bias=bias + biases[kind.answerable]))
    return KindHead(
        tuple(PooledLayer(layer, "question", "mean") for layer in layers),
        tuple(kinds),
        of_states.astype(np.float32),
        (hidden.bias.detach().numpy() - of_states @ mean).astype(np.float32),
        output.weight.detach().numpy().astype(np.float32),
    )
