"""`RetrievalGateSelector`: the gate chooses the tool of a `RouterQueryEngine`, by name."""

from __future__ import annotations

from collections.abc import Sequence

from llama_index.core.base.base_selector import BaseSelector, SelectorResult, SingleSelection
from llama_index.core.llms import LLM
from llama_index.core.prompts.mixin import PromptDictType
from llama_index.core.schema import QueryBundle
from llama_index.core.tools import ToolMetadata

from rgate_integrations.calling import DecidesBatches
from rgate_integrations.decision import Decision
from rgate_integrations.errors import ConfigurationError
from rgate_integrations.flow import Call, Flow, arun, run
from rgate_integrations.llama_index.decider import Decider


class RetrievalGateSelector(BaseSelector):
    """Selects the direct tool for known questions and a retrieve tool for the others.

    Args:
        gate: A gate, or what `load_gate` takes; the default gate when None.
        direct: Name of the tool that answers without retrieval.
        retrieve: Name of the tool that retrieves, or of several, among which ``inner`` selects.
        inner: Selects among several retrieve tools; it is given their metadata only.
        llm: Your own LLM: it writes its first tokens, and the gate judges them.
        tokens: Maximum number of tokens that it writes, at least 1.
    """

    def __init__(
        self,
        gate: DecidesBatches | str | None = None,
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
        return run(self._selecting(choices, query))

    async def _aselect(self, choices: Sequence[ToolMetadata], query: QueryBundle) -> SelectorResult:
        return await arun(self._selecting(choices, query))

    def _selecting(self, choices: Sequence[ToolMetadata], query: QueryBundle) -> Flow[SelectorResult]:
        # All names are looked up before the gate is asked: a wrong one fails at the first question, known or not.
        direct = _index(choices, self.direct)
        retrieve = [_index(choices, name) for name in self.retrieve]
        decision = yield from self.decider.deciding(query.query_str)
        if not decision.retrieve:
            return _result(direct, decision)
        if self.inner is None or len(retrieve) == 1:
            return _result(retrieve[0], decision)
        tools = [choices[index] for index in retrieve]
        chosen = yield Call(self.inner.select, self.inner.aselect, tools, query)
        return _result(retrieve[chosen.ind], decision)

    def _get_prompts(self) -> PromptDictType:
        return {}

    def _update_prompts(self, prompts: PromptDictType) -> None:
        pass


def _result(index: int, decision: Decision) -> SelectorResult:
    reason = decision.reason or ("unknown" if decision.retrieve else "known")
    return SelectorResult(selections=[SingleSelection(index=index, reason=reason)])


def _index(choices: Sequence[ToolMetadata], name: str) -> int:
    names = [c.name for c in choices]
    if name not in names:
        raise ConfigurationError(
            f"There is no tool named {name!r}; the tools are: {', '.join(map(repr, names))}.",
            hint="Name tools with QueryEngineTool.from_defaults(name=...), and pass direct= and retrieve=.",
        )
    return names.index(name)
