"""`RetrievalGateSelector`: the gate chooses the tool of a `RouterQueryEngine`, by name."""

from __future__ import annotations

from collections.abc import Sequence

from llama_index.core.base.base_selector import BaseSelector, SelectorResult, SingleSelection
from llama_index.core.llms import LLM
from llama_index.core.schema import QueryBundle
from llama_index.core.tools import ToolMetadata

from rgate_integrations.engine.own_gate import GateLike
from rgate_integrations.errors import ConfigurationError
from rgate_integrations.llama_index.decider import Gated, QueryDecider, WithoutPrompts
from rgate_integrations.runtime.flow import Flow, arun, run


class RetrievalGateSelector(Gated, WithoutPrompts, BaseSelector):
    """Selects the direct tool for known questions and a retrieve tool for the others.

    Args:
        gate: A gate, or what `load_gate` takes; the default gate when None.
        direct: Name of the tool that answers without retrieval.
        retrieve: Name of the tool that retrieves; a ``RouterQueryEngine`` of its own, where there are several.
        llm: Your own LLM: it writes its first tokens, and the gate judges them.
        tokens: Maximum number of tokens that it writes, at least 1.

    Raises:
        ConfigurationError: Raised when it selects: no tool has a name that was given here.
    """

    def __init__(
        self,
        gate: GateLike | str | None = None,
        *,
        direct: str = "direct",
        retrieve: str = "retrieve",
        llm: LLM | None = None,
        tokens: int = 32,
    ) -> None:
        self.decider = QueryDecider(gate, llm, tokens)
        self.direct = direct
        self.retrieve = retrieve

    def _select(self, choices: Sequence[ToolMetadata], query: QueryBundle) -> SelectorResult:
        return run(self._choose(choices, query))

    async def _aselect(self, choices: Sequence[ToolMetadata], query: QueryBundle) -> SelectorResult:
        return await arun(self._choose(choices, query))

    def _choose(self, choices: Sequence[ToolMetadata], query: QueryBundle) -> Flow[SelectorResult]:
        # All names are looked up before the gate is asked: a wrong one fails at the first question, known or not.
        direct = _place(choices, self.direct)
        retrieve = _place(choices, self.retrieve)
        decision = yield from self.decider.decide(query)
        self.decider.attach(decision, query)  # the router hands this bundle on to the tool that is selected
        reason = decision.reason or ("unknown" if decision.retrieve else "known")
        selected = SingleSelection(index=retrieve if decision.retrieve else direct, reason=reason)
        return SelectorResult(selections=[selected])


def _place(choices: Sequence[ToolMetadata], name: str) -> int:
    # A choice that was given as a string has no name.
    names = [choice.name or choice.description for choice in choices]
    if name not in names:
        raise ConfigurationError(
            f"There is no tool named {name!r}; the tools are: {', '.join(map(repr, names))}.",
            hint="Name tools with QueryEngineTool.from_defaults(name=...), and pass direct= and retrieve=.",
        )
    return names.index(name)
