"""What ``rgate evaluate`` and ``rgate calibrate`` share: their options, and the gate that these name."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rgate_integrations.errors import ConfigurationError

if TYPE_CHECKING:
    from rgate_integrations.engine.decision_engine import DecisionEngine

Data = Annotated[list[Path], typer.Option("--data", help="Paired JSONL; several may follow.")]
More = Annotated[list[Path] | None, typer.Argument(metavar="[FILE]...", help="More files of --data.")]
DraftOf = Annotated[
    str,
    typer.Option(
        "--draft",
        help="proxy: its own; recorded: closed_book_text, the LLM's own words; none: question only.",
    ),
]


def gate_for(name: str, draft: str, proxy: str | None) -> DecisionEngine:
    """Load a gate to be evaluated; the shipped default is the one for the kind of draft.

    Raises:
        ConfigurationError: The gate reads a draft, and there is to be none.
    """
    from rgate_integrations.engine.loading import DEFAULT_GATE, DEFAULT_GATES, load_gate
    from rgate_integrations.evidence.base import expand_specs
    from rgate_integrations.evidence.draft import DraftSpec
    from rgate_integrations.training.drafts import valid_draft_kind

    valid_draft_kind(draft)
    if name == DEFAULT_GATE or (name == "default" and draft != "proxy"):
        name = DEFAULT_GATES[draft]
    gate = load_gate(name, proxy=proxy)
    if draft != "none":
        return gate
    if name == "ik":
        return gate.with_options(tokens=0)
    if any(isinstance(spec, DraftSpec) for spec in expand_specs(gate.gate.specs)):
        raise ConfigurationError(
            f"The gate {name!r} reads a draft.",
            hint=f"--draft proxy or recorded; or --gate {DEFAULT_GATE} or ik.",
        )
    return gate


def numbers(text: str, names: tuple[str, ...], *, needed: tuple[str, ...] = ()) -> dict[str, float]:
    """Read ``name=number,...``; a number may end in ``ms``.

    Raises:
        ConfigurationError: A part is something else, a name is not known, or a needed one is missing.
    """
    found: dict[str, float] = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        try:
            found[name.strip()] = float(value.strip().removesuffix("ms"))
        except ValueError as error:
            raise ConfigurationError(f"{part!r} is not name=number.") from error
    hint = f"Names: {', '.join(names)}."
    unknown = sorted(set(found) - set(names))
    if unknown:
        raise ConfigurationError(f"{unknown[0]!r} is not known.", hint=hint)
    missing = [name for name in needed if name not in found]
    if missing:
        raise ConfigurationError(f"{missing[0]}=… is missing.", hint=hint)
    return found
