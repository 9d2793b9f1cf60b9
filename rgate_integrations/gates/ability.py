"""How much an LLM knows: one number and its uncertainty."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass


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
