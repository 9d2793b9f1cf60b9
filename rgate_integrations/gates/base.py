"""The gate: which evidence it looks at, and how it scores it. Pure: it owns no model, no queue and no thread.

A new gate is one class in one file: parameters, `Gate.specs` and `Gate.score`. The engine does the rest.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Literal, Self, TypeAlias

from pydantic import BaseModel, ConfigDict, PlainSerializer, ValidationError

from rgate_integrations.decision import Cost, Draft, Outcome, Override, Threshold
from rgate_integrations.errors import ConfigurationError, ModelLoadError, ScoreError, no_answer
from rgate_integrations.gates.artifacts import SavedGate
from rgate_integrations.gates.evidence.base import Context, Evidence, EvidenceSpec, Piece, expand_specs
from rgate_integrations.models.base import Proxy

Specs: TypeAlias = tuple[EvidenceSpec[Any], ...]

_ROUNDING = 1e-6


@dataclass(frozen=True)
class GateInfo:
    """What a gate is, for `list_gates` and ``rgate gates``.

    Attributes:
        name: The name that `load_gate` takes.
        paper: Where the method comes from.
        evidence: What it looks at, in a few words.
        training: Whether it needs training: ``"no"``, ``"optional"`` or ``"yes"``.
        cost: What it costs a question.
    """

    name: str
    paper: str
    evidence: str
    training: Literal["no", "optional", "yes"]
    cost: Literal["none", "one pass", "draft", "draft + judgment", "several samples", "search"]


@dataclass(frozen=True)
class Score:
    """What a gate makes of the evidence of one question.

    Attributes:
        p_known: Probability in [0, 1] that the LLM answers rightly without retrieval. Higher means skip.
        reason: One sentence for a person.
        draft: The draft to hand on with the decision, if there is one.
        warnings: What was noticed on the way; the decision carries it.
        signals: Probabilities that `p_known` was made of, by name; the decision carries them.
        llm: The LLM whose knowledge was judged, and how it is known which; the decision carries it.
        threshold: What `p_known` is compared with where the caller says nothing; None for the gate's own.
        override: What decides in place of the threshold; None where the threshold does.
        p_covered: Probability in [0, 1] that a corpus has something on the request; None where no corpus is known.
        corpora: Names of the corpora to search if it retrieves, best first.
        outcome: What a gate that knows corpora decided in place of a search; None otherwise.
        cost: What the evidence cost; the engine fills it in.
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

    def overridden(self, reason: str, *, retrieve: bool = True) -> Score:
        """Return this score with a reason to retrieve, or not to, that counts before the threshold.

        A reason to retrieve stays what it is; the first one that was found is kept.
        """
        if self.override is not None and self.override.retrieve >= retrieve:
            return self
        return replace(self, override=Override(retrieve=retrieve, reason=reason))


class Gate(BaseModel, ABC):
    """Scores evidence: how probable is it that the LLM knows the answer?

    Gates are immutable values. To decide with one, give it to `load_gate`, or to an adapter's ``gate=``.

    Example:
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
        threshold: Retrieve iff p_known < threshold: 0 never retrieves, above 1 always does. An override goes first.
        proxy: Catalogue name, folder or Hub id of the proxy model that its evidence comes from.
        info: What it is; gates that `load_gate` knows by name have one.
        gate_fields: Names of the parameters that hold other gates.
        argument: Name of the parameter that may stand behind a colon, as in ``probe:FOLDER``; empty for none.
        judges_llm: Whether it judges one LLM: by a name, see `for_llm`, or since it was fitted to its answers.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)
    info: ClassVar[GateInfo]
    gate_fields: ClassVar[tuple[str, ...]] = ()
    argument: ClassVar[str] = ""
    judges_llm: ClassVar[bool] = False

    threshold: Threshold = 0.5
    proxy: str = "smollm2-135m-instruct"

    @property
    @abstractmethod
    def specs(self) -> Specs:
        """All the evidence that it looks at."""

    def look_closer(self, evidence: Evidence) -> Specs:
        """Return what else it looks at, after what it has seen of a question; by default nothing.

        `score` finds these pieces in the evidence, too. Pure, as `score` is.
        """
        return ()

    @abstractmethod
    def score(self, evidence: Evidence) -> Score:
        """Score the evidence of one question. Pure: the same evidence gives the same score."""

    @property
    def name(self) -> str:
        """The name by which `load_gate` knows it, or its class's name."""
        return self.info.name if hasattr(self, "info") else type(self).__name__

    @property
    def reads_history(self) -> bool:
        """Whether it judges a question in the light of the turns before it."""
        return any(spec.reads_history for spec in expand_specs(self.specs))

    @property
    def reads_drafts(self) -> bool:
        """Whether it judges the beginning of an answer."""
        return any(spec.reads_draft for spec in expand_specs(self.specs))

    def answer_gate(self) -> Gate | None:
        """Return what judges begun answers: itself, or a gate that belongs to it; None if it has none."""
        return self if self.reads_drafts else None

    def question_gate(self) -> Gate | None:
        """Return what reads the question alone: itself, or a gate of the same family; None without one."""
        return None

    @property
    def corpora(self) -> tuple[str, ...]:
        """Names of the corpora whose profiles it has; its decisions say which of them to search."""
        return ()

    @classmethod
    def parse_argument(cls, argument: str) -> dict[str, Any]:
        """Return the parameters that the part of its name behind the colon stands for, as in ``constant:always``.

        Raises:
            ConfigurationError: It takes no argument, or not this one.
        """
        if not cls.argument:
            raise ConfigurationError(
                f"The gate {cls.info.name!r} takes no argument, but {argument!r} was given.",
                hint=f'Use load_gate("{cls.info.name}").',
            )
        return {cls.argument: argument}

    @classmethod
    def of(cls, parameters: Mapping[str, Any]) -> Self:
        """Make a gate.

        Raises:
            ConfigurationError: A parameter is unknown or out of its range.
        """
        try:
            return cls.model_validate(dict(parameters))
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            cause = first.get("ctx", {}).get("error")
            if isinstance(cause, ConfigurationError):
                raise cause from error
            name = cls.info.name if hasattr(cls, "info") else cls.__name__
            where = ".".join(map(str, first["loc"])) or "parameters"
            known = [parameter for parameter, field in cls.model_fields.items() if not field.exclude]
            raise ConfigurationError(
                f"The gate {name!r} cannot take {where}: {first['msg']}.",
                hint=f"Its parameters are: {', '.join(known)}.",
            ) from error

    def replace(self, **parameters: Any) -> Self:
        """Return a copy with other parameters, the gate itself with none; see `of`."""
        if not parameters:
            return self
        return self.of({**self.__dict__, **parameters})

    def for_llm(self, name: str, name_source: str = "") -> Self:
        """Return a copy that judges what an LLM knows, or the gate itself where that changes nothing.

        A gate that was fitted to the answers of an LLM judges that one, whatever the name.

        Args:
            name: Name of the LLM, or folder of its measured ability.
            name_source: Where the name was found; empty if the user gave it. A given name overrides a found one.
        """
        return self

    def config(self) -> dict[str, Any]:
        """Return name and parameters as JSON values; `gate_from_config` of the registry reads it."""
        return {"gate": self.name, **self.model_dump(mode="json")}


CLIENT = "the client"
"""The source of a name that a client of a server gave: like the user's, but never a folder of this machine."""
GIVEN = ("", CLIENT)


class NamedLLMGate(Gate):
    """A gate that judges what the LLM of a name knows.

    Attributes:
        llm_name: The name.
        llm_name_source: Where the name was found; empty if it was given.
    """

    judges_llm: ClassVar[bool] = True

    llm_name: str = ""
    llm_name_source: str = ""

    def for_llm(self, name: str, name_source: str = "") -> Self:
        """Return a copy that judges what this LLM knows; itself where another was given and this one found."""
        is_given = bool(self.llm_name) and self.llm_name_source in GIVEN
        if (
            not name
            or (name_source not in GIVEN and is_given)
            or (name, name_source) == (self.llm_name, self.llm_name_source)
        ):
            return self
        return self.replace(llm_name=name, llm_name_source=name_source)


InnerGate = Annotated[Gate, PlainSerializer(Gate.config)]
"""A gate inside of another one. `load_gate` takes a name, a folder or a config in its place."""


@dataclass(frozen=True, eq=False)
class ScoreSpec(EvidenceSpec[Score]):
    """What a gate makes of a question: what the engine asks for, and what gates of gates look at.

    Two are equal if they are about the very same gate object.

    Attributes:
        gate: The gate.
    """

    reads_model: ClassVar[bool] = False  # if a model reads the question, the gate's own specs say so

    gate: Gate

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ScoreSpec) and other.gate is self.gate

    def __hash__(self) -> int:
        return id(self.gate)

    @property
    def needs(self) -> Specs:
        """Everything that the gate looks at."""
        return self.gate.specs

    def compute(self, context: Context) -> list[Piece[Score] | Exception]:
        """Score every question; what is wrong with one is returned, so that the others go on."""
        found: list[Piece[Score] | Exception] = []
        closer: dict[EvidenceSpec[Any], list[Evidence]] = {}
        for evidence in context.evidence:
            for spec in self.gate.look_closer(evidence):
                closer.setdefault(spec, []).append(evidence)
        for spec, some in closer.items():
            context.part(some).find(spec)
        drafts = [spec for spec in expand_specs(self.gate.specs) if spec.reads_draft]
        for evidence in context.evidence:
            try:
                check_answers([evidence[spec] for spec in drafts if spec in evidence.pieces])
                used = evidence.proxies.get(self.gate.proxy) or evidence.proxies.get("")
                warnings = _check_model(self.gate, used)
                score = self.gate.score(evidence)
                p = score.p_known
                if not -_ROUNDING <= p <= 1 + _ROUNDING:  # NaN is in no range
                    raise ScoreError(f"The gate {self.gate.name!r} gave the score {p}.")
                warnings = tuple(dict.fromkeys((*score.warnings, *warnings)))
                found.append(Piece(replace(score, p_known=min(max(p, 0.0), 1.0), warnings=warnings)))
            except Exception as error:  # `score` may be any user's code
                found.append(error)
        return found


def check_answers(pieces: Sequence[Any]) -> None:
    """Refuse a draft that is no answer: of what the LLM knows, it says nothing.

    Raises:
        NoAnswerError: One is empty, a refusal, or a call of a tool.
    """
    for draft in pieces:
        if isinstance(draft, Draft) and draft.missing:
            raise no_answer(draft.missing, thinking=draft.is_cut_off)


def _check_model(gate: Gate, used: Proxy | None) -> tuple[str, ...]:
    """Refuse evidence of another model than the one that a gate was trained on, if its file says which.

    Returns:
        A warning for the decision if the used model's weights are unknown: that does not make them the same.

    Raises:
        ModelLoadError: The fingerprints differ.
    """
    trained = getattr(gate, "trained", None)  # of gates that were trained on a model
    if not isinstance(trained, SavedGate) or used is None or trained.fingerprint in ("", used.fingerprint):
        return ()
    if not used.fingerprint:
        return (
            f"Whether {used.name!r} is the model that the gate {gate.name!r} was trained on cannot be checked.",
        )
    raise ModelLoadError(
        f"The gate {gate.name!r} was trained on {trained.base_model!r} (weights {trained.fingerprint}), but "
        f"{used.name!r} has the weights {used.fingerprint}.",
        hint=f"Load it with proxy={trained.base_model!r}, or train a gate for this model.",
    )
