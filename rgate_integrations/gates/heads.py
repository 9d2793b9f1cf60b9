"""Several heads on one look at a request: what kind each of its segments is, and whether the LLM knows the fact."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, ClassVar, Self, cast

import numpy as np
from pydantic import Field, SkipValidation, model_validator

from rgate_integrations.artifacts.folder import TrainedOn, check_fingerprint
from rgate_integrations.artifacts.heads import HeadsArtifact, Kind, read_heads, share_served
from rgate_integrations.errors import ModelLoadError
from rgate_integrations.evidence.base import Evidence
from rgate_integrations.evidence.segments import RequestSpec
from rgate_integrations.gates.abilities.resolve import resolve_ability
from rgate_integrations.gates.ability import Ability
from rgate_integrations.gates.base import Gate, GateInfo, Score, Specs
from rgate_integrations.runtime.arrays import Float64Array

_KNOWN = "known"
_log = logging.getLogger("rgate_integrations")
_SHOWN = 80  # characters of a segment in a reason
MOST_QUESTIONS = 8
"""A request that asks more than this retrieves: among so many, the heads do not find the one that needs it."""
_MUCH = 6
"""Words beside a segment from which on it is judged by itself, too: that much text, such as a log or a mail, outvotes
it. With less, a request is rather understood as a whole."""
CLEARLY_NEEDLESS = 0.85
"""A message that follows others retrieves below this P(known): what it refers to may have been misunderstood."""


class HeadsGate(Gate):
    """Linear heads on the hidden states of a request: its kind, and whether the LLM knows the fact.

    One pass over the request, no draft. The LLM alone serves some kinds of requests well (thanks, sums, letters),
    some never (private documents, news), and questions of knowledge if it knows the fact::

        p_known = P(kinds that it always serves) + P(kinds that it serves if it knows the fact) * P(known)

    Of a longer request that is also asked of every segment (sentence or line), and what one of them needs, the
    request needs: its P(known) is the lowest. Text that was pasted is a kind of its own, which needs nothing.

    Decisions carry the probabilities of the deciding segment as ``signals``. A draft that is given is not read.

    Attributes:
        artifact: Folder of saved heads, or the name of a shipped one.
        trained: What is in it; read once, when the gate is made.
        llm_name: The LLM that answers, or a folder of ``rgate ability``: `rgate_integrations.gates.abilities` says
            what becomes of a name. Empty, or a name that says nothing: an LLM of 8B.
        llm_known_by: Who told the name; empty where it was given.
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

    artifact: str
    trained: SkipValidation[HeadsArtifact] = Field(
        default=cast(HeadsArtifact, None), exclude=True, repr=False
    )  # never None: it is read with the other parameters
    llm_name: str = ""
    llm_known_by: str = ""
    ability: Ability | None = None

    @model_validator(mode="before")
    @classmethod
    def _from_artifact(cls, values: Any) -> Any:
        if not isinstance(values, dict) or not isinstance(values.get("artifact"), str):
            return values
        trained = values.get("trained") or read_heads(values["artifact"])
        ability = values.get("ability") or _ability_of(values.get("llm_name", ""))
        read = {"trained": trained, "ability": ability}
        return {"threshold": trained.threshold, "proxy": trained.base_model, **values, **read}

    @classmethod
    def from_argument(cls, argument: str, load: Callable[[str], Gate], **options: Any) -> Self:
        """Read ``heads:FOLDER``."""
        return cls.model_validate({"artifact": argument, **options})

    def changed(self, **parameters: Any) -> Self:
        """Return a copy with other parameters; one with another artefact or LLM reads it."""
        if "artifact" in parameters:
            parameters = {"trained": None, **parameters}
        if "llm_name" in parameters:
            parameters = {"ability": None, "llm_known_by": "", **parameters}
        return super().changed(**parameters)

    def for_llm(self, name: str, known_by: str = "") -> Self:
        """Return a copy that judges what this LLM knows; itself where another was given and this one found."""
        given = (self.llm_name or self.ability is not None) and not self.llm_known_by
        if not name or (known_by and given) or (name, known_by) == (self.llm_name, self.llm_known_by):
            return self
        return self.changed(llm_name=name, llm_known_by=known_by)

    @property
    def judges_llm(self) -> bool:
        """It does."""
        return True

    @property
    def specs(self) -> Specs:
        """The pooled hidden states of the request, and of each segment."""
        return (self._request,)

    @property
    def _request(self) -> RequestSpec:
        segments = self.trained.segments
        return RequestSpec(self.trained.layers, segments.layers if segments else ())

    def score(self, evidence: Evidence) -> Score:
        """Score by all heads together.

        Raises:
            ModelLoadError: The states are not those of the model that the heads were trained on.
        """
        warnings = self._check(evidence)
        found = evidence[self._request]
        states = found.whole[None]  # a batch of one
        known = self.trained.p_fact_known(states, *self._ability)
        by_whole = self.trained.kind_probabilities(states)
        kinds, of_kinds = self.trained.kinds, by_whole[0]
        p = float(self.trained.p_known(by_whole, known)[0])
        what = "The question"
        segments = self.trained.segments
        has_history = bool(evidence.inputs.history)
        # A message that follows others is understood by the heads of segments alone: they learned from conversations.
        judged = list(range(len(found.texts))) if has_history else _judged_apart(found.texts)
        if segments is not None and judged:
            by_segment = segments.kind_probabilities(found.segments[judged], found.layout[judged])
            of_segments = segments.p_known(by_segment, float(known[0]))
            least = int(np.argmin(of_segments))
            if has_history or of_segments[least] < p:
                kinds, of_kinds, p = segments.kinds, by_segment[least], float(of_segments[least])
                what = f"“{shortened(found.texts[judged[least]])}”"
        signals = {kind.name: float(share) for kind, share in zip(kinds, of_kinds, strict=True)}
        signals[_KNOWN] = float(known[0])
        reason = self._reason(what, p, signals, known)
        if sum(text.endswith("?") for text in found.texts) > MOST_QUESTIONS:
            p, reason = 0.0, f"It asks more than {MOST_QUESTIONS} questions, so it retrieves."
        if has_history and p < CLEARLY_NEEDLESS:
            p, reason = 0.0, f"It follows on what was said before, and is not clearly needless. {reason}"
        return Score(p, reason, None, warnings, signals, self.judged_llm)

    @property
    def _ability(self) -> tuple[float, float]:
        """Mean and standard deviation of what the LLM knows.

        The kinds do not find all that changes with time, above all news that nobody dates: what is left is retrieved
        for because P(known) is low. So an LLM that nobody named may count as less able than the default one, not as
        abler.
        """
        if self.ability is None:
            return self.trained.default_ability
        theta = min(self.ability.theta, 0.0) if self.llm_known_by else self.ability.theta
        return theta, self.ability.sd

    @property
    def judged_llm(self) -> str:
        """The LLM that is judged, and how it is known which."""
        if self.ability is None:
            unknown = f"an LLM of which nothing is known but its name, {self.llm_name}"
            return unknown if self.llm_name else ""
        told = f"named by {self.llm_known_by}" if self.llm_known_by else "as given"
        ability = f"ability {self.ability.theta:+.1f} ± {self.ability.sd:.1f}"
        return f"{self.ability.llm} ({told}; {ability}: {self.ability.source})"

    def depends_on_knowledge(self, score: Score) -> float:
        """Return how much it depends on knowledge whether the LLM serves a request that it may serve, in [0, 1].

        Args:
            score: What this gate said of the request.
        """
        shares = dict.fromkeys(("always", "if known", "never"), 0.0)
        for kind in self._kinds:
            shares[kind.served] += score.signals.get(kind.name, 0.0)
        may = shares["always"] + shares["if known"]
        return shares["if known"] / may if may > 0 else 1.0

    @property
    def _kinds(self) -> tuple[Kind, ...]:
        """All kinds, those of segments too."""
        segments = self.trained.segments
        return self.trained.kinds if segments is None else segments.kinds

    def _reason(self, what: str, p: float, signals: Mapping[str, float], known: Float64Array) -> str:
        """Name the kind of request that weighed most for what is decided."""
        kinds = [kind for kind in self._kinds if kind.name in signals]
        weights = []
        for kind in kinds:
            share = float(share_served(kind, known)[0])
            weights.append(signals[kind.name] * (share if p >= self.threshold else 1 - share))
        kind = kinds[int(np.argmax(weights))]
        if kind.served == "if known":
            llm = self.ability.llm if self.ability else "the LLM"
            return f"{what} {kind.about} that {llm} knows with probability {known[0]:.2f}."
        return f"{what} {kind.about} (probability {signals[kind.name]:.2f})."

    def _check(self, evidence: Evidence) -> tuple[str, ...]:
        """Check that states are of the model that the heads were trained on; returns warnings."""
        trained, used = self.trained, evidence.made_by(self._request)
        base = TrainedOn(trained.base_model, trained.fingerprint)
        warnings = check_fingerprint(self.artifact, base, used.model, used.fingerprint)
        shape, wanted = evidence[self._request].whole.shape, trained.known_weight.shape
        if shape != wanted:
            raise ModelLoadError(
                f"The gate {self.artifact!r} was trained on {trained.base_model!r} (states of shape {wanted}), but "
                f"{used.model!r} gives {shape}.",
                hint=f"Load it with proxy={trained.base_model!r}.",
            )
        return warnings


def _ability_of(name: str) -> Ability | None:
    """Return the ability of the LLM that a name says; None where it says none, and a warning in the log, once."""
    ability, warning = resolve_ability(name)
    if warning:
        _warn_once(warning)
    return None if ability == resolve_ability("")[0] else ability


@cache
def _warn_once(warning: str) -> None:
    _log.warning(warning)


def _judged_apart(texts: Sequence[str]) -> list[int]:
    """Return which segments are judged by themselves, too: questions of several, and those beside much text."""
    words = [len(text.split()) for text in texts]
    found = []
    for place, text in enumerate(texts):
        beside = sum(words) - words[place]
        if beside >= _MUCH or (beside and text.endswith("?")):
            found.append(place)
    return found


def shortened(text: str) -> str:
    """Return a text, or its beginning, for a message."""
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
