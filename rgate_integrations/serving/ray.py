"""Gates on many machines: over Ray Data, and as a decision server on Ray Serve. Extras ``ray``, ``ray-serve``.

``serve run rgate_integrations.serving.ray:application gate=my-gate``
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field

from rgate_integrations.engine.loading import DEFAULT_GATE, load_gate, resolve_gate
from rgate_integrations.errors import missing_dependency
from rgate_integrations.gates.remote import TOKEN

if TYPE_CHECKING:
    from ray.data import Dataset
    from ray.serve import Application
    from starlette.types import ASGIApp

    from rgate_integrations.engine.own_gate import GateLike

COLUMNS = ("retrieve", "p_known", "threshold", "reason", "error")
"""The new columns. ``error`` is empty unless the gate failed; ``retrieve`` is true then."""


def gate_dataset(
    dataset: Dataset,
    gate: GateLike | str | None = None,
    *,
    question: str = "question",
    concurrency: int = 1,
    batch_size: int = 256,
    **options: Any,
) -> Dataset:
    """Add a gate's decisions to a Ray data set, as `COLUMNS`.

    Args:
        dataset: Rows with one question each.
        gate: A gate, or an argument for `load_gate`; loaded once per worker.
        question: Column of the question.
        concurrency: Number of workers, each with its own model.
        batch_size: Rows per call of a worker.
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


class ReplicaOptions(BaseModel):
    """Options of each replica, with the meaning that they have for ``rgate serve``.

    Attributes:
        gate: An argument for `load_gate`; a folder must exist on every machine.
        llm_name: The LLM whose knowledge is judged if a request names none.
        timeout: Seconds for a decision; a late decision retrieves.
        queue: Number of questions that may wait in a replica; further ones get status 529.
    """

    model_config = ConfigDict(extra="forbid")

    gate: str = DEFAULT_GATE
    llm_name: str = ""
    timeout: float = Field(default=5.0, gt=0)
    queue: int = Field(default=512, ge=1)


def application(arguments: dict[str, Any]) -> Application:
    """Return the application, for ``serve run`` and ``serve deploy``; Ray sets the number of replicas.

    If the environment variable ``RGATE_TOKEN`` of the replicas is set, clients must send it as a bearer token.

    Args:
        arguments: `ReplicaOptions`, which Ray Serve reads from the command line or its config file.
    """
    options = ReplicaOptions.model_validate(arguments)
    try:
        from ray import serve
    except ImportError as error:
        raise missing_dependency("ray", "ray-serve") from error

    def served() -> ASGIApp:
        from rgate_integrations.models.first_use import forbid_downloads
        from rgate_integrations.serving.app import make_app
        from rgate_integrations.serving.server import protect
        from rgate_integrations.serving.service import DecisionService

        forbid_downloads()  # clients must not wait for a download: put the models on each machine beforehand
        gate = load_gate(options.gate, llm_name=options.llm_name)
        # Ray sends no request before this returns, so the first client does not wait for the model to load.
        gate.decide("Is this a question?")
        service = DecisionService(gate, timeout=options.timeout, queue=options.queue)
        return protect(make_app(service), token=os.environ.get(TOKEN, ""))

    # A replica batches concurrent requests; Ray's default limit of five would leave little to batch.
    replica = serve.deployment(name="rgate", max_ongoing_requests=options.queue)(serve.ingress(served)())
    return replica.bind()
