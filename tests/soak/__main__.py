"""Run the soak: ``python -m tests.soak --minutes 20 --seed 1``."""

from __future__ import annotations

import argparse
import secrets
import sys
import tempfile
from pathlib import Path

from tests.soak.machine import give_back_at_once
from tests.soak.runner import SCENARIOS, Soak


def main() -> int:
    """Run for a number of minutes; returns 1 if anything went wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=None, help="repeats a run's schedule; random by default")
    parser.add_argument(
        "--only", nargs="*", choices=sorted(SCENARIOS), help="scenarios to run; all by default"
    )
    parser.add_argument("--steps", type=int, default=None, help="maximum number of steps of each scenario")
    given = parser.parse_args()
    give_back_at_once()
    seed = secrets.randbelow(10_000) if given.seed is None else given.seed
    with tempfile.TemporaryDirectory(prefix="rgate-soak-") as folder:
        soak = Soak(seed, Path(folder), given.only or sorted(SCENARIOS))
        return 1 if soak.run(given.minutes, given.steps) else 0


if __name__ == "__main__":
    sys.exit(main())
