"""What corpora cover (first part: the background)."""

import random

import numpy as np
from text_rows import TRAIN
from training_text import training_rows

from rgate_integrations.corpus.background import FILE, unit
from rgate_integrations.corpus.profile import corpus_encoder as encoder
from rgate_integrations.index.passages import read_passages
from rgate_integrations.models.download import corpus_path

DIRECTIONS, LANGUAGES, SEED = 256, 20, 0
NEEDLESS = ("task", "common", "thanks")
KINDS = (*NEEDLESS, "particular", "private", "fresh", "obscure")
EACH, OTHERS, LEADS, ENGLISH, FOREIGN = 700, 2_500, 1_500, 400, 200


def write_background() -> None:
    rng = random.Random(SEED)
    rows = [row for row in training_rows() if not row.history and len(row.text) < 300]
    english = []
    for kind in KINDS:
        own = [row for row in rows if row.language == "en" and row.kind == kind and row.part == TRAIN]
        english += rng.sample(own, min(EACH, len(own)))
    others = rng.sample([row for row in rows if row.language != "en" and row.part == TRAIN], OTHERS)
    asked = english + others
    leads = rng.sample([each.searchable for each in read_passages(corpus_path("encyclopedia-leads"))], LEADS)
    questions = encoder().vectors([row.text for row in asked], "query: ")
    passages = encoder().vectors([lead[:400] for lead in leads], "passage: ")
    centred = np.vstack([questions - questions.mean(0), passages - passages.mean(0)]).astype(np.float64)
    languages = np.array([row.language for row in asked])
    means = np.stack(
        [
            questions[languages == each].mean(0)
            for each in sorted(set(languages))
            if (languages == each).sum() > 20
        ]
    )
    _, _, of_languages = np.linalg.svd(means - means.mean(0), full_matrices=False)
    rest = np.eye(centred.shape[1]) - of_languages[:LANGUAGES].T @ of_languages[:LANGUAGES]
    _, spread, axes = np.linalg.svd(centred @ rest, full_matrices=False)
    deviation = spread[:DIRECTIONS] / np.sqrt(len(centred))
    directions = rest @ (axes[:DIRECTIONS].T / np.sqrt(deviation))
    needless = [i for i, row in enumerate(asked) if row.kind in NEEDLESS]
    chosen = rng.sample([i for i in needless if languages[i] == "en"], ENGLISH)
    chosen += rng.sample([i for i in needless if languages[i] != "en"], FOREIGN)
    compared = unit((questions[chosen] - questions.mean(0)) @ directions.astype(np.float32))
    codes = np.round(compared / np.abs(compared).max(axis=1, keepdims=True) * 127).astype(np.int8)
    np.savez_compressed(
        FILE,
        question_mean=questions.mean(0),
        passage_mean=passages.mean(0),
        directions=(directions / np.abs(directions).max()).astype(np.float16),
        requests=codes,
    )
    print(FILE, FILE.stat().st_size)


if __name__ == "__main__":
    write_background()
