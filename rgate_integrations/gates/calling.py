"""How adapters call a gate: this package's, or any object with `decide_batch` and `adecide_batch`."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

from rgate_integrations.decision import Decision, Failure
from rgate_integrations.errors import ConfigurationError

_log = logging.getLogger("rgate_integrations")


@runtime_checkable
class DecidesBatches(Protocol):
    """A gate as adapters see it. The user's own object needs these two methods and nothing else."""

    @property
    def decide_batch(self) -> Callable[..., list[Decision]]:
        """Takes a list of questions and returns a decision for each, in order."""

    @property
    def adecide_batch(self) -> Callable[..., Any]:
        """The same, to be awaited."""


def as_gate(gate: DecidesBatches | str | None) -> DecidesBatches:
    """Return a gate from an adapter's ``gate=`` argument: an object, `load_gate`'s argument, or None."""
    if gate is None or isinstance(gate, str):
        from rgate_integrations.gates import load_gate

        return load_gate(gate)
    if not isinstance(gate, DecidesBatches):
        raise ConfigurationError(
            f"A gate needs the methods decide_batch and adecide_batch; {type(gate).__name__} has not both.",
            hint='Pass a name such as "ik", a folder, a Gate, or an object with both methods.',
        )
    return gate


def decide_safely(gate: DecidesBatches, questions: Sequence[str], **options: Any) -> list[Decision]:
    """Call ``gate.decide_batch``; whatever goes wrong with it, every question gets a decision to retrieve.

    Args:
        gate: The gate.
        questions: The questions.
        **options: Keyword arguments such as ``threshold`` and ``drafts``; None values, and those that the
            gate's method does not take, are left out.
    """
    try:
        found = gate.decide_batch(list(questions), **_accepted(gate.decide_batch, options))
        return _checked(found, questions)
    except Exception as error:
        return _failed(gate, questions, error)


async def adecide_safely(gate: DecidesBatches, questions: Sequence[str], **options: Any) -> list[Decision]:
    """Await ``gate.adecide_batch``; see `decide_safely`."""
    try:
        found = await gate.adecide_batch(list(questions), **_accepted(gate.adecide_batch, options))
        return _checked(found, questions)
    except Exception as error:
        return _failed(gate, questions, error)


def _accepted(method: Callable[..., Any], options: dict[str, Any]) -> dict[str, Any]:
    given = {
        name: value
        for name, value in options.items()
        if value is not None and not (isinstance(value, Sequence) and all(v is None for v in value))
    }
    if not given:
        return {}
    parameters = inspect.signature(method).parameters.values()
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
        return given
    names = {p.name for p in parameters}
    return {name: value for name, value in given.items() if name in names}


def _checked(found: Sequence[Decision], questions: Sequence[str]) -> list[Decision]:
    if len(found) != len(questions):
        raise ConfigurationError(f"The gate returned {len(found)} decisions for {len(questions)} questions.")
    return list(found)


def _failed(gate: DecidesBatches, questions: Sequence[str], error: Exception) -> list[Decision]:
    from rgate_integrations.gates.base import Gate

    if isinstance(gate, Gate) and gate.on_error == "raise":
        raise error
    failure = Failure.of(error)
    _log.warning(
        "The gate %s raised %s and retrieves: %s", type(gate).__name__, failure.type, failure.message
    )
    reason = f"The gate failed, so it retrieves: {failure.message}"
    return [
        Decision(question=str(q), retrieve=True, p_known=0.0, reason=reason, error=failure) for q in questions
    ]
