"""One loaded model and what runs on it: jobs in batches that fit into memory, adapters, and cached prefixes.

A proxy holds its lock while it uses the runner. What is done with a batch is a `BatchJob`: see ``reading.py``,
``scoring.py`` and ``generation.py``.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, Generic, TypeVar

import torch

from rgate_integrations.models.adapters import Adapters
from rgate_integrations.models.batch import Batch, CachedPrefix, group_by_length
from rgate_integrations.models.encoding import PromptEncoder
from rgate_integrations.models.fingerprint import fingerprint
from rgate_integrations.models.model_lock import Turns
from rgate_integrations.models.prefix_cache import PrefixCache
from rgate_integrations.prompts import PromptTemplate

_log = logging.getLogger(__name__)
T = TypeVar("T")

MIN_PREFIX_TOKENS = 8
"""A prefix of fewer tokens is not worth a cache of its own."""


class BatchJob(ABC, Generic[T]):
    """Work on many rows that `ModelRunner.run` does a batch at a time.

    Attributes:
        lengths: How many tokens each row takes up in a batch.
    """

    lengths: Sequence[int]

    @abstractmethod
    def run_batch(self, indices: Sequence[int]) -> Sequence[T]:
        """Do these rows; returns one result each.

        A batch that does not fit into memory is tried again in halves, so nothing may be kept before the end, and no
        tensor but in local variables, which are freed when the attempt fails.
        """


class ModelRunner:
    """Runs a causal language model for a proxy, which holds a lock meanwhile.

    Args:
        model: The model, on its device.
        encoder: Makes its token ids.
        name: What the proxy is called, for drafts.
        max_batch_size: Maximum number of sequences in one forward pass.
        max_batch_tokens: Maximum number of tokens in one forward pass, padding included.
        turns: Whose turn it is; by default nobody else has one.

    Attributes:
        fingerprint: Tells the weights apart from those of other models.
        adapters: The LoRA adapters that were put into the model.
        prefixes: What was computed for the prefixes that prompts share.
        min_prefix_tokens: Shorter prefixes are not cached.
        calls: How many batches were run.
    """

    def __init__(
        self,
        model: Any,
        encoder: PromptEncoder,
        name: str,
        max_batch_size: int,
        max_batch_tokens: int,
        *,
        turns: Turns | None = None,
    ) -> None:
        self.model = model
        self.encoder = encoder
        self.name = name
        self.max_batch_size = max_batch_size
        self.max_batch_tokens = max_batch_tokens
        self.fingerprint = fingerprint(model)  # now: adapters will add parameters
        self.adapters = Adapters(model, name)
        self.prefixes = PrefixCache(model)
        self.min_prefix_tokens = MIN_PREFIX_TOKENS
        self.calls = 0
        self._turns = Turns() if turns is None else turns
        self._adapter: str | None = None

    def run(self, job: BatchJob[T]) -> list[T]:
        """Do a job batch by batch; returns its results in the order of its rows.

        Rows of like length share a batch. One that does not fit into memory is halved, down to single rows.
        """
        results: dict[int, T] = {}
        pending = group_by_length(job.lengths, self.max_batch_size, self.max_batch_tokens)
        while pending:
            self.pause()
            indices = pending.pop(0)
            found = self._attempt(job, indices)
            if found is None:
                # Only now: in its handler, the exception still held the failed attempt's frames with their tensors.
                torch.cuda.empty_cache()
                half = len(indices) // 2
                pending[:0] = [indices[:half], indices[half:]]
                continue
            self.calls += 1
            results.update(zip(indices, found, strict=True))
        return [results[i] for i in range(len(job.lengths))]

    def _attempt(self, job: BatchJob[T], indices: Sequence[int]) -> Sequence[T] | None:
        """Do one batch; None if it does not fit into memory, but a smaller one may."""
        try:
            with torch.inference_mode():
                return job.run_batch(indices)
        except torch.OutOfMemoryError:
            if len(indices) == 1:
                raise
            _log.warning("Out of memory with a batch of %d on %s: halving it.", len(indices), self.name)
            return None

    def pause(self) -> None:
        """Let those who wait for a short turn use the model, between two batches or two tokens.

        Raises:
            RuntimeError: The process is ending.
        """
        if self._turns.wanted:
            with self.adapted(None):
                self._turns.give_way()

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

    def shared_prefix(
        self, prompt: PromptTemplate, rows: Sequence[Sequence[int]], fresh: Sequence[int] | None = None
    ) -> tuple[int, ...]:
        """Return the prefix of a prompt if all rows begin with it and it is worth a cache, or ().

        Args:
            prompt: What the rows were made of.
            rows: Token ids.
            fresh: How many of each row's last tokens must not come from the cache, because the model's output there
                is wanted; by default one.
        """
        prefix = self.encoder.shared_prefix(prompt)
        if len(prefix) < self.min_prefix_tokens:
            return ()
        for row, needed in zip(rows, fresh or [1] * len(rows), strict=True):
            if tuple(row[: len(prefix)]) != prefix or len(row) - len(prefix) < needed:
                return ()
        return prefix

    def batch(
        self, rows: Sequence[Sequence[int]], prefix: tuple[int, ...], layers: tuple[int, ...] = ()
    ) -> Batch:
        """Make a batch of rows of token ids.

        Args:
            rows: The rows.
            prefix: What `shared_prefix` returned for them.
            layers: Whose hidden states of the prefix are wanted.
        """
        cached = self.prefixes.get(prefix, self._adapter, layers) if prefix else CachedPrefix()
        return Batch.of(
            rows,
            cached,
            self.encoder.pad_token_id,
            self.model.device,
        )

    def tail_logprobs(self, batch: Batch, width: int) -> torch.Tensor:
        """Read a batch; returns next-token log-probabilities at its last ``width`` columns.

        The shape is (rows, width, vocabulary): large, so take what is needed and let it go.
        """
        logits = self.model(**batch.inputs, logits_to_keep=width).logits
        return torch.log_softmax(logits.float(), dim=-1)

    @cached_property
    def newline_mask(self) -> torch.Tensor:
        """Which tokens hold a newline, shape (vocabulary,)."""
        size = self.model.config.get_text_config().vocab_size
        has_newline = ["\n" in text for text in self.encoder.vocabulary_texts(size)]
        mask = torch.zeros(size, dtype=torch.bool)  # a model may have more tokens than its tokenizer
        mask[: len(has_newline)] = torch.tensor(has_newline)
        return mask.to(self.model.device)
