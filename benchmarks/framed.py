"""Decisions of the default gate on requests with pasted text and on follow-ups, in frames that it never saw.

    python benchmarks/framed.py --data FOLDER [--n 25] [--llm NAME] [--pasted 100 2000]

Requests of ``practical.dev.jsonl`` are put into frames of `mixtures` (files, articles, tables, mails ...), with text
of the lengths ``--pasted``, in characters, before, after or around them. Frames that the shipped heads learned from
are left out. Follow-ups come from the test part of `dialogues`.
"""

import math
import random
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from base import argument_parser, print_table, read_records
from dialogues import make_dialogues
from mixtures import Mixture, list_frames, mix, read_prose
from segment_rows import NEEDY, TRAINED_ON

from rgate_integrations import Request, load_gate

SHARES = {"private": 0.3, "fresh": 0.15, "obscure": 0.05, "common": 0.15, "task": 0.2, "given": 0.15}
PASTED = (100, 2_000)  # minimum and maximum characters that are pasted
BATCH = 16


def frame_requests(data: Path, n: int, pasted: Sequence[int] = PASTED) -> list[Mixture]:
    """Return ``n`` requests for each frame, with minimum and maximum ``pasted`` characters."""
    draw = random.Random(7)
    questions: dict[str, list[str]] = defaultdict(list)
    for record in read_records(data / "practical.dev.jsonl"):
        if record["source"] != "yizhongw/self-instruct":  # these already contain pasted text
            questions[record["kind"]].append(record["question"])
    prose = read_prose(data, slice(3_000))
    mixtures = []
    for frame in list_frames():
        for _ in range(n):
            kind = draw.choices(list(SHARES), list(SHARES.values()))[0]
            question = "" if kind == "given" else draw.choice(questions[kind])
            position = draw.choice(("before", "after", "around"))
            length = int(math.exp(draw.uniform(*map(math.log, pasted))))
            mixture = mix(question, kind, frame, position, length, draw, prose)
            if frame not in TRAINED_ON:
                mixtures.append(mixture)
    return mixtures


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--n", type=int, default=25, help="requests a frame")
    parser.add_argument("--llm", default="", help="whose knowledge is judged; an LLM of 8B unless given")
    parser.add_argument("--pasted", type=int, nargs=2, default=PASTED, help="characters, minimum and maximum")
    arguments = parser.parse_args()
    gate = load_gate(llm_name=arguments.llm, on_error="raise")
    decided = []
    requests = frame_requests(arguments.data, arguments.n, arguments.pasted)
    for start in range(0, len(requests), BATCH):
        batch = requests[start : start + BATCH]
        for mixture, decision in zip(
            batch, gate.decide_batch([mixture.text for mixture in batch]), strict=True
        ):
            for name in (mixture.frame, "all frames"):
                decided.append((name, mixture.kind in NEEDY, decision.retrieve))
    tested = make_dialogues(0, part="test")
    decisions = gate.decide_batch([Request(dialogue.message, dialogue.history) for dialogue in tested])
    for dialogue, decision in zip(tested, decisions, strict=True):
        decided.append(("follow-ups", dialogue.kind in NEEDY, decision.retrieve))

    table = []
    for name, rows in pd.DataFrame(decided, columns=["name", "needs", "retrieve"]).groupby(
        "name", sort=False
    ):
        needy, needless = rows.retrieve[rows.needs], rows.retrieve[~rows.needs]
        shares = f"{needy.mean():.1%}", f"{1 - needless.mean():.1%}"
        table.append([name, shares[0], str(len(needy)), shares[1], str(len(needless))])
    print_table(["", "passages needed: retrieved", "n", "not needed: skipped", "n"], table)


if __name__ == "__main__":
    main()
