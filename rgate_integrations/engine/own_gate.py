"""A user's own gate: any object with `decide_batch` and `adecide_batch`."""

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
    """A user's own gate, which adapters accept: any object with these two methods.

    Optional attributes declare more about it:

    - ``reads_history = True``: it reads `Request.history`. Otherwise a question that follows earlier turns retrieves.
    - ``reads_drafts = True``: it reads `Request.draft`, so it can judge a partial answer.
    - ``corpora = ("docs", "hr")``: its decisions say which of these to search.
    - ``on_error = "raise"``: its failures are raised. Otherwise they retrieve.
    - ``threshold = 0.4``: the threshold in decisions about failed requests; 0.5 by default.
    """

    def decide_batch(self, requests: Sequence[Request], /) -> list[Decision]:
        """Return a decision for each request, in order."""

    def adecide_batch(self, requests: Sequence[Request], /) -> Awaitable[list[Decision]]:
        """Return an awaitable of the decisions that `decide_batch` would return."""


class OwnGate(Decider):
    """Decides with a user's `GateLike` object. The object's attributes are read on every call, so they may change."""

    def __init__(self, gate: Any) -> None:
        self.gate = gate

    def __repr__(self) -> str:
        return f"OwnGate({self.gate!r})"

    @property
    def on_error(self) -> OnError:  # type: ignore[override]  # read-only here
        """``"raise"`` if the object's attribute ``on_error`` says so, otherwise ``"retrieve"``."""
        return "raise" if getattr(self.gate, "on_error", "retrieve") == "raise" else "retrieve"

    @property
    def name(self) -> str:
        """Name of the class of the user's object."""
        return type(self.gate).__name__

    @property
    def threshold(self) -> float:
        """The object's threshold, or 0.5 if it has no valid one."""
        with suppress(ConfigurationError):  # an attribute of that name may be anything
            return valid_threshold(getattr(self.gate, "threshold", None))
        return 0.5

    @property
    def reads_history(self) -> bool:
        """Whether the object declares that it reads the turns before a question."""
        return bool(getattr(self.gate, "reads_history", False))

    @property
    def corpora(self) -> tuple[str, ...]:
        """Names of the corpora that the object declares; empty without any."""
        return tuple(getattr(self.gate, "corpora", ()))

    def judge(self, requests: Sequence[Request]) -> Flow[Sequence[Decision | Exception]]:
        """Return for each request the object's decision at the request's threshold; an error for an invalid decision.

        Raises:
            ConfigurationError: The object returned more or fewer decisions than there are requests.
            Exception: The object raised it.
        """
        decisions = yield Call(self.gate.decide_batch, self.gate.adecide_batch, list(requests))
        if len(decisions) != len(requests):
            raise ConfigurationError(
                f"The gate {self.name!r} returned {len(decisions)} decisions for {len(requests)} questions.",
                hint="Its decide_batch must return one decision per question.",
            )
        return [self._check(*pair) for pair in zip(requests, decisions, strict=True)]

    def _check(self, request: Request, decision: Any) -> Decision | Exception:
        if not isinstance(decision, Decision):
            return ConfigurationError(
                f"The gate {self.name!r} returned {type(decision).__name__}, not a Decision.",
                hint="Its decide_batch must return a list with one Decision per question.",
            )
        # A user's gate that fails must not skip retrieval silently.
        must_retrieve = decision.error is not None or (decision.override and decision.override.retrieve)
        if must_retrieve and not decision.retrieve:
            return ConfigurationError(
                f"A decision of {self.name!r} skips retrieval although it has an error or an override that "
                "retrieves.",
                hint="Set retrieve=True in it, or leave out the error or override.",
            )
        if request.threshold in (None, decision.threshold):
            return decision
        return decision.with_threshold(request.threshold)

    def answer_gate(self) -> Decider | None:
        """Return this gate if the object declares that it reads drafts, otherwise None."""
        return self if getattr(self.gate, "reads_drafts", False) else None

    def decides_like(self, other: Decider) -> bool:
        """Return whether the other decider wraps the same object."""
        return isinstance(other, OwnGate) and self.gate is other.gate
