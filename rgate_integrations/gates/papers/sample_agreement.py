"""How much sampled answers agree, mapped to [0, 1] with certain at 1."""

from __future__ import annotations

from itertools import combinations
from typing import ClassVar

import numpy as np
from pydantic import Field

from rgate_integrations.evidence.base import Evidence
from rgate_integrations.evidence.samples import SamplesSpec
from rgate_integrations.gates.base import Gate, GateInfo, Score, Specs
from rgate_integrations.runtime.arrays import Float64Array
from rgate_integrations.runtime.text import comparable, rouge_l


class SampleAgreementGate(Gate):
    """Base of the gates that compare sampled answers.

    Attributes:
        samples: How many answers to sample.
        temperature: Sampling temperature.
        tokens: Maximum length of an answer.
        seed: Seed of the sampling.
    """

    samples: int = Field(default=10, ge=2, le=200)
    temperature: float = Field(default=1.0, gt=0)
    tokens: int = Field(default=16, ge=1, le=256)
    seed: int = 0

    @property
    def specs(self) -> Specs:
        """Sampled answers."""
        return (SamplesSpec(self.samples, self.temperature, self.tokens, self.seed),)

    def score(self, evidence: Evidence) -> Score:
        """Score the agreement of the samples; the draft is the sample most like the others."""
        answers = evidence[self.specs[0]]
        texts = comparable([answer.text for answer in answers])
        alike = np.eye(len(texts))  # pairwise ROUGE-L
        for i, j in combinations(range(len(texts)), 2):
            alike[i, j] = alike[j, i] = rouge_l(texts[i], texts[j])
        p, reason = self.agreement(texts, alike)
        return Score(p, f"{len(texts)} sampled answers {reason}.", answers[int(alike.sum(axis=1).argmax())])

    def agreement(self, texts: list[str], alike: Float64Array) -> tuple[float, str]:
        """Return P(known) and what the samples do.

        Args:
            texts: The n samples, normalised.
            alike: Their pairwise ROUGE-L, shape (n, n), ones on the diagonal.
        """
        raise NotImplementedError


class LexicalSimilarityGate(SampleAgreementGate):
    """Mean pairwise ROUGE-L of the samples (Fomicheva et al. 2020)."""

    info: ClassVar[GateInfo] = GateInfo(
        "lexical_similarity", "lexical similarity (Fomicheva et al. 2020)", "samples", "no", "several samples"
    )

    def agreement(self, texts: list[str], alike: Float64Array) -> tuple[float, str]:
        """Return the mean over the pairs."""
        n = len(texts)
        p = float((alike.sum() - n) / (n * (n - 1)))
        return p, f"are alike to {p:.2f} (ROUGE-L)"


class SemanticSetsGate(SampleAgreementGate):
    """Number of sets of equal answers (Lin et al. 2023), by exact match of the normalised text.

    P(known) is 1 for one set and 0 when every answer differs.
    """

    info: ClassVar[GateInfo] = GateInfo(
        "semantic_sets", "number of semantic sets (Lin et al. 2023)", "samples", "no", "several samples"
    )

    def agreement(self, texts: list[str], alike: Float64Array) -> tuple[float, str]:
        """Count the sets."""
        sets = len(set(texts))
        return 1 - (sets - 1) / (len(texts) - 1), f"fall into {sets} sets"


class EigValLaplacianGate(SampleAgreementGate):
    """Sum of the eigenvalues of the similarity graph's Laplacian (Lin et al. 2023), a soft number of sets.

    U = sum of max(0, 1 - eigenvalue) lies between 1 (all alike) and n (none alike); P(known) is
    ``1 - (U - 1) / (n - 1)``.
    """

    info: ClassVar[GateInfo] = GateInfo(
        "eigval_laplacian", "EigValLaplacian (Lin et al. 2023)", "samples", "no", "several samples"
    )

    def agreement(self, texts: list[str], alike: Float64Array) -> tuple[float, str]:
        """Sum up the eigenvalues of the normalised Laplacian."""
        degrees = alike.sum(axis=1)
        laplacian = np.eye(len(alike)) - alike / np.sqrt(np.outer(degrees, degrees))
        soft_sets = float(np.clip(1 - np.linalg.eigvalsh(laplacian), 0, None).sum())
        p = 1 - (soft_sets - 1) / (len(texts) - 1)
        return min(max(p, 0.0), 1.0), f"form {soft_sets:.1f} soft sets"
