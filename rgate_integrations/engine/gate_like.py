"""How adapters call a gate: this package's, or any object with `decide_batch` and `adecide_batch`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, Protocol, Unpack, runtime_checkable

from rgate_integrations.decision import Cost, Decision, Draft
from rgate_integrations.engine.decision_engine import DecisionEngine
from rgate_integrations.engine.fallback import explain_threshold, fallback_decision, log_failures
from rgate_integrations.engine.follow_ups import retrieve_unread, why_unread
from rgate_integrations.engine.loading import load_gate, set_llm
from rgate_integrations.engine.requests import valid_threshold
from rgate_integrations.errors import ConfigurationError
from rgate_integrations.gates.answer import answer_gate_of, question_gate_of
from rgate_integrations.gates.base import Gate
from rgate_integrations.gates.evidence.draft import generation_cost
from rgate_integrations.gates.rules import RuleOptions, Rules
from rgate_integrations.runtime.flow import Call, Flow, Step
from rgate_integrations.runtime.text import encodable

OWN = "own"
"""Stands for the first look of the gate that judges; see `answer_first_gates`."""


@runtime_checkable
class GateLike(Protocol):
    """A gate as adapters see it. The user's own object needs these two methods and nothing else."""

    @property
    def decide_batch(self) -> Callable[..., list[Decision]]:
        """Takes a list of questions and returns a decision for each, in order."""

    @property
    def adecide_batch(self) -> Callable[..., Any]:
        """The same, to be awaited."""


def resolve_gate(gate: Any = None, llm_name: str = "") -> GateLike:
    """Return what an adapter's ``gate=`` argument stands for.

    Args:
        gate: An object with both methods as it is; a `Gate`, `load_gate`'s argument or None as `load_gate` takes it.
        llm_name: The LLM whose knowledge is judged; see `load_gate`.

    Raises:
        ConfigurationError: It is none of these, or it judges no LLM by its name.
        UnknownNameError: No gate has that name.
    """
    if isinstance(gate, DecisionEngine) and llm_name:
        return gate.with_options(gate=set_llm(gate.gate, llm_name))
    if isinstance(gate, GateLike):
        if llm_name:
            raise ConfigurationError(
                f"{type(gate).__name__} judges no LLM by its name.", hint="Omit llm_name=."
            )
        return gate
    if gate is None or isinstance(gate, str | Gate):
        return load_gate(gate, llm_name=llm_name)
    raise ConfigurationError(
        f"A gate needs the methods decide_batch and adecide_batch; {type(gate).__name__} lacks one of them.",
        hint='Pass a name such as "ik", a folder, a Gate, or an object with both methods.',
    )


def with_rules(gate: GateLike, **rules: Unpack[RuleOptions]) -> GateLike:
    """Return a gate with rules in place of its own ``always=`` or ``never=``; the gate itself without any.

    Raises:
        ConfigurationError: The gate is an object of the user's own, or a rule is none.
    """
    given = Rules.of(**rules)
    if not given.always and not given.never:
        return gate
    if not isinstance(gate, DecisionEngine):
        raise ConfigurationError(
            f"{type(gate).__name__} takes no rules.", hint="Apply them in its own decide_batch."
        )
    changed = Rules(given.always or gate.rules.always, given.never or gate.rules.never)
    if changed == gate.rules:
        return gate
    return gate.with_options(always=changed.always, never=changed.never)


def answer_first_gates(
    gate: GateLike, question_gate: GateLike | str | None = OWN
) -> tuple[GateLike, GateLike | None]:
    """Return the gate that judges begun answers for a given one, and the gate of the first look.

    Args:
        gate: The gate that an adapter was given. Where it reads the question alone, the gate for begun answers that
            belongs to it judges.
        question_gate: Takes the first look: a gate, or what `load_gate` takes; None for no first look; `OWN` for the
            one that belongs to the gate, if there is one. Another gate would overrule a gate of the user's own.

    Raises:
        ConfigurationError: The gate cannot see an answer, and no gate for begun answers belongs to it.
    """
    judge: GateLike | None = None
    own: GateLike | None = None
    name = type(gate).__name__
    if isinstance(gate, DecisionEngine):
        name = gate.gate.name
        judge = _with_gate(gate, answer_gate_of(gate.gate))
        own = _with_gate(gate, question_gate_of(gate.gate))
    elif _takes(gate.decide_batch, "drafts"):
        judge = gate
    if judge is None:
        raise ConfigurationError(
            f"The gate {name!r} reads the question alone: it cannot judge an answer that was begun.",
            hint="Leave the judging to the default gate, and let yours take the first look: "
            "AnswerFirst(question_gate=...). A gate of your own that judges takes drafts= in decide_batch.",
        )
    if question_gate is None:
        return judge, None
    if question_gate == OWN:
        return judge, own
    return judge, resolve_gate(question_gate)


def _with_gate(engine: DecisionEngine, gate: Gate | None) -> DecisionEngine | None:
    return None if gate is None else engine.with_options(gate=gate)


def for_llm(gate: GateLike, name: str, known_by: str = "") -> GateLike:
    """Return a gate that judges what an LLM knows; the gate itself where that changes nothing.

    Args:
        gate: The gate; one of the user's own knows itself whom it judges.
        name: Name of the LLM; empty for none.
        known_by: Who said so; empty for the user, whose name goes before one that was found.
    """
    if not name or not isinstance(gate, DecisionEngine):
        return gate
    return gate.with_options(gate=gate.gate.for_llm(name, known_by))


def decide(
    gate: GateLike,
    questions: Sequence[str],
    *,
    drafting: Generator[Step, Any, Any] | None = None,
    **options: Any,
) -> Flow[list[Decision]]:
    """Decide for a batch; whatever goes wrong, every question gets a decision to retrieve.

    Args:
        gate: The gate.
        questions: The questions.
        drafting: A flow that returns the ``drafts`` to judge, one a question or None; it fails as the gate does.
        **options: Keyword arguments of the gate's methods, such as ``threshold`` and ``drafts``; None values, and
            those that the method does not take, are left out. A threshold that it does not take is compared with
            the ``p_known`` of its decisions.

    Returns:
        One decision a question, in order.
    """
    asked = list(questions)
    costs: list[Cost] = []
    try:
        if drafting is not None:
            options["drafts"] = drafts = yield from drafting
            costs = [generation_cost([draft] if draft else []) for draft in drafts]
        accepted = {}
        for name, value in options.items():
            if _is_given(value) and _takes(gate.decide_batch, name):
                accepted[name] = value
        found = yield Call(gate.decide_batch, gate.adecide_batch, asked, **accepted)
        if len(found) != len(asked):
            raise ConfigurationError(f"The gate returned {len(found)} decisions for {len(asked)} questions.")
        decisions = list(found)
        if _is_given(options.get("threshold")) and "threshold" not in accepted:
            decisions = _by_threshold(decisions, options["threshold"])
        for place, cost in enumerate(costs):
            decision = decisions[place]
            decisions[place] = decision.model_copy(update={"cost": decision.cost + cost})
        return decisions
    except Exception as error:
        if getattr(gate, "on_error", "retrieve") == "raise":
            raise
        name = type(gate).__name__
        decisions = [fallback_decision(error, question=q, gate=name) for q in asked]
        turns = [turn for history in options.get("histories") or () for turn in history or ()]
        log_failures(decisions, name, turns)
        return decisions


def decide_messages(
    gate: GateLike,
    messages: Sequence[str],
    histories: Sequence[Sequence[str]],
    *,
    drafting: Generator[Step, Any, Any] | None = None,
    drafts: Sequence[Draft | None] | None = None,
    threshold: float | Sequence[float | None] | None = None,
    metadata: Sequence[Mapping[str, Any] | None] | None = None,
    timeout: float | None = None,
) -> Flow[list[Decision]]:
    """Decide for messages of conversations: what the gate cannot understand is retrieved for.

    Args:
        gate: The gate; it gets the ``histories`` if it reads them.
        messages: The messages.
        histories: The turns before each, as lines; none where it is the first.
        drafting: See `decide`. Of a message that is not understood, the draft still says what to search for.
        drafts: The drafts, where they are written already.
        threshold: The threshold, one for all or one a message; None for the gate's own.
        metadata: What is known of each request, for a gate whose rules look at it.
        timeout: How long the gate may take, in seconds; None for the gate's own.

    Returns:
        One decision a message, in order.
    """
    messages = list(map(encodable, messages))  # a gate of the user's own may write JSON of them
    histories = [tuple(map(encodable, history)) for history in histories]
    reads = reads_history(gate)
    pairs = zip(messages, histories, strict=True)
    unread = [why_unread(message, history, reads_history=reads) for message, history in pairs]
    # Without a draft nothing is to be learnt of what is not understood: the gate is not asked.
    has_draft = drafting is not None or drafts is not None
    places = [place for place, why in enumerate(unread) if has_draft or not why]
    options: dict[str, Any] = {"drafts": drafts, "threshold": threshold}
    if (
        "metadata" in inspect.signature(gate.decide_batch).parameters
    ):  # by name: else it may hand on what it gets
        options["metadata"] = metadata
    if reads:
        options["histories"] = [history or None for history in histories]
    for name, values in options.items():
        if isinstance(values, Sequence):
            options[name] = [values[place] for place in places]
    decisions = [Decision(question=message, retrieve=True, p_known=0.0) for message in messages]
    if places:
        asked = [messages[place] for place in places]
        found = yield from decide(gate, asked, drafting=drafting, timeout=timeout, **options)
        for place, decision in zip(places, found, strict=True):
            decisions[place] = decision
    for place, why in enumerate(unread):
        if why:
            decisions[place] = retrieve_unread(decisions[place], why)
    return decisions


def reads_history(gate: GateLike) -> bool:
    """Whether a gate reads the turns before a message: it says so, or its method takes ``histories`` by name."""
    named = "histories" in inspect.signature(gate.decide_batch).parameters
    return bool(getattr(gate, "reads_history", named))


def _by_threshold(decisions: Sequence[Decision], threshold: float | Sequence[float | None]) -> list[Decision]:
    """Compare decisions with thresholds that their gate does not take; one that failed still retrieves."""
    if not isinstance(threshold, Sequence):
        threshold = [threshold] * len(decisions)
    found = []
    for decision, given in zip(decisions, threshold, strict=True):
        if given is not None:
            compared = valid_threshold(given)
            retrieve = decision.error is not None or decision.p_known < compared
            is_turned = retrieve != decision.retrieve
            reason = explain_threshold(decision.reason, decision.p_known, compared, is_turned=is_turned)
            changed = {"threshold": compared, "retrieve": retrieve, "reason": reason}
            decision = decision.model_copy(update=changed)
        found.append(decision)
    return found


def _takes(method: Callable[..., Any], name: str) -> bool:
    """Whether a method has a parameter of that name, or takes any."""
    parameters = inspect.signature(method).parameters
    takes_any = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
    return takes_any or name in parameters


def _is_given(value: Any) -> bool:
    """Whether an option is something else than None, or than a list of nothing but None."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        return any(each is not None for each in value)
    return value is not None
