"""Gates by name: from a name, a folder or a config to a gate, and back from JSON."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rgate_integrations.errors import ModelLoadError, RGateError, unknown_name
from rgate_integrations.gates.artifacts.folder import ADAPTER, read_gate, saved_folder, shipped, unreadable
from rgate_integrations.gates.artifacts.gate_file import SavedGate
from rgate_integrations.gates.base import Gate, GateInfo, configuration_error
from rgate_integrations.gates.trained import TrainedGate, check_prompts, prompt_hashes
from rgate_integrations.runtime.files import existing_folder

_GATES = {
    "adapt": "papers.adapt:AdaptGate",
    "answer": "answer:AnswerGate",
    "boundary": "papers.boundary:BoundaryGate",
    "calibrated": "calibrated:CalibratedGate",
    "constant": "constant:ConstantGate",
    "heads": "heads:HeadsGate",
    "ik": "papers.ik:IKGate",
    "neighbours": "papers.neighbours:NeighboursGate",
    "perplexity": "papers.token_probability:PerplexityGate",
    "popularity": "papers.popularity:PopularityGate",
    "probe": "probe:ProbeGate",
    "prompt": "papers.verdict_gate:PromptGate",
    "remote": "remote:RemoteGate",
    "self_eval": "papers.verdict_gate:SelfEvalGate",
    "slimplm": "papers.slimplm:SlimPLMGate",
    "token_probability": "papers.token_probability:TokenProbabilityGate",
    "tuned": "tuned:TunedGate",
}
_MOST_FOLDERS = 16
_OPENED: ContextVar[list[str] | None] = ContextVar("_OPENED", default=None)
"""The folders that are opened for one gate: each may name others, and those others again."""


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
    if kind == "remote" and _OPENED.get():
        # It may be anybody's, and would send them all questions.
        raise ModelLoadError("A saved gate may not ask a server.", hint="Do not use it.")
    if kind not in _GATES and (name in shipped() or "/" in name or os.path.isdir(existing_folder(name))):
        return _saved(name, parameters)
    found = gate_class(kind)
    for field in found.gate_fields:
        if field in parameters:
            parameters[field] = _as_gate(parameters[field])
    try:
        if argument:
            return found.from_argument(argument, make_gate, **parameters)
        return found.model_validate(parameters)
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
    parameters = {name: value for name, value in config.items() if name != "gate"}
    return make_gate(str(config.get("gate", "")), **parameters)


def saved_gate(gate: Gate, provenance: Mapping[str, Any]) -> SavedGate:
    """Return a gate as `rgate_integrations.gates.artifacts.folder.save_gate` takes it: its name and parameters.

    Args:
        gate: The gate, such as a calibrated one.
        provenance: How it came about: data, policy, guarantee; JSON values.
    """
    parameters = {
        name: value for name, value in gate.config().items() if name not in ("gate", "threshold", "proxy")
    }
    return SavedGate(
        method=gate.name,
        base_model=gate.proxy,
        threshold=gate.threshold,
        prompts=prompt_hashes(gate),
        parameters=parameters,
        provenance=dict(provenance),
    )


def _as_gate(value: Any) -> Any:
    if isinstance(value, str):
        return make_gate(value)
    if isinstance(value, Mapping):
        return gate_from_config(value)
    return getattr(value, "gate", value)  # what `load_gate` returned holds a gate


def _saved(name: str, parameters: Mapping[str, Any]) -> Gate:
    """Load a saved gate: one with weights of its own, a calibrated one, or one with an adapter."""
    opened = _OPENED.get() or []
    if len(opened) >= _MOST_FOLDERS:
        raise ModelLoadError(f"The gate in {opened[0]!r} names too many others.", hint="Do not use it.")
    folder = saved_folder(name)
    token = _OPENED.set(opened)
    opened.append(name)
    try:
        return _gate_in(folder, name, parameters)
    except RGateError:
        raise
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        # Whatever its parameters hold: they are those of any gate, so their types are not known before.
        raise unreadable(folder, error) from error
    finally:
        _OPENED.reset(token)


def _gate_in(folder: Path, name: str, parameters: Mapping[str, Any]) -> Gate:
    saved = read_gate(folder)
    found = gate_class(saved.method)
    if issubclass(found, TrainedGate):
        return make_gate(saved.method, artifact=name, trained=saved, **parameters)
    given = {"threshold": saved.threshold, "proxy": saved.base_model, **saved.parameters, **parameters}
    if os.path.isfile(folder / ADAPTER):
        given["adapter"] = str(folder)
    gate = make_gate(saved.method, **given)
    check_prompts(gate, saved, name)
    return gate
