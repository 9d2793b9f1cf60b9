"""Fits a detector of requests between pleasantries into a saved gate, and measures it.

    python benchmarks/pleasantries.py [--data FOLDER --save GATE]

"Hi, hope you're well, is my prescription ready, thank you so much!" is one sentence, most of which is small talk, so
the heads take all of it for small talk. The detector finds such messages if what they ask for needs passages. It
learns from requests between the phrases of ``templates/pleasantries.txt`` and of the other languages' templates,
joined by commas, emoji, dashes, dots or nothing, beside the same for requests that need none, pleasantries alone,
thanks and tasks (``templates/self_contained.tsv``), and other training text.

Without ``--save``, prints the decisions of the default gate on ``pleasantries.tsv``: 480 messages in 18 languages, by
two writers who did not see the templates.
"""

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from base import argument_parser, print_table
from heads import CACHE, fact_states
from labels import read_practical, read_template_labels
from news import fit
from own_matters import CALIBRATION, read_others
from self_contained import read_requests
from templates import FOLDER, add_step
from text_rows import NEEDY, TRAIN, UNSPACED, make_language_rows, read_language, read_sections

from rgate_integrations import load_gate
from rgate_integrations.gates.folder import read_gate, save_gate
from rgate_integrations.gates.heads_artifact import Detector

RECIPE = "; requests between pleasantries: python benchmarks/pleasantries.py"
NAME = "requests between pleasantries"
PENALTY = 300.0
MAX_MISTAKEN = 0.003
"""Maximum share of other training texts of which the whole, or a segment, may be taken for such a message."""
MAX_CHARS = 200
"""Maximum length of a request to put between pleasantries."""
REPEATED = 3
"""How often a thanks or a task of ``self_contained.tsv`` counts."""
ALONE = 0.1
"""Number of messages of pleasantries alone for each request between some."""
MAX_SEGMENTS = 3
"""Maximum number of segments of another training text that train."""
SHARE = 0.5
"""Share of the requests that are put between pleasantries."""
FORMS = ("comma", "comma", "bare", "bare", "bare", "emoji", "dash", "dots", "caps")
COMMAS = {"zh": "，", "ja": "、", "ar": "، ", "fa": "، "}
FINAL = re.compile(r"[.?!。？！؟।…؛;]+\s*")
PUNCTUATION = re.compile(r"[,،、，:;–—\"“”«»]")


def make_messages(data: Path) -> Iterator[tuple[str, bool]]:
    """Yield messages with a request between pleasantries, and whether it needs passages."""
    draw = random.Random(0)
    sections = read_sections(FOLDER / "pleasantries.txt")
    for label in (*read_template_labels(), *read_practical(data)):
        short = len(label.question) <= MAX_CHARS and "\n" not in label.question
        if label.ships and label.kind and short and draw.random() < SHARE:
            before = draw.sample(sections["before"], draw.choice((0, 1, 1, 2)))
            after = draw.sample(sections["after"], draw.choice((1, 1, 2) if not before else (0, 1, 1, 2)))
            is_needy = label.kind in ("private", "fresh", "particular", "obscure_knowledge")
            yield join([*before, label.question, *after], "en", sections["emoji"], draw), is_needy
            if draw.random() < ALONE:
                alone = draw.sample([*sections["before"], *sections["after"]], draw.choice((1, 2, 3)))
                yield join(alone, "en", sections["emoji"], draw), False
    wrappers = {row.language: read_language(row.language).get("polite", []) for row in make_language_rows(0)}
    for row in make_language_rows(0):
        if row.part == TRAIN and row.kind != "thanks" and wrappers[row.language] and draw.random() < SHARE:
            request = max((text for text, kind in row.pieces if kind == row.kind), key=len)
            before, after = (draw.choice(wrappers[row.language]).split("~")[side] for side in (0, 1))
            yield (
                join([before, request, after], row.language, sections["emoji"], draw),
                row.kind in NEEDY,
            )


def join(pieces: Sequence[str], language: str, emoji: Sequence[str], draw: random.Random) -> str:
    """Join phrases to one sentence, in a form drawn from `FORMS`."""
    form = draw.choice(FORMS)
    pieces = [FINAL.sub(" ", piece.lstrip("¿¡")).strip() for piece in pieces]
    if form in ("bare", "caps"):
        pieces = [PUNCTUATION.sub("", piece) for piece in pieces]
    space = "" if language in UNSPACED else " "
    between = {
        "comma": COMMAS.get(language, ", "),
        "dash": " - ",
        "dots": draw.choice(("… ", "... ")),
        "emoji": f" {draw.choice(emoji)} ",
    }
    text = between.get(form, space).join(piece for piece in pieces if piece)
    if form == "caps":
        return text.upper()
    if form == "bare":
        return text.lower()
    text = text.lower() if draw.random() < 0.5 else text
    return (
        text
        + draw.choice(("", "", "!", ".", "?", "!!"))
        + (f" {draw.choice(emoji)}" if form == "emoji" else "")
    )


def fit_detector(data: Path, cache: Path) -> tuple[Detector, list[str]]:
    """Return the detector, and the messages that it has learned from."""
    messages = pd.DataFrame(make_messages(data), columns=["text", "needy"]).drop_duplicates("text")
    others, _ = read_others(data)
    others += [(text, "") for text in read_requests().query("label == 'self'").text for _ in range(REPEATED)]
    others += [(row.text, "") for row in make_language_rows(0) if row.kind == "thanks" and row.part == TRAIN]
    encoder_states = fact_states(cache)
    encoder_states.fill([*((text, "") for text in messages.text), *others])
    draw, learned, calibrating = random.Random(0), [], []
    for text in others:
        whole, parts = encoder_states.whole(*text), encoder_states.segments(*text)
        if draw.random() < CALIBRATION:
            calibrating.append(np.concatenate([whole[None], parts]))
            continue
        learned.append(whole)
        if len(parts) > 1:
            learned += draw.sample(list(parts), min(len(parts), MAX_SEGMENTS))
    states = np.stack([*(encoder_states.whole(text) for text in messages.text), *learned])
    shape, states = states.shape[1:], states.reshape(len(states), -1).astype(np.float32)
    weight, bias = fit(states, np.append(messages.needy, np.zeros(len(learned), bool)), PENALTY)
    highest = [(parts.reshape(len(parts), -1) @ weight).max() + bias for parts in calibrating]
    least = float(np.quantile(highest, 1 - MAX_MISTAKEN))
    return Detector(weight.reshape(shape).astype(np.float32), bias - least), messages.text.tolist()


def measure() -> None:
    """Print the share that the default gate retrieves of messages with a request between pleasantries."""
    lines = Path(__file__).with_name("pleasantries.tsv").read_text(encoding="utf-8").splitlines()
    messages = pd.DataFrame(
        [line.split("\t") for line in lines], columns=["part", "label", "language", "form", "text"]
    )
    decisions = load_gate(on_error="raise").decide_batch(messages.text.tolist())
    messages["retrieve"] = [decision.retrieve for decision in decisions]
    table = []
    for form, group in (("all", messages), *messages.groupby("form")):
        cells = [str(form)]
        for label in ("need", "none"):
            rows = group[group.label == label]
            cells += [f"{rows.retrieve.mean():.1%}", str(len(rows))]
        table.append(cells)
    print_table(["", "passages needed: retrieved", "n", "none needed: retrieved", "n"], table)


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
    detector, messages = fit_detector(arguments.data, arguments.cache)
    provenance = add_step(gate.provenance, RECIPE, NAME, messages)
    save_gate(replace(gate, between_pleasantries=detector, provenance=provenance), arguments.save)


if __name__ == "__main__":
    main()
