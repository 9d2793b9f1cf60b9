"""Proxy models that run here, on transformers: any catalogue name, local folder or Hub id."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from rgate_integrations.decision import Draft
from rgate_integrations.errors import ConfigurationError, ModelLoadError, missing_dependency
from rgate_integrations.models import reader
from rgate_integrations.models.base import (
    HiddenStates,
    PooledLayer,
    Proxy,
    RequestLayers,
    RequestStates,
    Segmented,
    TargetScores,
    Values,
    layer_numbers,
    middle_layers,
)
from rgate_integrations.models.download import cached_path
from rgate_integrations.models.generated import GenerationOptions, find_answer
from rgate_integrations.models.model_lock import ModelLock
from rgate_integrations.prompts import PromptTemplate
from rgate_integrations.runtime.threads import close_at_exit, reset_after_fork

# What needs torch is imported by the methods that load or run the model, so that gates can be made without it. They
# load it first: the end of the process waits for `load`, and breaks off an import anywhere else, which is fatal.
if TYPE_CHECKING:
    from rgate_integrations.models.encoding import EncodedPrompt, PromptEncoder
    from rgate_integrations.models.model_runner import ModelRunner
    from rgate_integrations.models.token_stream import TokenStream

DEFAULT_MODEL = reader.READS
_MAX_PROMPT_TOKENS = 2_048


class LocalProxy(Proxy):
    """A causal language model of transformers, loaded on first use.

    Weights are bfloat16 on CUDA and float32 on a CPU, with sdpa attention. Of the default model, the states that the
    shipped gates look at are read by `Reader` instead, which needs no torch.

    One caller at a time uses the model. Generation releases it between tokens, so that requests which only read are
    not blocked by a whole text.

    After a fork the child has a model of its own: the parent's weights if the model was idle, or else it is loaded
    again.

    Args:
        model: Catalogue name (see ``rgate download``), local folder, or Hub id.
        device: ``"auto"`` takes CUDA when there is one; or a torch device.
        dtype: ``"float32"`` or ``"bfloat16"`` for all. Drafts are written faster in bfloat16 where the CPU
            multiplies it, in words that differ now and then.
        max_batch_size: Maximum number of sequences in one forward pass.
    """

    def __init__(
        self,
        model: str = DEFAULT_MODEL,
        *,
        device: str = "auto",
        dtype: Literal["auto", "float32", "bfloat16"] = "auto",
        max_batch_size: int = 16,
    ) -> None:
        if max_batch_size < 1:
            raise ConfigurationError(f"max_batch_size must be at least 1, not {max_batch_size}.")
        if dtype not in ("auto", "float32", "bfloat16"):
            raise ConfigurationError(f"dtype {dtype!r} is not known.", hint="auto, float32 or bfloat16")
        self.name = model
        self.device_name = device
        self.dtype = dtype
        self.max_batch_size = max_batch_size
        self._lock = ModelLock()
        self._encoder: PromptEncoder | None = None
        self._runner: ModelRunner | None = None
        reset_after_fork(self)

    def __repr__(self) -> str:
        return f"LocalProxy({self.name!r}, loaded={self._runner is not None})"

    def __reduce__(self) -> tuple[Callable[[], LocalProxy], tuple[()]]:
        """Pickle what the model is called, not its weights; it is loaded again on first use."""
        if _shared.get((self.name, self.device_name)) is self:
            return partial(shared_proxy, self.name, device=self.device_name), ()
        options: dict[str, Any] = {"dtype": self.dtype, "max_batch_size": self.max_batch_size}
        return partial(type(self), self.name, device=self.device_name, **options), ()

    # --- writing ---------------------------------------------------------------------------------------------

    def generate(
        self, prompt: PromptTemplate, values: Sequence[Values], *, tokens: int, adapter: str | None = None
    ) -> list[Draft]:
        """Continue prompts greedily; see `Proxy.generate`."""
        if tokens == 0:
            return [Draft(text="", source="proxy", model=self.name, finished=False)] * len(values)
        rows = self._encode(prompt, values)
        with self.using(adapter) as runner:
            return runner.generate(rows, tokens)

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
        """Sample continuations; see `Proxy.sample`."""
        if temperature <= 0:
            raise ConfigurationError(
                f"temperature must be above 0, not {temperature}.", hint="Use generate()."
            )
        rows = self._encode(prompt, values)
        with self.using() as runner:
            drafts = runner.generate(rows, tokens, samples=n, temperature=temperature, seed=seed)
        return [tuple(drafts[i : i + n]) for i in range(0, len(drafts), n)]

    def answer(self, messages: Sequence[Mapping[str, str]], options: GenerationOptions) -> TokenStream:
        """Return the answer to a conversation; its first token is written when its first chunk is asked for.

        Args:
            messages: The turns, each with ``role`` and ``content``.
            options: How the answer is written.

        Raises:
            ConfigurationError: The model takes no conversations, or not this one.
        """
        self.load()
        from rgate_integrations.models.token_stream import TokenStream

        return TokenStream(self.using, self.encoder.encode_chat(messages), options)

    # --- reading ---------------------------------------------------------------------------------------------

    def score(
        self,
        prompt: PromptTemplate,
        values: Sequence[Values],
        targets: Sequence[str],
        *,
        adapter: str | None = None,
    ) -> list[TargetScores]:
        """Score fixed continuations as whole sequences; see `Proxy.score`."""
        rows = self._encode(prompt, values)
        if not rows:
            return []
        # Prompts of a template end alike, so one stands for all.
        continuations = [self.encoder.continuation(rows[0], target) for target in targets]
        with self.using(adapter) as runner:
            scores = runner.score(rows, continuations)
        return [TargetScores(found, len(row.ids)) for found, row in zip(scores, rows, strict=True)]

    def hidden(
        self,
        prompt: PromptTemplate,
        values: Sequence[Values],
        drafts: Sequence[Draft] | None,
        layers: Sequence[PooledLayer],
    ) -> list[HiddenStates]:
        """Pool hidden states over the prompt and the draft; see `Proxy.hidden`."""
        if self._reader_has(prompt, drafts, layers):
            return self._reader.hidden([each["question"] for each in values], self._given(drafts), layers)
        rows = self._encode(prompt, values, drafts)
        results: list[HiddenStates | None] = [None] * len(rows)
        for i, draft in enumerate(drafts or ()):
            results[i] = self._kept_states(rows[i], draft, layers)
        left = [row for row, kept in zip(rows, results, strict=True) if kept is None]
        with self.using() as runner:
            read = zip(left, runner.hidden(left, layers), strict=True)
        found = []
        for kept in results:
            if kept is None:
                row, states = next(read)
                kept = HiddenStates(states, len(row))
            found.append(kept)
        return found

    def request_states(
        self,
        prompt: PromptTemplate,
        texts: Sequence[Segmented],
        drafts: Sequence[Draft] | None,
        layers: RequestLayers,
    ) -> list[RequestStates]:
        """Pool hidden states of requests, in one pass where a reader has them; see `Proxy.request_states`."""
        if self._reader_has(prompt, drafts, layers.every):
            return self._reader.request_states(texts, self._given(drafts), layers)
        return super().request_states(prompt, texts, drafts, layers)

    def truncate(self, text: str, tokens: int) -> str | None:
        """Return ``text`` cut to a number of tokens, or None when it is not longer."""
        if self._reader_stands_in:
            return self._reader.truncate(text, tokens)
        return self.encoder.truncate(text, tokens)

    def _kept_states(
        self, row: EncodedPrompt, draft: Draft, layers: Sequence[PooledLayer]
    ) -> HiddenStates | None:
        """Return the states of a draft if this model kept them while it answered this very prompt with it."""
        from rgate_integrations.models.token_stream import TokenStream

        answer = find_answer(draft.response_id or "")
        if not isinstance(answer, TokenStream):
            return None
        tokens = len(draft.tokens)
        written = 0 < tokens <= len(answer.ids) and set(layer_numbers(layers)) <= set(answer.options.layers)
        # Of another prompt, or of a model whose weights differ, the states would be others.
        if not written or answer.prompt != row.ids or answer.fingerprint != self.fingerprint:
            return None
        return HiddenStates(answer.states(row.question, layers, tokens), prompt_tokens=0)

    # --- the reader ------------------------------------------------------------------------------------------

    @property
    def _reader_stands_in(self) -> bool:
        """Whether the reader tells what is asked of the whole model, which is not loaded."""
        is_default = self.name == reader.READS
        return is_default and self._runner is None and cached_path(reader.READER) is not None

    @property
    def _reader(self) -> reader.Reader:
        """The first layers of the default model, shared in the process; loaded when first asked for.

        Raises:
            ModelLoadError: It is not downloaded, or cannot be loaded.
        """
        folder = cached_path(reader.READER)
        if folder is None:
            raise ModelLoadError(
                "The gate's model is not downloaded yet.", hint=f"rgate download {reader.READER}"
            )
        return reader.shared_reader(folder)

    def _reader_has(
        self, prompt: PromptTemplate, drafts: Sequence[Draft] | None, layers: Sequence[PooledLayer]
    ) -> bool:
        """Return whether these states are the reader's: those of the shipped gates, with the usual settings."""
        for draft in drafts or ():
            if find_answer(draft.response_id or "") is not None:
                return False  # a local model has kept its states while it wrote this draft
            if self._runner is not None and self._wrote(draft):
                return False  # the whole model is there, and its states are exact
        usual = self.dtype == "auto" and self.device_name in ("auto", "cpu")
        return self.name == reader.READS and usual and reader.can_read(prompt, layers)

    def _given(self, drafts: Sequence[Draft] | None) -> list[str | Sequence[int]] | None:
        """Return what the reader reads of drafts: their own tokens if they are this model's, or else the text."""
        if drafts is None:
            return None
        given: list[str | Sequence[int]] = []
        for draft in drafts:
            given.append(draft.token_ids if self._wrote(draft) else draft.text)
        return given

    def _wrote(self, draft: Draft) -> bool:
        return bool(draft.token_ids) and draft.source == "proxy" and draft.model == self.name

    # --- the model -------------------------------------------------------------------------------------------

    @property
    def fingerprint(self) -> str:
        """Tells the weights apart from those of other models; loads the model, unless a reader stands for it."""
        if self._reader_stands_in:
            return reader.FINGERPRINT
        return self.runner.fingerprint

    @property
    def encoder(self) -> PromptEncoder:
        """Makes the model's token ids; loads the tokenizer alone, if the model is not wanted yet."""
        if self._encoder is None:  # two threads may both make one, which costs time only: they are alike
            with self._loading():
                from rgate_integrations.models import encoding, pretrained

                tokenizer = pretrained.load_tokenizer(self.name)
                self._encoder = encoding.PromptEncoder(tokenizer, _MAX_PROMPT_TOKENS)
        return self._encoder

    @property
    def runner(self) -> ModelRunner:
        """The model and what runs it, for looking inside (``proxy.runner.model``); loads the model.

        It belongs to one thread at a time: this does not wait for the lock.
        """
        self.load()
        runner = self._runner
        if runner is None:  # an adapter that did not fit has just spoilt it, in another thread
            raise ModelLoadError(f"The model {self.name!r} is not loaded.")
        return runner

    @property
    def num_layers(self) -> int:
        """Number of hidden layers; loads the model."""
        return int(self.runner.model.config.get_text_config().num_hidden_layers)

    @property
    def probed_layers(self) -> tuple[int, ...]:
        """The layers that ``rgate train`` reads by default; loads the model."""
        count = self.num_layers
        return tuple(sorted({*middle_layers(count, "question"), *middle_layers(count, "draft")}))

    def load(self) -> LocalProxy:
        """Load weights and tokenizer now instead of on first use.

        Raises:
            ModelLoadError: The folder or Hub id holds no causal language model that can be loaded.
            MissingDependencyError: torch or transformers is not installed.
        """
        if self._runner is None:  # a loaded model is not waited for
            with self._loading():
                from rgate_integrations.models import model_runner, pretrained

                if self._runner is None:
                    model = pretrained.load_pretrained(self.name, self.device_name, self.dtype)
                    self._runner = model_runner.ModelRunner(
                        model, self.encoder, self.name, self.max_batch_size, self._lock
                    )
                    # An answer must still fit into the context after the prompt.
                    context = self._runner.context_size
                    self.encoder.limit = min(_MAX_PROMPT_TOKENS, max(context - 256, context // 2))
        return self

    @contextmanager
    def _loading(self) -> Iterator[None]:
        """Hold the lock while something is loaded, which the end of the process waits for."""
        with self._lock.hold():
            close_at_exit(self._lock)
            try:
                yield
            except ImportError as error:
                raise missing_dependency(error.name or "transformers", "local") from error
            close_at_exit(self._lock)  # again, for its turn comes before that of what was imported

    @contextmanager
    def using(self, adapter: str | None = None) -> Iterator[ModelRunner]:
        """Hold the model with an adapter switched on, or with the base weights alone."""
        with self._lock.hold():
            runner = self.runner
            try:
                name = None if adapter is None else runner.load_adapter(adapter)
            except ModelLoadError:
                # The model may hold a part of it, which would change every later score: load the model afresh.
                self._runner = None
                raise
            with runner.adapted(name):
                yield runner

    def after_fork(self) -> None:
        """Take the model as it is in a forked child, or have it loaded again if a thread of the parent used it."""
        if self._lock.users:  # the fork came in the middle: an adapter may be on, and half a pass may be done
            self._runner = None
        self._lock.after_fork()

    def _encode(
        self, prompt: PromptTemplate, values: Sequence[Values], drafts: Sequence[Draft] | None = None
    ) -> list[EncodedPrompt]:
        """Return prompts in tokens, with drafts that continue them: in their own tokens if those are this model's."""
        self.load()
        rows = []
        for i, each in enumerate(values):
            row = self.encoder.encode(prompt, each)
            draft = drafts[i] if drafts else Draft(text="")
            text: Sequence[int] = ()
            if self._wrote(draft):
                text = draft.token_ids
            elif draft.text:
                text = self.encoder.continuation(row, self.encoder.plain(draft.text))
            rows.append(replace(row, text=tuple(text)))
        return rows


# For the life of the process: gates come and go, and loading takes seconds.
_shared: dict[tuple[str, str], LocalProxy] = {}


def shared_proxy(model: str = DEFAULT_MODEL, *, device: Literal["auto"] | str = "auto") -> LocalProxy:
    """Return the process-wide proxy for a model, so that gates share one copy of its weights."""
    # Atomic: of two that are made at once, one is given to both.
    return _shared.setdefault((model, device), LocalProxy(model, device=device))
