"""One greedy answer, written in a thread of its own and read piece by piece."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import torch
from transformers import GenerationConfig, TextIteratorStreamer

from rgate_integrations.processes import start_thread
from rgate_integrations.proxy.decoding import Pause, StopWhen
from rgate_integrations.proxy.encoding import EncodedPrompt, PromptEncoder
from rgate_integrations.proxy.model_runner import ModelRunner

_TIMEOUT = 120
"""Seconds that a reader waits for the next piece; other callers may have the model meanwhile."""


class AnswerStream:
    """Yields the text so far after each token. Iterate once; whoever stops early ends the writing too.

    Args:
        use_model: Gives the model to this thread alone.
        encoder: Made the prompt.
        row: The prompt.
        tokens: Maximum number of new tokens.
    """

    def __init__(
        self,
        use_model: Callable[[], AbstractContextManager[ModelRunner]],
        encoder: PromptEncoder,
        row: EncodedPrompt,
        tokens: int,
    ) -> None:
        self._use_model = use_model
        self._row = row
        self._config = GenerationConfig(
            max_new_tokens=tokens,
            do_sample=False,
            eos_token_id=encoder.stop_ids(),
            pad_token_id=encoder.pad_token_id,
        )
        self._pieces = TextIteratorStreamer(
            encoder.tokenizer, skip_prompt=True, skip_special_tokens=True, timeout=_TIMEOUT
        )
        self._reader_left = threading.Event()
        self._error: Exception | None = None

    def __iter__(self) -> Iterator[str]:
        start_thread(self._write, "rgate-stream")
        text = ""
        try:
            for piece in self._pieces:
                text += piece
                yield text.strip()
        finally:
            self._reader_left.set()
        if self._error is not None:
            raise self._error

    def _write(self) -> None:
        """Write the answer, in a thread of its own."""
        try:
            with self._use_model() as runner, torch.inference_mode():
                runner.model.generate(
                    torch.tensor([self._row.ids], device=runner.model.device),
                    generation_config=self._config,
                    streamer=self._pieces,
                    stopping_criteria=[Pause(runner.pause), StopWhen(self._reader_left)],
                )
        except Exception as error:  # raised where the stream is read
            self._error = error
        finally:
            self._pieces.end()  # after an error too: the reader must not wait
