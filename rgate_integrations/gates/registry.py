"""Gates by name: from a name, a folder or a config to a gate, and back from JSON."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rgate_integrations.errors import ModelLoadError, unknown_name
from rgate_integrations.gates.artifacts import SavedGate
from rgate_integrations.gates.base import Gate, GateInfo, ScoreSpec
from rgate_integrations.gates.evidence.base import expand_specs
from rgate_integrations.gates.folder import ADAPTER, read_gate, saved_folder, shipped, unreadable
from rgate_integrations.gates.trained import TrainedGate, check_prompts, prompt_hashes
from rgate_integrations.runtime.files import find_folder

_GATES = {
    "adapt": "papers.verdicts:AdaptGate",
    "answer": "answer:AnswerGate",
    "boundary": "papers.boundary:BoundaryGate",
    "calibrated": "calibrated:CalibratedGate",
    "constant": "papers.baselines:ConstantGate",
    "heads": "heads:HeadsGate",
    "ik": "papers.verdicts:IKGate",
    "neighbours": "papers.baselines:NeighboursGate",
    "popularity": "papers.baselines:PopularityGate",
    "probe": "probe:ProbeGate",
    "prompt": "papers.verdicts:PromptGate",
    "remote": "remote:RemoteGate",
    "self_eval": "papers.verdicts:SelfEvalGate",
    "slimplm": "papers.verdicts:SlimPLMGate",
    "token_probability": "papers.baselines:TokenProbabilityGate",
    "tuned": "tuned:TunedGate",
}


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
            of a shipped gate; the folder or Hub id of a trained one; or the URL of a decision server.
        **parameters: Its parameters. Where one is a gate, it may be a name or a config, too.

    Raises:
        UnknownNameError: No gate has that name; the hint suggests the nearest.
        ConfigurationError: A parameter is unknown or out of its range.
        ModelLoadError: A trained gate cannot be read, or was trained with other prompts.
    """
    if name.startswith(("http://", "https://")):
        name = f"remote:{name}"
    kind, _, argument = name.partition(":")
    if kind not in _GATES and (name in shipped() or "/" in name or os.path.isdir(find_folder(name))):
        return _load_saved(name, parameters)
    found = gate_class(kind)
    if argument:
        parameters = {**found.parse_argument(argument), **parameters}
    for field in found.gate_fields:
        value = parameters.get(field)
        if isinstance(value, str):
            parameters[field] = make_gate(value)
        elif value is not None:
            parameters[field] = getattr(value, "gate", value)  # what `load_gate` returned holds a gate
    return gate_from_config({**parameters, "gate": kind})


def loadable(folder: str | Path) -> str:
    """Return a folder as `make_gate` takes it: one that is named like a gate, such as ``tuned``, needs a slash.

    >>> loadable("tuned"), loadable("mine"), loadable("gates/ik")
    ('./tuned', 'mine', 'gates/ik')
    """
    name = str(folder)
    return f"./{name}" if name.partition(":")[0] in _GATES else name


def gate_from_config(config: Mapping[str, Any]) -> Gate:
    """Make a gate from what `Gate.config` returned; gates inside of it are configs, too."""
    parameters = dict(config)
    found = gate_class(str(parameters.pop("gate", "")))
    for field in found.gate_fields:
        if isinstance(parameters.get(field), Mapping):
            parameters[field] = gate_from_config(parameters[field])
    return found.from_parameters(parameters)


def saved_gate(gate: Gate, provenance: Mapping[str, Any]) -> SavedGate:
    """Return a gate as `rgate_integrations.gates.folder.save_gate` takes it: its name and parameters.

    Args:
        gate: The gate, such as a calibrated one.
        provenance: How it came about: data, policy, guarantee; JSON values.
    """
    parameters = gate.config()
    return SavedGate(
        method=parameters.pop("gate"),
        base_model=parameters.pop("proxy"),
        threshold=parameters.pop("threshold"),
        prompts=prompt_hashes(gate),
        parameters=parameters,
        provenance=dict(provenance),
    )


def _load_saved(name: str, parameters: Mapping[str, Any]) -> Gate:
    """Load a saved gate: one with weights of its own, a calibrated one, or one with an adapter."""
    folder = saved_folder(name)
    saved = read_gate(folder)
    try:
        if issubclass(gate_class(saved.method), TrainedGate):
            return make_gate(saved.method, artifact=name, trained=saved, **parameters)
        config = {"threshold": saved.threshold, "proxy": saved.base_model, **saved.parameters, **parameters}
        if os.path.isfile(folder / ADAPTER):
            config["adapter"] = str(folder)
        # A folder may be anybody's. Its gates are configs in it: names would lead to folders that name others again.
        gate = gate_from_config({**config, "gate": saved.method})
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        if parameters:  # then the error may be about one of these
            raise
        raise unreadable(folder, error) from error
    for spec in expand_specs([ScoreSpec(gate)]):
        if isinstance(spec, ScoreSpec) and spec.gate.name == "remote":
            # It may be anybody's, and would send them all questions.
            raise ModelLoadError("A saved gate may not ask a server.", hint="Do not use it.")
    check_prompts(gate, saved, name)
    return gate
