"""One answer, written token by token as it is asked for; its hidden states can be kept for a gate that judges it."""

from __future__ import annotations

import secrets
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

import torch

from rgate_integrations.errors import ConfigurationError
from rgate_integrations.models.base import PooledLayer, pool_states, spans_of
from rgate_integrations.models.decoding import can_watch, choose_tokens, watch_layers
from rgate_integrations.models.generated import (
    FinishReason,
    GeneratedToken,
    GenerationOptions,
    TextChunk,
    register_answer,
)
from rgate_integrations.models.model_runner import ModelRunner, as_array
from rgate_integrations.runtime.arrays import Float32Array

UseModel: TypeAlias = Callable[[], AbstractContextManager[ModelRunner]]
"""Gives a model to the thread that calls it, for a short time."""


class TokenStream:
    """An answer that is written as its chunks are asked for. Nothing is computed ahead, and no token twice.

    The model is free between two tokens, and nobody has to end an answer that is not wanted any more.

    Args:
        use_model: Gives the model to a thread.
        prompt: Token ids of what is answered.
        options: How.

    Attributes:
        id: Id of the response, under which `find_answer` finds it.
        ids: Token ids written so far.
        finish_reason: Why it ended; None before.
        fingerprint: Of the model.

    Raises:
        ConfigurationError: The prompt fills the model's context, or there is no such layer.
    """

    def __init__(self, use_model: UseModel, prompt: Sequence[int], options: GenerationOptions) -> None:
        self.id = f"rgate-{uuid.uuid4().hex}"
        self.prompt = tuple(prompt)
        self.options = options
        self.ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self._use_model = use_model
        self._text = ""
        # Its keys and values are this answer's own, so others may use the model between two tokens.
        self._cache: Any = None
        self._unread = list(self.prompt)
        self._kept: dict[int, list[torch.Tensor]] = {layer: [] for layer in options.layers}
        with use_model() as runner:
            context = runner.context_size
            if len(self.prompt) >= context:
                raise ConfigurationError(
                    f"The prompt has {len(self.prompt)} tokens, and the model's context holds {context}.",
                    hint="Ask with less text: fewer passages, or fewer earlier turns.",
                )
            if not can_watch(runner.model.base_model, options.layers):
                raise ConfigurationError(
                    f"The model has no layers {options.layers} whose states can be kept."
                )
            self.fingerprint = runner.fingerprint
            self._room = min(options.tokens or context, context - len(self.prompt))
            self._ends = runner.end_mask()
            seed = secrets.randbits(32) if options.seed is None else options.seed
            self._generator = torch.Generator(runner.model.device).manual_seed(seed)
        if options.layers:
            register_answer(self.id, self)

    def chunks(self) -> Iterator[TextChunk]:
        """Yield the answer as it comes; what may be the beginning of a stop sequence is held back.

        The last chunk comes when the answer has ended, and may be empty.
        """
        text, given = "", 0
        tokens: list[GeneratedToken] = []
        stop = [each for each in self.options.stop if each]
        held_back = max(map(len, stop), default=1) - 1
        while (token := self._next()) is not None:
            text += token.text
            tokens.append(token)
            found = [text.find(each) for each in stop if each in text]
            if found:
                self.finish_reason = "stop"
                text = text[: min(found)]
                break
            safe = len(text) - held_back
            if safe > given:
                yield TextChunk(text[given:safe], tuple(tokens))
                given, tokens = safe, []
        yield TextChunk(text[given:], tuple(tokens))

    def states(self, question: range, layers: Sequence[PooledLayer], tokens: int) -> Float32Array:
        """Pool what was kept of the prompt and the first tokens, to shape (layers, hidden size).

        Args:
            question: Positions of the question in the prompt.
            layers: Which states; those of their layers are kept.
            tokens: How many tokens of the answer, at most as many as are written.
        """
        with self._use_model() as runner, torch.inference_mode():
            if self._unread:
                # The last token is not read before the next one is wanted. It is read now, and not again then.
                self._read(runner)
            length = len(self.prompt) + tokens
            kept = {layer: torch.cat(parts)[:length].float() for layer, parts in self._kept.items()}
            return as_array(pool_states(kept, spans_of(question, len(self.prompt), tokens), layers))

    def _read(self, runner: ModelRunner) -> None:
        """Let the model read what it has not read yet; keeps the logits behind it."""
        ids = torch.tensor([self._unread], device=runner.model.device)
        with watch_layers(runner.model.base_model, self._kept) as seen:
            output = runner.model(ids, past_key_values=self._cache, use_cache=True, logits_to_keep=1)
        for layer, states in seen.items():
            self._kept[layer].append(states[0])
        self._cache, self._logits, self._unread = output.past_key_values, output.logits[:, -1], []

    def _next(self) -> GeneratedToken | None:
        """Write a token; None at the end of the answer."""
        with self._use_model() as runner, torch.inference_mode():
            if self.finish_reason is not None:
                return None
            if len(self.ids) >= self._room:
                self.finish_reason = "length"
                return None
            if self._unread:
                self._read(runner)
            chosen = choose_tokens(self._logits, self.options.temperature, [self._generator])
            if self._ends[chosen.ids]:
                self.finish_reason = "stop"
                return None
            self.ids.append(int(chosen.ids))
            self._unread = self.ids[-1:]
            likeliest: list[tuple[str, float]] = []
            if self.options.top_logprobs:
                top = torch.log_softmax(self._logits[0].float(), dim=-1).topk(self.options.top_logprobs)
                for token, logprob in zip(top.indices.tolist(), top.values.tolist(), strict=True):
                    likeliest.append((runner.encoder.tokenizer.decode([token]), min(logprob, 0.0)))
            whole = runner.encoder.tokenizer.decode(
                self.ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
            # A token may end in the middle of a character, which the next one completes.
            if whole.endswith("\ufffd") and len(self.ids) < self._room:
                whole = self._text
            added, self._text = whole[len(self._text) :], whole
            return GeneratedToken(added, float(chosen.logprobs), tuple(likeliest))
