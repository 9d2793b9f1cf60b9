"""Fits a classifier of romanised text, such as Hindi in Latin letters, into a saved gate.

    python benchmarks/romanised.py [--save GATE]

It learns from the training part of `text_rows`, and from English templates. Romanised Russian only measures.
``languages.py`` prints what it does to decisions.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from base import argument_parser, print_table
from heads import CACHE, fact_states, read_template_labels
from news import fit
from text_rows import TRAIN, make_language_rows

from rgate_integrations.gates.folder import read_gate, save_gate
from rgate_integrations.gates.heads_artifact import Detector

PENALTY = 1e3
MAX_MISTAKEN = 0.001
"""Share of other training texts that may be taken for romanised, which then retrieve unless P(known) is high."""


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--cache", type=Path, default=CACHE, help="folder of cached states")
    parser.add_argument("--save", type=Path, help="folder of a saved gate")
    arguments = parser.parse_args()
    rows = [(row.text, row.language, row.part == TRAIN) for row in make_language_rows(0)]
    rows += [(label.question, "en", True) for label in read_template_labels()]
    texts = pd.DataFrame(rows, columns=["text", "language", "trains"]).drop_duplicates("text")
    encoder_states = fact_states(arguments.cache)
    encoder_states.fill((text, "") for text in texts.text)
    states = np.stack([encoder_states.whole(text) for text in texts.text]).astype(np.float32)
    shape, states = states.shape[1:], states.reshape(len(states), -1)
    romanised = texts.language.str.endswith("-latn").to_numpy()
    trains = texts.trains.to_numpy()
    weight, bias = fit(states[trains], romanised[trains], PENALTY)
    logits = states @ weight + bias
    least = float(np.quantile(logits[trains & ~romanised], 1 - MAX_MISTAKEN))
    texts["found"] = logits > least
    table = [
        [str(language), str(len(held_out)), f"{held_out.found.mean():.1%}"]
        for language, held_out in texts[~texts.trains].groupby("language")
        if held_out.found.any()
    ]
    print_table(["held out", "texts", "taken for romanised"], table)
    if arguments.save is not None:
        gate: Any = read_gate(arguments.save)
        romanised = Detector(weight.reshape(shape).astype(np.float32), bias - least)
        save_gate(replace(gate, romanised=romanised), arguments.save)


if __name__ == "__main__":
    main()
