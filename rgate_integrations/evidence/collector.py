"""Computes each piece of evidence once for a batch of questions, whichever gates ask for it, and keeps its cost."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, TypeVar

from rgate_integrations.decision import Cost
from rgate_integrations.errors import (
    DownloadError,
    EvidenceError,
    MissingDependencyError,
    ModelLoadError,
    ServerError,
    UnknownNameError,
)
from rgate_integrations.evidence.base import Context, Drafter, Evidence, EvidenceSpec, Inputs, MadeBy, Piece
from rgate_integrations.models.base import Proxy

_T = TypeVar("_T")

_HOPELESS = (DownloadError, MissingDependencyError, ModelLoadError, ServerError, UnknownNameError)
"""What fails for one question fails for all: there is no model."""


@dataclass(frozen=True)
class Sources:
    """What evidence is computed from.

    Attributes:
        proxy: Returns the proxy; called only when a piece needs it.
        llm: Writes drafts for specs with ``source="llm"``, or None.
        memory: What outlives a batch, by key.
    """

    proxy: Callable[[], Proxy]
    llm: Drafter | None
    memory: MutableMapping[Hashable, Any]


class Postponed(Exception):
    """What a collector of quick looks gives in place of slow evidence, and of all that is made of it."""


@dataclass(frozen=True)
class _Entry:
    """What became of a spec for one question: a piece or an error, and all specs that it was made of, itself too."""

    outcome: Piece[Any] | Exception
    made_of: frozenset[EvidenceSpec[Any]]


Collected: TypeAlias = Mapping[EvidenceSpec[Any], _Entry]
"""What became of the specs that were asked for, for one question."""


class Collector:
    """Evidence of one batch of questions.

    Args:
        inputs: The questions and what the caller gave with them.
        sources: What evidence is computed from.
        specs: Everything that will be asked for.
        quick: Postpone what is slow.
        earlier: What was collected before, one a question, for the same specs.
    """

    def __init__(
        self,
        inputs: Sequence[Inputs],
        sources: Sources,
        specs: Sequence[EvidenceSpec[Any]] = (),
        *,
        quick: bool = False,
        earlier: Sequence[Collected] | None = None,
    ) -> None:
        self.inputs = list(inputs)
        self.sources = sources
        self.planned = expanded_specs(specs)
        self.quick = quick
        # A dict for each question: what fails for one is nothing to the others.
        self._entries: list[dict[EvidenceSpec[Any], _Entry]]
        self._entries = [{} for _ in inputs] if earlier is None else [dict(each) for each in earlier]
        self._seconds = 0.0  # spent in finished computations, those inside of others included once

    def context(self) -> Context:
        """Return the context of the whole batch."""
        return _Part(self, range(len(self.inputs)))

    def cost(self, spec: EvidenceSpec[Any], place: int) -> Cost:
        """Return what a question's piece and all that it was made of cost, each counted once."""
        total = Cost()
        entries = self._entries[place]
        stored = self.stored(spec)
        if stored in entries:
            for part in entries[stored].made_of:
                outcome = entries[part].outcome
                if isinstance(outcome, Piece):
                    total += outcome.cost
        return total

    def stored(self, spec: EvidenceSpec[_T]) -> EvidenceSpec[_T]:
        """Return the spec under which a piece is kept: drafts that differ in length are one piece."""
        return spec.stored_as(self.planned)

    def entry(self, spec: EvidenceSpec[Any], place: int) -> _Entry:
        """Return what became of a spec that was ensured before."""
        return self._entries[place][self.stored(spec)]

    def ensure(self, spec: EvidenceSpec[Any], places: Sequence[int]) -> None:
        """Compute a spec, and what it needs, for the questions that lack it."""
        stored = self.stored(spec)
        missing = [place for place in places if stored not in self._entries[place]]
        if not missing:
            return
        needs = [self.stored(needed) for needed in stored.needs]
        for needed in needs:
            self.ensure(needed, missing)
        ready = []
        for place in missing:
            failed = self._first_error(needs, place)
            if failed is None:
                ready.append(place)
            else:  # its reason is the first thing that failed, not what followed from that
                self._entries[place][stored] = failed
        # A needed draft may have brought this piece with it.
        ready = [place for place in ready if stored not in self._entries[place]]
        if self.quick:
            ready = self._without_slow(stored, ready)
        if ready:
            self._compute(stored, ready)

    def collected(self, place: int) -> Collected:
        """Return what is there for a question, for a collector that goes on with it."""
        done = {}
        for spec, entry in self._entries[place].items():
            if not isinstance(entry.outcome, Postponed):
                done[spec] = entry
        return done

    def keep(self, spec: EvidenceSpec[Any], place: int, entry: _Entry) -> None:
        """Keep what became of a spec for a question."""
        self._entries[place][self.stored(spec)] = entry

    def maker_of(self, specs: Iterable[EvidenceSpec[Any]], place: int) -> MadeBy:
        """Return the model that made any of a question's pieces; with empty names if none was used."""
        for spec in specs:
            outcome = self._entries[place][spec].outcome
            if isinstance(outcome, Piece) and outcome.made_by.model:
                return outcome.made_by
        return MadeBy()

    def _without_slow(self, spec: EvidenceSpec[Any], places: Sequence[int]) -> list[int]:
        """Postpone a spec where it is slow; returns the other questions."""
        quick = []
        for place in places:
            if spec.is_slow(self.inputs[place]):
                self._entries[place][spec] = _Entry(Postponed(), frozenset({spec}))
            else:
                quick.append(place)
        return quick

    def _first_error(self, needs: Sequence[EvidenceSpec[Any]], place: int) -> _Entry | None:
        for needed in needs:
            entry = self._entries[place][needed]
            if isinstance(entry.outcome, Exception):
                return entry
        return None

    def _compute(self, spec: EvidenceSpec[Any], places: Sequence[int]) -> None:
        """Compute a spec for some questions; if the batch fails, each alone, so that one cannot fail all."""
        part = _Part(self, places)
        began, nested = time.perf_counter(), self._seconds
        try:
            outcomes = spec.compute(part)
            if len(outcomes) != len(places):
                raise EvidenceError(f"{spec} gave {len(outcomes)} pieces for {len(places)} questions.")
        except Postponed as later:
            outcomes = [later] * len(places)
        except Exception as error:
            # Evidence may be any user's code, so any error may come. It must cost one question, not the batch.
            if len(places) > 1 and not isinstance(error, _HOPELESS):
                for place in places:
                    self._compute(spec, [place])
                return
            outcomes = [error] * len(places)
        elapsed = time.perf_counter() - began
        # What this spec asked for has counted its own time already.
        own = elapsed - (self._seconds - nested)
        self._seconds = nested + elapsed
        part.finish(spec, outcomes, milliseconds=max(own, 0.0) * 1e3 / len(places))


class _Part(Context):
    """Some questions of a collector's batch; notes what is used for each of them."""

    def __init__(self, collector: Collector, places: Sequence[int], root: _Part | None = None) -> None:
        self.inputs = [collector.inputs[place] for place in places]
        self.planned = collector.planned
        self.llm = collector.sources.llm
        self._collector = collector
        self._places = list(places)
        # Parts of a part share its notes: they belong to one computation.
        self._root = root or self
        self._used: dict[int, set[EvidenceSpec[Any]]] = {place: set() for place in places}
        self._postponed: set[int] = set()
        self._brought: list[tuple[EvidenceSpec[Any], int, Piece[Any]]] = []
        self._model: Proxy | None = None

    @property
    def proxy(self) -> Proxy:
        # Noted here, where it is handed out: no spec can forget to say which model made its pieces.
        self._root._model = self._collector.sources.proxy()
        return self._root._model

    def truncate(self, text: str, tokens: int) -> str | None:
        # Not `proxy`: who counts tokens makes nothing, and must not load a model to say who it is.
        return self._collector.sources.proxy().truncate(text, tokens)

    def part(self, places: Sequence[int]) -> Context:
        return _Part(self._collector, [self._places[place] for place in places], self._root)

    def get(self, spec: EvidenceSpec[_T]) -> list[_T]:
        values = []
        for found in self.find(spec):
            if isinstance(found, Exception):
                raise found
            values.append(found)
        return values

    def find(self, spec: EvidenceSpec[_T]) -> list[_T | Exception]:
        self._collector.ensure(spec, self._places)
        found: list[_T | Exception] = []
        for place in self._places:
            entry = self._collector.entry(spec, place)
            self._root._used[place] |= entry.made_of
            if isinstance(entry.outcome, Postponed):
                self._root._postponed.add(place)
            if isinstance(entry.outcome, Exception):
                found.append(entry.outcome)
            else:
                found.append(spec.taken_from(entry.outcome.value))
        return found

    def evidence(
        self, specs: Sequence[EvidenceSpec[Any]], *, earlier: Sequence[EvidenceSpec[Any]] = ()
    ) -> list[Evidence | Exception]:
        # One spec after another, each for all questions at once: that is what makes batches.
        columns = {spec: self.find(spec) for spec in (*earlier, *specs)}
        found: list[Evidence | Exception] = []
        for row, inputs in enumerate(self.inputs):
            pieces = {spec: column[row] for spec, column in columns.items()}
            errors = [pieces[spec] for spec in specs if isinstance(pieces[spec], Exception)]
            if errors:
                found.append(errors[0])
                continue
            there = {spec: value for spec, value in pieces.items() if not isinstance(value, Exception)}
            found.append(Evidence(inputs, there, self._makers(there, self._places[row])))
        return found

    def also(self, spec: EvidenceSpec[_T], pieces: Sequence[Piece[_T]]) -> None:
        for place, piece in zip(self._places, pieces, strict=True):
            self._root._brought.append((spec, place, piece))

    def memory(self, key: Hashable, make: Callable[[], _T]) -> _T:
        kept = self._collector.sources.memory
        if key not in kept:
            kept.setdefault(key, make())  # of two that are made at once, by two threads, one is kept
        found: _T = kept[key]
        return found

    def finish(
        self, spec: EvidenceSpec[Any], outcomes: Sequence[Piece[Any] | Exception], milliseconds: float
    ) -> None:
        """Keep what was computed, and what came with it, with its cost and the model that made it."""
        made_by = MadeBy() if self._model is None else MadeBy(self._model.name, self._model.fingerprint)
        for place, outcome in zip(self._places, outcomes, strict=True):
            if isinstance(outcome, Piece):
                cost = outcome.cost.model_copy(update={"milliseconds": milliseconds})
                # A score is made by the model that made what it was made of: a batch has one proxy.
                maker = made_by if made_by.model else self._collector.maker_of(self._used[place], place)
                outcome = replace(outcome, cost=cost, made_by=maker)
            if place in self._postponed:
                # Whatever was made in spite of it, such as a score by a later look, would be another one with it.
                outcome = Postponed()
            self._collector.keep(spec, place, _Entry(outcome, frozenset({spec, *self._used[place]})))
        for other, place, piece in self._brought:
            piece = replace(piece, made_by=made_by)
            made_of = frozenset({self._collector.stored(other), spec, *self._used[place]})
            self._collector.keep(other, place, _Entry(piece, made_of))

    def _makers(self, specs: Iterable[EvidenceSpec[Any]], place: int) -> dict[EvidenceSpec[Any], MadeBy]:
        found = {}
        for spec in specs:
            outcome = self._collector.entry(spec, place).outcome
            if isinstance(outcome, Piece):
                found[spec] = outcome.made_by
        return found


def expanded_specs(specs: Sequence[EvidenceSpec[Any]]) -> list[EvidenceSpec[Any]]:
    """Return some specs and all that they may need, each once."""
    found: dict[EvidenceSpec[Any], None] = {}
    pending = list(specs)
    while pending:
        spec = pending.pop()
        if spec not in found:
            found[spec] = None
            pending += spec.may_need
    return list(found)
