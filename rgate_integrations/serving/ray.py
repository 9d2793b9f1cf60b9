"""Many machines: gates over Ray Data, and over files of questions, a shard at a time. Needs ``ray``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rgate_integrations import load_gate
from rgate_integrations.engine.decision_engine import DecisionEngine
from rgate_integrations.errors import ConfigurationError, DataFormatError, missing_dependency
from rgate_integrations.gates.artifacts.folder import CONFIG
from rgate_integrations.runtime.files import json_line, json_text, write_atomically
from rgate_integrations.runtime.records import read_records

try:
    import ray
    from ray.util import ActorPool
except ImportError as error:
    raise missing_dependency("ray", "ray") from error

if TYPE_CHECKING:
    from ray.data import Dataset

    from rgate_integrations.engine.gate_like import GateLike

COLUMNS = ("retrieve", "p_known", "threshold", "reason", "error")
"""What is added to each question; ``error`` is empty unless the gate failed, and then it retrieves."""


_MADE_WITH = ".made_with.json"


@dataclass(frozen=True)
class Workers:
    """Workers, each with a model of its own.

    Attributes:
        count: How many.
        num_cpus: CPUs of each.
        num_gpus: GPUs of each, also a part of one.
    """

    count: int
    num_cpus: float = 1
    num_gpus: float = 0


def gate_dataset(
    dataset: Dataset,
    gate: GateLike | str | None = None,
    *,
    question: str = "question",
    prefix: str = "",
    workers: Workers | int = 1,
    batch_size: int = 256,
) -> Dataset:
    """Add a gate's decisions to a Ray data set, as `COLUMNS`.

    Args:
        dataset: Rows with a question each.
        gate: A gate, or what `load_gate` takes; loaded once a worker.
        question: Column of the question.
        prefix: Put before the names of the new columns.
        workers: How many workers, and what each is given.
        batch_size: Rows that a worker is given at a time.
    """
    workers = _workers(workers)
    return dataset.map_batches(
        _Columns,
        fn_constructor_args=(gate, question, prefix),
        concurrency=workers.count,
        num_cpus=workers.num_cpus,
        num_gpus=workers.num_gpus,
        batch_size=batch_size,
        batch_format="pandas",
    )


def gate_files(
    paths: Sequence[str | Path],
    out: str | Path,
    gate: GateLike | str | None = None,
    *,
    workers: Workers | int = 2,
    batch_size: int = 256,
    report: Callable[[int, int], None] | None = None,
) -> list[Path]:
    """Decide for every question of JSONL files, a file at a time on each worker.

    A file's result gets its name once it is complete, so a run that is started again does the missing files only; a
    worker that dies is replaced, and its file is done again. The folder says which gate made its results.

    Args:
        paths: JSONL files with ``question`` a line; their names must differ. Many small ones are shared out best.
        out: Folder for the results: the records with `COLUMNS` added, under the names of the files.
        gate: A gate, or what `load_gate` takes.
        workers: How many workers, and what each is given.
        batch_size: Questions that the gate is given at a time.
        report: Told how many files are done, and of how many.

    Returns:
        The results, in the order of ``paths``.

    Raises:
        ConfigurationError: The folder has results of another gate.
        DataFormatError: Two files have the same name, or a line has no question.
    """
    workers = _workers(workers)
    folder = Path(out).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    results = {Path(path).absolute(): folder / Path(path).name for path in paths}
    if len(set(results.values())) < len(paths):
        raise DataFormatError("Two files have the same name.", hint="Results are named after the files.")
    missing = [path for path, result in results.items() if not result.exists()]
    _check_made_alike(folder, _facts_of(gate), begun=len(missing) < len(results))
    if not missing:
        return list(results.values())
    # A worker that dies, say for want of memory, is started again twice, and its file is done again.
    actor = ray.remote(_Decides).options(
        num_cpus=workers.num_cpus, num_gpus=workers.num_gpus, max_restarts=2, max_task_retries=2
    )
    pool = ActorPool([actor.remote(gate, batch_size) for _ in range(min(workers.count, len(missing)))])

    def start(worker: Any, path: Path) -> Any:
        return worker.run.remote(str(path), str(results[path]))

    there = len(paths) - len(missing)
    for done, _ in enumerate(pool.map_unordered(start, missing), start=there + 1):
        if report is not None:
            report(done, len(paths))
    return list(results.values())


class _Columns:
    """Adds the columns to one batch after another."""

    def __init__(self, gate: GateLike | str | None, question: str, prefix: str) -> None:
        self.gate, self.question, self.prefix = _loaded(gate), question, prefix

    def __call__(self, batch: Any) -> Any:
        rows = _decisions(self.gate, batch[self.question].tolist())
        columns = {self.prefix + name: [row[name] for row in rows] for name in COLUMNS}
        return batch.assign(**columns)


class _Decides:
    """Decides for one file after another."""

    def __init__(self, gate: GateLike | str | None, batch_size: int) -> None:
        self.gate, self.batch_size = _loaded(gate), batch_size

    def run(self, path: str, result: str) -> None:
        rows = []
        for record in read_records(path):
            record.text("question")  # raises if there is none
            rows.append(record.fields)
        lines = []
        for start in range(0, len(rows), self.batch_size):
            batch = rows[start : start + self.batch_size]
            decisions = _decisions(self.gate, [row["question"] for row in batch])
            lines += [json_line(row | decided) for row, decided in zip(batch, decisions, strict=True)]
        write_atomically(result, "".join(lines))


def _check_made_alike(folder: Path, facts: dict[str, Any], *, begun: bool) -> None:
    """Write down what makes the results of a folder, or refuse to go on with those that were made otherwise."""
    note, told = folder / _MADE_WITH, json_text(facts)
    if begun and (not note.is_file() or note.read_text(encoding="utf-8") != told):
        raise ConfigurationError(
            f"{str(folder)!r} has results that were made with something else, or nobody knows with what.",
            hint="Name another folder for the results.",
        )
    write_atomically(note, told)


def _facts_of(gate: GateLike | str | None) -> dict[str, Any]:
    """Return what tells a gate apart from others: what it is and, where it was trained, its ``gate.json``."""
    engine = _loaded(gate)
    facts = {"gate": engine.config() if isinstance(engine, DecisionEngine) else type(engine).__name__}
    if isinstance(gate, str) and (Path(gate) / CONFIG).is_file():
        facts["saved"] = (Path(gate) / CONFIG).read_text(encoding="utf-8")
    return facts


def _workers(workers: Workers | int) -> Workers:
    return Workers(workers) if isinstance(workers, int) else workers


def _loaded(gate: GateLike | str | None) -> GateLike:
    return load_gate(gate) if gate is None or isinstance(gate, str) else gate


def _decisions(gate: GateLike, questions: Sequence[str]) -> list[dict[str, Any]]:
    rows = []
    for decision in gate.decide_batch(list(questions)):
        rows.append(
            {
                "retrieve": decision.retrieve,
                "p_known": decision.p_known,
                "threshold": decision.threshold,
                "reason": decision.reason,
                "error": "" if decision.error is None else decision.error.message,
            }
        )
    return rows
