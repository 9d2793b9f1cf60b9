"""Answer first: the direct arm begins to answer, what it has written is judged, and it goes on or is stopped."""

from __future__ import annotations

from dataclasses import dataclass

from rgate_integrations.engine.gate_like import OWN, GateLike
from rgate_integrations.errors import ConfigurationError


@dataclass(frozen=True)
class AnswerFirst:
    """How an answer is begun and judged; ``answer_first=True`` in an adapter stands for these defaults.

    Attributes:
        tokens: How many tokens are held back and judged, at least 1.
        retrieve_below: A question whose P(known) is below it is clearly unknown.
        answer_above: A question whose P(known) is at least this is clearly known.
        question_gate: Reads the question alone: a gate, or what `load_gate` takes. What is clearly unknown goes to
            the retrieve arm, and the LLM is not asked; what is clearly known is answered, and nothing of it is held
            back. None begins every answer, and judges it. ``"own"`` is the gate of the same family as the one that
            judges: the shipped one beside the default, the one for the question beside a tuned one; and none beside
            any other gate, which nobody then overrules.
        prefetch: Whether the search of a single question starts when its answer is begun. That pays where searching
            takes long. Where the answer goes on, the search is cancelled, or what it finds or raises is dropped. The
            retrieve arm must be one whose search can be told from the rest, as for looking first;
            with looking first, all is searched before, and this changes nothing. Nor does it in agents, whose tools
            search.

    Raises:
        ConfigurationError: The numbers are out of their range or order.
    """

    tokens: int = 32
    retrieve_below: float = 0.3
    answer_above: float = 0.9
    question_gate: GateLike | str | None = OWN
    prefetch: bool = False

    def __post_init__(self) -> None:
        is_in_range = self.tokens >= 1 and self.retrieve_below <= self.answer_above  # NaN is not
        if isinstance(self.retrieve_below, bool) or isinstance(self.answer_above, bool):
            is_in_range = False
        if not is_in_range:
            raise ConfigurationError(
                f"{self} is out of range.", hint="tokens at least 1, retrieve_below at most answer_above"
            )

    @classmethod
    def of(cls, value: bool | AnswerFirst) -> AnswerFirst | None:
        """Return what an adapter's ``answer_first=`` stands for; None for False."""
        if isinstance(value, cls):
            return value
        return cls() if value else None
