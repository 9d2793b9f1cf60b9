"""Fits the head that judges all segments of a request together into a saved gate; see `kinds`.

    python benchmarks/context_head.py --data FOLDER --save GATE                    fits the head
    python benchmarks/context_head.py --data FOLDER --save GATE --before GATE      adds its effect to the figures

The other heads and the adapted layers stay fixed. Besides the text of `kinds`, it learns from requests about own
matters and their look-alikes (`own_matter_rows`), and from practical requests of several segments. States are cached
under ``benchmarks/out/encoder``, or ``--cache FOLDER``. On two cores it takes half an hour.

``--before`` names the gate as it was before. The head is fitted without practical requests, and the difference that
it makes to their decisions is added to the figures that `kinds` stored in GATE.
"""

import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, cast

import numpy as np
import pandas as pd
import segments_head
import torch
from adapted_kinds import LAYERS
from base import OUT, argument_parser, print_table
from encoder_states import FACT_LAYERS, KIND_LAYERS, EncoderStates
from heads import SKIPS
from kind_rows import (
    KINDS,
    NAMES,
    SMOOTHING,
    find_related,
    label_text_rows,
    make_head,
    read_labelled_requests,
)
from labels import KIND_OF, read_practical
from own_matter_rows import read_own_rows
from segment_rows import SegmentRow
from torch.nn.functional import dropout

from rgate_integrations import load_gate
from rgate_integrations.engine.loading import DEFAULT_GATE
from rgate_integrations.gates.folder import read_gate, save_gate
from rgate_integrations.gates.heads import HeadsGate
from rgate_integrations.gates.heads_artifact import AttentionHead, HeadsArtifact, KindHead
from rgate_integrations.runtime.segments import layout, segments
from rgate_integrations.tuning.evaluation import auc

RECIPE = "; all segments together: python benchmarks/context_head.py"
EPOCHS, BATCH, RATE, DECAY = 8, 64, 5e-4, 0.05
UNITS, HEADS, FARTHEST = 192, 6, 8
INPUT_DROPOUT, DROPOUT, HIDDEN = 0.3, 0.2, 0.1
LOWEST = 4.0
"""Weight of the loss of the lowest P(answered) of a request's segments, relative to that of the segments' kinds."""
KNOWN = 0.5
"""P(the LLM knows the fact) in that loss."""
PRACTICAL = "practical"
TIMES = {"turns": 3, "mixtures": 2, "messages": 3, PRACTICAL: 4}
"""How often the requests of a source are used: those of turns are short, and depend on what was said before; messages
and practical requests are in people's own words."""
BIASES = {"always": 0.0, "if_known": 2.5, "never": 2.5}
"""Added to the logits of kinds, since errors differ in cost: a request that needs passages should not be skipped.
The mean with the first head halves them, and the mean with the segment's own logits halves them again."""
UNLABELLED = -1
ANSWERED = {"always": 1.0, "if_known": float("nan"), "never": 0.0}
"""Whether the LLM alone answers a request, by the `Kind.answerable` of its kind."""


@dataclass(frozen=True)
class WholeRequest:
    """A request of several segments, or with earlier turns.

    Attributes:
        states: The states of its segments, shape (segments, layers of `KIND_LAYERS`, 384), float16.
        layout: Shape (segments, 11).
        kinds: Index of each segment's kind, `UNLABELLED` if it is not certain; shape (segments,).
        weights: How much each segment counts, shape (segments,).
        answered: Whether the LLM alone answers the request: 0 or 1; NaN if that depends on the LLM.
        times: How often the request is used.
    """

    states: np.ndarray
    layout: np.ndarray
    kinds: np.ndarray
    weights: np.ndarray
    answered: float
    times: int


def read_requests(data: Path, states: EncoderStates, left_out: Collection[str] = ()) -> list[WholeRequest]:
    """Read the training requests that the head in context judges.

    Args:
        data: Folder of the data.
        states: Their states at the layers of `KIND_LAYERS`; computes those that it lacks.
        left_out: Requests to leave out, along with every request that contains one.
    """
    by_text: dict[tuple[str, str], list[SegmentRow]] = defaultdict(list)
    own_rows = chain(*read_own_rows().values())
    for row in (*read_labelled_requests(data)[1], *label_text_rows(own_rows), *label_practical(data)):
        by_text[row.text, row.history].append(row)
    excluded = find_related([text for text, _ in by_text], left_out, data)
    used = {}
    for (text, history), rows in by_text.items():
        if text not in excluded and (history or len(segments(text)) > 1):
            used[text, history] = rows
    states.fill(used)
    return [_make_request(rows, states) for rows in used.values()]


def label_practical(data: Path) -> Iterator[SegmentRow]:
    """Yield practical requests; only the kind of each as a whole is known."""
    for label in read_practical(data):
        if label.ships:
            yield SegmentRow(label.question, 0, "", 0.0, label.what, PRACTICAL)


def _make_request(rows: Sequence[SegmentRow], states: EncoderStates) -> WholeRequest:
    first = rows[0]
    features = layout(first.text)
    kinds, weights = np.full(len(features), UNLABELLED), np.zeros(len(features), np.float32)
    for row in rows:
        if row.kind:
            kinds[row.index] = NAMES.index(row.kind)
            weights[row.index] = row.weight
    answered = ANSWERED[KINDS[NAMES.index(KIND_OF[first.whole])].answerable]
    times = TIMES.get(first.source, 1)
    return WholeRequest(states.segments(first.text, first.history), features, kinds, weights, answered, times)


class Net(torch.nn.Module):
    """The head as it is fitted; see `AttentionHead`.

    Args:
        size: Number of inputs of a segment.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.hidden = torch.nn.Linear(size, UNITS)
        self.attention = torch.nn.Linear(UNITS, 3 * UNITS)
        self.distances = torch.nn.Parameter(torch.zeros(HEADS, 2 * FARTHEST + 1))
        self.joint = torch.nn.Linear(2 * UNITS, UNITS)
        self.output = torch.nn.Linear(UNITS, len(NAMES))

    def forward(self, inputs: torch.Tensor, used: torch.Tensor) -> torch.Tensor:
        """Return the logits, shape (requests, segments, kinds).

        Args:
            inputs: Shape (requests, segments, inputs).
            used: Whether the request has that many segments, shape (requests, segments).
        """
        hidden = torch.relu(self.hidden(dropout(inputs, INPUT_DROPOUT, self.training)))
        parts = self.attention(hidden).unflatten(-1, (3 * HEADS, -1)).transpose(1, 2)
        queries, keys, values = parts.chunk(3, dim=1)
        places = torch.arange(inputs.shape[1])
        distances = (places - places[:, None]).clamp(-FARTHEST, FARTHEST) + FARTHEST
        scores = queries @ keys.transpose(2, 3) / math.sqrt(UNITS // HEADS) + self.distances[:, distances]
        # Some segments are hidden from the others, so that no single one decides.
        seen = used & (torch.rand(used.shape) >= HIDDEN) if self.training else used
        shares = scores.masked_fill(~seen[:, None, None], -1e4).softmax(dim=3)
        attended = (shares @ values).transpose(1, 2).flatten(start_dim=2)
        joint = self.joint(dropout(torch.cat([hidden, attended], dim=2), DROPOUT, self.training))
        logits: torch.Tensor = self.output(dropout(torch.relu(joint), DROPOUT, self.training))
        return logits


def fit(requests: Sequence[WholeRequest], alone_head: KindHead, seed: int = 0) -> AttentionHead:
    """Fit the head; deterministic for the same requests and seed.

    Its logits are averaged with those of ``alone_head``, as in the gate. The loss is that of the kinds of labelled
    segments, plus that of the lowest P(answered) of all segments, which decides about a request.
    """
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    inputs, alone_logits = _stack(requests, alone_head)
    mean, scale = inputs.mean(dim=0), inputs.std(dim=0) + 1e-2
    inputs = (inputs - mean) / scale
    kinds = torch.from_numpy(np.concatenate([request.kinds for request in requests]))
    weights = torch.from_numpy(np.concatenate([request.weights for request in requests]))
    answered = torch.tensor([request.answered for request in requests])
    counts = torch.tensor([len(request.kinds) for request in requests])
    starts = counts.cumsum(dim=0) - counts
    shares = torch.tensor([ANSWERED[kind.answerable] for kind in KINDS]).nan_to_num(KNOWN)
    net = Net(inputs.shape[1])
    optimizer = torch.optim.AdamW(net.parameters(), lr=RATE, weight_decay=DECAY)
    drawn = torch.tensor([i for i, request in enumerate(requests) for _ in range(request.times)])
    steps = len(drawn) // BATCH
    rates = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=EPOCHS * steps)
    for _ in range(EPOCHS):
        for chosen in _draw_batches(drawn, counts)[:steps]:
            places = torch.arange(int(counts[chosen].max()))
            used = places < counts[chosen, None]
            rows = (starts[chosen, None] + places).where(used, 0)
            logits = (net(inputs[rows], used) + alone_logits[rows]) / 2
            labelled = used & (kinds[rows] != UNLABELLED)
            losses = torch.nn.functional.cross_entropy(
                logits[labelled], kinds[rows][labelled], reduction="none", label_smoothing=SMOOTHING
            )
            weight = weights[rows][labelled]
            loss = (losses * weight).sum() / weight.sum().clamp(min=1.0)
            p_answered = torch.softmax(logits, dim=2) @ shares
            certain = ~answered[chosen].isnan()
            lowest = p_answered.masked_fill(~used, 1.0).amin(dim=1)[certain].clamp(1e-4, 1 - 1e-4)
            errors = torch.nn.functional.binary_cross_entropy(
                lowest, answered[chosen][certain], reduction="sum"
            )
            loss = loss + LOWEST * errors / certain.sum().clamp(min=1)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            rates.step()
    return _make_head(net, mean.numpy(), scale.numpy())


def _draw_batches(drawn: torch.Tensor, counts: torch.Tensor) -> list[torch.Tensor]:
    """Return batches of requests in random order; those of a batch have a similar number of segments."""
    batches: list[torch.Tensor] = []
    for some in drawn[torch.randperm(len(drawn))].split(50 * BATCH):
        batches += some[counts[some].argsort(stable=True)].split(BATCH)
    full = [batch for batch in batches if len(batch) == BATCH]
    return [full[i] for i in torch.randperm(len(full)).tolist()]


def _make_head(net: Net, mean: np.ndarray, scale: np.ndarray) -> AttentionHead:
    head = make_head(LAYERS, net.hidden, net.output, (mean, scale), BIASES)
    weights = {name: value.detach().numpy() for name, value in net.named_parameters()}
    return AttentionHead(
        **vars(head),
        attention=weights["attention.weight"],
        attention_bias=weights["attention.bias"],
        distances=weights["distances"],
        joint=weights["joint.weight"],
        joint_bias=weights["joint.bias"],
    )


def _stack(requests: Sequence[WholeRequest], alone_head: KindHead) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the inputs of all segments, and the logits of ``alone_head`` before its `BIASES` are added."""
    states = np.concatenate([request.states for request in requests])
    features = np.concatenate([request.layout for request in requests])
    columns = [KIND_LAYERS.index(layer) for layer in LAYERS]
    inputs = np.concatenate([states[:, columns].reshape(len(states), -1), features], axis=1, dtype=np.float32)
    alone = np.concatenate(
        [states[:, : len(FACT_LAYERS)].reshape(len(states), -1), features], axis=1, dtype=np.float32
    )
    added = segments_head.BIASES
    biases = np.array([kind.bias - added[kind.answerable] for kind in alone_head.kinds], np.float32)
    hidden = np.maximum(alone @ alone_head.hidden.T + alone_head.hidden_bias, 0)
    logits = hidden @ alone_head.output.T + biases
    return torch.from_numpy(inputs), torch.from_numpy(logits)


def judge_practical(data: Path, gate: Any) -> pd.DataFrame:
    """Return the labels of practical requests with a gate's P(known), ``p``, and ``retrieve``."""
    labels = pd.DataFrame(map(vars, read_practical(data)))
    heads = HeadsGate.from_parameters({"artifact": DEFAULT_GATE, "trained": gate})
    decisions = load_gate(heads, on_error="raise").decide_batch(labels.question.tolist())
    return labels.assign(
        p=[decision.p_known for decision in decisions], retrieve=[decision.retrieve for decision in decisions]
    )


def add_effect(metrics: dict[str, Any], before: pd.DataFrame, after: pd.DataFrame) -> dict[str, Any]:
    """Return the figures of practical requests with the difference between two gates added, and print it.

    Args:
        metrics: The figures of `kinds`.
        before: `judge_practical` of the gate that they are about.
        after: The same of the gate with a head that was fitted without practical requests.
    """
    retrieved, table = dict(metrics["retrieved"]), []
    for what, rows in before.groupby("what"):
        now = after.retrieve[rows.index]
        retrieved[what] += float(now.mean() - rows.retrieve.mean())
        table.append([str(what), str(len(rows)), str(rows.retrieve.sum()), str(now.sum())])
    print_table(["", "n", "retrieved before", "now"], table)
    skip = before.what.isin(SKIPS).to_numpy()
    difference = auc(after.p.to_numpy(), skip) - auc(before.p.to_numpy(), skip)
    return {**metrics, "retrieved": retrieved, "auc_requests": metrics["auc_requests"] + difference}


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder of recorded requests")
    parser.add_argument("--cache", type=Path, default=OUT / "encoder", help="folder of cached states")
    parser.add_argument("--save", type=Path, required=True, help="folder of a saved gate")
    parser.add_argument("--before", type=Path, help="folder of the gate as it was before")
    arguments = parser.parse_args()
    data, gate = arguments.data, cast(HeadsArtifact, read_gate(arguments.save))
    states, provenance = EncoderStates(arguments.cache, KIND_LAYERS), gate.provenance
    if arguments.before is None:
        head = fit(read_requests(data, states), gate.segments)
        recipe = provenance["recipe"].replace(RECIPE, "") + RECIPE
        gate = replace(gate, together=head, provenance={**provenance, "recipe": recipe})
    else:
        questions = [label.question for label in read_practical(data)]
        without = replace(gate, together=fit(read_requests(data, states, questions), gate.segments))
        before, after = (judge_practical(data, some) for some in (read_gate(arguments.before), without))
        metrics = add_effect(provenance["metrics"], before, after)
        gate = replace(gate, provenance={**provenance, "metrics": metrics})
    save_gate(gate, arguments.save)


if __name__ == "__main__":
    main()
