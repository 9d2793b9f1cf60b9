"""`RetrievalRouter`: runs the retrieve arm or the direct arm for each input, in batches or as a stream."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any

from langchain_core.callbacks import (
    AsyncCallbackManagerForChainRun,
    CallbackManagerForChainRun,
)
from langchain_core.runnables import Runnable, RunnableConfig, RunnableLambda
from langchain_core.runnables.base import RunnableBindingBase, RunnableLike
from langchain_core.runnables.utils import (
    Input,
    Output,
)
from pydantic import PrivateAttr, SkipValidation

from rgate_integrations.answering.routing import RoutedCall, RoutedInput, Strategy
from rgate_integrations.decision import Decision
from rgate_integrations.engine.decider import Failed
from rgate_integrations.errors import ConfigurationError
from rgate_integrations.gates.passage_utility import FoundPassage
from rgate_integrations.langchain.answer_first import ArmAnswer, DirectArm
from rgate_integrations.langchain.chat_models import as_runnable, get_llm_name, runnables_in, takes_any_option
from rgate_integrations.langchain.corpora import as_passage, rankings_in
from rgate_integrations.langchain.decisions import (
    AHEAD_KEY,
    bind_decision,
    check_decision,
    emit_decision_event,
    read_threshold,
)
from rgate_integrations.langchain.questions import GateCall, condense_follow_ups
from rgate_integrations.langchain.runnable import FlowRunnable, Run, TypedByPart, run_batch, run_batches
from rgate_integrations.langchain.search_ahead import RetrieverRuns, run_search, split_arm
from rgate_integrations.runtime.flow import Call, Flow, Gather, arun, run

CANCELLATION = "by the retrieval gate: the search was not needed"
_MAX_OPEN_ANSWERS = 32  # of a batch without ``max_concurrency``


class RetrievalRouter(TypedByPart, FlowRunnable[Input, Output]):
    """Sends each input to the retrieve arm or the direct arm; `RetrievalGate.route` makes one.

    Without answer first and look first, a batch of any size calls the gate once, and runs each arm on one
    batch. The arms run in parallel, or one after the other if ``max_concurrency`` is set. Each decision is a
    child run in traces and a custom event, ``retrieval_gate``, also in LangGraph's custom stream. The chosen
    arm's run has the tag ``retrieve`` or ``direct``.

    *Answer first*: unless the question alone is enough to decide, the direct arm runs as a stream, even for
    ``invoke`` and ``batch``, and its first tokens are held back and judged. If the LLM knows, they are
    released and the stream continues. If not, the stream is closed, which cancels the request to the LLM, and
    the retrieve arm runs. Only tracers, hooks such as that of ``get_usage_metadata_callback``, and handlers that
    have ``raise_error`` or are set inside the arm get the direct arm's events before its answer is released. A
    batch runs in parts of ``max_concurrency`` inputs (by default 32), since an answer that waits for its judgment
    occupies the LLM.

    *Look first*: the retrieve arm runs up to its retriever while the gate decides (with several corpora,
    after its decision). If the passages help, the rest of the arm continues with them. If the search fails or
    finds nothing, the gate's decision stands. After a failed search, an input that retrieves gets the
    search's exception, as it would without a gate.

    Args:
        gate: A `RetrievalGate`, which is adjusted to the LLM of ``direct``, or any runnable from a question to a
            `Decision`. The same gate inside an arm reuses the decision. If the arm searches before the decision, a
            retriever that this gate guards searches for every question.
        retrieve: Arm for unknown questions. If the strategy searches before the decision, this must be a sequence of
            steps or a retriever.
        direct: Arm for known questions.
        strategy: What the router considers before it decides; by default only the question. `Strategy.judge`
            must accept ``drafts=``, as a `RetrievalGate` does.
        condensed_key: See `RetrievalGate.route`.
        name: The name of its runs in traces.

    Raises:
        ConfigurationError: An arm is not a runnable, function or mapping, or has a chat model that takes every key of
            a config as its option. The strategy searches before the decision, but the retrieve arm is neither a
            sequence of steps nor a retriever. Raised by a call: the gate does not return a `Decision`, or the call's
            config has an invalid threshold. With answer first: the call's config replaces the gate, or a step of
            ``direct`` is a LangGraph graph.
        pydantic.ValidationError: The gate is not a runnable.
        InvalidQuestionError: Raised by a call: the input has no question.
    """

    gate: Runnable[Any, Decision]
    retrieve: Runnable[Any, Any]
    direct: Runnable[Any, Any]
    strategy: SkipValidation[Strategy] = Strategy()
    condensed_key: str | None = None

    _direct_arm: DirectArm = PrivateAttr()

    def __init__(
        self,
        gate: Runnable[Any, Decision],
        *,
        retrieve: RunnableLike[Input, Output],
        direct: RunnableLike[Input, Output],
        strategy: Strategy | None = None,
        condensed_key: str | None = None,
        name: str | None = None,
        **fields: Any,
    ) -> None:
        super().__init__(
            gate=gate,
            retrieve=as_runnable(retrieve, "retrieve"),
            direct=as_runnable(direct, "direct"),
            strategy=strategy or Strategy(),
            condensed_key=condensed_key,
            name=name,
            **fields,
        )
        if self.strategy.answer_first is not None and self.strategy.made_for not in (None, gate):
            raise ConfigurationError(
                "A call's config cannot replace the gate of a router with answer_first=, because the gates that "
                "judge its partial answers belong to the original gate.",
                hint="Make one chain per gate with route(...), and choose a chain per call.",
            )
        for option, arm in (("retrieve", self.retrieve), ("direct", self.direct)):
            if takes_any_option(arm):
                raise ConfigurationError(
                    f"{option}= has a chat model with configurable_fields='any', which takes every key of a call's "
                    "config as its own option, also those that the router passes to its arms.",
                    hint="Pass config_prefix= to init_chat_model, or list the fields: configurable_fields=['model'].",
                )
        # If an arm is a graph, the module is already imported. A function may call one: it returns a whole answer.
        graphs = getattr(sys.modules.get("langgraph.pregel.protocol"), "PregelProtocol", ())
        kinds: Any = (graphs, RunnableLambda)
        if self.strategy.answer_first is not None and any(
            isinstance(step, graphs) for step in runnables_in(self.direct, kinds)
        ):
            raise ConfigurationError(
                "With answer_first=, direct= cannot have a LangGraph graph as a step: a graph streams updates of its "
                "state, not the words of its answer.",
                hint="Pass the chat model of the agent instead, or RunnableLambda(agent.invoke, agent.ainvoke).",
            )
        # Of the class: a configurable gate would pass on the attribute of its default. With answer first, the gate
        # was adjusted together with the judges, and must stay the one that they were made for.
        adapt = getattr(type(gate), "for_llm", None)
        if adapt is not None and self.strategy.answer_first is None:
            self.gate = adapt(gate, get_llm_name(self.direct))
        self._direct_arm = DirectArm(self.direct)
        if self.strategy.searches_ahead:
            split_arm(self.retrieve)  # an unsuitable arm raises here, not in the first call

    @property
    def lc_attributes(self) -> dict[str, Any]:
        """What ``dumpd`` writes as ``strategy``: only that there is one, so that such a router cannot be loaded."""
        # Its gates may have a URL with a login, and traces contain the dump.
        return {"strategy": Strategy} if self.strategy else {}

    @property
    def typed_part(self) -> Runnable[Any, Any]:
        """The retrieve arm."""
        return self.retrieve

    def stream(self, input: Input, config: RunnableConfig | None = None, **kwargs: Any) -> Iterator[Output]:
        """Decide, then stream the chosen arm."""
        # LangChain's method makes the run that traces show.
        return self._transform_stream_with_config(iter([input]), self._stream, config, **kwargs)

    def astream(
        self, input: Input, config: RunnableConfig | None = None, **kwargs: Any
    ) -> AsyncIterator[Output]:
        """Decide, then stream the chosen arm."""
        return self._atransform_stream_with_config(_single(input), self._astream, config, **kwargs)

    def _stream(
        self,
        values: Iterator[Any],
        run_manager: CallbackManagerForChainRun,
        config: RunnableConfig,
        **options: Any,
    ) -> Iterator[Any]:
        (value,) = values
        yield from run(self._route_one(Run(value, config, run_manager, options))).stream()

    async def _astream(
        self,
        values: AsyncIterator[Any],
        run_manager: AsyncCallbackManagerForChainRun,
        config: RunnableConfig,
        **options: Any,
    ) -> AsyncIterator[Any]:
        (value,) = [value async for value in values]
        arm = await arun(self._route_one(Run(value, config, run_manager, options)))
        async with aclosing(arm.astream()) as chunks:
            async for chunk in chunks:
                yield chunk

    def flow(self, runs: list[Run]) -> Flow[list[Any]]:
        """Decide, then run each arm on its share; with answer first, ``max_concurrency`` inputs at a time, or 32."""
        size = len(runs)
        if self.strategy.answer_first is not None:
            # An answer that waits for its judgment occupies the LLM, so only as many wait as the caller allows.
            size = runs[0].config.get("max_concurrency") or _MAX_OPEN_ANSWERS
        results: list[Any] = []
        for start in range(0, len(runs), size):
            results += yield from self._answer(runs[start : start + size], in_batch=len(runs) > 1)
        return results

    def _answer(self, runs: list[Run], *, in_batch: bool) -> Flow[list[Any]]:
        """Decide, finish the answers that have begun, and run each arm on its share; return a result per input.

        The result of an input that fails is its exception.
        """
        inputs = yield from self._route(runs, in_batch=in_batch)
        shares: dict[Any, list[RunInput]] = {}
        for item in inputs:  # an exception is already the result of its input
            if isinstance(item.result, ArmAnswer):
                shares.setdefault("answers", []).append(item)
            elif isinstance(item.result, ArmRun):
                # Grouped by arm: after a search ahead, the rest of the retrieve arm is a separate arm.
                shares.setdefault(id(item.result.arm), []).append(item)
        results = yield from run_batches(list(map(_run_share, shares.values())), runs[0].config)
        for share, share_results in zip(shares.values(), results, strict=True):
            for item, result in zip(share, share_results, strict=True):
                item.result = result
        return [item.result for item in inputs]

    def _route_one(self, single: Run) -> Flow[ArmRun | ArmAnswer]:
        """Decide about one input; return what remains to run, or raise."""
        (item,) = yield from self._route([single])
        if isinstance(item.result, Exception):
            raise item.result
        return item.result

    def _route(self, runs: list[Run], *, in_batch: bool = False) -> Flow[Sequence[RunInput]]:
        """Decide about a batch, and return its inputs; `RunInput.result` is what remains to run, or an error."""
        # Kept, because it remembers what its LLM refuses. A copy of the router may have other arms.
        if self._direct_arm.arm is not self.direct:
            self._direct_arm = DirectArm(self.direct)
        search = split_arm(self.retrieve) if self.strategy.searches_ahead else None
        call = RouterCall(self, runs, self._direct_arm, search)
        call.in_batch = in_batch
        if self.condensed_key is not None:
            yield from call.condense(self.condensed_key)
        yield from call.route()
        for item in call.inputs:
            item.result = call.remaining_run(item)
        return call.all_inputs


def _adjusted(gate: Any, llm_name: str) -> Any:
    """Return a gate, perhaps with a config, adjusted to an LLM; a gate that judges none is returned unchanged."""
    if isinstance(gate, RunnableBindingBase):
        return gate.model_copy(update={"bound": _adjusted(gate.bound, llm_name)})
    adjust = getattr(type(gate), "for_llm", None)
    return gate if adjust is None else adjust(gate, llm_name)


def _run_share(share: list[RunInput]) -> Flow[list[Any]]:
    """Finish the answers of some inputs, or run the arm that some inputs share; see `RunInput.result`."""
    remaining = [item.result for item in share]
    if isinstance(remaining[0], ArmAnswer):
        return (yield Gather([Call(run, arun, answer.result()) for answer in remaining]))
    inputs, configs = [arm.input for arm in remaining], [arm.config for arm in remaining]
    return (yield from run_batch(remaining[0].arm, inputs, configs, **remaining[0].options))


async def _single(value: Any) -> AsyncIterator[Any]:
    yield value


@dataclass(frozen=True)
class ArmRun:
    """An arm that has yet to run for an input."""

    arm: Runnable[Any, Any]
    input: Any
    config: RunnableConfig
    options: dict[str, Any]

    def stream(self) -> Iterator[Any]:
        """Run the arm, and return an iterator of its chunks."""
        return self.arm.stream(self.input, self.config, **self.options)

    def astream(self) -> Any:
        """Run the arm, and return an asynchronous iterator of its chunks."""
        return self.arm.astream(self.input, self.config, **self.options)


@dataclass
class RunInput(RoutedInput):
    """One input of a `RetrievalRouter`.

    Attributes:
        run: The input of the arms, and its run.
        gate_input: The input of the gates: the router's input, or the condensed question.
        retrievers: Records this input's search, if the retrieve arm searches before the decision.
        result: What remains to run after the decision; once that has run, the output. If the input fails, its
            exception.
    """

    run: Run = field(kw_only=True)
    gate_input: Any = field(kw_only=True)
    retrievers: RetrieverRuns | None = None
    result: Any = None


class RouterCall(RoutedCall[RunInput]):
    """One call of a `RetrievalRouter`.

    Args:
        router: The router.
        runs: Its inputs and their runs.
        direct: The direct arm.
        search: The two halves of the retrieve arm, see `split_arm`; None if nothing is searched before the decision.

    Attributes:
        all_inputs: All inputs. Those with an invalid threshold already have the error as their result, and are not
            routed.
    """

    def __init__(
        self,
        router: RetrievalRouter[Any, Any],
        runs: list[Run],
        direct: DirectArm,
        search: tuple[Runnable[Any, Any], Runnable[Any, Any]] | None,
    ) -> None:
        # Copies, because the decision is bound to the arms' config and not to the caller's.
        self.all_inputs = [RunInput(run=replace(single), gate_input=single.input) for single in runs]
        for item in self.all_inputs:
            try:
                item.threshold = read_threshold(router.gate, item.run.config)
            except ConfigurationError as error:
                item.result = error
        super().__init__(router.strategy, [item for item in self.all_inputs if item.result is None])
        self.router = router
        self._direct = direct
        self._search = search
        self._cancellation: dict[str, Any] = {}

    def condense(self, key: str) -> Flow[None]:
        """Condense follow-ups: the gates get the standalone question as input, the arms get it under ``key``.

        If condensing fails, the gates get its error, so that they do not try again, and the arms get the follow-up.
        """
        gate = self.router.gate
        calls = [GateCall.read(item.run, getattr(gate, "input_key", None)) for item in self.inputs]
        yield from condense_follow_ups(getattr(gate, "condense", None), calls)
        for item, call in zip(self.inputs, calls, strict=True):
            if call.result is not None:  # an input without a question, which the gate will report
                continue
            value = item.run.input
            others = value if isinstance(value, Mapping) else {"input": value}
            item.run.input = {**others, key: call.turn.question}
            failed = Failed(call.condense_error, call.turn.question) if call.condense_error else None
            item.gate_input = failed or call.turn.question

    def decide(self) -> Flow[Sequence[Decision | Exception]]:
        """Return the gate's decision or error for each input, asking once for the whole batch."""
        return (yield from self._ask(self.router.gate, "gate", self.inputs))

    def screen(self) -> Flow[Sequence[Decision | Exception]]:
        """Return the question gate's decision or error for each input, asking once for the whole batch."""
        return (yield from self._ask(self.strategy.question_gate, "screening", self.inputs))

    def judge(self, inputs: Sequence[RunInput]) -> Flow[Sequence[Decision | Exception]]:
        """Return a decision or error for each partial answer, by `Strategy.judge`, which judges all in one call."""
        judge = self.strategy.judge
        for item in inputs:
            # If the question gate has condensed the input, the judge must not do so again.
            if getattr(judge, "condense", None) is not None and item.screening is not None:
                item.gate_input = item.screening.question
        return (yield from self._ask(judge, "gate", inputs, drafts=[item.draft for item in inputs]))

    def _ask(
        self, gate: Any, tag: str, inputs: Sequence[RunInput], **options: Any
    ) -> Flow[Sequence[Decision | Exception]]:
        # Usually one share: only a config that chooses the LLM changes what the gate judges.
        shares: dict[str | None, list[int]] = {}
        for index, item in enumerate(inputs):
            shares.setdefault(self._direct.chosen_llm(item.run.config), []).append(index)
        results: list[Any] = [None] * len(inputs)
        for llm_name, share in shares.items():
            found = yield from run_batch(
                gate if llm_name is None else _adjusted(gate, llm_name),
                [inputs[index].gate_input for index in share],
                [inputs[index].run.child(tag) for index in share],
                **{name: [values[index] for index in share] for name, values in options.items()},
            )
            for index, result in zip(share, found, strict=True):
                results[index] = check_decision(result)
        return results

    def begin(self, item: RunInput) -> ArmAnswer:
        """Return the direct arm's answer, which starts when its first chunk is requested."""
        return ArmAnswer(self._direct, item.run)

    def search(self, inputs: Sequence[RunInput]) -> Call:
        """Return the step that runs the retrieve arm up to and including its retriever, once per input."""
        assert self._search is not None  # noqa: S101  only a strategy that searches ahead calls this
        gate = self.router.gate
        configs, retrievers = [], []
        for item in inputs:
            config = item.run.child("retrieve")
            decision = item.latest_decision if self.strategy.chooses_corpus else None
            if decision is not None:
                config = bind_decision(config, gate, item.run.input, decision)
            # A retriever that this gate guards must not decide, too, nor skip the search for a known question.
            ahead = None if decision is None else decision.with_retrieve(True)
            config = bind_decision(config, gate, item.gate_input, ahead, key=AHEAD_KEY)
            item.retrievers = RetrieverRuns(config["callbacks"], self._cancellation)
            configs.append(config)
            retrievers.append(item.retrievers)
        values = [item.run.input for item in inputs]
        flow = run_search(self._search[0], values, configs, retrievers, **inputs[0].run.options)
        return Call(run, arun, flow)

    def drop_search(self) -> None:
        """Drop a search that is still running, and record that in its traces."""
        self._cancellation["cancelled"] = CANCELLATION
        super().drop_search()

    def read_passages(self, item: RunInput) -> Sequence[FoundPassage]:
        """Return the passages that the search of an input found, best first.

        They are the documents in its result, or if there are none, those that its retrievers returned.
        """
        rankings = list(rankings_in(item.passages))
        if not any(rankings) and item.retrievers:  # the chain has turned them into text
            rankings = list(rankings_in(item.retrievers.documents))
        # Only the first few are judged, so searches take turns.
        documents = [document for rank in zip_longest(*rankings) for document in rank if document is not None]
        return list(dict.fromkeys(map(as_passage, documents)))

    def emit(self, item: RunInput, decision: Decision) -> Flow[None]:
        """Emit the decision unless an outer router did, and bind it, so that the same gate in an arm reuses it."""
        yield from emit_decision_event(decision, item.run.child())
        # Emitted here, because components inside the arm do not emit a decision that they reuse.
        item.run.config = bind_decision(item.run.config, self.router.gate, item.run.input, decision)

    def remaining_run(self, item: RunInput) -> ArmRun | ArmAnswer | Exception:
        """Return what remains to run after the decision about an input, or the input's exception.

        This is either the answer that the direct arm has begun, or an arm with the config for its run. Of a retrieve
        arm that has searched already, only the second half remains.
        """
        decision = item.outcome
        if not isinstance(decision, Decision):
            return decision  # type: ignore[return-value]  # after the call, it is an exception
        if isinstance(item.answer, ArmAnswer):
            return item.answer
        metadata: dict[str, Any] = {"rgate_retrieve": decision.retrieve, "rgate_p_known": decision.p_known}
        if decision.corpus is not None:
            metadata["rgate_corpus"] = decision.corpus
        tag, arm = "direct", self.router.direct
        if decision.retrieve:
            tag, arm = "retrieve", self.router.retrieve
        elif decision.draft is not None and decision.draft.source == "llm":
            metadata["rgate_draft"] = decision.draft.text  # for a model that can continue its own draft
        config = item.run.child(tags=(tag,))
        config["metadata"] = {**config.get("metadata", {}), **metadata}
        if decision.retrieve and item.searched and self._search is not None:
            # The search already got the call's options.
            return ArmRun(self._search[1], item.passages, config, {})
        return ArmRun(arm, item.run.input, config, item.run.options)
