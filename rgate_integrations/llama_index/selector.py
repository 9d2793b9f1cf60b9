"""`RetrievalGateSelector`: the gate chooses the tool of a `RouterQueryEngine`, by name."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from llama_index.core.base.base_selector import BaseSelector, SelectorResult, SingleSelection
from llama_index.core.llms import LLM
from llama_index.core.prompts.mixin import PromptDictType, PromptMixinType
from llama_index.core.schema import QueryBundle
from llama_index.core.tools import ToolMetadata

from rgate_integrations.engine.gate_like import GateLike
from rgate_integrations.errors import ConfigurationError
from rgate_integrations.llama_index.decider import Decider, Gated
from rgate_integrations.llama_index.decision_context import copy_bundle
from rgate_integrations.runtime.flow import Call, Flow, arun, run

_log = logging.getLogger("rgate_integrations")


class RetrievalGateSelector(Gated, BaseSelector):
    """Selects the direct tool for known questions and a retrieve tool for the others.

    Args:
        gate: A gate, or what `load_gate` takes; the default gate when None.
        direct: Name of the tool that answers without retrieval.
        retrieve: Name of the tool that retrieves, or of several, among which ``inner`` selects: the most general one
            first, since it is taken where ``inner`` fails.
        inner: Selects one or more of several retrieve tools; it is given their metadata only.
        llm: Your own LLM: it writes its first tokens, and the gate judges them.
        tokens: Maximum number of tokens that it writes, at least 1.

    Raises:
        ConfigurationError: There are several retrieve tools and no ``inner``; or, when it selects, no tool has a name
            that was given here.
    """

    def __init__(
        self,
        gate: GateLike | str | None = None,
        *,
        direct: str = "direct",
        retrieve: str | Sequence[str] = "retrieve",
        inner: BaseSelector | None = None,
        llm: LLM | None = None,
        tokens: int = 32,
    ) -> None:
        self.decider = Decider(gate, llm, tokens)
        self.direct = direct
        self.retrieve = (retrieve,) if isinstance(retrieve, str) else tuple(retrieve)
        self.inner = inner
        if len(self.retrieve) != 1 and inner is None:
            raise ConfigurationError(
                f"There are {len(self.retrieve)} retrieve tools and nothing to select among them.",
                hint="Pass inner=, such as LLMSingleSelector.from_defaults(llm=llm).",
            )

    def _select(self, choices: Sequence[ToolMetadata], query: QueryBundle) -> SelectorResult:
        return run(self._choose(choices, query))

    async def _aselect(self, choices: Sequence[ToolMetadata], query: QueryBundle) -> SelectorResult:
        return await arun(self._choose(choices, query))

    def _choose(self, choices: Sequence[ToolMetadata], query: QueryBundle) -> Flow[SelectorResult]:
        # All names are looked up before the gate is asked: a wrong one fails at the first question, known or not.
        direct = _place(choices, self.direct)
        places = [_place(choices, name) for name in self.retrieve]
        decision = yield from self.decider.decide(query)
        self.decider.attach(decision, query)  # the router hands this bundle on to the tool that is selected
        reason = decision.reason or ("unknown" if decision.retrieve else "known")
        if not decision.retrieve:
            return SelectorResult(selections=[SingleSelection(index=direct, reason=reason)])
        first = SingleSelection(index=places[0], reason=reason)
        if self.inner is None or len(places) == 1:
            return SelectorResult(selections=[first])
        try:
            with self.decider.bind(decision, query):
                inner = yield from _select_among(self.inner, [choices[place] for place in places], query)
        except Exception as error:  # an LLM's broken JSON, or its server, ends no query
            if getattr(self.decider.gate, "on_error", "retrieve") == "raise":
                raise
            _log.warning("The inner selector failed, so the first retrieve tool is taken: %s", error)
            first.reason = f"{reason} The inner selector failed: {error}"
            return SelectorResult(selections=[first])
        selections = []
        for each in inner:
            selections.append(SingleSelection(index=places[each.index], reason=f"{reason} {each.reason}"))
        return SelectorResult(selections=selections)

    def _get_prompts(self) -> PromptDictType:
        return {}

    def _get_prompt_modules(self) -> PromptMixinType:
        return {} if self.inner is None else {"inner": self.inner}

    def _update_prompts(self, prompts: PromptDictType) -> None:
        pass


def _select_among(
    selector: BaseSelector, tools: Sequence[ToolMetadata], query: QueryBundle
) -> Flow[list[SingleSelection]]:
    """Let a selector select among tools; raises if it selects none, or one that there is not."""
    chosen: SelectorResult = yield Call(selector.select, selector.aselect, tools, copy_bundle(query))
    # LLM selectors answer 0, and so select -1, where they find nothing fitting.
    if not chosen.selections or not all(0 <= each.index < len(tools) for each in chosen.selections):
        numbers = ", ".join(str(each.index + 1) for each in chosen.selections) or "none"
        raise ConfigurationError(
            f"{type(selector).__name__} selected {numbers} of {len(tools)} tools.",
            hint="Describe the tools better, or pass a selector that always selects one of them.",
        )
    return chosen.selections


def _place(choices: Sequence[ToolMetadata], name: str) -> int:
    # A choice that was given as a string has no name.
    names = [choice.name or choice.description for choice in choices]
    if name not in names:
        raise ConfigurationError(
            f"There is no tool named {name!r}; the tools are: {', '.join(map(repr, names))}.",
            hint="Name tools with QueryEngineTool.from_defaults(name=...), and pass direct= and retrieve=.",
        )
    return names.index(name)
