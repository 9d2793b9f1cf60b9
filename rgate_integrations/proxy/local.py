"""Proxy models that run here, on transformers: any catalogue name, local folder or Hub id."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from rgate_integrations.decision import Draft
from rgate_integrations.errors import ConfigurationError, ModelLoadError, missing_dependency
from rgate_integrations.evidence import Pooling, Span
from rgate_integrations.prompts import PromptTemplate
from rgate_integrations.proxy.base import HiddenStates, Proxy, TargetScores, Values
from rgate_integrations.proxy.download import resolve_model
from rgate_integrations.proxy.fingerprint import check_adapter, fingerprint
from rgate_integrations.proxy.progress import quiet

if TYPE_CHECKING:
    import torch

    from rgate_integrations.proxy.encoding import EncodedPrompt, PromptEncoder

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

DEFAULT_MODEL = "smollm2-135m-instruct"


class LocalProxy(Proxy):
    """A causal language model of transformers, loaded on first use.

    Weights are float32 on a CPU (without AMX, narrower types are slower there) and bfloat16 with sdpa
    attention on CUDA. One lock a model: concurrent callers take turns, batches are not interleaved.

    Args:
        model: Catalogue name (see ``rgate download``), local folder, or Hub id.
        device: ``"auto"`` takes CUDA when there is one; or a torch device.
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
        max_batch_size: int = 16,
        max_batch_tokens: int = 16_384,
        max_prompt_tokens: int = 2_048,
        local_files_only: bool = False,
    ) -> None:
        if max_batch_size < 1:
            raise ConfigurationError(f"max_batch_size must be at least 1, not {max_batch_size}.")
        self.name = model
        self.device_name = device
        self.max_batch_size = max_batch_size
        self.max_batch_tokens = max_batch_tokens
        self.max_prompt_tokens = max_prompt_tokens
        self.local_files_only = local_files_only
        self.calls = 0
        self._lock = threading.RLock()
        self._model: Any = None
        self._encoder: PromptEncoder | None = None
        self._adapters: dict[str, str] = {}
        self._newlines: torch.Tensor | None = None
        self._fingerprint = ""

    def __repr__(self) -> str:
        return f"LocalProxy({self.name!r}, loaded={self._model is not None})"

    def __reduce__(self) -> tuple[Callable[[], LocalProxy], tuple[()]]:
        """Pickle what the model is called, not its weights; it is loaded again on first use."""
        if _shared.get((self.name, self.device_name)) is self:
            return partial(shared_proxy, self.name, device=self.device_name), ()
        settings: dict[str, Any] = {
            "device": self.device_name,
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
            if self._model is None:
                self._load()
        return self

    def _load(self) -> None:
        try:
            import torch
            import transformers
        except ImportError as error:
            raise missing_dependency(error.name or "transformers", "local") from error
        from rgate_integrations.proxy.encoding import PromptEncoder

        where = resolve_model(self.name)
        cuda = (
            torch.cuda.is_available() if self.device_name == "auto" else self.device_name.startswith("cuda")
        )
        device = torch.device(("cuda" if cuda else "cpu") if self.device_name == "auto" else self.device_name)
        common: dict[str, Any] = {"local_files_only": self.local_files_only, "trust_remote_code": False}
        try:
            with quiet(transformers):
                tokenizer = transformers.AutoTokenizer.from_pretrained(where, **common)
                model = transformers.AutoModelForCausalLM.from_pretrained(
                    where,
                    dtype=torch.bfloat16 if cuda else torch.float32,
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
        self._encoder = PromptEncoder(
            tokenizer, min(self.max_prompt_tokens, max(context - 256, context // 2))
        )
        # Nothing of the model's own settings, such as a repetition penalty, may bend what is recorded as greedy.
        model.generation_config = transformers.GenerationConfig()
        self._fingerprint = fingerprint(model)
        self._model = model.to(device).eval()

    # --- the interface -------------------------------------------------------------------------------------

    def generate(
        self, prompt: PromptTemplate, values: Sequence[Values], *, tokens: int, adapter: str | None = None
    ) -> list[Draft]:
        """Continue prompts greedily; see `Proxy.generate`."""
        if tokens == 0 or not values:
            return [Draft(text="", source="proxy", model=self.name, finished=False) for _ in values]
        rows = self._encode(prompt, values)
        with self._adapter(adapter):
            return self._decode(rows, tokens, None, [0] * len(rows))

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
                with self._adapter(None), torch.inference_mode():
                    inputs = self._padded([row.ids])
                    inputs.pop("position_ids")
                    self._model.generate(
                        **inputs,
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
        with self._adapter(None):
            drafts = self._decode(rows, tokens, temperature, seeds)
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
        # Targets that share all but their last token, such as "Yes" and "No", share a forward pass.
        jobs = sorted({(i, tuple(t[:-1])) for i, each in enumerate(ids) for t in each})
        sequences = [(*rows[i].ids, *prefix) for i, prefix in jobs]
        sums = [[0.0] * len(targets) for _ in rows]

        def take(job: int, tail: torch.Tensor) -> None:
            i, prefix = jobs[job]
            for t, target in enumerate(ids[i]):
                if tuple(target[:-1]) == prefix:
                    sums[i][t] = float(tail[range(len(target)), target].sum())

        with self._adapter(adapter):
            self._read_tails(sequences, [len(prefix) + 1 for _, prefix in jobs], take)
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

        with self._adapter(None):
            self._read_tails(
                [(*rows[i].ids, *texts[i][:-1]) for i in some], [len(texts[i]) for i in some], take
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
        from rgate_integrations.proxy.hidden import layer_states, pooled, spans_of

        rows = self._encode(prompt, values)
        given: Sequence[Draft | None] = drafts or [None] * len(rows)
        texts = [self._draft_ids(row, draft) for row, draft in zip(rows, given, strict=True)]
        lengths = [len(r.ids) + len(t) for r, t in zip(rows, texts, strict=True)]
        layers = sorted({layer for layer, _, _ in blocks})
        results: dict[int, HiddenStates] = {}

        def run(indices: Sequence[int]) -> None:
            inputs = self._padded([(*rows[i].ids, *texts[i]) for i in indices])
            states = layer_states(self._model.base_model, inputs, layers)
            width = inputs["input_ids"].shape[1]
            for row, i in enumerate(indices):
                spans = spans_of(rows[i].question, len(rows[i].ids), len(texts[i]), width - lengths[i])
                results[i] = HiddenStates(pooled(states, row, spans, blocks), lengths[i])

        with self._adapter(None):
            self._in_batches(lengths, run)
        return [results[i] for i in range(len(rows))]

    def generate_hidden(
        self,
        prompt: PromptTemplate,
        values: Sequence[Values],
        *,
        tokens: int,
        blocks: Sequence[tuple[int, Span, Pooling]],
    ) -> list[tuple[Draft, HiddenStates]]:
        """Continue prompts greedily and keep hidden states on the way; see `Proxy.generate_hidden`."""
        from rgate_integrations.proxy.hidden import can_watch

        self.load()
        if not (tokens and values and can_watch(self._model.base_model, [layer for layer, _, _ in blocks])):
            return super().generate_hidden(prompt, values, tokens=tokens, blocks=blocks)
        states: dict[int, HiddenStates] = {}
        with self._adapter(None):
            rows = self._encode(prompt, values)
            drafts = self._decode(rows, tokens, None, [0] * len(rows), blocks, states)
        return [(draft, states[i]) for i, draft in enumerate(drafts)]

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

    @property
    def pad_token_id(self) -> int:
        """Id of the padding token; loads the model."""
        return int(self._enc.tokenizer.pad_token_id)

    # --- one model call ------------------------------------------------------------------------------------

    @property
    def layers(self) -> int:
        """Number of hidden layers; loads the model."""
        self.load()
        return int(self._model.config.get_text_config().num_hidden_layers)

    @property
    def _enc(self) -> PromptEncoder:
        self.load()
        if self._encoder is None:  # load() raises before this can happen
            raise ModelLoadError(f"The model {self.name!r} is not loaded.")
        return self._encoder

    def _encode(self, prompt: PromptTemplate, values: Sequence[Values]) -> list[EncodedPrompt]:
        return [self._enc.encode(prompt, v) for v in values]

    def _draft_ids(self, row: EncodedPrompt, draft: Draft | None) -> list[int]:
        if draft is None:
            return []
        if draft.token_ids and self.name in (draft.model if draft.source == "proxy" else "", draft.scored_by):
            return list(draft.token_ids)
        return self._enc.continuation(row, self._enc.plain(draft.text)) if draft.text else []

    def _padded(self, rows: Sequence[Sequence[int]]) -> dict[str, torch.Tensor]:
        from rgate_integrations.proxy.decoding import pad_left

        return pad_left(rows, self._enc.tokenizer.pad_token_id, self._model.device)

    def _read_tails(
        self, rows: Sequence[Sequence[int]], keep: Sequence[int], take: Callable[[int, torch.Tensor], None]
    ) -> None:
        """Give ``take`` each row's next-token log-probabilities at its last ``keep`` positions, (keep, vocabulary).

        They are dropped after each batch: over a whole vocabulary they are large.
        """
        import torch

        def run(indices: Sequence[int]) -> None:
            widest = max(keep[i] for i in indices)
            inputs = self._padded([rows[i] for i in indices])
            logits = self._model(**inputs, logits_to_keep=widest, use_cache=False).logits
            logprobs = torch.log_softmax(logits.float(), dim=-1)
            for row, i in enumerate(indices):
                take(i, logprobs[row, widest - keep[i] :])

        self._in_batches([len(r) for r in rows], run)

    def _decode(
        self,
        rows: Sequence[EncodedPrompt],
        tokens: int,
        temperature: float | None,
        seeds: Sequence[int],
        blocks: Sequence[tuple[int, Span, Pooling]] = (),
        states: dict[int, HiddenStates] | None = None,
    ) -> list[Draft]:
        """Write a draft a row; with ``blocks``, also put each row's pooled hidden states into ``states``."""
        import torch
        from transformers import GenerationConfig

        from rgate_integrations.proxy.decoding import Recorder, StopAt
        from rgate_integrations.proxy.hidden import pooled, spans_of, watching

        stops = self._enc.stop_ids()
        config = GenerationConfig(
            # The states of a token are there once the next one is asked for.
            max_new_tokens=tokens + bool(blocks),
            do_sample=False,
            eos_token_id=stops,
            pad_token_id=self._enc.tokenizer.pad_token_id,
            use_cache=True,
        )
        layers = sorted({layer for layer, _, _ in blocks})
        results: dict[int, Draft] = {}

        def run(indices: Sequence[int]) -> None:
            inputs = self._padded([rows[i].ids for i in indices])
            inputs.pop("position_ids")  # generate makes its own from the mask
            width = inputs["input_ids"].shape[1]
            chosen = [seeds[i] for i in indices] if temperature is not None else []
            recorder = Recorder(temperature, chosen, self._model.device)
            newline = rows[indices[0]].template.stop_at_newline
            criteria = [StopAt(self._newline_mask())] if newline else []
            with watching(self._model.base_model, layers) as seen:
                output = self._model.generate(
                    **inputs,
                    generation_config=config,
                    logits_processor=[recorder],
                    stopping_criteria=criteria,
                )
            new = output[:, width : width + tokens].tolist()
            logprobs = torch.stack(recorder.logprobs, dim=1).tolist()
            entropies = torch.stack(recorder.entropies, dim=1).tolist()
            ended = {*stops, *(self._newline_mask().nonzero().flatten().tolist() if newline else [])}
            kept = {layer: torch.cat(parts, dim=1) for layer, parts in seen.items()}
            for row, i in enumerate(indices):
                draft = self._draft(rows[i], new[row], ended, logprobs[row], entropies[row])
                results[i] = draft
                if states is not None:
                    prompt, written = len(rows[i].ids), len(draft.token_ids)
                    spans = spans_of(rows[i].question, prompt, written, width - prompt)
                    states[i] = HiddenStates(pooled(kept, row, spans, blocks), 0)

        self._in_batches([len(r.ids) + tokens for r in rows], run)
        return [results[i] for i in range(len(rows))]

    def _draft(
        self,
        row: EncodedPrompt,
        ids: list[int],
        ends: set[int],
        logprobs: list[float],
        entropies: list[float],
    ) -> Draft:
        length = next((k for k, token in enumerate(ids) if token in ends), len(ids))
        kept = ids[:length]
        texts = self._enc.token_texts(kept)
        return Draft(
            text="".join(texts).strip(),
            token_ids=tuple(kept),
            tokens=tuple(texts),
            logprobs=tuple(min(v, 0.0) for v in logprobs[:length]),
            entropies=tuple(entropies[:length]),
            finished=length < len(ids),
            source="proxy",
            model=self.name,
            prompt_tokens=len(row.ids),
        )

    def _newline_mask(self) -> torch.Tensor:
        import torch

        if self._newlines is None:
            size = self._model.config.get_text_config().vocab_size
            texts = self._enc.tokenizer.batch_decode(
                [[i] for i in range(min(size, len(self._enc.tokenizer)))]
            )
            mask = torch.zeros(size, dtype=torch.bool)
            mask[[i for i, text in enumerate(texts) if "\n" in text]] = True
            self._newlines = mask.to(self._model.device)
        return self._newlines

    def _in_batches(self, lengths: Sequence[int], run: Callable[[Sequence[int]], None]) -> None:
        """Run batches of like length; one that does not fit into memory is halved, down to single items."""
        import torch

        from rgate_integrations.proxy.decoding import batches

        pending = batches(lengths, self.max_batch_size, self.max_batch_tokens)
        while pending:
            batch = pending.pop(0)
            try:
                with torch.inference_mode():
                    run(batch)
                self.calls += 1
            except torch.OutOfMemoryError:
                if len(batch) == 1:
                    raise
                _log.warning("Out of memory with a batch of %d on %s: halving it.", len(batch), self.name)
                torch.cuda.empty_cache()
                half = len(batch) // 2
                pending[:0] = [batch[:half], batch[half:]]

    @contextmanager
    def _adapter(self, adapter: str | None) -> Iterator[None]:
        """Hold the model with an adapter switched on, or with the base weights alone."""
        self.load()
        with self._lock:
            if adapter is None:
                yield
                return
            if adapter not in self._adapters:
                check_adapter(adapter, self.name, self._fingerprint)
                name = f"rgate_{len(self._adapters)}"
                try:
                    self._model.load_adapter(adapter, adapter_name=name)
                except (OSError, ValueError, RuntimeError, ImportError) as error:
                    # What was put into the model by then would change every later score: load it afresh.
                    self._model, self._adapters = None, {}
                    raise ModelLoadError(
                        f"The adapter {adapter!r} does not fit {self.name!r}: {str(error).splitlines()[0]}",
                        hint="Give the folder of a LoRA adapter that was trained on this very model.",
                    ) from error
                self._adapters[adapter] = name
            self._model.set_adapter(self._adapters[adapter])
            self._model.enable_adapters()
            try:
                yield
            finally:
                self._model.disable_adapters()


_shared: dict[tuple[str, str], LocalProxy] = {}
_shared_lock = threading.Lock()


def shared_proxy(model: str = DEFAULT_MODEL, *, device: Literal["auto"] | str = "auto") -> LocalProxy:
    """Return the process-wide proxy for a model, so that gates share one copy of its weights."""
    with _shared_lock:
        if (model, device) not in _shared:
            _shared[model, device] = LocalProxy(model, device=device)
        return _shared[model, device]
