"""One answer, written token by token as it is asked for; its hidden states can be kept for a gate that judges it."""

from __future__ import annotations

import secrets
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

import torch

from rgate_integrations.decision import Draft
from rgate_integrations.errors import ConfigurationError
from rgate_integrations.models.base import HiddenStates, PooledLayer
from rgate_integrations.models.decoding import Recorder, Sampling
from rgate_integrations.models.encoding import EncodedPrompt
from rgate_integrations.models.hidden import can_watch, layer_numbers, pooled, spans_of, watching
from rgate_integrations.models.kept import keep, kept_answer
from rgate_integrations.models.model_runner import ModelRunner
from rgate_integrations.models.written import (
    FinishReason,
    WritingOptions,
    WrittenPiece,
    WrittenToken,
    context_of,
)
from rgate_integrations.runtime.arrays import Float32Array

UseModel: TypeAlias = Callable[[], AbstractContextManager[ModelRunner]]
"""Gives a model to the thread that calls it, for a short time."""


class Writing:
    """An answer that is written as its pieces are asked for. Nothing is computed ahead, and no token twice.

    The model is free between two tokens, and nobody has to end an answer that is not wanted any more.

    Args:
        use_model: Gives the model to a thread.
        prompt: Token ids of what is answered.
        options: How.

    Attributes:
        id: Id of the response, under which `kept_answer` finds it.
        ids: Token ids written so far.
        entropies: Entropy of the distribution that each was chosen from, in nats.
        margins: How far the likeliest token was ahead of the second there.
        finish_reason: Why it ended; None before.

    Raises:
        ConfigurationError: The prompt fills the model's context, or there is no such layer.
    """

    def __init__(self, use_model: UseModel, prompt: Sequence[int], options: WritingOptions) -> None:
        self.id = f"rgate-{uuid.uuid4().hex}"
        self.prompt = tuple(prompt)
        self.options = options
        self.ids: list[int] = []
        self.entropies: list[float] = []
        self.margins: list[float] = []
        self.finish_reason: FinishReason | None = None
        self._use_model = use_model
        with use_model() as runner:
            self.fingerprint = runner.fingerprint
            self._most = _room(runner, len(self.prompt), options.tokens)
            self._recorder = Recorder(_sampling(options), runner.model.device)
            self._ends = set(runner.encoder.stop_ids())
            if options.layers and (
                min(options.layers) < 0 or not can_watch(runner.model.base_model, options.layers)
            ):
                raise ConfigurationError(
                    f"The model has no layers {options.layers} whose states can be kept."
                )
        self._text = ""
        # Tokens that the model has not read yet: keys, values and states go as far as the one before the first.
        self._unread = list(self.prompt)
        self._cache: Any = None
        self._logits = torch.empty(0)
        self._states: dict[int, list[torch.Tensor]] = {layer: [] for layer in options.layers}
        if options.layers:
            keep(self.id, self)

    def pieces(self) -> Iterator[WrittenPiece]:
        """Yield the answer piece by piece; what may be the beginning of a stop sequence is held back.

        The last piece comes when the answer has ended, and may be empty.
        """
        text, given = "", 0
        tokens: list[WrittenToken] = []
        while (token := self._next()) is not None:
            text += token.text
            tokens.append(token)
            end = _first(text, self.options.stop)
            if end is not None:
                self.finish_reason = "stop"
                text = text[:end]
                break
            safe = len(text) - _begun(text, self.options.stop)
            if safe > given:
                yield WrittenPiece(text[given:safe], tuple(tokens))
                given, tokens = safe, []
        yield WrittenPiece(text[given:], tuple(tokens))

    def texts(self) -> Iterator[str]:
        """Yield the text so far each time there is more of it, without the white space around it."""
        text = ""
        for piece in self.pieces():
            text += piece.text
            yield text.strip()

    def states(self, question: range, layers: Sequence[PooledLayer], tokens: int) -> Float32Array:
        """Pool what was kept of the prompt and the first tokens, to shape (layers, hidden size).

        Args:
            question: Positions of the question in the prompt.
            layers: Which states; those of their layers are kept.
            tokens: How many tokens of the answer, at most as many as are written.
        """
        with self._use_model() as runner, torch.inference_mode():
            if tokens == len(self.ids):
                # The last token is not read before the next one is wanted. It is read now, and not again then.
                self._read(runner)
            length = len(self.prompt) + tokens
            kept = {layer: torch.cat(parts)[:length] for layer, parts in self._states.items()}
            return pooled(kept, spans_of(question, len(self.prompt), tokens), layers)

    def _next(self) -> WrittenToken | None:
        """Write a token; None at the end of the answer."""
        with self._use_model() as runner, torch.inference_mode():
            if self.finish_reason is not None:
                return None
            if len(self.ids) >= self._most:
                self.finish_reason = "length"
                return None
            self._read(runner)
            logits = self._logits[None]
            token = int(self._recorder(torch.empty(0), logits).argmax())
            if token in self._ends:
                self.finish_reason = "stop"
                return None
            self.ids.append(token)
            self._unread = [token]
            self.entropies.append(float(self._recorder.entropies[-1]))
            self.margins.append(float(self._recorder.margins[-1]))
            logprob = min(float(self._recorder.logprobs[-1]), 0.0)
            return WrittenToken(self._added(runner), logprob, self._likeliest(runner))

    def _read(self, runner: ModelRunner) -> None:
        """Let the model read what it has not read yet."""
        if not self._unread:
            return
        with watching(runner.model.base_model, self.options.layers) as seen:
            output = runner.model(
                input_ids=torch.tensor([self._unread], device=runner.model.device),
                past_key_values=self._cache,
                use_cache=True,
                logits_to_keep=1,
            )
        for layer, passes in seen.items():
            self._states[layer] += [states[0] for states in passes]
        self._cache = output.past_key_values
        self._logits = output.logits[0, -1]
        self._unread = []

    def _added(self, runner: ModelRunner) -> str:
        """Return the text that the last token added."""
        whole = runner.encoder.tokenizer.decode(
            self.ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        if (
            whole.endswith("\ufffd") and len(self.ids) < self._most
        ):  # half a character: the next token completes it
            return ""
        added = whole[len(self._text) :]
        self._text = whole
        return str(added)

    def _likeliest(self, runner: ModelRunner) -> tuple[tuple[str, float], ...]:
        if not self.options.likeliest:
            return ()
        found = torch.log_softmax(self._logits.float(), dim=-1).topk(self.options.likeliest)
        texts = runner.encoder.tokenizer.batch_decode([[token] for token in found.indices.tolist()])
        return tuple(zip(texts, [min(value, 0.0) for value in found.values.tolist()], strict=True))


def kept_states(
    fingerprint: str, rows: Sequence[EncodedPrompt], drafts: Sequence[Draft], layers: Sequence[PooledLayer]
) -> dict[int, HiddenStates]:
    """Return the states of those drafts whose model has kept them while it wrote, by their places.

    Args:
        fingerprint: Of the model whose states are wanted.
        rows: The prompts whose states are wanted: those of an answer to another prompt are others.
        drafts: The drafts, one a row.
        layers: Which states.
    """
    found: dict[int, HiddenStates] = {}
    for place, (row, draft) in enumerate(zip(rows, drafts, strict=True)):
        answer = kept_answer(draft.response_id) if draft.response_id else None
        if not isinstance(answer, Writing):
            continue
        same = answer.fingerprint == fingerprint and answer.prompt == row.ids
        tokens = len(draft.tokens)
        if (
            same
            and 0 < tokens <= len(answer.ids)
            and set(layer_numbers(layers)) <= set(answer.options.layers)
        ):
            found[place] = HiddenStates(answer.states(row.question, layers, tokens), prompt_tokens=0)
    return found


def _room(runner: ModelRunner, prompt: int, tokens: int | None) -> int:
    """Return how many tokens may be written."""
    context = context_of(runner.model)
    if prompt >= context:
        raise ConfigurationError(
            f"The prompt has {prompt} tokens, and the model's context holds {context}.",
            hint="Ask with less text: fewer passages, or fewer earlier turns.",
        )
    return context - prompt if tokens is None else min(tokens, context - prompt)


def _sampling(options: WritingOptions) -> Sampling | None:
    if options.temperature == 0:
        return None
    seed = secrets.randbits(32) if options.seed is None else options.seed
    return Sampling(options.temperature, [seed])


def _first(text: str, stop: Sequence[str]) -> int | None:
    """Return where the first stop sequence begins; None if there is none."""
    places = [text.find(each) for each in stop if each]
    return min((place for place in places if place >= 0), default=None)


def _begun(text: str, stop: Sequence[str]) -> int:
    """Return how many characters at the end of a text may be the beginning of a stop sequence."""
    for length in range(min(len(text), max(map(len, stop), default=0)), 0, -1):
        if any(each.startswith(text[-length:]) for each in stop):
            return length
    return 0
