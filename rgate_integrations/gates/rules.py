"""The user's rules, which say that some requests always or never retrieve, whatever the gate says.

For example, a rule makes questions about contracts retrieve without training a gate. A rule is an example, a pattern
or a function. Requests are compared with examples by the encoder's hidden states at layer 8, which the
default gate reads anyway. These states are much the same for all requests, so their mean is subtracted. The
rest is projected onto the directions in which requests in one language differ most, each scaled to the same variance.
"""

from __future__ import annotations

import codecs
import inspect
import re
import reprlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, TypedDict

import numpy as np
from pydantic import AfterValidator, Discriminator, Field, Tag, TypeAdapter

from rgate_integrations.decision import Request
from rgate_integrations.errors import ConfigurationError, DataFormatError
from rgate_integrations.gates.base import Gate, Score
from rgate_integrations.gates.evidence.base import Context, EvidenceSpec, Piece
from rgate_integrations.gates.evidence.model_outputs import RequestSpec, encoder_pass
from rgate_integrations.models.base import HasStates, PooledLayer, RequestLayers
from rgate_integrations.models.encoder import ENCODER
from rgate_integrations.models.proxies import require_states
from rgate_integrations.prompts import ANSWER
from rgate_integrations.runtime.arrays import Float32Array, Float64Array, unit
from rgate_integrations.runtime.files import SHIPPED, read_file
from rgate_integrations.runtime.records import first_problem
from rgate_integrations.runtime.segments import Segmented, segments, split_joined

Rule: TypeAlias = str | re.Pattern[str] | Callable[..., bool]
"""An example, a pattern to search for, or a function of the question and perhaps of an argument ``metadata``."""

RuleOrRules: TypeAlias = Rule | Sequence[Rule]


class RuleOptions(TypedDict, total=False):
    """The arguments ``always=`` and ``never=``; see `Rules`."""

    always: RuleOrRules
    never: RuleOrRules


ALIKE = 0.28
"""Minimum cosine for a segment (sentence or line) to count as similar to an example; from ``benchmarks/rules.py``."""
LAYER = PooledLayer(8, "question", "mean")
# More that joins a request of at least four words to another: "I want a joke - and who is our contact in Ulm?"
_JOINT = re.compile(
    r"\((?=[^()]*\?\))"
    r"|(?:\s[-–—]+\s|,?\s(?:but|aber|maar|mais|pero|ma|mas)\s|\sand\s(?=w\w+['’]s\s)|,\s(?=(?:please|bitte)\s))"
    r"(?=[^\W\d_]{2}\S*(?:\s+\S+){3})",
    re.IGNORECASE,
)
_MAX_SHOWN = 60  # maximum characters of an example to quote in a reason

_WrittenPattern: TypeAlias = Annotated[
    dict[Literal["pattern"], re.Pattern[str]], Field(min_length=1), AfterValidator(itemgetter("pattern"))
]
# With tags, an error is about a rule as text or about it as a pattern, not about both.
_WrittenRule: TypeAlias = Annotated[
    Annotated[str, Tag("text")] | Annotated[_WrittenPattern, Tag("pattern")],
    Discriminator(lambda rule: "text" if isinstance(rule, str) else "pattern"),
]
_WRITTEN = TypeAdapter(dict[Literal["always", "never"], list[_WrittenRule]])


@dataclass(frozen=True)
class Rules:
    """Rules for what always retrieves and what never does. If both match, the request retrieves.

    A request may also retrieve despite ``never`` if the gate cannot read all of it: because of missing
    earlier turns, its length, or encoded text.

    Attributes:
        always: Rules for requests that always retrieve.
        never: Rules for requests that never retrieve.
    """

    always: tuple[Rule, ...] = ()
    never: tuple[Rule, ...] = ()

    @classmethod
    def coerce(cls, always: RuleOrRules = (), never: RuleOrRules = ()) -> Rules:
        """Return the rules for the arguments ``always=`` and ``never=``, each of which is one or several rules.

        Raises:
            ConfigurationError: A rule is neither an example, a pattern nor a function, or is empty.
        """
        return cls(_check_rules("always", always), _check_rules("never", never))

    @classmethod
    def read(cls, path: str | Path) -> Rules:
        """Return the rules in a JSON file such as ``{"always": ["an example", {"pattern": "contract|invoice"}]}``.

        Raises:
            DataFormatError: The file cannot be read, or does not have this format.
        """
        try:
            rules: dict[Any, Any] = _WRITTEN.validate_json(read_file(path).removeprefix(codecs.BOM_UTF8))
            return cls.coerce(**rules)
        except (OSError, ValueError) as error:
            raise DataFormatError(
                f"The rules in {str(path)!r} cannot be read: {first_problem(error)}.",
                hint='For example: {"always": ["an example", {"pattern": "a regular expression"}], "never": []}',
            ) from error

    @property
    def pattern_order(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The arguments whose patterns and functions are tried before all examples, and those tried after them.

        ``always`` is tried before the examples. So is ``never``, unless ``always`` has examples: then ``never`` is
        tried after them, so that a request that matches both arguments retrieves.
        """
        has_examples = any(isinstance(rule, str) for rule in self.always)
        return (("always",), ("never",)) if has_examples else (("always", "never"), ())

    def match(self, request: Request, names: Sequence[str]) -> Score | None:
        """Return a score with an override for the first pattern or function that matches; None if none does.

        A function that fails, or is async or a generator, counts as a match, and the request retrieves.

        Args:
            request: The request.
            names: ``"always"``, ``"never"`` or both, in the order in which they are tried.
        """
        for name in names:
            for rule in getattr(self, name):
                try:
                    reason = _match_rule(rule, request)
                except (Exception, SystemExit) as error:  # a user's function may raise anything
                    problem = f"A function in {name}= failed, so the gate retrieves: {type(error).__name__}: {error}"
                    return Score(0.0, "", warnings=(problem,)).overridden(problem)
                if reason:
                    return _rule_score(name, reason)
        return None

    def likeness_for(self, gate: Gate) -> tuple[LikenessSpec, ...]:
        """Return a tuple with the spec that compares requests with the examples; empty without examples.

        The spec reuses the hidden states that the gate reads, if possible.
        """
        examples = [("always", rule) for rule in self.always if isinstance(rule, str)]
        examples += [("never", rule) for rule in self.never if isinstance(rule, str)]
        states = encoder_pass(gate.specs, (), (LAYER,))
        return (LikenessSpec(tuple(examples), states),) if examples else ()


@dataclass(frozen=True)
class LikenessSpec(EvidenceSpec[Score | None]):
    """Evidence: the score, with an override, of a request that is similar to an example; None for other requests.

    Attributes:
        examples: (argument, example) pairs, where argument is ``"always"`` or ``"never"``; those of ``"always"`` come
            first.
        states: Spec of the encoder's states that are compared.
    """

    examples: tuple[tuple[str, str], ...]
    states: RequestSpec

    def compute(self, context: Context) -> list[Piece[Score | None]]:
        """Return the result of `compare` for each request; the examples are read once per engine."""
        layer = self.states.segments.index(LAYER)
        encoder = require_states(context.use_proxy(ENCODER))
        texts = [example for _, example in self.examples]
        examples = context.memory(self, lambda: to_directions(read_text_states(texts, encoder)))
        pieces = []
        for read in context.get(self.states):
            score = self.compare(to_directions(read.segments[:, layer]) @ examples.T)
            # What a sentence joins to a request that skips may ask for something else.
            parts = [part for text in read.texts for part in segments(_JOINT.sub("\n", split_joined(text)))]
            if score is not None and score.p_known == 1 and len(parts) > len(read.texts):
                score = self.compare(to_directions(read_text_states(parts, encoder)) @ examples.T)
            pieces.append(Piece(score))
        return pieces

    def compare(self, likeness: Float64Array) -> Score | None:
        """Return a score with an override for the first example that a request resembles; None if it resembles none.

        For an example that retrieves, one similar segment is enough. An example that skips must be similar to
        all segments, so that no other question in the request is skipped.

        Args:
            likeness: Cosines of the directions of segments and examples, shape (segments, examples).
        """
        for (name, example), cosines in zip(self.examples, likeness.T, strict=True):
            cosine = cosines.max() if name == "always" else cosines.min()
            if cosine >= ALIKE:
                return _rule_score(name, f"the example “{example[:_MAX_SHOWN]}” (cosine {cosine:.2f}).")
        return None


def read_text_states(texts: Sequence[str], encoder: HasStates) -> Float32Array:
    """Return the states by which texts are compared, shape (texts, hidden size); each text is read as one segment."""
    as_segments = [Segmented(((" ".join(text.split()),),)) for text in texts]
    pooled = encoder.request_states(ANSWER, as_segments, RequestLayers((LAYER,), (LAYER,)))
    return np.stack([states.segments[0, 0] for states in pooled])


def _check_rules(name: str, rules: RuleOrRules) -> tuple[Rule, ...]:
    """Return one or several rules as a tuple; raises the `ConfigurationError` of `Rules.coerce`."""
    if isinstance(rules, str) or not isinstance(rules, Sequence):
        rules = [rules]
    for rule in rules:
        text = rule.pattern if isinstance(rule, re.Pattern) else rule
        if isinstance(text, str) and not text.strip():  # an empty pattern would match every request
            kind = "An example" if text is rule else "A pattern"
            raise ConfigurationError(f"{kind} in {name}= is empty.", hint="Remove it.")
        if not isinstance(text, str) and not callable(rule):
            raise ConfigurationError(
                f"A rule in {name}= must be an example, a pattern of text or a function, not {reprlib.repr(rule)}.",
                hint=f'For example, {name}=["Which clause ...?", re.compile("contract"), a_function].',
            )
        if callable(rule):
            _check_function(name, rule)
    return tuple(rules)


def _check_function(name: str, rule: Callable[..., object]) -> None:
    """Raise a `ConfigurationError` if a function is async, or cannot be called with a question."""
    problem = "it is async" if inspect.iscoroutinefunction(rule) else ""
    try:
        inspect.signature(rule).bind("", **_options(rule, {}))
    except TypeError as error:
        problem = str(error)
    except ValueError:  # some builtins have no signature
        pass
    if problem:
        function = getattr(rule, "__name__", type(rule).__name__)
        raise ConfigurationError(
            f"The function {function!r} in {name}= cannot be a rule: {problem}.",
            hint="Pass a function of the question, perhaps with a second parameter, metadata.",
        )


def _rule_score(name: str, reason: str) -> Score:
    """Return the score of a request that a rule decides: P(known) is 0 for ``always`` and 1 for ``never``."""
    retrieve = name == "always"
    return Score(float(not retrieve), "").overridden(
        f"A rule in {name}= matches: {reason}", retrieve=retrieve
    )


def _match_rule(rule: Rule, request: Request) -> str:
    """Return why a rule matches a request; empty if it does not match, or if it is an example."""
    if isinstance(rule, re.Pattern):
        return f"the pattern {rule.pattern!r}." if rule.search(request.question) else ""
    if isinstance(rule, str):
        return ""
    name = getattr(rule, "__name__", type(rule).__name__)
    matches: object = rule(request.question, **_options(rule, request.metadata))
    if isinstance(matches, Awaitable | AsyncIterator | Iterator):  # true, whatever it would yield
        raise TypeError(f"{name} returned {type(matches).__name__}, not True or False")
    return f"{name} returned true." if matches else ""


def _options(rule: Callable[..., object], metadata: Any) -> dict[str, Any]:
    """Return the metadata as a keyword argument, if a function takes it."""
    with suppress(ValueError):  # some builtins have no signature
        if "metadata" in inspect.signature(rule).parameters:
            return {"metadata": metadata}
    return {}


def to_directions(states: Float32Array) -> Float64Array:
    """Centre states, project them onto `known_directions`, and scale each to length 1.

    Returns:
        Shape (states, directions).
    """
    mean, directions = known_directions()
    return unit((states.astype(np.float64) - mean) @ directions)


@cache
def known_directions() -> tuple[Float64Array, Float64Array]:
    """Return the shipped mean of requests' states, and the scaled directions in which they differ within a language.

    Returns:
        Shapes (hidden size,) and (hidden size, directions).
    """
    saved = np.load(SHIPPED / "rules" / "likeness.npz")
    return saved["mean"].astype(np.float64), saved["directions"].astype(np.float64)
