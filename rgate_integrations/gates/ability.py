"""How much an LLM knows, as a number with its uncertainty: looked up or guessed by name, or measured."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass

from rgate_integrations.decision import Finite
from rgate_integrations.errors import ConfigurationError, ModelLoadError
from rgate_integrations.gates.llm_names import ModelName, parse_name, sizes_left_out
from rgate_integrations.runtime.files import (
    SHIPPED,
    find_folder,
    json_text,
    parse_json,
    read_file,
    write_folder,
)
from rgate_integrations.runtime.records import first_problem

ABILITY = "ability.json"
"""Name of the file that holds a measured ability, in its folder."""

REFERENCE_LLM = "Llama-3.1-8B-Instruct"
"""The LLM of ability 0, which is also assumed for an LLM whose name says nothing, not even a size."""

_FORMAT = 1
_DEFAULT_SIZE = 8.0
# Roughly how many logits a doubling of the parameters is worth, for sizes below those in the table and for LLMs that
# are not in it.
_LOGITS_PER_DOUBLING = 0.6
# Standard deviation of a guess based on LLMs of the same tier, of the same version, or of the same family.
_SIBLING_SD, _VERSION_SD, _FAMILY_SD = 0.8, 1.0, 1.5
_NEXT_VERSIONS = 2  # how far a successor's version may be above the latest known one
_SMALL = frozenset(("air", "edge", "flash", "haiku", "lite", "micro", "mini", "nano", "small", "tiny"))
# Words for smaller LLMs that were trained on another LLM's answers.
_SMALL |= {"alpaca", "clone", "distill", "distilled"}
_FAST = frozenset(("fast", "instant", "spark", "turbo"))


@dataclass(frozen=True)
class Ability:
    """How much an LLM knows, as in item response theory.

    Attributes:
        llm: Name of the LLM.
        theta: Ability in logits; 0 is that of Llama-3.1-8B-Instruct, and more is better.
        sd: Standard deviation of ``theta``, in logits, at least 0.
        source: Where the value comes from, as a phrase, such as "guessed from 7 billion parameters".
    """

    llm: str
    theta: Finite
    sd: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    source: str


_DEFAULT = Ability(REFERENCE_LLM, 0.0, 1.0, "nothing is known about the LLM")


@dataclass(frozen=True)
class AbilityEntry:
    """An LLM in a table of abilities, with its parsed name; see `build_table`."""

    name: ModelName
    ability: Ability


def resolve_ability(name: str, *, folders: bool = True) -> tuple[Ability, str]:
    """Return the ability of an LLM, and a warning if nothing is known about its name (otherwise empty).

    The first of these that applies is used. Abilities from the table are lowered by one standard deviation.

    1. a folder made by ``rgate ability``: the measured ability;
    2. the shipped table: the entry whose name has the same words, if necessary ignoring words for how long the LLM
       thinks. If several entries match, the least able counts, among those with the same date if there are any;
    3. the LLM's family, if it is in the table. A guess is never above the most able LLM that it is based on. If a
       name has two families, as a distilled LLM's may, the lower guess counts.

       - A name with a size: interpolated between the sizes of its closest relatives in the table. If none has a size,
         the least able LLM of the family, or what the size alone suggests (4.) if that is lower.
       - A name without a size: its latest predecessor of the same tier, such as ``opus``, unless the version is far
         above all known ones, or the name has no tier and a less able LLM of its version is known.
       - A name with neither: the least able LLM of its version, or of the family if too little is known about the
         version or the name suggests a smaller LLM (``gpt-5-lite``); then at most 0 if ``name`` may be weaker;
    4. a size alone, which never gives more than the default, with a warning;
    5. the default, ability 0, with a warning unless the name is empty.

    Args:
        name: The name as a provider, a server, a file or a framework writes it; may be empty.
        folders: Whether the name may be a folder. A name from a server may not: it could be another machine's path.

    Raises:
        ConfigurationError: The name may be a folder and starts with ``./``, ``../`` or ``~``, but does not exist, or
            has neither a measurement nor the name of a known LLM.
        ModelLoadError: The folder's measurement cannot be read.
    """
    if not name.strip():
        return _DEFAULT, ""
    is_path = folders and name.startswith(("./", "../", ".\\", "..\\", "~"))
    if is_path and not os.path.exists(find_folder(name)):  # a mistyped folder, not the name of an LLM
        raise _no_ability(f"The folder {name!r} does not exist.")
    measured = read_measured(name) if folders else None
    if measured is not None:
        return measured, ""
    model = parse_name(name)
    # The same LLM, perhaps with another date or as another server spells it.
    same = _same_llm(model)
    if same:
        return _least_able([entry for entry in same if _same_date(entry.name.date, model.date)] or same), ""
    guesses = []
    for family in model.families:
        members = [entry for entry in ability_table() if family in entry.name.families]
        if members:
            guesses.append(_guess_by_family(model, family, members))
    if guesses:
        return replace(min(guesses, key=lambda guess: guess.theta), llm=name), ""
    guess, basis = _DEFAULT, f"as {REFERENCE_LLM}"
    if is_path and model.size is None:  # the folder of a profile, for example
        raise _no_ability(f"The folder {name!r} has no measured ability, and names no known LLM.")
    if model.size is not None:
        parameters = f"{model.size:g} billion parameters"
        guess = Ability(name, _guess_by_size(model.size), _FAMILY_SD, f"guessed from {parameters}")
        basis = f"by its size, {parameters}"
    return guess, (
        f"Nothing is known about the LLM {name!r}, so it is judged {basis}. Pass the name of its model as llm_name=, "
        "or measure it in a minute: rgate ability."
    )


def _no_ability(message: str) -> ConfigurationError:
    return ConfigurationError(message, hint="Use the name of an LLM, or a folder made by `rgate ability`.")


def least_capable(names: Iterable[str]) -> str:
    """Return the name of the least capable LLM; the first one if several are equal. Needs at least one name."""
    return min(names, key=lambda name: resolve_ability(name, folders=False)[0].theta)


@cache
def ability_table() -> tuple[AbilityEntry, ...]:
    """Return the shipped table of LLMs' abilities, as `build_table` parses it; cached."""
    return build_table((SHIPPED / "abilities.json").read_text(encoding="utf-8"))


def build_table(text: str) -> tuple[AbilityEntry, ...]:
    """Return the entries of a table, with abilities lowered by one standard deviation.

    An LLM that has a name with a size and one without, such as phi-4-14b and phi-4, appears twice.

    Args:
        text: A JSON object that maps the name of each LLM to its ``theta``, ``sd`` and ``source``; see `Ability`.
    """
    # Abilities by name tend to be too high. With one standard deviation less, strong LLMs answer 76 % of the skipped
    # questions correctly, not 72 % (benchmarks/abilities.py).
    entries = [
        AbilityEntry(parse_name(name), Ability(name, **facts | {"theta": facts["theta"] - facts["sd"]}))
        for name, facts in parse_json(text).items()
    ]
    # "phi-4-14b" is looked up like any name with a size, so the table needs it in addition to "phi-4".
    for sized, usual in sizes_left_out():
        words = parse_name(usual).words
        entries += [AbilityEntry(sized, entry.ability) for entry in entries if entry.name.words == words]
    return tuple(entries)


def _same_date(ours: str, theirs: str) -> bool:
    """Return whether two dates, as digits, are the same; one may lack the year. Two empty ones are the same."""
    return ours == theirs or bool(ours and theirs and (ours.endswith(theirs) or theirs.endswith(ours)))


def _least_able(entries: Sequence[AbilityEntry]) -> Ability:
    return min(entries, key=lambda entry: entry.ability.theta).ability


def _same_llm(model: ModelName) -> list[AbilityEntry]:
    """Return the table's entries for an LLM, by its name or else by one that differs only in thinking effort.

    Return an empty list if there are none.
    """
    table = ability_table()
    for words in (model.words, model.without_effort, model.without_any_effort):
        exact = [entry for entry in table if entry.name.words == words]
        entries = exact or [entry for entry in table if entry.name.without_effort == words]
        if entries:
            return entries
    return []


def _guess_by_family(model: ModelName, family: str, members: Sequence[AbilityEntry]) -> Ability:
    """Return an ability guessed from ``members``, the table's entries of a family, of which there is at least one."""
    version, lowest = model.families[family], _least_able(members)
    of_version = [entry for entry in members if version and entry.name.families[family] == version]
    if model.size is None:
        return _guess_by_tier(model, family, members, of_version)
    siblings = [entry for entry in members if entry.name.unsized == model.unsized]
    # Closest relatives with a known size first, because more distant ones are less certain.
    for some, sd in ((siblings, _SIBLING_SD), (of_version, _VERSION_SD), (members, _FAMILY_SD)):
        sized = [entry for entry in some if entry.name.size is not None]
        if sized:
            theta, nearest = _interpolate(model.size, sized)
            return Ability(
                family, theta, sd, f"guessed from its size and others of its family, such as {nearest.llm}"
            )
    theta = min(lowest.theta, _guess_by_size(model.size))
    return Ability(
        family, theta, _FAMILY_SD, f"guessed from its size and the weakest known of its family, {lowest.llm}"
    )


def _guess_by_tier(
    model: ModelName, family: str, members: Sequence[AbilityEntry], of_version: Sequence[AbilityEntry]
) -> Ability:
    """Return the ability of a name without a size, guessed from ``members``, the table's entries of its family.

    ``of_version`` lists the members with the name's version; it may be empty. For the order of the guesses, see
    `resolve_ability`.
    """
    tier, number = model.tier(family), model.version(family)
    numbers = [entry.name.version(family) or 0.0 for entry in members]
    unknown = tier.difference(*(entry.name.tier(family) for entry in members))
    # A number far above all others is not a version: "gpt-40".
    if number is not None and number <= max(numbers) + _NEXT_VERSIONS:
        perhaps_effort = model.words - model.without_any_effort
        predecessors = _predecessors(tier, number, family, members) or _predecessors(
            tier - perhaps_effort, number, family, members
        )
        # A name without a tier may belong to the smallest tier of its version.
        rivals = [] if tier else of_version
        if predecessors and _least_able(predecessors) == _least_able([*predecessors, *rivals]):
            known = _least_able(predecessors)
            return Ability(
                family,
                known.theta,
                math.hypot(known.sd, _SIBLING_SD),
                f"its latest known predecessor, {known.llm}",
            )
    # "gpt-bot-5" has an unknown word, and the number may be the bot's, so the version says nothing.
    if unknown and family not in model.numbered:
        of_version = []
    elif number is not None and _is_one_tier(of_version, family):
        # Only one tier of this version is known, perhaps not its smallest, so all 5.x LLMs are considered for 5.5.
        of_version = [
            entry for entry, other in zip(members, numbers, strict=True) if int(other) == int(number)
        ]
    # A word for a small or fast LLM that no known LLM of this version has: this LLM may be smaller than all of them.
    smaller = tier.difference(*(entry.name.tier(family) for entry in of_version)) & (_SMALL | _FAST)
    if of_version and not _is_one_tier(of_version, family) and not smaller:
        known = _least_able(of_version)
        return Ability(family, known.theta, _VERSION_SD, f"the weakest known of its version, {known.llm}")
    # An unknown small tier or an older version may be weaker than all known LLMs, so its ability is at most 0.
    known = _least_able(members)
    weaker = unknown & _SMALL or (unknown and (number is None or _is_one_tier(members, family)))
    if known.theta > 0 and (weaker or (number is not None and number < min(numbers))):
        return Ability(family, 0.0, _FAMILY_SD, f"{REFERENCE_LLM}, since it may be weaker than {known.llm}")
    return Ability(family, known.theta, _FAMILY_SD, f"the weakest known of its family, {known.llm}")


def _predecessors(
    tier: frozenset[str], number: float, family: str, members: Sequence[AbilityEntry]
) -> list[AbilityEntry]:
    """Return the LLMs of a tier, without a size in their names, whose version is the latest one up to ``number``."""
    versions = [
        (entry.name.version(family) or 0.0, entry)
        for entry in members
        if entry.name.size is None and entry.name.tier(family) == tier
    ]
    latest = max((version for version, _ in versions if version <= number), default=None)
    return [entry for version, entry in versions if version == latest]


def _is_one_tier(entries: Sequence[AbilityEntry], family: str) -> bool:
    return len({entry.name.tier(family) for entry in entries}) == 1


def _guess_by_size(size: float) -> float:
    """Return an ability guessed from the size alone, in billions of parameters; at most 0, the default ability."""
    return min(0.0, _LOGITS_PER_DOUBLING * math.log2(size / _DEFAULT_SIZE))


def _interpolate(size: float, entries: Sequence[AbilityEntry]) -> tuple[float, Ability]:
    """Return the ability at a size, in billions of parameters, and the LLM of the nearest size.

    Every entry must have a size. The ability is interpolated between their sizes. Beyond the largest, it stays the
    same; below the smallest, it decreases with the size.
    """
    # By the logarithm of the size, because each doubling is worth about the same; for equal sizes, the least able.
    weakest_at: dict[float, Ability] = {}
    for entry in sorted(entries, key=lambda entry: entry.ability.theta, reverse=True):
        weakest_at[math.log2(entry.name.size or 1.0)] = entry.ability
    sizes, at = sorted(weakest_at), math.log2(size)
    theta = float(np.interp(at, sizes, [weakest_at[known].theta for known in sizes]))
    nearest = min(sizes, key=lambda known: abs(known - at))
    return theta + _LOGITS_PER_DOUBLING * min(at - sizes[0], 0.0), weakest_at[nearest]


def save_measured(ability: Ability, folder: str | Path) -> Path:
    """Write an ability to a folder atomically, and return the folder.

    Raises:
        ConfigurationError: The path cannot name a folder, or is a file, or a folder with files but no ability.
        WriteError: The folder could not be written.
    """
    return write_folder(folder, {ABILITY: json_text({"format": _FORMAT, **asdict(ability)})})


def read_measured(folder: str | Path) -> Ability | None:
    """Return the ability in a folder; None if the folder does not exist or has no ability.

    Raises:
        ModelLoadError: The ability cannot be read.
    """
    path = find_folder(folder) / ABILITY
    if not os.path.exists(path):
        return None
    try:
        facts = dict(parse_json(read_file(path)))
        if (version := facts.pop("format", None)) != _FORMAT:
            raise ValueError(f"its format is {version!r}, not {_FORMAT!r}")
        return Ability(**facts)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ModelLoadError(
            f"The ability in {str(folder)!r} cannot be read: {first_problem(error)}.",
            hint="Check the file's permissions, or measure it again with `rgate ability`.",
        ) from error
