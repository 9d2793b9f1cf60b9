"""Fits a classifier of requests that name a source of the asker's own, such as "our wiki", into a saved gate.

    python benchmarks/own_sources.py [--data FOLDER --save GATE]

An LLM may know the answer to "According to our wiki, what is a monad?", but it has not read the wiki. The classifier
learns from the frames of ``templates/sources.txt``, around questions that every LLM can answer, and from other
training text that needs no passages. A fifth of the frames and some languages are held out. Without ``--save``,
prints the decisions of the default gate on the held-out frames and on ``own_sources.tsv``: 600 requests in 13
languages, written without sight of the frames, half of them with a source of the asker's own.
"""

import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from base import argument_parser, checksum, print_table
from encoder_states import FACT_LAYERS
from heads import CACHE, fact_states
from kind_rows import list_traffic
from labels import read_adarague, read_practical, read_template_labels
from templates import LICENCE, keep_words
from text_rows import FRAMES, NEEDY, TRAIN, make_source_rows
from training_text import make_training_rows

from rgate_integrations import load_gate
from rgate_integrations.gates.artifacts import LAYOUT, Kind, KindHead
from rgate_integrations.gates.folder import read_gate, save_gate
from rgate_integrations.models.base import PooledLayer

REQUESTS = Path(__file__).with_name("own_sources.tsv")
RECIPE = "; sources of the asker's own: python benchmarks/own_sources.py"
FRAMES_NAME = "questions in frames with and without a source of the asker's own"
UNITS, DROPOUT, DECAY, EPOCHS, BATCH, RATE = 256, 0.3, 0.1, 12, 256, 1e-3
MAX_ROWS = 6_000
"""Maximum number of other training texts of one kind and source."""
MAX_WORDS = 120
"""Maximum length of a training text. All frames are short."""
CALIBRATION = 0.2
"""Share of other training texts that set the threshold."""
MAX_MISTAKEN = 0.002
"""Share of them that may be taken for requests with a source of the asker's own."""


def read_others(data: Path) -> list[tuple[str, str]]:
    """Return texts without a source of the asker's own, each with its earlier turns; no request of `traffic`."""
    by_source: dict[tuple[str, str], list[tuple[str, str]]] = defaultdict(list)
    for label in (*read_adarague(data), *read_practical(data), *read_template_labels()):
        if label.ships and label.kind in ("no_knowledge", "common_knowledge", "given", "knowledge"):
            by_source[label.kind, label.source].append((label.question, ""))
    for row in make_training_rows():
        if row.part == TRAIN and row.kind not in NEEDY and len(row.text.split()) <= MAX_WORDS:
            by_source["", row.source].append((row.text, "\n".join(row.history)))
    measured = {keep_words(text) for text in list_traffic()}
    draw, drawn = random.Random(0), []
    for texts in by_source.values():
        unique = [text for text in dict.fromkeys(texts) if keep_words(text[0]) not in measured]
        drawn += draw.sample(unique, min(len(unique), MAX_ROWS))
    return drawn


def fit(states: np.ndarray, own: np.ndarray) -> KindHead:
    """Fit the classifier, without a threshold; deterministic for the same rows.

    Args:
        states: Shape (n, layers * 384), float32.
        own: Whether each text names a source of the asker's own, shape (n,).
    """
    torch.manual_seed(0)
    torch.set_num_threads(1)
    mean, scale = states.mean(axis=0), states.std(axis=0) + 1e-3
    inputs = torch.from_numpy((states - mean) / scale)
    targets = torch.from_numpy(own.astype(np.float32))
    hidden, output = torch.nn.Linear(states.shape[1], UNITS), torch.nn.Linear(UNITS, 1)
    net = torch.nn.Sequential(
        torch.nn.Dropout(DROPOUT / 2), hidden, torch.nn.ReLU(), torch.nn.Dropout(DROPOUT), output
    )
    optimizer = torch.optim.AdamW(net.parameters(), lr=RATE, weight_decay=DECAY)
    steps = len(states) // BATCH
    rates = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=EPOCHS * steps)
    for _ in range(EPOCHS):
        for chosen in torch.randperm(len(states))[: steps * BATCH].split(BATCH):
            logits = net(inputs[chosen])[:, 0]
            loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, targets[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            rates.step()
    weights = hidden.weight.detach().numpy() / scale
    own_weights = output.weight.detach().numpy()
    kinds = (
        Kind("other", "if_known", "names no source of the asker's own"),
        Kind("own_source", "never", "names a source of the asker's own", output.bias.item()),
    )
    return KindHead(
        tuple(PooledLayer(layer, "question", "mean") for layer in FACT_LAYERS),
        kinds,
        np.pad(weights, ((0, 0), (0, LAYOUT))).astype(np.float32),
        (hidden.bias.detach().numpy() - weights @ mean).astype(np.float32),
        np.concatenate([np.zeros_like(own_weights), own_weights]),
    )


def set_threshold(head: KindHead, others: np.ndarray) -> KindHead:
    """Return the head with the bias at which `MAX_MISTAKEN` of the other texts are mistaken.

    Args:
        head: The fitted head.
        others: States of texts without a source of the asker's own, shape (n, layers * 384).
    """
    logits = head.logits(others.reshape(len(others), len(FACT_LAYERS), -1), np.zeros((len(others), LAYOUT)))
    least = float(np.quantile(logits[:, 1], 1 - MAX_MISTAKEN))
    other, own = head.kinds
    return replace(head, kinds=(other, replace(own, bias=own.bias - least)))


def fit_head(data: Path, cache: Path) -> KindHead:
    """Read the training text, and return the head with its threshold."""
    rows = [row for row in make_source_rows(0) if row.part == TRAIN]
    others = read_others(data)
    encoder_states = fact_states(cache)
    encoder_states.fill([*((row.text, "") for row in rows), *others])

    def stack(texts: Sequence[tuple[str, str]]) -> np.ndarray:
        return np.stack([encoder_states.whole(*text).ravel() for text in texts]).astype(np.float32)

    other_states = stack(others)
    calibrates = np.random.default_rng(0).random(len(others)) < CALIBRATION
    own = [row.kind == "private" for row in rows] + [False] * int((~calibrates).sum())
    head = fit(
        np.concatenate([stack([(row.text, "") for row in rows]), other_states[~calibrates]]), np.array(own)
    )
    return set_threshold(head, other_states[calibrates])


def measure() -> None:
    """Print the share that the default gate retrieves of requests with and without a source of the asker's own."""
    texts = []
    for row in make_source_rows(0):
        if row.part != TRAIN:
            language = "English" if row.language == "en" else "others"
            title = f"held-out frames, {language}" if row.part == FRAMES else "languages never learned from"
            texts.append((title, row.kind == "private", row.text))
    for line in REQUESTS.read_text(encoding="utf-8").splitlines():
        language, kind, text = line.split("\t")
        title = f"other requests, {'English' if language == 'en' else 'twelve others'}"
        texts.append((title, kind == "own", text))
    requests = pd.DataFrame(texts, columns=["title", "own", "text"])
    decisions = load_gate(on_error="raise").decide_batch(requests.text.tolist())
    requests["retrieve"] = [decision.retrieve for decision in decisions]
    table = []
    for title, group in requests.groupby("title", sort=False):
        cells = [str(title)]
        for rows in (group[group.own], group[~group.own]):
            cells += [f"{rows.retrieve.mean():.1%}", str(len(rows))]
        table.append(cells)
    print_table(["", "own source: retrieved", "n", "none: retrieved", "n"], table)


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--data", type=Path, help="folder of recorded requests, to fit")
    parser.add_argument("--cache", type=Path, default=CACHE, help="folder of cached states")
    parser.add_argument("--save", type=Path, help="folder of a saved gate")
    arguments = parser.parse_args()
    if arguments.save is None:
        measure()
        return
    gate: Any = read_gate(arguments.save)
    recipe = gate.provenance["recipe"].partition(RECIPE)[0] + RECIPE
    frames = [row.text for row in make_source_rows(0) if row.part == TRAIN]
    data = [row for row in gate.provenance["data"] if row["name"] != FRAMES_NAME]
    data.append({"name": FRAMES_NAME, "licence": LICENCE, "sha256": checksum(frames), "n": len(frames)})
    provenance = {**gate.provenance, "recipe": recipe, "data": data}
    head = fit_head(arguments.data, arguments.cache)
    save_gate(replace(gate, own_source=head, provenance=provenance), arguments.save)


if __name__ == "__main__":
    main()
