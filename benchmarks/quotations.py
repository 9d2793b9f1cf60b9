"""Fits a detector of requests about a text which they quote into a saved gate, and measures it.

    python benchmarks/quotations.py [--save GATE]

'My boss wrote: "The late fee for the van is 40 euros." Is she right?' needs passages; "Translate this" around the
same text needs none. The heads take both for given text. The detector tells them apart by what stands around the
text, and learns from the frames of ``templates/quotations.tsv``. If the answer depends on what is true about the
matter of the text, the gate judges this by itself.

Without ``--save``, prints the frames of held-out languages that are recognised, and the decisions of the default gate
on ``quotations.tsv``: messages by a writer who did not see the frames.
"""

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from base import argument_parser, print_table
from heads import CACHE, fact_states
from news import fit, predict_held_out
from templates import FOLDER, add_step
from text_rows import read_language, read_sections

from rgate_integrations import load_gate
from rgate_integrations.gates.folder import read_gate, save_gate
from rgate_integrations.gates.heads_artifact import Detector
from rgate_integrations.runtime.quotations import PLACE

RECIPE = "; requests about a quotation: python benchmarks/quotations.py"
NAME = "what stands around a quotation"
PENALTY = 1000.0
WRAPPED = 2
"""How often each frame also stands between pleasantries."""
MAX_MISTAKEN = 0.02
"""Maximum share of the other frames of held-out languages that may be recognised."""


def read_frames() -> pd.DataFrame:
    """Return the frames: ``label``, ``language``, and ``text`` with `PLACE` for the quotation.

    The labels are "ask" and "edit" and, for a quoted question, "answer" and "work" (see `given_text`).
    """
    lines = (FOLDER / "quotations.tsv").read_text(encoding="utf-8").splitlines()
    frames = pd.DataFrame([line.split("\t") for line in lines], columns=["label", "language", "text"])
    frames["text"] = frames.text.str.replace("{}", PLACE).str.replace("\\n", "\n")
    return frames.drop_duplicates("text")


def wrap_frames(frames: pd.DataFrame) -> Iterator[tuple[str, str, str]]:
    """Yield the frames between pleasantries: ``label``, ``language`` and ``text``."""
    draw = random.Random(0)
    sections = read_sections(FOLDER / "pleasantries.txt")
    for frame in frames.itertuples():
        for _ in range(WRAPPED):
            if frame.language == "en":
                before, after = draw.choice(sections["before"]), draw.choice(sections["after"])
                wrapper = (
                    f"{before.capitalize()}{draw.choice(',.!')} ~ {after.capitalize()}{draw.choice('.!')}"
                )
            elif wrappers := read_language(str(frame.language)).get("polite"):
                wrapper = draw.choice(wrappers)
            else:
                continue
            yield str(frame.label), str(frame.language), wrapper.replace("~", str(frame.text))


def fit_detector(frames: pd.DataFrame, cache: Path) -> Detector:
    """Return the detector, and print how well one that has not seen a language recognises its frames."""
    encoder_states = fact_states(cache)
    encoder_states.fill((text, "") for text in frames.text)
    states = np.stack([encoder_states.whole(text) for text in frames.text]).astype(np.float32)
    shape, states = states.shape[1:], states.reshape(len(states), -1)
    asks = (frames.label == "ask").to_numpy()
    logits = predict_held_out(states, asks, frames.language.to_numpy(str), PENALTY)
    least = float(np.quantile(logits[~asks], 1 - MAX_MISTAKEN))
    found = logits > least
    table = [
        [
            language,
            str(len(rows)),
            f"{found[rows][asks[rows]].mean():.1%}" if asks[rows].any() else "",
            f"{found[rows][~asks[rows]].mean():.1%}",
        ]
        for language, rows in frames.reset_index().groupby("language").indices.items()
    ]
    table.append(["all", str(len(found)), f"{found[asks].mean():.1%}", f"{found[~asks].mean():.1%}"])
    print_table(["held out", "frames", "recognised", "others taken for such"], table)
    weight, bias = fit(states, asks, PENALTY)
    return Detector(weight.reshape(shape).astype(np.float32), bias - least)


def measure() -> None:
    """Print the share that the default gate retrieves of messages with a quotation."""
    lines = Path(__file__).with_name("quotations.tsv").read_text(encoding="utf-8").splitlines()
    messages = pd.DataFrame(
        [line.split("\t") for line in lines], columns=["label", "language", "form", "text"]
    )
    texts = messages.text.str.replace("\\n", "\n").tolist()
    messages["retrieve"] = [decision.retrieve for decision in load_gate(on_error="raise").decide_batch(texts)]
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
    parser.add_argument("--cache", type=Path, default=CACHE, help="folder of cached states")
    parser.add_argument("--save", type=Path, help="folder of a saved gate")
    arguments = parser.parse_args()
    frames = read_frames()
    frames = frames[frames.label.isin(["ask", "edit"])]
    wrapped = pd.DataFrame(wrap_frames(frames), columns=frames.columns)
    frames = pd.concat([frames, wrapped], ignore_index=True)
    detector = fit_detector(frames, arguments.cache)
    if arguments.save is None:
        measure()
        return
    gate: Any = read_gate(arguments.save)
    provenance = add_step(gate.provenance, RECIPE, NAME, frames.text.tolist())
    gate = replace(gate, about_quotation=detector, provenance=provenance)
    save_gate(gate, arguments.save)


if __name__ == "__main__":
    main()
