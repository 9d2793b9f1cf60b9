"""Look first: an engine's search is judged before what it found is read."""

from __future__ import annotations

from collections.abc import Sequence

from llama_index.core.base.response.schema import RESPONSE_TYPE
from llama_index.core.schema import BaseNode, NodeWithScore, QueryBundle

from rgate_integrations.answering.look_first import LookFirst, looked, settled
from rgate_integrations.decision import Decision
from rgate_integrations.evidence.search import FoundPassage
from rgate_integrations.llama_index.answer_first import Ahead, DirectFirst
from rgate_integrations.llama_index.decider import Decider
from rgate_integrations.runtime.flow import Call, Flow, Start, Task


class SearchedFirst:
    """A search that runs while the gate decides, and counts in its decision.

    Args:
        search: The step that searches; its result is a list of nodes.
        options: How they are judged.
    """

    def __init__(self, search: Call, options: LookFirst) -> None:
        self.options = options
        self._search = search
        self._found: list[NodeWithScore] | Exception = []

    def decide(
        self, decider: Decider, bundle: QueryBundle
    ) -> Flow[tuple[Decision, list[NodeWithScore] | None]]:
        """Search and decide.

        Returns:
            The decision, and the nodes to read; None where none are to be read.

        Raises:
            Exception: What the search raised, where the question alone says that passages are needed.
        """
        job: Task = yield Start(self._search)
        try:
            taken = decider.taken(bundle)
            if taken is not None:
                yield from self.waiting(job)
                decision = taken
            else:
                decision = yield from decider.decide(
                    bundle, then=lambda decision: self._looking(decision, decider, job)
                )
        finally:
            job.drop()  # when the gate raises or the caller leaves
        if not decision.retrieve:
            return decision, None
        if isinstance(self._found, Exception):
            raise self._found
        return decision, self._found

    def answering(
        self, first: DirectFirst, decider: Decider, bundle: QueryBundle
    ) -> Flow[tuple[Decision, RESPONSE_TYPE | None, list[NodeWithScore] | None]]:
        """Search, let the direct engine begin to answer, and judge both.

        Returns:
            The decision, and either the direct engine's response or the nodes to read.

        Raises:
            Exception: What the search raised, where passages are needed.
        """
        job: Task = yield Start(self._search)
        try:
            ahead = _SearchedAhead(self, job, decider)
            decision, response = yield from first.answering(bundle, decider.threshold, ahead)
        finally:
            job.drop()  # when the gate raises or the caller leaves
        if response is not None:
            return decision, response, None
        if isinstance(self._found, Exception):
            raise self._found
        return decision, None, self._found

    def looked(self, decision: Decision, decider: Decider) -> Decision:
        """Return the decision that also counts what was found."""
        known_from = None if decider.threshold is None else decision.threshold
        return looked(decision, self.passages, self.options, known_from=known_from)

    @property
    def passages(self) -> list[FoundPassage] | Exception:
        """What was found, as it is judged, or what the search raised."""
        return self._found if isinstance(self._found, Exception) else passages_of(self._found)

    def waiting(self, job: Task) -> Flow[None]:
        """Wait for what is found."""
        try:
            self._found = yield job
        except Exception as error:
            self._found = error

    def _looking(self, decision: Decision, decider: Decider, job: Task) -> Flow[Decision]:
        yield from self.waiting(job)
        return self.looked(decision, decider)


class _SearchedAhead(Ahead):
    """A search that runs while the first look reads the question."""

    def __init__(self, search: SearchedFirst, job: Task, decider: Decider) -> None:
        self._search = search
        self._job = job
        self._decider = decider

    def settling(self, look: Decision | None, known_from: float) -> Flow[Decision | None]:
        """Wait for what is found; return the decision of a first look that it settles."""
        search = self._search
        yield from search.waiting(self._job)
        if look is None:
            return None
        return settled(look, search.passages, search.options, known_from=known_from)

    def judged(self, decision: Decision) -> Decision:
        """Compare what the gate says of a begun answer with what was found."""
        return self._search.looked(decision, self._decider)


def passages_of(nodes: Sequence[NodeWithScore]) -> list[FoundPassage]:
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
