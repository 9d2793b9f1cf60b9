"""Ray: gates over Ray Data on many machines, and the decision server on Ray Serve. Extras ``ray``, ``ray-serve``.

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
"""What is added to each question; ``error`` is empty unless the gate failed, and then it retrieves."""


def gate_dataset(
    dataset: Dataset,
    gate: GateLike | str | None = None,
    *,
    question: str = "question",
    prefix: str = "",
    concurrency: int = 1,
    batch_size: int = 256,
    **options: Any,
) -> Dataset:
    """Add a gate's decisions to a Ray data set, as `COLUMNS`.

    Args:
        dataset: Rows with a question each.
        gate: A gate, or what `load_gate` takes; loaded once a worker.
        question: Column of the question.
        prefix: Put before the names of the new columns.
        concurrency: How many workers, each with a model of its own.
        batch_size: Rows that a worker is given at a time.
        **options: Further ones of Ray's ``map_batches``, such as ``num_gpus=1`` for each worker.
    """
    return dataset.map_batches(
        GateActor,
        fn_constructor_args=(gate, question, prefix),
        concurrency=concurrency,
        batch_size=batch_size,
        batch_format="pandas",
        **options,
    )


class GateActor:
    """Decides for one batch after another, with a gate of its worker's."""

    def __init__(self, gate: GateLike | str | None, question: str, prefix: str) -> None:
        self.gate = resolve_gate(gate)
        self.question = question
        self.prefix = prefix

    def __call__(self, batch: Any) -> Any:
        """Return a batch, a data frame, with `COLUMNS`."""
        rows = []
        for decision in self.gate.decide_batch(batch[self.question].tolist()):
            error = "" if decision.error is None else decision.error.message
            rows.append((decision.retrieve, decision.p_known, decision.threshold, decision.reason, error))
        columns = {}
        for name, values in zip(COLUMNS, zip(*rows, strict=True), strict=True):
            columns[self.prefix + name] = values
        return batch.assign(**columns)


class ReplicaOptions(BaseModel):
    """What each replica serves; the options of ``rgate serve``.

    Attributes:
        gate: What `load_gate` takes; a folder must be there on every machine.
        llm_name: The LLM whose knowledge is judged, where requests name none.
        timeout: Seconds for a decision; without one by then it retrieves.
        queue: Questions that may wait in a replica; what comes then gets status 529.
    """

    model_config = ConfigDict(extra="forbid")

    gate: str = DEFAULT_GATE
    llm_name: str = ""
    timeout: float = Field(default=5.0, gt=0)
    queue: int = Field(default=512, ge=1)


def application(arguments: dict[str, Any]) -> Application:
    """Return the application, for ``serve run`` and ``serve deploy``; how many replicas is Ray's to say.

    Clients must send the bearer token in the replicas' environment, ``RGATE_TOKEN``, if there is one.

    Args:
        arguments: `ReplicaOptions`, as Ray Serve has them from the command line or its config file.
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

        forbid_downloads()  # each machine's models are there before its replicas are: clients wait for none
        gate = load_gate(options.gate, llm_name=options.llm_name)
        # Ray sends nothing before: the first client does not wait for the model.
        gate.decide("Is this a question?")
        service = DecisionService(gate, timeout=options.timeout, queue=options.queue)
        return protect(make_app(service), token=os.environ.get(TOKEN, ""))

    # A replica batches what it is asked at a time: Ray's five would leave it nothing to batch.
    replica = serve.deployment(name="rgate", max_ongoing_requests=options.queue)(serve.ingress(served)())
    return replica.bind()
