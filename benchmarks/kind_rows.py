"""Training data and shared code of the fits `segments_head`, `context_head` and `adapted_kinds`."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from labels import Label, read_adarague, read_practical, read_template_labels
from mixtures import Mixture, Piece
from news import read_questions
from segment_rows import SegmentRow, label_segments, make_training_mixtures, read_segment_rows
from templates import LICENCE, keep_words
from text_rows import TRAIN, TextRow
from traffic_requests import APPLICATIONS, read_traffic
from training_text import make_training_rows

from rgate_integrations.gates.heads_artifact import Kind, KindHead
from rgate_integrations.models.base import PooledLayer
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
MERGED_KINDS = {"particular": "obscure", "thanks": "task"}
"""Kinds of `text_rows` that the heads merge with others."""
NEWS_KINDS = {"news": "fresh", "settled": "knowledge"}
"""Kinds of the templates of `news`: undated news, and facts that do not change."""
CLEAN = 1.5
"""Weight of a clean request, relative to a segment of a request in a frame."""


def label_text_rows(rows: Sequence[TextRow]) -> Iterator[SegmentRow]:
    """Yield the labelled segments of requests in many languages and frames."""
    for row in rows:
        pieces = tuple(Piece(text, MERGED_KINDS.get(kind, kind)) for text, kind in row.pieces)
        mixture = Mixture(row.text, pieces, MERGED_KINDS.get(row.kind, row.kind), "", "")
        yield from label_segments(mixture, row.source, "\n".join(row.history))


def read_labelled_requests(data: Path) -> tuple[list[Label], list[SegmentRow]]:
    """Return the training data: clean requests, and segments of the others; no request of `traffic` is among them."""
    labels = [*read_adarague(data), *read_practical(data), *read_template_labels()]
    clean = [label for label in labels if label.ships and label.kind and label.what != "language"]
    for question, source, _ in read_questions(data):
        # The six sets are already among the labels.
        if source in NEWS_KINDS:
            clean.append(Label(question, source, LICENCE, True, NEWS_KINDS[source], weight=0.5))
    segments = [row for row in read_segment_rows(data) if row.kind in NAMES or not row.kind]
    segments += label_text_rows([row for row in make_training_rows() if row.part == TRAIN])
    measured = {keep_words(text) for text in list_traffic()}
    clean = [label for label in clean if keep_words(label.question) not in measured]
    return clean, [row for row in segments if keep_words(row.text) not in measured]


def list_traffic() -> list[str]:
    """Return the last message of each request of `traffic`, which must not be a whole training request."""
    return [
        labelled.request.question for application in APPLICATIONS for labelled in read_traffic(application)
    ]


def build_single_layout(question: str) -> np.ndarray:
    """Return the layout of a request that counts as one segment, even if it has several sentences."""
    features = layout(" ".join(question.split()))[0]
    return np.concatenate([np.log1p([1, 1]), [1, 1], features[4:9], np.log1p([1]), [1]]).astype(np.float32)


def find_related(texts: Iterable[str], questions: Collection[str], data: Path) -> set[str]:
    """Return the texts that have the words of a question, and all requests in frames that contain a question."""
    if not questions:
        return set()
    plain_questions = {keep_words(question) for question in questions}
    related = {text for text in texts if keep_words(text) in plain_questions}
    for text, request in {(mixture.text, mixture.request) for mixture in make_training_mixtures(data)}:
        words = keep_words(text)
        if keep_words(request) in plain_questions or any(question in words for question in plain_questions):
            related.add(text)
    return related


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
        standard: Means and scales of the standardised inputs; they are folded into the first layer.
        biases: Added to the logits of kinds, by their `Kind.answerable`.
    """
    mean, scale = standard
    state_weights = hidden.weight.detach().numpy() / scale
    kinds = []
    for kind, bias in zip(KINDS, output.bias.tolist(), strict=True):
        kinds.append(replace(kind, bias=bias + biases[kind.answerable]))
    return KindHead(
        tuple(PooledLayer(layer, "question", "mean") for layer in layers),
        tuple(kinds),
        state_weights.astype(np.float32),
        (hidden.bias.detach().numpy() - state_weights @ mean).astype(np.float32),
        output.weight.detach().numpy().astype(np.float32),
    )
