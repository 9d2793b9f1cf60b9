"""Fits a detector of self-contained requests into a saved gate, and measures what it does with a corpus.

    python benchmarks/self_contained.py [--save GATE]

A request is self-contained if it asks for nothing beyond itself: a sum, thanks, a text to translate. To the heads for
kinds, "Give me a recipe for pancakes" is a task like these, but a corpus of recipes should be searched for it.
``templates/self_contained.tsv`` has requests of both sorts to 72 applications in 17 languages, and
``self_contained_turns.tsv`` messages that follow an answer, such as "and without eggs?" and "as a table".

Then prints the decisions of the default gate, as for gpt-4o, with the passages of twelve other applications, such as
recipes and board games (``catalogues.jsonl``). The gate's constants were chosen on the six of the part ``dev``.
"""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from base import CONSOLE, argument_parser, checksum, print_table, read_records
from heads import CACHE, fact_states
from news import fit, predict_held_out
from templates import LICENCE

from rgate_integrations import CorpusProfile, load_gate
from rgate_integrations.gates.artifacts import Detector
from rgate_integrations.gates.folder import read_gate, save_gate
from rgate_integrations.runtime.segments import segments
from rgate_integrations.tuning.evaluation import auc

RECIPE = "; self-contained requests: python benchmarks/self_contained.py"
NAME = "self-contained requests, and others with the same words"
PENALTY = 300.0
PAIRS = 2
"""How many pairs each self-contained request is in."""
JOINTS = (" ", "\n", "\n\n")
STOPS = ".!?。？！।؟"
TURN_REPEATS = 4
"""How often each message that follows an answer counts; there are few of them."""
MAX_MISTAKEN = 0.03
"""Share of the other requests that may be taken for self-contained; their applications are held out."""


def read_requests() -> pd.DataFrame:
    """Return the requests to learn from: label, language, application, earlier turns (one a line) and text."""
    rows = []
    for name in ("self_contained", "self_contained_turns"):
        file = Path(__file__).parent / f"templates/{name}.tsv"
        for line in file.read_text(encoding="utf-8").splitlines():
            *columns, text = line.split("\t")
            history = columns[3].replace("\\n", "\n") if columns[3:] else ""
            rows.append((*columns[:3], history, text))
    return pd.DataFrame(rows, columns=["label", "language", "application", "history", "text"])


def make_examples(requests: pd.DataFrame) -> pd.DataFrame:
    """Return what the detector learns from: each request, and pairs of requests to the same application.

    In a pair, one is self-contained, and the other is a single segment that is not. Each segment has its own label.

    Returns:
        Columns text, history, segment (its position, or -1 for the whole text), language, application, and alone,
        whether it is self-contained.
    """
    draw = random.Random(0)
    rows = []
    for row in requests.itertuples():
        # The states of a whole message after others would also reflect these.
        segment, repeats = (0, TURN_REPEATS) if row.history else (-1, 1)
        example = (row.text, row.history, segment, row.language, row.application, row.label == "self")
        rows += [example] * repeats
    single = requests[requests.history == ""]
    for (language, application), group in single.groupby(["language", "application"], sort=False):
        others = [text for text in group.text[group.label == "content"] if len(segments(text)) == 1]
        for text in group.text[group.label == "self"]:
            count = len(segments(text))
            labelled = [(text, [True] * count)] if count > 1 else []
            for joint in draw.choices(JOINTS, k=PAIRS):
                other, is_first = draw.choice(others), draw.random() < 0.5
                pair = join(*((other, text) if is_first else (text, other)), joint)
                alone = [False] + [True] * count if is_first else [True] * count + [False]
                labelled.append((pair, alone))
            for pair, alone in labelled:
                if len(segments(pair)) == len(alone):
                    rows += [
                        (pair, "", number, language, application, label) for number, label in enumerate(alone)
                    ]
    return pd.DataFrame(rows, columns=["text", "history", "segment", "language", "application", "alone"])


def join(first: str, second: str, joint: str) -> str:
    """Return both texts in one; a sentence before a space ends with a stop."""
    stop = "." if joint == " " and first[-1] not in STOPS else ""
    return first + stop + joint + second


def fit_detector(examples: pd.DataFrame, cache: Path) -> Detector:
    """Fit the detector, and print what it finds of applications and languages that it did not learn from."""
    encoder_states = fact_states(cache)
    encoder_states.fill(zip(examples.text, examples.history, strict=True))
    states = np.stack(
        [
            encoder_states.whole(row.text, row.history)
            if row.segment < 0
            else encoder_states.segments(row.text, row.history)[row.segment]
            for row in examples.itertuples()
        ]
    ).astype(np.float32)
    shape, states = states.shape[1:], states.reshape(len(states), -1)
    alone = examples.alone.to_numpy()
    logits = predict_held_out(states, alone, examples.application.to_numpy(str), PENALTY)
    least = float(np.quantile(logits[~alone], 1 - MAX_MISTAKEN))
    is_whole = (examples.segment < 0).to_numpy()
    table = []
    for language, rows in examples.groupby("language").indices.items():
        rest = np.setdiff1d(np.arange(len(examples)), rows)
        weight, bias = fit(states[rest], alone[rest], PENALTY)
        unmet = auc(states[rows] @ weight + bias, alone[rows])
        for title, chosen in (("requests", rows[is_whole[rows]]), ("segments", rows[~is_whole[rows]])):
            found = logits[chosen] > least
            shares = (found[alone[chosen]].mean(), found[~alone[chosen]].mean())
            cells = [f"{share:.1%}" for share in shares]
            table.append([f"{language}, {title}", str(len(chosen)), *cells, f"{unmet:.3f}"])
    print_table(["", "n", "found", "mistaken", "AUC, language held out"], table)
    CONSOLE.print(
        f"AUC, applications held out: {auc(logits, alone):.3f}; found {np.mean(logits[alone] > least):.1%}"
    )
    weight, bias = fit(states, alone, PENALTY)
    return Detector(weight.reshape(shape).astype(np.float32), bias - least)


def measure() -> None:
    """Print how often the default gate retrieves for requests that need a corpus, and skips for those that do not."""
    table = []
    alone = load_gate(llm_name="gpt-4o", on_error="raise")
    for catalogue in read_records(Path(__file__).with_name("catalogues.jsonl")):
        profile = CorpusProfile.from_texts(catalogue["passages"], name=catalogue["name"])
        shares = []
        for gate in (alone, load_gate(corpus=profile, llm_name="gpt-4o", on_error="raise")):
            for part, expected in (("own", True), ("nothing", False)):
                decisions = gate.decide_batch(catalogue[part])
                shares.append(np.mean([decision.retrieve == expected for decision in decisions]))
        table.append([catalogue["part"], catalogue["name"], *shares])
    columns = [
        "own retrieved, gate alone",
        "nothing needed: skipped",
        "own, with profile",
        "nothing, with profile",
    ]
    frame = pd.DataFrame(table, columns=["part", "corpus", *columns])
    means = frame.groupby("part")[columns].mean().reset_index()
    rows = pd.concat([frame, means.assign(corpus="mean")])
    cells = [
        [f"{part}: {name}", *(f"{share:.1%}" for share in rest)]
        for part, name, *rest in rows.itertuples(index=False)
    ]
    print_table(["corpus", *columns], cells)


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--cache", type=Path, default=CACHE, help="folder of cached states")
    parser.add_argument("--save", type=Path, help="folder of a saved gate")
    arguments = parser.parse_args()
    requests = read_requests()
    detector = fit_detector(make_examples(requests), arguments.cache)
    if arguments.save is None:
        measure()
        return
    gate: Any = read_gate(arguments.save)
    recipe = gate.provenance["recipe"].replace(RECIPE, "") + RECIPE
    data = [row for row in gate.provenance["data"] if row["name"] != NAME]
    data.append({"name": NAME, "licence": LICENCE, "sha256": checksum(requests.text), "n": len(requests)})
    provenance = {**gate.provenance, "recipe": recipe, "data": data}
    save_gate(replace(gate, self_contained=detector, provenance=provenance), arguments.save)


if __name__ == "__main__":
    main()
