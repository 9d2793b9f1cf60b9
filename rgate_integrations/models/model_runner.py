"""One loaded model, and what a proxy has it do: drafts, scores and hidden states of rows, in batches that fit.

A proxy holds its lock while it uses the runner.
"""

from __future__ import annotations

import copy
import hashlib
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch

from rgate_integrations.decision import Draft
from rgate_integrations.models.base import PooledLayer, layer_numbers, pool_states, spans_of
from rgate_integrations.models.decoding import (
    ChosenTokens,
    choose_tokens,
    group_by_length,
    layer_states,
    pad_left,
    positions,
    row_seed,
)
from rgate_integrations.models.encoding import EncodedPrompt, PromptEncoder
from rgate_integrations.models.model_lock import ModelLock
from rgate_integrations.models.pretrained import load_adapter
from rgate_integrations.runtime.arrays import Float32Array

_log = logging.getLogger(__name__)
T = TypeVar("T")

_MAX_BATCH_TOKENS = 16_384
"""Tokens in one forward pass, padding included."""


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
    """

    def __init__(
        self, model: Any, encoder: PromptEncoder, name: str, max_batch_size: int, lock: ModelLock
    ) -> None:
        self.model = model
        self.encoder = encoder
        self.name = name
        self.max_batch_size = max_batch_size
        self.fingerprint = fingerprint(model)  # now: adapters will add parameters
        self._lock = lock
        # What follows is read and changed with the proxy's lock held, so it needs none of its own.
        self._adapter: str | None = None
        self._adapters: dict[str, str] = {}  # names in the model, by path
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
    ) -> list[Draft]:
        """Continue prompts of one template; what is drawn depends on seed and prompt, never on the batch.

        Args:
            rows: The prompts.
            tokens: Most new tokens, at least 1.
            samples: Continuations of each prompt.
            temperature: 0 is greedy.
            seed: Of what is drawn.

        Returns:
            One draft a continuation; those of a prompt stand together.
        """
        drawn = []
        for row in rows:
            for sample in range(samples):
                drawn.append(replace(row, seed=row_seed(seed, sample, row.ids)))
        return self.in_batches(partial(self._generate, tokens, temperature), drawn, extra=tokens)

    def _generate(self, tokens: int, temperature: float, rows: Sequence[EncodedPrompt]) -> list[Draft]:
        device = self.model.device
        generators = [torch.Generator(device).manual_seed(row.seed) for row in rows]
        ends = self.end_mask(at_newline=rows[0].template.stop_at_newline)
        ids, mask = pad_left([row.ids for row in rows], self.encoder.tokenizer.pad_token_id, device)
        ended = torch.zeros(len(rows), dtype=torch.bool, device=device)
        steps: list[ChosenTokens] = []
        cache = None
        while len(steps) < tokens and not ended.all():
            self.pause()
            output = self.model(
                input_ids=ids,
                # The mask covers the cached columns too, ids and positions only the new ones.
                attention_mask=mask,
                position_ids=positions(mask)[:, -ids.shape[1] :],
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
            cache = output.past_key_values
            chosen = choose_tokens(output.logits[:, -1], temperature, generators)
            ended = ended | ends[chosen.ids]
            steps.append(chosen)
            # Rows that have ended get masked columns until the last one of the batch has.
            ids, mask = chosen.ids[:, None], torch.cat([mask, (~ended[:, None]).to(mask.dtype)], dim=1)
        return self._drafts(rows, steps, mask[:, -len(steps) :].sum(dim=1).tolist())

    def _drafts(
        self, rows: Sequence[EncodedPrompt], steps: Sequence[ChosenTokens], lengths: Sequence[int]
    ) -> list[Draft]:
        """Return what was written as drafts; of each row, so many of the steps are the text."""
        ids = torch.stack([step.ids for step in steps], dim=1).tolist()
        logprobs = torch.stack([step.logprobs for step in steps], dim=1).tolist()
        drafts = []
        for place, (row, length) in enumerate(zip(rows, lengths, strict=True)):
            own = ids[place][:length]
            texts = self.encoder.token_texts(own)
            drafts.append(
                Draft(
                    text="".join(texts).strip(),
                    token_ids=tuple(own),
                    tokens=tuple(texts),
                    logprobs=tuple(logprobs[place][:length]),
                    finished=length < len(steps),
                    source="proxy",
                    model=self.name,
                    prompt_tokens=len(row.ids),
                )
            )
        return drafts

    # --- reading ---------------------------------------------------------------------------------------------

    def score(
        self, rows: Sequence[EncodedPrompt], targets: Sequence[Sequence[int]]
    ) -> list[tuple[float, ...]]:
        """Return for each prompt the log-probability of each target's whole sequence."""
        return self.in_batches(partial(self._score, targets), rows, extra=max(map(len, targets)))

    def _score(
        self, targets: Sequence[Sequence[int]], rows: Sequence[EncodedPrompt]
    ) -> list[tuple[float, ...]]:
        inputs = self._inputs([row.ids for row in rows])
        prompts = self.model(**{**inputs, "use_cache": True}, logits_to_keep=1)
        first = torch.log_softmax(prompts.logits.float(), dim=-1)
        scores = torch.zeros(len(rows), len(targets), device=self.model.device)
        # Targets that share all but their last token, such as "Yes" and "No", share a pass.
        sharing: dict[tuple[int, ...], list[int]] = {}
        for number, target in enumerate(targets):
            sharing.setdefault(tuple(target[:-1]), []).append(number)
        for beginning, numbers in sharing.items():
            logprobs = first
            if beginning:
                ids = torch.tensor([beginning] * len(rows), device=self.model.device)
                mask = torch.cat([inputs["attention_mask"], torch.ones_like(ids)], dim=1)
                logits = self.model(
                    input_ids=ids,
                    attention_mask=mask,
                    position_ids=positions(mask)[:, -len(beginning) :],
                    past_key_values=copy.deepcopy(prompts.past_key_values),  # a pass appends to it
                    use_cache=True,
                ).logits
                logprobs = torch.cat([first, torch.log_softmax(logits.float(), dim=-1)], dim=1)
            for number in numbers:
                own = list(targets[number])
                scores[:, number] = logprobs[:, range(len(own)), own].sum(dim=-1)
        return list(map(tuple, scores.clamp(max=0.0).tolist()))

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
            results.update(zip(indices, found, strict=True))
        return [results[i] for i in range(len(rows))]

    def _inputs(self, rows: Sequence[Sequence[int]]) -> dict[str, Any]:
        """Return the arguments of a forward pass that reads rows and keeps nothing."""
        ids, mask = pad_left(rows, self.encoder.tokenizer.pad_token_id, self.model.device)
        return {"input_ids": ids, "attention_mask": mask, "position_ids": positions(mask), "use_cache": False}

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

    def load_adapter(self, adapter: str) -> str:
        """Put an adapter into the model, unless it is there already, and leave it off; returns its name there.

        Raises:
            ModelLoadError: See `rgate_integrations.models.pretrained.load_adapter`.
        """
        if adapter not in self._adapters:
            name = f"rgate_{len(self._adapters)}"
            load_adapter(self.model, adapter, name)
            self._adapters[adapter] = name
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


_VALUES = 8  # so many of a parameter are looked at


def fingerprint(model: Any) -> str:
    """Return 16 hex digits: a hash of the first values of every parameter, rounded to bfloat16.

    So it is the same on every device and in every float type, and takes milliseconds.
    """
    import torch

    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters(), key=lambda item: item[0]):
        first = parameter.detach().flatten()[:_VALUES]
        rounded = first.to("cpu", torch.bfloat16).view(torch.int16)
        digest.update(name.encode() + rounded.numpy().tobytes())
    return digest.hexdigest()[:16]
