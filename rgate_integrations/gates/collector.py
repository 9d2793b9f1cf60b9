"""Computes each piece of evidence once for a batch, whichever gates ask for it, and keeps its cost."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

from rgate_integrations.decision import Cost, Draft
from rgate_integrations.errors import (
    DownloadError,
    EvidenceError,
    MissingDependencyError,
    ModelLoadError,
    ServerError,
    UnknownNameError,
)
from rgate_integrations.evidence import (
    CompletionSpec,
    DraftSpec,
    Evidence,
    EvidenceSpec,
    HiddenSpec,
    Inputs,
    NeighboursSpec,
    Piece,
    PopularitySpec,
    SamplesSpec,
    TargetsSpec,
    draft_spec,
    longest,
)
from rgate_integrations.prompts import PromptTemplate
from rgate_integrations.proxy.base import HiddenStates, Proxy

_HOPELESS = (DownloadError, MissingDependencyError, ModelLoadError, ServerError, UnknownNameError)
"""What fails for one question fails for all: there is no model."""


class Drafter(Protocol):
    """Whatever writes the first tokens of the answering LLM's answer; an adapter or a proxy."""

    def draft(self, questions: Sequence[str], tokens: int) -> Sequence[Draft]:
        """Return one draft a question, of at most ``tokens`` tokens, with log-probabilities where known."""


class Collector:
    """Evidence of one batch of questions.

    Args:
        inputs: The questions and what the caller gave with them.
        proxy: Returns the proxy; called only when a piece needs it.
        llm: Drafts for specs with ``source="llm"``, or None.
        specs: Everything that will be asked for, as far as known: drafts are written once, at the greatest
            length among them.
    """

    def __init__(
        self,
        inputs: Sequence[Inputs],
        proxy: Callable[[], Proxy],
        llm: Drafter | None = None,
        specs: Sequence[EvidenceSpec] = (),
    ) -> None:
        self.inputs = list(inputs)
        self._proxy = proxy
        self._llm = llm
        self._drafts = [d for d in map(draft_spec, specs) if d is not None]
        self._hiddens = [s for s in specs if isinstance(s, HiddenSpec)]
        self._judgments = [s for s in specs if isinstance(s, TargetsSpec) and s.prompt.follow_up]
        self._pieces: list[dict[EvidenceSpec, Piece]] = [{} for _ in inputs]
        self._costs: list[dict[EvidenceSpec, Cost]] = [{} for _ in inputs]
        self._errors: list[dict[EvidenceSpec, Exception]] = [{} for _ in inputs]

    def evidence(
        self, specs: Sequence[EvidenceSpec], indices: Sequence[int] | None = None
    ) -> dict[int, Evidence | Exception]:
        """Return the evidence for some specs and some questions, computing what is missing.

        A question whose evidence cannot be had gets the exception instead; the others are not affected.

        Args:
            specs: What is needed.
            indices: Positions of the questions in the batch; all when None.
        """
        wanted = list(range(len(self.inputs))) if indices is None else list(indices)
        for spec in specs:
            self._ensure(spec, wanted)
        parts = [part for spec in specs for part in self._parts(spec)]
        return {i: self._error(parts, i) or self._evidence_of(specs, i) for i in wanted}

    def cost(self, specs: Sequence[EvidenceSpec], index: int) -> Cost:
        """Return what the pieces computed so far for some specs and one question cost, each counted once."""
        parts = dict.fromkeys(part for spec in specs for part in self._parts(spec))
        return sum((self._costs[index].get(part, Cost()) for part in parts), Cost())

    def _evidence_of(self, specs: Sequence[EvidenceSpec], index: int) -> Evidence:
        pieces = {spec: self._pieces[index][self._stored(spec)] for spec in specs}
        return Evidence(self.inputs[index], pieces, self.cost(specs, index))

    def _error(self, parts: Sequence[EvidenceSpec], index: int) -> Exception | None:
        return next((self._errors[index][part] for part in parts if part in self._errors[index]), None)

    def _stored(self, spec: EvidenceSpec) -> EvidenceSpec:
        """Return the spec under which a piece is stored: drafts that differ in length are one piece."""
        if isinstance(spec, DraftSpec):
            return replace(longest(spec, self._drafts), logprobs=spec.logprobs)
        return spec

    def _parts(self, spec: EvidenceSpec) -> list[EvidenceSpec]:
        """Return what a piece is made of, itself last: the draft it quotes, and that draft before it was read."""
        parts: list[EvidenceSpec] = []
        inner = draft_spec(spec)
        if inner is not None and inner.logprobs:
            parts.append(self._stored(replace(inner, logprobs=False)))
        if inner is not None and inner is not spec:
            parts.append(self._stored(inner))
        return [*parts, self._stored(spec)]

    def _ensure(self, spec: EvidenceSpec, indices: Sequence[int]) -> None:
        parts = self._parts(spec)
        for at, part in enumerate(parts, start=1):
            missing = [
                i for i in indices if part not in self._pieces[i] and self._error(parts[:at], i) is None
            ]
            if missing:
                self._compute(part, missing)

    def _compute(self, spec: EvidenceSpec, indices: Sequence[int]) -> None:
        """Compute a piece for some questions; if the batch fails, each alone, so that one cannot fail all."""
        start = time.perf_counter()
        try:
            pieces = self._pieces_for(spec, indices)
        except Exception as error:
            alone = len(indices) == 1 or isinstance(error, _HOPELESS)
            for i in indices:
                if alone:
                    self._errors[i][spec] = error
                else:
                    self._compute(spec, [i])
            return
        milliseconds = (time.perf_counter() - start) * 1e3 / len(indices)
        for i, (piece, cost) in zip(indices, pieces, strict=True):
            self._pieces[i][spec] = piece
            self._costs[i][spec] = cost.model_copy(update={"milliseconds": milliseconds})

    def _pieces_for(self, spec: EvidenceSpec, indices: Sequence[int]) -> Sequence[tuple[Piece, Cost]]:
        compute: dict[type, Callable[..., Sequence[tuple[Piece, Cost]]]] = {
            DraftSpec: self._draft,
            SamplesSpec: self._samples,
            TargetsSpec: self._targets,
            CompletionSpec: self._completion,
            NeighboursSpec: self._neighbours,
            PopularitySpec: self._popularity,
            HiddenSpec: self._hidden,
        }
        if isinstance(spec, DraftSpec) and spec.logprobs:
            return self._read(spec, indices)
        return compute[type(spec)](spec, indices)

    def _values(self, indices: Sequence[int], draft: DraftSpec | None = None) -> list[dict[str, str]]:
        return [
            {
                "question": self.inputs[i].question,
                **({"draft": self._drafted(draft, i).text} if draft else {}),
            }
            for i in indices
        ]

    def _drafted(self, spec: DraftSpec, index: int) -> Draft:
        piece = self._pieces[index][self._stored(spec)]
        if not isinstance(piece, Draft):
            raise EvidenceError(f"No draft was collected for {spec}.")
        return piece.head(spec.tokens)

    def _draft(self, spec: DraftSpec, indices: Sequence[int]) -> list[tuple[Piece, Cost]]:
        found: dict[int, tuple[Draft, Cost]] = {}
        unwritten = []
        for i in indices:
            given = self.inputs[i].draft
            if given is not None:
                found[i] = (self._head(given, spec.tokens), Cost())
            else:
                unwritten.append(i)
        if unwritten:
            for i, draft in zip(unwritten, self._write(spec, unwritten), strict=True):
                calls = int(bool(draft.prompt_tokens or draft.text))
                found[i] = (
                    draft,
                    Cost(model_calls=calls, tokens_in=draft.prompt_tokens, tokens_out=len(draft.tokens)),
                )
        return [found[i] for i in indices]

    def _head(self, given: Draft, tokens: int) -> Draft:
        """Cut a given draft; bare text is counted in the proxy's tokens, as it was in training."""
        if given.tokens or given.logprobs is not None or len(given.text) <= tokens:
            return given.head(tokens)
        cut = self._proxy().cut(given.text, tokens) if tokens else ""
        return (
            given if cut is None else given.model_copy(update={"text": cut.strip(), "finished": False})
        ).head(tokens)

    def _read(self, spec: DraftSpec, indices: Sequence[int]) -> list[tuple[Piece, Cost]]:
        """Let the proxy read drafts whose source gave no log-probabilities."""
        plain = replace(spec, logprobs=False)
        drafts = {i: self._drafted(plain, i) for i in indices}
        bare = [i for i in indices if drafts[i].logprobs is None]
        if not bare:
            return [(drafts[i], Cost()) for i in indices]
        read = self._proxy().read(spec.prompt, self._values(bare), [drafts[i] for i in bare])
        drafts.update(zip(bare, read, strict=True))
        return [
            (d, Cost(model_calls=1, tokens_in=d.prompt_tokens + len(d.tokens)) if i in bare else Cost())
            for i, d in drafts.items()
        ]

    def _write(self, spec: DraftSpec, indices: Sequence[int]) -> Sequence[Draft]:
        if spec.tokens == 0:
            return [Draft(text="", source=spec.source, finished=False) for _ in indices]
        if spec.source == "recorded":
            raise EvidenceError(
                "This gate judges recorded drafts, and none was given.",
                hint="Pass drafts=[...] to decide_batch, or load the gate with source='proxy'.",
            )
        if spec.source == "llm":
            if self._llm is None:
                raise EvidenceError(
                    "This gate judges the LLM's own first tokens, and it has no LLM.",
                    hint="Load it with llm=..., pass drafts=[...], or load it with source='proxy'.",
                )
            drafts = self._llm.draft([self.inputs[i].question for i in indices], spec.tokens)
            if len(drafts) != len(indices):
                raise EvidenceError(f"The LLM wrote {len(drafts)} drafts for {len(indices)} questions.")
            return [d.model_copy(update={"source": "llm"}) for d in drafts]
        states = next((h for h in self._hiddens if h.prompt == spec.prompt and self._is(h.draft, spec)), None)
        if states is None:
            return self._judged(spec, indices)
        both = self._proxy().generate_hidden(
            spec.prompt, self._values(indices), tokens=spec.tokens, layers=states.blocks
        )
        for i, (_, hidden) in zip(indices, both, strict=True):
            self._pieces[i][states], self._costs[i][states] = hidden.states, _read_cost(hidden)
        return [draft for draft, _ in both]

    def _judged(self, spec: DraftSpec, indices: Sequence[int]) -> Sequence[Draft]:
        """Write drafts, and judge them on the way if that is asked for."""
        proxy, values = self._proxy(), self._values(indices)
        asked = next(
            (t for t in self._judgments if t.prompt.follows(spec.prompt) and self._is(t.draft, spec)), None
        )
        if asked is None:
            return proxy.generate(spec.prompt, values, tokens=spec.tokens)
        both = proxy.generate_scored(
            spec.prompt,
            values,
            tokens=spec.tokens,
            follow_up=asked.prompt,
            targets=asked.targets,
            adapter=asked.adapter,
        )
        for i, (_, scores) in zip(indices, both, strict=True):
            self._pieces[i][asked] = scores.logprobs
            self._costs[i][asked] = Cost(model_calls=1, tokens_in=scores.prompt_tokens)
        return [draft for draft, _ in both]

    def _is(self, draft: DraftSpec | None, written: DraftSpec) -> bool:
        """Return whether a draft that is quoted is, to the last token, the one that is written."""
        return draft is not None and draft.tokens == written.tokens and self._stored(draft) == written

    def _samples(self, spec: SamplesSpec, indices: Sequence[int]) -> list[tuple[Piece, Cost]]:
        samples = self._proxy().sample(
            spec.prompt,
            self._values(indices),
            n=spec.n,
            tokens=spec.tokens,
            temperature=spec.temperature,
            seed=spec.seed,
        )
        return [
            (
                each,
                Cost(
                    model_calls=spec.n,
                    tokens_in=sum(d.prompt_tokens for d in each),
                    tokens_out=sum(len(d.tokens) for d in each),
                ),
            )
            for each in samples
        ]

    def _targets(self, spec: TargetsSpec, indices: Sequence[int]) -> list[tuple[Piece, Cost]]:
        scores = self._proxy().score(
            spec.prompt, self._values(indices, spec.draft), spec.targets, adapter=spec.adapter
        )
        return [(s.logprobs, Cost(model_calls=1, tokens_in=s.prompt_tokens)) for s in scores]

    def _completion(self, spec: CompletionSpec, indices: Sequence[int]) -> list[tuple[Piece, Cost]]:
        done = self._proxy().generate(
            spec.prompt, self._values(indices, spec.draft), tokens=spec.tokens, adapter=spec.adapter
        )
        return [(d, Cost(model_calls=1, tokens_in=d.prompt_tokens, tokens_out=len(d.tokens))) for d in done]

    def _hidden(self, spec: HiddenSpec, indices: Sequence[int]) -> list[tuple[Piece, Cost]]:
        drafts = [self._drafted(spec.draft, i) for i in indices] if spec.draft else None
        states = self._proxy().hidden(spec.prompt, self._values(indices), drafts, spec.blocks)
        return [(s.states, _read_cost(s)) for s in states]

    def _neighbours(self, spec: NeighboursSpec, indices: Sequence[int]) -> list[tuple[Piece, Cost]]:
        from rgate_integrations.gates.neighbours import labelled_questions

        examples = labelled_questions(spec.examples, spec.embedder)
        nearest = examples.nearest([self.inputs[i].question for i in indices], spec.k)
        return [(each, Cost(model_calls=1)) for each in nearest]

    def _popularity(self, spec: PopularitySpec, indices: Sequence[int]) -> list[tuple[Piece, Cost]]:
        values = [self.inputs[i].popularity for i in indices]
        if any(v is None for v in values):
            raise EvidenceError(
                "No popularity score was given for this question.",
                hint="Pass popularity=[...], one number a question, to decide_batch.",
            )
        return [(float(v or 0.0), Cost()) for v in values]


def _read_cost(states: HiddenStates) -> Cost:
    """States that were kept while a draft was written have no prompt of their own, and cost nothing."""
    return Cost(model_calls=int(states.prompt_tokens > 0), tokens_in=states.prompt_tokens)


class ProxyDrafter:
    """Makes a proxy the answering LLM: the draft is the beginning of its own answer.

    Args:
        proxy: The model.
        prompt: The prompt it answers.
    """

    def __init__(self, proxy: Proxy, prompt: PromptTemplate) -> None:
        self.generate = partial(proxy.generate, prompt)

    def draft(self, questions: Sequence[str], tokens: int) -> list[Draft]:
        """Write the first tokens of each answer."""
        return self.generate([{"question": q} for q in questions], tokens=tokens)
