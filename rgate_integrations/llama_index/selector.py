"""`RetrievalGateSelector`: the gate chooses the tools of a `RouterQueryEngine`, by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Unpack

from llama_index.core.base.base_selector import BaseSelector, SelectorResult, SingleSelection
from llama_index.core.instrumentation.span_handlers import NullSpanHandler
from llama_index.core.schema import QueryBundle
from llama_index.core.tools import ToolMetadata

from rgate_integrations.answering.corpora import check_corpora, chosen_corpora
from rgate_integrations.corpus.profile import missing_passages
from rgate_integrations.decision import Decision
from rgate_integrations.engine.loading import GateOptions
from rgate_integrations.engine.own_gate import GateLike
from rgate_integrations.errors import ConfigurationError
from rgate_integrations.llama_index.answer_first import listen
from rgate_integrations.llama_index.decider import Gated, QueryDecider, WithoutPrompts
from rgate_integrations.runtime.flow import Flow, arun, run


class RetrievalGateSelector(Gated, WithoutPrompts, BaseSelector):
    """Selects the direct tool for a known question, and one or more tools that retrieve for any other one.

    With several corpora, these are the tools of up to ``top`` corpora that may cover the question. Without
    corpora, or if the gate fails, all tools that retrieve are selected. The router merges their answers. Its response
    has the decision in ``metadata["rgate"]``, unless a selected engine with a gate of its own has put one there.

    Args:
        gate: A gate, or an argument for `load_gate`, such as ``load_gate(llm_name=…)`` with the name of your LLM; the
            default gate when None.
        direct: Name of the tool that answers without retrieval.
        retrieve: Name of the tool that retrieves, from whichever corpus, or a list of the names of such tools. By
            default the names of the gate's corpora; ``"retrieve"`` if it has none.
        **options: ``corpus=``, with ``prefer=``, ``when_uncovered=`` and ``top=``: the tools' corpora, as in
            `load_gate`. ``always=`` and ``never=``: rules, instead of the gate's own.

    Raises:
        ConfigurationError: The gate or an option is invalid, such as ``corpus=True``: a selector has no
            passages. With several corpora: ``retrieve`` is a list of names that are not the corpora's. Raised by
            a selection: ``direct`` or ``retrieve`` names no tool, or several.
        UnknownNameError: No gate has that name.
        ModelLoadError: A trained gate cannot be read or downloaded.
        MissingDependencyError: The gate is a URL, and the extra ``openai`` is not installed.
        ProfileError: The profile of a corpus cannot be read.
    """

    def __init__(
        self,
        gate: GateLike | str | None = None,
        *,
        direct: str = "direct",
        retrieve: str | Sequence[str] | None = None,
        **options: Unpack[GateOptions],
    ) -> None:
        if options.get("corpus") is True:
            raise missing_passages("a selector")
        self.decider = QueryDecider(gate, adapter=type(self), **options)
        corpora = self.decider.gate.corpora
        names: Any = retrieve or corpora or "retrieve"
        self.retrieve = tuple(names) if isinstance(names, list | tuple) else (names,)
        self.direct = direct
        if not all(isinstance(name, str) for name in (direct, *self.retrieve)):
            raise ConfigurationError(
                f"direct={direct!r} and retrieve={names!r} must be names of tools.",
                hint="Give each tool a name: QueryEngineTool.from_defaults(engine, name=...).",
            )
        if len(corpora) > 1 and not isinstance(names, str):
            check_corpora(corpora, self.retrieve)

    def _select(self, choices: Sequence[ToolMetadata], query: QueryBundle) -> SelectorResult:
        return run(self._choose(choices, query))

    async def _aselect(self, choices: Sequence[ToolMetadata], query: QueryBundle) -> SelectorResult:
        return await arun(self._choose(choices, query))

    def _choose(self, choices: Sequence[ToolMetadata], query: QueryBundle) -> Flow[SelectorResult]:
        # All names are looked up before the gate decides, so that a wrong one fails at the first question.
        direct = _index_of(choices, self.direct)
        tools = {name: _index_of(choices, name) for name in self.retrieve}
        decision = yield from self.decider.decide(query)
        self.decider.attach(decision, query)  # the router passes this bundle on to the selected tools
        reason = decision.reason or ("unknown" if decision.retrieve else "known")
        selected = [direct]
        if decision.retrieve:
            selected = [tools[name] for name in chosen_corpora(decision, self.retrieve)]
        listen(_SelectionListener)  # here, since an unpickled selector was not constructed in this process
        selections = [SingleSelection(index=index, reason=reason) for index in selected]
        return _Selection(selections=selections, decision=decision)


class _Selection(SelectorResult):
    """The selected tools, with the decision that selected them."""

    decision: Decision


class _SelectionListener(NullSpanHandler):
    """Puts the decision into a router's response, whose metadata has the selection as ``"selector_result"``."""

    def span_exit(self, *arguments: Any, result: Any = None, **options: Any) -> None:
        metadata: Any = getattr(result, "metadata", None)
        selection = metadata.get("selector_result") if isinstance(metadata, dict) else None
        if isinstance(selection, _Selection):
            metadata.setdefault("rgate", selection.decision.model_dump(mode="json"))


def _index_of(choices: Sequence[ToolMetadata], name: str) -> int:
    # A choice that was given as a string has only a description.
    names = [choice.name or choice.description for choice in choices]
    count = names.count(name)
    if count != 1:
        problem = f"{count} tools have the name {name!r}" if count else f"Unknown tool {name!r}"
        raise ConfigurationError(
            f"{problem}; the tools are: {', '.join(map(repr, names))}.",
            hint="Name tools with QueryEngineTool.from_defaults(name=...), and pass these names to the selector as "
            "direct= and retrieve=.",
        )
    return names.index(name)
