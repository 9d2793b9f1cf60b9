"""Rules of the user's own: requests that always retrieve or never do, whatever the gate would say of them.

Nobody should have to train a gate to say that questions about contracts always retrieve. A rule is an example, a
pattern or a function. Examples are compared by the states that the default gate reads anyway: those of layer 8 of the
encoder, without what all requests share (their mean), in the directions in which requests differ most, each scaled to
the same variance. Without that all requests look alike.
"""

from __future__ import annotations

import codecs
import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, TypedDict

import numpy as np
from pydantic import AfterValidator, Field, TypeAdapter

from rgate_integrations.decision import Request
from rgate_integrations.errors import ConfigurationError, DataFormatError
from rgate_integrations.gates.base import Gate, Score
from rgate_integrations.gates.evidence.base import Context, EvidenceSpec, Piece, expand_specs
from rgate_integrations.gates.evidence.model_outputs import RequestSpec
from rgate_integrations.models.base import HasStates
from rgate_integrations.models.encoder import ENCODER
from rgate_integrations.models.pooling import PooledLayer, RequestLayers
from rgate_integrations.models.proxies import require_states
from rgate_integrations.prompts import ANSWER
from rgate_integrations.runtime.arrays import Float32Array, Float64Array
from rgate_integrations.runtime.files import SHIPPED, read_file
from rgate_integrations.runtime.segments import Segmented

Rule: TypeAlias = str | re.Pattern[str] | Callable[..., bool]
"""An example, a pattern that is searched for, or a function of the question or of the question and its metadata."""

RuleOrRules: TypeAlias = Rule | Sequence[Rule]


class RuleOptions(TypedDict, total=False):
    """The arguments ``always=`` and ``never=`` of whatever takes rules; see `Rules`."""

    always: RuleOrRules
    never: RuleOrRules


ALIKE = 0.28
"""The cosine from which a request is like an example; see ``benchmarks/rules.py``."""
LAYER = PooledLayer(8, "question", "mean")
_SHOWN = 60  # characters of an example in a reason

_WrittenPattern: TypeAlias = Annotated[
    dict[Literal["pattern"], re.Pattern[str]], Field(min_length=1), AfterValidator(itemgetter("pattern"))
]
_WRITTEN = TypeAdapter(dict[Literal["always", "never"], list[str | _WrittenPattern]])


@dataclass(frozen=True)
class Rules:
    """What always retrieves and what never does. Where both hold, it retrieves.

    Attributes:
        always: Rules for what retrieves.
        never: Rules for what does not.
    """

    always: tuple[Rule, ...] = ()
    never: tuple[Rule, ...] = ()

    @classmethod
    def coerce(cls, always: RuleOrRules = (), never: RuleOrRules = ()) -> Rules:
        """Return what the arguments ``always=`` and ``never=`` stand for: each a rule, or several.

        Raises:
            ConfigurationError: A rule is none of the three, or an example is empty.
        """
        return cls(_checked("always", always), _checked("never", never))

    @classmethod
    def read(cls, path: str | Path) -> Rules:
        """Read rules from a JSON file.

        It holds ``{"always": ["an example", {"pattern": "a regular expression"}], "never": []}``.

        Raises:
            DataFormatError: It is something else.
        """
        try:
            rules: dict[Any, Any] = _WRITTEN.validate_json(read_file(path).removeprefix(codecs.BOM_UTF8))
            return cls.coerce(**rules)
        except (OSError, ValueError) as error:
            raise DataFormatError(
                f"The rules in {str(path)!r} cannot be read: {error}",
                hint='{"always": ["an example", {"pattern": "a regular expression"}], "never": []}',
            ) from error

    def match(self, request: Request) -> Score | None:
        """Return what patterns and functions say of a request, as an override; None if they say nothing."""
        for name, rules, known in (("always", self.always, 0.0), ("never", self.never, 1.0)):
            for rule in rules:
                try:
                    why = _why(rule, request)
                except Exception as error:  # whatever a user's function raises
                    problem = (
                        f"A function of {name}= failed, so it retrieves: {type(error).__name__}: {error}"
                    )
                    return Score(0.0, "", warnings=(problem,)).overridden(problem)
                if why:
                    return _ruled(name, known, why)
        return None

    def likeness_for(self, gate: Gate) -> tuple[LikenessSpec, ...]:
        """Return what the examples say, by states that the gate reads anyway if it can be; nothing without any."""
        examples = []
        for rules, known in ((self.always, 0.0), (self.never, 1.0)):
            examples += [(rule, known) for rule in rules if isinstance(rule, str)]
        states = RequestSpec((LAYER,), (LAYER,), model=ENCODER)
        for spec in expand_specs(gate.specs):
            if isinstance(spec, RequestSpec) and spec.model == ENCODER and LAYER in spec.segments:
                states = spec
        return (LikenessSpec(tuple(examples), states),) if examples else ()


@dataclass(frozen=True)
class LikenessSpec(EvidenceSpec[Score | None]):
    """What the examples say of a request that is like one of them, with P(known) 0 or 1; None of others.

    Attributes:
        examples: The examples, each with the P(known) of what is like it; those that retrieve first.
        states: The states that are compared.
    """

    examples: tuple[tuple[str, float], ...]
    states: RequestSpec

    def compute(self, context: Context) -> list[Piece[Score | None]]:
        """Compare the requests with the examples, which are read once in the life of an engine."""
        layer = self.states.segments.index(LAYER)
        requests = [directions_of(each.segments[:, layer]) for each in context.get(self.states)]
        encoder = require_states(context.use_proxy(ENCODER))
        examples = context.memory(
            self, lambda: directions_of(states_of([example for example, _ in self.examples], encoder))
        )
        return [Piece(self.compare(request @ examples.T)) for request in requests]

    def compare(self, likeness: Float64Array) -> Score | None:
        """Return what the examples say of a request.

        Of a request of several segments that which is most like an example counts where it would retrieve, and that
        which is least like it where it would not: so nothing that is asked beside it is skipped.

        Args:
            likeness: The cosines of its segments' directions with those of the examples, shape (segments, examples).
        """
        for (example, known), cosines in zip(self.examples, likeness.T, strict=True):
            name, alike = ("never", cosines.min()) if known else ("always", cosines.max())
            if alike >= ALIKE:
                return _ruled(name, known, f"it is like {example[:_SHOWN]!r} ({alike:.2f}).")
        return None


def states_of(texts: Sequence[str], encoder: HasStates) -> Float32Array:
    """Return the states of texts that are compared, each as one segment, shape (texts, hidden size)."""
    as_segments = [Segmented(((" ".join(text.split()),),)) for text in texts]
    layers = RequestLayers((LAYER,), (LAYER,))
    return np.stack([each.segments[0, 0] for each in encoder.request_states(ANSWER, as_segments, layers)])


def _checked(name: str, given: RuleOrRules) -> tuple[Rule, ...]:
    """Return one rule or several as several."""
    if isinstance(given, str) or not isinstance(given, Sequence):
        given = [given]
    for rule in given:
        if isinstance(rule, str) and not rule.strip():
            raise ConfigurationError(f"An example of {name}= is empty.")
        if not isinstance(rule, str | re.Pattern) and not callable(rule):
            raise ConfigurationError(
                f"A rule of {name}= must be an example, a pattern or a function, not {type(rule).__name__}.",
                hint='always=["Which clause ...?", re.compile("contract"), a_function]',
            )
    return tuple(given)


def _ruled(name: str, known: float, why: str) -> Score:
    """Return what a rule decides, without asking the gate."""
    return Score(known, "").overridden(f"The rule {name}=: {why}", retrieve=not known)


def _why(rule: Rule, request: Request) -> str:
    """Return why a pattern or a function holds for a request; empty if it does not."""
    if isinstance(rule, re.Pattern) and rule.search(request.question):
        return f"it matches {rule.pattern!r}."
    if callable(rule):
        given: tuple[Any, ...] = (request.question, request.metadata)
        takes = len(inspect.signature(rule).parameters)
        name = getattr(rule, "__name__", type(rule).__name__)
        if rule(*given[:takes]):
            return f"{name} says so."
    return ""


def directions_of(states: Float32Array) -> Float64Array:
    """Return states as they are compared, of length 1; shape (texts, directions)."""
    mean, directions = known_directions()
    compared = (states.astype(np.float64) - mean) @ directions
    lengths = np.linalg.norm(compared, axis=1, keepdims=True)
    found: Float64Array = compared / np.maximum(lengths, 1e-12)
    return found


@cache
def known_directions() -> tuple[Float64Array, Float64Array]:
    """Return the mean of requests' states, and the scaled directions in which they differ most."""
    saved = np.load(SHIPPED / "rules" / "likeness.npz")
    return saved["mean"].astype(np.float64), saved["directions"].astype(np.float64)
