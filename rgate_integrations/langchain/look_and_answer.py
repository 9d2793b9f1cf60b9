"""`LookAndAnswerRouter`: searches, lets the direct arm begin, and judges both before anything is read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from langchain_core.runnables import Runnable
from langchain_core.runnables.base import RunnableLike
from langchain_core.runnables.utils import Input, Output
from pydantic import SkipValidation

from rgate_integrations.answering.answer_first import AnswerFirst
from rgate_integrations.answering.look_first import LookFirst, settled
from rgate_integrations.decision import Decision
from rgate_integrations.langchain.answer_first import Ahead, AnswerFirstRouter
from rgate_integrations.langchain.look_first import BatchSearch, threshold_was_given
from rgate_integrations.langchain.retrieve_arm import split
from rgate_integrations.langchain.router import Task
from rgate_integrations.langchain.runnable import RunBatch
from rgate_integrations.runtime.flow import Call, Flow, Start
from rgate_integrations.runtime.flow import Task as BackgroundTask


class LookAndAnswerRouter(AnswerFirstRouter[Input, Output]):
    """Looks first and answers first, as ``RetrievalGate.route(..., answer_first=True, look_first=True)`` made it.

    The retrieve arm runs up to its retriever while the first look reads the question. That settles what is clearly
    unknown, and what no passages found would help with. For every other question the direct arm begins to answer, and
    what the gate says of that is compared with what was found. Where passages are read, they are those that were
    found. Nothing is searched twice, and no answer is written twice.

    Args:
        gate: The gate whose router this is; what runs in the retrieve arm takes the decision as its.
        judge: Judges what was begun.
        first_look: Reads the question alone. None begins every answer.
        retrieve: Arm for what is answered with passages: a sequence of steps, or a retriever.
        direct: Arm that answers first.
        options: How much is held back, and how it is judged.
        look: How what was found is judged.

    Raises:
        ConfigurationError: The retrieve arm is neither a sequence of steps nor a retriever.
    """

    look: SkipValidation[LookFirst]

    def __init__(
        self,
        gate: Runnable[Any, Decision],
        *,
        retrieve: RunnableLike[Input, Output],
        direct: RunnableLike[Input, Output],
        judge: Runnable[Any, Decision],
        first_look: Runnable[Any, Decision] | None,
        options: AnswerFirst,
        look: LookFirst,
        name: str | None = None,
    ) -> None:
        super().__init__(
            gate,
            retrieve=retrieve,
            direct=direct,
            judge=judge,
            first_look=first_look,
            options=options,
            name=name,
            look=look,
        )
        self._search, self._rest = split(self.retrieve)

    def _ahead(self, batch: RunBatch) -> Flow[Ahead]:
        search = BatchSearch(self._search, self._rest, batch)
        job: BackgroundTask = yield Start(search.step)
        return _Searched(self, batch, search, job)


class _Searched(Ahead):
    """The searches of a batch, which run while the first look reads its questions."""

    def __init__(
        self, router: LookAndAnswerRouter[Any, Any], batch: RunBatch, search: BatchSearch, job: BackgroundTask
    ) -> None:
        self._router = router
        self._batch = batch
        self._found = search
        self._job = job

    def settling(
        self, looks: Sequence[Decision | Exception | None], known_from: Sequence[float]
    ) -> Flow[list[Decision | Exception | None]]:
        """Wait for what is found; return the decision of each first look that it settles."""
        self._found.found = yield self._job
        results: list[Decision | Exception | None]
        results = yield Call(self._settled, None, looks, known_from)
        return results

    def begun(self) -> Flow[None]:
        """Nothing is left to begin: all is searched."""
        yield from ()

    def judged(
        self, places: Sequence[int], decisions: list[Decision | Exception]
    ) -> Flow[list[Decision | Exception]]:
        """Compare what the gate says of begun answers with what was found."""
        results: list[Decision | Exception]
        results = yield Call(self._looked, None, places, decisions)
        return results

    def task(self, batch: RunBatch, place: int, decision: Decision) -> Flow[Task | Exception]:
        """Return the rest of the retrieve arm, with what was found."""
        yield from ()
        return self._found.task(place, decision)

    def drop(self) -> None:
        """Drop the searches, if they still run."""
        self._job.drop()

    def _settled(
        self, looks: Sequence[Decision | Exception | None], known_from: Sequence[float]
    ) -> list[Decision | Exception | None]:
        results: list[Decision | Exception | None] = []
        for place, look in enumerate(looks):
            if isinstance(look, Decision):
                passages = self._found.passages(place)
                results.append(settled(look, passages, self._router.look, known_from=known_from[place]))
            else:
                results.append(look)
        return results

    def _looked(
        self, places: Sequence[int], decisions: Sequence[Decision | Exception]
    ) -> list[Decision | Exception]:
        router = self._router
        results: list[Decision | Exception] = []
        for place, decision in zip(places, decisions, strict=True):
            if isinstance(decision, Exception):
                results.append(decision)
            else:
                given = threshold_was_given(router.judge, self._batch.configs[place])
                results.append(self._found.looked(place, decision, router.look, has_threshold=given))
        return results
