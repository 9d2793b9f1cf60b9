"""What corpora cover, together with what another gate says of the LLM: whether to retrieve, and where."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
from pydantic import Field, PlainSerializer, model_validator

from rgate_integrations.corpus.profile import CorpusProfile
from rgate_integrations.errors import ConfigurationError
from rgate_integrations.gates.base import Gate, InnerGate, Score, ScoreSpec, Specs
from rgate_integrations.gates.evidence.base import Evidence
from rgate_integrations.gates.evidence.vectors import VectorSpec
from rgate_integrations.gates.heads import HeadsGate

COVERED = 0.5
"""From this P(covered) on, a request is about a corpus."""
ASKS_NOTHING = 0.85
"""From this probability of small talk, of a task or of a text to work on, a segment asks nothing of a corpus."""
_SHOWN = 3  # words in a reason

Profile = Annotated[
    CorpusProfile, PlainSerializer(lambda profile: {"name": profile.name, "fingerprint": profile.fingerprint})
]


@dataclass(frozen=True)
class _Coverage:
    """What one corpus has on a request.

    Attributes:
        profile: The corpus.
        p: P(it has something on it), the highest of the request's segments.
        close: How close it is to that segment, by which corpora are ranked.
        text: What that is the probability of.
    """

    profile: CorpusProfile
    p: float
    close: float
    text: str

    @property
    def reason(self) -> str:
        """What it covers, as a sentence."""
        terms = ", ".join(self.profile.terms_in(self.text)[:_SHOWN])
        said = f"probability {self.p:.2f}" + (f": {terms}" if terms else "")
        return f"It is about what *{self.profile.name}* covers ({said})."


class CorpusGate(Gate):
    """Another gate, and what corpora cover; `load_gate` makes it of ``corpus=``.

    ======================  =====================  ===================================================================
    the request             its gate says          what is decided
    ======================  =====================  ===================================================================
    asks nothing            anything               what its gate says: thanks, "translate this", text that is given
    is about a corpus       anything               retrieve from it; with ``prefer="llm"`` what its gate says
    is about none           the LLM knows          direct
    is about none           private or fresh,      retrieve: a corpus that nobody told of may hold it
                            or an override
    is about none           the LLM may not know   ``when_uncovered``
    ======================  =====================  ===================================================================

    Attributes:
        inner: Says what the LLM knows.
        profiles: What each corpus is about; their names differ.
        prefer: Who answers what is about a corpus: ``"corpus"``, whatever the LLM knows; or ``"llm"`` if it knows.
            None lets each profile say: a corpus about something is preferred, one about everything is not.
        when_uncovered: What becomes of a request that no corpus covers and that the LLM may not know: ``"retrieve"``,
            ``"direct"``, or ``"abstain"``: nothing is searched, and the decision's outcome is ``"abstain"``.
        top: How many corpora may be searched, at least 1.
    """

    inner: InnerGate
    profiles: tuple[Profile, ...] = Field(min_length=1)
    prefer: Literal["corpus", "llm"] | None = None
    when_uncovered: Literal["retrieve", "direct", "abstain"] = "retrieve"
    top: int = Field(default=1, ge=1)

    own_parameters: ClassVar[tuple[str, ...]] = ("prefer", "when_uncovered", "top")

    @model_validator(mode="before")
    @classmethod
    def _as_its_gate(cls, values: Any) -> Any:
        match values:
            case {"inner": Gate() as inner}:
                changed = {}
                for name in ("threshold", "proxy"):
                    if values.get(name, getattr(inner, name)) != getattr(inner, name):
                        changed[name] = values[name]
                inner = inner.replace(**changed)
                return {**values, "inner": inner, "threshold": inner.threshold, "proxy": inner.proxy}
        return values

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        if len(set(self.corpora)) < len(self.corpora):
            raise ConfigurationError(
                f"The names of corpora must differ, not {', '.join(self.corpora)}.",
                hint='corpus={"docs": a, "hr": b}',
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
        inner = self.inner.answer_gate()
        return None if inner is None else self.around(inner)

    def question_gate(self) -> Gate | None:
        """Return this gate around what reads the question alone."""
        inner = self.inner.question_gate()
        return None if inner is None else self.around(inner)

    def around(self, inner: Gate) -> Self:
        """Return this gate around another one; itself where that is its own."""
        if inner is self.inner:
            return self
        return self.replace(inner=inner, threshold=inner.threshold, proxy=inner.proxy)

    @property
    def specs(self) -> Specs:
        """The score of its gate, and the request's vectors."""
        return (ScoreSpec(self.inner), self._vector_spec)

    @property
    def _vector_spec(self) -> VectorSpec:
        return VectorSpec.shared_with(self.inner.specs)

    def score(self, evidence: Evidence) -> Score:
        """Add what is covered to what its gate says, and decide by the table above."""
        score = evidence[ScoreSpec(self.inner)]
        asking = self._asking(evidence)
        ranked = self._cover(evidence, asking)
        best = ranked[0]
        corpora = tuple(each.profile.name for each in ranked[: self.top] if each is best or each.p >= COVERED)
        score = replace(score, p_covered=best.p, corpora=corpora)
        if not any(asking):
            return score
        if best.p >= COVERED:
            prefer = self.prefer or ("corpus" if best.profile.about_something else "llm")
            return score.overridden(best.reason) if prefer == "corpus" else score
        given = (evidence.request.threshold, score.threshold, self.threshold)
        threshold = next(each for each in given if each is not None)
        if score.override is not None or score.p_known >= threshold or _is_private_or_fresh(score):
            return score
        if self.when_uncovered == "retrieve":
            return score
        reason = f"No corpus covers it (probability {best.p:.2f}), and the LLM may not know it."
        return replace(score.overridden(reason, retrieve=False), outcome=self.when_uncovered)

    def _asking(self, evidence: Evidence) -> list[bool]:
        """Return of each segment whether it asks anything: all do that name something of a corpus."""
        texts, heads = evidence[self._vector_spec].texts, self.inner.question_gate()
        if not isinstance(heads, HeadsGate):
            return [True] * len(texts)
        asking = []
        for text, p in zip(texts, heads.p_nothing_asked(evidence), strict=True):
            named = any(profile.names_in(text) for profile in self.profiles)
            asking.append(bool(named or p < ASKS_NOTHING))
        return asking

    def _cover(self, evidence: Evidence, asking: list[bool]) -> list[_Coverage]:
        """Return what each corpus has on it: first those that cover it, the closest first, then the others."""
        read = evidence[self._vector_spec]
        # A whole that has a text to work on in it is about that text.
        rows = [row for row, asks in enumerate(asking) if asks] if not all(asking) else []
        vectors, texts = read.whole[None], [evidence.question]
        if rows:
            vectors, texts = read.segments[rows], [read.texts[row] for row in rows]
        elif len(read.texts) > 1 and any(asking):
            vectors, texts = np.vstack([vectors, read.segments]), [*texts, *read.texts]
        found = []
        for profile in self.profiles:
            covered, close = profile.p_covered(vectors, texts), profile.closeness(vectors)
            row = int(covered.argmax())
            found.append(_Coverage(profile, float(covered[row]), float(close[row]), texts[row]))
        return sorted(found, key=lambda each: (each.p >= COVERED, each.close), reverse=True)


def _is_private_or_fresh(score: Score) -> bool:
    return score.signals.get("private", 0.0) + score.signals.get("fresh", 0.0) >= COVERED
