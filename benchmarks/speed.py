"""Time and memory of gates, each in its own process.

    python benchmarks/speed.py [GATE ...] [--data FOLDER]

The questions are made from titles of the encyclopaedia. With ``--data``, one run takes the practical requests of
``FOLDER/practical.dev.jsonl``, another the fact questions of ``FOLDER/adaptive_llama31_8b.*.dev.jsonl``. The numbers
hold for this machine now: to compare two versions, run both in turns.
"""

import json
import subprocess
import sys
from pathlib import Path

from base import SETS, argument_parser, print_table, read_answers, read_records

from rgate_integrations.index import read_passages
from rgate_integrations.models.download import corpus_path

# Runs in a new process, so that imports and loading count.
MEASURE = """
import json, sys, time
questions = json.load(sys.stdin)
from rgate_integrations import load_gate

def seconds(work):
    start = time.perf_counter()
    work()
    return time.perf_counter() - start

def first():
    global gate
    gate = load_gate(sys.argv[1], on_error="raise")
    gate.decide(questions[0])

def resident():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmRSS")) / 1024

def decide(question):
    start = time.perf_counter()
    decision = gate.decide(question)
    return 1e3 * (time.perf_counter() - start), decision.cost.model_calls

loaded = seconds(first)
after_first = resident()
singles = sorted(map(decide, questions))
by_both = [time for time, calls in singles if calls > 1] or [0.0]
after_singles = resident()
batch = min(seconds(lambda: gate.decide_batch(questions[:64])) for _ in range(3))
pasted = " ".join(questions[:64] * 2)
long = min(seconds(lambda: gate.decide(pasted)) for _ in range(3))
memory = [after_first, after_singles, resident()]
times = [singles[len(singles) // 2][0], by_both[len(by_both) // 2], sum(calls > 1 for _, calls in singles)]
print(json.dumps([loaded, *times, 1e3 * long, 64 / batch, *memory]))
"""
BATCH = 64


def read_questions(data: Path | None) -> dict[str, list[str]]:
    """Return the lists of questions, by name."""
    if data is None:
        passages = list(read_passages(corpus_path("encyclopedia-leads")))
        return {
            "titles": [f"What is {p.title} known for?" for p in passages[:: len(passages) // BATCH][:BATCH]]
        }
    practical = [record["question"] for record in read_records(data / "practical.dev.jsonl")]
    facts = [record["question"] for name in SETS for record in read_answers(data, name)[:32]]
    return {"practical requests": practical[::9], "facts": facts}


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("gates", nargs="*", metavar="GATE", default=["default"])
    parser.add_argument("--data", type=Path, help="folder of practical requests and of the six sets")
    arguments = parser.parse_args()
    rows = []
    for gate in arguments.gates:
        for name, questions in read_questions(arguments.data).items():
            command = [sys.executable, "-c", MEASURE, gate]
            process = subprocess.run(
                command, input=json.dumps(questions), capture_output=True, text=True, check=True
            )
            first, single, both, count, long, rate, *memory = json.loads(process.stdout.splitlines()[-1])
            times = [f"{first:.2f} s", f"{single:.1f} ms", f"{both:.1f} ms ({count})", f"{long:.0f} ms"]
            resident = " / ".join(f"{megabytes:.0f}" for megabytes in memory)
            rows.append([gate, name, *times, f"{rate:.0f} decisions/s", f"{resident} MB"])
    columns = ["gate", "asked", "first decision", "one decision, median", "by both models", "a long request"]
    print_table([*columns, "batches of 64", "resident after the first, all, the long one"], rows)


if __name__ == "__main__":
    main()
