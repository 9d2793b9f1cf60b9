"""How a LlamaIndex engine carries out `RoutedCall`, for one question."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llama_index.core.base.base_query_engine import BaseQueryEngine
from llama_index.core.schema import BaseNode, NodeWithScore, QueryBundle

from rgate_integrations.answering.routing import Outcomes, Routed, RoutedCall, Strategy
from rgate_integrations.decision import Decision, Draft
from rgate_integrations.engine.gate_like import decide_messages
from rgate_integrations.evidence.search import FoundPassage
from rgate_integrations.llama_index.answer_first import EngineAnswer
from rgate_integrations.llama_index.decider import Decider
from rgate_integrations.llama_index.decision_context import copy_bundle
from rgate_integrations.llama_index.events import announce
from rgate_integrations.runtime.flow import Call, Flow, RunFlow


class EngineCall(RoutedCall):
    """One question to an engine.

    Args:
        strategy: What is looked at before there is a decision. Where a decision came with the request, nothing is.
        bundle: The question.
        decider: Decides by the question alone, or by a draft.
        retrieve: The engine for unknown questions.
        begin: Lets the direct engine begin to answer.
    """

    def __init__(
        self,
        strategy: Strategy,
        bundle: QueryBundle,
        decider: Decider,
        *,
        retrieve: BaseQueryEngine,
        begin: Callable[[], EngineAnswer],
    ) -> None:
        super().__init__(
            strategy if decider.taken(bundle) is None else Strategy(),
            [decider.threshold],
            judge_threshold=getattr(strategy.judge, "threshold", None),
            question_threshold=getattr(strategy.question_gate, "threshold", None),
        )
        self.bundle = bundle
        self.decider = decider
        self.retrieve = retrieve
        self.begin_answer = begin

    def decide(self) -> Flow[list[Decision | Exception]]:
        """Take the decision that came with the request, or make one."""
        return [(yield from self.decider.judge(self.bundle))]

    def screen(self, retrieve_below: float) -> Flow[list[Decision | Exception | None]]:
        """Ask the gate that screens questions, if there is one."""
        gate = self.strategy.question_gate
        if gate is None:
            return [None]
        given = self.decider.threshold
        threshold = retrieve_below if given is None else min(given, retrieve_below)
        found = yield from decide_messages(gate, [self.question(0)], [()], threshold=threshold)
        return list(found)

    def judge(self, drafts: dict[int, Draft | None]) -> Flow[Outcomes]:
        """Ask the gate about what was begun."""
        found = yield from decide_messages(
            self.strategy.judge,
            [self.question(0)],
            [()],
            drafts=list(drafts.values()),
            threshold=self.decider.threshold,
        )
        return dict(zip(drafts, found, strict=True))

    def begin(self, place: int, *, judged: bool) -> EngineAnswer:
        """Let the direct engine begin to answer."""
        return self.begin_answer()

    def announce(self, place: int, decision: Decision) -> Flow[None]:
        """Tell LlamaIndex's listeners of a decision that did not come with the request."""
        yield from ()
        if self.decider.taken(self.bundle) is None:
            announce(decision)

    def search(self) -> RunFlow:
        """Return the step that lets the engine retrieve; its result is a list with the list of nodes."""
        return RunFlow(self._search())

    def passages(self, place: int) -> Sequence[FoundPassage] | Exception:
        """Return the nodes as they are judged."""
        (found,) = self.found or [[]]
        return found if isinstance(found, Exception) else _passages(found)

    def question(self, place: int) -> str:
        """Return the question."""
        return self.bundle.query_str

    def route_one(self) -> Flow[Routed]:
        """Route the question.

        Raises:
            Exception: What the search raised, where passages are needed.
        """
        (routed,) = yield from self.route()
        if isinstance(routed, Exception):
            raise routed
        return routed

    def _search(self) -> Flow[list[Any]]:
        retrieve: Any = self.retrieve
        return [
            (yield Call(retrieve.retrieve, getattr(retrieve, "aretrieve", None), copy_bundle(self.bundle)))
        ]


def _passages(nodes: Sequence[NodeWithScore]) -> list[FoundPassage]:
    """Return nodes as they are judged; what a retriever of the user's own returns may have no text to judge."""
    passages = []
    for each in nodes:
        node = getattr(each, "node", each)
        if isinstance(node, str):
            passages.append(FoundPassage(node))
        elif isinstance(node, BaseNode):
            title = (node.metadata or {}).get("title")
            passages.append(FoundPassage(node.get_content(), str(title or "")))
    return passages
