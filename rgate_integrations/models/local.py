"""Proxy models that run here, on transformers: any catalogue name, local folder or Hub id."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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
)
from rgate_integrations.models.download import cached_path
from rgate_integrations.models.kept import kept_answer
from rgate_integrations.models.model_lock import Turns
from rgate_integrations.models.written import WritingOptions
from rgate_integrations.prompts import PromptTemplate
from rgate_integrations.runtime.threads import close_at_exit, reset_after_fork

# What needs torch is imported by the methods that load or run the model, so that gates can be made without it. They
# load it first: the end of the process waits for `load`, and breaks off an import anywhere else, which is fatal.
if TYPE_CHECKING:
    from rgate_integrations.models.adapters import LoadedAdapter
    from rgate_integrations.models.encoding import EncodedPrompt, PromptEncoder
    from rgate_integrations.models.model_runner import ModelRunner

DEFAULT_MODEL = reader.READS


class LocalProxy(Proxy):
    """A causal language model of transformers, loaded on first use.

    Weights are bfloat16 on CUDA and float32 on a CPU, with sdpa attention. Of the default model, the states that the
    shipped gates look at are read by `Reader` instead, which needs no torch.

    Concurrent callers take turns. Who writes texts lets those in between two tokens who only read, so that they do
    not wait for the whole text.

    After a fork the child has a model of its own: the parent's weights if the model was idle, or else it is loaded
    again.

    Args:
        model: Catalogue name (see ``rgate download``), local folder, or Hub id.
        device: ``"auto"`` takes CUDA when there is one; or a torch device.
        dtype: ``"float32"`` or ``"bfloat16"`` for all. Drafts are written faster in bfloat16 where the CPU
            multiplies it, in words that differ now and then.
        max_batch_size: Maximum number of sequences in one forward pass.
        max_batch_tokens: Maximum number of tokens in one forward pass, padding included.
        max_prompt_tokens: Prompts are cut to this length, or to the model's own limit if that is less.
        local_files_only: Never ask the Hub.
    """

    def __init__(
        self,
        model: str = DEFAULT_MODEL,
        *,
        device: str = "auto",
        dtype: Literal["auto", "float32", "bfloat16"] = "auto",
        max_batch_size: int = 16,
        max_batch_tokens: int = 16_384,
        max_prompt_tokens: int = 2_048,
        local_files_only: bool = False,
    ) -> None:
        if max_batch_size < 1:
            raise ConfigurationError(f"max_batch_size must be at least 1, not {max_batch_size}.")
        if dtype not in ("auto", "float32", "bfloat16"):
            raise ConfigurationError(f"dtype {dtype!r} is not known.", hint="auto, float32 or bfloat16")
        self._settings: dict[str, Any] = {  # but for the model
            "device": device,
            "dtype": dtype,
            "max_batch_size": max_batch_size,
            "max_batch_tokens": max_batch_tokens,
            "max_prompt_tokens": max_prompt_tokens,
            "local_files_only": local_files_only,
        }
        self.name = model
        self.device_name = device
        self.dtype = dtype
        self.max_batch_size = max_batch_size
        self.max_batch_tokens = max_batch_tokens
        self.max_prompt_tokens = max_prompt_tokens
        self.local_files_only = local_files_only
        self._turns = Turns()
        self._runner: ModelRunner | None = None
        self._tokenizer_alone: PromptEncoder | None = None  # until a model is wanted
        reset_after_fork(self)

    def __repr__(self) -> str:
        return f"LocalProxy({self.name!r}, loaded={self._runner is not None})"

    def __reduce__(self) -> tuple[Callable[[], LocalProxy], tuple[()]]:
        """Pickle what the model is called, not its weights; it is loaded again on first use."""
        if _shared.get((self.name, self.device_name)) is self:
            return partial(shared_proxy, self.name, device=self.device_name), ()
        return partial(type(self), self.name, **self._settings), ()

    def generate(
        self, prompt: PromptTemplate, values: Sequence[Values], *, tokens: int, adapter: str | None = None
    ) -> list[Draft]:
        """Continue prompts greedily; see `Proxy.generate`."""
        if tokens == 0 or not values:
            return [Draft(text="", source="proxy", model=self.name, finished=False) for _ in values]
        self.load()
        from rgate_integrations.models.generation import DraftRows, GenerateDrafts

        rows = self._encode(prompt, values)
        with self.using(adapter, long=True) as runner:
            return runner.run(GenerateDrafts(runner, DraftRows(prompt, rows, tokens)))

    def stream(self, prompt: PromptTemplate, values: Values, *, tokens: int) -> Iterator[str]:
        """Continue one prompt greedily, and yield the text so far after each token; nothing is written ahead."""
        self.load()
        from rgate_integrations.models.writing import Writing

        (row,) = self._encode(prompt, [values])
        options = WritingOptions(tokens=tokens, stop=("\n",) if row.template.stop_at_newline else ())
        yield from Writing(self.using, row.ids, options).texts()

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
        self.load()
        from rgate_integrations.models.decoding import Sampling, row_seed
        from rgate_integrations.models.generation import DraftRows, GenerateDrafts

        if temperature <= 0:
            raise ConfigurationError(
                f"temperature must be above 0, not {temperature}.", hint="Use generate()."
            )
        rows, seeds = [], []
        for row in self._encode(prompt, values):
            for sample in range(n):
                rows.append(row)
                seeds.append(row_seed(seed, sample, row.ids))
        with self.using(long=True) as runner:
            wanted = DraftRows(prompt, rows, tokens, Sampling(temperature, seeds))
            drafts = runner.run(GenerateDrafts(runner, wanted))
        return [tuple(drafts[i * n : (i + 1) * n]) for i in range(len(values))]

    def score(
        self,
        prompt: PromptTemplate,
        values: Sequence[Values],
        targets: Sequence[str],
        *,
        adapter: str | None = None,
    ) -> list[TargetScores]:
        """Score fixed continuations as whole sequences; see `Proxy.score`."""
        self.load()
        from rgate_integrations.models.scoring import ReadAndScore, SuffixTargets, score_targets

        rows = self._encode(prompt, values)
        ids = [[self._encoder.continuation(row, target) for target in targets] for row in rows]
        with self.using() as runner:
            loaded = self._adapter(adapter)
            if rows and loaded is not None and loaded.activated:
                # It acts on what follows the draft only; all before is read with the base model.
                suffix = self.ids_after_draft(prompt) if prompt.follow_up else []
                before = [row.ids[: len(row.ids) - len(suffix)] for row in rows]
                judgment = SuffixTargets(suffix, ids[0], loaded.name)
                scores = runner.run(ReadAndScore(runner, prompt, before, judgment))
            else:
                with runner.adapted(loaded.name if loaded else None):
                    scores = score_targets(runner, prompt, rows, ids)
        return [TargetScores(found, len(row.ids)) for found, row in zip(scores, rows, strict=True)]

    def score_text(
        self, prompt: PromptTemplate, values: Sequence[Values], drafts: Sequence[Draft]
    ) -> list[Draft]:
        """Read given texts token by token; see `Proxy.score_text`."""
        self.load()
        from rgate_integrations.models.reading import ReadTexts, TokenValues

        rows = self._encode(prompt, values)
        texts = [self._draft_ids(row, draft) for row, draft in zip(rows, drafts, strict=True)]
        some = [i for i, text in enumerate(texts) if text]
        with self.using() as runner:
            found = runner.run(ReadTexts(runner, prompt, [rows[i] for i in some], [texts[i] for i in some]))
        values_of = dict(zip(some, found, strict=True))
        results = []
        for i, draft in enumerate(drafts):
            token_values = values_of.get(i, TokenValues())
            update = {
                "token_ids": tuple(texts[i]),
                "tokens": tuple(self._encoder.token_texts(texts[i])),
                "logprobs": token_values.logprobs,
                "entropies": token_values.entropies,
                "margins": token_values.margins,
                "scored_by": self.name,
                "prompt_tokens": len(rows[i].ids),
            }
            results.append(draft.model_copy(update=update))
        return results

    def hidden(
        self,
        prompt: PromptTemplate,
        values: Sequence[Values],
        drafts: Sequence[Draft] | None,
        layers: Sequence[PooledLayer],
    ) -> list[HiddenStates]:
        """Pool hidden states over the prompt and the draft; see `Proxy.hidden`."""
        if self._is_read_here(prompt, layers) and not any(map(_is_kept, drafts or ())):
            given = None if drafts is None else [self._given(draft) for draft in drafts]
            return self._reader.hidden([each["question"] for each in values], given, layers)
        self.load()
        from rgate_integrations.models.reading import PoolStates
        from rgate_integrations.models.writing import kept_states

        rows = self._encode(prompt, values)
        texts: list[list[int]] = [[] for _ in rows]
        kept: dict[int, HiddenStates] = {}
        if drafts is not None:
            texts = [self._draft_ids(row, draft) for row, draft in zip(rows, drafts, strict=True)]
            kept = kept_states(self.fingerprint, rows, drafts, layers)
        left = [i for i in range(len(rows)) if i not in kept]
        with self.using() as runner:
            wanted = PoolStates(runner, prompt, [rows[i] for i in left], [texts[i] for i in left], layers)
            read = runner.run(wanted)
        for i, states in zip(left, read, strict=True):
            kept[i] = HiddenStates(states, len(rows[i].ids) + len(texts[i]))
        return [kept[i] for i in range(len(rows))]

    def request_states(
        self,
        prompt: PromptTemplate,
        texts: Sequence[Segmented],
        drafts: Sequence[Draft] | None,
        layers: RequestLayers,
    ) -> list[RequestStates]:
        """Pool hidden states of requests, in one pass where a reader has them; see `Proxy.request_states`."""
        if not self._is_read_here(prompt, layers.every) or any(map(_is_kept, drafts or ())):
            return super().request_states(prompt, texts, drafts, layers)
        given = None if drafts is None else [self._given(draft) for draft in drafts]
        return self._reader.request_states(texts, given, layers)

    def generate_hidden(
        self,
        prompt: PromptTemplate,
        values: Sequence[Values],
        *,
        tokens: int,
        layers: Sequence[PooledLayer],
    ) -> list[tuple[Draft, HiddenStates]]:
        """Continue prompts greedily and keep hidden states on the way; see `Proxy.generate_hidden`."""
        self.load()
        from rgate_integrations.models.generation import DraftRows, GenerateWithStates
        from rgate_integrations.models.hidden import can_watch, layer_numbers

        rows = self._encode(prompt, values)
        with self.using(long=True) as runner:
            decoder = runner.model.base_model
            if tokens == 0 or not values or not can_watch(decoder, layer_numbers(layers)):
                return super().generate_hidden(prompt, values, tokens=tokens, layers=layers)
            found = runner.run(GenerateWithStates(runner, DraftRows(prompt, rows, tokens), layers))
        return [(draft, HiddenStates(states, prompt_tokens=0)) for draft, states in found]

    def generate_scored(
        self,
        prompt: PromptTemplate,
        values: Sequence[Values],
        *,
        tokens: int,
        follow_up: PromptTemplate,
        targets: Sequence[str],
        adapter: str | None = None,
    ) -> list[tuple[Draft, TargetScores]]:
        """Continue prompts greedily and judge on the same keys and values; see `Proxy.generate_scored`."""
        self.load()
        from rgate_integrations.models.generation import DraftRows, GenerateAndScore
        from rgate_integrations.models.scoring import SuffixTargets

        rows = self._encode(prompt, values)
        with self.using(long=True) as runner:
            loaded = self._adapter(adapter)
            # An ordinary adapter changes the keys and values of the question and the draft too.
            can_continue = loaded is None or loaded.activated
            if tokens == 0 or not values or not can_continue or not self._encoder.goes_on(follow_up, prompt):
                return super().generate_scored(
                    prompt, values, tokens=tokens, follow_up=follow_up, targets=targets, adapter=adapter
                )
            suffix = self.ids_after_draft(follow_up)
            asked = self._encoder.encode(follow_up, {**values[0], "draft": ""})
            ids = [self._encoder.continuation(asked, target) for target in targets]
            judgment = SuffixTargets(suffix, ids, loaded.name if loaded else None)
            found = runner.run(GenerateAndScore(runner, DraftRows(prompt, rows, tokens), judgment))
        return [(draft, TargetScores(scores, prompt_tokens=len(suffix))) for draft, scores in found]

    def truncate(self, text: str, tokens: int) -> str | None:
        """Return ``text`` cut to a number of tokens, or None when it is not longer."""
        if self._runner is None and self._has_reader:
            return self._reader.truncate(text, tokens)
        return self._counter().truncate(text, tokens)

    @property
    def fingerprint(self) -> str:
        """Tells the weights apart from those of other models; loads the model, unless a reader stands for it."""
        if self._runner is None and self._has_reader:
            return reader.FINGERPRINT
        return self.runner.fingerprint

    def pair_ids(
        self, prompt: PromptTemplate, values: Values, target: str, ends: bool
    ) -> tuple[list[int], list[int]]:
        """Return the token ids of a prompt and of a target that continues it, and maybe ends the turn."""
        (row,) = self._encode(prompt, [values])
        ids = self._encoder.continuation(row, self._encoder.plain(target))
        if ends:
            newline = row.template.stop_at_newline
            ids = [*ids, *(self._encoder.ids("\n") if newline else self._encoder.turn_end)]
        return list(row.ids), ids

    def ids_after_draft(self, prompt: PromptTemplate) -> list[int]:
        """Return the token ids that follow the draft in a prompt with a `PromptTemplate.follow_up`."""
        return self._encoder.after_draft(prompt)

    @property
    def pad_token_id(self) -> int:
        """Id of the padding token; loads the model."""
        return self._encoder.pad_token_id

    @property
    def num_layers(self) -> int:
        """Number of hidden layers; loads the model."""
        return int(self.runner.model.config.get_text_config().num_hidden_layers)

    @property
    def calls(self) -> int:
        """How many batches the model has run."""
        read = reader.reader_calls() if self.name == reader.READS else 0
        return read + (self._runner.calls if self._runner else 0)

    def load(self) -> LocalProxy:
        """Load weights and tokenizer now instead of on first use.

        Raises:
            ModelLoadError: The folder or Hub id holds no causal language model that can be loaded.
            MissingDependencyError: torch or transformers is not installed.
        """
        if self._runner is None:  # a loaded model is not waited for
            with self._turns.turn():
                if self._runner is None:
                    close_at_exit(self._turns)
                    self._runner = self._load()
                    close_at_exit(self._turns)  # again, for its turn comes before that of what was imported
        return self

    def after_fork(self) -> None:
        """Take the model as it is in a forked child, or have it loaded again if a thread of the parent used it."""
        if self._turns.taken:
            self._runner = None  # an adapter may be on, and half a pass may be done
        self._turns.after_fork()

    def _load(self) -> ModelRunner:
        try:
            from rgate_integrations.models import pretrained
        except ImportError as error:
            raise missing_dependency(error.name or "transformers", "local") from error
        from rgate_integrations.models.model_runner import ModelRunner

        local: dict[str, Any] = {"local_files_only": self.local_files_only}
        model, tokenizer = pretrained.load_pretrained(self.name, self.device_name, self.dtype, **local)
        return ModelRunner(
            model,
            pretrained.make_encoder(model, tokenizer, self.max_prompt_tokens),
            self.name,
            self.max_batch_size,
            self.max_batch_tokens,
            turns=self._turns,
        )

    @property
    def runner(self) -> ModelRunner:
        """The model and what runs it, for looking inside (``proxy.runner.model``); loads the model.

        It belongs to one thread at a time: this waits for nobody's turn.
        """
        self.load()
        runner = self._runner
        if runner is None:  # an adapter that did not fit has just spoilt it, in another thread
            raise ModelLoadError(f"The model {self.name!r} is not loaded.")
        return runner

    @contextmanager
    def using(self, adapter: str | None = None, *, long: bool = False) -> Iterator[ModelRunner]:
        """Hold the model with an adapter switched on, or with the base weights alone.

        Which adapter is on, and which prefixes are cached, is state of the model: hence one caller at a time.

        Args:
            adapter: The adapter.
            long: Whether others are let in between two tokens.
        """
        with self._turns.turn(long=long):
            loaded = self._adapter(adapter)
            with self.runner.adapted(loaded.name if loaded else None):
                yield self.runner

    def _adapter(self, adapter: str | None) -> LoadedAdapter | None:
        """Put an adapter into the model, unless it is there already, and leave it off."""
        if adapter is None:
            return None
        with self._turns.turn():
            try:
                return self.runner.adapters.load(adapter)
            except ModelLoadError:
                # The model may hold a part of it, which would change every later score: load the model afresh.
                self._runner = None
                raise

    def _counter(self) -> PromptEncoder:
        """Return what counts tokens; if no model is loaded yet, its tokenizer is enough."""
        if self._runner is not None:
            return self._runner.encoder
        with self._turns.turn():
            if self._tokenizer_alone is None:
                close_at_exit(self._turns)
                try:
                    from rgate_integrations.models import encoding, pretrained
                except ImportError as error:
                    raise missing_dependency(error.name or "transformers", "local") from error
                tokenizer = pretrained.load_tokenizer(self.name, local_files_only=self.local_files_only)
                self._tokenizer_alone = encoding.PromptEncoder(tokenizer, self.max_prompt_tokens)
                close_at_exit(self._turns)
            return self._tokenizer_alone

    @property
    def _encoder(self) -> PromptEncoder:
        return self.runner.encoder

    def _is_read_here(self, prompt: PromptTemplate, layers: Sequence[PooledLayer]) -> bool:
        """Return whether these states are the reader's: those of the shipped gates, with the usual settings."""
        usual = self.dtype == "auto" and self.device_name in ("auto", "cpu")
        return self.name == reader.READS and usual and reader.can_read(prompt, layers)

    @property
    def _has_reader(self) -> bool:
        return self.name == reader.READS and cached_path(reader.READER) is not None

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

    def _given(self, draft: Draft) -> str | Sequence[int]:
        """Return what is read of a draft: its own tokens if they are this model's, or else its text."""
        written_here = draft.source == "proxy" and draft.model == self.name
        return draft.token_ids if draft.token_ids and written_here else draft.text

    def _encode(self, prompt: PromptTemplate, values: Sequence[Values]) -> list[EncodedPrompt]:
        return [self._encoder.encode(prompt, each) for each in values]

    def _draft_ids(self, row: EncodedPrompt, draft: Draft) -> list[int]:
        """Return a draft's own token ids if they are this model's, or else tokenize its text."""
        written_here = draft.source == "proxy" and draft.model == self.name
        if draft.token_ids and (written_here or draft.scored_by == self.name):
            return list(draft.token_ids)
        return self._encoder.continuation(row, self._encoder.plain(draft.text)) if draft.text else []


def _is_kept(draft: Draft) -> bool:
    """Return whether a local model has kept its states while it wrote this draft."""
    return bool(draft.response_id) and kept_answer(draft.response_id) is not None


_shared: dict[tuple[str, str], LocalProxy] = {}


def shared_proxy(model: str = DEFAULT_MODEL, *, device: Literal["auto"] | str = "auto") -> LocalProxy:
    """Return the process-wide proxy for a model, so that gates share one copy of its weights."""
    # Atomic: of two that are made at once, one is given to both.
    return _shared.setdefault((model, device), LocalProxy(model, device=device))
