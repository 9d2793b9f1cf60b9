"""From what a user gives, a name, a gate or an object of their own, to what decides."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeAlias, Unpack

from rgate_integrations.corpus.profile import CorpusProfile
from rgate_integrations.engine.decider import Decider, OnError
from rgate_integrations.engine.decision_engine import DecisionEngine
from rgate_integrations.engine.own_gate import GateLike, OwnGate
from rgate_integrations.errors import ConfigurationError
from rgate_integrations.gates.base import Gate
from rgate_integrations.gates.corpus import CorpusGate
from rgate_integrations.gates.evidence.base import Drafter
from rgate_integrations.gates.registry import make_gate
from rgate_integrations.gates.rules import RuleOptions, RuleOrRules
from rgate_integrations.models.base import Proxy

OneCorpus: TypeAlias = CorpusProfile | str | Path
Corpus: TypeAlias = OneCorpus | Iterable[OneCorpus] | Mapping[str, OneCorpus]
"""A profile or its folder, several of them, or each by the name that decisions give the corpus."""


class GateOptions(RuleOptions, total=False):
    """What adapters take beside a gate: rules, and what is searched; see `load_gate`.

    Attributes:
        corpus: Also True: the adapter makes the profile of the passages that it has at hand.
        prefer: See `CorpusGate`.
        when_uncovered: See `CorpusGate`.
        top: See `CorpusGate`.
    """

    corpus: Corpus | bool | None
    prefer: Literal["corpus", "llm"] | None
    when_uncovered: Literal["retrieve", "direct", "abstain"] | None
    top: int | None


DEFAULT_GATE = "default"
_ANSWER_GATE = f"answer:{DEFAULT_GATE},default-answer"
DEFAULT_GATES = {
    "proxy": DEFAULT_GATE,
    "none": DEFAULT_GATE,
    "recorded": _ANSWER_GATE,
    "llm": _ANSWER_GATE,
}
"""The shipped gate for each source of the draft."""


def load_gate(
    name: str | Gate | None = None,
    *,
    proxy: Proxy | str | None = None,
    llm: Drafter | None = None,
    on_error: OnError = "retrieve",
    timeout: float | None = None,
    llm_name: str = "",
    always: RuleOrRules = (),
    never: RuleOrRules = (),
    corpus: Corpus | None = None,
    **parameters: Any,
) -> DecisionEngine:
    """Return a gate that decides. No model is loaded until its first decision.

    Args:
        name: A gate's name (see ``rgate gates``), with an argument after a colon where it takes one
            (``"constant:random:0.5"``); the name of a shipped gate; the folder or Hub id of a trained one; the URL
            of a decision server (``rgate serve``); or a gate of your own. None is ``"default"``, the shipped
            default gate.
        proxy: Catalogue name, folder or Hub id of the proxy model, or a `Proxy` object.
        llm: Writes the drafts of gates with ``source="llm"``. If it has a name, its knowledge is judged.
        on_error: What a failure does: ``"retrieve"`` or ``"raise"``; see `DecisionEngine`.
        timeout: How long a decision may take, in seconds, before it retrieves; see `DecisionEngine`.
        llm_name: Name of the LLM that answers, or folder of ``rgate ability``: what it knows is judged. It goes
            before a name that is found, as of ``llm``; a gate that was tuned on an LLM goes before both.
        always: Rules for what always retrieves: examples ("questions like these"), patterns, and functions of the
            question and its metadata; one or several.
        never: Rules for what never does.
        corpus: What is searched, see `Corpus`: what it covers decides, too.
        **parameters: Parameters of the gate, such as ``threshold``; with a corpus also those of `CorpusGate`.

    Raises:
        UnknownNameError: No gate has that name; the hint suggests the nearest.
        ProfileError: A profile cannot be read.
        ConfigurationError: A parameter is unknown or out of its range, or the gate judges no LLM by its name.
        ModelLoadError: A trained gate or a measured ability cannot be read.
    """
    own = CorpusGate.own_parameters if corpus is not None else ()
    corpus_parameters = {each: parameters.pop(each) for each in own if each in parameters}
    if isinstance(name, Gate):
        gate = name.replace(**parameters)
    else:
        if isinstance(proxy, str):  # also for what reads it while it is made, such as gates of gates
            parameters["proxy"] = proxy
        gate = make_gate(DEFAULT_GATE if name is None else str(name), **parameters)
    served = getattr(llm, "name", "")
    if isinstance(served, str):
        gate = gate.for_llm(served, "the model that drafts")
    if llm_name:
        gate = set_llm(gate, llm_name)
    if corpus is not None:
        gate = set_corpora(gate, corpus, **corpus_parameters)
    return DecisionEngine(
        gate, proxy=proxy, llm=llm, on_error=on_error, timeout=timeout, always=always, never=never
    )


def read_profiles(corpus: Corpus) -> tuple[CorpusProfile, ...]:
    """Return the profiles that ``corpus=`` stands for.

    Raises:
        ProfileError: One cannot be read.
        ConfigurationError: It is something else.
    """
    if isinstance(corpus, CorpusProfile | str | Path) or not isinstance(corpus, Iterable):
        corpus = [corpus]
    named: list[tuple[str, Any]] = (
        list(corpus.items()) if isinstance(corpus, Mapping) else [("", each) for each in corpus]
    )
    profiles = []
    for name, given in named:
        profile = CorpusProfile.load(given) if isinstance(given, str | Path) else given
        if not isinstance(profile, CorpusProfile):
            raise ConfigurationError(
                f"A corpus must be a CorpusProfile or its folder, not {type(profile).__name__}.",
                hint="CorpusProfile.from_texts(texts), or rgate profile",
            )
        profiles.append(replace(profile, name=name) if name else profile)
    return tuple(profiles)


def set_corpora(gate: Gate, corpus: Corpus, **parameters: Any) -> CorpusGate:
    """Return a gate that also knows what corpora cover, in place of those that it knew.

    Raises:
        ProfileError: A profile cannot be read.
        ConfigurationError: A parameter is out of its range, or two corpora have one name.
    """
    inner = gate.inner if isinstance(gate, CorpusGate) else gate
    return CorpusGate.of({"inner": inner, "profiles": read_profiles(corpus), **parameters})


def set_llm(gate: Gate, llm_name: str) -> Gate:
    """Return a gate that judges what an LLM knows, or one that was fitted to an LLM as it is.

    Raises:
        ConfigurationError: It judges no LLM by its name.
    """
    if not gate.judges_llm:
        raise ConfigurationError(
            f"The gate {gate.name!r} judges no LLM by its name, but llm_name={llm_name!r} was given.",
            hint="Gates with heads do, such as the default one.",
        )
    return gate.for_llm(llm_name)


def resolve_gate(gate: Any = None, llm_name: str = "", **options: Unpack[GateOptions]) -> Decider:
    """Return what an adapter's ``gate=`` argument and its further options stand for.

    Args:
        gate: A gate, `load_gate`'s argument, an object with `decide_batch` and `adecide_batch`, or None.
        llm_name: The LLM whose knowledge is judged; see `load_gate`.
        **options: Rules, and what is searched. ``corpus=True`` is left to the adapter.

    Raises:
        ConfigurationError: It is none of these, it judges no LLM by its name, or it cannot take an option.
        ProfileError: The profile of a corpus cannot be read.
        UnknownNameError: No gate has that name.
    """
    decider = _resolve(gate, llm_name)
    given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    corpus = given.pop("corpus", None)
    corpus_parameters = {name: given.pop(name) for name in CorpusGate.own_parameters if name in given}
    if corpus_parameters and corpus is None:
        raise ConfigurationError(
            f"{min(corpus_parameters)}= needs a corpus.", hint="corpus=CorpusProfile.from_texts(texts)"
        )
    if corpus is not None and not isinstance(decider, DecisionEngine):
        raise ConfigurationError(
            f"{decider.name} takes no corpus.", hint="Choose among corpora in its own decide_batch."
        )
    if isinstance(decider, DecisionEngine) and not isinstance(corpus, bool | None):
        decider = decider.with_options(gate=set_corpora(decider.gate, corpus, **corpus_parameters))
    return decider.with_rules(**given)


def _resolve(gate: Any, llm_name: str) -> Decider:
    """Return what ``gate=`` stands for, about what the LLM of a name knows."""
    if gate is None or isinstance(gate, str | Gate):
        return load_gate(gate, llm_name=llm_name)
    if not isinstance(gate, GateLike):
        raise ConfigurationError(
            f"A gate needs the methods decide_batch and adecide_batch; {type(gate).__name__} lacks one of them.",
            hint='Pass a name such as "ik", a folder, a Gate, or an object with both methods.',
        )
    decider = gate if isinstance(gate, Decider) else OwnGate(gate)
    if not llm_name:
        return decider
    if not isinstance(decider, DecisionEngine):
        raise ConfigurationError(f"{decider.name} judges no LLM by its name.", hint="Omit llm_name=.")
    return decider.with_options(gate=set_llm(decider.gate, llm_name))


OWN = "own"
"""Stands for the question gate that belongs to the judging gate; see `answer_first_gates`."""


def answer_first_gates(
    gate: Decider, question_gate: Decider | GateLike | str | None = OWN
) -> tuple[Decider, Decider | None]:
    """Return what judges begun answers, and what takes the first look at questions.

    Args:
        gate: What an adapter was given. If it reads the question alone, the gate for begun answers that belongs to
            it judges.
        question_gate: Takes the first look: a gate, or what `load_gate` takes; None for no first look; `OWN` for the
            one that belongs to the gate, if there is one. Another gate would overrule a gate of the user's own.

    Raises:
        ConfigurationError: The gate cannot see an answer, and no gate for begun answers belongs to it.
    """
    judge = gate.answer_gate()
    if judge is None:
        raise ConfigurationError(
            f"The gate {gate.name!r} reads the question alone: it cannot judge an answer that was begun.",
            hint="Leave the judging to the default gate, and let yours take the first look: "
            "AnswerFirst(question_gate=...). A gate of your own that judges says reads_drafts = True.",
        )
    if question_gate is None:
        return judge, None
    if question_gate == OWN:
        return judge, gate.question_gate()
    question = resolve_gate(question_gate)
    if (
        isinstance(gate, DecisionEngine)
        and isinstance(gate.gate, CorpusGate)
        and isinstance(question, DecisionEngine)
        and not question.corpora
    ):
        # What is covered decides there, too.
        question = question.with_options(gate=gate.gate.around(question.gate))
    return judge, question
