"""Fits two detectors of self-contained requests into a saved gate, and measures what it does with a corpus.

    python benchmarks/self_contained.py [--save GATE]

A request is self-contained if it asks for nothing beyond itself: a sum, thanks, a text to translate. To the heads for
kinds, "Give me a recipe for pancakes" is a task like these, but a corpus of recipes should be searched for it.
``templates/self_contained.tsv`` has requests of both sorts to 72 applications in 17 languages. The second detector
judges messages that follow an answer, such as "and without eggs?" and "as a table", and has learned from
``self_contained_turns.tsv``: 2,016 messages in 23 languages.

Then prints the decisions of the default gate, as for gpt-4o, with the passages of twelve other applications, such as
recipes and board games (``catalogues.jsonl``), and on messages that follow an answer, by two other writers, with the
answers as passages (``follow_ups.tsv``). The gate's constants were chosen on the parts ``dev``.
"""

import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from base import CONSOLE, argument_parser, print_table, read_records
from heads import CACHE, fact_states
from news import fit, predict_held_out
from templates import add_step

from rgate_integrations import CorpusProfile, Request, load_gate
from rgate_integrations.gates.folder import read_gate, save_gate
from rgate_integrations.gates.heads_artifact import Detector
from rgate_integrations.runtime.segments import ASSISTANT, USER, segments
from rgate_integrations.tuning.evaluation import auc

TURNS = Path(__file__).parent / "templates/self_contained_turns.tsv"
RECIPE = "; self-contained requests: python benchmarks/self_contained.py"
NAME = "self-contained requests, and others with the same words"
PENALTY = 300.0
PAIRS = 2
"""How many pairs each self-contained request is in."""
JOINTS = (" ", "\n", "\n\n")
STOPS = ".!?。？！।؟"
MAX_MISTAKEN, MAX_MISTAKEN_TURNS = 0.03, 0.08
"""Share of the other requests, or messages, that may be taken for self-contained; their applications are held out."""


def read_requests() -> pd.DataFrame:
    """Return the requests to learn from: label, language, application and text."""
    file = Path(__file__).parent / "templates/self_contained.tsv"
    rows = [line.split("\t") for line in file.read_text(encoding="utf-8").splitlines()]
    return pd.DataFrame(rows, columns=["label", "language", "application", "text"])


def read_messages(file: Path, *columns: str) -> pd.DataFrame:
    """Return messages that follow an answer: ``columns``, label, language, application, history and text.

    In the file, an empty history is that of the line before.
    """
    rows: list[list[str]] = []
    for line in file.read_text(encoding="utf-8").splitlines():
        *head, history, text = line.split("\t")
        rows.append([*head, history.replace("\\n", "\n") or rows[-1][-2], text])
    return pd.DataFrame(rows, columns=[*columns, "label", "language", "application", "history", "text"])


def make_examples(requests: pd.DataFrame) -> pd.DataFrame:
    """Return what the first detector learns from: each request, and pairs of requests to the same application.

    In a pair, one is self-contained, and the other is a single segment that is not. Each segment has its own label.

    Returns:
        Columns text, segment (its position, or -1 for the whole text), language, application, and alone, whether it
        is self-contained.
    """
    draw = random.Random(0)
    rows = [
        (row.text, -1, row.language, row.application, row.label == "self") for row in requests.itertuples()
    ]
    for (language, application), group in requests.groupby(["language", "application"], sort=False):
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
                        (pair, number, language, application, label) for number, label in enumerate(alone)
                    ]
    return pd.DataFrame(rows, columns=["text", "segment", "language", "application", "alone"])


def join(first: str, second: str, joint: str) -> str:
    """Return both texts in one; a sentence before a space ends with a stop."""
    stop = "." if joint == " " and first[-1] not in STOPS else ""
    return first + stop + joint + second


def fit_single(cache: Path) -> Detector:
    """Fit the detector for a request without earlier turns."""
    examples = make_examples(read_requests())
    encoder_states = fact_states(cache)
    encoder_states.fill((text, "") for text in examples.text)
    states = [
        encoder_states.whole(row.text, "")
        if row.segment < 0
        else encoder_states.segments(row.text, "")[row.segment]
        for row in examples.itertuples()
    ]
    return fit_detector(np.stack(states), examples, MAX_MISTAKEN)


def fit_turns(cache: Path) -> Detector:
    """Fit the detector for messages that follow others; all segments of a message have its label."""
    messages = read_messages(TURNS)
    encoder_states = fact_states(cache)
    encoder_states.fill(zip(messages.text, messages.history, strict=True))
    states = [encoder_states.segments(row.text, row.history) for row in messages.itertuples()]
    examples = messages.loc[messages.index.repeat(list(map(len, states)))].reset_index()
    examples = examples.assign(alone=examples.label == "self", segment=-1)
    return fit_detector(np.concatenate(states), examples, MAX_MISTAKEN_TURNS)


def fit_detector(states: np.ndarray, examples: pd.DataFrame, max_mistaken: float) -> Detector:
    """Fit a detector, and print what it finds of applications and languages that it did not learn from.

    Args:
        states: States of each example, shape (n, layers, 384).
        examples: Columns language, application, alone, and segment: -1 for a whole request.
        max_mistaken: Share of examples of held-out applications that may be taken for self-contained.
    """
    shape = states.shape[1:]
    states = states.reshape(len(states), -1).astype(np.float32)
    alone = examples.alone.to_numpy()
    logits = predict_held_out(states, alone, examples.application.to_numpy(str), PENALTY)
    least = float(np.quantile(logits[~alone], 1 - max_mistaken))
    is_whole = (examples.segment < 0).to_numpy()
    table = []
    for language, rows in examples.groupby("language").indices.items():
        rest = np.setdiff1d(np.arange(len(examples)), rows)
        weight, bias = fit(states[rest], alone[rest], PENALTY)
        unmet = auc(states[rows] @ weight + bias, alone[rows])
        for title, chosen in (("requests", rows[is_whole[rows]]), ("segments", rows[~is_whole[rows]])):
            if len(chosen):
                found = logits[chosen] > least
                cells = [f"{found[alone[chosen] == which].mean():.1%}" for which in (True, False)]
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


def measure_turns() -> None:
    """Print the decisions on messages that follow an answer, with and without the answers as a corpus."""
    messages = read_messages(Path(__file__).with_name("follow_ups.tsv"), "part")
    outcomes = {"gate alone": np.zeros(len(messages), bool), "with profile": np.zeros(len(messages), bool)}
    alone = load_gate(llm_name="gpt-4o", on_error="raise")
    for rows in messages.groupby(["part", "application"]).indices.values():
        group = messages.iloc[rows]
        histories = [split_turns(history) for history in group.history]
        answers = {
            turn.removeprefix(ASSISTANT)
            for turns in histories
            for turn in turns
            if turn.startswith(ASSISTANT)
        }
        profile = CorpusProfile.from_texts(sorted(answers), name=group.application.iloc[0])
        requests = [Request(text, turns) for text, turns in zip(group.text, histories, strict=True)]
        gates = (alone, load_gate(corpus=profile, llm_name="gpt-4o", on_error="raise"))
        for outcome, gate in zip(outcomes.values(), gates, strict=True):
            outcome[rows] = [decision.retrieve for decision in gate.decide_batch(requests)]
    table = []
    for (part, needed), rows in messages.groupby(["part", messages.label == "content"]).indices.items():
        shares = [f"{np.mean(outcome[rows] == needed):.1%}" for outcome in outcomes.values()]
        table.append(
            [f"{part}: {'content needed: retrieved' if needed else 'nothing needed: skipped'}", *shares]
        )
    print_table(["messages that follow an answer", *outcomes], table)


def split_turns(history: str) -> list[str]:
    """Return the turns of a history in one text."""
    return re.split(rf"\n(?={USER}|{ASSISTANT})", history)


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--cache", type=Path, default=CACHE, help="folder of cached states")
    parser.add_argument("--save", type=Path, help="folder of a saved gate")
    arguments = parser.parse_args()
    detectors = fit_single(arguments.cache), fit_turns(arguments.cache)
    if arguments.save is None:
        measure()
        measure_turns()
        return
    gate: Any = read_gate(arguments.save)
    texts = [*read_requests().text, *read_messages(TURNS).text]
    provenance = add_step(gate.provenance, RECIPE, NAME, texts)
    single, turns = detectors
    save_gate(
        replace(gate, self_contained=single, self_contained_turns=turns, provenance=provenance),
        arguments.save,
    )


if __name__ == "__main__":
    main()
