"""How adapters call a gate: this package's, or any object with `decide_batch` and `adecide_batch`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Sequence
from typing import Any, Protocol, runtime_checkable

from rgate_integrations.decision import Decision
from rgate_integrations.errors import ConfigurationError
from rgate_integrations.failing import log_failures, retrieve_instead
from rgate_integrations.flow import Call, Flow, Step
from rgate_integrations.request import valid_threshold


@runtime_checkable
class DecidesBatches(Protocol):
    """A gate as adapters see it. The user's own object needs these two methods and nothing else."""

    @property
    def decide_batch(self) -> Callable[..., list[Decision]]:
        """Takes a list of questions and returns a decision for each, in order."""

    @property
    def adecide_batch(self) -> Callable[..., Any]:
        """The same, to be awaited."""


def as_gate(gate: Any = None) -> DecidesBatches:
    """Return what an adapter's ``gate=`` argument stands for.

    Args:
        gate: An object with both methods as it is; a `Gate`, `load_gate`'s argument or None as `load_gate` takes it.

    Raises:
        ConfigurationError: It is none of these.
        UnknownNameError: No gate has that name.
    """
    from rgate_integrations.gates.base import Gate
    from rgate_integrations.loading import load_gate

    if isinstance(gate, DecidesBatches):
        return gate
    if gate is None or isinstance(gate, str | Gate):
        return load_gate(gate)
    raise ConfigurationError(
        f"A gate needs the methods decide_batch and adecide_batch; {type(gate).__name__} lacks one of them.",
        hint='Pass a name such as "ik", a folder, a Gate, or an object with both methods.',
    )


def deciding(
    gate: DecidesBatches,
    questions: Sequence[str],
    *,
    drafting: Generator[Step, Any, Any] | None = None,
    **options: Any,
) -> Flow[list[Decision]]:
    """Decide for a batch; whatever goes wrong, every question gets a decision to retrieve.

    Args:
        gate: The gate.
        questions: The questions.
        drafting: A flow that returns the ``drafts`` to judge, one a question or None; it fails as the gate does.
        **options: Keyword arguments of the gate's methods, such as ``threshold`` and ``drafts``; None values, and
            those that the method does not take, are left out. A threshold that it does not take is compared with
            the ``p_known`` of its decisions.

    Returns:
        One decision a question, in order.
    """
    asked = list(questions)
    try:
        if drafting is not None:
            options["drafts"] = yield from drafting
        accepted = _accepted(gate.decide_batch, options)
        found = yield Call(gate.decide_batch, gate.adecide_batch, asked, **accepted)
        if len(found) != len(asked):
            raise ConfigurationError(f"The gate returned {len(found)} decisions for {len(asked)} questions.")
        if not _is_nothing(options.get("threshold")) and "threshold" not in accepted:
            return _by_threshold(found, options["threshold"])
        return list(found)
    except Exception as error:
        if getattr(gate, "on_error", "retrieve") == "raise":
            raise
        name = type(gate).__name__
        decisions = [retrieve_instead(error, question=q, gate=name) for q in asked]
        log_failures(decisions, name)
        return decisions


def _by_threshold(
    decisions: Sequence[Decision], threshold: float | Sequence[float | None] | None
) -> list[Decision]:
    """Compare decisions with thresholds that their gate does not take; one that failed still retrieves."""
    thresholds = threshold if isinstance(threshold, Sequence) else [threshold] * len(decisions)
    found = []
    for decision, given in zip(decisions, thresholds, strict=True):
        if given is not None:
            compared = valid_threshold(given)
            retrieve = decision.error is not None or decision.p_known < compared
            decision = decision.model_copy(update={"threshold": compared, "retrieve": retrieve})
        found.append(decision)
    return found


def _accepted(method: Callable[..., Any], options: dict[str, Any]) -> dict[str, Any]:
    """Leave out what was not given, and what a user's own method does not take."""
    given = {name: value for name, value in options.items() if not _is_nothing(value)}
    if not given:
        return {}
    parameters = inspect.signature(method).parameters.values()
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
        return given
    names = {p.name for p in parameters}
    return {name: value for name, value in given.items() if name in names}


def _is_nothing(value: Any) -> bool:
    if isinstance(value, Sequence) and not isinstance(value, str):
        return all(each is None for each in value)
    return value is None
