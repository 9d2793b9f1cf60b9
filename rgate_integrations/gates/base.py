"""`Gate`, the base class of gates: it declares the evidence it needs, and scores it.

A gate owns no model, no queue and no thread.

A new gate is one class: parameters, `Gate.specs` and `Gate.score`. The engine does the rest.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Annotated, Any, ClassVar, Literal, Self, TypeAlias

from pydantic import PlainSerializer, ValidationError

from rgate_integrations.decision import Cost, Draft, Frozen, Options, Outcome, Override, Threshold
from rgate_integrations.errors import ConfigurationError, ModelLoadError, RefusalError, ScoreError
from rgate_integrations.gates.artifacts import SavedGate
from rgate_integrations.gates.evidence.base import Context, Evidence, EvidenceSpec, Piece, expand_specs
from rgate_integrations.models.base import Proxy
from rgate_integrations.runtime.text import logger

Specs: TypeAlias = tuple[EvidenceSpec[Any], ...]

# Bounded, because clients of a server may send any name.
warn_once = lru_cache(maxsize=256)(logger.warning)
_ROUNDING = 1e-6  # how far rounding may move a score out of [0, 1]


@dataclass(frozen=True)
class GateInfo:
    """Describes a gate, for `list_gates` and ``rgate gates``.

    Attributes:
        name: The name for `load_gate`.
        source: Where the method comes from, such as a paper.
        evidence: What the gate looks at, in a few words.
        training: Whether the gate needs training.
        cost: What models do for each question; ``"none"`` if no model runs.
    """

    name: str
    source: str
    evidence: str
    training: Literal["no", "optional", "yes"]
    cost: Literal["none", "one pass", "draft", "draft + judgment", "several samples", "search"]


@dataclass(frozen=True)
class Score:
    """How a gate judges one question; the engine makes the decision from it.

    Attributes:
        p_known: Probability in [0, 1] that the LLM answers correctly without retrieval. Higher means skip.
        reason: A human-readable reason, in one or two sentences; may be empty if there is an override.
        draft: The draft that was judged, if any.
        warnings: Problems that did not stop the gate.
        signals: Probabilities behind `p_known`, by name.
        llm: The LLM whose knowledge was judged, and the source of its name; may be empty.
        threshold: Replaces the gate's threshold, but not a threshold of the request; None to keep the gate's.
        override: A decision that takes precedence over the threshold, if any.
        p_covered: Probability in [0, 1] that a corpus has something on the request; None without a corpus.
        corpora: Names of the corpora to search if the gate retrieves, best first.
        outcome: ``"direct"`` or ``"abstain"`` if no corpus covers the question, the LLM may not know, and
            ``when_uncovered`` says so; None otherwise.
        cost: What the evidence cost; set by the engine.
        caveat: A sentence for the end of the decision's reason, left out if the request has a threshold; may be
            empty.
    """

    p_known: float
    reason: str
    draft: Draft | None = None
    warnings: tuple[str, ...] = ()
    signals: Mapping[str, float] = field(default_factory=dict, hash=False)
    llm: str = ""
    threshold: float | None = None
    override: Override | None = None
    p_covered: float | None = None
    corpora: tuple[str, ...] = ()
    outcome: Outcome | None = None
    cost: Cost = field(default_factory=Cost)
    caveat: str = ""

    def overridden(self, reason: str, *, retrieve: bool = True) -> Score:
        """Return a copy with this override, or the score itself if it keeps the override that it has.

        An override that retrieves replaces one that skips; otherwise the earlier one is kept.
        """
        if self.override is not None and self.override.retrieve >= retrieve:
            return self
        return replace(self, override=Override(retrieve=retrieve, reason=reason))


class Gate(Frozen, Options, ABC):
    """Scores evidence: how likely is it that the LLM knows the answer?

    Gates are immutable values. To use one, pass it to `load_gate`, or to a framework's adapter as
    ``gate=``.

    Examples:
        >>> from rgate_integrations import load_gate
        >>> class Brief(Gate):
        ...     '''Short questions are known.'''
        ...
        ...     words: int = 6
        ...
        ...     @property
        ...     def specs(self):
        ...         return ()
        ...
        ...     def score(self, evidence):
        ...         return Score(float(len(evidence.question.split()) <= self.words), "By its length.")
        >>> load_gate(Brief()).decide("who wrote hamlet?").retrieve
        False

    Attributes:
        threshold: Retrieve iff p_known < threshold: 0 never retrieves, above 1 always does. An override in the
            score takes precedence.
        proxy: Catalogue name (see ``rgate download``), folder or Hub id of the proxy, the model that computes its
            evidence.
        info: Its description; gates that `load_gate` knows by name have one.
        gate_fields: Names of the parameters that hold other gates; `make_gate` also takes a name or config for them.
        argument: Name of the parameter whose value may follow the gate's name and a colon, as in
            ``probe:FOLDER``; empty for none, or if `parse_argument` is overridden.
        judges_llm: Whether `load_gate` accepts ``llm_name=``. True for gates that adjust to that LLM (see `for_llm`),
            and for tuned and calibrated gates, which ignore the name.
    """

    info: ClassVar[GateInfo]
    gate_fields: ClassVar[tuple[str, ...]] = ()
    argument: ClassVar[str] = ""
    judges_llm: ClassVar[bool] = False

    threshold: Threshold = 0.5
    proxy: str = "smollm2-135m-instruct"

    @property
    @abstractmethod
    def specs(self) -> Specs:
        """Specs of the evidence that the gate needs, such as ``(DraftSpec(tokens=16),)``.

        In `score`, ``evidence[spec]`` is the value for a spec.
        """

    def look_closer(self, evidence: Evidence) -> Specs:
        """Return specs of more evidence that `score` needs, given the evidence so far; by default none.

        Must be pure: the same evidence gives the same specs.
        """
        return ()

    @abstractmethod
    def score(self, evidence: Evidence) -> Score:
        """Score the evidence of one question. Must be pure: the same evidence gives the same score."""

    @property
    def name(self) -> str:
        """The name by which `load_gate` knows the gate, or else the name of its class."""
        return self.info.name if hasattr(self, "info") else type(self).__name__

    @property
    def reads_history(self) -> bool:
        """Whether the gate reads the turns before a question."""
        return any(spec.reads_history for spec in expand_specs(self.specs))

    @property
    def reads_drafts(self) -> bool:
        """Whether the gate reads a draft, the beginning of an answer."""
        return any(spec.reads_draft for spec in expand_specs(self.specs))

    def answer_gate(self) -> Gate | None:
        """Return the gate to use for partial answers: by default this one if it reads drafts, otherwise None."""
        return self if self.reads_drafts else None

    def question_gate(self) -> Gate | None:
        """Return the gate to use while there is no draft yet, which reads the question alone.

        None, the default, means that there is no such gate.
        """
        return None

    @property
    def corpora(self) -> tuple[str, ...]:
        """Names of the corpora of which the gate has profiles; decisions say which to search. Empty by default."""
        return ()

    @classmethod
    def parse_argument(cls, argument: str) -> dict[str, Any]:
        """Return the parameters for the part of a name after the colon, as in ``constant:always``.

        Raises:
            ConfigurationError: The gate accepts no argument, or not this one.
        """
        if not cls.argument:
            raise ConfigurationError(
                f"The gate {cls.info.name!r} takes no argument after a colon, but got {argument!r}.",
                hint=f'Use load_gate("{cls.info.name}").',
            )
        return {cls.argument: argument}

    @classmethod
    def from_parameters(cls, parameters: Mapping[str, Any]) -> Self:
        """Return a gate with these parameters.

        Raises:
            ConfigurationError: A parameter is unknown or invalid.
            ModelLoadError: A saved gate or measured ability that a parameter names cannot be loaded.
        """
        try:
            return cls.model_validate(dict(parameters))
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            # Our own validators' messages are better than pydantic's.
            cause = first.get("ctx", {}).get("error")
            if isinstance(cause, ConfigurationError):
                raise cause from error
            name = cls.info.name if hasattr(cls, "info") else cls.__name__
            problem = "unknown parameter" if first["type"] == "extra_forbidden" else first["msg"]
            if first["type"] == "literal_error":
                problem += f", not {first['input']!r:.60}"
            parameter = ".".join(map(str, first["loc"])) or "parameters"
            known = [name for name, field in cls.model_fields.items() if not field.exclude]
            raise ConfigurationError(
                f"The parameters of the gate {name!r} are invalid: {parameter}: {problem}.",
                hint=f"Its parameters are: {', '.join(known)}."
                + (f" For a folder of this name, write './{name}'." if first["type"] == "missing" else ""),
            ) from error

    def replace(self, **parameters: Any) -> Self:
        """Return a copy with changed parameters, or the gate itself if there are none; see `from_parameters`."""
        return self.from_parameters({**self.__dict__, **parameters}) if parameters else self

    def for_llm(self, name: str, name_source: str = "") -> Self:
        """Return a copy adjusted to an LLM, or the gate itself if that changes nothing.

        A gate that was fitted to an LLM's answers always judges that LLM, whatever the name. If the user gave the
        name, a warning is logged.

        Args:
            name: Name of the LLM, or folder of its measured ability.
            name_source: Where the name was detected; empty if the user gave it. The user's name overrides a
                detected one.

        Raises:
            ConfigurationError: The name is a path that does not exist.
            ModelLoadError: The measured ability cannot be read.
        """
        if self.judges_llm and name and not name_source:
            warn_once(
                f"llm_name={name!r} has no effect: the gate {self.name!r} judges the LLM that it was made for."
            )
        return self

    def config(self) -> dict[str, Any]:
        """Return the name and parameters as JSON values, for `rgate_integrations.gates.registry.gate_from_config`."""
        return {"gate": self.name, **self.model_dump(mode="json")}


CLIENT = "the client"
"""The source of an LLM's name that a client sent to a server. Such a name counts as the user's, but is never
read as a folder."""
USER_SOURCES = ("", CLIENT)
"""The sources of a name that the user gave; with any other source, the name was detected."""


class NamedLLMGate(Gate):
    """A gate that judges the knowledge of an LLM by its name.

    Attributes:
        llm_name: Name of the LLM; empty if unknown.
        llm_name_source: Where the name was detected; empty or `CLIENT` if a user gave it.
    """

    judges_llm: ClassVar[bool] = True

    llm_name: str = ""
    llm_name_source: str = ""

    def for_llm(self, name: str, name_source: str = "") -> Self:
        """Return a copy for this LLM, or the gate itself if nothing changes.

        A detected name never replaces one that the user gave.
        """
        is_fixed = bool(self.llm_name) and self.llm_name_source in USER_SOURCES
        is_same = (name, name_source) == (self.llm_name, self.llm_name_source)
        if not name or is_same or (is_fixed and name_source not in USER_SOURCES):
            return self
        return self.replace(llm_name=name, llm_name_source=name_source)


InnerGate = Annotated[Gate, PlainSerializer(Gate.config)]
"""A gate inside another one; `load_gate` accepts a name, a folder or a config for it."""


def share_with_inner(values: Any, inner_field: str, shared: Sequence[str], *defaults: str) -> Any:
    """Return the parameters of a gate with an inner gate, changed so that both have equal values of some fields.

    If such a value is given for the outer gate, it is also set on a copy of the inner gate. If not, the outer gate
    takes it from the inner gate. Without an inner gate, ``values`` is returned unchanged. Call this in a ``before``
    validator, where ``values`` has only what the user gave.

    Args:
        values: The parameters of the outer gate.
        inner_field: Name of the parameter that holds the inner gate.
        shared: Names of the fields in which both must be equal.
        *defaults: Names of further fields that the outer gate takes from the inner gate if they are not given. A
            given value is not set on the inner gate.
    """
    inner = values.get(inner_field) if isinstance(values, dict) else None
    if not isinstance(inner, Gate):
        return values
    inner = inner.replace(**{name: values[name] for name in shared if name in values})
    inherited = {name: getattr(inner, name) for name in (*shared, *defaults)}
    return {**inherited, **values, inner_field: inner}


@dataclass(frozen=True, eq=False)
class ScoreSpec(EvidenceSpec[Score]):
    """Evidence: a gate's score of a question, for the engine and for gates that contain other gates.

    Two specs are equal if they have the same gate object, because comparing gates by value ignores weights.
    """

    reads_model: ClassVar[bool] = False  # the gate's own specs say whether a model reads the question

    gate: Gate

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ScoreSpec) and other.gate is self.gate

    def __hash__(self) -> int:
        return id(self.gate)

    @property
    def needs(self) -> Specs:
        """The evidence that the gate always needs; `compute` adds what `Gate.look_closer` asks for."""
        return self.gate.specs

    def accepts(self, error: Exception) -> bool:
        """Return whether the error is a refusal and the gate has corpora: it says where to search all the same."""
        return isinstance(error, RefusalError) and bool(self.gate.corpora)

    def compute(self, context: Context) -> list[Piece[Score] | Exception]:
        """Return the score of every question; for one that fails, its error. The others are still scored."""
        # Requests that need the same additional evidence share one batch.
        closer: dict[EvidenceSpec[Any], list[Evidence]] = {}
        for evidence in context.evidence:
            for spec in self.gate.look_closer(evidence):
                closer.setdefault(spec, []).append(evidence)
        for spec, some in closer.items():
            replace(context, evidence=some).find(spec)
        pieces: list[Piece[Score] | Exception] = []
        for evidence in context.evidence:
            try:
                pieces.append(Piece(self._score(evidence)))
            except Exception as error:  # `score` may be any user's code
                pieces.append(error)
        return pieces

    def _score(self, evidence: Evidence) -> Score:
        proxy = evidence.proxies.get(self.gate.proxy) or evidence.proxies.get("")
        warnings = _check_model(self.gate, proxy)
        score = self.gate.score(evidence)
        if not isinstance(score, Score):
            raise ScoreError(
                f"The gate {self.gate.name!r} returned {type(score).__name__}, not a Score.",
                hint="Its score() must return Score(p_known, reason).",
            )
        # Rounding is tolerated. Any other score outside [0, 1] is a bug in the gate, and must not skip retrieval.
        p = score.p_known
        if not -_ROUNDING <= p <= 1 + _ROUNDING:  # also true for NaN
            raise ScoreError(
                f"The gate {self.gate.name!r} returned p_known={p}, which is not in [0, 1].",
                hint="Its score() has a bug: fix it, or report it.",
            )
        warnings = tuple(dict.fromkeys((*score.warnings, *warnings)))
        return replace(score, p_known=min(max(p, 0.0), 1.0), warnings=warnings)


def _check_model(gate: Gate, proxy: Proxy | None) -> tuple[str, ...]:
    """Raise an error if the evidence comes from another model than the one the gate was trained or calibrated on.

    Return the warnings: one if that cannot be checked, because the model's weights are unknown; otherwise none.

    Raises:
        ModelLoadError: The fingerprints of the two models differ.
    """
    trained = getattr(gate, "trained", None)  # only gates made on a model have this attribute
    if not isinstance(trained, SavedGate) or proxy is None or trained.fingerprint in ("", proxy.fingerprint):
        return ()
    if not proxy.fingerprint:
        return (
            f"Cannot check that {gate.name!r} was trained or calibrated on {proxy.name!r}, "
            "whose weights are unknown.",
        )
    raise ModelLoadError(
        f"The gate {gate.name!r} was trained or calibrated on {trained.base_model or 'another model'!r}, weights "
        f"{trained.fingerprint}, but now uses the model {proxy.name!r}, weights {proxy.fingerprint}.",
        hint="Load the gate without proxy=, or train or calibrate a gate on the model that it uses now.",
    )
