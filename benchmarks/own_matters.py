"""Fits a classifier of requests about own matters, which no LLM knows, into a saved gate.

    python benchmarks/own_matters.py [--data FOLDER --save GATE]

There are two kinds. Some requests name a source of the asker's own: an LLM may know the answer to "According to our
wiki, what is a monad?", but it has not read the wiki (``templates/sources.txt``). Others are about the matters of an
application that they do not name, such as "does it also come in red" (``templates/local.txt``). The classifier learns
both beside look-alikes and other training text: alone, inside paragraphs (``templates/stated.txt`` has sentences that
mention own matters and ask nothing), and in messages (``templates/messages.txt``). It also learns to correct the head
for segments, which takes many short requests for private that any LLM can answer. A fifth of the frames and requests
and some languages are held out.

Without ``--save``, prints the decisions of the default gate on what is held out, and on requests that were written
without sight of the templates: ``own_sources.tsv`` has 600 in 13 languages, ``local_requests.tsv`` 603 to twelve
applications in seven (some templates widen what an earlier gate got wrong of these), ``short_requests.tsv`` 600 in
eleven, ``short_messages.tsv`` 400 messages of 10 to 80 words in eleven, and ``long_requests.tsv`` 280 of 25 to 150 in
six. ``fact_pairs.tsv`` has 200 facts and how-tos that every LLM knows, each beside one of the same form that hardly
any knows.
"""

import random
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pandas as pd
import torch
from base import argument_parser, print_table
from encoder_states import FACT_LAYERS, EncoderStates
from heads import CACHE, fact_states
from kind_rows import list_traffic
from labels import read_adarague, read_practical, read_template_labels
from mixtures import Mixture, Piece
from own_matter_rows import PARAGRAPH, read_own_rows
from segment_rows import match_kinds
from templates import add_step, keep_words
from text_rows import FRAMES, NEEDY, TRAIN, TextRow
from training_text import make_training_rows

from rgate_integrations import load_gate
from rgate_integrations.gates.folder import read_gate, save_gate
from rgate_integrations.gates.heads_artifact import Kind, KindHead
from rgate_integrations.models.base import PooledLayer
from rgate_integrations.runtime.segments import LAYOUT, layout, segments

RECIPE = "; own matters: python benchmarks/own_matters.py"
NAME = "requests about own matters, and look-alikes"
UNITS, DROPOUT, DECAY, EPOCHS, BATCH, RATE = 256, 0.3, 0.1, 16, 256, 1e-3
MAX_ROWS = 6_000
"""Maximum number of other training texts of one kind and source."""
MAX_WORDS = 120
"""Maximum length of these texts."""
MAX_SEGMENTS = 6
"""Maximum number of segments of one of them that train."""
CALIBRATION = 0.2
"""Share of other training texts that need no passages, which set the thresholds."""
ABOUT = {
    "own_source": "names a source of the asker's own, which the LLM has not read",
    "local": "seems to be about an application's own matters, which the LLM does not know",
}
MAX_MISTAKEN = {"own_source": 0.003, "local": 0.0015}
"""Share of these texts that may be taken for each kind."""
PRIVATE = "private"
"""The kind of the head for segments whose logit is corrected."""
Text: TypeAlias = tuple[str, str]
"""A text and its earlier turns."""


@dataclass(frozen=True)
class Examples:
    """Requests and segments of requests.

    Attributes:
        states: Shape (n, layers * 384), float32.
        own: Whether each is of each kind of `ABOUT`, shape (n, 2), float32; NaN if that is not known.
        logits: Those of the head for segments, shape (n, K), float32; NaN if the request has several segments.
        answers: For each kind of request, whether it may be the right one, shape (n, K); all False if the head for
            segments should be believed.
    """

    states: np.ndarray
    own: np.ndarray
    logits: np.ndarray
    answers: np.ndarray


class ExampleMaker:
    """Collects examples.

    Args:
        encoder_states: The states; they must have been filled.
        head: The head for segments.
    """

    def __init__(self, encoder_states: EncoderStates, head: KindHead) -> None:
        self._states, self._head = encoder_states, head
        self._rows: list[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]] = []
        kinds = [kind.answerable for kind in head.kinds]
        self._answers = {True: np.array(kinds) == "never", False: np.array(kinds) == "always"}

    def add_whole(self, text: Text, own: np.ndarray, needy: bool | None = None) -> None:
        """Add a request as a whole; ``needy`` tells whether it needs passages, None to believe the head."""
        state = self._states.whole(*text)
        parts = segments(text[0])
        logits = np.full(len(self._head.kinds), np.nan)
        if len(parts) == 1 and not text[1]:
            logits = self._head.logits(self._states.segments(*text).astype(np.float32), layout(text[0]))[0]
        self._add(state, own, logits, needy)

    def add_segment(self, text: Text, index: int, own: np.ndarray) -> None:
        """Add a segment of a request of several."""
        logits = np.full(len(self._head.kinds), np.nan)
        self._add(self._states.segments(*text)[index], own, logits, None)

    def _add(self, state: np.ndarray, own: np.ndarray, logits: np.ndarray, needy: bool | None) -> None:
        answers = np.zeros(len(logits), bool) if needy is None else self._answers[needy]
        self._rows.append((state.ravel(), own, logits, answers))

    def make(self) -> Examples:
        """Return the examples."""
        states, own, logits, answers = map(np.stack, zip(*self._rows, strict=True))
        return Examples(states.astype(np.float32), own.astype(np.float32), logits.astype(np.float32), answers)


def read_others(data: Path) -> tuple[list[Text], list[Text]]:
    """Return texts about no own matter, and texts that need passages; no request of `traffic`."""
    by_source: dict[tuple[bool, str, str], list[Text]] = defaultdict(list)
    for label in (*read_adarague(data), *read_practical(data), *read_template_labels()):
        if label.ships and label.kind:
            needy = label.kind in ("private", "fresh", "obscure_knowledge")
            by_source[needy, label.kind, label.source].append((label.question, ""))
    for row in make_training_rows():
        if row.part == TRAIN and len(row.text.split()) <= MAX_WORDS:
            by_source[row.kind in NEEDY, "", row.source].append((row.text, "\n".join(row.history)))
    measured = {keep_words(text) for text in list_traffic()}
    draw = random.Random(0)
    drawn: dict[bool, list[Text]] = {False: [], True: []}
    for (needy, _, _), texts in by_source.items():
        unique = [text for text in dict.fromkeys(texts) if keep_words(text[0]) not in measured]
        drawn[needy] += draw.sample(unique, min(len(unique), MAX_ROWS))
    # The head for segments judges these rightly or not; in several segments, it is unknown which need passages.
    needy_texts = [text for text in drawn[True] if len(segments(text[0])) == 1 and not text[1]]
    return drawn[False], needy_texts


def add_own_rows(maker: ExampleMaker, rows: Iterable[TextRow], column: int) -> None:
    """Add requests about own matters and their look-alikes, as a whole and by segment."""
    for row in rows:
        if row.kind == "fresh":
            continue  # whether news counts as an own matter makes no difference: it retrieves
        is_own = row.kind == "private"
        # A request of one kind may also be of the other.
        own = np.full(len(ABOUT), np.nan if is_own else 0.0)
        own[column] = is_own
        text = (row.text, "")
        is_paragraph = row.frame.endswith(PARAGRAPH)
        parts = segments(row.text)
        if not is_paragraph:
            maker.add_whole(text, own, is_own)
        pieces = tuple(Piece(*piece) for piece in row.pieces)
        kinds = match_kinds(Mixture(row.text, pieces, row.kind, "", ""))
        owning = [index for index, segment_kinds in enumerate(kinds) if row.kind in segment_kinds]
        longest = max(owning, key=lambda index: len(parts[index]), default=-1)
        for index, segment_kinds in enumerate(kinds if len(parts) > 1 else []):
            if index == longest or not is_own:
                maker.add_segment(text, index, own)
            elif not segment_kinds & {"private", "common"}:
                # A question in a frame is only about an own source because of the frame.
                maker.add_segment(text, index, np.zeros(len(ABOUT)))


def fit(examples: Examples, names: Sequence[str]) -> KindHead:
    """Fit the classifier, without thresholds; deterministic for the same rows.

    The private kind's logit is corrected so that the head for segments judges requests about own matters and their
    look-alikes better, and other requests as before.

    Args:
        examples: The examples.
        names: The kinds of the head for segments.
    """
    torch.manual_seed(0)
    torch.set_num_threads(1)
    mean, scale = examples.states.mean(axis=0), examples.states.std(axis=0) + 1e-3
    inputs = torch.from_numpy((examples.states - mean) / scale)
    columns = [torch.from_numpy(np.nan_to_num(column)) for column in (examples.own, examples.logits)]
    columns += [torch.from_numpy(~np.isnan(column)) for column in (examples.own, examples.logits[:, :1])]
    columns.append(torch.from_numpy(examples.answers))
    hidden, output = torch.nn.Linear(inputs.shape[1], UNITS), torch.nn.Linear(UNITS, len(ABOUT) + 1)
    net = torch.nn.Sequential(
        torch.nn.Dropout(DROPOUT / 2), hidden, torch.nn.ReLU(), torch.nn.Dropout(DROPOUT), output
    )
    optimizer = torch.optim.AdamW(net.parameters(), lr=RATE, weight_decay=DECAY)
    steps = len(inputs) // BATCH
    rates = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=EPOCHS * steps)
    for _ in range(EPOCHS):
        for chosen in torch.randperm(len(inputs))[: steps * BATCH].split(BATCH):
            outputs = net(inputs[chosen])
            loss = _loss(outputs, [column[chosen] for column in columns], names.index(PRIVATE))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            rates.step()
    weights = hidden.weight.detach().numpy() / scale
    kinds = [Kind("other", "if_known", "is about no own matter")]
    abouts = {**ABOUT, PRIVATE: "corrects the head for segments"}
    for (name, about), bias in zip(abouts.items(), output.bias.tolist(), strict=True):
        kinds.append(Kind(name, "never", about, bias))
    return KindHead(
        tuple(PooledLayer(layer, "question", "mean") for layer in FACT_LAYERS),
        tuple(kinds),
        np.pad(weights, ((0, 0), (0, LAYOUT))).astype(np.float32),
        (hidden.bias.detach().numpy() - weights @ mean).astype(np.float32),
        np.pad(output.weight.detach().numpy(), ((1, 0), (0, 0))),
    )


def _loss(outputs: torch.Tensor, columns: Sequence[torch.Tensor], private: int) -> torch.Tensor:
    """Return the mean loss: of the own matters, and of the corrected probabilities of kinds."""
    own, logits, own_is_known, has_logits, answers = columns
    losses = torch.nn.functional.binary_cross_entropy_with_logits(outputs[:, :-1], own, reduction="none")
    corrected = logits.clone()
    corrected[:, private] += outputs[:, -1]
    before, after = torch.log_softmax(logits, dim=1), torch.log_softmax(corrected, dim=1)
    divergence = (before.exp() * (before - after)).sum(dim=1)
    missed = -torch.logsumexp(after.masked_fill(~answers, -1e9), dim=1)
    of_kinds = torch.where(answers.any(dim=1), missed, divergence) * has_logits[:, 0]
    return (losses * own_is_known).sum(dim=1).mean() / len(ABOUT) + of_kinds.mean()


def set_thresholds(head: KindHead, others: Sequence[np.ndarray]) -> KindHead:
    """Return the head with the biases at which `MAX_MISTAKEN` of the other texts are mistaken.

    Args:
        head: The fitted head.
        others: For each text about no own matter its states and those of its segments, shape (rows, layers, 384).
    """
    highest = [head.logits(states, np.zeros((len(states), LAYOUT))).max(axis=0) for states in others]
    kinds = list(head.kinds)
    for column, kind in enumerate(kinds):
        if kind.name in MAX_MISTAKEN:
            least = float(np.quantile(np.stack(highest)[:, column], 1 - MAX_MISTAKEN[kind.name]))
            kinds[column] = replace(kind, bias=kind.bias - least)
    return replace(head, kinds=tuple(kinds))


def fit_head(data: Path, cache: Path, segments_head: KindHead) -> KindHead:
    """Read the training text, and return the head with its thresholds."""
    others, needy = read_others(data)
    encoder_states = fact_states(cache)
    encoder_states.fill([*others, *needy, *((row.text, "") for row in chain(*read_own_rows().values()))])
    maker = ExampleMaker(encoder_states, segments_head)
    for column, rows in enumerate(read_own_rows().values()):
        add_own_rows(maker, rows, column)
    for text in needy:
        maker.add_whole(text, np.full(len(ABOUT), np.nan))
    draw, calibrating = random.Random(0), []
    for text in others:
        states = encoder_states.segments(*text)
        if draw.random() < CALIBRATION:
            calibrating.append(np.concatenate([encoder_states.whole(*text)[None], states]).astype(np.float32))
            continue
        maker.add_whole(text, np.zeros(len(ABOUT)))
        for index in draw.sample(range(len(states)), min(len(states), MAX_SEGMENTS)) * (len(states) > 1):
            maker.add_segment(text, index, np.zeros(len(ABOUT)))
    head = fit(maker.make(), [kind.name for kind in segments_head.kinds])
    return set_thresholds(head, calibrating)


def measure() -> None:
    """Print the share that the default gate retrieves of requests about own matters, and of look-alikes."""
    texts = []
    for name, rows in read_own_rows(trains=False).items():
        for row in rows:
            language = "English" if row.language == "en" else "others"
            title = f"held out, {language}" if row.part == FRAMES else "languages never learned from"
            where = ", in paragraphs" if row.frame.endswith(PARAGRAPH) else ""
            texts.append((f"{name}{where}, {title}", row.kind in NEEDY, row.text))
    for name in (
        "own_sources",
        "local_requests",
        "short_requests",
        "short_messages",
        "long_requests",
        "fact_pairs",
    ):
        for line in Path(__file__).with_name(f"{name}.tsv").read_text(encoding="utf-8").splitlines():
            language, kind, text = line.split("\t")
            for whose in ("all", "English" if language == "en" else "others"):
                texts.append(
                    (f"{name}.tsv, {whose}", kind in ("own", "local", "obscure"), text.replace("\\n", "\n"))
                )
    trained_on = {keep_words(row.text) for row in chain(*read_own_rows().values())}
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
    trained_on = [row.text for row in chain(*read_own_rows().values())]
    provenance = add_step(gate.provenance, RECIPE, NAME, trained_on)
    head = fit_head(arguments.data, arguments.cache, gate.segments)
    save_gate(replace(gate, own_matters=head, provenance=provenance), arguments.save)


if __name__ == "__main__":
    main()
