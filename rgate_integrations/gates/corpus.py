"""`CorpusGate`: combines what corpora cover with another gate's score, and decides whether and where to retrieve."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from itertools import compress
from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
from pydantic import Field, PlainSerializer, model_validator

from rgate_integrations.corpus.profile import CorpusProfile
from rgate_integrations.errors import ConfigurationError, RefusalError
from rgate_integrations.gates.base import Gate, InnerGate, Score, ScoreSpec, Specs, share_with_inner
from rgate_integrations.gates.evidence.base import Evidence
from rgate_integrations.gates.evidence.model_outputs import RequestSpec, encoder_pass
from rgate_integrations.gates.heads import HeadsGate
from rgate_integrations.models.base import PooledLayer
from rgate_integrations.models.encoder_file import LAYERS
from rgate_integrations.runtime.arrays import BoolArray, unit
from rgate_integrations.runtime.segments import count_words, is_question

_VECTOR = PooledLayer(LAYERS, "question", "mean")  # scaled to length 1, the encoder's sentence vector
COVERED = 0.5
"""Minimum P(covered) for a request to count as about a corpus, and minimum P(private or fresh) for it to
count as private or fresh."""
GIVEN_TEXT = 0.4
"""A segment (sentence or line) with at least this P(given) is pasted text. It asks nothing, even with a name from a
corpus, because front ends paste whole chats into their prompts. Code that a user asks about is an exception."""
NOTHING_ASKED = 0.5
"""A self-contained segment asks nothing if P(small talk, a task or pasted text) is at least this, and it has no name
from a corpus."""
_CLEARLY_COVERED = 0.9
"""With at least this P(covered) and a telling word, a message read without its earlier turns is about that corpus,
whatever they are about. Otherwise it may be a follow-up that needs them."""
# A question in a single line is self-contained only above this logit: with numbers or quotations, it looks like a sum
# or a text to work on, as in "My table is 2 m by 1 m. Which plan fits?".
_MIN_QUESTION_LOGIT = 2.0
# In a program's prompt around a chat, such as "Suggest questions that the user might ask next", each segment is read
# together with the chat, so it seems to be about the corpus. There, a segment asks nothing, self-contained or not, if
# P(small talk, a task or pasted text) is at least this.
_NOTHING_ASKED_BY_PROGRAM = 0.85
_MAX_WORDS_BESIDE_TEXT = 80  # with more words beside pasted text, a request is such a prompt
_CODE_BLOCK = re.compile(r"^(```|~~~).*?(?:^\1|\Z)", re.DOTALL | re.MULTILINE)
# With more words beside its code, a request is a prompt that a program writes around a chat.
_MAX_WORDS_BESIDE_CODE = 40
_REASON_WORDS = 3  # maximum number of the corpus's words to show in a reason

Profile = Annotated[
    CorpusProfile, PlainSerializer(lambda profile: {"name": profile.name, "fingerprint": profile.fingerprint})
]


def find_code(request: str) -> str:
    """Return the code blocks of a request; "" if it has more than 40 words beside them.

    Args:
        request: The request. A block stands between lines that begin with three backticks or tildes; the last one
            need not end.
    """
    if len(_CODE_BLOCK.sub("", request).split()) > _MAX_WORDS_BESIDE_CODE:
        return ""
    return "\n".join(block.group() for block in _CODE_BLOCK.finditer(request))


@dataclass(frozen=True)
class _Coverage:
    """How well one corpus covers a request.

    Attributes:
        profile: The corpus.
        p: P(covered) of the `text`.
        close: Closeness of the text to the corpus, for ranking the corpora.
        text: The segment, or the whole request, with the highest P(covered).
    """

    profile: CorpusProfile
    p: float
    close: float
    text: str

    @property
    def reason(self) -> str:
        """Why the corpus is searched, as a sentence."""
        terms = ", ".join(self.profile.match_terms(self.text)[:_REASON_WORDS])
        evidence = f"probability {self.p:.2f}" + (f": {terms}" if terms else "")
        return f"The question is about what *{self.profile.name}* covers ({evidence})."


class CorpusGate(Gate):
    """Adds corpora to another gate, the inner gate; ``load_gate(corpus=…)`` makes one.

    The first row that fits counts:

    | the request | the inner gate says | the decision |
    |---|---|---|
    | asks nothing | anything | the inner gate's (thanks, sums, pasted text ask nothing) |
    | is about a corpus | anything | retrieve from it; with ``prefer="llm"``, the inner gate's |
    | is about none | an override | the override's |
    | is about none | the LLM knows | direct |
    | is about none | private or fresh | retrieve: a source without a profile may hold it |
    | is about none | the LLM may not know | ``when_uncovered`` |

    If the LLM's draft is a refusal, such as "I don't know", it may not know, and `p_known` is 0; where no row
    applies but the inner gate's, an override retrieves.

    Attributes:
        inner: Estimates what the LLM knows. Only one whose `question_gate` is a `HeadsGate` recognises that a
            request asks nothing.
        profiles: The corpora, each with a unique name.
        prefer: Who answers a request about a corpus: ``"corpus"``, or ``"llm"`` if it knows. None means ``"corpus"``
            for a specific corpus, and ``"llm"`` for one about everything, such as an encyclopaedia.
        when_uncovered: What to do if no corpus covers a request and the LLM may not know: ``"retrieve"``,
            ``"direct"`` or ``"abstain"``. The last two search nothing, and the decision's outcome says which.
        top: Maximum number of corpora to search, at least 1: the nearest of those that cover the request, or of all
            if none does.
        own_parameters: Names of the options that belong to this gate, not to the inner one.
    """

    inner: InnerGate
    profiles: tuple[Profile, ...] = Field(min_length=1)
    prefer: Literal["corpus", "llm"] | None = None
    when_uncovered: Literal["retrieve", "direct", "abstain"] = "retrieve"
    top: int = Field(default=1, ge=1)

    own_parameters: ClassVar[tuple[str, ...]] = ("prefer", "when_uncovered", "top")

    @model_validator(mode="before")
    @classmethod
    def _share_parameters(cls, values: Any) -> Any:
        return share_with_inner(values, "inner", ["threshold", "proxy"])

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        if len(set(self.corpora)) < len(self.corpora):
            raise ConfigurationError(
                f"Each corpus needs a unique name, but the names are {', '.join(self.corpora)}.",
                hint='Name them yourself: corpus={"docs": a, "hr": b}, or rgate profile --name.',
            )
        return self

    @property
    def name(self) -> str:
        """The name of the inner gate."""
        return self.inner.name

    @property
    def corpora(self) -> tuple[str, ...]:
        """The names of the corpora."""
        return tuple(profile.name for profile in self.profiles)

    @property
    def judges_llm(self) -> bool:  # type: ignore[override]  # as the inner gate does
        """Whether the inner gate accepts the name of an LLM; see `Gate`."""
        return self.inner.judges_llm

    def for_llm(self, name: str, name_source: str = "") -> Self:
        """Return a copy whose inner gate judges this LLM, or the gate itself if nothing changes."""
        return self.around(self.inner.for_llm(name, name_source))

    def answer_gate(self) -> Gate | None:
        """Return this gate with the inner gate's `answer_gate` inside; None if the inner gate has none."""
        inner = self.inner.answer_gate()
        return None if inner is None else self.around(inner)

    def question_gate(self) -> Gate | None:
        """Return this gate with the inner gate's `question_gate` inside; None if the inner gate has none."""
        inner = self.inner.question_gate()
        return None if inner is None else self.around(inner)

    def around(self, inner: Gate) -> Self:
        """Return a copy with this inner gate, its threshold and its proxy, or the gate itself if nothing changes."""
        if inner is self.inner:
            return self
        return self.replace(inner=inner, threshold=inner.threshold, proxy=inner.proxy)

    @property
    def specs(self) -> Specs:
        """Specs of the inner gate's score, and of the states that give the request's sentence vectors."""
        return (ScoreSpec(self.inner), self._states_spec)

    @property
    def _states_spec(self) -> RequestSpec:
        """The inner gate's pass of the encoder, if it has one."""
        return encoder_pass(self.inner.specs, (_VECTOR,), (_VECTOR,))

    @property
    def _alone_spec(self) -> RequestSpec:
        """The encoder's pass without the earlier turns."""
        return replace(self._states_spec, scope="message")

    def look_closer(self, evidence: Evidence) -> Specs:
        """Return, with several corpora and earlier turns, which may be about another corpus, `_alone_spec`."""
        return (self._alone_spec,) if len(self.profiles) > 1 and evidence.request.history else ()

    def score(self, evidence: Evidence) -> Score:
        """Add coverage to the inner gate's score, and decide by the table of `CorpusGate`."""
        try:
            score, refusal = evidence[ScoreSpec(self.inner)], ""
        except RefusalError as error:  # the LLM does not know, but the corpora may
            score, refusal = self._score_refusal(evidence, error.message), error.message
        asking = self._asking(evidence)
        ranked = self._cover(evidence, self._states_spec, asking)
        if self._alone_spec in evidence.pieces:
            alone = self._cover(evidence, self._alone_spec, asking)
            # Only with a telling word: "And how long does that take?" is near to many corpora.
            if alone[0].p >= _CLEARLY_COVERED and alone[0].profile.match_terms(alone[0].text):
                ranked = alone
        best = ranked[0]
        corpora = tuple(
            coverage.profile.name
            for coverage in ranked[: self.top]
            if best.p < COVERED or coverage.p >= COVERED
        )
        score = replace(score, p_covered=best.p, corpora=corpora)
        by_inner = replace(score.overridden(refusal), reason="") if refusal else score
        if not asking.any():
            return by_inner
        if best.p >= COVERED:
            prefer = self.prefer or ("corpus" if best.profile.is_specific else "llm")
            return score.overridden(best.reason) if prefer == "corpus" else by_inner
        thresholds = (evidence.request.threshold, score.threshold, self.threshold)
        threshold = next(value for value in thresholds if value is not None)
        private_or_fresh = score.signals.get("private", 0.0) + score.signals.get("fresh", 0.0)
        knows = score.p_known >= threshold and not refusal
        # Without the heads' signals, nothing tells whether what the LLM does not know is private or fresh.
        must_search = private_or_fresh >= COVERED or (refusal and not score.signals)
        if knows or score.override or must_search or self.when_uncovered == "retrieve":
            return by_inner
        reason = (
            f"No corpus covers the question (highest P(covered) {best.p:.2f}), "
            "and the LLM may not know the answer."
        )
        return replace(score.overridden(reason, retrieve=False), outcome=self.when_uncovered)

    def _score_refusal(self, evidence: Evidence, refusal: str) -> Score:
        """Return the score of a request whose answer the LLM refused: P(known) is 0, the rest is by the question.

        Without heads, it has no signals, and `score` retrieves.
        """
        heads = self.inner.question_gate()
        score = heads.score(evidence) if isinstance(heads, HeadsGate) else Score(0.0, "")
        return replace(score, p_known=0.0, reason=refusal)

    def _asking(self, evidence: Evidence) -> BoolArray:
        """Return whether each segment asks anything, shape (segments,).

        Pasted text asks nothing, except code with a name from a corpus (see `find_code`). Nor does a self-contained
        segment, which is probably small talk or a task, unless it has such a name. A task that is not self-contained,
        such as "Give me a recipe for pancakes", asks, except in a program's prompt around a chat; so does a question
        in a single line that is not clearly self-contained. Every segment counts as asking if the request asks about
        a text that it quotes, or if the inner gate has no heads.
        """
        texts, heads = evidence[self._states_spec].texts, self.inner.question_gate()
        if not isinstance(heads, HeadsGate) or heads.asks_about_quotation(evidence):
            return np.ones(len(texts), bool)
        if heads.works_on_text(evidence):
            return np.zeros(len(texts), bool)
        named = np.array([any(profile.match_names(text) for profile in self.profiles) for text in texts])
        code = find_code(evidence.question)
        in_code = np.array([text in code for text in texts])
        pasted = heads.p_kinds(evidence, "given")
        nothing = pasted + heads.p_kinds(evidence, "no_knowledge")
        is_pasted = pasted >= GIVEN_TEXT
        least = np.zeros(len(texts))
        # In several lines, the question may be about pasted text, or one in a chat that a program quotes.
        if "\n" not in evidence.question:
            least[list(map(is_question, texts))] = _MIN_QUESTION_LOGIT
            if evidence.request.history:
                is_pasted[:] = False  # the text that a short message works on is in the earlier turns
        alone = (nothing >= NOTHING_ASKED) & (heads.self_contained_logits(evidence) > least)
        words_beside = sum(count_words(text) for text in compress(texts, ~is_pasted))
        if is_pasted.any() and words_beside > _MAX_WORDS_BESIDE_TEXT:
            alone |= nothing >= _NOTHING_ASKED_BY_PROGRAM
        asks = named | ~alone
        return (named & in_code) | (~is_pasted & asks)

    def _cover(self, evidence: Evidence, spec: RequestSpec, asking: BoolArray) -> list[_Coverage]:
        """Return the coverage of each corpus, best first: those that cover the request, then the others.

        Within both groups, corpora that are closer to the request come first.

        Args:
            evidence: The evidence of the request.
            spec: The encoder's pass, with or without the earlier turns.
            asking: Whether each segment asks anything. If any does, segments that ask nothing are ignored.
        """
        read = evidence[spec]
        whole, segments = (
            read.whole[spec.whole.index(_VECTOR)],
            read.segments[:, spec.segments.index(_VECTOR)],
        )
        vectors, texts = whole[None], [evidence.question]
        if asking.any() and not asking.all():
            # The vector of the whole request would mostly reflect the text pasted into it.
            vectors, texts = segments[asking], list(compress(read.texts, asking))
        elif asking.any() and len(read.texts) > 1:
            vectors, texts = np.vstack([vectors, segments]), [*texts, *read.texts]
        vectors = unit(vectors)
        coverages = []
        for profile in self.profiles:
            covered, close = profile.p_covered(vectors, texts), profile.closeness(vectors, texts)
            row = int(covered.argmax())
            coverages.append(_Coverage(profile, float(covered[row]), float(close[row]), texts[row]))
        return sorted(coverages, key=lambda coverage: (coverage.p >= COVERED, coverage.close), reverse=True)
