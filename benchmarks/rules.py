"""Rules by example: how many paraphrases of the examples they catch, and how many other requests.

    python benchmarks/rules.py --data FOLDER            prints the table
    python benchmarks/rules.py --data FOLDER --write    first computes the directions that the package compares

``templates/rules.txt`` has ten rules of five examples, each with twenty paraphrases. The other requests are
``practical.dev.jsonl`` of the folder. The directions are computed from template requests alone.
"""

import random
from collections import defaultdict
from pathlib import Path

import numpy as np
from base import argument_parser, print_table, read_records
from templates import FOLDER, make_requests, read_lines
from text_rows import make_language_rows

from rgate_integrations.gates import rules
from rgate_integrations.models.encoder import EncoderProxy

OUT = Path(rules.__file__).parents[1] / "weights" / "rules" / "likeness.npz"
DIRECTIONS = 200
REQUESTS = 3_000  # English template requests that the directions are computed from
PER_LANGUAGE = 400  # template requests of each other language, which show where it lies
BATCH = 64


def read_rules() -> dict[str, tuple[list[str], list[str]]]:
    """Return the examples and the paraphrases of each rule."""
    by_rule: dict[str, tuple[list[str], list[str]]] = {}
    part = 0
    for line in read_lines(FOLDER / "rules.txt"):
        if line.startswith("["):
            by_rule[line.strip("[]")] = ([], [])
            part = 0
        elif line == "--":
            part = 1
        else:
            list(by_rule.values())[-1][part].append(line)
    return by_rule


def encode_texts(texts: list[str]) -> np.ndarray:
    """Return the states that rules compare, shape (texts, hidden size)."""
    encoder = EncoderProxy()
    parts = [rules.read_text_states(texts[i : i + BATCH], encoder) for i in range(0, len(texts), BATCH)]
    return np.concatenate(parts).astype(np.float64)


def write_directions() -> None:
    """Compute and save the directions in which English template requests differ most, without those of languages."""
    requests = [request.question for request in make_requests() if request.kind != "language"]
    random.Random(0).shuffle(requests)
    states = encode_texts(requests[:REQUESTS])
    mean = states.mean(axis=0)
    by_language = defaultdict(list)
    for row in make_language_rows(seed=0):
        by_language[row.language].append(row.text)
    samples = [random.Random(0).sample(texts, PER_LANGUAGE) for texts in by_language.values()]
    # Otherwise, what two requests in one language have in common is, most of all, their language.
    languages, _ = np.linalg.qr(np.transpose([encode_texts(texts).mean(axis=0) - mean for texts in samples]))
    same_language = np.eye(len(mean)) - languages @ languages.T
    variances, directions = np.linalg.eigh(same_language @ np.cov((states - mean).T) @ same_language)
    scaled = directions[:, -DIRECTIONS:] / np.sqrt(variances[-DIRECTIONS:])
    OUT.parent.mkdir(exist_ok=True)
    np.savez_compressed(OUT, mean=mean.astype(np.float16), directions=scaled.astype(np.float16))
    rules.known_directions.cache_clear()


def measure(vectors: dict[str, np.ndarray], names: list[str], threshold: float | None = None) -> list[str]:
    """Return a row of the table; without a threshold, the one at which 2 % of the others are caught.

    The second number of each pair is that of the worst rule.
    """
    same_similarities, other_similarities = [], []
    for name in names:
        examples = vectors[f"{name} examples"].T
        same_similarities.append((vectors[f"{name} same"] @ examples).max(axis=1))
        other_similarities.append((vectors["others"] @ examples).max(axis=1))
    if threshold is None:
        threshold = float(np.quantile(other_similarities, 0.98))
    # Every rule has the same number of paraphrases.
    caught, wrong = np.array(same_similarities) >= threshold, np.array(other_similarities) >= threshold
    return [
        f"{threshold:.2f}",
        f"{caught.mean():.1%} ({caught.mean(axis=1).min():.0%})",
        f"{wrong.mean():.2%} ({wrong.mean(axis=1).max():.2%})",
        f"{wrong.any(axis=0).mean():.1%}",
    ]


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    if arguments.write:
        write_directions()
    written = read_rules()
    texts = {
        "others": [record["question"] for record in read_records(arguments.data / "practical.dev.jsonl")]
    }
    for name, (examples, same) in written.items():
        texts |= {f"{name} examples": examples, f"{name} same": same}
    scaled = {name: rules.to_directions(encode_texts(rule_texts)) for name, rule_texts in texts.items()}
    names = list(written)
    rows = [measure(scaled, names), measure(scaled, names, rules.ALIKE)]
    print_table(["threshold", "caught (worst rule)", "others (worst rule)", "others, any rule"], rows)


if __name__ == "__main__":
    main()
