"""One loaded model and its forward passes: batches that fit into memory, decoding, and beginnings read once."""

from __future__ import annotations

import copy
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from transformers import DynamicCache, GenerationConfig
from transformers.cache_utils import DynamicLayer

from rgate_integrations.decision import Draft
from rgate_integrations.prompts import PromptTemplate
from rgate_integrations.proxy.base import PooledLayer
from rgate_integrations.proxy.decoding import Recorder, StopAt, batches, pad_left
from rgate_integrations.proxy.encoding import EncodedPrompt, PromptEncoder
from rgate_integrations.proxy.hidden import layer_states, pooled, spans_of, watching

_log = logging.getLogger(__name__)

_LEAST = 8
"""A beginning of fewer tokens is not worth a cache of its own."""
_KEPT = 8
"""So many beginnings are kept, each with the keys and values of all layers."""

States: TypeAlias = Mapping[int, torch.Tensor]
"""Hidden states by layer, each (rows, columns, hidden size) or, of one row, (tokens, hidden size)."""


@dataclass(frozen=True)
class Beginning:
    """Tokens with which all rows of a batch begin.

    Attributes:
        ids: The tokens; empty if nothing is shared.
        cache: Their keys and values, for one row.
        states: Their hidden states by layer, each (tokens, hidden size).
    """

    ids: tuple[int, ...] = ()
    cache: Any = None
    states: States = field(default_factory=dict)


@dataclass(frozen=True)
class Batch:
    """Rows as a model takes them: what all begin with, padding, and the rest of each.

    Attributes:
        begun: What all begin with.
        ids: Token ids, shape (rows, beginning + width).
        mask: 1 where there is a token, 0 for padding; the same shape.
        cache: The beginning's keys and values, one copy a row, or None.
    """

    begun: Beginning
    ids: torch.Tensor
    mask: torch.Tensor
    cache: Any

    @property
    def inputs(self) -> dict[str, Any]:
        """Arguments of one forward pass over what is not in the cache."""
        at = len(self.begun.ids)
        return {
            "input_ids": self.ids[:, at:],
            "attention_mask": self.mask,
            "position_ids": (self.mask.cumsum(-1) - 1).clamp(min=0)[:, at:],
            "use_cache": self.cache is not None,
            **self.cached,
        }

    @property
    def cached(self) -> dict[str, Any]:
        """The cache as an argument, if there is one."""
        return {} if self.cache is None else {"past_key_values": self.cache}

    def row(self, states: States, row: int, prompt: int, written: int = 0) -> States:
        """Return one row's states without padding, each (prompt + written, hidden size).

        Args:
            states: What was collected while this batch was read, and on.
            row: Which row.
            prompt: Length of what the row had in this batch.
            written: How many tokens were written after it.
        """
        begun = len(self.begun.ids)
        width = self.ids.shape[1] - begun
        fresh = {n: found[row, width - (prompt - begun) : width + written] for n, found in states.items()}
        return {n: torch.cat([self.begun.states[n], found]) if begun else found for n, found in fresh.items()}


@dataclass(frozen=True)
class Written:
    """What a batch of decoding leaves behind.

    Attributes:
        indices: Which rows were written.
        drafts: What was written, one a row of the batch.
        batch: What was read before.
        states: Watched hidden states of what was read, and of each token written.
        cache: Keys and values of the columns of ``batch`` and of each token written.
    """

    indices: Sequence[int]
    drafts: Sequence[Draft]
    batch: Batch
    states: States
    cache: Any


class Engine:
    """Runs a causal language model for a proxy, which holds a lock meanwhile.

    Args:
        model: The model, on its device.
        encoder: Makes its token ids.
        name: What the proxy is called, for drafts.
        max_batch_size: Greatest number of sequences in one forward pass.
        max_batch_tokens: Greatest number of tokens in one forward pass, padding included.
    """

    def __init__(
        self, model: Any, encoder: PromptEncoder, name: str, max_batch_size: int, max_batch_tokens: int
    ) -> None:
        self.model = model
        self.encoder = encoder
        self.name = name
        self.max_batch_size = max_batch_size
        self.max_batch_tokens = max_batch_tokens
        self.calls = 0
        self._adapter: str | None = None
        self._beginnings: OrderedDict[tuple[tuple[int, ...], str | None, tuple[int, ...]], Beginning] = (
            OrderedDict()
        )
        self._newlines: torch.Tensor | None = None

    @contextmanager
    def adapted(self, name: str | None) -> Iterator[None]:
        """Switch a loaded adapter on; None is the base model."""
        if name is None:
            yield
            return
        self.model.set_adapter(name)
        self.model.enable_adapters()
        self._adapter = name
        try:
            yield
        finally:
            self._adapter = None
            self.model.disable_adapters()

    def read_tails(
        self,
        prompt: PromptTemplate,
        rows: Sequence[Sequence[int]],
        keep: Sequence[int],
        take: Callable[[int, torch.Tensor], None],
    ) -> None:
        """Give ``take`` each row's next-token log-probabilities at its last ``keep`` positions, (keep, vocabulary).

        They are dropped after each batch: over a whole vocabulary they are large.
        """
        shared = self._shared(prompt, rows, keep)

        def run(indices: Sequence[int]) -> None:
            widest = max(keep[i] for i in indices)
            batch = self._batch([rows[i] for i in indices], shared)
            logits = self.model(**batch.inputs, logits_to_keep=widest).logits
            logprobs = torch.log_softmax(logits.float(), dim=-1)
            for row, i in enumerate(indices):
                take(i, logprobs[row, widest - keep[i] :])

        self.in_batches([len(r) for r in rows], run)

    def read_states(
        self,
        prompt: PromptTemplate,
        rows: Sequence[EncodedPrompt],
        texts: Sequence[Sequence[int]],
        blocks: Sequence[PooledLayer],
    ) -> list[npt.NDArray[np.float32]]:
        """Read prompts and the texts that continue them; pooled hidden states, each (blocks, hidden size)."""
        whole = [(*r.ids, *t) for r, t in zip(rows, texts, strict=True)]
        shared = self._shared(prompt, whole, [1] * len(whole))
        layers = _layers(blocks)
        found: dict[int, npt.NDArray[np.float32]] = {}

        def run(indices: Sequence[int]) -> None:
            batch = self._batch([whole[i] for i in indices], shared, layers)
            states = layer_states(self.model.base_model, batch.inputs, layers)
            for row, i in enumerate(indices):
                spans = spans_of(rows[i].question, len(rows[i].ids), len(texts[i]))
                found[i] = pooled(batch.row(states, row, len(whole[i])), spans, blocks)

        self.in_batches([len(w) for w in whole], run)
        return [found[i] for i in range(len(rows))]

    def decode(
        self,
        prompt: PromptTemplate,
        rows: Sequence[EncodedPrompt],
        tokens: int,
        *,
        temperature: float | None = None,
        seeds: Sequence[int] = (),
        watch: Sequence[PooledLayer] = (),
        then: Callable[[Written], None] | None = None,
    ) -> list[Draft]:
        """Write a draft a row.

        Args:
            prompt: The template that the rows were made of.
            rows: The prompts.
            tokens: Greatest number of new tokens.
            temperature: Sampling temperature, or None for greedy decoding.
            seeds: A seed a row, for sampling.
            watch: Hidden states that ``then`` will want.
            then: Given what each batch leaves behind, while it is there.
        """
        stops = self.encoder.stop_ids()
        config = GenerationConfig(
            # The states, keys and values of a token are there once the next one is asked for.
            max_new_tokens=tokens + (then is not None),
            do_sample=False,
            eos_token_id=stops,
            pad_token_id=self.encoder.tokenizer.pad_token_id,
            use_cache=True,
            return_dict_in_generate=True,
        )
        shared = self._shared(prompt, [r.ids for r in rows], [1] * len(rows))
        layers = _layers(watch)
        results: dict[int, Draft] = {}

        def run(indices: Sequence[int]) -> None:
            batch = self._batch([rows[i].ids for i in indices], shared, layers)
            chosen = [seeds[i] for i in indices] if temperature is not None else []
            recorder = Recorder(temperature, chosen, self.model.device)
            newline = rows[indices[0]].template.stop_at_newline
            with watching(self.model.base_model, layers) as seen:
                output = self.model.generate(
                    input_ids=batch.ids,
                    attention_mask=batch.mask,
                    **batch.cached,
                    generation_config=config,
                    logits_processor=[recorder],
                    stopping_criteria=[StopAt(self._newline_mask())] if newline else [],
                )
            start = batch.ids.shape[1]
            new = output.sequences[:, start : start + tokens].tolist()
            logprobs = torch.stack(recorder.logprobs, dim=1).tolist()
            entropies = torch.stack(recorder.entropies, dim=1).tolist()
            ended = {*stops, *(self._newline_mask().nonzero().flatten().tolist() if newline else [])}
            drafts = [
                self._draft(rows[i], new[row], ended, logprobs[row], entropies[row])
                for row, i in enumerate(indices)
            ]
            results.update(zip(indices, drafts, strict=True))
            if then is not None:
                states = {layer: torch.cat(parts, dim=1) for layer, parts in seen.items()}
                then(Written(indices, drafts, batch, states, output.past_key_values))

        self.in_batches([len(r.ids) + tokens for r in rows], run)
        return [results[i] for i in range(len(rows))]

    def read_and_follow(
        self,
        prompt: PromptTemplate,
        rows: Sequence[Sequence[int]],
        suffix: Sequence[int],
        targets: Sequence[Sequence[int]],
        adapter: str | None,
    ) -> list[tuple[float, ...]]:
        """Read rows with the base model, and score targets after ``suffix`` as `follow` does."""
        shared = self._shared(prompt, rows, [1] * len(rows))
        found: dict[int, tuple[float, ...]] = {}

        def run(indices: Sequence[int]) -> None:
            batch = self._batch([rows[i] for i in indices], shared)
            cache = self.model.base_model(**{**batch.inputs, "use_cache": True}).past_key_values
            sums = self.follow(batch, cache, [0] * len(indices), suffix, targets, adapter)
            found.update(zip(indices, sums, strict=True))

        self.in_batches([len(r) + len(suffix) for r in rows], run)
        return [found[i] for i in range(len(rows))]

    def follow(
        self,
        batch: Batch,
        cache: Any,
        written: Sequence[int],
        suffix: Sequence[int],
        targets: Sequence[Sequence[int]],
        adapter: str | None,
    ) -> list[tuple[float, ...]]:
        """Score targets after the same suffix in every row, on the keys and values that are there already.

        Args:
            batch: What was read.
            cache: Keys and values of its columns, and of the tokens written since.
            written: How many of these count in each row: one that ended early was padded.
            suffix: Token ids that follow.
            targets: Token ids of each target.
            adapter: Name of a loaded adapter that is on from the suffix on, or None.

        Returns:
            For each row the log-probability of each target's whole sequence.
        """
        device, rows = self.model.device, len(written)
        columns = torch.arange(cache.get_seq_length() - batch.ids.shape[1], device=device)
        kept = columns[None] < torch.tensor(written, device=device)[:, None]
        mask = torch.cat([batch.mask, kept.long()], dim=1)
        start = mask.sum(dim=1, keepdim=True)
        sums = torch.zeros(rows, len(targets), device=device)
        # Targets that share all but their last token, such as "Yes" and "No", share a forward pass.
        prefixes = sorted({tuple(t[:-1]) for t in targets})
        with self.adapted(adapter):
            for prefix in prefixes:
                ids = torch.tensor([[*suffix, *prefix]] * rows, device=device)
                logits = self.model(
                    input_ids=ids,
                    attention_mask=torch.cat([mask, torch.ones_like(ids)], dim=1),
                    position_ids=start + torch.arange(ids.shape[1], device=device),
                    past_key_values=cache if prefix == prefixes[-1] else copy.deepcopy(cache),
                    use_cache=True,
                    logits_to_keep=len(prefix) + 1,
                ).logits
                logprobs = torch.log_softmax(logits.float(), dim=-1)
                for t, target in enumerate(targets):
                    if tuple(target[:-1]) == prefix:
                        sums[:, t] = logprobs[:, range(len(target)), list(target)].sum(dim=-1)
        return [tuple(min(v, 0.0) for v in each) for each in sums.tolist()]

    def in_batches(self, lengths: Sequence[int], run: Callable[[Sequence[int]], None]) -> None:
        """Run batches of like length; one that does not fit into memory is halved, down to single items."""
        pending = batches(lengths, self.max_batch_size, self.max_batch_tokens)
        while pending:
            batch = pending.pop(0)
            try:
                with torch.inference_mode():
                    run(batch)
                self.calls += 1
            except torch.OutOfMemoryError:
                if len(batch) == 1:
                    raise
                _log.warning("Out of memory with a batch of %d on %s: halving it.", len(batch), self.name)
                torch.cuda.empty_cache()
                half = len(batch) // 2
                pending[:0] = [batch[:half], batch[half:]]

    # --- a batch -------------------------------------------------------------------------------------------

    def _shared(
        self, prompt: PromptTemplate, rows: Sequence[Sequence[int]], keep: Sequence[int]
    ) -> tuple[int, ...]:
        """Return what rows begin with, of which all but the last ``keep`` tokens may come from a cache."""
        ids = self.encoder.beginning(prompt)
        n = len(ids)
        fits = all(len(r) - n >= k and tuple(r[:n]) == ids for r, k in zip(rows, keep, strict=True))
        return ids if fits and n >= _LEAST else ()

    def _batch(
        self, rows: Sequence[Sequence[int]], shared: tuple[int, ...], layers: tuple[int, ...] = ()
    ) -> Batch:
        begun = self._beginning(shared, layers) if shared else Beginning()
        n, device = len(begun.ids), self.model.device
        ids, mask = pad_left([r[n:] for r in rows], self.encoder.tokenizer.pad_token_id, device)
        if not n:
            return Batch(begun, ids, mask, None)
        cache = copy.deepcopy(begun.cache)
        cache.batch_repeat_interleave(len(rows))
        first = torch.tensor([begun.ids], device=device).expand(len(rows), -1)
        return Batch(
            begun, torch.cat([first, ids], dim=1), torch.cat([torch.ones_like(first), mask], dim=1), cache
        )

    def _beginning(self, ids: tuple[int, ...], layers: tuple[int, ...]) -> Beginning:
        key = (ids, self._adapter, layers)
        if key not in self._beginnings:
            output = self.model.base_model(
                torch.tensor([ids], device=self.model.device),
                use_cache=True,
                output_hidden_states=bool(layers),
            )
            cache = output.past_key_values
            # Other kinds, such as those of sliding windows and of recurrent models, are not to be copied in part.
            plain = type(cache) is DynamicCache and all(type(layer) is DynamicLayer for layer in cache.layers)
            states = {n: output.hidden_states[n][0] for n in layers}
            self._beginnings[key] = Beginning(ids, cache, states) if plain else Beginning()
            while len(self._beginnings) > _KEPT:
                self._beginnings.popitem(last=False)
        self._beginnings.move_to_end(key)
        return self._beginnings[key]

    def _draft(
        self,
        row: EncodedPrompt,
        ids: list[int],
        ends: set[int],
        logprobs: list[float],
        entropies: list[float],
    ) -> Draft:
        length = next((k for k, token in enumerate(ids) if token in ends), len(ids))
        kept = ids[:length]
        texts = self.encoder.token_texts(kept)
        return Draft(
            text="".join(texts).strip(),
            token_ids=tuple(kept),
            tokens=tuple(texts),
            logprobs=tuple(min(v, 0.0) for v in logprobs[:length]),
            entropies=tuple(entropies[:length]),
            finished=length < len(ids),
            source="proxy",
            model=self.name,
            prompt_tokens=len(row.ids),
        )

    def _newline_mask(self) -> torch.Tensor:
        if self._newlines is None:
            size = self.model.config.get_text_config().vocab_size
            tokenizer = self.encoder.tokenizer
            texts = tokenizer.batch_decode([[i] for i in range(min(size, len(tokenizer)))])
            mask = torch.zeros(size, dtype=torch.bool)
            mask[[i for i, text in enumerate(texts) if "\n" in text]] = True
            self._newlines = mask.to(self.model.device)
        return self._newlines


def _layers(blocks: Sequence[PooledLayer]) -> tuple[int, ...]:
    return tuple(sorted({layer for layer, _, _ in blocks}))
