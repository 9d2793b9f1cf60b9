"""A linear probe on the proxy's hidden states: one weight vector a layer, and one forward pass."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt
from pydantic import PrivateAttr, model_validator

from rgate_integrations.errors import ModelLoadError
from rgate_integrations.evidence import DraftSpec, Evidence, EvidenceSpec, HiddenSpec
from rgate_integrations.gates.base import Gate, GateInfo, Score
from rgate_integrations.gates.collector import Collector
from rgate_integrations.saved import ProbeArtifact, TrainedOn, check_fingerprint, read_probe

Floats = npt.NDArray[np.float32]


class ProbeGate(Gate):
    """A trained linear probe on pooled hidden states of the middle layers (compare Azaria & Mitchell 2023).

    P(known) is ``sigmoid(slope * (w · h + b) + intercept)``: h are the pooled states of the artefact's blocks,
    slope and intercept its calibration. Trained by ``rgate train --gate probe``; the shipped gates are probes.

    A probe of the question alone may come first (early exit): what it finds clearly known needs no draft. It is
    not asked where a draft is given.

    Attributes:
        artifact: Folder of a trained probe, or the name of a shipped one.
        early_exit: Whether clearly known questions are decided without a draft, if the artefact can.
        threshold: The artefact's, unless given.
        proxy: The model it was trained on, unless given: the same model may have another name or folder here.
    """

    info: ClassVar[GateInfo] = GateInfo(
        "probe",
        "linear probe (Azaria & Mitchell 2023)",
        "hidden states of question and draft",
        "yes",
        "draft",
    )

    artifact: str
    early_exit: bool = True

    _trained: ProbeArtifact = PrivateAttr()

    @model_validator(mode="before")
    @classmethod
    def _from_artifact(cls, values: Any) -> Any:
        if isinstance(values, dict) and isinstance(values.get("artifact"), str):
            trained = read_probe(values["artifact"])
            return {"threshold": trained.threshold, "proxy": trained.base_model, **values}
        return values

    @classmethod
    def from_argument(cls, argument: str, **options: Any) -> Self:
        """Read ``probe:FOLDER``."""
        return cls(artifact=argument, **options)

    def model_post_init(self, context: Any) -> None:
        """Read the trained probe, once: a gate does not change while it is used."""
        self._trained = read_probe(self.artifact)

    @property
    def trained(self) -> ProbeArtifact:
        """The trained probe."""
        return self._trained

    @property
    def _draft_spec(self) -> DraftSpec | None:
        trained = self.trained
        return DraftSpec(trained.tokens, trained.source) if trained.tokens else None

    @property
    def _hidden(self) -> HiddenSpec:
        return HiddenSpec(self.trained.layers, self._draft_spec)

    @property
    def specs(self) -> tuple[EvidenceSpec, ...]:
        """The pooled hidden states, and the draft they are read over."""
        return (*((self._draft_spec,) if self._draft_spec else ()), self._hidden)

    @property
    def all_specs(self) -> tuple[EvidenceSpec, ...]:
        """What both looks need."""
        return (*((self._first_look,) if self._first_look else ()), *self.specs)

    @property
    def _first_look(self) -> HiddenSpec | None:
        trained = self.trained
        return HiddenSpec(trained.question_layers) if self.early_exit and trained.early_exit else None

    def scores(self, collector: Collector, indices: Sequence[int]) -> dict[int, Score | Exception]:
        """Look at the questions alone, then draft for those that are not clearly known."""
        trained = self.trained
        if trained.fingerprint and indices:
            proxy = self.get_proxy()
            trained_on = TrainedOn(trained.base_model, trained.fingerprint)
            check_fingerprint(self.artifact, trained_on, proxy.name, getattr(proxy, "fingerprint", ""))
        first, early = self._first_look, trained.early_exit
        if first is None or early is None:
            return super().scores(collector, indices)
        found: dict[int, Score | Exception] = {}
        undrafted = [i for i in indices if collector.inputs[i].draft is None]
        for i, evidence in collector.evidence([first], undrafted).items():
            if isinstance(evidence, Evidence):
                states = self._fitting(evidence.hidden(first), early.weight)
                p = _sigmoid(float(np.sum(early.weight * states)) + early.bias)
                if p >= max(early.p_known, self.threshold):
                    found[i] = self._valid(Score(p, self._reason("question", p), cost=evidence.cost))
        for i, score in super().scores(collector, [i for i in indices if i not in found]).items():
            cost = collector.cost(self.all_specs, i)
            found[i] = replace(score, cost=cost) if isinstance(score, Score) else score
        return found

    def score(self, evidence: Evidence) -> Score:
        """Score by the calibrated probe.

        Raises:
            ModelLoadError: The proxy's hidden size is not that of the model the probe was trained on.
        """
        trained = self.trained
        states = self._fitting(evidence.hidden(self._hidden), trained.weight)
        p = _sigmoid(
            trained.slope * (float(np.sum(trained.weight * states)) + trained.bias) + trained.intercept
        )
        draft = evidence.draft(self._draft_spec) if self._draft_spec else None
        return Score(p, self._reason("question and draft" if draft is not None else "question", p), draft)

    def _reason(self, read: str, p: float) -> str:
        return f"A probe trained on {self.trained.llm} reads {read}: known with probability {p:.2f}."

    def _fitting(self, states: Floats, weight: Floats) -> Floats:
        if states.shape != weight.shape:
            trained = self.trained
            raise ModelLoadError(
                f"The probe {self.artifact!r} was trained on {trained.base_model!r} (states of shape "
                f"{weight.shape}), but {self.proxy!r} gives {states.shape}.",
                hint=f"Load it with proxy={trained.base_model!r}, or train a probe for this model.",
            )
        return states


def _sigmoid(logit: float) -> float:
    return 1 / (1 + math.exp(-min(max(logit, -500.0), 500.0)))
