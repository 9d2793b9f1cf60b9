"""Gates by name: `load_gate`, `list_gates`, and their way to JSON and back."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rgate_integrations.errors import ConfigurationError, ModelLoadError, unknown_name
from rgate_integrations.gates.base import Gate, GateInfo, Score, decide_together
from rgate_integrations.gates.collector import Drafter
from rgate_integrations.proxy.base import Proxy
from rgate_integrations.saved import read_config, shipped

__all__ = [
    "Drafter",
    "Gate",
    "GateInfo",
    "Score",
    "decide_together",
    "gate_class",
    "gate_from_config",
    "gate_from_json",
    "list_gates",
    "load_gate",
    "prompt_hashes",
]

DEFAULT_GATE = "default"
DEFAULT_GATES = {
    "proxy": "default",
    "none": "default-question",
    "recorded": "default-recorded",
    "llm": "default-recorded",
}
"""The shipped gate for each source of the draft."""

_GATES = {
    "adapt": "adapt:AdaptGate",
    "boundary": "boundary:BoundaryGate",
    "cached": "cached:CachedGate",
    "calibrated": "calibrated:CalibratedGate",
    "cascade": "combined:CascadeGate",
    "constant": "constant:ConstantGate",
    "eigval_laplacian": "uncertainty:EigValLaplacianGate",
    "ensemble": "combined:EnsembleGate",
    "ik": "ik:IKGate",
    "lexical_similarity": "uncertainty:LexicalSimilarityGate",
    "mean_token_entropy": "uncertainty:MeanTokenEntropyGate",
    "neighbours": "neighbours:NeighboursGate",
    "perplexity": "uncertainty:PerplexityGate",
    "popularity": "popularity:PopularityGate",
    "probe": "probe:ProbeGate",
    "prompt": "prompt:PromptGate",
    "self_eval": "self_eval:SelfEvalGate",
    "semantic_sets": "uncertainty:SemanticSetsGate",
    "slimplm": "slimplm:SlimPLMGate",
    "token_probability": "token_probability:TokenProbabilityGate",
}


def gate_class(name: str) -> type[Gate]:
    """Return the class of a gate.

    Raises:
        UnknownNameError: No gate has that name; the hint suggests the nearest.
    """
    if name not in _GATES:
        raise unknown_name("gate", name, [*_GATES, *shipped()])
    module, _, attribute = _GATES[name].partition(":")
    found: type[Gate] = getattr(importlib.import_module(f"{__name__}.{module}"), attribute)
    return found


def list_gates() -> list[GateInfo]:
    """Return what every gate is, sorted by name; loads no model."""
    return [gate_class(name).info for name in sorted(_GATES)]


def load_gate(
    name: str | None = None,
    *,
    proxy: Proxy | str | None = None,
    llm: Drafter | None = None,
    **parameters: Any,
) -> Gate:
    """Return a gate. Nothing is loaded until its first decision.

    Args:
        name: A gate's name (see ``rgate gates``), with an argument after a colon where it takes one
            (``"constant:random:0.5"``); the name of a shipped gate; or the folder of a trained one. None is
            ``"default"``, the shipped default gate.
        proxy: Catalogue name, folder or Hub id of the proxy model, or a `Proxy` object.
        llm: Writes the drafts of gates with ``source="llm"``.
        **parameters: Parameters of the gate, such as ``threshold`` or ``tokens``.

    Raises:
        UnknownNameError: No gate has that name; the hint suggests the nearest.
        ConfigurationError: A parameter is unknown or out of its range.
    """
    name = DEFAULT_GATE if name is None else str(name)
    if name.partition(":")[0] not in _GATES and (name in shipped() or "/" in name or Path(name).is_dir()):
        return _trained(name, proxy=proxy, llm=llm, **parameters)
    kind, _, argument = name.partition(":")
    found = gate_class(kind)
    try:
        gate = found.from_argument(argument, **parameters) if argument else found(**parameters)
    except ValidationError as error:
        raise _configuration_error(kind, error) from error
    return gate.with_options(proxy=proxy, llm=llm) if proxy is not None or llm is not None else gate


def _trained(name: str, *, proxy: Proxy | str | None, llm: Drafter | None, **parameters: Any) -> Gate:
    """Load a trained gate: a probe, or a gate with an adapter."""
    config = read_config(name)
    if config["method"] == "probe":
        return load_gate(f"probe:{name}", proxy=proxy, llm=llm, **parameters)
    if config["method"] == "calibrated":
        gate = _calibrated(name, config, parameters)
        return gate.with_options(proxy=proxy, llm=llm) if proxy is not None or llm is not None else gate
    given = {"threshold": config["threshold"], **config["parameters"], **parameters}
    gate = load_gate(config["method"], adapter=config["folder"], **given)
    used = {getattr(s, "prompt", None) for s in gate.all_specs if getattr(s, "adapter", None)}
    if config["prompt"]["hash"] not in {prompt.hash for prompt in used if prompt is not None}:
        raise ModelLoadError(
            f"The gate {name!r} was trained with version {config['prompt']['version']} of the prompt "
            f"{config['prompt']['name']!r}, not the current one.",
            hint="Train it again: its scores would mean nothing.",
        )
    return gate.with_options(proxy=proxy if proxy is not None else config["base_model"], llm=llm)


def _calibrated(name: str, config: Mapping[str, Any], parameters: Mapping[str, Any]) -> Gate:
    gate = gate_from_config({**config["config"], **parameters})
    if prompt_hashes(gate) != config["prompts"]:
        raise ModelLoadError(
            f"The gate {name!r} was calibrated with other prompts than the current ones.",
            hint="Calibrate it again: its threshold would mean nothing.",
        )
    return gate


def prompt_hashes(gate: Gate) -> dict[str, str]:
    """Return the hash of each prompt that a gate reads under, by its name."""
    return {spec.prompt.name: spec.prompt.hash for spec in gate.all_specs if hasattr(spec, "prompt")}


def gate_from_config(config: Mapping[str, Any]) -> Gate:
    """Make a gate from what `Gate.config` returned."""
    parameters = dict(config)
    kind = str(parameters.pop("gate", ""))
    try:
        return gate_class(kind).model_validate(parameters)
    except ValidationError as error:
        raise _configuration_error(kind, error) from error


def gate_from_json(text: str) -> Gate:
    """Make a gate from what `Gate.to_json` returned."""
    try:
        config = json.loads(text)
    except ValueError as error:
        raise ConfigurationError(f"This is not JSON: {error}.") from error
    if not isinstance(config, dict):
        raise ConfigurationError("A gate's JSON must be an object.")
    return gate_from_config(config)


def _configuration_error(kind: str, error: ValidationError) -> ConfigurationError:
    first = error.errors(include_url=False)[0]
    if isinstance(cause := first.get("ctx", {}).get("error"), ConfigurationError):
        return cause
    where = ".".join(str(part) for part in first["loc"]) or "parameters"
    parameters = ", ".join(gate_class(kind).model_fields)
    return ConfigurationError(
        f"The gate {kind!r} cannot take {where}: {first['msg']}.", hint=f"Its parameters are: {parameters}."
    )
