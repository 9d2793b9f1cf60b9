"""Several heads on one look at a request: what kind each of its segments is, and whether the LLM knows the fact."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, ClassVar, Self

import numpy as np
from pydantic import Field, SkipValidation, model_validator

from rgate_integrations.gates.ability import Ability, check_llm_name, resolve_ability
from rgate_integrations.gates.artifacts import HeadsArtifact, Kind, p_answered
from rgate_integrations.gates.base import GIVEN, Gate, GateInfo, NamedLLMGate, Score, Specs
from rgate_integrations.gates.evidence.base import Evidence
from rgate_integrations.gates.evidence.model_outputs import ReadRequest, RequestSpec
from rgate_integrations.gates.registry import make_gate
from rgate_integrations.gates.trained import TrainedGate
from rgate_integrations.runtime.arrays import Float64Array
from rgate_integrations.runtime.segments import QUESTION_MARKS, count_words

_log = logging.getLogger("rgate_integrations")
_warn_once = lru_cache(maxsize=256)(_log.warning)  # names may come from anybody
_SHOWN = 80  # characters of a segment in a reason
MAX_QUESTIONS_ASKED = 8
"""A request that asks more than this retrieves: among so many, the heads do not find the one that needs it."""
_MUCH = 6
"""Words beside a segment from which on it is judged by itself, too: that much text, such as a log or a mail, outvotes
it. With less, a request is rather understood as a whole."""
_LONG = 60
"""Words of a request beyond which its segments decide alone: the whole of it is mostly what was pasted."""
_ADDRESS = re.compile(r"\b(?:https?://|www\.)\w", re.IGNORECASE)
_FEW = 8
"""Words of a request up to which an address is what it is about. Among more it may stand in a log or in code."""
MIN_P_KNOWN_FOR_FOLLOW_UP = 0.8
"""A message that follows others retrieves below this P(known): what it refers to may have been misunderstood."""


class HeadsGate(TrainedGate, NamedLLMGate):
    """Linear heads on the hidden states of a request: its kind, and whether the LLM knows the fact.

    One pass over the request, no draft. The LLM alone answers some kinds of requests well (thanks, sums, letters),
    some never (private documents, news), and questions of knowledge if it knows the fact::

        p_known = P(kinds that it always answers) + P(kinds that it answers if it knows the fact) * P(known)

    Of a longer request that is also asked of every segment (sentence or line), and what one of them needs, the
    request needs: its P(known) is the lowest. Text that was pasted is a kind of its own, which needs nothing. Of a
    long one, segments decide alone.

    Decisions carry the probabilities of the deciding segment as ``signals``. A draft that is given is not read.

    Attributes:
        artifact: Folder of saved heads, or the name of a shipped one.
        trained: What is in it; read once, when the gate is made.
        llm_name: The LLM that answers, or a folder of ``rgate ability``: `rgate_integrations.gates.ability` says
            what becomes of a name. Empty, or a name that says nothing: an LLM of 8B.
        llm_name_source: Where the name was found; empty if it was given.
        ability: How much the LLM knows; by its name unless given. None where nothing is known of it.
        threshold: The artefact's, unless given.
        proxy: The model it was trained on, unless given: the same model may have another name or folder here.
    """

    info: ClassVar[GateInfo] = GateInfo(
        "heads",
        "linear heads for the kind of request and for knowledge (this package)",
        "hidden states of the question",
        "yes",
        "one pass",
    )
    kind = HeadsArtifact

    trained: SkipValidation[HeadsArtifact] = Field(exclude=True, repr=False)
    ability: Ability | None = None

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
        """The pooled hidden states of the request, and of each segment."""
        return (RequestSpec(self.trained.layers, self.trained.segments.layers, model=self.proxy),)

    def score(self, evidence: Evidence) -> Score:
        """Score by all heads together.

        Raises:
            ModelLoadError: The states are not those of the model that the heads were trained on.
        """
        trained, found = self.trained, evidence[self.specs[0]]
        self.check_states(found.whole, trained.known_weight.shape)
        states = found.whole[None]  # a batch of one
        known = trained.p_fact_known(states, *self._ability)
        by_whole = trained.kind_probabilities(states)
        p, what = float(p_answered(trained.kinds, by_whole, known)[0]), "The question"
        kinds, of_kinds = trained.kinds, by_whole[0]
        follows = bool(evidence.request.history)
        # A message that follows others is understood by the heads of segments alone: they learned from conversations.
        alone = follows or sum(map(count_words, found.texts)) > _LONG
        weakest = self._weakest_segment(found, known, alone)
        if weakest is not None and (alone or weakest[0] < p):
            p, of_kinds, what = weakest
            kinds = trained.segments.kinds
        signals = {kind.name: float(share) for kind, share in zip(kinds, of_kinds, strict=True)}
        signals["known"] = float(known[0])
        reason = f"{what} {self._why(p, kinds, of_kinds, known, bool(trained.about_news(states)[0]))}"
        score = Score(p, reason, signals=signals, llm=self._judged_llm)
        if sum(text.endswith(QUESTION_MARKS) for text in found.texts) > MAX_QUESTIONS_ASKED:
            return score.overridden(f"Asks more than {MAX_QUESTIONS_ASKED} questions.")
        if len(evidence.question.split(None, _FEW)) <= _FEW and _ADDRESS.search(evidence.question):
            return score.overridden("Contains a URL, which the LLM cannot have read.")
        if follows and p < MIN_P_KNOWN_FOR_FOLLOW_UP:
            return score.overridden("Follow-up that may need the earlier turns.")
        return score

    def _weakest_segment(
        self, found: ReadRequest, known: Float64Array, alone: bool
    ) -> tuple[float, Float64Array, str] | None:
        """Return P(known), the kinds and the text of the segment that needs retrieval most, of those judged apart.

        Those are all where segments decide alone; else questions of several, and those beside much text.
        """
        words = list(map(count_words, found.texts))
        judged = []
        for index, text in enumerate(found.texts):
            beside = sum(words) - words[index]
            if alone or beside >= _MUCH or (beside and text.endswith(QUESTION_MARKS)):
                judged.append(index)
        if not judged:
            return None
        segments = self.trained.segments
        kinds = segments.kind_probabilities(found.segments[judged], found.layout[judged])
        p = p_answered(segments.kinds, kinds, known)
        least = int(np.argmin(p))
        text = found.texts[judged[least]]
        if len(text) > _SHOWN:
            text = f"{text[:_SHOWN]}…"
        return float(p[least]), kinds[least], f"“{text}”"

    @property
    def _ability(self) -> tuple[float, float]:
        """Mean and standard deviation of what the LLM knows."""
        if self.ability is None:
            return self.trained.default_ability
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
        for kind in self.trained.segments.kinds:  # those of whole requests are among them
            shares[kind.answerable] += score.signals.get(kind.name, 0.0)
        may = shares["always"] + shares["if_known"]
        return shares["if_known"] / may if may > 0 else 1.0

    def _why(
        self, p: float, kinds: Sequence[Kind], of_kinds: Float64Array, known: Float64Array, news: bool
    ) -> str:
        """Name the kind of request that weighed most for what is decided."""
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
