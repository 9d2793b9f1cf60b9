"""Damaged folders: whatever is wrong with a gate or an index, the error is one of ours."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

from rgate_integrations.errors import RGateError
from rgate_integrations.gates.folder import read_gate, save_gate
from rgate_integrations.index import PassageIndex
from tests.soak.indexes import HashEmbedder
from tests.soak.scenario import Scenario
from tests.soak.victim import passages_of, probe_of

CONTENTS = [b"", b"{", b"[]", b"null", b"5", b"[" * 20_000, b'{"format": 1}', b"\xff\xfe", b"\0" * 100]


def truncate(data: bytes, chance: random.Random) -> bytes:
    """Cut a file anywhere."""
    return data[: chance.randrange(len(data) + 1)]


def flip(data: bytes, chance: random.Random) -> bytes:
    """Change some bytes of a file."""
    changed = bytearray(data)
    for _ in range(chance.randint(1, 20)):
        changed[chance.randrange(len(changed))] = chance.randrange(256)
    return bytes(changed)


def replace(data: bytes, chance: random.Random) -> bytes:
    """Put something else in its place."""
    return chance.choice(CONTENTS)


DAMAGE: list[Callable[[bytes, random.Random], bytes]] = [truncate, flip, replace]


class Hostile(Scenario):
    """Opens gates and indexes of which one file is damaged or missing."""

    name = "hostile-files"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.index = PassageIndex.build(passages_of(1), HashEmbedder()).save(folder / "index")
        self.gate = save_gate(probe_of(1), folder / "gate")

    def step(self, chance: random.Random) -> None:
        whole = chance.choice([self.index, self.gate])
        damaged = self.folder / "damaged"
        shutil.rmtree(damaged, ignore_errors=True)
        shutil.copytree(whole, damaged)
        victim = chance.choice(sorted(path for path in damaged.rglob("*") if path.is_file()))
        if chance.random() < 0.1:
            victim.unlink()
        else:
            victim.write_bytes(chance.choice(DAMAGE)(victim.read_bytes(), chance))
        self.counts["damaged"] += 1
        try:
            self._use(whole, damaged)
        except RGateError:
            self.counts["refused"] += 1

    def _use(self, whole: Path, damaged: Path) -> None:
        if whole == self.gate:
            read_gate(damaged)
        else:
            index = PassageIndex.load(damaged, HashEmbedder())
            index.search(["passage 5 1"], 3)
