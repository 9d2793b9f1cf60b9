"""Runs scenarios side by side in rounds, and looks between the rounds at what the process holds."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.soak.chains import QueryEngine, Router
from tests.soak.gates import RealGate, ScriptedGates
from tests.soak.gateway import Between
from tests.soak.indexes import Index
from tests.soak.machine import Allowance, Held, settled
from tests.soak.scenario import Scenario, Violation, chance_of
from tests.soak.served import Served
from tests.soak.wire import Wire

SCENARIOS: dict[str, type[Scenario]] = {
    each.name: each for each in (ScriptedGates, RealGate, Router, QueryEngine, Index, Served, Wire, Between)
}
_ROUND = 60.0  # seconds
_BREATH = 0.02  # seconds


class Soak:
    """Scenarios in threads of their own, stopped together at the end of each round.

    Args:
        seed: Of everything that is drawn.
        folder: Where scenarios may write.
        names: Which scenarios.
        pause: Seconds that idle threads have to end, before the process is looked at.
    """

    def __init__(self, seed: int, folder: Path, names: Sequence[str], pause: float = 2.0) -> None:
        self.seed = seed
        self.pause = pause
        self.scenarios: list[Scenario] = []
        for name in names:
            (folder / name).mkdir()
            self.scenarios.append(SCENARIOS[name](folder / name))
        self.steps = dict.fromkeys(names, 0)
        self.violations: list[Violation] = []

    def run(self, minutes: float, steps: int | None = None) -> list[Violation]:
        """Run until the time is over, every scenario has made its steps, or something is wrong.

        Returns:
            What was wrong; nothing if all is well.
        """
        print(f"Soak with seed {self.seed}, {minutes:g} minutes: {', '.join(self.steps)}", flush=True)
        end = time.monotonic() + 60 * minutes
        first: Held | None = None
        with contextlib.ExitStack() as stack:
            # Failing models are part of the schedule; a line for each would hide what matters.
            logger = logging.getLogger("rgate_integrations")
            stack.callback(logger.setLevel, logger.level)
            logger.setLevel(logging.CRITICAL)
            for scenario in self.scenarios:
                stack.callback(scenario.close)
            while not self.violations and time.monotonic() < end and not self._finished(steps):
                self._round(min(end, time.monotonic() + _ROUND), steps)
                held = settled(self.pause)
                # The first round loads models and fills caches.
                first = first or held
                done = ", ".join(f"{name} {count}" for name, count in self.steps.items())
                print(f"  {held}; steps: {done}", flush=True)
                for grown in Allowance().exceeded(first, held):
                    self.violations.append(Violation("machine", sum(self.steps.values()), grown))
        self._report()
        return self.violations

    def _finished(self, steps: int | None) -> bool:
        return steps is not None and all(count >= steps for count in self.steps.values())

    def _round(self, end: float, steps: int | None) -> None:
        with ThreadPoolExecutor(len(self.scenarios)) as pool:
            for scenario in self.scenarios:
                pool.submit(self._steps, scenario, end, steps)

    def _steps(self, scenario: Scenario, end: float, steps: int | None) -> None:
        while time.monotonic() < end and not self.violations:
            number = self.steps[scenario.name]
            if steps is not None and number >= steps:
                return
            try:
                scenario.step(chance_of(self.seed, scenario.name, number))
            except BaseException as error:
                self.violations.append(Violation.of(scenario.name, number, error))
            self.steps[scenario.name] = number + 1
            time.sleep(_BREATH)  # all share one interpreter: the models must have their turn, too

    def _report(self) -> None:
        for scenario in self.scenarios:
            counts = ", ".join(f"{count:,} {what}" for what, count in sorted(scenario.counts.items()))
            print(f"{scenario.name}: {self.steps[scenario.name]:,} steps; {counts}")
        for wrong in self.violations:
            print(f"\nWRONG in {wrong.scenario}, step {wrong.step}:\n{wrong.text}")
            print(f"Repeat with: python -m tests.soak --seed {self.seed} --only {wrong.scenario}")
        if not self.violations:
            print(f"All came as it must. Seed {self.seed}.")
