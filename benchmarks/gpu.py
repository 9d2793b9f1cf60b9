"""How fast the proxy drafts on a GPU, and how far that is from the floor.

    python benchmarks/gpu.py [--model NAME] [--bandwidth GB/S]

A decode step reads every weight once, so it cannot be faster than bytes of weights over memory bandwidth. The
bandwidth is measured by copying a large tensor, unless it is given. Without CUDA nothing is measured.
"""

import argparse
import statistics
import time

import torch
from rich.console import Console
from rich.table import Table

from rgate_integrations.models.local import LocalProxy
from rgate_integrations.prompts import ANSWER


def bandwidth() -> float:
    """Bytes a second that a copy moves, both ways counted."""
    source = torch.empty(2**29, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    best = 0.0
    for _ in range(10):
        torch.cuda.synchronize()
        start = time.perf_counter()
        target.copy_(source)
        torch.cuda.synchronize()
        best = max(best, 2 * source.numel() / (time.perf_counter() - start))
    return best


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--bandwidth", type=float, help="of the GPU's memory, in GB/s")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("There is no CUDA device here; `make bench` measures the CPU.")
    proxy = LocalProxy(arguments.model, max_batch_size=64).load()
    weights = sum(p.numel() * p.element_size() for p in proxy.runner.model.parameters())
    speed = arguments.bandwidth * 1e9 if arguments.bandwidth else bandwidth()
    floor = weights / speed * 1e3
    table = Table(
        title=f"{arguments.model} on {torch.cuda.get_device_name()}: {weights / 1e6:.0f} MB of weights, "
        f"{speed / 1e9:.0f} GB/s, floor {floor:.3f} ms a decode step",
        box=None,
    )
    for column in ("batch", "ms a draft", "ms a step", "times the floor", "tokens/s", "drafts/s"):
        table.add_column(column, justify="right")
    for batch in (1, 8, 16, 64):
        values = [{"question": f"What is item number {i} known for, and why?"} for i in range(batch)]
        proxy.generate(ANSWER, values, tokens=arguments.tokens)
        times, written = [], 0
        for _ in range(arguments.rounds):
            torch.cuda.synchronize()
            start = time.perf_counter()
            drafts = proxy.generate(ANSWER, values, tokens=arguments.tokens)
            torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
            written = sum(len(d.token_ids) for d in drafts)
        seconds = statistics.median(times)
        steps = max(len(d.token_ids) for d in drafts)
        step = seconds * 1e3 / steps
        row = (seconds * 1e3, step, step / floor, written / seconds, batch / seconds)
        table.add_row(str(batch), *(f"{v:.1f}" for v in row))
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
