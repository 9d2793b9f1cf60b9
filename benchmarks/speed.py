"""How fast the gate is, as ratios measured in one run, the two sides taking turns.

    python benchmarks/speed.py            (or: make bench)

Questions are made from the titles of the demo's corpus. Milliseconds are of this machine and this moment; the
ratios carry over. The table is printed and written to benchmarks/out/speed.json.
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from rgate_integrations import load_gate
from rgate_integrations.artifacts.folder import read_gate
from rgate_integrations.gates.papers.ik import IK_DRAFT, IK_FOLLOW_UP
from rgate_integrations.gates.papers.self_eval import SELF_EVAL
from rgate_integrations.index import read_passages
from rgate_integrations.models.download import PASSAGES, download
from rgate_integrations.models.encoding import PromptEncoder
from rgate_integrations.models.local import shared_proxy
from rgate_integrations.prompts import ANSWER

YES_NO, TRUE_FALSE = ("Yes", "No"), ("True", "False")
OUT = Path(__file__).parent / "out" / "speed.json"


def questions(n: int) -> list[str]:
    """Make n different questions."""
    corpus = download("encyclopedia-leads") / PASSAGES
    titles = [p.title for p in read_passages(corpus)]
    return [f"What is {title} known for?" for title in titles[:: len(titles) // n][:n]]


def milliseconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return (time.perf_counter() - start) * 1e3


def in_turns(sides: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Return the median milliseconds of each side, run in turns."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, work in sides.items():
            times[name].append(milliseconds(work))
    return {name: statistics.median(t) for name, t in times.items()}


def import_seconds() -> float:
    code = "import time; s = time.perf_counter(); import rgate_integrations; print(time.perf_counter() - s)"
    runs = [subprocess.check_output([sys.executable, "-c", code], text=True) for _ in range(5)]  # noqa: S603
    return min(map(float, runs))


ALONE = """
import json, sys, time
(name, _, dtype), (asked, draft) = sys.argv[1].partition("@"), json.load(sys.stdin)
from rgate_integrations import load_gate
start = time.perf_counter()
if dtype:
    from rgate_integrations.models.local import DEFAULT_MODEL, LocalProxy
    gate = load_gate(name, proxy=LocalProxy(DEFAULT_MODEL, dtype=dtype), on_error="raise")
else:
    gate = load_gate(name, on_error="raise")
gate.decide(asked[0], draft=draft)
first = time.perf_counter() - start
def resident():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmRSS")) / 1024
def seconds(work):
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
singles = sorted(seconds(lambda: gate.decide(q, draft=draft)) for q in asked[:16])
drafts = None if draft is None else [draft] * len(asked)
batch = min(seconds(lambda: gate.decide_batch(asked, drafts=drafts)) for _ in range(3))
print(json.dumps([first, singles[len(singles) // 2] * 1e3, len(asked) / batch, resident()]))
"""


BEGUN = "It is known for its old bridge, its market, and the festival that is held there every summer by the river. "


def gates_apart(
    names: Sequence[str], asked: Sequence[str], draft: str | None
) -> list[tuple[str, float, str]]:
    """Load each gate in a process of its own: first decision, single ones, batches of 64, and memory.

    Args:
        names: The gates; ``NAME@bfloat16`` for one whose proxy has such weights.
        asked: The questions.
        draft: Judged with each of them, if it is given.
    """
    rows = []
    for name in names:
        command = [sys.executable, "-c", ALONE, name]
        out = subprocess.run(  # noqa: S603
            command, input=json.dumps([list(asked), draft]), capture_output=True, text=True, check=True
        ).stdout
        measures = (
            "first decision, s",
            "one decision, median, ms",
            "batch of 64, decisions/s",
            "resident, MB",
        )
        for what, value in zip(measures, json.loads(out.splitlines()[-1]), strict=True):
            rows.append((f"{name}: {what.rpartition(', ')[0]}", value, what.rpartition(", ")[2]))
    return rows


def growth(most: int) -> list[tuple[str, float, str]]:
    """Time and memory of ever more questions in one call, decided by the question alone."""
    gate, rows = load_gate(on_error="raise"), []
    for n in (most // 100, most // 10, most):
        asked = [f"{q} ({i})" for i, q in enumerate(questions(min(n, 4_000)) * (n // 4_000 + 1))][:n]
        before = resident()
        each = milliseconds(lambda asked=asked: gate.decide_batch(asked)) / n
        rows.append((f"{n} questions in one call, question alone", each, "ms a question"))
        rows.append((f"memory that {n} questions left behind", resident() - before, "MB"))
    return rows


def resident() -> float:
    """Resident memory of this process in MB."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096 / 2**20


@contextmanager
def read_each_time() -> Iterator[None]:
    """Read the prefix of each prompt with every batch, instead of once."""
    before, PromptEncoder.shared_prefix = PromptEncoder.shared_prefix, lambda *_: ()
    try:
        yield
    finally:
        PromptEncoder.shared_prefix = before


def prefix_caching(asked: Sequence[str]) -> list[tuple[str, float, str]]:
    """What it brings to read a prompt's prefix once."""
    proxy, gate = shared_proxy(), load_gate("prompt", on_error="raise")
    values = [{"question": q, "draft": "It is a town."} for q in asked]
    rows = []
    for what, work in (
        ("16 questions alone", lambda: gate.decide_batch(asked[:16])),
        ("P(True) of 16 drafts, four examples", lambda: proxy.score(SELF_EVAL, values[:16], TRUE_FALSE)),
    ):

        def apart(work: Callable[[], object] = work) -> object:
            with read_each_time():
                return work()

        work(), apart()
        found = in_turns({"once": work, "each": apart}, 5)
        ratio = 100 * found["once"] / found["each"]
        rows.append((f"{what}: the prompt's prefix read once", ratio, "% of reading it each time"))
    return rows


def judgments(asked: Sequence[str]) -> list[tuple[str, float, str]]:
    """What a Yes or No of the proxy adds to a draft: asked after it, or in a prompt of its own that quotes it."""
    proxy, rows = shared_proxy(), []
    for n in (1, 16):
        values = [{"question": q} for q in asked[:n]]
        drafts = proxy.generate(ANSWER, values, tokens=32)
        quoted = [{**v, "draft": d.text} for v, d in zip(values, drafts, strict=True)]
        found = in_turns(
            {
                "draft": lambda values=values: proxy.generate(ANSWER, values, tokens=32),
                "after": lambda values=values: proxy.generate_scored(
                    ANSWER, values, tokens=32, follow_up=IK_FOLLOW_UP, targets=YES_NO
                ),
                "quoted": lambda quoted=quoted: proxy.score(IK_DRAFT, quoted, YES_NO),
            },
            7,
        )
        for what, share in (
            ("Yes or No after the draft", found["after"] / found["draft"] - 1),
            ("Yes or No in a prompt that quotes it", found["quoted"] / found["draft"]),
        ):
            rows.append((f"{what}, batch of {n}", 100 * share, "% of the draft"))
    return rows


def at_once(gate: Any, asked: Sequence[str]) -> None:
    async def run() -> None:
        await asyncio.gather(*(gate.adecide(q) for q in asked))

    asyncio.run(run())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gate", default="default")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--growth", type=int, default=10_000, help="most questions of the growth rows")
    parser.add_argument(
        "--apart", nargs="+", metavar="GATE", help="only compare gates, each in a process of its own"
    )
    parser.add_argument("--begun", action="store_true", help="with --apart: judge a begun answer each time")
    arguments = parser.parse_args()

    if arguments.apart:
        draft = 2 * BEGUN if arguments.begun else None
        for what, value, unit in gates_apart(arguments.apart, questions(64), draft):
            print(f"{what:55} {value:10.1f} {unit}")
        return
    gate, asked = load_gate(arguments.gate, on_error="raise"), questions(64)
    proxy = gate.get_proxy()
    probe = getattr(gate, "gate", gate)
    drafting = gate.with_options(early_exit=False) if "early_exit" in type(probe).model_fields else gate
    drafting.decide_batch(asked[:2])
    rows: list[tuple[str, float, str]] = [("import rgate_integrations", import_seconds() * 1e3, "ms")]

    saved: Any = read_gate("default")
    layers = saved.layers
    for n in (1, 16):
        values = [{"question": q} for q in asked[:n]]
        drafts = proxy.generate(ANSWER, values, tokens=32)
        found = in_turns(
            {
                "draft": lambda values=values: proxy.generate(ANSWER, values, tokens=32),
                "one pass": lambda values=values: proxy.generate_hidden(
                    ANSWER, values, tokens=32, layers=layers
                ),
                "reading again": lambda values=values, drafts=drafts: proxy.hidden(
                    ANSWER, values, drafts, layers
                ),
            },
            2 * arguments.rounds + 1,
        )
        added = 100 * (found["one pass"] / found["draft"] - 1)
        rows += [
            (f"draft of 32 tokens, batch of {n}", found["draft"], "ms"),
            (f"judgment added to a draft, one pass, batch of {n}", added, "% of the draft"),
            (
                f"judgment added to a draft, reading it again, batch of {n}",
                100 * found["reading again"] / found["draft"],
                "% of the draft",
            ),
        ]

    rows += judgments(asked)
    rows += prefix_caching(asked)
    batched = {
        f"batches of {n}": lambda n=n: [drafting.decide_batch(asked[i : i + n]) for i in range(0, 64, n)]
        for n in (8, 32)
    }
    loop = {"single calls": lambda: [drafting.decide(q) for q in asked[:16]]}
    found = in_turns(
        {**loop, **batched, "64 concurrent callers": lambda: at_once(drafting, asked)}, arguments.rounds
    )
    rates = {k: (16 if k == "single calls" else 64) / ms * 1e3 for k, ms in found.items()}
    rows += [(f"{k}, every question drafted", rate, "questions/s") for k, rate in rates.items()]
    ratio = rates["64 concurrent callers"] / rates["single calls"]
    rows.append(("64 concurrent callers against single calls", ratio, "times"))
    rows += growth(arguments.growth)
    early = gate.decide_batch(asked)
    rows.append(
        ("of these questions need no draft", 100 * sum(d.draft is None for d in early) / len(early), "%")
    )

    table = Table(box=None)
    for column, justify in (("what", "left"), ("", "right"), ("unit", "left")):
        table.add_column(column, justify=justify)
    for what, value, unit in rows:
        table.add_row(what, f"{value:.1f}", unit)
    Console(width=110).print(table)
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(
        json.dumps([{"what": w, "value": round(v, 3), "unit": u} for w, v, u in rows], indent=1) + "\n"
    )


if __name__ == "__main__":
    main()
