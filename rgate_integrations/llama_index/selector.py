"""`RetrievalGateSelector`: the gate chooses the tool of a `RouterQueryEngine`, by name."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from copy import copy

from llama_index.core.base.base_selector import BaseSelector, SelectorResult, SingleSelection
from llama_index.core.llms import LLM
from llama_index.core.prompts.mixin import PromptDictType, PromptMixinType
from llama_index.core.schema import QueryBundle
from llama_index.core.tools import ToolMetadata

from rgate_integrations.engine.gate_like import GateLike
from rgate_integrations.errors import ConfigurationError
from rgate_integrations.llama_index.decider import Decider
from rgate_integrations.llama_index.retriever import fresh
from rgate_integrations.runtime.flow import Call, Flow, arun, run

_log = logging.getLogger("rgate_integrations")


class RetrievalGateSelector(BaseSelector):
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

    def with_threshold(self, threshold: float | None) -> RetrievalGateSelector:
        """Return this selector at another threshold.

        Args:
            threshold: Retrieve where P(known) is below it, at least 0; None is the gate's own.

        Raises:
            ConfigurationError: It is not a number of at least 0.
        """
        changed = copy(self)
        changed.decider = self.decider.with_threshold(threshold)
        return changed

    def _select(self, choices: Sequence[ToolMetadata], query: QueryBundle) -> SelectorResult:
        return run(self._selecting(choices, query))

    async def _aselect(self, choices: Sequence[ToolMetadata], query: QueryBundle) -> SelectorResult:
        return await arun(self._selecting(choices, query))

    def _selecting(self, choices: Sequence[ToolMetadata], query: QueryBundle) -> Flow[SelectorResult]:
        # All names are looked up before the gate is asked: a wrong one fails at the first question, known or not.
        direct = _index(choices, self.direct)
        retrieve = [_index(choices, name) for name in self.retrieve]
        decision = yield from self.decider.decide(query)
        self.decider.leave(decision, query)  # the router hands this bundle on to the tool that is selected
        reason = decision.reason or ("unknown" if decision.retrieve else "known")
        if not decision.retrieve:
            return _result([(direct, reason)])
        if self.inner is None or len(retrieve) == 1:
            return _result([(retrieve[0], reason)])
        tools = [choices[index] for index in retrieve]
        try:
            with self.decider.carrying(decision, query):
                chosen: SelectorResult = yield Call(
                    self.inner.select, self.inner.aselect, tools, fresh(query)
                )
            selections = chosen.selections
            # LLM selectors answer 0, and so select -1, where they find nothing fitting.
            if not selections or not all(0 <= each.index < len(retrieve) for each in selections):
                numbers = ", ".join(str(each.index + 1) for each in selections) or "none"
                raise ConfigurationError(
                    f"{type(self.inner).__name__} selected {numbers} of {len(retrieve)} tools.",
                    hint="Describe the tools better, or pass a selector that always selects one of them.",
                )
        except Exception as error:  # an LLM's broken JSON, or its server, ends no query
            if self.decider.raises:
                raise
            _log.warning("The inner selector failed, so the first retrieve tool is taken: %s", error)
            return _result([(retrieve[0], f"{reason} The inner selector failed: {error}")])
        return _result([(retrieve[each.index], f"{reason} {each.reason}") for each in selections])

    def _get_prompts(self) -> PromptDictType:
        return {}

    def _get_prompt_modules(self) -> PromptMixinType:
        return {} if self.inner is None else {"inner": self.inner}

    def _update_prompts(self, prompts: PromptDictType) -> None:
        pass


def _result(selections: Sequence[tuple[int, str]]) -> SelectorResult:
    return SelectorResult(selections=[SingleSelection(index=i, reason=reason) for i, reason in selections])


def _index(choices: Sequence[ToolMetadata], name: str) -> int:
    names = [
        choice.name or choice.description for choice in choices
    ]  # a choice given as a string has no name
    if name not in names:
        raise ConfigurationError(
            f"There is no tool named {name!r}; the tools are: {', '.join(map(repr, names))}.",
            hint="Name tools with QueryEngineTool.from_defaults(name=...), and pass direct= and retrieve=.",
        )
    return names.index(name)
