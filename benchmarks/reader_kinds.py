"""Fits the head that judges the kind of an English request of one segment by the reader's states; see `kinds`.

    python benchmarks/reader_kinds.py --data FOLDER --save GATE      fits the head into a saved gate
    python benchmarks/reader_kinds.py --data FOLDER --measure GATE   adds its effect to the figures of a gate
    python benchmarks/reader_kinds.py --data FOLDER --folds GATE     cross-validates both heads

It learns from the English requests of one segment that `kinds` and `own_matters` learn from. At the end of the
prompt, where the LLM would begin its answer, the reader's states say more about what is asked than means over the
encoder's: fitted on the same 9,000 templates without a hidden layer, they have an AUC of 0.965 on practical requests,
and the encoder's 0.936. The gate takes the mean of both heads' logits if P(known) is close to the threshold.

``--measure`` fits this head, and the one that judges a segment by itself, without practical requests, and adds the
difference that the reader makes to the figures that `kinds` stored in GATE. ``--folds`` fits both five times, each
time without a fifth of the practical requests; similar ones share a fold. That says what to expect of new requests by
the same writers. (The heads for several segments stay as they are; 315 news questions have several.)

States are cached under ``benchmarks/out``, or ``--cache FOLDER``. On two cores, the fit takes a quarter of an hour,
measuring as long again, and the folds an hour.
"""

import random
from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, cast

import numpy as np
import pandas as pd
import segments_head
import torch
from base import OUT, argument_parser, print_table
from context_head import add_effect, judge_practical
from encoder_states import KIND_LAYERS, EncoderStates
from heads import FOLDS, embed, hash_question, read_question_states
from kind_rows import (
    KINDS,
    MERGED_KINDS,
    NAMES,
    SMOOTHING,
    find_related,
    list_traffic,
    read_labelled_requests,
)
from kinds import compute_figures
from labels import KIND_OF, cluster_questions, read_practical
from own_matter_rows import read_own_rows
from templates import keep_words
from text_rows import TRAIN, TextRow
from training_text import make_training_rows

from rgate_integrations.gates.folder import read_gate, save_gate
from rgate_integrations.gates.heads_artifact import HeadsArtifact, KindHead
from rgate_integrations.runtime.segments import LAYOUT, segments

RECIPE = "; kinds by the reader: python benchmarks/reader_kinds.py"
UNITS, DROPOUT, DECAY, EPOCHS, BATCH, RATE = 32, 0.3, 0.1, 12, 256, 1e-3
MAX_ROWS = 20_000
"""Maximum number of requests of one source."""
WEIGHTS = {"practical": 4.0, "wrapped": 2.0, "helpers": 2.0, "local": 0.7, "news": 0.5, "settled": 0.5}
"""How much a request of a source counts; those of others count 1."""


@dataclass(frozen=True)
class Example:
    """A training request.

    Attributes:
        text: The request.
        kind: One of `NAMES`.
        source: What it is made from.
    """

    text: str
    kind: str
    source: str


def read_examples(data: Path, left_out: Collection[str] = ()) -> list[Example]:
    """Read the training requests but those with the words of a request in ``left_out``."""
    practical = {label.question for label in read_practical(data)}
    examples = []
    for label in read_labelled_requests(data)[0]:
        source = "practical" if label.question in practical else label.source
        examples.append(Example(label.question, label.kind, source))
    own_rows = chain(*read_own_rows().values())
    for row in (*(row for row in make_training_rows() if row.part == TRAIN), *own_rows):
        if row.language == "en" and not row.history and row.kind != "knowledge":
            examples.append(Example(row.text, _kind_of(row), row.source))
    measured = {keep_words(text) for text in list_traffic()}
    excluded = find_related([example.text for example in examples], left_out, data)
    by_source: dict[str, list[Example]] = defaultdict(list)
    for example in {example.text: example for example in examples}.values():
        if len(segments(example.text)) == 1 and keep_words(example.text) not in measured:
            by_source[example.source].append(example)
    draw = random.Random(0)
    drawn = chain(*(draw.sample(rows, min(len(rows), MAX_ROWS)) for rows in by_source.values()))
    return [example for example in drawn if example.text not in excluded]


def _kind_of(row: TextRow) -> str:
    return KIND_OF[MERGED_KINDS.get(row.kind, row.kind)]


def read_states(examples: Iterable[Example], cache: Path, shipped: HeadsArtifact) -> np.ndarray:
    """Return the reader's states of each request, shape (n, layers * hidden size)."""
    texts = [example.text for example in examples]
    states = read_question_states(texts, cache, shipped.facts.layers)
    return np.stack([states[hash_question(text)] for text in texts]).reshape(len(texts), -1)


def fit(examples: list[Example], x: np.ndarray, shipped: HeadsArtifact) -> KindHead:
    """Fit the head; deterministic for the same examples.

    Args:
        examples: The training requests.
        x: Their states, shape (n, layers * hidden size).
        shipped: The gate whose layers are read.
    """
    torch.manual_seed(0)
    torch.set_num_threads(1)
    x = x.astype(np.float32)
    mean, scale = x.mean(axis=0), x.std(axis=0) + 1e-3
    inputs = torch.from_numpy((x - mean) / scale)
    targets = torch.tensor([NAMES.index(example.kind) for example in examples])
    weights = torch.tensor([WEIGHTS.get(example.source, 1.0) for example in examples])
    hidden, output = torch.nn.Linear(x.shape[1], UNITS), torch.nn.Linear(UNITS, len(NAMES))
    net = torch.nn.Sequential(
        torch.nn.Dropout(DROPOUT), hidden, torch.nn.ReLU(), torch.nn.Dropout(DROPOUT), output
    )
    optimizer = torch.optim.AdamW(net.parameters(), lr=RATE, weight_decay=DECAY)
    steps = len(x) // BATCH
    rates = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=EPOCHS * steps)
    for _ in range(EPOCHS):
        for chosen in torch.randperm(len(x))[: steps * BATCH].split(BATCH):
            losses = torch.nn.functional.cross_entropy(
                net(inputs[chosen]), targets[chosen], reduction="none", label_smoothing=SMOOTHING
            )
            optimizer.zero_grad()
            (losses * weights[chosen]).mean().backward()
            optimizer.step()
            rates.step()
    # The means and scales are folded into the first layer, which gives no weight to the layout.
    first = hidden.weight.detach().numpy() / scale
    return KindHead(
        shipped.facts.layers,
        tuple(replace(kind, bias=bias) for kind, bias in zip(KINDS, output.bias.tolist(), strict=True)),
        np.pad(first, [(0, 0), (0, LAYOUT)]).astype(np.float32),
        (hidden.bias.detach().numpy() - first @ mean).astype(np.float32),
        output.weight.detach().numpy().astype(np.float32),
    )


class WithoutOpinion(HeadsArtifact):
    """Heads of which the encoder alone judges the kind."""

    def reconsider(self, probabilities: Any, states: Any) -> Any:
        """Return the probabilities as they are."""
        return probabilities


def measure(data: Path, cache: Path, shipped: HeadsArtifact) -> dict[str, Any]:
    """Return the figures of practical requests with the effect of the head added; see the module."""
    questions = [label.question for label in read_practical(data)]
    rows = segments_head.read_rows(data, EncoderStates(cache / "encoder", KIND_LAYERS), questions)
    examples = read_examples(data, questions)
    opinion = fit(examples, read_states(examples, cache, shipped), shipped)
    after = replace(shipped, segments=segments_head.fit(rows), reader_kinds=opinion)
    before = WithoutOpinion(**vars(after))
    judged = [judge_practical(data, gate) for gate in (before, after)]
    return add_effect(shipped.provenance["metrics"], *judged)


def cross_validate(data: Path, cache: Path, shipped: HeadsArtifact) -> pd.DataFrame:
    """Return the labels of practical requests with ``p`` and ``retrieve`` by heads fitted without their fold."""
    states = EncoderStates(cache / "encoder", KIND_LAYERS)
    rows, examples = segments_head.read_rows(data, states), read_examples(data)
    x = read_states(examples, cache, shipped)
    labels = pd.DataFrame(map(vars, read_practical(data)))
    clusters = cluster_questions(labels, embed(labels, states))
    order = np.random.default_rng(0).permutation(np.unique(clusters))
    folds = pd.Series(np.arange(len(order)) % FOLDS, index=order)[clusters].to_numpy()
    judged = []
    for fold in range(FOLDS):
        left_out = labels.question[folds == fold].tolist()
        related = find_related([example.text for example in examples], left_out, data)
        kept = [i for i, example in enumerate(examples) if example.text not in related]
        opinion = fit([examples[i] for i in kept], x[kept], shipped)
        head = segments_head.fit(rows.without(find_related(rows.texts, left_out, data)))
        gate = replace(shipped, segments=head, reader_kinds=opinion)
        judged.append(judge_practical(data, gate)[folds == fold])
    return pd.concat(judged)


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder of recorded requests")
    parser.add_argument("--cache", type=Path, default=OUT, help="folder of cached states")
    parser.add_argument("--save", type=Path, help="saved gate, into which the head is fitted")
    parser.add_argument("--measure", type=Path, help="saved gate whose figures get the effect of the head")
    parser.add_argument("--folds", type=Path, help="saved gate with the other heads")
    arguments = parser.parse_args()
    data, folder = arguments.data, arguments.save or arguments.measure or arguments.folds
    gate = cast(HeadsArtifact, read_gate(folder))
    provenance = gate.provenance
    if arguments.folds is not None:
        figures = compute_figures(cross_validate(data, arguments.cache, gate))
        table = [[kind, f"{share:.1%}"] for kind, share in figures["retrieved"].items()]
        print_table(["", "retrieved"], table, f"AUC, cross-validated: {figures['auc_requests']:.3f}")
        return
    if arguments.save is not None:
        examples = read_examples(data)
        recipe = provenance["recipe"].replace(RECIPE, "") + RECIPE
        head = fit(examples, read_states(examples, arguments.cache, gate), gate)
        gate = replace(gate, reader_kinds=head, provenance={**provenance, "recipe": recipe})
    else:
        metrics = measure(data, arguments.cache, gate)
        gate = replace(gate, provenance={**provenance, "metrics": metrics})
    save_gate(gate, folder)


if __name__ == "__main__":
    main()
