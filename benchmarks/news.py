"""Fits classifiers of questions about news, dated or not, into a saved gate: on the reader and on the encoder.

    python benchmarks/news.py --data FOLDER --save GATE

They learn to tell templates of undated news from templates of settled facts and from the questions of the six sets.
Held-out templates set the threshold. The news of RealTimeQA have no licence and only measure.
"""

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from base import SETS, argument_parser, checksum, print_table, read_answers
from heads import CACHE, fact_states, hash_question, read_question_states
from labels import read_practical
from sklearn.linear_model import LogisticRegression
from templates import FOLDER, LICENCE, fill, read_lines, read_words, vary

from rgate_integrations.gates.folder import read_gate, save_gate
from rgate_integrations.gates.heads_artifact import Detector
from rgate_integrations.tuning.evaluation import auc

NAME = "templates of news and of settled facts"
PENALTIES = {"facts": 1e6, "first_facts": 1e3}
"""Ridge penalties for the reader's head, where 1e5 to 1e7 make no difference, and for the encoder's."""
PER_TEMPLATE = 26  # questions a template
FOLDS = 5
MIN_RECALL = 0.98
"""Share of news that the threshold must find. The gate still retrieves for missed news if P(known) is low."""


def read_questions(data: Path) -> Iterator[tuple[str, str, str]]:
    """Yield training questions, each with its source and its group; a fold never splits a group."""
    for source in ("news", "settled"):
        for number, template in enumerate(read_lines(FOLDER / f"{source}.txt")):
            draw = random.Random(template)
            texts = [vary(fill(template, read_words(), draw), draw) for _ in range(2 * PER_TEMPLATE)]
            for text in list(dict.fromkeys(texts))[:PER_TEMPLATE]:
                yield text, source, f"{source} {number}"
    for name in SETS:
        for record in read_answers(data, name):
            # In the same styles as the templates, so that no style looks like news.
            draw = random.Random(record["question"])
            yield vary(record["question"].strip(), draw), "the six sets", name


def fit(states: np.ndarray, news: np.ndarray, penalty: float) -> tuple[np.ndarray, float]:
    """Fit a logistic regression on standardised states; returns weights on the states, and a bias.

    Args:
        states: Shape (n, features).
        news: Whether each is about news, shape (n,).
        penalty: Strength of the ridge penalty.
    """
    mean, scale = states.mean(axis=0), states.std(axis=0) + 1e-6
    model = LogisticRegression(C=1 / penalty, max_iter=1_000, class_weight="balanced")
    model.fit((states - mean) / scale, news)
    weight = model.coef_[0] / scale
    return weight, float(model.intercept_[0] - weight @ mean)


def predict_held_out(states: np.ndarray, news: np.ndarray, groups: np.ndarray, penalty: float) -> np.ndarray:
    """Return held-out logits, shape (n,): each question's template or set is left out of its fit."""
    names, group = np.unique(groups, return_inverse=True)
    fold = np.random.default_rng(0).integers(0, FOLDS, len(names))[group]
    logits = np.zeros(len(news))
    for number in range(FOLDS):
        weight, bias = fit(states[fold != number], news[fold != number], penalty)
        logits[fold == number] = states[fold == number] @ weight + bias
    return logits


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--cache", type=Path, default=CACHE, help="folder of cached hidden states")
    parser.add_argument("--save", type=Path, required=True, help="folder of a saved gate")
    arguments = parser.parse_args()
    learned = pd.DataFrame(read_questions(arguments.data), columns=["question", "source", "group"])
    practical = pd.DataFrame(map(vars, read_practical(arguments.data)))
    unseen = practical.question[(practical.what == "fresh") & ~practical.ships]
    questions = [*learned.question, *unseen]
    encoder_states = fact_states(arguments.cache)
    encoder_states.fill((question, "") for question in questions)
    states_of = {
        "facts": read_question_states(questions, arguments.cache),
        "first_facts": {hash_question(question): encoder_states.whole(question) for question in questions},
    }
    shipped: Any = read_gate(arguments.save)
    templates = learned.question[learned.source != "the six sets"]
    data = [entry for entry in shipped.provenance["data"] if entry["name"] != NAME]
    data.append(
        {
            "name": NAME,
            "licence": LICENCE,
            "sha256": checksum(templates),
            "n": len(templates),
            "known": None,
            "llms": [],
        }
    )
    for name, states in states_of.items():
        learned_states, unseen_states = stack_states(learned.question, states), stack_states(unseen, states)
        weight, bias = fit_news(name, learned, learned_states, unseen_states)
        heads = getattr(shipped, name)
        news = Detector(weight.reshape(heads.known_weight.shape).astype(np.float32), bias)
        shipped = replace(shipped, **{name: replace(heads, news=news)})
    save_gate(replace(shipped, provenance={**shipped.provenance, "data": data}), arguments.save)


def fit_news(
    name: str, learned: pd.DataFrame, states: np.ndarray, unseen_states: np.ndarray
) -> tuple[np.ndarray, float]:
    """Fit one model's weights and bias, and print what they find; a positive logit means news."""
    news = (learned.source == "news").to_numpy()
    logits = predict_held_out(states, news, learned.group.to_numpy(str), PENALTIES[name])
    least = float(np.quantile(logits[news], 1 - MIN_RECALL))
    weight, bias = fit(states, news, PENALTIES[name])
    scores = {source: logits[rows] for source, rows in learned.groupby("source").indices.items()}
    scores["RealTimeQA"] = unseen_states @ weight + bias
    rows = [
        [source, str(len(source_logits)), f"{np.mean(source_logits > least):.1%}"]
        for source, source_logits in scores.items()
    ]
    title = f"{name}: AUC, templates and sets held out: {auc(logits, news):.3f}"
    print_table(["", "questions", "taken for news"], rows, title)
    return weight, bias - least


def stack_states(questions: pd.Series, states_by_key: dict[str, np.ndarray]) -> np.ndarray:
    """Return the hidden states of questions, shape (n, features)."""
    states = np.stack([states_by_key[hash_question(question)] for question in questions])
    return states.reshape(len(states), -1).astype(np.float32)


if __name__ == "__main__":
    main()
