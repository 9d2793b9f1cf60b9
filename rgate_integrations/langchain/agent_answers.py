"""An agent's model begins to answer without its search tools, and goes on or is asked again with them.

Here nobody can ask the model for one chunk after another: the agent calls it, and other middlewares may stand in
between. So callbacks bring its chunks (`PushDriver`), and stop it by raising `Stopped`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from uuid import UUID

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import BaseMessage, HumanMessage
from langchain_core.outputs import ChatGenerationChunk
from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.runnables.config import (
    ensure_config,
    get_async_callback_manager_for_config,
    get_callback_manager_for_config,
    patch_config,
    var_child_runnable_config,
)

from rgate_integrations.answering.answer_first import (
    END,
    AnswerFirst,
    Attempt,
    Chunks,
    Clock,
    Written,
    by_question,
    judging,
)
from rgate_integrations.answering.drafting import says_unsupported
from rgate_integrations.decision import Decision, Draft
from rgate_integrations.engine.fallback import fallback_decision
from rgate_integrations.errors import InvalidQuestionError
from rgate_integrations.langchain.answer_first import STOPPED
from rgate_integrations.langchain.chunks import text_of
from rgate_integrations.langchain.events import announcing
from rgate_integrations.langchain.gate_runnable import threshold_for
from rgate_integrations.langchain.questions import question_of
from rgate_integrations.langchain.runnable import BatchCall
from rgate_integrations.langchain.watching import EVENTS, Cut, HeldEvents, Stopped, watched
from rgate_integrations.runtime.flow import Flow, NextInput, PushDriver, Step, arun, run

try:  # by this LangChain tells whether a model that is invoked is to stream
    from langchain_core.tracers._streaming import _StreamingCallbackHandler as StreamingHandler
except ImportError:  # then it is judged by its whole answer
    StreamingHandler = BaseCallbackHandler  # type: ignore[misc, assignment]


@dataclass(frozen=True)
class BegunAnswers:
    """How the answers of an agent's model are begun and judged.

    Attributes:
        judge: Judges what was begun.
        first_look: Reads the question alone; what is clear to it is not judged. None begins every answer.
        options: How much is held back, and how it is judged.
    """

    judge: Runnable[Any, Decision]
    first_look: Runnable[Any, Decision] | None
    options: AnswerFirst

    def answering(
        self,
        messages: Sequence[BaseMessage],
        forms: Sequence[Step],
        kind: type[AgentEvents],
        refused: Callable[[], None],
    ) -> Flow[tuple[Any, Decision | None]]:
        """Let the model answer without the search tools, and judge what it begins to say.

        Args:
            messages: The conversation.
            forms: The step that calls the model without the search tools; before it, if the model may have
                log-probabilities, the step that asks for them, too.
            kind: `AgentEvents` in a blocking call, `AsyncAgentEvents` in one that is awaited.
            refused: Called if the model does not give log-probabilities.

        Returns:
            What the model answered, and the decision. There is no answer if it is to be asked with the tools, and
            no decision if it called a tool.
        """
        config, clock = ensure_config(), Clock()
        if messages and isinstance(messages[-1], HumanMessage):  # the first call of this turn
            look = yield from self._looking(messages, config, clock)
            if look is not None and look.retrieve:
                yield from announcing(look, config)
                return None, look
            known_from = self.options.known_from(threshold_for(self.judge, config))
            if look is not None and look.p_known >= known_from:
                yield from announcing(look, config)
                return (yield forms[-1]), look
        answer = AgentAnswer(self, messages, config, clock, kind)
        return (yield from answer.answering(forms, refused))

    def deciding_by_question(self, messages: Sequence[BaseMessage]) -> Flow[Decision]:
        """Decide by the question alone, and tell listeners."""
        config, clock = ensure_config(), Clock()
        look = yield from self._looking(messages, config, clock)
        found: Decision | Exception
        if look is None:
            found = yield from self.judging(messages, config, [None])
        else:
            found = by_question(look, threshold_for(self.first_look, config))
            found = found.model_copy(update={"cost": look.cost})
        if isinstance(found, Exception):
            raise found
        yield from announcing(found, config)
        return found

    def judging(
        self, messages: Sequence[BaseMessage], config: RunnableConfig, drafts: list[Draft | None]
    ) -> Flow[Decision | Exception]:
        """Judge a begun answer."""
        (found,) = yield BatchCall(self.judge, [list(messages)], [config], drafts=drafts)
        return _retrieving(found)

    def _looking(
        self, messages: Sequence[BaseMessage], config: RunnableConfig, clock: Clock
    ) -> Flow[Decision | None]:
        if self.first_look is None:
            return None
        low = self.options.retrieve_below
        (found,) = yield BatchCall(self.first_look, [list(messages)], [config], threshold_at_most=low)
        clock.looked()
        look = _retrieving(found)
        if isinstance(look, Exception):
            raise look
        return clock.at_once(look)


class AgentAnswer(Attempt):
    """One answer of an agent's model.

    Args:
        how: How it is judged.
        messages: The conversation that it answers.
        config: The config of the run that calls the model.
        clock: Times it.
        kind: What takes the model's callbacks.
    """

    def __init__(
        self,
        how: BegunAnswers,
        messages: Sequence[BaseMessage],
        config: RunnableConfig,
        clock: Clock,
        kind: type[AgentEvents],
    ) -> None:
        written = Written()
        super().__init__(_question_in(messages), written, _Brought(self))
        self.how = how
        self.messages = messages
        self.config = config
        self.clock = clock
        self.fed: PushDriver[Decision | None] = PushDriver(self._judged())
        self._cut = Cut()
        self._manager = kind.manager_for(config)
        self.events = watched(self._manager, self._cut, partial(kind, written=written))
        self.events.answer = self

    def read(self, chunk: Any) -> bool:
        """Note the text of a message; returns False for a tool call."""
        text = text_of(chunk)
        if text:
            self.written.pieces.append(text)
        return text is not None

    def dropping(self) -> Flow[None]:
        """Stop the model; its traces say that it was cancelled, and how much it had written."""
        self._cut.short(STOPPED, tokens=self.written.count)
        yield from self.stopping()

    def answering(
        self, forms: Sequence[Step], refused: Callable[[], None]
    ) -> Flow[tuple[Any, Decision | None]]:
        """Let the model answer; takes and returns what `BegunAnswers.answering` does."""
        yield from self.fed.start()
        ambient = var_child_runnable_config.set(patch_config(self.config, callbacks=self._manager))
        try:
            response = yield from self._called(forms, refused)
        finally:
            var_child_runnable_config.reset(ambient)
        if not self.fed.done:
            yield from self._ending(response)
        decision = self.fed.result
        if decision is not None and decision.retrieve:
            return None, decision
        return response, decision

    def _called(self, forms: Sequence[Step], refused: Callable[[], None]) -> Flow[Any]:
        """Call the model; returns its response, or None if it was stopped or failed before it was judged."""
        for form in forms:
            try:
                return (yield form)
            except Stopped:
                return None
            except Exception as error:
                if self.fed.done:
                    raise
                if form is forms[-1] or self.held or not says_unsupported(error):
                    yield from self.fed.fail(error)
                    return None
                refused()
        return None

    def _ending(self, response: Any) -> Flow[None]:
        """Judge a model that wrote less than was to be held back, or that does not stream."""
        if not self.held:
            self.ended = True
            for message in getattr(response, "result", [response]):
                if not self.fed.done:
                    yield from self.fed.feed(message)
        if not self.fed.done:
            yield from self.fed.feed(END)

    def _judged(self) -> Flow[Decision | None]:
        """Judge the answer; None if it is let through without."""
        (found,) = yield from judging([self], self.how.options, self._deciding, self.clock)
        if isinstance(found, Exception):
            raise found
        decided = found if self.judgeable else None
        if decided is not None:
            yield from announcing(decided, self.config)
        if decided is None or not decided.retrieve:
            self.events.released = True
            yield from self.events.telling()
        return decided

    def _deciding(self, places: list[int], drafts: list[Draft | None]) -> Flow[list[Decision | Exception]]:
        if not self.judgeable:  # it calls another tool: what it says after that is judged
            return [Decision(question=self.question, retrieve=False, p_known=1.0, threshold=0.0)]
        return [(yield from self.how.judging(self.messages, self.config, drafts))]


class _Brought(Chunks):
    """Chunks that callbacks bring."""

    def __init__(self, answer: AgentAnswer) -> None:
        super().__init__(lambda: iter(()), lambda: None)
        self._answer = answer

    def next(self) -> Step:
        return NextInput()

    def _close(self) -> None:
        self._answer.events.shut_down()

    async def _aclose(self) -> None:
        self._close()


class AgentEvents(HeldEvents, StreamingHandler):  # type: ignore[type-arg]
    """Brings the chunks of a model to the answer that is judged, and keeps its events until it is released.

    Attributes:
        answer: The answer.
        released: Whether listeners are told at once.
    """

    raise_error = True  # what goes wrong here is the caller's to see
    answer: AgentAnswer
    released = False

    @staticmethod
    def manager_for(config: RunnableConfig) -> Any:
        """Return the callback manager of the calls that are made with a config."""
        return get_callback_manager_for_config(config)

    def hearing(self, name: str, values: tuple[Any, ...], options: dict[str, Any]) -> Flow[None]:
        """Keep an event, and bring a chunk to the answer.

        Raises:
            Stopped: The answer is not known to be right.
        """
        fed = self.answer.fed
        if name == "on_chat_model_start" and not fed.done:
            self.written.pieces.clear()  # a model that failed is asked again
        self.keep(name, *values, **options)
        chunk = options.get("chunk")
        if isinstance(chunk, ChatGenerationChunk) and not fed.done:
            yield from fed.feed(chunk.message)
            if self.shut:
                raise Stopped
        if self.released:
            yield from self.telling()

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


def _hearing(name: str) -> Any:
    def told(self: AgentEvents, *values: Any, **options: Any) -> None:
        run(self.hearing(name, values, options))

    return told


def _ahearing(name: str) -> Any:
    async def told(self: AgentEvents, *values: Any, **options: Any) -> None:
        await arun(self.hearing(name, values, options))

    return told


for _name in EVENTS:
    setattr(AgentEvents, _name, _hearing(_name))
    setattr(AsyncAgentEvents, _name, _ahearing(_name))


def _question_in(messages: Sequence[BaseMessage]) -> str:
    try:
        return question_of(messages)
    except InvalidQuestionError:  # it is the judge's to say so
        return ""


def _retrieving(found: Decision | Exception) -> Decision | Exception:
    """Return a decision to retrieve where there is no question; anything else as it is."""
    return fallback_decision(found) if isinstance(found, InvalidQuestionError) else found
