"""Heads on the states of a request: what kind each of its segments is, and whether the LLM knows the fact."""

from __future__ import annotations

import logging
import re
from functools import lru_cache
from typing import Any, ClassVar, Self

import numpy as np
from pydantic import Field, SkipValidation, model_validator

from rgate_integrations.gates.ability import Ability, check_llm_name, resolve_ability
from rgate_integrations.gates.artifacts import HeadsArtifact, p_answered
from rgate_integrations.gates.base import GIVEN, Gate, GateInfo, NamedLLMGate, Score, Specs
from rgate_integrations.gates.evidence.base import Evidence
from rgate_integrations.gates.evidence.model_outputs import RequestSpec
from rgate_integrations.gates.probability import sigmoids
from rgate_integrations.gates.registry import make_gate
from rgate_integrations.gates.trained import TrainedGate
from rgate_integrations.runtime.arrays import Float64Array
from rgate_integrations.runtime.letters import find_original
from rgate_integrations.runtime.segments import QUESTION_MARKS

_log = logging.getLogger("rgate_integrations")
_warn_once = lru_cache(maxsize=256)(_log.warning)  # names may come from anybody
_SHOWN = 80  # characters of a segment in a reason
MAX_QUESTIONS_ASKED = 8
"""A request that asks more than this retrieves: among so many, the heads do not find the one that needs it."""
_MATTERS = 0.1
"""By how much P(known) must depend on whether a fact is known for a request to ask for one."""
ALWAYS_READ = 40.0
"""A margin so wide that the reader is asked about every fact."""
_ELSEWHERE = -0.4
"""Added to the ability for a fact that is asked for in another language than English. Of SimpleQA in Czech, four LLMs
know less than of SimpleQA in English, by 0 to 0.4 in log-odds."""
NOTHING_ASKED = ("no_knowledge", "given")
"""Kinds of segments that ask for no knowledge."""
_ADDRESS = re.compile(r"\b(?:https?://|www\.)\w", re.IGNORECASE)
_FEW = 8
"""Words of a request up to which an address is what it is about. Among more it may stand in a log or in code."""
MIN_P_KNOWN_FOR_FOLLOW_UP = 0.8
"""A message that follows others retrieves below this P(known): what it refers to may have been misunderstood."""


class HeadsGate(TrainedGate, NamedLLMGate):
    """Heads on the hidden states of a request: its kind, and whether the LLM knows the fact.

    One pass over the request, no draft. The LLM alone answers some kinds of requests well (thanks, sums, letters),
    some never (private documents, news), and questions of knowledge if it knows the fact::

        p_known = P(kinds that it always answers) + P(kinds that it answers if it knows the fact) * P(known)

    That is asked of every segment (sentence or line), and what one of them needs, the request needs: its P(known) is
    the lowest. Text that was pasted is a kind of its own, which needs nothing. The encoder tells the kinds, in any
    language, and takes a first look at facts. A second model, the reader, looks closer at those that may be known
    well enough to skip; it reads English alone. In other languages the first look decides.

    Decisions carry the probabilities of the deciding segment as ``signals``. A draft that is given is not read.

    Attributes:
        artifact: Folder of saved heads, or the name of a shipped one.
        trained: What is in it; read once, when the gate is made.
        llm_name: The LLM that answers, or a folder of ``rgate ability``: `rgate_integrations.gates.ability` says
            what becomes of a name. Empty, or a name that says nothing: an LLM of 8B.
        llm_name_source: Where the name was found; empty if it was given.
        ability: How much the LLM knows; by its name unless given. None where nothing is known of it.
        margin: By how much, in logits, the first look at a fact may be wrong: one that it finds unknown by more
            retrieves without the reader.
        threshold: The artefact's, unless given.
        proxy: The model it was trained on, unless given: the same model may have another name or folder here.
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
    def _know_llm(cls, values: Any) -> Any:
        """Look up what the LLM knows, unless it is given."""
        if not isinstance(values, dict):  # a gate of another kind, which is refused after this
            return values
        ability, name = values.get("ability"), values.get("llm_name", "")
        if ability is None:
            is_given = not values.get("llm_name_source")
            if is_given:
                check_llm_name(name)
            ability, warning = resolve_ability(name, folders=is_given)
            if warning:
                _warn_once(warning)
        if ability == resolve_ability("")[0]:
            ability = None
        return {**values, "ability": ability, "llm_name": name or getattr(ability, "llm", "")}

    def replace(self, **parameters: Any) -> Self:
        """Return a copy with other parameters; one with another artefact or LLM reads it."""
        if "llm_name" in parameters:
            parameters = {"ability": None, "llm_name_source": "", **parameters}
        return super().replace(**parameters)

    def answer_gate(self) -> Gate:
        """Return these heads weighed against the probe of begun answers."""
        gate = make_gate("answer", question=self)
        # Each has a threshold of its own, but one that the caller chose holds for both.
        is_chosen = self.threshold != self.trained.threshold
        return gate.replace(threshold=self.threshold) if is_chosen else gate

    def question_gate(self) -> Gate:
        """Return these heads."""
        return self

    @property
    def specs(self) -> Specs:
        """The pooled hidden states of each segment of the request."""
        layers = self.trained.segments.layers
        return (RequestSpec(layers, layers, model=self.proxy),)

    @property
    def _fact_spec(self) -> RequestSpec:
        facts = self.trained.facts
        return RequestSpec(facts.layers, model=facts.base_model)

    def look_closer(self, evidence: Evidence) -> Specs:
        """Return the reader's states, where it matters whether the LLM knows a fact."""
        read, trained, kinds = evidence[self.specs[0]], self.trained, self._kinds_of(evidence)
        if not trained.is_english(read.whole):
            return ()
        logit_known = trained.first_facts.known_logits(read.whole[None], *self._ability)
        at_best = np.array([0.0, *sigmoids(logit_known + self.margin)])
        if_unknown, if_known = [p_answered(trained.segments.kinds, kinds, p).min() for p in at_best[:, None]]
        threshold = self.threshold if evidence.request.threshold is None else evidence.request.threshold
        return (self._fact_spec,) if if_unknown < threshold <= if_known else ()

    def score(self, evidence: Evidence) -> Score:
        """Score by all heads together.

        Raises:
            ModelLoadError: The states are not those of the models that the heads were trained on.
        """
        kinds_of_request, kinds = self.trained.segments.kinds, self._kinds_of(evidence)
        known, news = self._p_fact_known(evidence)
        texts = evidence[self.specs[0]].texts
        of_segments = p_answered(kinds_of_request, kinds, known)
        weakest = int(np.argmin(of_segments))
        p, shares = float(of_segments[weakest]), kinds[weakest]
        signals = {kind.name: float(share) for kind, share in zip(kinds_of_request, shares, strict=True)}
        at_worst, at_best = [p_answered(kinds_of_request, kinds, p).min() for p in (np.zeros(1), np.ones(1))]
        if at_best - at_worst >= _MATTERS:
            signals["known"] = float(known[0])
        what = "The question"
        if len(texts) > 1:
            text = find_original(evidence.original, texts[weakest]) if evidence.original else texts[weakest]
            what = f"“{text[:_SHOWN]}…”" if len(text) > _SHOWN else f"“{text}”"
        score = Score(p, f"{what} {self._why(p, shares, known, news)}", signals=signals, llm=self._judged_llm)
        if sum(text.endswith(QUESTION_MARKS) for text in texts) > MAX_QUESTIONS_ASKED:
            return score.overridden(f"Asks more than {MAX_QUESTIONS_ASKED} questions.")
        if len(evidence.question.split(None, _FEW)) <= _FEW and _ADDRESS.search(evidence.question):
            return score.overridden("Contains a URL, which the LLM cannot have read.")
        if evidence.request.history and p < MIN_P_KNOWN_FOR_FOLLOW_UP:
            return score.overridden("Follow-up that may need the earlier turns.")
        return score

    def p_nothing_asked(self, evidence: Evidence) -> Float64Array:
        """Return of each segment P(it asks for no knowledge at all): small talk, a task, or text to work on."""
        kinds = self._kinds_of(evidence)
        columns = [i for i, kind in enumerate(self.trained.segments.kinds) if kind.name in NOTHING_ASKED]
        found: Float64Array = kinds[:, columns].sum(axis=1)
        return found

    def _kinds_of(self, evidence: Evidence) -> Float64Array:
        """Return the probability of each kind for each segment, shape (segments, kinds)."""
        found, segments = evidence[self.specs[0]], self.trained.segments
        self.check_states(found.segments[0], segments.states_shape)
        return segments.kind_probabilities(found.segments, found.layout)

    def _p_fact_known(self, evidence: Evidence) -> tuple[Float64Array, bool]:
        """Return P(the LLM knows the fact), shape (1,), and whether the question may be about news."""
        trained = self.trained
        theta, sd = self._ability
        facts, states = trained.first_facts, evidence[self.specs[0]].whole
        self.check_states(states, facts.known_weight.shape)
        if self._fact_spec in evidence.pieces:
            facts, states = trained.facts, evidence[self._fact_spec].whole
            self.check_states(states, facts.known_weight.shape, facts.base_model)
        elif not trained.is_english(states):
            theta += _ELSEWHERE
        return facts.p_fact_known(states[None], theta, sd), bool(facts.about_news(states[None])[0])

    @property
    def _ability(self) -> tuple[float, float]:
        """Mean and standard deviation of what the LLM knows."""
        if self.ability is None:
            return self.trained.facts.default_ability
        return self.ability.theta, self.ability.sd

    @property
    def _judged_llm(self) -> str:
        """The LLM that is judged, and how it is known which."""
        if not self.llm_name:
            return ""
        if self.ability is None:
            return f"an LLM of which nothing is known but its name, {self.llm_name}"
        told = "as given" if self.llm_name_source in GIVEN else f"named by {self.llm_name_source}"
        ability = f"ability {self.ability.theta:+.1f} ± {self.ability.sd:.1f}"
        return f"{self.ability.llm} ({told}; {ability}: {self.ability.source})"

    def depends_on_knowledge(self, score: Score) -> float:
        """Return how much it depends on knowledge whether the LLM answers a request that it may answer, in [0, 1].

        Args:
            score: What this gate said of the request.
        """
        shares = {"always": 0.0, "if_known": 0.0, "never": 0.0}
        for kind in self.trained.segments.kinds:
            shares[kind.answerable] += score.signals.get(kind.name, 0.0)
        may = shares["always"] + shares["if_known"]
        return shares["if_known"] / may if may > 0 else 1.0

    def _why(self, p: float, of_kinds: Float64Array, known: Float64Array, news: bool) -> str:
        """Name the kind of request that weighed most for what is decided."""
        kinds = self.trained.segments.kinds
        shares = np.concatenate([kind.share_answered(known) for kind in kinds])
        if p < self.threshold:
            shares = 1 - shares
        most = int(np.argmax(of_kinds * shares))
        if kinds[most].answerable == "if_known":
            llm = self.ability.llm if self.ability else "the LLM"
            reason = f"{kinds[most].about} that {llm} knows with probability {known[0]:.2f}"
            if news and self._ability[0] > 0:
                reason += ": it may be news, where an abler LLM knows no more"
            return f"{reason}."
        return f"{kinds[most].about} (probability {of_kinds[most]:.2f})."
