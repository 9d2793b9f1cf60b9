"""Local language models on transformers, by catalogue name, folder or Hub id."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Literal, TypeVar

from rgate_integrations.decision import Draft, valid_choice
from rgate_integrations.errors import ModelLoadError, needs_extra
from rgate_integrations.models.base import (
    HasStates,
    HiddenStates,
    LanguageModel,
    PooledLayer,
    TargetScores,
    Values,
    draft_tokens_or_text,
    layer_numbers,
    middle_layers,
)
from rgate_integrations.models.catalog import DEFAULT_MODEL
from rgate_integrations.models.download import resolve_model
from rgate_integrations.models.encoding import EncodedPrompt, PromptEncoder
from rgate_integrations.models.pretrained import load_pretrained, load_tokenizer
from rgate_integrations.models.streamed_answer import GenerationOptions, StreamedAnswer
from rgate_integrations.prompts import PromptTemplate
from rgate_integrations.runtime.threads import close_at_exit, reset_after_fork

# torch is imported only where a model is loaded or run, so that gates can be constructed without it.
if TYPE_CHECKING:
    from rgate_integrations.models.model_runner import ModelRunner

T = TypeVar("T")

_MAX_BATCH_TOKENS = 16_384  # tokens in one forward pass, including padding
_SHORT = 128  # tokens; up to this length, padding costs less than another pass
# How long the process, when it ends, waits for a running pass or for a model that is loading.
_CLOSE_SECONDS = 10.0


class ModelLock:
    """Lets one thread at a time use a model. A waiting thread goes before the one that has just used it.

    A streamed answer takes the lock once per token.
    """

    def __init__(self) -> None:
        self.closed = False
        self.after_fork()

    def after_fork(self) -> None:
        """Replace the locks with free ones."""
        self.in_use = threading.Lock()
        self.next_in_line = threading.Lock()  # held by the thread that is next to get `in_use`

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Hold the lock, which is not re-entrant, inside the ``with`` block.

        Raises:
            RuntimeError: The process is exiting.
        """
        # With a single lock, the thread that released it would take it again before any other wakes up.
        with self.next_in_line:
            self.in_use.acquire()
        try:
            self.check_open()
            yield
        finally:
            self.in_use.release()

    def check_open(self) -> None:
        """Raise RuntimeError if the process is exiting."""
        if self.closed:
            raise RuntimeError("The process is exiting, so its models are closed. Use them before it exits.")

    def close(self) -> None:
        """Refuse further use, and wait up to 10 seconds for the thread that holds the lock."""
        self.closed = True
        if self.in_use.acquire(timeout=_CLOSE_SECONDS):
            self.in_use.release()


class TransformersProxy(LanguageModel, HasStates):
    """A causal language model on transformers, loaded on first use.

    By default, weights are bfloat16 on CUDA and float32 elsewhere. Attention is torch's (sdpa). Methods that use the
    model raise the errors of `runner`, and a `ModelLoadError` for an adapter that does not fit.

    One caller at a time uses the model, for one batch or for one token of a streamed answer. A forked child keeps the
    parent's weights if the model was idle at the fork, and otherwise loads the model again.

    Args:
        model: Catalogue name (see ``rgate download``), local folder, or Hub id.
        device: A torch device, or ``"auto"`` for CUDA if available.
        dtype: ``"float32"``, ``"bfloat16"``, or ``"auto"`` as above. On CPUs that support it, bfloat16 makes
            drafts faster but sometimes changes their wording.

    Raises:
        ConfigurationError: The dtype is unknown.
    """

    def __init__(
        self,
        model: str = DEFAULT_MODEL,
        *,
        device: str = "auto",
        dtype: Literal["auto", "float32", "bfloat16"] = "auto",
    ) -> None:
        self.name = model
        self.device_name = device
        self.dtype = valid_choice(dtype, "dtype", ("auto", "float32", "bfloat16"))
        self._lock = ModelLock()
        self._runner: ModelRunner | None = None
        reset_after_fork(self)

    def __reduce__(self) -> tuple[Callable[..., TransformersProxy], tuple[str, str, str]]:
        """Pickle name, device and dtype, not weights; unpickling returns the process-wide proxy for them."""
        return shared_proxy, (self.name, self.device_name, self.dtype)

    # --- writing ---------------------------------------------------------------------------------------------

    def generate(
        self, prompt: PromptTemplate, values: Sequence[Values], *, tokens: int, adapter: str | None = None
    ) -> list[Draft]:
        """Continue prompts greedily; see `LanguageModel.generate`."""
        rows = self._encode(prompt, values)
        return self._in_batches(
            lambda runner, batch: runner.generate(batch, tokens), rows, extra=tokens, adapter=adapter
        )

    def sample(
        self,
        prompt: PromptTemplate,
        values: Sequence[Values],
        *,
        n: int,
        tokens: int,
        temperature: float,
        seed: int,
    ) -> list[tuple[Draft, ...]]:
        """Sample continuations; see `LanguageModel.sample`."""
        rows = []
        for row in self._encode(prompt, values):
            for number in range(n):
                # Each sample has its own seed, so that it does not depend on its batch.
                text = f"{seed}|{number}|{','.join(map(str, row.ids))}"
                digest = hashlib.sha256(text.encode()).digest()
                rows.append(replace(row, seed=int.from_bytes(digest[:7], "big")))
        drafts = self._in_batches(
            lambda runner, batch: runner.generate(batch, tokens, temperature), rows, extra=tokens
        )
        return [tuple(drafts[i : i + n]) for i in range(0, len(drafts), n)]

    def answer(self, messages: Sequence[Mapping[str, str]], options: GenerationOptions) -> StreamedAnswer:
        """Return the answer to a conversation. It is generated lazily, as its chunks are read.

        Args:
            messages: The turns, each with ``role`` and ``content``.
            options: Options of the generation.

        Raises:
            ConfigurationError: The model has no chat template, the template rejects the conversation, the prompt
                fills the model's context, or a layer does not exist.
        """
        layers = options.layers
        if layers is None:  # the layers that `rgate train` reads
            layers = (*middle_layers(self.num_layers, "question"), *middle_layers(self.num_layers, "draft"))
        return StreamedAnswer(self.using, self.encoder.encode_chat(messages), options, sorted(set(layers)))

    # --- reading ---------------------------------------------------------------------------------------------

    def score(
        self,
        prompt: PromptTemplate,
        values: Sequence[Values],
        targets: Sequence[str],
        *,
        adapter: str | None = None,
    ) -> list[TargetScores]:
        """Score each target as a whole sequence of tokens; see `LanguageModel.score`."""
        rows = self._encode(prompt, values)
        scores = self._in_batches(lambda runner, batch: runner.score(batch, targets), rows, adapter=adapter)
        return [TargetScores(logprobs, len(row.ids)) for logprobs, row in zip(scores, rows, strict=True)]

    def hidden(
        self,
        prompt: PromptTemplate,
        values: Sequence[Values],
        drafts: Sequence[Draft] | None,
        layers: Sequence[PooledLayer],
    ) -> list[HiddenStates]:
        """Return hidden states pooled over each prompt and its draft, if any; see `HasStates.hidden`.

        Raises:
            ModelLoadError: The model has no layer of that number.
        """
        if (last := layer_numbers(layers)[-1]) > self.num_layers:
            raise ModelLoadError(
                f"This gate reads layer {last} of its model, but {self.name!r} has only {self.num_layers} layers.",
                hint="Load the gate without proxy= (--proxy), or train or calibrate a gate on this model.",
            )
        rows = self._encode(prompt, values, drafts)
        states = self._in_batches(lambda runner, batch: runner.hidden(batch, layers), rows)
        return [HiddenStates(pooled, len(row)) for pooled, row in zip(states, rows, strict=True)]

    def truncate(self, text: str, tokens: int) -> str | None:
        """Return a text cut to its first ``tokens`` tokens; None if it is no longer than that. Loads the model."""
        return self.encoder.truncate(text, tokens)

    # --- the model -------------------------------------------------------------------------------------------

    @property
    def fingerprint(self) -> str:
        """A hash that identifies the weights; loads the model."""
        return self.runner.fingerprint

    @property
    def encoder(self) -> PromptEncoder:
        """The model's prompt encoder; loads the model."""
        return self.runner.encoder

    @property
    def runner(self) -> ModelRunner:
        """The runner with the model (``proxy.runner.model``), for inspection; loads the model.

        Once the model is loaded, this property does not take the model's lock. So do not run the model yourself while
        another thread uses this proxy.

        Raises:
            ModelLoadError: The name has no causal language model that can be loaded, or a missing catalogue
                entry may not be downloaded.
            DownloadError: The model is missing and could not be downloaded.
            UnknownNameError: The name is neither a catalogue name, nor a folder, nor a Hub id.
            MissingDependencyError: The extra ``local`` is not installed.
            ConfigurationError: The user has no home folder; see `rgate_integrations.models.download.cache_dir`.
            RuntimeError: The process is exiting.
        """
        # A loaded model is returned without the lock, which a running batch would hold for a while.
        if self._runner is None:
            with self._locked_runner() as runner:
                return runner
        return self._runner

    @property
    def num_layers(self) -> int:
        """Number of hidden layers; loads the model."""
        return self.runner.num_layers

    @contextmanager
    def _locked_runner(self) -> Iterator[ModelRunner]:
        """Hold the model inside the ``with`` block, and yield its runner. The model is loaded first if necessary."""
        with needs_extra("local"):  # first, because without torch a download would be useless
            from rgate_integrations.models.model_runner import ModelRunner
        # Download before taking the lock, because the end of the process waits for its holder.
        if self._runner is None:
            resolve_model(self.name)
        with self._lock.hold():
            if self._runner is None:
                close_at_exit(self._lock)
                with needs_extra("local"):
                    model = load_pretrained(self.name, self.device_name, self.dtype)
                    tokenizer = load_tokenizer(self.name)
                self._runner = ModelRunner(model, tokenizer, self.name, self._lock.check_open)
                close_at_exit(self._lock)  # again, so that it is closed before the libraries just imported
            yield self._runner

    @contextmanager
    def using(self, adapter: str | None = None) -> Iterator[ModelRunner]:
        """Hold the model inside the ``with`` block, and yield its runner.

        ``adapter`` is switched on; None means the base model, without an adapter.
        """
        with self._locked_runner() as runner:
            import torch

            try:
                runner.switch_to(adapter)
            except ModelLoadError:
                # A part of the adapter may be in the model and would change its scores, so load the model again.
                self._runner = None
                raise
            with torch.inference_mode():
                yield runner

    def after_fork(self) -> None:
        """Keep the model in a forked child, unless a thread of the parent was using it."""
        if self._lock.in_use.locked():  # it may be in the middle of a pass, or have an adapter switched on
            self._runner = None
        self._lock.after_fork()

    def _encode(
        self, prompt: PromptTemplate, values: Sequence[Values], drafts: Sequence[Draft] | None = None
    ) -> list[EncodedPrompt]:
        """Return the encoded prompts, continued by drafts. A draft that this model wrote keeps its own tokens."""
        rows = []
        for i, fields in enumerate(values):
            row = self.encoder.encode(prompt, fields)
            text = draft_tokens_or_text(drafts[i], self.name) if drafts else ()
            if isinstance(text, str):
                text = tuple(self.encoder.continuation(row, self.encoder.plain(text))) if text else ()
            rows.append(replace(row, text=text))
        return rows

    def _in_batches(
        self,
        work: Callable[[ModelRunner, list[EncodedPrompt]], Sequence[T]],
        rows: Sequence[EncodedPrompt],
        *,
        extra: int = 0,
        adapter: str | None = None,
    ) -> list[T]:
        """Process rows, which are encoded prompts, in batches, and return the results in the order of the rows.

        Other callers may use the model between batches.

        Args:
            work: Function that processes a batch.
            rows: The rows.
            extra: Number of tokens to be added to each row.
            adapter: The adapter to use.
        """
        results: dict[int, T] = {}
        lengths = [len(row) + extra for row in rows]
        for indices in group_by_length(lengths, self.max_batch_size, _MAX_BATCH_TOKENS):
            # The lock is released between two batches, so that a long call does not block short ones.
            with self.using(adapter) as runner:
                results.update(zip(indices, work(runner, [rows[i] for i in indices]), strict=True))
        return [results[i] for i in range(len(rows))]


def group_by_length(lengths: Sequence[int], size: int, tokens: int) -> list[list[int]]:
    """Group items of similar length, longest first, so that little time is spent on padding.

    If the longest item of a batch has more than 128 tokens, no item of the batch has less than half its length. With
    padding, fifteen short questions in the batch of a long one would take as long as fifteen long ones.

    Args:
        lengths: Length of each item in tokens.
        size: Maximum number of items in a batch.
        tokens: Maximum number of tokens in a batch, including padding; a single item is always allowed.

    Returns:
        The items' indices, one list per batch.
    """
    groups: list[list[int]] = []
    longest = 0  # length of the last group's longest item, to which the others are padded
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        similar = longest <= _SHORT or 2 * lengths[index] >= longest
        if groups and similar and len(groups[-1]) < size and (len(groups[-1]) + 1) * longest <= tokens:
            groups[-1].append(index)
        else:
            groups.append([index])
            longest = lengths[index]
    return groups


# Kept for the life of the process, because gates come and go and loading takes seconds.
_shared: dict[tuple[str, str, str], TransformersProxy] = {}


def shared_proxy(
    model: str = DEFAULT_MODEL,
    device: str = "auto",
    dtype: Literal["auto", "float32", "bfloat16"] = "auto",
) -> TransformersProxy:
    """Return the process-wide proxy for a model, device and dtype; its weights are in memory only once.

    Raises:
        ConfigurationError: The dtype is unknown.
    """
    # `setdefault` is atomic, so two concurrent callers get the same proxy.
    return _shared.setdefault((model, device, dtype), TransformersProxy(model, device=device, dtype=dtype))
