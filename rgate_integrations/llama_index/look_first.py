"""Look first: an engine's search is judged before what it found is read."""

from __future__ import annotations

from collections.abc import Sequence

from llama_index.core.schema import NodeWithScore, QueryBundle

from rgate_integrations.decision import Decision
from rgate_integrations.evidence.search import FoundPassage
from rgate_integrations.flow import Background, Call, Flow, Start
from rgate_integrations.llama_index.decider import Decider
from rgate_integrations.look_first import LookFirst, looked


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

    def deciding(
        self, decider: Decider, bundle: QueryBundle
    ) -> Flow[tuple[Decision, list[NodeWithScore] | None]]:
        """Search and decide.

        Returns:
            The decision, and the nodes to read; None where none are to be read.

        Raises:
            Exception: What the search raised, where the question alone says that passages are needed.
        """
        job: Background = yield Start(self._search)
        try:
            taken = decider.taken(bundle)
            if taken is not None:
                yield from self._waiting(job)
                decision = taken
            else:
                decision = yield from decider.deciding(
                    bundle, then=lambda decision: self._looking(decision, decider, job)
                )
        finally:
            job.drop()  # when the gate raises or the caller leaves
        if not decision.retrieve:
            return decision, None
        if isinstance(self._found, Exception):
            raise self._found
        return decision, self._found

    def _looking(self, decision: Decision, decider: Decider, job: Background) -> Flow[Decision]:
        yield from self._waiting(job)
        found = self._found if isinstance(self._found, Exception) else passages_of(self._found)
        known_from = None if decider.threshold is None else decision.threshold
        return looked(decision, found, self.options, known_from=known_from)

    def _waiting(self, job: Background) -> Flow[None]:
        try:
            self._found = yield job
        except Exception as error:
            self._found = error


def passages_of(nodes: Sequence[NodeWithScore]) -> list[FoundPassage]:
    """Return nodes as they are judged."""
    return [
        FoundPassage(each.node.get_content(), str(each.node.metadata.get("title") or "")) for each in nodes
    ]
