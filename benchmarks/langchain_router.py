"""A router that decides a whole batch in one gate call, against LangChain's own RunnableBranch.

    python benchmarks/langchain_router.py [--questions 64] [--rounds 3]

Both route the same questions with the same gate on the real proxy, and do nothing else: the arms are constants.
RunnableBranch asks the gate once an item. From its threads these calls meet in the gate's queue and share batches.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

from langchain_core.runnables import RunnableBranch, RunnableLambda
from rich.console import Console
from speed import questions

from rgate_integrations import load_gate
from rgate_integrations.langchain import RetrievalGate

OUT = Path(__file__).parent / "out" / "langchain_router.json"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--questions", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    asked = questions(arguments.questions)
    inner = load_gate("default", early_exit=False, on_error="raise")
    gate = RetrievalGate(inner)
    retrieve, direct = RunnableLambda(lambda q: "retrieve"), RunnableLambda(lambda q: "direct")
    router = gate.route(retrieve=retrieve, direct=direct)
    branch = RunnableBranch((lambda q: inner.decide(q).retrieve, retrieve), direct)
    router.batch(asked[:2])
    ways = {
        "router": (router, {}),
        "RunnableBranch, one at a time": (branch, {"max_concurrency": 1}),
        "RunnableBranch, its threads sharing our queue": (branch, {}),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(arguments.rounds):
        for name, (runnable, config) in ways.items():
            start = time.perf_counter()
            runnable.batch(asked, config)
            times[name].append(time.perf_counter() - start)
    medians = {name: round(statistics.median(t), 2) for name, t in times.items()}
    found = {
        "questions": len(asked),
        "seconds": medians,
        "times slower than the router": {n: round(s / medians["router"], 2) for n, s in medians.items()},
    }
    Console(highlight=False).print(found)
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
