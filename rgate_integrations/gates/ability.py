"""How much an LLM knows: one number and its uncertainty, and the folders that ``rgate ability --out`` writes."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from rgate_integrations.errors import ModelLoadError
from rgate_integrations.runtime.files import existing_folder, json_text, parse_json, write_folder


@dataclass(frozen=True)
class Ability:
    """How much an LLM knows, as in item response theory.

    Attributes:
        llm: Its name.
        theta: In logits; Llama-3.1-8B-Instruct has 0, and more is better.
        sd: Standard deviation of ``theta``: how unsure it is.
        source: How it is known, to follow "by".
    """

    llm: str
    theta: Annotated[float, Field(allow_inf_nan=False)]
    sd: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    source: str


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
