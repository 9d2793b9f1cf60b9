"""The model of P(helps): what a search found becomes P(the LLM answers rightly with these passages)."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, model_validator

from rgate_integrations.decision import Frozen, Probability
from rgate_integrations.errors import ModelLoadError
from rgate_integrations.runtime.arrays import Float64Array
from rgate_integrations.runtime.files import existing_folder, write_folder

DEFAULT = "look-first"
"""Name of the shipped model."""

_FILE = "helps.json"
_Finite = Annotated[float, Field(allow_inf_nan=False)]


class PassageUtilityModel(Frozen):
    """P(helps) from features of a search and P(known), by three things that can each be measured.

    A logistic model of the features says whether the passages hold the answer. If they do, the LLM reads it there
    with the probability ``reading``. If not, it answers from what it knows, and loses a share of that to them::

        p_helps = p_contains_answer * reading + (1 - p_contains_answer) * (1 - distraction) * p_known

    Attributes:
        format: Of the file.
        features: Names of the features, in order.
        weights: One a feature.
        bias: Added; the sum is the logit of P(the passages hold the answer).
        reading: P(right) in [0, 1] where the passages hold the answer.
        distraction: Share in [0, 1] of its own knowledge that an LLM loses to passages that do not.
        provenance: Where it comes from; JSON values.
    """

    format: Literal[1] = 1
    features: tuple[str, ...]
    weights: tuple[_Finite, ...]
    bias: _Finite
    reading: Probability
    distraction: Probability
    provenance: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _fits(self) -> PassageUtilityModel:
        if len(self.features) != len(self.weights):
            raise ValueError(f"{len(self.weights)} weights do not match {len(self.features)} features.")
        return self

    def p_contains_answer(self, features: Float64Array) -> Float64Array:
        """Return P(the passages hold the answer), shape (n,).

        Args:
            features: Shape (n, features).
        """
        logits = features @ np.array(self.weights) + self.bias
        found: Float64Array = 1 / (1 + np.exp(-np.clip(logits, -500, 500)))
        return found

    def p_helps(self, p_contains_answer: Float64Array, p_known: Float64Array) -> Float64Array:
        """Return P(the LLM answers rightly with the passages), shape (n,).

        Args:
            p_contains_answer: What `p_contains_answer` returned.
            p_known: P(it answers rightly without them), shape (n,).
        """
        found: Float64Array = (
            p_contains_answer * self.reading + (1 - p_contains_answer) * (1 - self.distraction) * p_known
        )
        return found


def save_utility_model(model: PassageUtilityModel, folder: str | Path, card: str) -> Path:
    """Save a model; the folder appears whole or not at all, and replaces one that was there.

    Args:
        model: The model.
        folder: Where to.
        card: What a reader should know about it, in Markdown.
    """
    return write_folder(folder, {_FILE: model.model_dump_json(indent=1), "README.md": card})


@lru_cache(maxsize=8)
def read_utility_model(name: str | Path = DEFAULT) -> PassageUtilityModel:
    """Read a saved model, once in a process.

    Args:
        name: A local folder, or the name of the shipped one.

    Raises:
        ModelLoadError: There is none, or its file cannot be read or is of a newer version.
    """
    shipped = Path(__file__).parents[2] / "weights" / name
    folder = shipped if name == DEFAULT else existing_folder(name)
    try:
        return PassageUtilityModel.model_validate_json((folder / _FILE).read_bytes())
    except (OSError, ValueError) as error:
        raise ModelLoadError(
            f"The model of P(helps) in {str(name)!r} cannot be read: {error}",
            hint=f"Leave it out: the shipped one is {DEFAULT!r}.",
        ) from error
