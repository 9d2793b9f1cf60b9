"""Proxy models that run here, on transformers: any catalogue name, local folder or Hub id."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from rgate_integrations.decision import Draft
from rgate_integrations.errors import ConfigurationError, ModelLoadError, missing_dependency
from rgate_integrations.evidence import Pooling, Span
from rgate_integrations.prompts import PromptTemplate
from rgate_integrations.proxy.base import HiddenStates, Proxy, TargetScores, Values
from rgate_integrations.proxy.download import resolve_model
from rgate_integrations.proxy.fingerprint import fingerprint
from rgate_integrations.proxy.progress import quiet
from rgate_integrations.saved import check_fingerprint, trained_on

if TYPE_CHECKING:
    import torch

    from rgate_integrations.proxy.encoding import EncodedPrompt, PromptEncoder
    from rgate_integrations.proxy.engine import Engine, Written

DEFAULT_MODEL = "smollm2-135m-instruct"


class _Adapter(NamedTuple):
    name: str
    activated: bool


class LocalProxy(Proxy):
    """A causal language model of transformers, loaded on first use.

    Weights are float32 on a CPU and bfloat16 on CUDA, with sdpa attention. One lock a model: concurrent callers
    take turns, batches are not interleaved.

    Args:
        model: Catalogue name (see ``rgate download``), local folder, or Hub id.
        device: ``"auto"`` takes CUDA when there is one; or a torch device.
        dtype: ``"float32"`` or ``"bfloat16"`` instead. A CPU with AVX512_BF16 or AMX drafts faster in bfloat16, in
            words that differ now and then.
        max_batch_size: Greatest number of sequences in one forward pass.
        max_batch_tokens: Greatest number of tokens in one forward pass, padding included.
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
        self.name = model
        self.device_name = device
        self.dtype = dtype
        self.max_batch_size = max_batch_size
        self.max_batch_tokens = max_batch_tokens
        self.max_prompt_tokens = max_prompt_tokens
        self.local_files_only = local_files_only
        self._lock = threading.RLock()
        self._engine: Engine | None = None
        self._adapters: dict[str, _Adapter] = {}
        self._fingerprint = ""

    def __repr__(self) -> str:
        return f"LocalProxy({self.name!r}, loaded={self._engine is not None})"

    def __reduce__(self) -> tuple[Callable[[], LocalProxy], tuple[()]]:
        """Pickle what the model is called, not its weights; it is loaded again on first use."""
        if _shared.get((self.name, self.device_name)) is self:
            return partial(shared_proxy, self.name, device=self.device_name), ()
        settings: dict[str, Any] = {
            "device": self.device_name,
            "dtype": self.dtype,
            "max_batch_size": self.max_batch_size,
            "max_batch_tokens": self.max_batch_tokens,
            "max_prompt_tokens": self.max_prompt_tokens,
            "local_files_only": self.local_files_only,
        }
        return partial(type(self), self.name, **settings), ()

    def load(self) -> LocalProxy:
        """Load weights and tokenizer now instead of on first use.

        Raises:
            ModelLoadError: The folder or Hub id holds no causal language model that can be loaded.
            MissingDependencyError: torch or transformers is not installed.
        """
        with self._lock:
            if self._engine is None:
                self._engine = self._load()
        return self

    def _load(self) -> Engine:
        try:
            import torch
            import transformers
        except ImportError as error:
            raise missing_dependency(error.name or "transformers", "local") from error
        from rgate_integrations.proxy.encoding import PromptEncoder
        from rgate_integrations.proxy.engine import Engine

        where = resolve_model(self.name)
        cuda = (
            torch.cuda.is_available() if self.device_name == "auto" else self.device_name.startswith("cuda")
        )
        device = torch.device(("cuda" if cuda else "cpu") if self.device_name == "auto" else self.device_name)
        automatic = "bfloat16" if cuda else "float32"
        common: dict[str, Any] = {"local_files_only": self.local_files_only, "trust_remote_code": False}
        try:
            with quiet(transformers):
                tokenizer = transformers.AutoTokenizer.from_pretrained(where, **common)
                model = transformers.AutoModelForCausalLM.from_pretrained(
                    where,
                    dtype=getattr(torch, automatic if self.dtype == "auto" else self.dtype),
                    attn_implementation="sdpa",
                    **common,
                )
        except (OSError, ValueError, RuntimeError, KeyError) as error:
            raise ModelLoadError(
                f"The model {self.name!r} could not be loaded: {str(error).splitlines()[0]}",
                hint="Give a folder or Hub id of a causal language model, or a name from `rgate download`.",
            ) from error
        if tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.eos_token
        if not tokenizer.is_fast:
            raise ModelLoadError(
                f"The tokenizer of {self.name!r} has no fast version.", hint="Save tokenizer.json."
            )
        context = int(getattr(model.config.get_text_config(), "max_position_embeddings", 0) or 2_048)
        encoder = PromptEncoder(tokenizer, min(self.max_prompt_tokens, max(context - 256, context // 2)))
        # Nothing of the model's own settings, such as a repetition penalty, may bend what is recorded as greedy.
        model.generation_config = transformers.GenerationConfig()
        self._fingerprint = fingerprint(model)
        model = model.to(device).eval()
        return Engine(model, encoder, self.name, self.max_batch_size, self.max_batch_tokens)

    # --- the interface -------------------------------------------------------------------------------------

    def generate(
        self, prompt: PromptTemplate, values: Sequence[Values], *, tokens: int, adapter: str | None = None
    ) -> list[Draft]:
        """Continue prompts greedily; see `Proxy.generate`."""
        if tokens == 0 or not values:
            return [Draft(text="", source="proxy", model=self.name, finished=False) for _ in values]
        rows = self._encode(prompt, values)
        with self._adapter(adapter) as engine:
            return engine.decode(prompt, rows, tokens)

    def stream(self, prompt: PromptTemplate, values: Values, *, tokens: int) -> Iterator[str]:
        """Continue one prompt greedily, and yield the text so far after each token.

        Other callers of this model wait until it is done, or until the iterator is closed.
        """
        from transformers import GenerationConfig, StoppingCriteriaList, TextIteratorStreamer

        row = self._encode(prompt, [values])[0]
        streamer = TextIteratorStreamer(
            self._enc.tokenizer, skip_prompt=True, skip_special_tokens=True, timeout=120
        )
        left = threading.Event()
        config = GenerationConfig(
            max_new_tokens=tokens,
            do_sample=False,
            eos_token_id=self._enc.stop_ids(),
            pad_token_id=self._enc.tokenizer.pad_token_id,
        )

        def stop(ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
            return ids.new_full((len(ids),), left.is_set(), dtype=bool)  # type: ignore[arg-type]

        def run() -> None:
            import torch

            try:
                with self._adapter(None) as engine, torch.inference_mode():
                    engine.model.generate(
                        torch.tensor([row.ids], device=engine.model.device),
                        generation_config=config,
                        streamer=streamer,
                        stopping_criteria=StoppingCriteriaList([stop]),
                    )
            finally:
                streamer.end()

        threading.Thread(target=run, name="rgate-stream", daemon=True).start()
        text = ""
        try:
            for piece in streamer:
                text += piece
                yield text.strip()
        finally:
            left.set()

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
        from rgate_integrations.proxy.decoding import row_seed

        if temperature <= 0:
            raise ConfigurationError(
                f"temperature must be above 0, not {temperature}.", hint="Use generate()."
            )
        rows = [row for row in self._encode(prompt, values) for _ in range(n)]
        seeds = [row_seed(seed, i % n, row.ids) for i, row in enumerate(rows)] if n else []
        with self._adapter(None) as engine:
            drafts = engine.decode(prompt, rows, tokens, temperature=temperature, seeds=seeds)
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
        rows = self._encode(prompt, values)
        ids = [[self._enc.continuation(row, target) for target in targets] for row in rows]
        if adapter is not None and self._loaded(adapter).activated:
            suffix = self._enc.after_draft(prompt) if prompt.follow_up else []
            heads = [row.ids[: len(row.ids) - len(suffix)] for row in rows]
            with self._adapter(None) as engine:
                found = engine.read_and_follow(
                    prompt, heads, suffix, ids[0] if ids else [], self._loaded(adapter).name
                )
            return [TargetScores(s, len(row.ids)) for s, row in zip(found, rows, strict=True)]
        # Targets that share all but their last token, such as "Yes" and "No", share a forward pass.
        jobs = sorted({(i, tuple(t[:-1])) for i, each in enumerate(ids) for t in each})
        sequences = [(*rows[i].ids, *prefix) for i, prefix in jobs]
        sums = [[0.0] * len(targets) for _ in rows]

        def take(job: int, tail: torch.Tensor) -> None:
            i, prefix = jobs[job]
            for t, target in enumerate(ids[i]):
                if tuple(target[:-1]) == prefix:
                    sums[i][t] = float(tail[range(len(target)), target].sum())

        with self._adapter(adapter) as engine:
            engine.read_tails(prompt, sequences, [len(prefix) + 1 for _, prefix in jobs], take)
        return [
            TargetScores(tuple(min(s, 0.0) for s in each), len(row.ids))
            for row, each in zip(rows, sums, strict=True)
        ]

    def read(self, prompt: PromptTemplate, values: Sequence[Values], drafts: Sequence[Draft]) -> list[Draft]:
        """Read given texts token by token; see `Proxy.read`."""
        rows = self._encode(prompt, values)
        texts = [self._draft_ids(row, draft) for row, draft in zip(rows, drafts, strict=True)]
        some = [i for i, ids in enumerate(texts) if ids]
        values_of: dict[int, tuple[list[float], list[float]]] = {}

        def take(job: int, tail: torch.Tensor) -> None:
            ids = texts[some[job]]
            entropies = -(tail.exp() * tail.clamp(min=-1e4)).sum(-1)
            values_of[some[job]] = (tail[range(len(ids)), ids].tolist(), entropies.tolist())

        with self._adapter(None) as engine:
            engine.read_tails(
                prompt, [(*rows[i].ids, *texts[i][:-1]) for i in some], [len(texts[i]) for i in some], take
            )
        results = []
        for i, (row, draft) in enumerate(zip(rows, drafts, strict=True)):
            logprobs, entropies = values_of.get(i, ([], []))
            results.append(
                draft.model_copy(
                    update={
                        "token_ids": tuple(texts[i]),
                        "tokens": tuple(self._enc.token_texts(texts[i])),
                        "logprobs": tuple(min(v, 0.0) for v in logprobs),
                        "entropies": tuple(entropies),
                        "scored_by": self.name,
                        "prompt_tokens": len(row.ids),
                    }
                )
            )
        return results

    def hidden(
        self,
        prompt: PromptTemplate,
        values: Sequence[Values],
        drafts: Sequence[Draft] | None,
        blocks: Sequence[tuple[int, Span, Pooling]],
    ) -> list[HiddenStates]:
        """Pool hidden states over the prompt and the draft; see `Proxy.hidden`."""
        rows = self._encode(prompt, values)
        given: Sequence[Draft | None] = drafts or [None] * len(rows)
        texts = [self._draft_ids(row, draft) for row, draft in zip(rows, given, strict=True)]
        with self._adapter(None) as engine:
            states = engine.read_states(prompt, rows, texts, blocks)
        return [
            HiddenStates(found, len(row.ids) + len(text))
            for found, row, text in zip(states, rows, texts, strict=True)
        ]

    def generate_hidden(
        self,
        prompt: PromptTemplate,
        values: Sequence[Values],
        *,
        tokens: int,
        blocks: Sequence[tuple[int, Span, Pooling]],
    ) -> list[tuple[Draft, HiddenStates]]:
        """Continue prompts greedily and keep hidden states on the way; see `Proxy.generate_hidden`."""
        from rgate_integrations.proxy.hidden import can_watch, pooled, spans_of

        layers = [layer for layer, _, _ in blocks]
        rows = self._encode(prompt, values)
        states: dict[int, HiddenStates] = {}

        def keep(done: Written) -> None:
            for k, (i, draft) in enumerate(zip(done.indices, done.drafts, strict=True)):
                length, written = len(rows[i].ids), len(draft.token_ids)
                found = done.batch.row(done.states, k, length, written)
                spans = spans_of(rows[i].question, length, written)
                states[i] = HiddenStates(pooled(found, spans, blocks), 0)

        with self._adapter(None) as engine:
            if not (tokens and values and can_watch(engine.model.base_model, layers)):
                return super().generate_hidden(prompt, values, tokens=tokens, blocks=blocks)
            drafts = engine.decode(prompt, rows, tokens, watch=blocks, then=keep)
        return [(draft, states[i]) for i, draft in enumerate(drafts)]

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
        loaded = None if adapter is None else self._loaded(adapter)
        one_pass = tokens and values and (loaded is None or loaded.activated)
        if not one_pass or not self._enc.goes_on(follow_up, prompt):
            return super().generate_scored(
                prompt, values, tokens=tokens, follow_up=follow_up, targets=targets, adapter=adapter
            )
        rows = self._encode(prompt, values)
        suffix = self._enc.after_draft(follow_up)
        asked = self._enc.encode(follow_up, {**values[0], "draft": ""})
        ids = [self._enc.continuation(asked, target) for target in targets]
        scores: dict[int, TargetScores] = {}

        def judge(done: Written) -> None:
            lengths = [len(draft.token_ids) for draft in done.drafts]
            name = loaded.name if loaded else None
            found = engine.follow(done.batch, done.cache, lengths, suffix, ids, name)
            for i, each in zip(done.indices, found, strict=True):
                scores[i] = TargetScores(each, len(suffix))

        with self._adapter(None) as engine:
            drafts = engine.decode(prompt, rows, tokens, then=judge)
        return [(draft, scores[i]) for i, draft in enumerate(drafts)]

    def cut(self, text: str, tokens: int) -> str | None:
        """Return ``text`` cut to a number of tokens, or None when it is not longer."""
        return self._enc.cut(text, tokens)

    @property
    def fingerprint(self) -> str:
        """Tells the weights apart from those of other models; loads the model."""
        self.load()
        return self._fingerprint

    def pair_ids(
        self, prompt: PromptTemplate, values: Values, target: str, ends: bool
    ) -> tuple[list[int], list[int]]:
        """Return the token ids of a prompt and of a target that continues it, and maybe ends the turn."""
        row = self._encode(prompt, [values])[0]
        end = self._enc.turn_end if not row.template.stop_at_newline else self._enc.ids("\n")
        ids = self._enc.continuation(row, self._enc.plain(target))
        return list(row.ids), [*ids, *end] if ends else ids

    def ids_after_draft(self, prompt: PromptTemplate) -> list[int]:
        """Return the token ids that follow the draft in a prompt with a `PromptTemplate.follow_up`."""
        return self._enc.after_draft(prompt)

    @property
    def pad_token_id(self) -> int:
        """Id of the padding token; loads the model."""
        return int(self._enc.tokenizer.pad_token_id)

    @property
    def layers(self) -> int:
        """Number of hidden layers; loads the model."""
        return int(self._model.config.get_text_config().num_hidden_layers)

    @property
    def calls(self) -> int:
        """How many batches the model has run."""
        return self._engine.calls if self._engine else 0

    # --- the model -----------------------------------------------------------------------------------------

    @property
    def _ready(self) -> Engine:
        self.load()
        if self._engine is None:  # load() raises before this can happen
            raise ModelLoadError(f"The model {self.name!r} is not loaded.")
        return self._engine

    @property
    def _model(self) -> Any:
        return self._ready.model

    @property
    def _enc(self) -> PromptEncoder:
        return self._ready.encoder

    def _encode(self, prompt: PromptTemplate, values: Sequence[Values]) -> list[EncodedPrompt]:
        return [self._enc.encode(prompt, v) for v in values]

    def _draft_ids(self, row: EncodedPrompt, draft: Draft | None) -> list[int]:
        if draft is None:
            return []
        if draft.token_ids and self.name in (draft.model if draft.source == "proxy" else "", draft.scored_by):
            return list(draft.token_ids)
        return self._enc.continuation(row, self._enc.plain(draft.text)) if draft.text else []

    def _loaded(self, adapter: str) -> _Adapter:
        """Put an adapter into the model, unless it is there already, and leave it off."""
        engine = self._ready
        with self._lock:
            if adapter not in self._adapters:
                if (trained := trained_on(adapter)) is not None:
                    check_fingerprint(adapter, trained, self.name, self._fingerprint)
                name = f"rgate_{len(self._adapters)}"
                try:
                    import transformers
                    from peft import PeftConfig

                    config = PeftConfig.from_pretrained(adapter)
                    # Only what follows the invocation tokens is run with it, so here it is an ordinary LoRA.
                    activated = bool(getattr(config, "alora_invocation_tokens", None))
                    if activated:
                        config.alora_invocation_tokens = None
                    # Of a second adapter it is said that the first one's weights were missing; they stay as they are.
                    with quiet(transformers), warnings.catch_warnings():
                        warnings.simplefilter("ignore", UserWarning)
                        engine.model.load_adapter(adapter, adapter_name=name, peft_config=config)
                except (OSError, ValueError, RuntimeError, ImportError) as error:
                    # What was put into the model by then would change every later score: load it afresh.
                    self._engine, self._adapters = None, {}
                    raise ModelLoadError(
                        f"The adapter {adapter!r} does not fit {self.name!r}: {str(error).splitlines()[0]}",
                        hint="Give the folder of a LoRA adapter that was trained on this very model.",
                    ) from error
                engine.model.disable_adapters()
                self._adapters[adapter] = _Adapter(name, activated)
            return self._adapters[adapter]

    @contextmanager
    def _adapter(self, adapter: str | None) -> Iterator[Engine]:
        """Hold the model with an adapter switched on, or with the base weights alone."""
        with self._lock:
            name = None if adapter is None else self._loaded(adapter).name
            engine = self._ready
            with engine.adapted(name):
                yield engine


_shared: dict[tuple[str, str], LocalProxy] = {}
_shared_lock = threading.Lock()


def shared_proxy(model: str = DEFAULT_MODEL, *, device: Literal["auto"] | str = "auto") -> LocalProxy:
    """Return the process-wide proxy for a model, so that gates share one copy of its weights."""
    with _shared_lock:
        if (model, device) not in _shared:
            _shared[model, device] = LocalProxy(model, device=device)
        return _shared[model, device]
