"""An agent's model begins to answer without its search tools, and goes on or is asked again with them.

Here nobody can ask the model for one chunk after another: the agent calls it, and other middlewares may stand in
between. So callbacks bring its chunks (`PushDriver`), and stop it by raising `GenerationCancelled`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from uuid import UUID

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import BaseMessage, HumanMessage
from langchain_core.outputs import ChatGenerationChunk
from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import (
    ensure_config,
    get_async_callback_manager_for_config,
    get_callback_manager_for_config,
    patch_config,
    var_child_runnable_config,
)

from rgate_integrations.answering.answer_first import AnswerFirst
from rgate_integrations.answering.drafting import says_unsupported
from rgate_integrations.answering.partial_answer import END, TokenStream
from rgate_integrations.answering.routing import Outcomes, Routed, RoutedCall, Strategy
from rgate_integrations.decision import Decision, Draft
from rgate_integrations.engine.fallback import fallback_decision
from rgate_integrations.errors import InvalidQuestionError
from rgate_integrations.langchain.answer_first import LangChainAnswer
from rgate_integrations.langchain.buffering import (
    EVENTS,
    BufferingHandler,
    GenerationCancelled,
)
from rgate_integrations.langchain.decision_context import announcing
from rgate_integrations.langchain.gate_runnable import given_threshold, own_threshold
from rgate_integrations.langchain.questions import question_of
from rgate_integrations.langchain.runnable import BatchCall, only
from rgate_integrations.runtime.flow import Call, Flow, NextInput, PushDriver, Step, arun

try:  # by this LangChain tells whether a model that is invoked is to stream
    from langchain_core.tracers._streaming import _StreamingCallbackHandler as StreamingHandler
except ImportError:  # then it is judged by its whole answer
    StreamingHandler = BaseCallbackHandler  # type: ignore[misc, assignment]


class AgentCall(RoutedCall):
    """One call of an agent's model, which begins to answer without the search tools.

    Args:
        strategy: How it answers first, and what judges it.
        messages: The conversation.
        kind: `AgentEvents` in a blocking call, `AsyncAgentEvents` in one that is awaited.
    """

    def __init__(self, strategy: Strategy, messages: Sequence[BaseMessage], kind: type[AgentEvents]) -> None:
        self.config = ensure_config()
        super().__init__(
            strategy,
            [given_threshold(strategy.judge, self.config)],
            judge_threshold=own_threshold(strategy.judge),
            question_threshold=own_threshold(strategy.question_gate),
        )
        self.messages = list(messages)
        self.judged = True
        self.driver: PushDriver[list[Routed | Exception]] = PushDriver(self.route())
        self.manager = kind.manager_for(self.config)
        self.answer = LangChainAnswer(self.manager, kind, lambda events: [PushedStream(events)])
        events: Any = self.answer.events
        events.driver = self.driver

    def respond(
        self, forms: Sequence[Step], on_refusal: Callable[[], None]
    ) -> Flow[tuple[Any, Decision | None]]:
        """Let the model answer without the search tools, and judge what it begins to say.

        Args:
            forms: The step that calls the model without the search tools; before it, if the model may have
                log-probabilities, the step that asks for them, too.
            on_refusal: Called if the model does not give log-probabilities.

        Returns:
            What the model answered, and the decision. There is no answer if it is to be asked with the tools, and
            no decision if it called another tool.
        """
        yield from self.driver.start()
        response = None
        if not self.driver.done:
            ambient = var_child_runnable_config.set(patch_config(self.config, callbacks=self.manager))
            try:
                response = yield from self._ask(forms if self.judged else forms[-1:], on_refusal)
            finally:
                var_child_runnable_config.reset(ambient)
        if not self.driver.done:
            yield from self._end(response)
        decision = only(self.driver.result or []).decision
        if decision.retrieve:
            return None, decision
        yield from self.answer.flush_events()
        return response, decision if self._is_decided else None

    def decide_by_question(self) -> Flow[Decision]:
        """Decide without an answer, and tell listeners."""
        options = self.strategy.answer_first or AnswerFirst()
        self.screened = yield from self.screen(options.retrieve_below)
        judged = yield from super().judge_drafts({0: None})
        decision = only([judged[0]])
        if isinstance(self.screened[0], Decision):
            decision = decision.model_copy(update={"cost": self.screened[0].cost})
        yield from announcing(decision, self.config)
        return decision

    def screen(self, retrieve_below: float) -> Flow[list[Decision | Exception | None]]:
        """Ask the gate that screens questions, at the first call of a turn."""
        gate = self.strategy.question_gate
        if gate is None or not self.messages or not isinstance(self.messages[-1], HumanMessage):
            return [None]
        found = yield BatchCall(gate, [self.messages], [self.config], threshold_at_most=retrieve_below)
        return [_without_question(found[0])]

    def begin(self, place: int, *, judged: bool) -> LangChainAnswer:
        """Wait for what the model writes."""
        self.judged = judged
        return self.answer

    def judge_drafts(self, drafts: dict[int, Draft | None]) -> Flow[Outcomes]:
        """Judge what was begun; a call of another tool is let through, and what the model says then is judged."""
        if drafts and not self._is_decided:
            return {0: Decision(question=self.question(0), retrieve=False, p_known=1.0, threshold=0.0)}
        return (yield from super().judge_drafts(drafts))

    def judge(self, drafts: dict[int, Draft | None]) -> Flow[Outcomes]:
        """Ask the gate about a begun answer."""
        found = yield BatchCall(
            self.strategy.judge, [self.messages], [self.config], drafts=list(drafts.values())
        )
        return {0: _without_question(found[0])}

    def announce(self, place: int, decision: Decision) -> Flow[None]:
        """Tell listeners, unless nothing is decided yet."""
        if self._is_decided or decision.retrieve:
            yield from announcing(decision, self.config)

    def question(self, place: int) -> str:
        """Return the question among the messages; empty where there is none, which is the gate's to say."""
        try:
            return question_of(self.messages)
        except InvalidQuestionError:
            return ""

    @property
    def _is_decided(self) -> bool:
        return self.answer.has_text or not self.judged

    def _ask(self, forms: Sequence[Step], on_refusal: Callable[[], None]) -> Flow[Any]:
        """Call the model; returns its response, or None if it was stopped or failed before it was judged."""
        for form in forms:
            try:
                return (yield form)
            except GenerationCancelled:
                return None
            except Exception as error:
                if self.driver.done:
                    raise
                if form is forms[-1] or self.answer.chunks or not says_unsupported(error):
                    yield from self.driver.fail(error)
                    return None
                on_refusal()
        return None

    def _end(self, response: Any) -> Flow[None]:
        """Judge a model that wrote less than was to be held back, or that does not stream."""
        if not self.answer.chunks:
            self.answer.ended = True
            for message in getattr(response, "result", [response]):
                if not self.driver.done:
                    yield from self.driver.feed(message)
        if not self.driver.done:
            yield from self.driver.feed(END)


class PushedStream(TokenStream):
    """Chunks that callbacks bring."""

    def __init__(self, events: BufferingHandler) -> None:
        super().__init__(lambda: iter(()), lambda: None)
        self._events = events

    def next_chunk(self) -> Step:
        """Wait for one."""
        return NextInput()

    def close(self) -> Step:
        """Stop the model at its next token."""
        return Call(self._events.shut_down, None)


class AgentEvents(BufferingHandler, StreamingHandler):  # type: ignore[type-arg]
    """Brings the chunks of a model to the answer that is judged, and keeps its events until it is released.

    Attributes:
        driver: Drives the flow that judges it.
    """

    raise_error = True  # what goes wrong here is the caller's to see
    driver: PushDriver[Any]

    @staticmethod
    def manager_for(config: RunnableConfig) -> Any:
        """Return the callback manager of the calls that are made with a config."""
        return get_callback_manager_for_config(config)

    def hear(self, name: str, values: tuple[Any, ...], options: dict[str, Any]) -> Flow[None]:
        """Keep an event, and bring a chunk to the answer.

        Raises:
            GenerationCancelled: The answer is not known to be right.
        """
        if name == "on_chat_model_start" and not self.driver.done:
            self.partial.pieces.clear()  # a model that failed is asked again
        self.keep(name, values, options)
        chunk = options.get("chunk")
        if isinstance(chunk, ChatGenerationChunk) and not self.driver.done:
            yield from self.driver.feed(chunk.message)
            if self.shut:
                raise GenerationCancelled
        if self.driver.done:
            yield from self.flush()

    def tap_output_iter(self, run_id: UUID, output: Any) -> Any:
        """Leave the output of a chain as it is."""
        return output

    def tap_output_aiter(self, run_id: UUID, output: Any) -> Any:
        """Leave the output of a chain as it is."""
        return output


class AsyncAgentEvents(AgentEvents):
    """The same on an event loop."""

    @staticmethod
    def manager_for(config: RunnableConfig) -> Any:
        """Return the callback manager of the calls that are awaited with a config."""
        return get_async_callback_manager_for_config(config)


def _ahear(name: str) -> Any:
    async def told(self: AgentEvents, *values: Any, **options: Any) -> None:
        await arun(self.hear(name, values, options))

    return told


for _name in EVENTS:
    setattr(AsyncAgentEvents, _name, _ahear(_name))


def _without_question(found: Decision | Exception) -> Decision | Exception:
    """Return a decision to retrieve where there is no question; anything else as it is."""
    return fallback_decision(found) if isinstance(found, InvalidQuestionError) else found
