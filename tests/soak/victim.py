"""A process that writes until it is killed, or until its disk is full. Run by `tests.soak.kills`."""

from __future__ import annotations

import resource
import signal
import sys
from itertools import count
from pathlib import Path

import numpy as np

from rgate_integrations.errors import RGateError
from rgate_integrations.gates.artifacts import ProbeArtifact
from rgate_integrations.gates.folder import read_gate, save_gate
from rgate_integrations.index import Passage, PassageIndex
from rgate_integrations.runtime.files import JsonlLog
from tests.soak.indexes import HashEmbedder

PASSAGES = 200
ROWS = 3_000
_FULL = 4_096  # bytes that a file may have on a "full disk"


def state_of(index: PassageIndex) -> int:
    """Return which state an index is in, or raise if it is in none."""
    states = {int(passage.metadata["state"]) for passage in index}
    if len(states) != 1 or len(index) != PASSAGES:
        raise AssertionError(f"{len(index)} passages of the states {sorted(states)}")
    return states.pop()


def passages_of(state: int) -> list[Passage]:
    """Return the passages of a state."""
    return [Passage(str(i), f"passage {i} {state}", metadata={"state": state}) for i in range(PASSAGES)]


def save_index(folder: Path) -> None:
    """Save one state after the other."""
    for state in count(state_of(PassageIndex.load(folder, HashEmbedder())) + 1):
        PassageIndex.build(passages_of(state), HashEmbedder()).save(folder)
        print(state, flush=True)


def probe_of(state: int) -> ProbeArtifact:
    """Return a probe that knows which state it is."""
    return ProbeArtifact(
        weight=np.full((1, 4_000), state, dtype=np.float32),
        bias=float(state),
        layers=((1, "question", "mean"),),
        tokens=0,
        source="proxy",
        base_model="scripted",
        llm="a test",
        provenance={"data": [], "metrics": {"auc": {}, "auc_mean": 0.5, "auc_pooled": 0.5}},
    )


def save_gates(folder: Path) -> None:
    """Save one state after the other."""
    for state in count(int(read_gate(folder).bias) + 1):
        save_gate(probe_of(state), folder)
        print(state, flush=True)


def append_rows(path: Path) -> None:
    """Write the rows that are missing, as every resumable command does."""
    log = JsonlLog(path)
    done = {row["id"] for row in log.values()}
    for number in range(ROWS):
        if number not in done:
            log.append([{"id": number, "text": "row " * (number % 50)}])


WORK = {"index": save_index, "gate": save_gates, "rows": append_rows}


def main() -> int:
    """Do some work; 3 if the disk was full and the error said so in our own words."""
    work, path, *disk = sys.argv[1:]
    if disk == ["full"]:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (_FULL, resource.RLIM_INFINITY))
    try:
        WORK[work](Path(path))
    except (RGateError, OSError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
