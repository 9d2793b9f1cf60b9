"""Gates by name: from a name, a folder or a config to a gate, and back from JSON."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rgate_integrations.artifacts.folder import read_config, shipped, unreadable
from rgate_integrations.errors import ModelLoadError, RGateError, unknown_name
from rgate_integrations.evidence.base import expand_specs
from rgate_integrations.gates.base import Gate, GateInfo, configuration_error
from rgate_integrations.runtime.files import existing_folder

_GATES = {
    "adapt": "papers.adapt:AdaptGate",
    "answer": "answer:AnswerGate",
    "boundary": "papers.boundary:BoundaryGate",
    "calibrated": "calibrated:CalibratedGate",
    "constant": "constant:ConstantGate",
    "eigval_laplacian": "papers.uncertainty:EigValLaplacianGate",
    "heads": "heads:HeadsGate",
    "ik": "papers.ik:IKGate",
    "lexical_similarity": "papers.uncertainty:LexicalSimilarityGate",
    "mean_token_entropy": "papers.uncertainty:MeanTokenEntropyGate",
    "neighbours": "papers.neighbours:NeighboursGate",
    "perplexity": "papers.uncertainty:PerplexityGate",
    "popularity": "papers.popularity:PopularityGate",
    "probe": "probe:ProbeGate",
    "prompt": "papers.prompt:PromptGate",
    "self_eval": "papers.self_eval:SelfEvalGate",
    "semantic_sets": "papers.uncertainty:SemanticSetsGate",
    "slimplm": "papers.slimplm:SlimPLMGate",
    "targ": "papers.targ:TargGate",
    "token_probability": "papers.token_probability:TokenProbabilityGate",
    "tuned": "tuned:TunedGate",
}
_OF_THE_ENGINE = ("on_error", "timeout", "rules")


def gate_class(name: str) -> type[Gate]:
    """Return the class of a gate.

    Raises:
        UnknownNameError: No gate has that name; the hint suggests the nearest.
    """
    if name not in _GATES:
        raise unknown_name("gate", name, [*_GATES, *shipped()])
    module, _, attribute = _GATES[name].partition(":")
    found: type[Gate] = getattr(importlib.import_module(f"{__package__}.{module}"), attribute)
    return found


def list_gates() -> list[GateInfo]:
    """Return what every gate is, sorted by name; loads no model."""
    return [gate_class(name).info for name in sorted(_GATES)]


def make_gate(name: str, **parameters: Any) -> Gate:
    """Return a gate.

    Args:
        name: A gate's name, with an argument after a colon where it takes one (``"constant:random:0.5"``); the name
            of a shipped gate; or the folder or Hub id of a trained one.
        **parameters: Its parameters. Where one is a gate, it may be a name or a config, too.

    Raises:
        UnknownNameError: No gate has that name; the hint suggests the nearest.
        ConfigurationError: A parameter is unknown or out of its range.
        ModelLoadError: A trained gate cannot be read, or was trained with other prompts.
    """
    kind, _, argument = name.partition(":")
    if kind not in _GATES and (name in shipped() or "/" in name or os.path.isdir(existing_folder(name))):
        return _trained(name, parameters)
    found = gate_class(kind)
    given = _with_gates(found, parameters)
    try:
        if argument:
            return found.from_argument(argument, make_gate, **given)
        return found.model_validate(given)
    except ValidationError as error:
        raise configuration_error(found, error) from error


def loadable(folder: str | Path) -> str:
    """Return a folder as `make_gate` takes it: one that is named like a gate, such as ``tuned``, needs a slash.

    >>> loadable("tuned"), loadable("mine"), loadable("gates/ik")
    ('./tuned', 'mine', 'gates/ik')
    """
    name = str(folder)
    return f"./{name}" if name.partition(":")[0] in _GATES else name


def gate_from_config(config: Mapping[str, Any]) -> Gate:
    """Make a gate from what `Gate.config` returned."""
    parameters = {name: value for name, value in config.items() if name not in ("gate", *_OF_THE_ENGINE)}
    return make_gate(str(config.get("gate", "")), **parameters)


def prompt_hashes(gate: Gate) -> dict[str, str]:
    """Return name and hash of every prompt that a gate's evidence comes from."""
    found = {}
    for spec in expand_specs(gate.specs):
        prompt = getattr(spec, "prompt", None)
        if prompt is not None:
            found[prompt.name] = prompt.hash
    return found


def _with_gates(found: type[Gate], parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Make gates of the names and configs among the parameters that hold gates."""
    given = dict(parameters)
    for name in found.gate_fields:
        if name in given:
            given[name] = _as_gate(given[name])
    return given


def _as_gate(value: Any) -> Any:
    if isinstance(value, str):
        return make_gate(value)
    if isinstance(value, Mapping):
        return gate_from_config(value)
    return getattr(value, "gate", value)  # what `load_gate` returned holds a gate


def _trained(name: str, parameters: Mapping[str, Any]) -> Gate:
    """Load a trained gate: a probe, heads, a calibrated gate, or one with an adapter."""
    config = read_config(name)
    try:
        return _made_of(name, config, parameters)
    except RGateError:
        raise
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        # Whatever its parameters hold: they are those of any gate, so their types are not known before.
        raise unreadable(Path(config["folder"]), error) from error


def _made_of(name: str, config: Mapping[str, Any], parameters: Mapping[str, Any]) -> Gate:
    if config["method"] in ("probe", "heads", "tuned"):
        return make_gate(f"{config['method']}:{name}", **parameters)
    if config["method"] == "calibrated":
        gate = gate_from_config({**config["config"], **parameters})
        if prompt_hashes(gate) != config["prompts"]:
            raise ModelLoadError(
                f"The gate {name!r} was calibrated with other prompts than the current ones.",
                hint="Calibrate it again: its threshold would mean nothing.",
            )
        return gate
    given = {
        "threshold": config["threshold"],
        "proxy": config["base_model"],
        **config["parameters"],
        **parameters,
        "adapter": config["folder"],
    }
    gate = make_gate(config["method"], **given)
    if config["prompt"]["hash"] not in prompt_hashes(gate).values():
        raise ModelLoadError(
            f"The gate {name!r} was trained with version {config['prompt']['version']} of the prompt "
            f"{config['prompt']['name']!r}, not the current one.",
            hint="Train it again: its scores would mean nothing.",
        )
    return gate
