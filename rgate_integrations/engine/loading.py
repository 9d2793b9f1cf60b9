"""Turns what a user passes, such as a name, a gate or an object, into a `Decider`."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from difflib import get_close_matches
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
Corpus: TypeAlias = OneCorpus | Collection[OneCorpus] | Iterator[OneCorpus] | Mapping[str, OneCorpus]
"""A profile or its folder, a list of these, or a mapping that gives each a name, used in decisions."""


class GateOptions(RuleOptions, total=False):
    """The rules and corpora that adapters accept besides the gate; see `load_gate`.

    Attributes:
        corpus: As in `load_gate`, or True: then the adapter makes a profile of the passages that it searches.
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
"""The shipped gate for each source of the draft; ``"none"`` means no draft."""
WARM_UP = "What is the capital of Burkina Faso?"
"""A question that both models of the default gate read, so that deciding about it loads them."""


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
    """Return an engine that decides with a gate. Its first decision loads the models.

    Args:
        name: A name that ``rgate gates`` lists, with an argument after a colon if that gate takes one
            (``"constant:never"``); the name of a shipped gate, such as ``"default"``; the folder or Hub id of a
            trained one; the URL of a decision server (``rgate serve``); or a `Gate`. None means ``"default"``.
        proxy: Catalogue name, folder or Hub id of the proxy model, or a `Proxy` object.
        llm: Writes the drafts for gates with ``source="llm"``. If it has a name, P(known) is adjusted to that LLM.
        on_error: What a failure does: ``"retrieve"`` or ``"raise"``; see `DecisionEngine`.
        timeout: Maximum time of a call in seconds. A question without a decision by then is a failure, see
            ``on_error``. None waits forever.
        llm_name: The LLM whose knowledge the gate judges: a name, or a folder made by ``rgate ability``. Overrides a
            name detected from ``llm``. A tuned or calibrated gate ignores both; for ``llm_name``, it logs a warning.
        always: Rules for what always retrieves: examples ("questions like these"), patterns, and functions of the
            question and its metadata; one or several.
        never: Rules for what never retrieves.
        corpus: The corpora that you can search, see `Corpus`: the gate considers what they cover, and the decision
            names those to search.
        **parameters: Parameters of the gate, such as ``threshold``; with a corpus, also those of `CorpusGate`.

    Raises:
        UnknownNameError: No gate has that name; the hint suggests similar names.
        ProfileError: A profile cannot be read.
        ConfigurationError: An argument is unknown or invalid, or the gate cannot be adjusted to an LLM.
        ModelLoadError: A trained gate or a measured ability cannot be read or downloaded.
        MissingDependencyError: ``name`` is a URL, and the extra ``openai`` is not installed.
    """
    own = [] if isinstance(name, Gate) and corpus is None else CorpusGate.own_parameters
    corpus_parameters = {option: parameters.pop(option) for option in own if option in parameters}
    if corpus_parameters and corpus is None:
        raise _no_corpus(corpus_parameters)
    if isinstance(name, Gate):
        gate = name.replace(**parameters)
    else:
        if isinstance(proxy, str):  # an inner gate may need it during construction
            parameters["proxy"] = proxy
        gate = make_gate(_gate_name(name), **parameters)
    drafter_name = getattr(llm, "name", "")
    if isinstance(drafter_name, str):  # a user's object may have any attribute of that name
        gate = gate.for_llm(drafter_name, "the model that drafts")
    if llm_name:
        gate = set_llm(gate, llm_name)
    if corpus is not None:
        gate = set_corpora(gate, corpus, **corpus_parameters)
    return DecisionEngine(
        gate, proxy=proxy, llm=llm, on_error=on_error, timeout=timeout, always=always, never=never
    )


def _no_corpus(parameters: Iterable[str]) -> ConfigurationError:
    return ConfigurationError(
        f"{min(parameters)}= needs a corpus.", hint="Use corpus=CorpusProfile.from_texts(texts)."
    )


def _gate_name(name: object) -> str:
    if name is None:
        return DEFAULT_GATE
    if isinstance(name, str | Path):
        return str(name)
    # Without the object itself: the text of an LLM may have its key.
    raise ConfigurationError(
        f"load_gate takes the name, folder or URL of a gate, or a Gate, not {type(name).__name__}.",
        hint="Give an LLM as llm=, and an object that decides to a class for LangChain or LlamaIndex, such as "
        "RetrievalGate(gate).",
    )


def set_corpora(gate: Gate, corpus: Corpus, **parameters: Any) -> CorpusGate:
    """Return a gate that also considers what these corpora cover.

    If the gate already has corpora, they are replaced. Options that are not given here return to their defaults.

    Args:
        gate: The gate.
        corpus: The corpora; see `Corpus`.
        **parameters: Options of `CorpusGate`: ``prefer``, ``when_uncovered`` and ``top``.

    Raises:
        ProfileError: A profile cannot be read.
        ConfigurationError: A parameter or the corpus is invalid, or two corpora have the same name.
    """
    # A retriever is iterable, too: over its fields.
    if isinstance(corpus, str) or not isinstance(corpus, Collection | Iterator):
        corpus = [corpus]
    named = corpus.items() if isinstance(corpus, Mapping) else [("", item) for item in corpus]
    profiles = []
    for name, item in named:
        profile: Any = CorpusProfile.load(item) if isinstance(item, str | Path) else item
        if not isinstance(profile, CorpusProfile):
            raise ConfigurationError(
                f"A corpus must be a CorpusProfile or its folder, not {type(profile).__name__}.",
                hint="Use CorpusProfile.from_retriever(retriever) or .from_texts(texts), or the folder that rgate "
                "profile makes; adapters that have the passages take corpus=True.",
            )
        profiles.append(replace(profile, name=name) if name else profile)
    if not profiles:
        raise ConfigurationError(
            "corpus= has no corpora.", hint="Pass at least one profile, or leave corpus= out."
        )
    # Replaced rather than nested: a corpus gate around another one would ask both about coverage.
    inner = gate.inner if isinstance(gate, CorpusGate) else gate
    return CorpusGate.from_parameters({"inner": inner, "profiles": profiles, **parameters})


def set_llm(gate: Gate, llm_name: str) -> Gate:
    """Return a copy of a gate, adjusted to an LLM; the gate itself if it was tuned or calibrated for one.

    Raises:
        ConfigurationError: The gate does not accept an LLM's name, or the name is not a string, or a path that does
            not exist.
        ModelLoadError: The measured ability cannot be read.
    """
    if not isinstance(llm_name, str):
        raise ConfigurationError(
            f"llm_name= must be a name, not {type(llm_name).__name__}.",
            hint='Pass its name, as in llm_name="gpt-4o". RetrievalGate and GatedQueryEngine take the model as llm=.',
        )
    # An error, because ignoring the name would judge the wrong LLM.
    if not gate.judges_llm:
        raise ConfigurationError(
            f"The gate {gate.name!r} cannot be adjusted to an LLM, but llm_name={llm_name!r} was given.",
            hint="Use the default gate, or leave out llm_name.",
        )
    return gate.for_llm(llm_name)


def resolve_gate(
    gate: Any = None, llm_name: str = "", *, adapter: Any = load_gate, **options: Unpack[GateOptions]
) -> Decider:
    """Return the decider for an adapter's ``gate=`` argument and its other options.

    Args:
        gate: A gate, an argument for `load_gate`, or an object with `decide_batch` and `adecide_batch`.
        llm_name: The LLM whose knowledge is judged; see `load_gate`.
        adapter: The class that the user called, which the error for an unknown option names.
        **options: Rules and corpora. ``corpus=True`` is handled by the adapter.

    Raises:
        ConfigurationError: The gate is none of these, or does not accept an option, or an option is invalid.
        ModelLoadError: A trained gate cannot be read or downloaded, or a measured ability cannot be read.
        ProfileError: The profile of a corpus cannot be read.
        UnknownNameError: No gate has that name.
        MissingDependencyError: The gate is a URL, and the extra ``openai`` is not installed.
        TypeError: An option is unknown.
    """
    for name in options.keys() - GateOptions.__annotations__.keys():
        known = [*inspect.signature(adapter).parameters, *GateOptions.__annotations__]
        near = "".join(f" Did you mean {other!r}?" for other in get_close_matches(name, known, n=1))
        # As for any other misspelt argument; Python itself suggests names from 3.13 on.
        raise TypeError(f"{adapter.__name__}() got an unexpected keyword argument {name!r}.{near}")
    if gate is None or isinstance(gate, str | Gate):
        gate = load_gate(gate, llm_name=llm_name)
    elif not isinstance(gate, GateLike):
        raise ConfigurationError(
            f"A gate needs decide_batch and adecide_batch, but {type(gate).__name__} does not have both.",
            hint='Pass a name ("default"), a folder, a Gate or an object with both methods; pass an LLM as llm=.',
        )
    elif llm_name and isinstance(gate, DecisionEngine):
        gate = gate.with_options(gate=set_llm(gate.gate, llm_name))
    decider: Decider = gate if isinstance(gate, Decider) else OwnGate(gate)
    rules: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    corpus: Any = rules.pop("corpus", False)
    parameters = {name: rules.pop(name) for name in CorpusGate.own_parameters if name in rules}
    if parameters and corpus is False:
        if not isinstance(decider, DecisionEngine) or not decider.corpora:
            raise _no_corpus(parameters)
        decider = decider.with_options(**parameters)
    # A user's object accepts no corpus and no LLM name: we raise an error instead of ignoring them.
    if isinstance(decider, DecisionEngine):
        if not isinstance(corpus, bool):
            decider = decider.with_options(gate=set_corpora(decider.gate, corpus, **parameters))
    elif corpus is not False:
        raise ConfigurationError(
            f"The gate {decider.name!r} does not accept corpus=: only gates from load_gate do.",
            hint="Omit corpus=, or use such a gate. A gate of your own may set corpora in its decisions.",
        )
    elif llm_name:
        raise ConfigurationError(
            f"The gate {decider.name!r} cannot be adjusted to an LLM, but llm_name={llm_name!r} was given.",
            hint="Omit llm_name=.",
        )
    return decider.with_rules(**rules)


OWN = "own"
"""Value of ``question_gate=`` that means the question gate of the adapter's own gate; see `answer_first_gates`."""


def answer_first_gates(
    gate: Decider, question_gate: Decider | GateLike | str | None = OWN
) -> tuple[Decider, Decider | None]:
    """Return two gates for answer first: one for partial answers, and one (or None) for the question beforehand.

    Args:
        gate: The adapter's gate. Its `Decider.answer_gate` judges partial answers.
        question_gate: Judges the question before the LLM starts to answer: a gate, or an argument for `load_gate`;
            None to skip that; `OWN` for the gate's own question gate, if it has one.

    Raises:
        ConfigurationError: The gate has no `Decider.answer_gate`.
        RGateError: ``question_gate`` is invalid or cannot be loaded; see `resolve_gate`.
    """
    judge = gate.answer_gate()
    if judge is None:
        raise ConfigurationError(
            f"answer_first= does not work with the gate {gate.name!r}, which cannot judge a partial answer.",
            hint="Use the default gate, and pass this one as AnswerFirst(question_gate=...). If it is an object of "
            "yours that can judge answers, set its attribute reads_drafts = True.",
        )
    if question_gate is None:
        return judge, None
    if question_gate == OWN:
        return judge, gate.question_gate()
    question = resolve_gate(question_gate)
    corpora = gate.gate if isinstance(gate, DecisionEngine) else None
    if isinstance(question, DecisionEngine) and isinstance(corpora, CorpusGate) and not question.corpora:
        # The gate's corpora also apply to the question.
        question = question.with_options(gate=corpora.around(question.gate))
    return judge, question
