"""Applies a gate to a Ray data set, on many machines. Needs the extra ``ray``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rgate_integrations.engine.loading import resolve_gate

if TYPE_CHECKING:
    from ray.data import Dataset

    from rgate_integrations.engine.own_gate import GateLike

COLUMNS = ("retrieve", "p_known", "threshold", "reason", "error")
"""The new columns. ``error`` says why a question could not be judged, and so retrieves; it is empty otherwise."""


def gate_dataset(
    dataset: Dataset,
    gate: GateLike | str | None = None,
    *,
    question: str = "question",
    concurrency: int = 1,
    batch_size: int = 256,
    **options: Any,
) -> Dataset:
    """Return a Ray data set with a gate's decisions in additional columns, see `COLUMNS`.

    Args:
        dataset: Rows with one question each.
        gate: A gate, or an argument for `load_gate`, loaded once per worker; the default gate when None.
        question: Column of the question.
        concurrency: Number of workers, each with its own model.
        batch_size: Maximum number of rows per call of a worker.
        **options: Further options of Ray's ``map_batches``, such as ``num_gpus=1`` for each worker.
    """
    return dataset.map_batches(
        GateActor,
        fn_constructor_args=(gate, question),
        concurrency=concurrency,
        batch_size=batch_size,
        batch_format="pandas",
        **options,
    )


class GateActor:
    """A Ray worker that decides batch by batch with its own gate."""

    def __init__(self, gate: GateLike | str | None, question: str) -> None:
        self.gate = resolve_gate(gate)
        self.question = question

    def __call__(self, batch: Any) -> Any:
        """Return a batch (a data frame) with `COLUMNS` added."""
        decisions = self.gate.decide_batch(batch[self.question].tolist())
        columns = {name: [getattr(decision, name) for decision in decisions] for name in COLUMNS}
        columns["error"] = ["" if error is None else error.message for error in columns["error"]]
        return batch.assign(**columns)
