"""Heads, small models on hidden states, estimate each segment's kind and whether the LLM knows the fact asked for."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, ClassVar, Self

import numpy as np
from pydantic import Field, SkipValidation, model_validator

from rgate_integrations.gates.ability import Ability, resolve_ability
from rgate_integrations.gates.base import (
    USER_SOURCES,
    Gate,
    GateInfo,
    NamedLLMGate,
    Score,
    Specs,
    warn_once,
)
from rgate_integrations.gates.evidence.base import Evidence
from rgate_integrations.gates.evidence.model_outputs import RequestSpec, Scope
from rgate_integrations.gates.heads_artifact import (
    HeadsArtifact,
    may_reader_change,
    p_answered,
)
from rgate_integrations.gates.kinds import KindsSpec
from rgate_integrations.gates.probability import softmax
from rgate_integrations.gates.registry import make_gate
from rgate_integrations.gates.trained import TrainedGate
from rgate_integrations.runtime.arrays import BoolArray, Float64Array
from rgate_integrations.runtime.quotations import leave_out, split_quotation
from rgate_integrations.runtime.segments import (
    QUESTION_MARKS,
    count_questions,
    count_words,
    outside_code,
    segments,
    split_joined,
    user_turns,
)
from rgate_integrations.runtime.text import detect_encoding

_MAX_SHOWN = 80  # characters of a segment in a reason
# In a request with more questions, the heads may miss the one that needs a search, so it retrieves.
_MAX_QUESTIONS = 8
# "known" is only a signal if knowing the fact changes P(known) by this much; otherwise the request asks for no fact.
_MIN_INFLUENCE = 0.1
ALWAYS_READ = 40.0
"""A `HeadsGate.margin` so wide that the reader reads every English question that would skip if the LLM knew the
fact, and retrieve if not."""
# Added to the ability for a question in a language other than English: on SimpleQA, four LLMs do worse in Czech than
# in English, by 0 to 0.4 in log-odds.
_FOREIGN_PENALTY = -0.4
_URL = re.compile(r"\b(?:https?://|www\.)\w", re.IGNORECASE)
_MAX_WORDS_WITH_URL = 8  # in a longer request, a URL may be part of a log or of code
# A follow-up, and romanised text such as Hindi in Latin letters, retrieves below this P(known), because the gate
# understands it less well. With the threshold alone, 89 % of the romanised requests that need passages would
# retrieve, with this 97 % (``benchmarks/languages.py``).
_MIN_P_KNOWN_IF_UNCLEAR = 0.9
# After turns about common knowledge, the encoder takes a customer's statement, such as "I topped up but the app
# declined it", for a remark about these. So a message that would skip, and is long enough to be complete, is also
# judged without the earlier turns: below this P(known), even if the LLM knew the fact, it retrieves.
_MAX_P_KNOWN_IF_ALONE_CLEAR = 0.05
# A message that seems self-contained, such as "and for two?" after a list of prices, only follows on the question
# before it if both have a lower P(known) than this; one with at least this logit, such as "Thanks!", never does.
_MAX_P_KNOWN_IF_SELF_CONTAINED, _CLEARLY_SELF_CONTAINED = 0.1, 2.0
# One of several requests in a line, and a quotation, retrieve below this P(known): each is understood less well.
_MAX_P_KNOWN_OF_PART = 0.4
# "My shirt has a stain. What helps?" has no quotation marks, and is like "Ann says we close at six. Really?".
_MIN_LOGIT_UNMARKED = 1.0
# Beside code with docstrings, the encoder takes a private question for given text. So what is outside the code is
# also judged by itself if P(known) of the whole is below the second of these. Below the first, it retrieves.
_MAX_P_KNOWN_BESIDE_CODE, _CLEAR_P_KNOWN_WITH_CODE = 0.05, 0.95
# Judged alone, shorter questions, such as "What else did she do?", and messages ("Regenerate") seem to need passages.
_MIN_WORDS_ALONE, _MIN_WORDS_OF_STATEMENT_ALONE = 7, 3


class HeadsGate(TrainedGate, NamedLLMGate):
    """Judges a request by heads, small models on its hidden states: its kind, and whether the LLM knows the fact.

    It needs one or two passes over the request, more over parts of some requests, and no draft. The LLM alone answers
    some kinds of requests well (thanks, sums, letters), some not at all (private documents, news), and questions
    about facts if it knows the fact:

        p_known = P(always answered) + P(answered if the fact is known) * P(the LLM knows the fact)

    Every segment (sentence or line) is scored, and the request gets the lowest P(known). Pasted text is a separate
    kind, which needs no retrieval. The encoder recognises the kinds, in any language, and estimates whether the LLM
    knows the fact. If the estimate may decide whether an English request skips, a second model, the reader, replaces
    it with a better one. The reader also reads an English request of one segment that asks for no fact, if it is
    close to the threshold. In all requests of one segment that it reads, it has a say about the kind. In a list of
    questions, each is judged by itself, as none is given text. Requests with more than eight segments that end in a
    question mark, and short ones with a URL, always retrieve, as do those recognised as naming a source of the
    asker's own ("our wiki") or as about an application's own matters; a follow-up, or romanised text, retrieves
    unless P(known) is high. So does a request that asks about a text which it quotes ("Is she right?"), but not one
    that works on it ("Translate this"), if the text by itself needs passages.

    The ``signals`` of a decision are the probabilities of the kinds of the segment with the lowest P(known), and
    ``known``, P(the LLM knows the fact), unless it would hardly change P(known). Drafts are ignored.

    Attributes:
        artifact: Folder or Hub id of saved heads, or the name of shipped ones.
        trained: Content of the artefact, read once.
        llm_name: The LLM that answers, or a folder made by ``rgate ability``; see `rgate_integrations.gates.ability`.
            An empty name, or an unknown one without a size, is treated as an LLM with 8B parameters.
        llm_name_source: Where the name was detected; empty or `CLIENT` if a user gave it.
        ability: How much the LLM knows; looked up by its name unless given. None if unknown.
        margin: By how much the encoder may underestimate P(the LLM knows the fact), in logits, at least 0. If the
            request would retrieve even with that much added, the reader is not used for the fact.
        threshold: The threshold; by default the artefact's.
        proxy: The model that the heads were trained on. Set it if that model has another name or path here.
    """

    info: ClassVar[GateInfo] = GateInfo(
        "heads",
        "heads for the kind of request and for knowledge (this package)",
        "hidden states of the question",
        "yes",
        "one pass",
    )
    kind = HeadsArtifact

    trained: SkipValidation[HeadsArtifact] = Field(exclude=True, repr=False)
    ability: Ability | None = None
    margin: float = Field(default=1.0, ge=0.0, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _look_up_ability(cls, values: Any) -> Any:
        """Return the parameters with the LLM's ``ability``, looked up by its name unless given; None if unknown."""
        if not isinstance(values, dict) or not isinstance(values.get("llm_name", ""), str):
            return values  # pydantic rejects a gate of another class, and a name that is not text
        ability, name = values.get("ability"), values.get("llm_name", "")
        if ability is None:
            # Only the user may name a folder: a detected name may come from anyone.
            ability, warning = resolve_ability(name, folders=not values.get("llm_name_source"))
            if warning:
                warn_once(warning)
        if ability == resolve_ability("")[0]:
            ability = None
        return {**values, "ability": ability, "llm_name": name or getattr(ability, "llm", "")}

    def replace(self, **parameters: Any) -> Self:
        """Return a copy with other parameters.

        A new ``artifact`` is loaded, and brings its own threshold and proxy. If ``llm_name`` is given without
        ``ability``, the ability is looked up.
        """
        if "llm_name" in parameters:
            parameters = {"ability": None, "llm_name_source": "", **parameters}
        return super().replace(**parameters)

    def answer_gate(self) -> Gate:
        """Return the gate that combines these heads with the shipped probe, which judges partial answers."""
        gate = make_gate("answer", question=self)
        # The two gates have different default thresholds, but a threshold that the caller chose applies to both.
        return gate if self.threshold == self.trained.threshold else gate.replace(threshold=self.threshold)

    def question_gate(self) -> Gate:
        """Return this gate, which reads only the question."""
        return self

    @property
    def specs(self) -> Specs:
        """Specs of the encoder's states of the request and its segments, and of each segment's P(kind)."""
        return self._encoder_specs("conversation")

    def _encoder_specs(self, scope: Scope) -> Specs:
        states = RequestSpec(
            self.trained.first_facts.layers,
            self.trained.segments.layers,
            self.trained.context_layers,
            model=self.proxy,
            scope=scope,
        )
        return (states, KindsSpec(states, self, self.trained))

    @property
    def _reader_spec(self) -> RequestSpec:
        return RequestSpec(self.trained.facts.layers, model=self.trained.facts.base_model)

    def look_closer(self, evidence: Evidence) -> Specs:
        """Return the spec of the states of the reader, the second model, if they may change the decision; else ().

        They may do so for an English request that would retrieve if the LLM did not know the fact, and would skip at
        the highest P(the LLM knows the fact) that `margin` allows; and for one of a single segment that asks for no
        fact, and whose P(known) is close to the threshold. A message that may skip because of the turns before it
        also needs its kinds without these turns and, unless it is self-contained, those of the user's message before.
        A line that may skip and joins several requests also needs the kinds of each, and a text with code those of
        what is outside; a request that quotes a text needs those of the text, and the states of the rest.
        """
        states, shares = [evidence[spec] for spec in self.specs]
        trained = self.trained
        closer: Specs = ()
        p_if_known = p_answered(trained.segments.kinds, shares, np.ones(1)).min()
        if evidence.request.history and p_if_known >= _MIN_P_KNOWN_IF_UNCLEAR:
            is_open = self.self_contained_logits(evidence).min() < _CLEARLY_SELF_CONTAINED
            if is_open or _may_stand_alone(evidence.question):
                closer = self._encoder_specs("message")[1:]
            if is_open and any(user_turns(evidence.request.history)):
                closer += self._encoder_specs("before")[1:]
        threshold = self._threshold(evidence)
        may_change = False
        if trained.english.detect(states.whole[None])[0]:
            logit_known = trained.first_facts.known_logits(states.whole[None], *self._ability)
            alone = not states.in_context
            may_change = may_reader_change(
                trained.segments.kinds, shares, logit_known, threshold, self.margin, alone=alone
            )
            closer += (self._reader_spec,) * may_change
        may_skip = may_change or p_if_known >= threshold
        is_joined = split_joined(evidence.question) != evidence.question
        if may_skip and (is_joined or outside_code(evidence.question)):
            closer += self._encoder_specs("parts")[1:]
        quotation = split_quotation(evidence.question)
        if may_skip and quotation.text:
            closer += (*self._encoder_specs("about quotation")[:1], *self._encoder_specs("quotation")[1:])
        spec, question = self._rest_spec(evidence), evidence.question
        rest = leave_out(question, spec.left_out)
        # After earlier turns, only quotation marks tell what a message works on.
        if evidence.request.history and rest != leave_out(question, ()):
            return closer
        return closer + (spec,) * bool(rest)

    def score(self, evidence: Evidence) -> Score:
        """Score by the kinds of the segments, and by the probability that the LLM knows the fact."""
        states, shares = [evidence[spec] for spec in self.specs]
        kinds, texts = self.trained.segments.kinds, states.texts
        if self._reader_spec in evidence.pieces and not states.in_context:
            shares = self.trained.reconsider(shares, evidence[self._reader_spec].whole)
        if works := self.works_on_text(evidence):
            p_given, given = self._p_works(evidence), np.array([kind.name == "given" for kind in kinds])
            corrected = (1 - p_given) * shares + p_given * given
            shares = np.where(self._needs(evidence)[:, None], corrected, shares)
        known, is_news = self._p_fact_known(evidence)
        # A request needs what its most demanding segment needs.
        answered = p_answered(kinds, shares, known)
        decisive = int(np.argmin(answered))
        p, shares_there = float(answered[decisive]), shares[decisive]
        signals = {kind.name: float(share) for kind, share in zip(kinds, shares_there, strict=True)}
        if_unknown = p_answered(kinds, shares, np.zeros(1)).min()
        if_known = p_answered(kinds, shares, np.ones(1)).min()
        if if_known - if_unknown >= _MIN_INFLUENCE:
            signals["known"] = float(known[0])
        reason = f"{_quote(evidence, texts, decisive)} {self._explain(p, shares_there, known, is_news)}"
        score = Score(p, reason, signals=signals, llm=self._judged_llm)
        if count_questions(texts) > _MAX_QUESTIONS:
            return score.overridden(f"Asks more than {_MAX_QUESTIONS} questions.")
        is_short = len(evidence.question.split(None, _MAX_WORDS_WITH_URL)) <= _MAX_WORDS_WITH_URL
        if is_short and _URL.search(evidence.question):
            return score.overridden("Contains a URL, which the LLM cannot have read.")
        if evidence.request.history and p < _MIN_P_KNOWN_IF_UNCLEAR:
            return score.overridden("Follow-up that may need the earlier turns.")
        if works:
            return score
        if need := self._find_need_in_turns(evidence):
            return score.overridden(need)
        own_matter = self.trained.find_own_matter(states.whole, states.segments)
        if own_matter is not None and not evidence.truncated:
            kind, segment = own_matter
            return score.overridden(f"{_quote(evidence, texts, segment)} {kind.about}.")
        if need := self._find_need_in_parts(evidence, p) or self._find_need_in_quotation(evidence):
            return score.overridden(need)
        is_unclear = p < _MIN_P_KNOWN_IF_UNCLEAR and self.trained.romanised.detect(states.whole[None])[0]
        if is_unclear and not detect_encoding(evidence.question):  # Base64 looks romanised, and retrieves
            return score.overridden("Romanised text, which the gate understands less well.")
        return score

    def _find_need_in_turns(self, evidence: Evidence) -> str:
        """Return why a message that would skip because of the earlier turns retrieves, as a sentence; "" if it skips.

        It needs passages by itself, or it is not complete without the question before it, which needs passages.
        """
        message, before = self._encoder_specs("message"), self._encoder_specs("before")
        if message[1] not in evidence.pieces:
            return ""
        kinds = self.trained.segments.kinds
        if _may_stand_alone(evidence.question):
            p_if_known = p_answered(kinds, evidence[message[1]], np.ones(1)).min()
            states = evidence[message[0]]
            is_own = self.trained.find_own_matter(states.whole, states.segments) is not None
            if p_if_known < _MAX_P_KNOWN_IF_ALONE_CLEAR or is_own:
                return "Needs passages by itself, whatever the earlier turns are about."
        if before[1] in evidence.pieces:
            p = max(self._p_by_encoder(evidence, specs).min() for specs in (message, before))
            threshold = self._threshold(evidence)
            if self.self_contained_logits(evidence).min() > 0:
                threshold = min(threshold, _MAX_P_KNOWN_IF_SELF_CONTAINED)
            if p < threshold:
                return "Follows on a question that needs passages."
        return ""

    def _find_need_in_parts(self, evidence: Evidence, p_known: float) -> str:
        """Return which part of a request needs passages, as a sentence; "" if none clearly does.

        The parts are the requests that a line joins, or what is outside code. P(known) is that of the whole request.
        """
        specs = self._encoder_specs("parts")
        if specs[1] not in evidence.pieces:
            return ""
        p = self._p_by_encoder(evidence, specs)
        needy = int(np.argmin(p))
        most = _MAX_P_KNOWN_OF_PART
        if outside_code(evidence.question):
            most = _MAX_P_KNOWN_BESIDE_CODE if p_known < _CLEAR_P_KNOWN_WITH_CODE else 0.0
        if p[needy] >= min(self._threshold(evidence), most):
            return ""
        text = evidence[specs[0]].texts[needy]
        return f"{_quote_text(text)} needs passages by itself."

    def asks_about_quotation(self, evidence: Evidence) -> bool:
        """Return whether the answer depends on what is true about the matter of a text that the request quotes.

        "Is she right?" and "Please draft a reply" ask so, "Translate this" does not. It is only known for a request
        that may skip otherwise.
        """
        about = self._encoder_specs("about quotation")[0]
        if self._encoder_specs("quotation")[1] not in evidence.pieces:
            return False
        least = 0.0 if split_quotation(evidence.question).is_marked else _MIN_LOGIT_UNMARKED
        return bool(self.trained.about_quotation.logits(evidence[about].whole[None])[0] > least)

    def _find_need_in_quotation(self, evidence: Evidence) -> str:
        """Return why a request needs passages that asks about a text that it quotes; "" if it needs none."""
        if not self.asks_about_quotation(evidence):
            return ""
        specs = self._encoder_specs("quotation")
        p = self._p_by_encoder(evidence, specs)
        needy = int(np.argmin(p))
        if p[needy] >= min(self._threshold(evidence), _MAX_P_KNOWN_OF_PART):
            return ""
        text = evidence[specs[0]].texts[needy]
        # `split_quotation` may have added a question mark.
        quoted = text if text in evidence.question else text[:-1]
        return f"Asks about {_quote_text(quoted)}, which needs passages by itself."

    def works_on_text(self, evidence: Evidence) -> bool:
        """Return whether a request needs no passages, as it works on the words of text that would ("Translate this").

        It is only known for a request that retrieves otherwise.
        """
        p = self._p_works(evidence)
        return p > 0 and p >= self._least_p_known(evidence)

    def _p_works(self, evidence: Evidence) -> float:
        """Return P(a request works on the words of its segments that need passages).

        It is 0 if the request was not read for that, or if the rest of it is about an own matter.
        """
        spec = self._rest_spec(evidence)
        rest = evidence[spec].whole[None] if spec in evidence.pieces else None
        if rest is None or self.trained.find_own_matter(rest[0], rest):
            return 0.0
        return float(softmax(self.trained.works_on_text.whole_logits(rest))[0, -1])

    def _rest_spec(self, evidence: Evidence) -> RequestSpec:
        """Return the spec of the states of a request without its segments that need passages."""
        left_out = tuple(np.flatnonzero(self._needs(evidence)).tolist())
        layers = self.trained.first_facts.layers
        return RequestSpec(layers, model=self.proxy, scope="rest", left_out=left_out)

    def _needs(self, evidence: Evidence) -> BoolArray:
        """Return whether each segment seems to need passages, shape (segments,), without the reader."""
        states, p = evidence[self.specs[0]], self._p_by_encoder(evidence, self.specs, own_matters=False)
        needs = p < self._least_p_known(evidence)
        if own_matter := self.trained.find_own_matter(states.whole, states.segments):
            needs[np.argmin(p) if own_matter[1] is None else own_matter[1]] = True
        return needs

    def _least_p_known(self, evidence: Evidence) -> float:
        """Return the threshold; a higher one for a follow-up."""
        least = _MIN_P_KNOWN_IF_UNCLEAR if evidence.request.history else 0.0
        return max(self._threshold(evidence), least)

    def _threshold(self, evidence: Evidence) -> float:
        return self.threshold if evidence.request.threshold is None else evidence.request.threshold

    def _p_by_encoder(self, evidence: Evidence, specs: Specs, *, own_matters: bool = True) -> Float64Array:
        """Return P(known) of each segment that these specs of `_encoder_specs` read, without the reader.

        If one is about an own matter, all are 0, unless ``own_matters`` is False.
        """
        states, shares = [evidence[spec] for spec in specs]
        if own_matters and self.trained.find_own_matter(states.whole, states.segments) is not None:
            return np.zeros(len(shares))
        theta, sd = self._ability
        if not self.trained.english.detect(states.whole[None])[0]:
            theta += _FOREIGN_PENALTY
        known = self.trained.first_facts.p_fact_known(states.whole[None], theta, sd)
        return p_answered(self.trained.segments.kinds, shares, known)

    def p_kinds(self, evidence: Evidence, *names: str) -> Float64Array:
        """Return P(the segment is of one of these kinds) for each segment, shape (segments,)."""
        columns = [i for i, kind in enumerate(self.trained.segments.kinds) if kind.name in names]
        return evidence[self.specs[1]][:, columns].sum(axis=1)

    def self_contained_logits(self, evidence: Evidence) -> Float64Array:
        """Return how clearly each segment asks for nothing beyond itself, shape (segments,); above 0, it does so."""
        layers = len(self.trained.first_facts.layers)
        detector = (
            self.trained.self_contained_turns if evidence.request.history else self.trained.self_contained
        )
        return detector.logits(evidence[self.specs[0]].segments[:, :layers])

    def _p_fact_known(self, evidence: Evidence) -> tuple[Float64Array, bool]:
        """Return P(the LLM knows the fact), shape (1,), and whether the question may be about news."""
        trained = self.trained
        theta, sd = self._ability
        facts, states = trained.first_facts, evidence[self.specs[0]].whole
        if self._reader_spec in evidence.pieces:
            facts, states = trained.facts, evidence[self._reader_spec].whole
        elif not trained.english.detect(states[None])[0]:
            theta += _FOREIGN_PENALTY
        return facts.p_fact_known(states[None], theta, sd), bool(facts.news.detect(states[None])[0])

    @property
    def _ability(self) -> tuple[float, float]:
        """Mean and standard deviation of the LLM's ability."""
        known = self.ability
        return self.trained.facts.default_ability if known is None else (known.theta, known.sd)

    @property
    def _judged_llm(self) -> str:
        if self.ability is None:
            return f"{self.llm_name}, about which nothing is known" if self.llm_name else ""
        source = "as given" if self.llm_name_source in USER_SOURCES else f"named by {self.llm_name_source}"
        return (
            f"{self.ability.llm} ({source}; ability {self.ability.theta:+.1f} ± {self.ability.sd:.1f}: "
            f"{self.ability.source})"
        )

    def depends_on_knowledge(self, score: Score) -> float:
        """Return how far an answer without passages depends on the LLM's knowledge, in [0, 1].

        It is P(answered if the fact is known) divided by P(answered always or if the fact is known), by the kinds in
        the score's signals; 1 if the divisor is 0. Whether the LLM knows the fact plays no part.

        Args:
            score: This gate's score of the request.
        """
        shares = {"always": 0.0, "if_known": 0.0, "never": 0.0}
        for kind in self.trained.segments.kinds:
            shares[kind.answerable] += score.signals.get(kind.name, 0.0)
        answerable = shares["always"] + shares["if_known"]
        return shares["if_known"] / answerable if answerable > 0 else 1.0

    def _explain(self, p: float, shares: Float64Array, known: Float64Array, is_news: bool = False) -> str:
        """Return the reason's words after "The question", about the kind that contributed most to the decision."""
        # If the request retrieves, the kind that adds most to P(not answered); otherwise the one that adds most to
        # P(answered).
        kinds = self.trained.segments.kinds
        answered = np.concatenate([kind.share_answered(known) for kind in kinds])
        top = int(np.argmax(shares * (1 - answered if p < self.threshold else answered)))
        if kinds[top].answerable != "if_known":
            return f"{kinds[top].about} (probability {shares[top]:.2f})."
        llm = self.ability.llm if self.ability else "the LLM"
        reason = f"{kinds[top].about} that {llm} knows with probability {known[0]:.2f}"
        if is_news and self._ability[0] > 0:
            reason += "; it may be news, which a more capable LLM does not know any better"
        return f"{reason}."


def _may_stand_alone(message: str) -> bool:
    """Return whether a message that follows others is long enough to be judged without these."""
    least = _MIN_WORDS_ALONE if message.endswith(QUESTION_MARKS) else _MIN_WORDS_OF_STATEMENT_ALONE
    return count_words(message) >= least


def _quote(evidence: Evidence, texts: Sequence[str], segment: int | None) -> str:
    """Return the beginning of a segment in quotes; "The question" for the only one, or for None."""
    if segment is None or len(texts) == 1:
        return "The question"
    # The user's own letters, unless not all were read, or plain ones changed where segments end.
    own = [] if evidence.truncated else segments(evidence.original)
    return _quote_text(own[segment] if len(own) == len(texts) else texts[segment])


def _quote_text(text: str) -> str:
    return f"“{text[:_MAX_SHOWN]}…”" if len(text) > _MAX_SHOWN else f"“{text}”"
