"""Fits what tells the kind of each segment of a request: a head, and the encoder's last layers, adapted for it.

    python benchmarks/kinds.py --data FOLDER --source FOLDER                measures on practical requests
    python benchmarks/kinds.py --data FOLDER --source FOLDER --save GATE    also fits on everything, and saves it

It learns from clean requests (`labels`), from requests in frames and conversations (`segment_rows`) and from requests
in many languages (`training_text`; those that are held out there only measure: `languages.py`). A request in a frame
has a label for each of its segments. What is measured was fitted without any practical request.

The encoder as it comes mixes what stands side by side, and no head on its states undoes that (0.86 AUC of
conversations; 0.96 adapted), so layers 9 to 12 are adapted (`adapted_layers`). The layers below stay.

The folder of the source holds the wheels of `rgate download multilingual-e5-small`, unpacked. Afterwards run
``encoder_graph.py``, which makes the graph's self-test. It takes an hour and a half on two cores.
"""

import random
import re
from argparse import Namespace
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import numpy as np
import pandas as pd
import torch
from adapted_layers import AdaptedLayers
from base import argument_parser, checksum, print_table
from heads import GOALS, SKIPS, ece
from labels import Label, read_adarague, read_practical, read_template_labels
from mixtures import Mixture, Piece
from news import read_questions
from rich.progress import track
from segment_rows import SegmentRow, mixtures_to_train_on, read_segment_rows, rows_of
from templates import LICENCE
from text_rows import TRAIN, TextRow
from training_text import training_rows

from rgate_integrations import load_gate
from rgate_integrations.engine.loading import DEFAULT_GATE
from rgate_integrations.gates.artifacts import HeadsArtifact, Kind, KindHead
from rgate_integrations.gates.folder import read_gate, save_gate
from rgate_integrations.gates.heads import HeadsGate
from rgate_integrations.models.download import download
from rgate_integrations.models.encoder import ENCODER, Encoder
from rgate_integrations.models.encoder_file import ADAPTER, BRANCH, HIDDEN, make_encoder, read_weights
from rgate_integrations.models.encoder_proxy import EncoderProxy
from rgate_integrations.models.pooling import PooledLayer
from rgate_integrations.runtime.segments import Segmented, layout
from rgate_integrations.tuning.evaluation import auc

LAYERS = (6, 8, 14, 16)
AT_ONCE = 16
KINDS = (
    Kind("no_knowledge", "always", "needs no knowledge from outside"),
    Kind("common_knowledge", "always", "asks for what every LLM knows"),
    Kind("knowledge", "if_known", "asks about a fact"),
    Kind("obscure_knowledge", "never", "asks about something hardly anybody knows"),
    Kind("private", "never", "asks about documents, data or a conversation that the LLM has not seen"),
    Kind("fresh", "never", "asks about something that changes with time"),
    Kind("given", "always", "is text to work on"),
)
NAMES = [kind.name for kind in KINDS]
UNITS, DROPOUT, SMOOTHING = 384, 0.5, 0.02
BATCH_TOKENS = 2_600
DECAYS = (0.01, 0.05)  # of the adapted layers, and of the head
MAX_TOKENS = 510  # a longer request is read in windows
BIASES = {"always": 0.0, "if_known": 0.5, "never": 0.65}
"""Added to the logits of kinds: what may be private, fresh or obscure is rather retrieved for, and a fact that is
taken for common knowledge is skipped for every LLM."""
SAID_AS = {"particular": "obscure", "thanks": "task"}
"""The kinds of `text_rows` that the heads do not tell apart from others."""
OF_NEWS = {"news": "fresh", "settled": "knowledge"}
"""What the templates of `news` ask for: news that nobody dates, and facts that stay as they are."""
GROUPED = "text in many languages and frames"
KINDS_RECIPE = "; kinds of segments, and the layers adapted to them: python benchmarks/kinds.py"


CLEAN = 1.5
"""How much more a request that stands alone counts than a segment of one in a frame."""


@dataclass(frozen=True)
class Stage:
    """A part of the fit.

    Attributes:
        epochs: How often each request is read.
        others: The share of requests that is read of those that stand in no frame of `segment_rows`.
        rates: Highest learning rates, of the adapted layers and of the head.
    """

    epochs: int
    others: float
    rates: tuple[float, float]


STAGES = (Stage(3, 1.0, (4e-4, 1e-3)), Stage(1, 0.25, (1.5e-4, 3.75e-4)))
"""After the first, requests in frames that never train had an AUC of 0.937; after both, 0.949."""
MEASURED = (Stage(1, 1.0, (4e-4, 1e-3)),)
"""What is measured on practical requests is fitted in a quarter of the time, so what ships should be no worse."""


@dataclass
class Example:
    """A request in tokens, with the segments whose kind is known.

    Attributes:
        ids: Its tokens.
        ranges: Where each segment begins and ends, in tokens, shape (segments, 2).
        layout: Shape (segments, 11).
        kinds: Number of the kind of each, shape (segments,).
        weights: How much each counts, shape (segments,).
        framed: Whether it stands in a frame of `segment_rows`.
        pooled: Means of layer 6 over each, shape (segments, 384).
        below: The states after layer 8, shape (tokens, 384), float16.
    """

    ids: list[int]
    ranges: np.ndarray
    layout: np.ndarray
    kinds: np.ndarray
    weights: np.ndarray
    framed: bool
    pooled: np.ndarray = field(default_factory=lambda: np.zeros(0))
    below: np.ndarray = field(default_factory=lambda: np.zeros(0))


def text_segments(rows: Sequence[TextRow]) -> Iterator[SegmentRow]:
    """Yield the segments of requests in many languages and frames whose kind is known."""
    for row in rows:
        pieces = tuple(Piece(text, SAID_AS.get(kind, kind)) for text, kind in row.pieces)
        mixture = Mixture(row.text, pieces, SAID_AS.get(row.kind, row.kind), "", "")
        history = "\n".join(row.history)
        for segment in rows_of(mixture):
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
    segments += text_segments([row for row in training_rows() if row.part == TRAIN])
    return clean, segments


def layout_of_clean(question: str) -> np.ndarray:
    """Return the layout of a request that counts as one segment, however many sentences it has."""
    found = layout(" ".join(question.split()))[0]
    return np.concatenate([np.log1p([1, 1]), [1, 1], found[4:9], np.log1p([1]), [1]]).astype(np.float32)


def read_examples(encoder: Encoder, data: Path, left_out: Collection[str] = ()) -> list[Example]:
    """Return what trains, by length.

    Args:
        encoder: It makes the tokens.
        data: Folder of the data.
        left_out: Requests that do not train, nor any request that holds one of them.
    """
    clean, segments = labelled_requests(data)
    plain_left_out = {plain(text) for text in left_out}
    framed = {mixture.text for mixture in mixtures_to_train_on(data)}
    words = {text: plain(text) for text in framed} if left_out else {}
    holding = {text for text, own in words.items() if any(each in own for each in plain_left_out)}
    labels: dict[tuple[str, str, bool], list[tuple[int, str, float]]] = {}
    for label in clean:
        if plain(label.question) not in plain_left_out:
            # It is one segment, however many sentences it has.
            labels.setdefault((label.question, "", True), []).append((0, label.kind, CLEAN * label.weight))
    for row in segments:
        if row.text not in holding:
            labels.setdefault((row.text, row.history, False), []).append((row.place, row.kind, row.weight))
    found = []
    for (text, history, is_one), of_segments in labels.items():
        segmented = Segmented.from_text(text, [history] if history else [])
        joined, parts = EncoderProxy().join(segmented)
        parts = parts[-len(segmented.segments) :]
        if is_one:
            parts = [(parts[0][0], parts[-1][1])]
        ids, (_, *ranges) = encoder.tokens(joined, parts)
        if len(ids) <= MAX_TOKENS:
            layouts = layout_of_clean(text)[None] if is_one else layout(text)
            places = [place for place, _, _ in of_segments]
            kinds = [NAMES.index(kind) for _, kind, _ in of_segments]
            weights = np.array([weight for _, _, weight in of_segments], np.float32)
            found.append(
                Example(
                    ids,
                    np.array(ranges)[places],
                    layouts[places].astype(np.float32),
                    np.array(kinds),
                    weights,
                )
            )
    return sorted(found, key=lambda each: len(each.ids))


def plain(text: str) -> str:
    """Return the words alone."""
    return " ".join(re.findall(r"\w+", text.casefold()))


def read_states(encoder: Encoder, examples: Sequence[Example]) -> None:
    """Compute the states of the layers that stay."""

    def read(start: int) -> None:
        some = examples[start : start + AT_ONCE]
        states_of = encoder.states([each.ids for each in some], (LAYERS[0], BRANCH))
        for each, states in zip(some, states_of, strict=True):
            each.pooled = np.stack([states[0, begin:end].mean(axis=0) for begin, end in each.ranges])
            each.below = states[1].astype(np.float16)

    with ThreadPoolExecutor() as pool:
        list(pool.map(read, range(0, len(examples), AT_ONCE)))


def batches(examples: Sequence[Example]) -> list[list[Example]]:
    """Return batches of texts of like length."""
    found: list[list[Example]] = [[]]
    for each in examples:
        if (len(found[-1]) + 1) * len(each.ids) > BATCH_TOKENS:
            found.append([])
        found[-1].append(each)
    return found


def pooled_inputs(layers: AdaptedLayers, batch: Sequence[Example]) -> torch.Tensor:
    """Return what the head reads of each segment of a batch: the layers of `LAYERS` and the layout."""
    longest = max(len(each.ids) for each in batch)
    below = np.zeros((len(batch), longest, HIDDEN), np.float32)
    mask = torch.zeros(len(batch), 1, 1, longest, dtype=torch.bool)
    for number, each in enumerate(batch):
        below[number, : len(each.ids)] = each.below
        mask[number, ..., : len(each.ids)] = True
    states = torch.from_numpy(below)
    texts = np.repeat(range(len(batch)), [len(each.ranges) for each in batch])
    begins, ends = np.concatenate([each.ranges for each in batch]).T
    lengths = torch.from_numpy((ends - begins).astype(np.float32))[:, None]
    inputs = [torch.from_numpy(np.concatenate([each.pooled for each in batch]))]
    for layer in (states, *layers(states, mask)[1::2]):
        sums = torch.nn.functional.pad(layer.cumsum(dim=1), (0, 0, 1, 0))
        inputs.append((sums[texts, ends] - sums[texts, begins]) / lengths)
    inputs.append(torch.from_numpy(np.concatenate([each.layout for each in batch])))
    return torch.cat(inputs, dim=1)


def run_stage(
    stage: Stage,
    examples: Sequence[Example],
    parts: tuple[torch.nn.Module, torch.nn.Module],
    loss_of: Callable[[Sequence[Example]], torch.Tensor],
) -> None:
    """Fit the layers and the head for some passes."""
    draw = random.Random(0)
    grouped = batches([each for each in examples if each.framed or draw.random() < stage.others])
    groups = []
    for part, rate, decay in zip(parts, stage.rates, DECAYS, strict=True):
        groups.append({"params": part.parameters(), "lr": rate, "weight_decay": decay})
    optimizer = torch.optim.AdamW(groups)
    steps = stage.epochs * len(grouped)
    rates = torch.optim.lr_scheduler.OneCycleLR(optimizer, list(stage.rates), total_steps=steps + 1)
    for step in track(range(steps), "fitting"):
        if step % len(grouped) == 0:
            draw.shuffle(grouped)
        loss = loss_of(grouped[step % len(grouped)])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parts[0].parameters(), 1.0)
        optimizer.step()
        rates.step()


def fit(examples: Sequence[Example], source: Path, stages: Sequence[Stage]) -> tuple[AdaptedLayers, KindHead]:
    """Fit the head and the layers together."""
    torch.manual_seed(0)
    layers = AdaptedLayers(read_weights(source))
    grouped = batches(examples)
    random.Random(0).shuffle(grouped)
    with torch.no_grad():
        some = torch.cat([pooled_inputs(layers, batch) for batch in grouped[:40]])
        mean, scale = some.mean(dim=0), some.std(dim=0) + 1e-2
    hidden, output = torch.nn.Linear(len(mean), UNITS), torch.nn.Linear(UNITS, len(NAMES))
    head = torch.nn.Sequential(
        torch.nn.Dropout(DROPOUT / 2), hidden, torch.nn.ReLU(), torch.nn.Dropout(DROPOUT), output
    )

    def loss_of(batch: Sequence[Example]) -> torch.Tensor:
        kinds = torch.from_numpy(np.concatenate([each.kinds for each in batch]))
        weights = torch.from_numpy(np.concatenate([each.weights for each in batch]))
        logits = head((pooled_inputs(layers, batch) - mean) / scale)
        losses = torch.nn.functional.cross_entropy(logits, kinds, reduction="none", label_smoothing=SMOOTHING)
        return (losses * weights).sum() / weights.sum()

    for stage in stages:
        run_stage(stage, examples, (layers, head), loss_of)
    # What standardises the inputs folds into the first layer.
    of_states = hidden.weight.detach().numpy() / scale.numpy()
    kinds_of_head = []
    for kind, bias in zip(KINDS, output.bias.tolist(), strict=True):
        kinds_of_head.append(replace(kind, bias=bias + BIASES[kind.answerable]))
    return layers, KindHead(
        tuple(PooledLayer(layer, "question", "mean") for layer in LAYERS),
        tuple(kinds_of_head),
        of_states.astype(np.float32),
        (hidden.bias.detach().numpy() - of_states @ mean.numpy()).astype(np.float32),
        output.weight.detach().numpy().astype(np.float32),
    )


class TrialProxy(EncoderProxy):
    """The encoder with other adapted layers.

    Args:
        folder: What `make_encoder` wrote.
    """

    def __init__(self, folder: Path) -> None:
        self._encoder = Encoder(folder, self_test=False)

    @property
    def encoder(self) -> Encoder:
        """The encoder."""
        return self._encoder


def judge_practical(layers: AdaptedLayers, head: KindHead, source: Path, data: Path) -> pd.DataFrame:
    """Return the practical requests with P(known) and whether they retrieve, by other layers and another head."""
    labels = pd.DataFrame(map(vars, read_practical(data)))
    trained = replace(cast(HeadsArtifact, read_gate(DEFAULT_GATE)), segments=head)
    with TemporaryDirectory() as folder:
        layers.save(Path(folder) / ADAPTER.name)
        make_encoder(source, Path(folder), adapter=Path(folder) / ADAPTER.name)
        gate = HeadsGate.from_parameters({"artifact": DEFAULT_GATE, "trained": trained})
        engine = load_gate(gate, proxy=TrialProxy(Path(folder)), on_error="raise")
        decisions = [engine.decide(question) for question in labels.question]
    return labels.assign(
        p=[decision.p_known for decision in decisions], retrieve=[decision.retrieve for decision in decisions]
    )


def measured(held: pd.DataFrame) -> dict[str, Any]:
    """Return the figures of practical requests as JSON values."""
    held = held.assign(skip=held.what.isin(SKIPS).astype(float))
    sources = {}
    for source, own in held.groupby("source"):
        if own.skip.nunique() == 1:  # one side only: against all requests of the other
            own = pd.concat([own, held[held.skip != own.skip.iloc[0]]])
        sources[str(source)] = auc(own.p.to_numpy(), own.skip.to_numpy())
    errors = {what: ece(own.p.to_numpy(), own.skip.to_numpy()) for what, own in held.groupby("what")}
    return {
        "auc_requests": auc(held.p.to_numpy(), held.skip.to_numpy()),
        "auc_without_source": sources,
        "retrieved": held.groupby("what").retrieve.mean()[list(GOALS)].to_dict(),
        "ece": errors | {"requests": ece(held.p.to_numpy(), held.skip.to_numpy())},
    }


def main() -> None:
    """Run."""
    parser = argument_parser(__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--source", type=Path, required=True)
    parser.add_argument("--save", type=Path, help="folder of a saved gate")
    arguments = parser.parse_args()
    encoder = Encoder(download(ENCODER), self_test=False)
    practical = [label.question for label in read_practical(arguments.data)]
    metrics = measured(
        judge_practical(*fit_all(encoder, arguments, MEASURED, practical), arguments.source, arguments.data)
    )
    table = [
        [kind, f"{share:.1%}", f"{metrics['ece'][kind]:.3f}"] for kind, share in metrics["retrieved"].items()
    ]
    title = f"AUC, fitted without practical requests: {metrics['auc_requests']:.3f}"
    print_table(["", "retrieved", "ECE"], table, title)
    if arguments.save is not None:
        layers, head = fit_all(encoder, arguments, STAGES)
        layers.save(ADAPTER)
        shipped = cast(HeadsArtifact, read_gate(arguments.save))
        known = dict(shipped.provenance["metrics"])
        known |= metrics | {"ece": known["ece"] | metrics["ece"]}
        trained_on = [each.text for each in training_rows() if each.part == TRAIN]
        data = [each for each in shipped.provenance["data"] if each["name"] != GROUPED]
        digest = checksum(trained_on)
        data.append({"name": GROUPED, "licence": LICENCE, "sha256": digest, "n": len(trained_on)})
        recipe = shipped.provenance["recipe"].partition(KINDS_RECIPE)[0] + KINDS_RECIPE
        provenance = {**shipped.provenance, "recipe": recipe, "metrics": known, "data": data}
        found = replace(shipped, segments=head, base_model=ENCODER, fingerprint=EncoderProxy().fingerprint)
        save_gate(replace(found, provenance=provenance), arguments.save)


def fit_all(
    encoder: Encoder, arguments: Namespace, stages: Sequence[Stage], left_out: Collection[str] = ()
) -> tuple[AdaptedLayers, KindHead]:
    """Read what trains, and fit on it."""
    examples = read_examples(encoder, arguments.data, left_out)
    read_states(encoder, examples)
    return fit(examples, arguments.source, stages)


if __name__ == "__main__":
    main()
