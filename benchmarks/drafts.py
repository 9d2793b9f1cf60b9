"""Fits a detector of requests for a text or plan that need no passages into a saved gate, and measures it.

    python benchmarks/drafts.py [--save GATE]

"Write my landlord that the plumber comes tomorrow" says all that is needed; "Write my landlord when he comes" does
not. The heads take many of the first kind for questions about private matters or news, because they name people,
things or times. The detector tells the two apart. It learns from the requests of ``templates/drafts.tsv``, beside
other training text that needs passages, or asks for facts.

Without ``--save``, prints how well a detector recognises requests in a language that it has not learned from, and the
decisions of the default gate on ``drafts.tsv``: English requests by a writer who did not see the templates. Half of
this writer's requests are among the templates.
"""

import random
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from base import argument_parser, print_table
from heads import CACHE, fact_states
from news import fit, predict_held_out
from pleasantries import join
from templates import FOLDER, add_step
from text_rows import NEEDY, TRAIN, read_language, read_sections
from training_text import make_training_rows

from rgate_integrations import load_gate
from rgate_integrations.gates.folder import read_gate, save_gate
from rgate_integrations.gates.heads_artifact import Detector
from rgate_integrations.runtime.segments import segments

RECIPE = "; requests for a text or plan: python benchmarks/drafts.py"
NAME = "requests for a text or plan, and others with the same words"
PENALTY = 100.0
FACTS = ("knowledge", "obscure_knowledge")
MAX_MISTAKEN, MAX_OTHERS = 0.02, 0.003
"""Maximum share of the requests that need passages, and of the other texts, that may be taken for such."""


def read_requests(file: Path) -> pd.DataFrame:
    """Return labelled requests: ``label`` (need or none), ``language`` and ``text``."""
    lines = file.read_text(encoding="utf-8").splitlines()
    requests = pd.DataFrame([line.split("\t") for line in lines], columns=["label", "language", "text"])
    requests["text"] = requests.text.str.replace("\\n", "\n")
    return requests.drop_duplicates("text")


def read_others() -> list[tuple[str, str]]:
    """Return other training texts of one segment that need passages, or ask for facts, each with its language.

    Those of ``templates/languages`` also stand between pleasantries.
    """
    draw, texts = random.Random(0), []
    emoji = read_sections(FOLDER / "pleasantries.txt")["emoji"]
    for row in make_training_rows():
        if row.part != TRAIN or row.history or not (row.kind in NEEDY or row.kind in FACTS):
            continue
        texts.append((row.text, row.language))
        if row.source == "languages" and (wrappers := read_language(row.language).get("polite")):
            before, after = draw.choice(wrappers).split("~")
            texts.append((join([before, row.text, after], row.language, emoji, draw), row.language))
    return [(text, language) for text, language in texts if len(segments(text)) == 1]


def fit_detector(requests: pd.DataFrame, cache: Path) -> Detector:
    """Return the detector, and print how well one that has not seen a language recognises its requests."""
    others = read_others()
    texts = [*requests.text, *(text for text, _ in others)]
    languages = np.array([*requests.language, *(language for _, language in others)])
    encoder_states = fact_states(cache)
    encoder_states.fill((text, "") for text in texts)
    states = np.stack([encoder_states.whole(text) for text in texts]).astype(np.float32)
    shape, states = states.shape[1:], states.reshape(len(states), -1)
    complete = np.array([*(requests.label == "none"), *(False for _ in others)])
    # English is most of the text, so parts of it are held out.
    groups = [f"en {number % 20}" if each == "en" else each for number, each in enumerate(languages)]
    logits = predict_held_out(states, complete, np.array(groups), PENALTY)
    needy = np.arange(len(texts)) < len(requests)
    least = max(
        float(np.quantile(logits[needy & ~complete], 1 - MAX_MISTAKEN)),
        float(np.quantile(logits[~needy], 1 - MAX_OTHERS)),
    )
    found = logits > least
    table = []
    for language in [*np.unique(requests.language), "all"]:
        rows = (languages == language) | (language == "all")
        table.append(
            [str(language), *_shares(found, rows & complete, rows & needy & ~complete, rows & ~needy)]
        )
    print_table(
        ["held out", "recognised", "n", "need passages: taken for such", "n", "other texts", "n"], table
    )
    weight, bias = fit(states, complete, PENALTY)
    return Detector(weight.reshape(shape).astype(np.float32), bias - least)


def _shares(found: np.ndarray, *groups: np.ndarray) -> Iterable[str]:
    for rows in groups:
        yield f"{found[rows].mean():.1%}" if rows.any() else ""
        yield str(rows.sum())


def measure() -> None:
    """Print the share that the default gate retrieves of requests for a text or plan."""
    requests = read_requests(Path(__file__).with_name("drafts.tsv"))
    decisions = load_gate(on_error="raise").decide_batch(requests.text.tolist())
    requests["retrieve"] = [decision.retrieve for decision in decisions]
    cells = []
    for label in ("need", "none"):
        rows = requests[requests.label == label]
        cells += [f"{rows.retrieve.mean():.1%}", str(len(rows))]
    print_table(["passages needed: retrieved", "n", "none needed: retrieved", "n"], [cells])


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--cache", type=Path, default=CACHE, help="folder of cached states")
    parser.add_argument("--save", type=Path, help="folder of a saved gate")
    arguments = parser.parse_args()
    requests = read_requests(FOLDER / "drafts.tsv")
    detector = fit_detector(requests, arguments.cache)
    if arguments.save is None:
        measure()
        return
    gate: Any = read_gate(arguments.save)
    provenance = add_step(gate.provenance, RECIPE, NAME, requests.text.tolist())
    save_gate(replace(gate, drafts=detector, provenance=provenance), arguments.save)


if __name__ == "__main__":
    main()
