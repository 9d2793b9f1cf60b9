"""Processes that are killed while they write, or whose disk is full: what was there before is there, or the new."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from pathlib import Path

from rgate_integrations.gates.folder import read_gate, save_gate
from rgate_integrations.index import PassageIndex
from tests.soak.indexes import HashEmbedder
from tests.soak.scenario import Scenario, expect
from tests.soak.victim import ROWS, passages_of, probe_of, state_of

_PATIENCE = 300.0  # seconds for what takes one or two


class Kills(Scenario):
    """Saves of indexes and gates, and resumable logs, killed with -9 or out of disk at any moment."""

    name = "kills"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.index = PassageIndex.build(passages_of(0), HashEmbedder()).save(folder / "index")
        self.gate = save_gate(probe_of(0), folder / "gate")
        self.rows = folder / "rows.jsonl"

    def step(self, chance: random.Random) -> None:
        saves = chance.choice(["index", "gate", "rows"])
        if saves == "rows":
            self._rows(chance)
        else:
            self._saves(chance, saves)

    def _saves(self, chance: random.Random, what: str) -> None:
        """Let a process save one state after the other; a whole one is there, the last or the one before it."""
        path, state = {"index": (self.index, _index_state), "gate": (self.gate, _gate_state)}[what]
        before = state(path)
        if chance.random() < 0.3:
            self._on_a_full_disk(what, path)
            expect(state(path) == before, "a save on a full disk changed the", what)
            return
        saved = self._killed(chance, what, path) or before
        now = state(path)
        expect(now in (saved, saved + 1), what, before, saved, now)

    def _rows(self, chance: random.Random) -> None:
        """Start again until all is written: no row is lost, none occurs twice, none is half."""
        if chance.random() < 0.3:
            self._on_a_full_disk("rows", self.rows)
        for _ in range(chance.randint(1, 3)):
            self._killed(chance, "rows", self.rows)
        self._run("rows", self.rows).communicate(timeout=_PATIENCE)
        ids = [json.loads(line)["id"] for line in self.rows.read_text().splitlines()]
        expect(sorted(ids) == list(range(ROWS)), len(ids), "rows,", len(set(ids)), "different")
        self.rows.unlink()

    def _run(self, work: str, path: Path, *disk: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "tests.soak.victim", work, str(path), *disk]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def _killed(self, chance: random.Random, work: str, path: Path) -> int:
        """Let a process work for a random while, and kill it; returns the last state that it said it saved."""
        self.counts["kills"] += 1
        with self._run(work, path) as process:
            time.sleep(chance.uniform(0.3, 2.5))
            process.kill()
            said, complaint = process.communicate(timeout=_PATIENCE)
        expect(process.returncode in (-9, 0), complaint)
        return int(said.split()[-1]) if said.split() else 0

    def _on_a_full_disk(self, work: str, path: Path) -> None:
        self.counts["full disks"] += 1
        with self._run(work, path, "full") as process:
            _, complaint = process.communicate(timeout=_PATIENCE)
        expect(process.returncode == 3, complaint)


def _index_state(path: Path) -> int:
    return state_of(PassageIndex.load(path, HashEmbedder()))


def _gate_state(path: Path) -> int:
    found = read_gate(path)
    expect(bool((found.weight == found.bias).all()), "weights and configuration of two saves")
    return int(found.bias)
