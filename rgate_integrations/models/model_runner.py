"""One loaded model, and what a proxy has it do: drafts, scores and hidden states of rows, in batches that fit.

A proxy holds its lock while it uses the runner.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from rgate_integrations.decision import Draft
from rgate_integrations.models.base import PooledLayer, layer_numbers, pool_states, spans_of
from rgate_integrations.models.decoding import (
    CachedPrefix,
    ChosenTokens,
    Decoder,
    can_watch,
    choose_tokens,
    entropy_and_margin,
    group_by_length,
    layer_states,
    pad_left,
    positions,
    row_seed,
)
from rgate_integrations.models.encoding import EncodedPrompt, PromptEncoder
from rgate_integrations.models.fingerprint import fingerprint
from rgate_integrations.models.model_lock import ModelLock
from rgate_integrations.models.pretrained import load_adapter
from rgate_integrations.prompts import PromptTemplate
from rgate_integrations.runtime.arrays import Float32Array

_log = logging.getLogger(__name__)
T = TypeVar("T")

_MAX_BATCH_TOKENS = 16_384
"""Tokens in one forward pass, padding included."""
_MIN_PREFIX_TOKENS = 8
"""A prefix of fewer tokens is not worth a cache of its own."""
_MAX_PREFIXES = 8
"""So many prefixes are kept, each with the keys and values of all layers."""


class Judgment(NamedTuple):
    """Continuations that are scored after the same suffix in every row.

    Attributes:
        targets: Token ids of each continuation.
        suffix: Token ids that come before it; may be empty.
        adapter: Name of a loaded adapter that is on from the suffix on, or None.
    """

    targets: Sequence[Sequence[int]]
    suffix: Sequence[int] = ()
    adapter: str | None = None


class Generated(NamedTuple):
    """What came of one row.

    Attributes:
        draft: What was written.
        states: Pooled hidden states over prompt and draft, shape (layers, hidden size), if layers were given.
        scores: Log-probability of each target after the draft, if a judgment was given.
    """

    draft: Draft
    states: Float32Array
    scores: tuple[float, ...]


class ModelRunner:
    """Runs a causal language model for a proxy, which holds a lock meanwhile.

    Args:
        model: The model, on its device.
        encoder: Makes its token ids.
        name: What the proxy is called, for drafts.
        max_batch_size: Maximum number of sequences in one forward pass.
        lock: The lock that the proxy holds.

    Attributes:
        fingerprint: Tells the weights apart from those of other models.
        calls: How many batches were run.
    """

    def __init__(
        self, model: Any, encoder: PromptEncoder, name: str, max_batch_size: int, lock: ModelLock
    ) -> None:
        self.model = model
        self.encoder = encoder
        self.name = name
        self.max_batch_size = max_batch_size
        self.fingerprint = fingerprint(model)  # now: adapters will add parameters
        self.calls = 0
        self._lock = lock
        # What follows is read and changed with the proxy's lock held, so it needs none of its own.
        self._adapter: str | None = None
        self._adapters: dict[str, tuple[str, bool]] = {}
        # By adapter, too: each has keys and values of its own for the same tokens.
        self._prefixes: dict[tuple[tuple[int, ...], str | None], CachedPrefix] = {}
        # By whether a newline ends a text: to decode the whole vocabulary takes a good part of a second.
        self._end_masks: dict[bool, torch.Tensor] = {}

    # --- writing ---------------------------------------------------------------------------------------------

    def generate(
        self,
        rows: Sequence[EncodedPrompt],
        tokens: int,
        *,
        samples: int = 1,
        temperature: float = 0.0,
        seed: int = 0,
        layers: Sequence[PooledLayer] = (),
        judgment: Judgment | None = None,
    ) -> list[Generated]:
        """Continue prompts of one template; what is drawn depends on seed and prompt, never on the batch.

        Args:
            rows: The prompts.
            tokens: Maximum number of new tokens, >= 1.
            samples: How many continuations of each prompt, which come one after the other.
            temperature: Divides the logits; 0 is greedy.
            seed: Of the draw.
            layers: Which states are pooled on the way; their layers must pass `can_watch`.
            judgment: What is scored on the draft's own keys and values.
        """
        drawn = []
        for row in rows:
            for sample in range(samples):
                drawn.append(replace(row, seed=row_seed(seed, sample, row.ids)))
        work = partial(self._generate, tokens, temperature, layers, judgment)
        return self.in_batches(work, drawn, extra=tokens)

    def _generate(
        self,
        tokens: int,
        temperature: float,
        layers: Sequence[PooledLayer],
        judgment: Judgment | None,
        rows: Sequence[EncodedPrompt],
    ) -> list[Generated]:
        device = self.model.device
        generators = [torch.Generator(device).manual_seed(row.seed) for row in rows]
        template = rows[0].template
        decoder = self._decoder([row.ids for row in rows], template, layer_numbers(layers))
        ends = self.end_mask(at_newline=template.stop_at_newline)
        ended = torch.zeros(len(rows), dtype=torch.bool, device=device)
        steps: list[ChosenTokens] = []
        while len(steps) < tokens and not ended.all():
            self.pause()
            decoder.read(self.model)
            chosen = choose_tokens(decoder.logits[:, -1], temperature, generators)
            ended = ended | ends[chosen.ids]
            # Rows that have ended get masked columns until the last one of the batch has.
            decoder.append(chosen.ids[:, None], ~ended[:, None])
            steps.append(chosen)
        drafts = self._drafts(rows, steps, decoder.mask[:, -len(steps) :].sum(dim=1).tolist())
        if layers or judgment:
            decoder.read(self.model)  # the last token: its states, keys and values are wanted too
        scores: list[tuple[float, ...]] = [()] * len(rows)
        if judgment:
            scores = self._judge(decoder, judgment)
        results = []
        for place, (row, draft) in enumerate(zip(rows, drafts, strict=True)):
            states = np.zeros((0, 0), np.float32)
            if layers:
                spans = spans_of(row.question, len(row.ids), len(draft.token_ids))
                states = as_array(pool_states(decoder.row_states(place), spans, layers))
            results.append(Generated(draft, states, scores[place]))
        return results

    def _drafts(
        self, rows: Sequence[EncodedPrompt], steps: Sequence[ChosenTokens], lengths: Sequence[int]
    ) -> list[Draft]:
        """Return what was written as drafts; of each row, so many of the steps are the text."""
        ids, logprobs, entropies, margins = (
            torch.stack(each, dim=1).tolist() for each in zip(*steps, strict=True)
        )
        drafts = []
        for place, (row, length) in enumerate(zip(rows, lengths, strict=True)):
            own = ids[place][:length]
            texts = self.encoder.token_texts(own)
            draft = Draft(
                text="".join(texts).strip(),
                token_ids=tuple(own),
                tokens=tuple(texts),
                logprobs=tuple(logprobs[place][:length]),
                entropies=tuple(entropies[place][:length]),
                margins=tuple(margins[place][:length]),
                finished=length < len(steps),
                source="proxy",
                model=self.name,
                prompt_tokens=len(row.ids),
            )
            drafts.append(draft)
        return drafts

    # --- reading ---------------------------------------------------------------------------------------------

    def score(self, rows: Sequence[EncodedPrompt], judgment: Judgment) -> list[tuple[float, ...]]:
        """Return for each prompt, which ends with the suffix, the log-probability of each target's whole sequence."""
        longest = max(map(len, judgment.targets))
        return self.in_batches(partial(self._score, judgment), rows, extra=longest)

    def _score(self, judgment: Judgment, rows: Sequence[EncodedPrompt]) -> list[tuple[float, ...]]:
        before_suffix = [row.ids[: len(row.ids) - len(judgment.suffix)] for row in rows]
        decoder = self._decoder(before_suffix, rows[0].template)
        decoder.read(self.model)
        return self._judge(decoder, judgment)

    def judgment(
        self, row: EncodedPrompt, targets: Sequence[str], suffix: Sequence[int], adapter: str | None
    ) -> Judgment:
        """Return what scores targets after prompts; those of a template end alike, so one stands for all."""
        return Judgment([self.encoder.continuation(row, target) for target in targets], suffix, adapter)

    def _judge(self, decoder: Decoder, judgment: Judgment) -> list[tuple[float, ...]]:
        """Score targets on the keys and values of what a decoder has read."""
        rows, device = len(decoder.mask), decoder.mask.device
        scores = torch.zeros(rows, len(judgment.targets), device=device)
        with self.adapted(judgment.adapter):
            if judgment.suffix:
                suffix = torch.tensor([list(judgment.suffix)] * rows, device=device)
                decoder.append(suffix, torch.ones_like(suffix))
                decoder.read(self.model)
            first = torch.log_softmax(decoder.logits[:, -1].float(), dim=-1)
            # Targets that share all but their last token, such as "Known(True)" with another ending, share a pass.
            sharing: dict[tuple[int, ...], list[int]] = {}
            for number, target in enumerate(judgment.targets):
                sharing.setdefault(tuple(target[:-1]), []).append(number)
            for start, numbers in sharing.items():
                logprobs = first[:, None]
                if start:
                    branch = copy.deepcopy(decoder)  # a forward pass appends to the cache
                    ids = torch.tensor([start] * rows, device=device)
                    branch.append(ids, torch.ones_like(ids))
                    branch.read(self.model, keep=len(start))
                    after = torch.log_softmax(branch.logits.float(), dim=-1)
                    logprobs = torch.cat([logprobs, after], dim=1)
                for number in numbers:
                    ids_of_target = list(judgment.targets[number])
                    scores[:, number] = logprobs[:, range(len(ids_of_target)), ids_of_target].sum(dim=-1)
        return list(map(tuple, scores.clamp(max=0.0).tolist()))

    def score_text(self, rows: Sequence[EncodedPrompt]) -> list[dict[str, tuple[float, ...]]]:
        """Return ``logprobs``, ``entropies`` and ``margins`` of the texts that continue prompts, a value a token."""
        return self.in_batches(self._score_text, rows)

    def _score_text(self, rows: Sequence[EncodedPrompt]) -> list[dict[str, tuple[float, ...]]]:
        # A token's probability is read at the token before it, so a text's last token is not read at all.
        inputs = self._inputs([(*row.ids, *row.text[:-1]) for row in rows])
        width = max(len(row.text) for row in rows) or 1
        logits = self.model(**inputs, logits_to_keep=width).logits
        logprobs = torch.log_softmax(logits.float(), dim=-1)
        results = []
        for place, row in enumerate(rows):
            tail = logprobs[place, width - len(row.text) :]
            entropies, margins = entropy_and_margin(tail)
            own = {
                "logprobs": tuple(tail[range(len(row.text)), list(row.text)].clamp(max=0.0).tolist()),
                "entropies": tuple(entropies.tolist()),
                "margins": tuple(margins.tolist()),
            }
            results.append(own)
        return results

    def hidden(self, rows: Sequence[EncodedPrompt], layers: Sequence[PooledLayer]) -> list[Float32Array]:
        """Pool the states of prompts and of the texts that continue them, each to shape (layers, hidden size)."""
        return self.in_batches(partial(self._hidden, layers), rows)

    def _hidden(self, layers: Sequence[PooledLayer], rows: Sequence[EncodedPrompt]) -> list[Float32Array]:
        inputs = self._inputs([(*row.ids, *row.text) for row in rows])
        # No layer above the highest that is asked for is run.
        states = layer_states(self.model.base_model, inputs, layer_numbers(layers))
        results = []
        for place, row in enumerate(rows):
            own = {}
            for number, each in states.items():
                own[number] = each[place, -len(row) :].float()  # padding is on the left
            spans = spans_of(row.question, len(row.ids), len(row.text))
            results.append(as_array(pool_states(own, spans, layers)))
        return results

    def can_watch(self, layers: Sequence[PooledLayer]) -> bool:
        """Return whether these states can be kept while a text is written."""
        return can_watch(self.model.base_model, layer_numbers(layers))

    @property
    def context_size(self) -> int:
        """How many tokens the context holds, prompt and answer together; a guess where the model does not say."""
        return int(getattr(self.model.config.get_text_config(), "max_position_embeddings", 0) or 2_048)

    # --- batches ---------------------------------------------------------------------------------------------

    def in_batches(
        self,
        work: Callable[[Sequence[EncodedPrompt]], Sequence[T]],
        rows: Sequence[EncodedPrompt],
        extra: int = 0,
    ) -> list[T]:
        """Do work on rows batch by batch; returns its results in the order of the rows.

        Rows of like length share a batch. One that does not fit into memory is halved, down to single rows, so the
        work may keep nothing before its end.

        Args:
            work: What is done with a batch.
            rows: The rows.
            extra: How many tokens are added to each row.
        """
        results: dict[int, T] = {}
        lengths = [len(row) + extra for row in rows]
        pending = group_by_length(lengths, self.max_batch_size, _MAX_BATCH_TOKENS)
        while pending:
            self.pause()
            indices = pending.pop(0)
            found = None
            try:
                with torch.inference_mode():
                    found = work([rows[i] for i in indices])
            except torch.OutOfMemoryError:
                if len(indices) == 1:
                    raise
            if found is None:
                # Not in the handler: there the exception still holds the failed attempt's frames with their tensors.
                _log.warning("Out of memory with a batch of %d on %s: halving it.", len(indices), self.name)
                torch.cuda.empty_cache()
                half = len(indices) // 2
                pending[:0] = [indices[:half], indices[half:]]
                continue
            self.calls += 1
            results.update(zip(indices, found, strict=True))
        return [results[i] for i in range(len(rows))]

    def _inputs(self, rows: Sequence[Sequence[int]]) -> dict[str, Any]:
        """Return the arguments of a forward pass that reads rows and keeps nothing."""
        ids, mask = pad_left(rows, self.encoder.tokenizer.pad_token_id, self.model.device)
        return {"input_ids": ids, "attention_mask": mask, "position_ids": positions(mask), "use_cache": False}

    def _decoder(
        self, rows: Sequence[tuple[int, ...]], template: PromptTemplate, layers: Collection[int] = ()
    ) -> Decoder:
        prefix = CachedPrefix()
        if not layers:  # of a prefix that was read before there are no states
            prefix = self._prefix(rows, template)
        return Decoder(rows, self.encoder.tokenizer.pad_token_id, self.model.device, layers, prefix)

    def _prefix(self, rows: Sequence[tuple[int, ...]], template: PromptTemplate) -> CachedPrefix:
        """Return the prefix that prompts of one template share, read once in a process; may be empty."""
        ids = self.encoder.shared_prefix(template)
        differs = any(row[: len(ids)] != ids or len(row) == len(ids) for row in rows)
        if len(ids) < _MIN_PREFIX_TOKENS or differs:
            return CachedPrefix()
        key = (ids, self._adapter)
        if key not in self._prefixes:
            if len(self._prefixes) == _MAX_PREFIXES:
                # Templates are few. Forgetting all is simpler than telling which is in use, and reading one is cheap.
                self._prefixes.clear()
            output = self.model.base_model(torch.tensor([ids], device=self.model.device), use_cache=True)
            cache = output.past_key_values
            # Caches of sliding windows drop positions, and those of recurrent models are one state of the whole
            # text: neither can be continued after padding.
            self._prefixes[key] = CachedPrefix()
            if type(cache) is DynamicCache and set(map(type, cache.layers)) == {DynamicLayer}:
                self._prefixes[key] = CachedPrefix(ids, cache)
        return self._prefixes[key]

    def end_mask(self, *, at_newline: bool = False) -> torch.Tensor:
        """Return which tokens end a text, shape (vocabulary,)."""
        if at_newline not in self._end_masks:
            size = self.model.config.get_text_config().vocab_size
            mask = torch.zeros(size, dtype=torch.bool)
            if at_newline:
                tokenizer = self.encoder.tokenizer
                count = min(size, len(tokenizer))  # a model may have more tokens than its tokenizer
                texts = tokenizer.batch_decode(torch.arange(count)[:, None].tolist())
                mask[:count] = torch.tensor(["\n" in text for text in texts])
            mask[self.encoder.stop_ids()] = True
            self._end_masks[at_newline] = mask.to(self.model.device)
        return self._end_masks[at_newline]

    # --- adapters, and other threads -------------------------------------------------------------------------

    def pause(self) -> None:
        """Let those who wait for the model use it, between two batches or two tokens.

        Raises:
            RuntimeError: The process is ending.
        """
        if self._lock.wanted:
            with self.adapted(None):  # those who are let in expect the base model
                self._lock.yield_to_waiters()

    def load_adapter(self, adapter: str) -> tuple[str, bool]:
        """Put an adapter into the model, unless it is there already, and leave it off.

        Returns:
            What the model calls it, and whether it is an activated LoRA, which acts only on what follows its
            invocation tokens: keys and values of all that stands before are the base model's.

        Raises:
            ModelLoadError: See `rgate_integrations.models.pretrained.load_adapter`.
        """
        if adapter not in self._adapters:
            name = f"rgate_{len(self._adapters)}"
            self._adapters[adapter] = (name, load_adapter(self.model, adapter, name))
        return self._adapters[adapter]

    @contextmanager
    def adapted(self, name: str | None) -> Iterator[None]:
        """Switch a loaded adapter on; None is the base model. Afterwards it is as it was."""
        before = self._adapter
        self._switch_to(name)
        try:
            yield
        finally:
            self._switch_to(before)

    def _switch_to(self, name: str | None) -> None:
        if name == self._adapter:
            return
        if name is None:
            self.model.disable_adapters()
        else:
            self.model.set_adapter(name)
            self.model.enable_adapters()
        self._adapter = name


def as_array(vectors: Sequence[torch.Tensor]) -> Float32Array:
    """Return vectors of the model's device as one array, a row each."""
    array: Float32Array = torch.stack(list(vectors)).cpu().numpy()
    return array
