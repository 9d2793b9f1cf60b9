"""Fits a classifier of requests about own matters, which no LLM knows, into a saved gate.

    python benchmarks/own_matters.py [--data FOLDER --save GATE]

There are two kinds. Some requests name a source of the asker's own: an LLM may know the answer to "According to our
wiki, what is a monad?", but it has not read the wiki (``templates/sources.txt``). Others are short, and about the
matters of an application that they do not name, such as "does it also come in red" (``templates/local.txt``). The
classifier learns them beside look-alikes and other training text that needs no passages. A fifth of the frames and
requests and some languages are held out.

Without ``--save``, prints the decisions of the default gate on what is held out, and on requests that were written
without sight of the templates, except for three that train: ``own_sources.tsv`` has 600 in 13 languages,
``local_requests.tsv`` 603 to twelve applications in seven languages. ``hard_requests.tsv`` widens what the gate got
wrong of the latter before this classifier.
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
from text_rows import FRAMES, NEEDY, TRAIN, make_local_rows, make_source_rows
from training_text import make_training_rows

from rgate_integrations import load_gate
from rgate_integrations.gates.artifacts import LAYOUT, Kind, KindHead
from rgate_integrations.gates.folder import read_gate, save_gate
from rgate_integrations.models.base import PooledLayer

RECIPE = "; own matters: python benchmarks/own_matters.py"
NAME = "requests about own matters, and look-alikes"
UNITS, DROPOUT, DECAY, EPOCHS, BATCH, RATE = 256, 0.3, 0.1, 16, 256, 1e-3
MAX_ROWS = 6_000
"""Maximum number of other training texts of one kind and source."""
MAX_WORDS = 120
"""Maximum length of these texts. All requests about own matters are short."""
CALIBRATION = 0.2
"""Share of other training texts that set the threshold."""
ABOUT = {
    "own_source": "names a source of the asker's own, which the LLM has not read",
    "local": "seems to be about an application's own matters, which the LLM does not know",
}
MAX_MISTAKEN = {"own_source": 0.002, "local": 0.001}
"""Share of the other training texts that may be taken for each kind."""
ROWS = {"own_source": make_source_rows, "local": make_local_rows}


def read_others(data: Path) -> list[tuple[str, str]]:
    """Return texts about no own matter, each with its earlier turns; no request of `traffic`."""
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


def fit(states: np.ndarray, targets: np.ndarray) -> KindHead:
    """Fit the classifier, without thresholds; deterministic for the same rows.

    Args:
        states: Shape (n, layers * 384), float32.
        targets: Whether each text is of each kind of `ABOUT`, shape (n, 2); NaN if that is not known.
    """
    torch.manual_seed(0)
    torch.set_num_threads(1)
    mean, scale = states.mean(axis=0), states.std(axis=0) + 1e-3
    inputs = torch.from_numpy((states - mean) / scale)
    known, wanted = torch.from_numpy(~np.isnan(targets)), torch.from_numpy(np.nan_to_num(targets))
    hidden, output = torch.nn.Linear(states.shape[1], UNITS), torch.nn.Linear(UNITS, len(ABOUT))
    net = torch.nn.Sequential(
        torch.nn.Dropout(DROPOUT / 2), hidden, torch.nn.ReLU(), torch.nn.Dropout(DROPOUT), output
    )
    optimizer = torch.optim.AdamW(net.parameters(), lr=RATE, weight_decay=DECAY)
    steps = len(states) // BATCH
    rates = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=EPOCHS * steps)
    for _ in range(EPOCHS):
        for chosen in torch.randperm(len(states))[: steps * BATCH].split(BATCH):
            losses = torch.nn.functional.binary_cross_entropy_with_logits(
                net(inputs[chosen]), wanted[chosen], reduction="none"
            )
            loss = (losses * known[chosen]).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            rates.step()
    weights = hidden.weight.detach().numpy() / scale
    kinds = [Kind("other", "if_known", "is about no own matter")]
    for (name, about), bias in zip(ABOUT.items(), output.bias.tolist(), strict=True):
        kinds.append(Kind(name, "never", about, bias))
    return KindHead(
        tuple(PooledLayer(layer, "question", "mean") for layer in FACT_LAYERS),
        tuple(kinds),
        np.pad(weights, ((0, 0), (0, LAYOUT))).astype(np.float32),
        (hidden.bias.detach().numpy() - weights @ mean).astype(np.float32),
        np.pad(output.weight.detach().numpy(), ((1, 0), (0, 0))),
    )


def set_thresholds(head: KindHead, others: np.ndarray) -> KindHead:
    """Return the head with the biases at which `MAX_MISTAKEN` of the other texts are mistaken.

    Args:
        head: The fitted head.
        others: States of texts about no own matter, shape (n, layers * 384).
    """
    logits = head.logits(others.reshape(len(others), len(FACT_LAYERS), -1), np.zeros((len(others), LAYOUT)))
    kinds = [head.kinds[0]]
    for kind, column in zip(head.kinds[1:], logits.T[1:], strict=True):
        least = float(np.quantile(column, 1 - MAX_MISTAKEN[kind.name]))
        kinds.append(replace(kind, bias=kind.bias - least))
    return replace(head, kinds=tuple(kinds))


def fit_head(data: Path, cache: Path) -> KindHead:
    """Read the training text, and return the head with its thresholds."""
    texts, targets = [], []
    for column, make_rows in enumerate(ROWS.values()):
        for row in make_rows(0):
            if row.part == TRAIN:
                # A request of one kind may also be of the other.
                target = np.full(len(ROWS), np.nan if row.kind == "private" else 0.0, np.float32)
                target[column] = row.kind == "private"
                texts.append((row.text, ""))
                targets.append(target)
    others = read_others(data)
    encoder_states = fact_states(cache)
    encoder_states.fill([*texts, *others])

    def stack(requests: Sequence[tuple[str, str]]) -> np.ndarray:
        return np.stack([encoder_states.whole(*request).ravel() for request in requests]).astype(np.float32)

    other_states = stack(others)
    calibrates = np.random.default_rng(0).random(len(others)) < CALIBRATION
    targets += [np.zeros(len(ROWS), np.float32)] * int((~calibrates).sum())
    head = fit(np.concatenate([stack(texts), other_states[~calibrates]]), np.stack(targets))
    return set_thresholds(head, other_states[calibrates])


def read_training_texts() -> list[str]:
    """Return the requests about own matters, and their look-alikes, that train."""
    return [row.text for make_rows in ROWS.values() for row in make_rows(0) if row.part == TRAIN]


def measure() -> None:
    """Print the share that the default gate retrieves of requests about own matters, and of look-alikes."""
    texts = []
    for name, make_rows in ROWS.items():
        for row in make_rows(0):
            if row.part != TRAIN:
                language = "English" if row.language == "en" else "others"
                title = f"held out, {language}" if row.part == FRAMES else "languages never learned from"
                texts.append((f"{name}, {title}", row.kind == "private", row.text))
    for name in ("own_sources", "local_requests", "hard_requests"):
        for line in Path(__file__).with_name(f"{name}.tsv").read_text(encoding="utf-8").splitlines():
            language, kind, text = line.split("\t")
            for whose in ("all", "English" if language == "en" else "others"):
                texts.append((f"{name}.tsv, {whose}", kind in ("own", "local"), text))
    trained_on = {keep_words(text) for text in read_training_texts()}
    texts = [row for row in texts if keep_words(row[2]) not in trained_on]
    requests = pd.DataFrame(texts, columns=["title", "own", "text"])
    decisions = load_gate(on_error="raise").decide_batch(requests.text.tolist())
    requests["retrieve"] = [decision.retrieve for decision in decisions]
    table = []
    for title, group in requests.groupby("title", sort=False):
        cells = [str(title)]
        for rows in (group[group.own], group[~group.own]):
            cells += [f"{rows.retrieve.mean():.1%}", str(len(rows))]
        table.append(cells)
    print_table(["", "own matters: retrieved", "n", "others: retrieved", "n"], table)


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
    trained_on = read_training_texts()
    data = [row for row in gate.provenance["data"] if row["name"] != NAME]
    data.append({"name": NAME, "licence": LICENCE, "sha256": checksum(trained_on), "n": len(trained_on)})
    provenance = {**gate.provenance, "recipe": recipe, "data": data}
    head = fit_head(arguments.data, arguments.cache)
    save_gate(replace(gate, own_matters=head, provenance=provenance), arguments.save)


if __name__ == "__main__":
    main()
