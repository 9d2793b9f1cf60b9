"""What corpora cover, together with what another gate says of the LLM: whether to retrieve, and where."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, Literal, Self

import numpy as np
from pydantic import Field, PlainSerializer, model_validator

from rgate_integrations.corpus.profile import CorpusProfile
from rgate_integrations.errors import ConfigurationError
from rgate_integrations.gates.base import Gate, InnerGate, Score, ScoreSpec, Specs
from rgate_integrations.gates.evidence.base import Evidence
from rgate_integrations.gates.evidence.vectors import VectorSpec

SavedProfile = Annotated[
    CorpusProfile, PlainSerializer(lambda profile: {"name": profile.name, "fingerprint": profile.fingerprint})
]
COVERED = 0.5
"""From this P(covered) on, a request is about a corpus."""


class CorpusGate(Gate):
    """Another gate, and what corpora cover.

    Attributes:
        inner: Says what the LLM knows.
        profiles: What each corpus is about; their names differ.
        prefer: Who answers what is about a corpus: ``"corpus"``, whatever the LLM knows; or ``"llm"`` if it knows.
            None lets each profile say: a corpus about something is preferred, one about everything is not.
        when_uncovered: What happens to a request that no corpus covers and that the LLM does not know:
            ``"retrieve"``, ``"direct"``, or ``"abstain"``: nothing is searched, and the decision's outcome says it.
        top: How many corpora may be searched, at least 1.
    """

    inner: InnerGate
    profiles: tuple[SavedProfile, ...] = Field(min_length=1)
    prefer: Literal["corpus", "llm"] | None = None
    when_uncovered: Literal["retrieve", "direct", "abstain"] = "retrieve"
    top: int = Field(default=1, ge=1)

    @model_validator(mode="before")
    @classmethod
    def _as_its_gate(cls, values: Any) -> Any:
        match values:
            case {"inner": Gate() as inner, **given}:
                chosen = {name: given[name] for name in ("threshold", "proxy") if name in given}
                changed = {name: value for name, value in chosen.items() if value != getattr(inner, name)}
                inner = inner.replace(**changed)
                return {**values, "inner": inner, "threshold": inner.threshold, "proxy": inner.proxy}
        return values

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        if len(set(self.corpora)) < len(self.corpora):
            raise ConfigurationError(
                f"Names of corpora must differ, not {', '.join(self.corpora)}.",
                hint="corpus={'docs': a, 'hr': b}",
            )
        return self

    @property
    def name(self) -> str:
        """The name of its gate."""
        return self.inner.name

    @property
    def corpora(self) -> tuple[str, ...]:
        """Names of the corpora."""
        return tuple(profile.name for profile in self.profiles)

    @property
    def judges_llm(self) -> bool:  # type: ignore[override]  # as its gate does
        """Whether its gate judges one LLM."""
        return self.inner.judges_llm

    def for_llm(self, name: str, name_source: str = "") -> Self:
        """Return a copy whose gate judges what this LLM knows; itself where that changes nothing."""
        inner = self.inner.for_llm(name, name_source)
        return self if inner is self.inner else self.replace(inner=inner)

    def answer_gate(self) -> Gate | None:
        """Return this gate around what judges begun answers."""
        return self._around(self.inner.answer_gate())

    def question_gate(self) -> Gate | None:
        """Return this gate around what reads the question alone."""
        return self._around(self.inner.question_gate())

    def _around(self, inner: Gate | None) -> Gate | None:
        if inner is None or inner is self.inner:
            return None if inner is None else self
        return self.replace(inner=inner, threshold=inner.threshold, proxy=inner.proxy)

    @property
    def _vectors(self) -> VectorSpec:
        return VectorSpec.shared_with(self.inner.specs)

    @property
    def specs(self) -> Specs:
        """The score of its gate, and the request's vectors."""
        return (ScoreSpec(self.inner), self._vectors)

    def score(self, evidence: Evidence) -> Score:
        """Add what is covered to what its gate says."""
        score, read = evidence[ScoreSpec(self.inner)], evidence[self._vectors]
        vectors, texts = np.vstack([read.whole, read.segments]), (evidence.question, *read.texts)
        covered = [float(profile.p_covered(vectors, texts).max()) for profile in self.profiles]
        near = [float(profile.nearness(vectors).max()) for profile in self.profiles]
        order = sorted(range(len(near)), key=lambda each: near[each], reverse=True)
        holding = [each for each in order if covered[each] >= COVERED] or order[:1]
        best = self.profiles[holding[0]]
        corpora = tuple(self.profiles[each].name for each in holding[: self.top])
        p = covered[holding[0]]
        score = replace(score, p_covered=p, corpora=corpora)
        if p >= COVERED:
            prefer = self.prefer or ("corpus" if best.about_something else "llm")
            if prefer == "llm":
                return score
            return score.overridden(f"It is about what *{best.name}* covers (probability {p:.2f}).")
        knows = score.p_known >= (self.threshold if score.threshold is None else score.threshold)
        if knows or self.when_uncovered == "retrieve" or score.override is not None:
            return score
        said = f"No corpus covers it (probability {p:.2f}), and the LLM may not know it."
        outcome: Literal["direct", "abstain"] = self.when_uncovered
        return replace(score.overridden(said, retrieve=False), outcome=outcome)
