"""Uncertainty of a draft or of sampled answers, each mapped to [0, 1] with certain at 1."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from itertools import combinations
from typing import ClassVar

import numpy as np
from pydantic import Field

from rgate_integrations.decision import Draft, DraftSource
from rgate_integrations.errors import EvidenceError
from rgate_integrations.evidence.base import Evidence
from rgate_integrations.evidence.draft import DraftSpec
from rgate_integrations.evidence.samples import SamplesSpec
from rgate_integrations.gates.base import Gate, GateInfo, Score, Specs
from rgate_integrations.runtime.arrays import Float64Array
from rgate_integrations.runtime.text import comparable, rouge_l


class _DraftUncertainty(Gate):
    """Base of the gates that read the token distribution of a draft."""

    tokens: int = Field(default=32, ge=1, le=1024)
    source: DraftSource = "proxy"

    @property
    def _draft_spec(self) -> DraftSpec:
        return DraftSpec(self.tokens, self.source, logprobs=True)

    @property
    def specs(self) -> Specs:
        """A draft with log-probabilities."""
        return (self._draft_spec,)

    def score(self, evidence: Evidence) -> Score:
        """Score the draft's certainty."""
        draft = evidence[self._draft_spec]
        if not draft.logprobs:
            raise EvidenceError("The draft is empty, so it has no token probabilities.")
        p, reason = self._certainty(draft)
        return Score(p, reason, draft)

    @abstractmethod
    def _certainty(self, draft: Draft) -> tuple[float, str]: ...


class PerplexityGate(_DraftUncertainty):
    """One over the perplexity of the draft: the geometric mean of its token probabilities."""

    info: ClassVar[GateInfo] = GateInfo("perplexity", "perplexity (LM-Polygraph)", "draft", "no", "draft")

    def _certainty(self, draft: Draft) -> tuple[float, str]:
        logprobs = draft.logprobs or (0.0,)
        p = math.exp(sum(logprobs) / len(logprobs))
        return p, f"The draft's perplexity is {1 / max(p, 1e-12):.2f}."


class MeanTokenEntropyGate(_DraftUncertainty):
    """Mean entropy H of the next-token distributions along the draft, in nats; P(known) is exp(-H).

    Needs entropies, which few servers give; a draft without them is refused, and the gate retrieves.
    """

    info: ClassVar[GateInfo] = GateInfo(
        "mean_token_entropy", "mean token entropy (LM-Polygraph)", "draft", "no", "draft"
    )

    def _certainty(self, draft: Draft) -> tuple[float, str]:
        if not draft.entropies:
            raise EvidenceError(
                "The source of this draft gives no entropies.", hint="Use perplexity instead."
            )
        mean = max(sum(draft.entropies) / len(draft.entropies), 0.0)
        return math.exp(-mean), f"The mean entropy of the draft's tokens is {mean:.2f} nats."


class _SampleUncertainty(Gate):
    """Base of the gates that compare sampled answers."""

    samples: int = Field(default=10, ge=2, le=200)
    temperature: float = Field(default=1.0, gt=0)
    tokens: int = Field(default=16, ge=1, le=256)
    seed: int = 0

    @property
    def _samples_spec(self) -> SamplesSpec:
        return SamplesSpec(self.samples, self.temperature, self.tokens, self.seed)

    @property
    def specs(self) -> Specs:
        """Sampled answers."""
        return (self._samples_spec,)

    def score(self, evidence: Evidence) -> Score:
        """Score the agreement of the samples; the draft is the sample most like the others."""
        answers = evidence[self._samples_spec]
        matrix = similarity_matrix(comparable([a.text for a in answers]))
        p, reason = self._agreement(answers, matrix)
        return Score(p, reason, answers[int(matrix.sum(axis=1).argmax())])

    @abstractmethod
    def _agreement(self, answers: Sequence[Draft], matrix: Float64Array) -> tuple[float, str]: ...


class LexicalSimilarityGate(_SampleUncertainty):
    """Mean pairwise ROUGE-L of the samples (Fomicheva et al. 2020)."""

    info: ClassVar[GateInfo] = GateInfo(
        "lexical_similarity", "lexical similarity (Fomicheva et al. 2020)", "samples", "no", "several samples"
    )

    def _agreement(self, answers: Sequence[Draft], matrix: Float64Array) -> tuple[float, str]:
        n = len(answers)
        p = float((matrix.sum() - np.trace(matrix)) / (n * (n - 1)))
        return p, f"{n} sampled answers are alike to {p:.2f} (ROUGE-L)."


class SemanticSetsGate(_SampleUncertainty):
    """Number of sets of equal answers (Lin et al. 2023), by exact match of the normalised text.

    P(known) is 1 for one set and 0 when every answer differs.
    """

    info: ClassVar[GateInfo] = GateInfo(
        "semantic_sets", "number of semantic sets (Lin et al. 2023)", "samples", "no", "several samples"
    )

    def _agreement(self, answers: Sequence[Draft], matrix: Float64Array) -> tuple[float, str]:
        sets = len(set(comparable([a.text for a in answers])))
        return 1 - (sets - 1) / (len(answers) - 1), f"{len(answers)} sampled answers fall into {sets} sets."


class EigValLaplacianGate(_SampleUncertainty):
    """Sum of the eigenvalues of the similarity graph's Laplacian (Lin et al. 2023), a soft number of sets.

    U = sum of max(0, 1 - eigenvalue) lies between 1 (all alike) and n (none alike); P(known) is
    ``1 - (U - 1) / (n - 1)``.
    """

    info: ClassVar[GateInfo] = GateInfo(
        "eigval_laplacian", "EigValLaplacian (Lin et al. 2023)", "samples", "no", "several samples"
    )

    def _agreement(self, answers: Sequence[Draft], matrix: Float64Array) -> tuple[float, str]:
        soft_sets = laplacian_sets(matrix)
        p = 1 - (soft_sets - 1) / (len(answers) - 1)
        return min(max(p, 0.0), 1.0), f"{len(answers)} sampled answers form {soft_sets:.1f} soft sets."


def similarity_matrix(texts: Sequence[str]) -> Float64Array:
    """Return the pairwise ROUGE-L of normalised texts, shape (n, n), ones on the diagonal."""
    matrix = np.eye(len(texts))
    for i, j in combinations(range(len(texts)), 2):
        matrix[i, j] = matrix[j, i] = rouge_l(texts[i], texts[j])
    return matrix


def laplacian_sets(matrix: Float64Array) -> float:
    """Return sum(max(0, 1 - eigenvalue)) of the normalised Laplacian of a similarity matrix, in [1, n]."""
    degrees = matrix.sum(axis=1)
    laplacian = np.eye(len(matrix)) - matrix / np.sqrt(np.outer(degrees, degrees))
    return float(np.clip(1 - np.linalg.eigvalsh(laplacian), 0, None).sum())
