"""Evidence: the probability of each kind of request for each segment of a request."""

from __future__ import annotations

from dataclasses import dataclass

from rgate_integrations.gates.evidence.base import Context, EvidenceSpec, Piece
from rgate_integrations.gates.evidence.model_outputs import RequestSpec
from rgate_integrations.gates.heads_artifact import HeadsArtifact
from rgate_integrations.gates.trained import TrainedGate
from rgate_integrations.runtime.arrays import Float64Array
from rgate_integrations.runtime.segments import lists_questions


@dataclass(frozen=True, eq=False)
class KindsSpec(EvidenceSpec[Float64Array]):
    """Evidence: the probability of each kind of request for each segment, shape (segments, kinds).

    It is computed only once, although several methods of the gate read it. Two of these specs are equal if their
    gates share the heads and the proxy, as a gate and its copy for another LLM do.

    Attributes:
        states: The states of the segments.
        gate: The gate.
        trained: Its heads.
    """

    states: RequestSpec
    gate: TrainedGate
    trained: HeadsArtifact

    def __eq__(self, other: object) -> bool:
        return isinstance(other, KindsSpec) and other.states == self.states and other.trained is self.trained

    def __hash__(self) -> int:
        return hash(self.states)

    def compute(self, context: Context) -> list[Piece[Float64Array]]:
        """Return for each request the probability of each kind for each of its segments.

        Raises:
            ModelLoadError: The states are not from the model that the heads were trained on.
        """
        pieces: list[Piece[Float64Array]] = []
        trained = self.trained
        for request, states in zip(context.requests, context.get(self.states), strict=True):
            self.gate.check_states(states.segments, trained.segments.hidden_size)
            if not request.history and lists_questions(states.texts):
                kinds = trained.segments.p_asked(states.segments, states.layout)
            else:
                kinds = trained.kind_probabilities(
                    states.segments, states.layout, states.whole, in_context=states.in_context
                )
            pieces.append(Piece(kinds))
        return pieces
