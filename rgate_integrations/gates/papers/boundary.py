"""The Knowledge Boundary Model (KBM), which estimates the certainty or accuracy of sampled answers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from rgate_integrations.decision import Threshold
from rgate_integrations.errors import ConfigurationError
from rgate_integrations.gates.base import GateInfo, Score, Specs
from rgate_integrations.gates.evidence.base import Evidence
from rgate_integrations.gates.evidence.model_outputs import SamplesSpec, TargetsSpec
from rgate_integrations.gates.papers.verdicts import ik_score
from rgate_integrations.gates.trained import AdapterGate
from rgate_integrations.prompts import PromptTemplate
from rgate_integrations.runtime.text import normalise_answers

BOUNDARY_QUESTION = PromptTemplate(
    name="boundary-question",
    version=1,
    user="{question}\n\nIs the answer to this question known to you? Reply known or unknown.",
)


def certainty(counts: Sequence[int]) -> float:
    """Return the certainty C = 1 - H / H_max of sampled answers (Knowledge Boundary Model, equations 1 and 2).

    H is the entropy of the distinct answers in bits. H_max is log2 of their number, so 15:15 is as uncertain as 30
    different answers.

    Args:
        counts: How often each distinct answer was given, each >= 1.

    Returns:
        Certainty in [0, 1]; 1 for a single distinct answer, where the formula is 0/0, or for none.

    Examples:
        >>> round(certainty([29, 1]), 3), round(certainty([28, 1, 1]), 3), certainty([15, 15])
        (0.789, 0.735, 0.0)
    """
    if len(counts) <= 1:
        return 1.0
    n = sum(counts)
    entropy = -sum(c / n * math.log2(c / n) for c in counts)
    # Clipped, because rounding may leave [0, 1].
    return min(max(1.0 - entropy / math.log2(len(counts)), 0.0), 1.0)


class BoundaryGate(AdapterGate):
    """Knowledge Boundary Model: scores by how certain, or how accurate, sampled answers are (sections 2.2 and 3.1).

    Without an adapter, ``label`` must be ``"certainty"``, and the score is the certainty of answers that are sampled
    on the spot. With an adapter, the model predicts the soft label from the question alone, in one pass. The accuracy
    label needs gold answers, which a new question lacks, so it needs an adapter.

    Attributes:
        threshold: The threshold; by default the paper's tau, 0.9.
        label: The soft label: ``"certainty"`` or ``"accuracy"`` of sampled answers.
        samples: Number of answers to sample, 2 to 200; 30 in the paper.
        temperature: Sampling temperature, above 0.
        tokens: Maximum length of a sampled answer, 1 to 256 tokens.
        seed: Seed of the sampling.
        adapter: LoRA adapter trained on soft labels, or None.
    """

    info: ClassVar[GateInfo] = GateInfo(
        "boundary",
        "Knowledge Boundary Model (2024)",
        "sampled answers, or the question",
        "optional",
        "several samples",
    )
    argument = "label"

    threshold: Threshold = 0.9
    label: Literal["certainty", "accuracy"] = "certainty"
    samples: int = Field(default=30, ge=2, le=200)
    temperature: float = Field(default=1.0, gt=0)
    tokens: int = Field(default=16, ge=1, le=256)
    seed: int = 0

    @model_validator(mode="after")
    def _check_adapter(self) -> Self:
        if self.label == "accuracy" and self.adapter is None:
            raise ConfigurationError(
                "label='accuracy' needs an adapter: without one, the gate would need gold answers, which a new "
                "question lacks.",
                hint='Pass a trained adapter as adapter=, or use label="certainty".',
            )
        return self

    @property
    def specs(self) -> Specs:
        """The spec of the sampled answers or, with an adapter, of the trained model's verdict on the question."""
        if self.adapter is not None:
            return (TargetsSpec(BOUNDARY_QUESTION, ("known", "unknown"), adapter=self.adapter),)
        return (SamplesSpec(self.samples, self.temperature, self.tokens, self.seed),)

    def score(self, evidence: Evidence) -> Score:
        """Score by the certainty of the samples, or by the trained model.

        Raises:
            NoAnswerError: No sample is an answer.
        """
        (spec,) = self.specs
        if self.adapter is not None:
            p = ik_score(*evidence[spec])
            return Score(p, f"The boundary model predicts {self.label} {p:.2f}.")
        answers = evidence[spec]
        texts = normalise_answers([answer.text for answer in answers])
        counts = Counter(texts)
        p = certainty(list(counts.values()))
        most_frequent = answers[texts.index(counts.most_common(1)[0][0])]
        reason = f"{len(counts)} distinct answers in {len(answers)} samples: certainty {p:.2f}."
        return Score(p, reason, most_frequent)
