"""`load_gate`: from a name to an engine that decides."""

from __future__ import annotations

from typing import Any

from rgate_integrations.engine import DecisionEngine, OnError
from rgate_integrations.errors import ConfigurationError
from rgate_integrations.evidence.base import Drafter
from rgate_integrations.files import parsed_json
from rgate_integrations.gates.base import Gate
from rgate_integrations.gates.registry import gate_from_config, make_gate
from rgate_integrations.proxy.base import Proxy
from rgate_integrations.rules import RuleOrRules, Rules

DEFAULT_GATE = "default-heads"
_FOR_BEGUN_ANSWERS = f"begun:{DEFAULT_GATE},default-begun"
DEFAULT_GATES = {
    "proxy": DEFAULT_GATE,
    "none": DEFAULT_GATE,
    "recorded": _FOR_BEGUN_ANSWERS,
    "llm": _FOR_BEGUN_ANSWERS,
}
"""The shipped gate for each source of the draft."""


def load_gate(
    name: str | Gate | None = None,
    *,
    proxy: Proxy | str | None = None,
    llm: Drafter | None = None,
    on_error: OnError = "retrieve",
    timeout: float | None = None,
    always: RuleOrRules = (),
    never: RuleOrRules = (),
    **parameters: Any,
) -> DecisionEngine:
    """Return a gate that decides. No model is loaded until its first decision.

    Args:
        name: A gate's name (see ``rgate gates``), with an argument after a colon where it takes one
            (``"constant:random:0.5"``); the name of a shipped gate; the folder or Hub id of a trained one; or a gate
            of your own. None is ``"default-heads"``, the shipped default gate.
        proxy: Catalogue name, folder or Hub id of the proxy model, or a `Proxy` object.
        llm: Writes the drafts of gates with ``source="llm"``.
        on_error: What a failure does: ``"retrieve"`` or ``"raise"``; see `DecisionEngine`.
        timeout: How long a decision may take, in seconds, before it retrieves; see `DecisionEngine`.
        always: Rules for what always retrieves: examples ("questions like these"), patterns, and functions of the
            question and its metadata; one or several.
        never: Rules for what never does.
        **parameters: Parameters of the gate, such as ``threshold`` or ``tokens``.

    Raises:
        UnknownNameError: No gate has that name; the hint suggests the nearest.
        ConfigurationError: A parameter is unknown or out of its range.
        ModelLoadError: A trained gate cannot be read.
    """
    if isinstance(name, Gate):
        gate = name.changed(**parameters) if parameters else name
    else:
        if isinstance(proxy, str):  # also for what reads it while it is made, such as gates of gates
            parameters["proxy"] = proxy
        gate = make_gate(DEFAULT_GATE if name is None else str(name), **parameters)
    return DecisionEngine(
        gate, proxy=proxy, llm=llm, on_error=on_error, timeout=timeout, always=always, never=never
    )


def gate_from_json(text: str) -> DecisionEngine:
    """Return what `DecisionEngine.to_json` described.

    Raises:
        ConfigurationError: It is not JSON, or describes no gate.
    """
    try:
        config = parsed_json(text)
    except ValueError as error:
        raise ConfigurationError(f"This is not JSON: {error}.") from error
    if not isinstance(config, dict):
        raise ConfigurationError("A gate's JSON must be an object.")
    rules = Rules.from_config(config.get("rules", {}))
    return DecisionEngine(
        gate_from_config(config),
        on_error=config.get("on_error", "retrieve"),
        timeout=config.get("timeout"),
        always=rules.always,
        never=rules.never,
    )
