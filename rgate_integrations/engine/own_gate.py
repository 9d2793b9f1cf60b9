"""A gate of the user's own: any object with `decide_batch` and `adecide_batch`."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from contextlib import suppress
from typing import Any, Protocol, runtime_checkable

from rgate_integrations.decision import Decision, Request, valid_threshold
from rgate_integrations.engine.decider import Decider, OnError
from rgate_integrations.errors import ConfigurationError
from rgate_integrations.runtime.flow import Call, Flow


@runtime_checkable
class GateLike(Protocol):
    """A gate as adapters accept it. These two methods are enough.

    What else it can do, it declares by attributes. ``reads_history = True``: it reads `Request.history`; without it,
    a question that follows earlier turns retrieves. ``reads_drafts = True``: it reads `Request.draft`, so it can
    judge an answer that was begun. ``corpora = ("docs", "hr")``: its decisions say which of these to search.
    ``on_error = "raise"``: its failures are raised; without it they retrieve.
    """

    def decide_batch(self, requests: Sequence[Request], /) -> list[Decision]:
        """Return a decision for each request, in order."""

    def adecide_batch(self, requests: Sequence[Request], /) -> Awaitable[list[Decision]]:
        """Return the same, to be awaited."""


class OwnGate(Decider):
    """Decides with a gate of the user's own.

    Args:
        gate: The object.
    """

    def __init__(self, gate: Any) -> None:
        self.gate = gate

    def __repr__(self) -> str:
        return f"OwnGate({self.gate!r})"

    @property
    def on_error(self) -> OnError:  # type: ignore[override]  # read where it is, since it may change
        """What its failures do; they retrieve unless it says ``"raise"``."""
        return "raise" if getattr(self.gate, "on_error", "retrieve") == "raise" else "retrieve"

    @property
    def name(self) -> str:
        """Name of its class."""
        return type(self.gate).__name__

    @property
    def threshold(self) -> float:
        """Its threshold, if it has one."""
        given = getattr(self.gate, "threshold", None)
        with suppress(ConfigurationError):  # what is called so may be anything
            return valid_threshold(given)
        return 0.5

    @property
    def reads_history(self) -> bool:
        """Whether it says that it reads the turns before a question."""
        return bool(getattr(self.gate, "reads_history", False))

    @property
    def corpora(self) -> tuple[str, ...]:
        """Names of corpora that it says it chooses among."""
        return tuple(getattr(self.gate, "corpora", ()))

    def judge(self, requests: Sequence[Request]) -> Flow[Sequence[Decision | Exception]]:
        """Ask it for all decisions at once; a threshold that it did not apply is applied here."""
        decisions = yield Call(self.gate.decide_batch, self.gate.adecide_batch, list(requests))
        if len(decisions) != len(requests):  # said where the gate is asked
            return list(decisions)
        return [self._check(*each) for each in zip(requests, decisions, strict=True)]

    def _check(self, request: Request, decision: Any) -> Decision | Exception:
        if not isinstance(decision, Decision):
            return ConfigurationError(
                f"The gate {self.name!r} returned {type(decision).__name__} and no Decision."
            )
        overridden = decision.override is not None and decision.override.retrieve
        if not decision.retrieve and (overridden or decision.error is not None):
            return ConfigurationError(
                f"The gate {self.name!r} does not retrieve, and its decision has an error or an override that does."
            )
        if request.threshold is None or request.threshold == decision.threshold:
            return decision
        return decision.with_threshold(request.threshold)

    def answer_gate(self) -> Decider | None:
        """Return this gate, if it says that it reads drafts."""
        return self if getattr(self.gate, "reads_drafts", False) else None

    def question_gate(self) -> Decider | None:
        """Return None: no other gate overrules one of the user's own."""
        return None

    def decides_like(self, other: Decider) -> bool:
        """Return whether the same object decides."""
        return isinstance(other, OwnGate) and self.gate is other.gate
