"""Baselines of the papers: constant policies, popularity, nearest-neighbour voting, and token probability."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from rgate_integrations.decision import Cost, DraftSource
from rgate_integrations.errors import DataFormatError, EvidenceError
from rgate_integrations.gates.base import Gate, GateInfo, Score, Specs
from rgate_integrations.gates.evidence.base import Context, Evidence, EvidenceSpec, Piece
from rgate_integrations.gates.evidence.model_outputs import DraftSpec
from rgate_integrations.runtime.records import read_records


class ConstantGate(Gate):
    """Always retrieves, never retrieves, or retrieves for a random share of the questions.

    Attributes:
        policy: ``"always"``, ``"never"`` or ``"random"``.
        rate: Share of the questions to retrieve for, in [0, 1], with ``policy="random"`` and the threshold 0.5.
        seed: Seed; the draw depends on it and on the question, not on the batch.
    """

    info: ClassVar[GateInfo] = GateInfo(
        "constant", "baseline: always, never, random", "nothing", "no", "none"
    )

    policy: Literal["always", "never", "random"] = "always"
    rate: float = Field(default=0.5, ge=0, le=1)
    seed: int = 0

    @classmethod
    def parse_argument(cls, argument: str) -> dict[str, Any]:
        """Return parameters for ``always``, ``never``, ``random`` or ``random:RATE``, as in ``constant:never``."""
        policy, _, rate = argument.partition(":")
        return {"policy": policy, "rate": rate} if rate else {"policy": policy}

    def answer_gate(self) -> Gate:
        """Return this gate, because it is also a baseline for partial answers."""
        return self

    @property
    def specs(self) -> Specs:
        """Empty, because the gate needs no evidence."""
        return ()

    def score(self, evidence: Evidence) -> Score:
        """Score 0 for always, 1 for never, and at random otherwise: below 0.5 for a share `rate` of the questions."""
        if self.policy != "random":
            return Score(float(self.policy == "never"), f"This gate {self.policy} retrieves.")
        digest = hashlib.sha256(f"{self.seed}|{evidence.question}".encode()).digest()
        draw = int.from_bytes(digest[:7], "big") / 2**56
        reason = f"Drawn at random: retrieves for {self.rate:.0%} of the questions."
        # Scaled so that a share of ``rate`` is below 0.5, the default threshold.
        if draw < self.rate:
            return Score(0.5 * draw / self.rate, reason)
        return Score(0.5 + 0.5 * (draw - self.rate) / (1 - self.rate), reason)


class PopularityGate(Gate):
    """Adaptive retrieval by popularity (Mallen et al. 2023; ADAPT-LLM, section 4.7).

    P(known) is ``popularity / (popularity + cutoff)``. The caller gives the popularity of each question, on any scale
    that starts at 0.

    Attributes:
        cutoff: Popularity at which P(known) is 0.5, above 0. With the default threshold, the gate retrieves for less
            popular questions.
    """

    info: ClassVar[GateInfo] = GateInfo(
        "popularity", "Popularity threshold (Mallen et al. 2023)", "a popularity score", "optional", "none"
    )
    argument = "cutoff"

    cutoff: float = Field(default=1000.0, gt=0, allow_inf_nan=False)

    @property
    def specs(self) -> Specs:
        """Empty, because the popularity is part of the request."""
        return ()

    def score(self, evidence: Evidence) -> Score:
        """Score ``popularity / (popularity + cutoff)``.

        Raises:
            EvidenceError: The popularity is missing.
        """
        value = evidence.request.popularity
        if value is None:
            raise EvidenceError(
                "This gate needs the popularity of the question's subject, such as its page views, but got none.",
                hint="Pass decide(question, popularity=...) or Request(question, popularity=...); in a data file, "
                'write it as "popularity".',
            )
        side = "at or above" if value >= self.cutoff else "below"
        p = 1 - self.cutoff / (value + self.cutoff)  # in this form, infinity gives 1
        return Score(p, f"The popularity {value:g} is {side} the cutoff {self.cutoff:g}.")


class NeighboursGate(Gate):
    """SKR-kNN (Wang et al. 2023; a baseline of SlimPLM, section 4.3): the k nearest labelled questions vote.

    Attributes:
        examples: JSONL file of labelled questions. Each line has ``question``, and ``known`` or
            ``closed_book_correct``: whether the LLM answered correctly without retrieval.
        k: Number of neighbours that vote, at least 1.
        embedder: Catalogue name (see ``rgate download``), folder or Hub id of the sentence embedder.
    """

    info: ClassVar[GateInfo] = GateInfo(
        "neighbours", "SKR-kNN (Wang et al. 2023)", "labelled questions nearby", "yes", "search"
    )
    argument = "examples"

    examples: str
    k: int = Field(default=5, ge=1)
    embedder: str = "multilingual-e5-small"

    @property
    def specs(self) -> Specs:
        """The spec of the labels of the nearest labelled questions."""
        return (NeighboursSpec(self),)

    def score(self, evidence: Evidence) -> Score:
        """Score by the share of the neighbours that vote for known, with one extra vote for unknown."""
        labels = evidence[self.specs[0]]
        known = sum(labels)
        # With the extra vote, ties are below 0.5 and retrieve.
        p = known / (len(labels) + 1)
        return Score(p, f"{known} of the {len(labels)} nearest labelled questions were known.")


@dataclass(frozen=True)
class NeighboursSpec(EvidenceSpec[tuple[bool, ...]]):
    """Evidence: the labels of the k labelled questions with the most similar embeddings, nearest first.

    Attributes:
        gate: The gate, which gives k, the file and the embedder. The file is embedded once per engine.
    """

    reads_model: ClassVar[bool] = False  # embedders truncate long texts themselves

    gate: NeighboursGate

    def compute(self, context: Context) -> list[Piece[tuple[bool, ...]]]:
        """Return the labels of the nearest questions for each request, in one search for the batch."""
        key = (self.gate.examples, self.gate.embedder)
        labelled = context.memory(key, lambda: LabelledQuestions(*key))
        nearest = labelled.nearest([request.question for request in context.requests], self.gate.k)
        return [Piece(labels, Cost(model_calls=1)) for labels in nearest]


class LabelledQuestions:
    """Questions with a label, searchable by the cosine similarity of their embeddings.

    Args:
        path: JSONL file; each line has ``question`` and ``known`` or ``closed_book_correct`` (a boolean).
        embedder: Catalogue name (see ``rgate download``), folder or Hub id of a sentence embedder.

    Raises:
        DataFormatError: The file is empty or cannot be read, or a line has no labelled question.
        RGateError: The embedder's model cannot be loaded; see `SentenceEmbedder.embed`.
    """

    def __init__(self, path: str, embedder: str) -> None:
        from rgate_integrations.index.embedder import SentenceEmbedder

        if not os.path.isfile(path):  # not a pipe, which would block: a saved gate may come from anywhere
            raise DataFormatError(
                f"The file {path!r} {'is not a regular file' if os.path.exists(path) else 'does not exist'}.",
                hint="Check examples=, the JSONL file of labelled questions.",
            )
        questions: list[str] = []
        self.known: list[bool] = []
        for record in read_records(path, hint='Each line needs {"question": "…", "known": true|false}.'):
            label = record.fields.get("known", record.fields.get("closed_book_correct"))
            if label not in (True, False):
                raise record.error(f"known must be true or false, not {label!r:.60}")
            questions.append(record.text("question"))
            self.known.append(bool(label))
        if not questions:
            raise DataFormatError(
                f"The file {path!r} contains no labelled questions.",
                hint='Each line needs {"question": "…", "known": true|false}.',
            )
        self._embedder = SentenceEmbedder(embedder)
        # As queries, not passages, because they are compared with other queries.
        self._vectors = self._embedder.embed_queries(questions)

    def nearest(self, questions: Sequence[str], k: int) -> list[tuple[bool, ...]]:
        """Return the labels of the ``k`` nearest labelled questions of each question, nearest first."""
        similarities = self._embedder.embed_queries(questions) @ self._vectors.T
        order = (-similarities).argsort(axis=1, kind="stable")[:, :k]
        return list(map(tuple, np.array(self.known)[order].tolist()))


class TokenProbabilityGate(Gate):
    """FLARE's trigger (Jiang et al. 2023, section 3.2): a threshold on token *probability*, not on logits.

    The draft may come from any source, but needs log-probabilities.

    Attributes:
        threshold: FLARE's theta; the gate retrieves if the statistic is below it.
        tokens: Maximum length of the draft, 1 to 1024 tokens.
        source: Who writes the draft.
        statistic: ``"min"`` is the probability of the least probable token (FLARE), ``"mean"`` the geometric
            mean of all (one over the perplexity), ``"first"`` the probability of the first token.
    """

    info: ClassVar[GateInfo] = GateInfo(
        "token_probability", "FLARE (Jiang et al. 2023)", "draft's token probabilities", "no", "draft"
    )

    tokens: int = Field(default=32, ge=1, le=1024)
    source: DraftSource = "proxy"
    statistic: Literal["min", "mean", "first"] = "min"

    @property
    def specs(self) -> Specs:
        """The spec of the draft."""
        return (DraftSpec(self.tokens, self.source),)

    def score(self, evidence: Evidence) -> Score:
        """Score the draft's token probabilities by `statistic`.

        Raises:
            EvidenceError: The draft has no log-probabilities.
        """
        draft = evidence[self.specs[0]]
        logprobs = draft.logprobs
        if not logprobs:
            raise EvidenceError(
                "The draft has no log-probabilities, which this gate needs.",
                hint="Request them from the LLM (LangChain: logprobs=True), or use a gate that judges text.",
            )
        statistics = {
            "min": (min(logprobs), "weakest token"),
            "mean": (sum(logprobs) / len(logprobs), "average token"),
            "first": (logprobs[0], "first token"),
        }
        logprob, name = statistics[self.statistic]
        p = math.exp(logprob)
        return Score(p, f"The draft's {name} has probability {p:.2f}.", draft)
