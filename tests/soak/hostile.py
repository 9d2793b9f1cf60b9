"""Damaged folders: whatever is wrong with a gate or an index, the error is one of ours."""

from __future__ import annotations

import math
import random
import shutil
from pathlib import Path

from rgate_integrations import load_gate
from rgate_integrations.errors import RGateError
from rgate_integrations.gates.folder import save_gate
from rgate_integrations.index import PassageIndex
from tests.scripted_proxy import ScriptedProxy
from tests.soak.indexes import HashEmbedder
from tests.soak.scenario import Scenario, expect
from tests.soak.victim import passages_of, probe_of

CONTENTS = [b"", b"{", b"[]", b"null", b"5", b"[" * 20_000, b'{"format": 1}', b"\xff\xfe", b"\0" * 100]


def damage(data: bytes, chance: random.Random) -> bytes:
    """Cut a file anywhere, change some of its bytes, or put something else in its place."""
    way = chance.choice(["cut", "changed", "replaced"])
    if way == "cut":
        return data[: chance.randrange(len(data) + 1)]
    if way == "replaced":
        return chance.choice(CONTENTS)
    changed = bytearray(data)
    for _ in range(chance.randint(1, 20)):
        changed[chance.randrange(len(changed))] = chance.randrange(256)
    return bytes(changed)


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
            victim.write_bytes(damage(victim.read_bytes(), chance))
        self.counts["damaged"] += 1
        try:
            if whole == self.gate:
                decision = load_gate(str(damaged), proxy=ScriptedProxy()).decide("Who wrote Hamlet?")
                expect(decision.retrieve or decision.error is None, "what fails retrieves:", decision)
            else:
                (hits,) = PassageIndex.load(damaged, HashEmbedder()).search(["passage 5 1"], 3)
                expect(all(math.isfinite(hit.score) for hit in hits), "a score is a number:", hits)
                expect(len({hit.passage.id for hit in hits}) == len(hits), "a passage is found once:", hits)
        except RGateError:
            self.counts["refused"] += 1
