"""Options that every way of training a gate shares, and what is kept about a training."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from rgate_integrations.prompts import PromptTemplate, answering
from rgate_integrations.training.examples import LABEL, DataFile
from rgate_integrations.training.own import DraftKind


@dataclass(frozen=True)
class TrainingOptions:
    """What a gate is trained to read, how it is tested, and how it is described.

    Attributes:
        draft: ``"proxy"`` reads the proxy's own drafts, ``"recorded"`` what the LLM wrote, ``"none"`` the question
            alone.
        tokens: Draft tokens to read.
        folds: Folds of the cross-validation. None is 5 for a probe, which is calibrated on them, and 0 (no
            cross-validation) for a gate that is fine-tuned.
        seed: Seed of everything.
        label: Name of the label.
        labelled_by: What made the labels, for the model card; empty if the data came with them.
        llm: Name of the LLM whose answers were labelled.
        licence: Licence of the weights.
        system: System turn of the prompt that the answers are written under (probes only); None is that of `ANSWER`.
    """

    draft: DraftKind = "proxy"
    tokens: int = 32
    folds: int | None = None
    seed: int = 0
    label: str = LABEL
    labelled_by: str = ""
    llm: str = "the LLM of the training data"
    licence: str = "that of the training data"
    system: str | None = None

    @property
    def prompt(self) -> PromptTemplate:
        """The prompt that the question stands in, and that drafts are written for."""
        return answering(self.system)

    def provenance(
        self,
        files: Sequence[DataFile],
        *,
        folds: int,
        recipe: str,
        metrics: dict[str, Any],
        packages: Sequence[str],
    ) -> dict[str, Any]:
        """Return where a trained gate comes from, as JSON values.

        Args:
            files: What it was trained on.
            folds: Folds of the cross-validation.
            recipe: How it was trained, in words or JSON.
            metrics: What the cross-validation found.
            packages: The packages whose versions matter.
        """
        versions = {name: version(name) for name in packages}
        return {
            "label": f"{self.label} of {self.labelled_by}" if self.labelled_by else self.label,
            "seed": self.seed,
            "folds": folds,
            "recipe": recipe,
            "data": [file.as_provenance() for file in files],
            "metrics": metrics,
            "versions": versions | {"python": platform.python_version()},
            "licence": self.licence,
        }
