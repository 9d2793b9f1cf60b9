"""What the gate does with requests as people write them: with a log, a mail, a table around what is asked.

    python benchmarks/requests.py --data FOLDER [--gate default-heads] [--n 12]

The folder has ``practical.dev.jsonl`` and, for prose, ``corpus.hotpot_2wiki.jsonl.gz``. Each frame of `mixtures` gets
``n`` requests, with 100 to 2,000 characters pasted before, after or around them; the clean ones are all of the file.
"""

import argparse
import gzip
import json
import math
import random
from pathlib import Path

from mixtures import AROUND, frames, mixed
from rich.console import Console
from rich.table import Table

from rgate_integrations import load_gate
from rgate_integrations.files import read_jsonl

SHARES = {"private": 0.3, "fresh": 0.15, "obscure": 0.05, "common": 0.15, "task": 0.2, "given": 0.15}
NEEDY = ("private", "fresh", "obscure")
SHORTEST, LONGEST = 100, 2_000  # characters that are pasted
BATCH = 64


def framed(data: Path, n: int) -> list[tuple[str, str, str]]:
    """Return requests in frames: text, kind and frame of each."""
    draw = random.Random(7)  # noqa: S311 - nothing here is secret
    asked: dict[str, list[str]] = {}
    for _, record in read_jsonl(data / "practical.dev.jsonl"):
        if record["source"] != "yizhongw/self-instruct":  # they bring texts of their own
            asked.setdefault(record["kind"], []).append(record["question"])
    corpus = gzip.decompress((data / "corpus.hotpot_2wiki.jsonl.gz").read_bytes()).decode().splitlines()
    prose = [
        text[:1_200] for text in (json.loads(line)["text"] for line in corpus[:3_000]) if len(text) > 120
    ]
    found = []
    for frame in [*(name for name in frames() if name not in AROUND), "none"]:
        for _ in range(n):
            kind = draw.choices(list(SHARES), list(SHARES.values()))[0]
            if kind == "given" and frame == "none":
                kind = "task"
            question = "" if kind == "given" else draw.choice(asked[kind])
            place = "none" if frame == "none" else draw.choice(("before", "after", "around"))
            length = int(math.exp(draw.uniform(math.log(SHORTEST), math.log(LONGEST))))
            mixture = mixed(question, kind, frame, place, length, draw, prose)
            found.append((mixture.text, "task" if kind == "given" else kind, frame))
    return found


def main() -> None:
    """Run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--gate", default="default-heads")
    parser.add_argument("--n", type=int, default=12)
    arguments = parser.parse_args()
    gate = load_gate(arguments.gate, on_error="raise")
    requests = framed(arguments.data, arguments.n)
    for _, record in read_jsonl(arguments.data / "practical.dev.jsonl"):
        requests.append((record["question"], record["kind"], "clean"))
    retrieved: dict[tuple[str, bool], list[bool]] = {}
    for start in range(0, len(requests), BATCH):
        some = requests[start : start + BATCH]
        for (_, kind, frame), decision in zip(some, gate.decide_batch([r[0] for r in some]), strict=True):
            names = [frame] if frame == "clean" else [frame, "all frames"]
            for name in names:
                retrieved.setdefault((name, kind in NEEDY), []).append(decision.retrieve)
    table = Table(box=None)
    for column in ("frame", "retrieved of what needs it", "of", "skipped of the rest", "of"):
        table.add_column(column, justify="left" if column == "frame" else "right")
    for name in dict.fromkeys(name for name, _ in retrieved):
        needy, others = retrieved.get((name, True), []), retrieved.get((name, False), [])
        shares = [f"{sum(needy) / max(1, len(needy)):.1%}", f"{1 - sum(others) / max(1, len(others)):.1%}"]
        table.add_row(name, shares[0], str(len(needy)), shares[1], str(len(others)))
    Console(width=100, highlight=False).print(table)


if __name__ == "__main__":
    main()
