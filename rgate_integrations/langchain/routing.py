"""How a LangChain router carries out `RoutedCall`: its gates, its arms, and what is left to run of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from langchain_core.runnables import Runnable

from rgate_integrations.answering.routing import Outcomes, Routed, RoutedCall, Strategy
from rgate_integrations.decision import Decision, Draft
from rgate_integrations.evidence.search import FoundPassage
from rgate_integrations.langchain.answer_first import ArmAnswer
from rgate_integrations.langchain.arms import ArmRun, Arms, arm_config
from rgate_integrations.langchain.decision_context import bind
from rgate_integrations.langchain.events import announcing
from rgate_integrations.langchain.gate_runnable import given_threshold, own_threshold
from rgate_integrations.langchain.runnable import BatchCall, RunBatch
from rgate_integrations.langchain.search_ahead import ArmSearch
from rgate_integrations.runtime.flow import Flow


class RouterCall(RoutedCall):
    """One call of a `RetrievalRouter`.

    Args:
        gate: Decides by the question alone, and for what runs in the retrieve arm.
        strategy: What is looked at.
        arms: Its arms.
        batch: Its inputs and their runs.
    """

    def __init__(
        self, gate: Runnable[Any, Decision], strategy: Strategy, arms: Arms, batch: RunBatch
    ) -> None:
        super().__init__(
            strategy,
            [given_threshold(gate, config) for config in batch.configs],
            judge_threshold=own_threshold(strategy.judge),
            question_threshold=own_threshold(strategy.question_gate),
        )
        self.gate = gate
        self.arms = arms
        self.batch = batch
        self._search: ArmSearch | None = None

    def decide(self) -> Flow[list[Decision | Exception]]:
        """Ask the gate once for the whole batch."""
        found: list[Decision | Exception]
        found = yield BatchCall(self.gate, self.batch.inputs, self.batch.children("gate"))
        return found

    def screen(self, retrieve_below: float) -> Flow[list[Decision | Exception | None]]:
        """Ask the gate that screens questions, if there is one."""
        gate = self.strategy.question_gate
        if gate is None:
            return self.screened
        configs = self.batch.children("first_look")
        found: list[Decision | Exception | None]
        found = yield BatchCall(gate, self.batch.inputs, configs, threshold_at_most=retrieve_below)
        return found

    def judge(self, drafts: dict[int, Draft | None]) -> Flow[Outcomes]:
        """Ask the gate once about several begun answers."""
        judge = self.strategy.judge
        configs = self.batch.children("gate")
        inputs = []
        for place in drafts:
            screened = self.screened[place]
            # What was condensed to be screened is not condensed again; else the judge reads the turns, too.
            if isinstance(screened, Decision) and getattr(judge, "condense", None) is not None:
                inputs.append(screened.question)
            else:
                inputs.append(self.batch.inputs[place])
        chosen = [configs[place] for place in drafts]
        found = yield BatchCall(judge, inputs, chosen, drafts=list(drafts.values()))
        return dict(zip(drafts, found, strict=True))

    def begin(self, place: int, *, judged: bool) -> ArmAnswer:
        """Let the direct arm begin to answer."""
        return ArmAnswer(self.arms, self.batch, place, judged=judged)

    def search(self) -> ArmSearch:
        """Return the step that runs the retrieve arm up to its retriever."""
        self._search = ArmSearch(self.arms.search, self.batch)
        return self._search

    def drop_search(self) -> None:
        """Let go of a search that nobody needs, and say so in its traces."""
        if self._search is not None and self.searching is not None and not self.searching.job.done():
            self._search.cancel()
        super().drop_search()

    def passages(self, place: int) -> Sequence[FoundPassage] | Exception:
        """Return what was found for an input, by its retrievers or in what the search returned."""
        if self._search is None or self.found is None:
            return []
        return self._search.passages(place, self.found[place])

    def announce(self, place: int, decision: Decision) -> Flow[None]:
        """Tell listeners, and let what runs in an arm take the decision: it need not decide or draft again."""
        batch = self.batch
        yield from announcing(decision, batch.child(place))
        batch.configs[place] = bind(batch.configs[place], self.gate, batch.inputs[place], decision)

    def left(self, routed: Sequence[Routed | Exception]) -> list[ArmRun | ArmAnswer | Exception]:
        """Return what is left to run for each input."""
        left: list[ArmRun | ArmAnswer | Exception] = []
        for place, each in enumerate(routed):
            if isinstance(each, Exception):
                left.append(each)
            elif isinstance(each.answer, ArmAnswer):
                left.append(each.answer)
            else:
                left.append(self._arm_run(place, each))
        return left

    def _arm_run(self, place: int, routed: Routed) -> ArmRun:
        config = arm_config(self.batch, place, routed.decision)
        if routed.searched:
            return ArmRun(self.arms.rest, routed.found, config, {})  # the first step had the options
        arm = self.arms.retrieve if routed.decision.retrieve else self.arms.direct
        return ArmRun(arm, self.batch.inputs[place], config, self.batch.options)
