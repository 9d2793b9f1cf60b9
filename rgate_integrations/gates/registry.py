"""Makes gates from a name, folder, URL or config."""

from __future__ import annotations

import os
import pkgutil
from collections.abc import Mapping
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

from rgate_integrations.errors import ModelLoadError, UnknownNameError, unknown_name
from rgate_integrations.gates.ability import resolve_ability
from rgate_integrations.gates.artifacts import SavedGate
from rgate_integrations.gates.base import Gate, GateInfo, ScoreSpec
from rgate_integrations.gates.evidence.base import expand_specs
from rgate_integrations.gates.folder import (
    ADAPTER,
    has_gate,
    map_folders,
    read_gate,
    read_shipped,
    saved_folder,
    shipped,
    unreadable,
)
from rgate_integrations.gates.trained import TrainedGate, check_prompts, prompt_hashes
from rgate_integrations.runtime.files import SHIPPED, find_folder, read_folder

_GATES = {
    "adapt": "papers.verdicts:AdaptGate",
    "answer": "composite:AnswerGate",
    "boundary": "papers.verdicts:BoundaryGate",
    "calibrated": "composite:CalibratedGate",
    "constant": "papers.baselines:ConstantGate",
    "heads": "heads:HeadsGate",
    "ik": "papers.verdicts:IKGate",
    "neighbours": "papers.baselines:NeighboursGate",
    "popularity": "papers.baselines:PopularityGate",
    "probe": "trained:ProbeGate",
    "prompt": "papers.verdicts:PromptGate",
    "remote": "remote:RemoteGate",
    "self_eval": "papers.verdicts:SelfEvalGate",
    "slimplm": "papers.verdicts:SlimPLMGate",
    "token_probability": "papers.baselines:TokenProbabilityGate",
    "tuned": "composite:TunedGate",
}


def gate_class(name: str) -> type[Gate]:
    """Return the class of a kind of gate, such as `ProbeGate` for ``"probe"``.

    Raises:
        UnknownNameError: No kind of gate has that name; the hint suggests names.
    """
    if name not in _GATES:
        # `make_gate` takes the names of shipped gates, but a config does not.
        raise (
            unknown_name("kind of gate", name, _GATES)
            if name in shipped()
            else unknown_name("gate", name, [*_GATES, *shipped()])
        )
    return pkgutil.resolve_name(f"{__package__}.{_GATES[name]}")


def list_gates() -> list[GateInfo]:
    """Return a description of each kind of gate that has a name, sorted by name; loads no model."""
    return [gate_class(name).info for name in sorted(_GATES)]


def make_gate(name: str, **parameters: Any) -> Gate:
    """Make a gate from its name.

    Args:
        name: A gate's name, with an argument after a colon where it takes one (``"constant:random:0.5"``); the name
            of a shipped gate; the folder or Hub id of a saved one; or the URL of a decision server.
        **parameters: Its parameters. A parameter that is a gate may also be a config or, unless ``name`` is that of a
            saved gate, a name.

    Raises:
        UnknownNameError: No gate has that name; the hint suggests names.
        ConfigurationError: A parameter is unknown or invalid, the gate does not take the argument after the colon,
            or the URL is invalid.
        MissingDependencyError: A URL is given, and the extra ``openai`` is not installed.
        ModelLoadError: A saved gate or measured ability cannot be read, or a saved gate was trained with
            other prompts or asks a server.
    """
    return read_folder(name, partial(_make_gate, name, parameters))


def _make_gate(name: str, parameters: dict[str, Any]) -> Gate:
    kind, _, argument = name.partition(":")
    # A host with a port is taken for a URL, too: the error about it shows that the scheme is missing.
    # A misspelt gate with a number, such as popularty:5, is not.
    if argument.startswith("//") or (
        argument.partition("/")[0].isdigit()
        and not get_close_matches(kind, _GATES, cutoff=0.8)
        and not os.path.isdir(find_folder(name))
    ):
        kind, argument = "remote", name
    # Gates' names take precedence over a folder named, say, "tuned"; `gate_argument` puts "./" before such a folder.
    if kind not in _GATES and (name in shipped() or "/" in name or os.path.isdir(find_folder(name))):
        return _load_saved(name, parameters)
    if kind not in _GATES and name.strip() and not resolve_ability(name, folders=False)[1]:
        hint = f"If it is your LLM, pass it as llm_name=, as in load_gate(llm_name={name!r})."
        raise UnknownNameError(f"There is no gate named {name!r}.", hint=hint)
    cls = gate_class(kind)
    if argument:
        parameters = {**cls.parse_argument(argument), **parameters}
    for field in parameters.keys() & cls.gate_fields:
        value = parameters[field]
        if isinstance(value, str):
            parameters[field] = make_gate(value)
        else:
            parameters[field] = getattr(value, "gate", value)  # unwraps an engine returned by `load_gate`
    return gate_from_config({**parameters, "gate": kind})


def gate_argument(folder: str | Path) -> str:
    """Return a folder in the form that `make_gate` needs: ``./`` is added if the folder is named like a gate.

    Examples:
        >>> gate_argument("tuned"), gate_argument("mine"), gate_argument("gates/ik")
        ('./tuned', 'mine', 'gates/ik')
    """
    name = str(folder)
    return f"./{name}" if name.partition(":")[0] in _GATES else name


def gate_from_config(config: Mapping[str, Any]) -> Gate:
    """Make a gate from a `Gate.config`, in which inner gates are also configs; raises as `make_gate` does."""
    parameters = dict(config)
    cls = gate_class(str(parameters.pop("gate", "")))
    for field in cls.gate_fields:
        if isinstance(parameters.get(field), Mapping):
            parameters[field] = gate_from_config(parameters[field])
    return cls.from_parameters(parameters)


def saved_gate(gate: Gate, provenance: Mapping[str, Any]) -> SavedGate:
    """Return a gate's name and parameters in the form that `save_gate` needs.

    Args:
        gate: The gate, such as a calibrated one.
        provenance: How it was made: data, policy, guarantee; JSON values.
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


def asks_server(gate: Gate) -> bool:
    """Return whether a gate, or one inside it, asks a decision server, which a saved gate must not do."""
    return any(
        isinstance(spec, ScoreSpec) and spec.gate.name == "remote" for spec in expand_specs([ScoreSpec(gate)])
    )


def _find_beside(folder: Path, name: str) -> str:
    """Return the absolute path of a gate or adapter that is named relative to a saved gate's folder.

    If there is none at that path, return ``name``: it may be a shipped gate or a Hub id.

    Raises:
        ModelLoadError: There is none, and only a folder can have this name.
    """
    path = os.path.realpath(
        folder.resolve() / name
    )  # the folder may be a link, beside which there is nothing
    if has_gate(path):
        return path
    if name.startswith(os.pardir):
        raise ModelLoadError(
            f"The gate in {str(folder)!r} contains the gate {name!r}, which is not there.",
            hint="Copy both folders, so that one lies relative to the other as before, or make the gate again.",
        )
    return name


def _load_saved(name: str, parameters: Mapping[str, Any]) -> Gate:
    """Load a saved gate by its folder, Hub id or shipped name; raises as `make_gate` does."""
    folder = saved_folder(name)
    saved = read_shipped(folder) if folder.parent == SHIPPED else read_gate(folder)
    if folder == find_folder(name):
        # As an absolute path, because a gate that contains this one may be saved, and loaded from another folder.
        name = os.path.abspath(os.path.expanduser(name))
    try:
        if issubclass(gate_class(saved.method), TrainedGate):
            return make_gate(saved.method, artifact=name, trained=saved, **parameters)
        inside = map_folders(saved.parameters, partial(_find_beside, folder))
        config = {"threshold": saved.threshold, "proxy": saved.base_model, **inside, **parameters}
        if os.path.isfile(folder / ADAPTER):
            config["adapter"] = os.path.abspath(folder)
        # Inner gates must be configs, not names, because a folder from anywhere could refer to others endlessly.
        gate = gate_from_config({**config, "gate": saved.method})
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        if parameters:  # the error may be about one of them
            raise
        raise unreadable(folder, error) from error
    if asks_server(gate):
        # A folder from anywhere could send all questions to a stranger's server.
        raise ModelLoadError(
            f"The saved gate {name!r} would send questions to a server. No saved gate may do that: whoever made it "
            "could collect them.",
            hint="Do not use this gate. If you trust the server, pass the server's URL to load_gate instead.",
        )
    check_prompts(gate, saved, name)
    return gate
