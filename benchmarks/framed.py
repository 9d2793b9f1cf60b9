"""What the gate does with requests as people write them, in frames and conversations that its training did not see.

    python benchmarks/framed.py --data FOLDER [--n 45] [--cache FOLDER]

Requests of ``practical.dev.jsonl`` stand in the frames of `mixtures` (logs, mails, tables, prose ...), with 100 to
2,000 characters pasted before, after or around them. The frames are left out by turns, a quarter at a time, and the
heads of segments are trained on no request that is asked here. Those of whole requests are the shipped ones: they
never saw a frame. Follow-ups are of `dialogues`, of frames that nothing trains on. The last line has tasks of several
sentences, scored by heads of segments that never saw their source. An LLM of which nothing is known is judged.
"""

import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from base import argument_parser, print_table, read_records
from dialogues import dialogues
from heads import CACHE
from mixtures import Mixture, corpus_prose, frame_names, mixed
from segment_rows import (
    NEEDY,
    SegmentRow,
    clean_examples,
    clean_labels,
    fit_on,
    read_segment_rows,
    segment_examples,
)

from rgate_integrations import load_gate
from rgate_integrations.artifacts.folder import read_gate
from rgate_integrations.engine.loading import DEFAULT_GATE
from rgate_integrations.gates.heads import HeadsGate

SHARES = {"private": 0.3, "fresh": 0.15, "obscure": 0.05, "common": 0.15, "task": 0.2, "given": 0.15}
SHORTEST, LONGEST = 100, 2_000  # characters that are pasted
GROUPS = 4
FOLLOW_UPS, TASKS = "follow-ups", "yizhongw/self-instruct"


def framed(data: Path, n: int) -> list[tuple[Mixture, str]]:
    """Return requests in frames, and what each asks for: ``n`` a frame."""
    draw = random.Random(7)  # noqa: S311 - nothing here is secret
    asked: dict[str, list[str]] = {}
    for record in read_records(data / "practical.dev.jsonl"):
        if record["source"] != TASKS:  # they bring texts of their own
            asked.setdefault(record["kind"], []).append(record["question"])
    prose = corpus_prose(data, slice(3_000))
    found = []
    for frame in (*frame_names(), "none"):
        for _ in range(n):
            kind = draw.choices(list(SHARES), list(SHARES.values()))[0]
            if kind == "given" and frame == "none":
                kind = "task"
            question = "" if kind == "given" else draw.choice(asked[kind])
            place = "none" if frame == "none" else draw.choice(("before", "after", "around"))
            length = int(math.exp(draw.uniform(math.log(SHORTEST), math.log(LONGEST))))
            mixture = mixed(question, kind, frame, place, length, draw, prose)
            found.append((mixture, question))
    return found


def main() -> None:
    """Run."""
    parser = argument_parser(__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--n", type=int, default=45, help="requests a frame")
    parser.add_argument("--cache", type=Path, default=CACHE, help="where hidden states are kept")
    arguments = parser.parse_args()
    requests = framed(arguments.data, arguments.n)
    asked = {" ".join(question.split()) for _, question in requests if question}
    labels = [each for each in clean_labels(arguments.data) if " ".join(each.question.split()) not in asked]
    clean = clean_examples(labels, arguments.cache)
    rows = [row for row in read_segment_rows(arguments.data) if not _asks(row, asked)]
    segments = segment_examples(rows, arguments.cache)
    shipped: Any = read_gate(DEFAULT_GATE)

    frames = frame_names()
    random.Random(0).shuffle(frames)  # noqa: S311
    retrieved: dict[tuple[str, bool], list[bool]] = {}

    def note(frame: str, needs: bool, retrieves: bool) -> None:
        for name in (frame,) if frame in ("none", FOLLOW_UPS, TASKS) else (frame, "all frames"):
            retrieved.setdefault((name, needs), []).append(retrieves)

    for group in range(GROUPS):
        left_out = frames[group::GROUPS]
        seen = segments.rows(~np.isin([row.frame for row in rows], left_out))
        trained = replace(shipped, segments=fit_on(clean, seen))
        gate = load_gate(HeadsGate(artifact=DEFAULT_GATE, trained=trained), on_error="raise")
        own = [mixture for mixture, _ in requests if mixture.frame in left_out]
        if not group:
            own += [mixture for mixture, _ in requests if mixture.frame == "none"]
        for mixture, decision in zip(own, gate.decide_batch([each.text for each in own]), strict=True):
            note(mixture.frame, mixture.kind in NEEDY, decision.retrieve)
    tested = dialogues(0, part="test")
    found = gate.decide_batch([each.message for each in tested], histories=[each.history for each in tested])
    for dialogue, decision in zip(tested, found, strict=True):
        note(FOLLOW_UPS, dialogue.kind in NEEDY, decision.retrieve)

    tasks = [label for label in clean_labels(arguments.data) if label.source == TASKS]
    clean = clean_examples([label for label in labels if label.source != TASKS], arguments.cache)
    seen = segments.rows(np.array([row.source != TASKS for row in rows]))
    trained = replace(shipped, segments=fit_on(clean, seen))
    gate = load_gate(HeadsGate(artifact=DEFAULT_GATE, trained=trained), on_error="raise")
    for label, decision in zip(tasks, gate.decide_batch([each.question for each in tasks]), strict=True):
        note(TASKS, label.what in NEEDY, decision.retrieve)

    table = []
    for name in [*sorted(frames), "all frames", "none", FOLLOW_UPS, TASKS]:
        cells = []
        for needs in (True, False):
            own = retrieved.get((name, needs), [])
            share = np.mean(own) if needs else 1 - np.mean(own)
            cells += [f"{share:.1%}" if own else "", str(len(own))]
        table.append([name, *cells])
    print_table(["", "retrieved of what needs it", "of", "skipped of the rest", "of"], table)


def _asks(row: SegmentRow, asked: set[str]) -> bool:
    text = " ".join(row.text.split())
    return row.source != "templates" and any(question in text for question in asked)


if __name__ == "__main__":
    main()
