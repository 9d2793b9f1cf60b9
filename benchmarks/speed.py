"""How fast gates decide, and what memory they take: each in a process of its own.

    python benchmarks/speed.py [GATE ...]

Questions are made from the titles of the encyclopaedia. The numbers are of this machine and this moment: to compare
two versions, run both in turns.
"""

import json
import subprocess
import sys

from base import argument_parser, print_table

from rgate_integrations.index import read_passages
from rgate_integrations.models.download import corpus_path

# Runs in the new process: what was imported or loaded before would not count.
MEASURE = """
import json, sys, time
asked = json.load(sys.stdin)
from rgate_integrations import load_gate

def seconds(work):
    start = time.perf_counter()
    work()
    return time.perf_counter() - start

def first():
    global gate
    gate = load_gate(sys.argv[1], on_error="raise")
    gate.decide(asked[0])

loaded = seconds(first)
singles = sorted(seconds(lambda: gate.decide(question)) for question in asked[:16])
batch = min(seconds(lambda: gate.decide_batch(asked)) for _ in range(3))
pasted = " ".join(asked * 2)
long = min(seconds(lambda: gate.decide(pasted)) for _ in range(3))
with open("/proc/self/status") as file:
    resident = next(int(line.split()[1]) for line in file if line.startswith("VmRSS")) / 1024
print(json.dumps([loaded, 1e3 * singles[8], 1e3 * long, len(asked) / batch, resident]))
"""
BATCH = 64


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("gates", nargs="*", metavar="GATE", default=["default"])
    passages = list(read_passages(corpus_path("encyclopedia-leads")))
    asked = [f"What is {p.title} known for?" for p in passages[:: len(passages) // BATCH][:BATCH]]
    rows = []
    for gate in parser.parse_args().gates:
        command = [sys.executable, "-c", MEASURE, gate]
        done = subprocess.run(command, input=json.dumps(asked), capture_output=True, text=True, check=True)
        first, single, long, rate, memory = json.loads(done.stdout.splitlines()[-1])
        rows.append(
            [
                gate,
                f"{first:.1f} s",
                f"{single:.1f} ms",
                f"{long:.0f} ms",
                f"{rate:.0f} decisions/s",
                f"{memory:.0f} MB",
            ]
        )
    print_table(
        [
            "gate",
            "first decision",
            "one decision, median",
            "a request of 1,050 tokens",
            "batches of 64",
            "resident memory",
        ],
        rows,
    )


if __name__ == "__main__":
    main()
