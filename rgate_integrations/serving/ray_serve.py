"""The decision server on Ray Serve: replicas with a gate each, behind one address. Needs ``ray[serve]``.

``serve run rgate_integrations.serving.ray_serve:application gate=my-gate``
"""

from __future__ import annotations

import os
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from rgate_integrations.engine.loading import DEFAULT_GATE, load_gate
from rgate_integrations.errors import missing_dependency
from rgate_integrations.models.decision_server import TOKEN
from rgate_integrations.serving.app import make_app
from rgate_integrations.serving.guard import Guard
from rgate_integrations.serving.service import DecisionService, Metrics

try:
    from ray import serve
    from ray.serve import Application
except ImportError as error:
    raise missing_dependency("ray", "ray-serve") from error


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

    def served() -> Guard:
        gate = load_gate(options.gate, llm_name=options.llm_name)
        gate.decide(
            "Is this a question?"
        )  # Ray sends nothing before: the first client does not wait for the model
        service = DecisionService(gate, Metrics(), timeout=options.timeout, queue=options.queue)
        return Guard(make_app(service), token=os.environ.get(TOKEN, ""))

    # A replica batches what it is asked at a time: Ray's five would leave it nothing to batch.
    replica = serve.deployment(name="rgate", max_ongoing_requests=options.queue)(serve.ingress(served)())
    return replica.bind()
