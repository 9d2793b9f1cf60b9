"""A gate's score as a piece of evidence: what the engine asks for, and what gates of gates look at."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar

from pydantic import PlainSerializer, model_validator

from rgate_integrations.errors import ScoreError
from rgate_integrations.gates.base import Gate, Score, Specs
from rgate_integrations.gates.evidence.base import Context, Evidence, EvidenceSpec, Piece, expand_specs

_ROUNDING = 1e-6


@dataclass(frozen=True, eq=False)
class ScoreSpec(EvidenceSpec[Score]):
    """What a gate makes of a question. Two are equal if they are about the very same gate object.

    Attributes:
        gate: The gate.
    """

    reads_model: ClassVar[bool] = False  # if a model reads the question, the gate's own specs say so

    gate: Gate

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ScoreSpec) and other.gate is self.gate

    def __hash__(self) -> int:
        return id(self.gate)

    @property
    def may_need(self) -> tuple[EvidenceSpec[Any], ...]:
        """Everything that the gate may look at."""
        return self.gate.specs

    def compute(self, context: Context) -> list[Piece[Score] | Exception]:
        """Let the gate look, round by round, until every question has a score.

        In a round all questions that are to be looked at in the same way are looked at together.
        """
        looks = [list(self.gate.looks(each)) for each in context.inputs]
        outcomes: dict[int, Piece[Score] | Exception] = {}
        for round_ in range(max((len(each) for each in looks), default=0)):
            groups: dict[Specs, list[int]] = defaultdict(list)
            for place, each in enumerate(looks):
                if round_ < len(each) and not isinstance(outcomes.get(place), Piece):
                    groups[each[round_]].append(place)
            for specs, places in groups.items():
                earlier = [spec for look in looks[places[0]][:round_] for spec in look]
                found = context.part(places).evidence(specs, earlier=list(dict.fromkeys(earlier)))
                for place, evidence in zip(places, found, strict=True):
                    # Before the last look an error is no more than "not clear yet": the next look may do without.
                    outcomes[place] = self._outcome(evidence)
        nothing = ScoreError(f"The gate {self.gate.name!r} looked at nothing.")
        return [outcomes.get(place, nothing) for place in range(len(looks))]

    def _outcome(self, evidence: Evidence | Exception) -> Piece[Score] | Exception:
        """Score one question; what is wrong with it is returned, so that the others go on."""
        if isinstance(evidence, Exception):
            return evidence
        try:
            score = self.gate.score(evidence)
            if score is None:
                return ScoreError(f"The gate {self.gate.name!r} gave no score.")
            p = score.p_known
            if not -_ROUNDING <= p <= 1 + _ROUNDING:  # NaN is in no range
                return ScoreError(f"The gate {self.gate.name!r} gave the score {p}.")
            return Piece(replace(score, p_known=min(max(p, 0.0), 1.0)))
        except Exception as error:  # `score` may be any user's code
            return error


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
