"""Folders of measured abilities: what ``rgate ability --out`` writes, and ``llm_name=`` takes in place of a name."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path

from rgate_integrations.errors import ModelLoadError
from rgate_integrations.gates.ability import Ability
from rgate_integrations.runtime.files import existing_folder, json_text, parse_json, write_folder

ABILITY = "ability.json"
_FORMAT = 1


def save_measured(ability: Ability, folder: str | Path) -> Path:
    """Write an ability to a folder, which appears whole or not at all."""
    facts = {"format": _FORMAT, **asdict(ability)}
    return write_folder(folder, {ABILITY: json_text(facts)})


def read_measured(folder: str | Path) -> Ability | None:
    """Return the ability in a folder; None where there is no folder of that name, or no ability in it.

    Raises:
        ModelLoadError: It cannot be read.
    """
    path = existing_folder(folder) / ABILITY
    if not os.path.isfile(path):
        return None
    try:
        facts = dict(parse_json(path.read_bytes()))
        version = facts.pop("format")
        if version != _FORMAT:
            raise ValueError(f"its format is {version}")
        return Ability(**facts)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ModelLoadError(
            f"The ability in {str(folder)!r} cannot be read: {error}.",
            hint="Measure it again: rgate ability.",
        ) from error
