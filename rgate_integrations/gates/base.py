"""The gate: which evidence it looks at, and how it scores it. Pure: it owns no model, no queue and no thread.

A new gate is one class in one file: parameters, `Gate.specs` and `Gate.score`. The engine does the rest.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, Self, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rgate_integrations.decision import Draft
from rgate_integrations.errors import ConfigurationError
from rgate_integrations.gates.evidence.base import Evidence, EvidenceSpec, Inputs

CostClass = Literal["none", "one pass", "draft", "draft + judgment", "several samples", "search"]
Threshold = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]
Specs: TypeAlias = tuple[EvidenceSpec[Any], ...]


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
    cost: CostClass


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
    """

    p_known: float
    reason: str
    draft: Draft | None = None
    warnings: tuple[str, ...] = ()
    signals: Mapping[str, float] = field(default_factory=dict, hash=False)
    llm: str = ""
    threshold: float | None = None


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
        threshold: Retrieve iff p_known < threshold. 0 never retrieves, anything above 1 always does.
        proxy: Catalogue name, folder or Hub id of the proxy model that its evidence comes from.
        info: What it is; gates that `load_gate` knows by name have one.
        gate_fields: Names of the parameters that hold other gates.
        argument: Name of the parameter that may stand behind a colon, as in ``probe:FOLDER``; empty for none.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)
    info: ClassVar[GateInfo]
    gate_fields: ClassVar[tuple[str, ...]] = ()
    argument: ClassVar[str] = ""

    threshold: Threshold = 0.5
    proxy: str = "smollm2-135m-instruct"

    @property
    @abstractmethod
    def specs(self) -> Specs:
        """All the evidence that it may look at."""

    def looks(self, inputs: Inputs) -> Sequence[Specs]:
        """Return what to look at for a question, one look after another; by default at everything at once.

        `score` is called after each look. If it returns None there, or the look fails, the next look follows.
        """
        return (self.specs,)

    @abstractmethod
    def score(self, evidence: Evidence) -> Score | None:
        """Score the evidence of one question. Pure: the same evidence gives the same score.

        Returns:
            The score; or None before the last look, if it is not clear yet.
        """

    @property
    def name(self) -> str:
        """The name by which `load_gate` knows it, or its class's name."""
        return self.info.name if hasattr(self, "info") else type(self).__name__

    @classmethod
    def from_argument(cls, argument: str, load: Callable[[str], Gate], **options: Any) -> Self:
        """Make the gate from the part of its name behind the colon, as in ``constant:always``.

        Args:
            argument: What is behind the colon.
            load: Makes a gate from a name, for gates of gates.
            **options: Its other parameters.

        Raises:
            ConfigurationError: It takes no argument, or not this one.
        """
        if not cls.argument:
            raise ConfigurationError(
                f"The gate {cls.info.name!r} takes no argument, but {argument!r} was given.",
                hint=f'Use load_gate("{cls.info.name}").',
            )
        return cls.model_validate({cls.argument: argument, **options})

    def changed(self, **parameters: Any) -> Self:
        """Return a copy with other parameters.

        Raises:
            ConfigurationError: A parameter is unknown or out of its range.
        """
        try:
            return type(self).model_validate({**self.__dict__, **parameters})
        except ValidationError as error:
            raise configuration_error(type(self), error) from error

    def for_llm(self, name: str, known_by: str = "") -> Self:
        """Return a copy that judges what an LLM knows, or the gate itself where that changes nothing.

        A gate that was fitted to the answers of an LLM judges that one, whatever the name.

        Args:
            name: Name of the LLM, or folder of its measured ability.
            known_by: Who said so. A name that nobody gave, but that was found, does not replace one that was given.
        """
        changed: dict[str, Gate] = {}
        for field_name in self.gate_fields:
            gate: Gate = getattr(self, field_name)
            told = gate.for_llm(name, known_by)
            if told is not gate:
                changed[field_name] = told
        return self.changed(**changed) if changed else self

    @property
    def judges_llm(self) -> bool:
        """Whether it, or a gate in it, judges an LLM by its name."""
        return any(getattr(self, field_name).judges_llm for field_name in self.gate_fields)

    def config(self) -> dict[str, Any]:
        """Return name and parameters as JSON values; `rgate_integrations.gates.gate_from_config` reads it."""
        return {"gate": self.name, **self.model_dump(mode="json")}

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and isinstance(other, Gate) and self.config() == other.config()

    def __hash__(self) -> int:
        return hash(json.dumps(self.config(), sort_keys=True))


def configuration_error(gate: type[Gate], error: ValidationError) -> ConfigurationError:
    """Say in one sentence which parameter a gate cannot take, and which there are."""
    first = error.errors(include_url=False)[0]
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, ConfigurationError):
        return cause
    name = gate.info.name if hasattr(gate, "info") else gate.__name__
    where = ".".join(str(part) for part in first["loc"]) or "parameters"
    known = [parameter for parameter, field in gate.model_fields.items() if not field.exclude]
    return ConfigurationError(
        f"The gate {name!r} cannot take {where}: {first['msg']}.",
        hint=f"Its parameters are: {', '.join(known)}.",
    )
