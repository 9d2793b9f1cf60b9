"""What local models keep of answers that are being written, so that a gate need not read them again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol
from weakref import WeakValueDictionary


class KeptAnswer(Protocol):
    """An answer of a local model, as far as it is written."""

    @property
    def entropies(self) -> Sequence[float]:
        """Entropy of the next-token distribution at each token, in nats."""

    @property
    def margins(self) -> Sequence[float]:
        """How far the likeliest token was ahead of the second at each token."""


# An answer is kept as long as somebody holds it: who writes it, or who judges it.
_answers: WeakValueDictionary[str, KeptAnswer] = WeakValueDictionary()


def keep(response_id: str, answer: KeptAnswer) -> None:
    """Let others find an answer by the id of its response, in this process, as long as it is held."""
    _answers[response_id] = answer


def kept_answer(response_id: str) -> KeptAnswer | None:
    """Return the answer with that id; None for those of other models, and those that nobody holds any more."""
    return _answers.get(response_id)
