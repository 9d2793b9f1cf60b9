"""What a soak is made of: scenarios whose every step knows what must come."""

from __future__ import annotations

import random
import traceback
from abc import ABC, abstractmethod
from collections import Counter
from dataclasses import dataclass
from pathlib import Path


class Scenario(ABC):
    """One part of the package under load.

    A step draws all that it does from the generator that it is given, so a seed repeats it. It raises what it finds
    wrong.

    Args:
        folder: The folder in which it may write.

    Attributes:
        name: Its name on the command line.
        counts: What was done, and what was checked.
    """

    name: str

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.counts: Counter[str] = Counter()

    @abstractmethod
    def step(self, chance: random.Random) -> None:
        """Do something, perhaps with a fault, and check what came of it.

        Raises:
            AssertionError: Not what must come.
        """

    def close(self) -> None:
        """End what the scenario has started."""


@dataclass(frozen=True)
class Violation:
    """A step that did not bring what it must."""

    scenario: str
    step: int
    text: str

    @classmethod
    def of(cls, scenario: str, step: int, error: BaseException) -> Violation:
        """Describe what a step raised."""
        return cls(scenario, step, "".join(traceback.format_exception(error)))


def chance_of(seed: int, scenario: str, step: int) -> random.Random:
    """Return the generator of one step: the same for the same seed, whatever ran before or beside it."""
    return random.Random(f"{seed}/{scenario}/{step}")


def expect(truth: bool, *facts: object) -> None:
    """Raise unless something is true; unlike ``assert``, also where assertions are switched off."""
    if not truth:
        raise AssertionError(" ".join(str(fact) for fact in facts))
