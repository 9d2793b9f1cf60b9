"""`AnswerFirstRouter`: the direct arm begins to answer, and goes on or is stopped once that is judged."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForChainRun, CallbackManagerForChainRun
from langchain_core.language_models import BaseChatModel
from langchain_core.runnables import Runnable, RunnableConfig, RunnableSequence
from langchain_core.runnables.base import RunnableBindingBase, RunnableLike
from langchain_core.runnables.config import patch_config
from langchain_core.runnables.utils import Input, Output
from pydantic import PrivateAttr, SkipValidation

from rgate_integrations.answering.answer_first import (
    END,
    AnswerFirst,
    Attempt,
    Chunks,
    Clock,
    Written,
    by_question,
    first_token,
    judging,
    together,
)
from rgate_integrations.decision import Decision, Draft
from rgate_integrations.langchain.chunks import added_up, text_of
from rgate_integrations.langchain.gate_runnable import threshold_for
from rgate_integrations.langchain.retrieve_arm import Search, split
from rgate_integrations.langchain.router import RetrievalRouter, Task, arm_config, ending, joined
from rgate_integrations.langchain.runnable import BatchCall, RunBatch
from rgate_integrations.langchain.watching import Cut, HeldEvents, Stopped, watched
from rgate_integrations.runtime.flow import Call, Flow, Gather, Step, arun, run

STOPPED = "by the retrieval gate: the begun answer is not known to be right"
_TURNS = 1_000  # of the loop, to wait for generators that end; each takes a few


class AnswerFirstRouter(RetrievalRouter[Input, Output]):
    """Lets the direct arm answer first, as ``RetrievalGate.route(..., answer_first=True)`` made it.

    The direct arm always runs as a stream, whatever the caller called. Its first tokens are held back and judged.
    Known: they are released and the stream goes on. Unknown: the stream is closed, which cancels the request to the
    LLM, and the retrieve arm runs. Until then nobody but tracers hears of the direct arm, and of an arm that was
    stopped nobody else ever does.

    What the first look finds clearly known is not judged, and nothing of it is held back.

    A batch makes one call of the gate for its questions and one for what was begun. With ``max_concurrency`` it goes
    in parts of that size, since an answer that waits to be judged holds its place at the LLM.

    Args:
        gate: The gate whose router this is; what runs in the retrieve arm takes the decision as its.
        judge: Judges what was begun; takes ``drafts=``, as a `RetrievalGate` does.
        first_look: Reads the question alone; what is clear to it is not judged. None begins every answer.
        retrieve: Arm for unknown questions.
        direct: Arm that answers first.
        options: How much is held back, and how it is judged.

    Raises:
        ConfigurationError: ``options.prefetch``, and the retrieve arm is neither a sequence of steps nor a retriever.
    """

    judge: Runnable[Any, Decision]
    first_look: Runnable[Any, Decision] | None
    options: SkipValidation[AnswerFirst]

    # The direct arm, asked for log-probabilities; None where its LLM has none, or has refused to give them.
    _telling: Runnable[Any, Any] | None = PrivateAttr(default=None)
    # With `prefetch`, the retrieve arm up to its retriever, and what goes on with what that found.
    _search: Runnable[Any, Any] = PrivateAttr()
    _rest: Runnable[Any, Any] = PrivateAttr()

    def __init__(
        self,
        gate: Runnable[Any, Decision],
        *,
        retrieve: RunnableLike[Input, Output],
        direct: RunnableLike[Input, Output],
        judge: Runnable[Any, Decision],
        first_look: Runnable[Any, Decision] | None,
        options: AnswerFirst,
        name: str | None = None,
        **fields: Any,
    ) -> None:
        super().__init__(
            gate,
            retrieve=retrieve,
            direct=direct,
            name=name,
            judge=judge,
            first_look=first_look,
            options=options,
            **fields,
        )
        self._telling = with_logprobs(self.direct)
        self._rest = self.retrieve
        if options.prefetch:
            self._search, self._rest = split(self.retrieve)

    def flow(self, batch: RunBatch) -> Flow[list[Any]]:
        """Begin and judge the answers of a batch, finish those that are known, and retrieve for the others."""
        limit = batch.configs[0].get("max_concurrency")
        size = limit or len(batch.inputs)
        results: dict[int, Any] = {}
        tasks: dict[int, Task] = {}
        for start in range(0, len(batch.inputs), size):
            answers: dict[int, DirectAnswer] = {}
            outcomes = yield from self._outcomes(_part(batch, range(start, start + size)))
            for place, outcome in enumerate(outcomes, start):
                if isinstance(outcome, Task):
                    tasks[place] = outcome
                elif isinstance(outcome, DirectAnswer):
                    answers[place] = outcome
                else:
                    results[place] = outcome
            steps: list[Step] = [answer.whole() for answer in answers.values()]
            if limit is None and tasks:  # nobody counts the calls: both arms side by side
                steps.append(_retrieving(tasks))
            found = yield Gather(steps)
            if limit is None and tasks:
                results.update(zip(tasks, found.pop(), strict=True))
            results.update(zip(answers, found, strict=True))
        if limit is not None and tasks:
            results.update(zip(tasks, (yield _retrieving(tasks)), strict=True))
        return [results[place] for place in range(len(batch.inputs))]

    def _transform(
        self,
        values: Iterator[Any],
        run_manager: CallbackManagerForChainRun,
        config: RunnableConfig,
        **options: Any,
    ) -> Iterator[Any]:
        value = joined(list(values))
        (outcome,) = run(self._outcomes(RunBatch([value], [config], [run_manager], options)))
        if isinstance(outcome, Exception):
            raise outcome
        if isinstance(outcome, DirectAnswer):
            yield from outcome.rest()
        else:
            yield from outcome.arm.stream(outcome.input, outcome.config, **outcome.options)

    async def _atransform(
        self,
        values: AsyncIterator[Any],
        run_manager: AsyncCallbackManagerForChainRun,
        config: RunnableConfig,
        **options: Any,
    ) -> AsyncIterator[Any]:
        value = joined([v async for v in values])
        (outcome,) = await arun(self._outcomes(RunBatch([value], [config], [run_manager], options)))
        if isinstance(outcome, Exception):
            raise outcome
        if isinstance(outcome, DirectAnswer):
            streamed: AsyncIterator[Any] = outcome.arest()
        else:
            streamed = outcome.arm.astream(outcome.input, outcome.config, **outcome.options)
        async with ending(streamed) as chunks:
            async for chunk in chunks:
                yield chunk

    def _outcomes(self, batch: RunBatch) -> Flow[list[Task | DirectAnswer | Exception]]:
        """Return for each input what is left to do: a begun answer to go on with, or the retrieve arm to run."""
        ahead = yield from self._ahead(batch)
        answers: dict[int, DirectAnswer] = {}
        try:
            decisions = yield from self._judged(batch, answers, ahead)
            yield from self._announcing(decisions, batch)
            outcomes: list[Task | DirectAnswer | Exception] = []
            for place, decision in enumerate(decisions):
                if isinstance(decision, Exception):
                    outcomes.append(decision)
                elif not decision.retrieve:
                    outcomes.append(answers[place])
                else:
                    outcomes.append((yield from ahead.task(batch, place, decision)))
            return outcomes
        except BaseException as error:
            if not isinstance(error, GeneratorExit):  # then there is nobody to do another step
                for answer in answers.values():
                    yield from answer.stopping()
            raise
        finally:
            ahead.drop()

    def _ahead(self, batch: RunBatch) -> Flow[Ahead]:
        """Begin what runs ahead of the decisions; a search waits for an answer that is begun."""
        yield from ()
        return Ahead(self.retrieve, self._rest, partial(self._searching, batch))

    def _searching(self, batch: RunBatch) -> Flow[Search | None]:
        """Begin the search for a batch of one, with `prefetch`; of several, only the unknown ones are searched."""
        if not self.options.prefetch or len(batch.inputs) > 1:
            return None
        manager = batch.managers[0].get_child("retrieve")
        value, config = batch.inputs[0], batch.configs[0]
        return (yield from Search.starting(self._search, value, config, manager, **batch.options))

    def _judged(
        self, batch: RunBatch, answers: dict[int, DirectAnswer], ahead: Ahead
    ) -> Flow[list[Decision | Exception]]:
        """Decide for each input; notes the answers that were begun under their places."""
        clock = Clock()
        looks: list[Any] = [None] * len(batch.inputs)
        if self.first_look is not None:
            configs = batch.children("first_look")
            low = self.options.retrieve_below
            found = yield BatchCall(self.first_look, batch.inputs, configs, threshold_at_most=low)
            looks = list(found)
        settled = yield from ahead.settling(looks, [self._known_from(config) for config in batch.configs])
        if self.first_look is not None:
            clock.looked()
        decided: dict[int, Decision | Exception] = {}
        begun: list[int] = []
        known: dict[int, Decision] = {}  # clearly, so that nothing of their answers is to be judged
        for place, decision in enumerate(settled):
            if isinstance(decision, Decision):
                decided[place] = clock.at_once(decision)
                if not decision.retrieve:
                    answers[place] = self._unjudged(batch, place, decision)
                    known[place] = clock.at_once(decision)
            elif isinstance(decision, Exception):
                decided[place] = decision
            else:
                answers[place] = self._begun(batch, place, looks[place])
                begun.append(place)
        if known:
            first_tokens = [first_token(answers[place], clear) for place, clear in known.items()]
            decided.update(zip(known, (yield from together(first_tokens)), strict=True))
        if begun:
            yield from ahead.begun()
            decide = partial(self._judging, batch, looks, begun, ahead)
            judged = yield from judging([answers[place] for place in begun], self.options, decide, clock)
            decided.update(zip(begun, judged, strict=True))
        return [decided[place] for place in range(len(batch.inputs))]

    def _known_from(self, config: RunnableConfig) -> float:
        """Return the P(known) from which a question is clearly known at the first look."""
        return self.options.known_from(threshold_for(self.judge, config))

    def _begun(self, batch: RunBatch, place: int, look: Decision | None) -> DirectAnswer:
        question = "" if look is None else look.question
        forms = [self.direct] if self._telling is None else [self._telling, self.direct]
        return DirectAnswer(question, forms, batch, place, refused=self._told_nothing)

    def _unjudged(self, batch: RunBatch, place: int, decision: Decision) -> DirectAnswer:
        """Return an answer that goes on from its first token, since nothing about it is to be judged."""
        return DirectAnswer(decision.question, [self.direct], batch, place, refused=self._told_nothing)

    def _told_nothing(self) -> None:
        self._telling = None

    def _judging(
        self,
        batch: RunBatch,
        looks: Sequence[Decision | None],
        begun: Sequence[int],
        ahead: Ahead,
        chosen: Sequence[int],
        drafts: Sequence[Draft | None],
    ) -> Flow[list[Decision | Exception]]:
        """Ask the gate once about several begun answers, those that are ``chosen`` among the ``begun``."""
        places = [begun[index] for index in chosen]
        judged: dict[int, Decision | Exception] = {}
        asked: dict[int, Draft | None] = {}
        for place, draft in zip(places, drafts, strict=True):
            look = looks[place]
            if draft is None and look is not None:
                decided = by_question(look, threshold_for(self.first_look, batch.configs[place]))
                judged[place] = _with_first_look(decided, look)
            else:
                asked[place] = draft
        if asked:
            configs = batch.children("gate")
            condensed = getattr(self.judge, "condense", None) is not None
            inputs = []
            for place in asked:
                look = looks[place]
                # What the first look has condensed is not condensed again; else the judge reads the turns, too.
                inputs.append(look.question if look is not None and condensed else batch.inputs[place])
            found = yield BatchCall(
                self.judge, inputs, [configs[place] for place in asked], drafts=list(asked.values())
            )
            for place, decision in zip(asked, found, strict=True):
                judged[place] = _with_first_look(decision, looks[place])
        return (yield from ahead.judged(places, [judged[place] for place in places]))


class Ahead:
    """What runs ahead of the decisions for a batch: the search, with `AnswerFirst.prefetch`.

    It begins with the answer that is to be judged. Where the first look settles a question, there is nothing to wait
    for meanwhile, and a known one is not searched at all.

    Args:
        arm: The retrieve arm.
        rest: The part of it that goes on with what was found.
        searching: Begins the search; its result is None where there is to be none.
    """

    def __init__(
        self,
        arm: Runnable[Any, Any],
        rest: Runnable[Any, Any],
        searching: Callable[[], Flow[Search | None]],
    ) -> None:
        self._arm = arm
        self._rest = rest
        self._searching = searching
        self._search: Search | None = None

    def settling(
        self, looks: Sequence[Decision | Exception | None], known_from: Sequence[float]
    ) -> Flow[list[Decision | Exception | None]]:
        """Return the decision of each first look that settles it; None where the answer is to be begun.

        Args:
            looks: The first looks, which retrieve for what is clearly unknown.
            known_from: The P(known) of each from which it is clearly known.
        """
        yield from ()
        results: list[Decision | Exception | None] = []
        for look, clear in zip(looks, known_from, strict=True):
            unclear = isinstance(look, Decision) and not look.retrieve and look.p_known < clear
            results.append(None if unclear else look)
        return results

    def begun(self) -> Flow[None]:
        """Search, now that an answer is begun."""
        self._search = yield from self._searching()

    def judged(
        self, places: Sequence[int], decisions: list[Decision | Exception]
    ) -> Flow[list[Decision | Exception]]:
        """Return what is decided for begun answers, by what the gate says of them."""
        yield from ()
        return decisions

    def task(self, batch: RunBatch, place: int, decision: Decision) -> Flow[Task | Exception]:
        """Return what is left to do for an input that is retrieved for."""
        config = arm_config(batch, place, decision)
        if self._search is None:
            return Task(self._arm, batch.inputs[place], config, batch.options)
        found = yield self._search.job
        return Task(self._rest, found, config, {})  # the first step had the options

    def drop(self) -> None:
        """Say that nobody needs it any more."""
        if self._search is not None:
            self._search.drop()


class DirectAnswer(Attempt):
    """One answer of the direct arm.

    Args:
        question: What is answered, as far as it is known.
        forms: The direct arm; before it, if its LLM may have log-probabilities, the arm that asks for them.
        batch: The batch that the input belongs to.
        place: Its place there.
        refused: Called if the LLM does not give log-probabilities.
    """

    def __init__(
        self,
        question: str,
        forms: Sequence[Runnable[Any, Any]],
        batch: RunBatch,
        place: int,
        *,
        refused: Callable[[], None],
    ) -> None:
        manager = batch.managers[place].get_child("direct")
        config = patch_config(batch.configs[place], callbacks=manager)
        config["tags"] = [*config.get("tags", []), "direct"]
        written, cut = Written(), Cut()
        events = watched(manager, cut, partial(HeldEvents, written=written))
        asked = [_ArmChunks(form, batch.inputs[place], config, batch.options, events) for form in forms]
        super().__init__(question, written, *asked)
        self._refused = refused
        self._cut = cut
        self._events = events

    def read(self, chunk: Any) -> bool:
        """Note the text of a chunk; returns False for a tool call or a parsed object."""
        text = text_of(chunk)
        if text:
            self.written.pieces.append(text)
        return text is not None

    def refused(self) -> None:
        """Ask the LLM for no log-probabilities from now on."""
        self._refused()

    def telling(self) -> Flow[None]:
        """Tell listeners what the arm's runs said since the last time."""
        yield from self._events.telling()

    def dropping(self) -> Flow[None]:
        """Stop the arm; its traces say that it was cancelled, and how much it had written."""
        self._cut.short(STOPPED, tokens=self.written.count)
        yield from self.stopping()

    def whole(self) -> Step:
        """Return the step that releases the answer; its result is the whole of it, or what the arm raised."""
        return Call(lambda: run(self._whole()), lambda: arun(self._whole()))

    def _whole(self) -> Flow[Any]:
        try:
            chunks = yield from self.finishing()
        except Exception as error:  # in a batch it concerns this input only
            return error
        return added_up(chunks)


class _ArmChunks(Chunks):
    """The chunks of an arm, which ends when it is closed, even if it reads an LLM to its end."""

    def __init__(
        self,
        arm: Runnable[Any, Any],
        value: Any,
        config: RunnableConfig,
        options: dict[str, Any],
        events: HeldEvents,
    ) -> None:
        super().__init__(
            partial(arm.stream, value, config, **options), partial(arm.astream, value, config, **options)
        )
        self._events = events

    def _close(self) -> None:
        # Closed while it waits, a synchronous parser reads what is left of its input, for its trace: the whole answer
        # would be written. So the LLM is stopped first, at its next token.
        self._events.shut_down()
        try:
            while self._events.writing and self._next() is not END:
                pass
            super()._close()
        except Stopped:
            pass

    async def _aclose(self) -> None:
        self._events.shut_down()
        await super()._aclose()
        # Of generators one within another, each inner one ends in a task that the loop starts when it is let go.
        for _ in range(_TURNS):
            if not self._events.writing:
                return
            await asyncio.sleep(0)


def with_logprobs(arm: Runnable[Any, Any]) -> Runnable[Any, Any] | None:
    """Return a copy of an arm whose chat model is asked for log-probabilities; None if it does not know them."""
    if isinstance(arm, BaseChatModel):
        return arm.bind(logprobs=True) if knows_logprobs(arm) else None
    if isinstance(arm, RunnableBindingBase):
        inner = None if "logprobs" in arm.kwargs else with_logprobs(arm.bound)
        return None if inner is None else arm.model_copy(update={"bound": inner})
    if isinstance(arm, RunnableSequence):
        steps = list(arm.steps)
        for place in reversed(range(len(steps))):  # the last model is the one that answers
            inner = with_logprobs(steps[place])
            if inner is not None:
                steps[place] = inner
                return RunnableSequence(*steps, name=arm.name)
    return None


def knows_logprobs(model: BaseChatModel) -> bool:
    """Whether a model has a field ``logprobs`` that nobody has set, as LangChain's OpenAI models have."""
    return "logprobs" in type(model).model_fields and getattr(model, "logprobs", None) is None


def _part(batch: RunBatch, places: range) -> RunBatch:
    chosen = slice(places.start, places.stop)
    return RunBatch(batch.inputs[chosen], batch.configs[chosen], batch.managers[chosen], batch.options)


def _retrieving(tasks: Mapping[int, Task]) -> BatchCall:
    """Return the step that runs the retrieve arm for all that need it; those of a batch share arm and options."""
    asked = list(tasks.values())
    inputs = [task.input for task in asked]
    return BatchCall(asked[0].arm, inputs, [task.config for task in asked], **asked[0].options)


def _with_first_look(decision: Decision | Exception, look: Decision | None) -> Decision | Exception:
    """Add to a decision what the first look cost, and what it warned of."""
    if look is None or isinstance(decision, Exception):
        return decision
    warnings = tuple(dict.fromkeys((*look.warnings, *decision.warnings)))
    return decision.model_copy(update={"cost": look.cost + decision.cost, "warnings": warnings})
