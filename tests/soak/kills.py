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
        chance.choice([self._index, self._gate, self._rows])(chance)

    def _index(self, chance: random.Random) -> None:
        before = self._index_state()
        if chance.random() < 0.3:
            self._on_a_full_disk("index", self.index)
            expect(self._index_state() == before, "a save on a full disk changed the index")
            return
        saved = self._killed(chance, "index", self.index)
        now = self._index_state()
        expect(now in (saved, saved + 1) or (saved == 0 and now in (before, before + 1)), before, saved, now)

    def _index_state(self) -> int:
        return state_of(PassageIndex.load(self.index, HashEmbedder()))

    def _gate(self, chance: random.Random) -> None:
        before = int(read_gate(self.gate).bias)
        if chance.random() < 0.3:
            self._on_a_full_disk("gate", self.gate)
            expect(int(read_gate(self.gate).bias) == before, "a save on a full disk changed the gate")
            return
        saved = self._killed(chance, "gate", self.gate)
        found = read_gate(self.gate)
        now = int(found.bias)
        expect(bool((found.weight == now).all()), "weights and configuration of two saves")
        expect(now in (saved, saved + 1) or (saved == 0 and now in (before, before + 1)), before, saved, now)

    def _rows(self, chance: random.Random) -> None:
        """Start again until all is written: no row is lost, none is there twice, none is half."""
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
