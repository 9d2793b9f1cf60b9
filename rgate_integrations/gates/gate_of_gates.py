"""What gates of gates share: how they hold other gates, and whose model they read."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import PlainSerializer, model_validator

from rgate_integrations.evidence.base import expand_specs
from rgate_integrations.gates.base import Gate, Specs
from rgate_integrations.gates.scoring import ScoreSpec


def _config(gate: Gate) -> dict[str, Any]:
    return gate.config()


InnerGate = Annotated[Gate, PlainSerializer(_config)]
"""A gate inside of another one. `load_gate` takes a name, a folder or a config in its place."""


class GateOfGates(Gate):
    """A gate that looks at the scores of other gates. They share its proxy: by default that of the first of them."""

    @model_validator(mode="before")
    @classmethod
    def _with_a_gates_proxy(cls, values: Any) -> Any:
        # The evidence of all gates in an engine comes from one model. If it is not named, it is the one that the
        # first gate with a model was made for; where the others differ, they refuse its evidence.
        if isinstance(values, dict) and "proxy" not in values:
            for name in cls.gate_fields:
                gate = values.get(name)
                if isinstance(gate, Gate) and any(spec.reads_model for spec in expand_specs(gate.specs)):
                    return {"proxy": gate.proxy, **values}
        return values

    @property
    def specs(self) -> Specs:
        """The scores of its gates."""
        return tuple(ScoreSpec(getattr(self, name)) for name in self.gate_fields)
