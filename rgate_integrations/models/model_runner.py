"""Runs a loaded model on batches of prompts, for drafts, scores and hidden states.

The columns of a batch, for rows of two and four tokens::

    token ids      _ _ a b        mask  0 0 1 1        positions  0 0 0 1
                   c d e f              1 1 1 1                   0 1 2 3

Padding is on the left, so that all rows end in the last column, where the next token of every row is predicted and
new tokens are appended. Positions count tokens, not columns, so that a token has the same position in any batch.
Attention ignores padded columns.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch.nn.utils.rnn import pad_sequence

from rgate_integrations.decision import Draft
from rgate_integrations.models.base import PooledLayer, layer_numbers, pool_states
from rgate_integrations.models.encoding import EncodedPrompt, PromptEncoder
from rgate_integrations.models.pretrained import load_adapter
from rgate_integrations.runtime.arrays import Float32Array

_MAX_PROMPT_TOKENS = 2_048
_HASHED_VALUES = 8  # number of values of each parameter


class NextTokens(NamedTuple):
    """The next token of each prompt.

    Attributes:
        ids: The tokens, one per prompt.
        logprobs: Their natural log-probabilities, before the temperature is applied.
        states: Hidden states of the tokens read in this step, by layer, each of shape
            (prompts, tokens, hidden size); None if not requested.
    """

    ids: list[int]
    logprobs: list[float]
    states: Any


class ModelRunner:
    """Runs a causal language model, for one thread at a time.

    Args:
        model: The model, on its device.
        tokenizer: Its fast tokenizer.
        name: The model's name, which its drafts carry.
        check_open: Called before each token; raises when the process is exiting.

    Attributes:
        encoder: The model's prompt encoder.
        context_size: Maximum number of tokens of prompt and answer together; 2,048 if the model does not say.
        num_layers: Number of hidden layers.
        fingerprint: A hash that identifies the weights.
    """

    def __init__(self, model: Any, tokenizer: Any, name: str, check_open: Callable[[], None]) -> None:
        config = model.config.get_text_config()
        self.context_size = int(getattr(config, "max_position_embeddings", 0) or 2_048)
        self.num_layers = int(config.num_hidden_layers)
        # Leave room in the context for an answer.
        limit = min(_MAX_PROMPT_TOKENS, max(self.context_size - 256, self.context_size // 2))
        self.encoder = PromptEncoder(tokenizer, limit)
        self.model = model
        self.name = name
        self.fingerprint = fingerprint(model)  # must be computed before adapters add parameters
        self._check_open = check_open
        self._adapters: dict[str, str] = {}  # the adapters' names in the model, by path
        self._adapter: str | None = None  # path of the active adapter

    def switch_to(self, adapter: str | None) -> None:
        """Switch to an adapter, and load it if it is new; None means the base model.

        Raises:
            ModelLoadError: See `rgate_integrations.models.pretrained.load_adapter`.
        """
        if adapter == self._adapter:
            return
        if adapter is None:
            self.model.disable_adapters()
        else:
            if adapter not in self._adapters:
                name = f"rgate_{len(self._adapters)}"
                load_adapter(self.model, adapter, name)
                self._adapters[adapter] = name
            self.model.set_adapter(self._adapters[adapter])
            self.model.enable_adapters()
        self._adapter = adapter

    def generate(self, rows: Sequence[EncodedPrompt], tokens: int, temperature: float = 0.0) -> list[Draft]:
        """Return one draft per prompt: its continuation. All prompts must have the same template.

        Args:
            rows: The prompts.
            tokens: Maximum number of new tokens, at least 1.
            temperature: 0 is greedy. Samples depend on a row's seed but not on the batch.
        """
        at_newline = rows[0].template.stop_at_newline  # a batch has one template
        steps = self.steps([row.ids for row in rows], temperature, [row.seed for row in rows])
        written: list[list[tuple[int, float]]] = [[] for _ in rows]
        ended = [False] * len(rows)
        for step in islice(steps, tokens):
            for i, (token, logprob) in enumerate(zip(step.ids, step.logprobs, strict=True)):
                # A finished row is still computed with the batch, but its tokens are dropped.
                ended[i] = ended[i] or self.ends(token, at_newline)
                if not ended[i]:
                    written[i].append((token, logprob))
            if all(ended):
                break
        return list(map(self._draft, rows, written, ended))

    def steps(
        self,
        prompts: Sequence[Sequence[int]],
        temperature: float,
        seeds: Sequence[int],
        *,
        states: bool = False,
    ) -> Iterator[NextTokens]:
        """Continue prompts by one token per step: each step yields the next token of every prompt, without end.

        Args:
            prompts: Token ids.
            temperature: 0 is greedy.
            seeds: Seeds for sampling, one per prompt.
            states: Whether to return hidden states.

        Raises:
            RuntimeError: The process is exiting.
        """
        ids, mask = pad_left(prompts, self.encoder.tokenizer.pad_token_id, self.model.device)
        generators = [torch.Generator(ids.device).manual_seed(seed) for seed in seeds]
        cache = None
        while True:
            self._check_open()
            output = self.forward(ids, mask, cache, logits_to_keep=1, output_hidden_states=states)
            cache = output.past_key_values
            chosen, logprobs = choose_tokens(output.logits[:, -1], temperature, generators)
            yield NextTokens(chosen.tolist(), logprobs.tolist(), output.hidden_states)
            ids = chosen[:, None]
            mask = torch.cat([mask, torch.ones_like(ids)], dim=1)

    def _draft(self, row: EncodedPrompt, written: Sequence[tuple[int, float]], finished: bool) -> Draft:
        ids = tuple(token for token, _ in written)
        texts = self.encoder.token_texts(ids)
        return Draft(
            text="".join(texts).strip(),
            token_ids=ids,
            tokens=tuple(texts),
            logprobs=tuple(logprob for _, logprob in written),
            finished=finished,
            source="proxy",
            model=self.name,
            prompt_tokens=len(row.ids),
        )

    def ends(self, token: int, at_newline: bool = False) -> bool:
        """Return whether a token ends a text: a stop token or, if ``at_newline``, one with a line feed."""
        return token in self.encoder.stop_ids or (
            at_newline and "\n" in self.encoder.tokenizer.decode([token])
        )

    def score(self, rows: Sequence[EncodedPrompt], targets: Sequence[str]) -> list[tuple[float, ...]]:
        """Return, per prompt, the log-probability of each whole target. All prompts must have the same template."""
        ids, mask = self._padded(rows)
        prompts = self.forward(ids, mask, logits_to_keep=1)
        first = torch.log_softmax(prompts.logits.float(), dim=-1)
        scores = []
        for text in targets:
            # All prompts of a template end the same way, so the first one represents them.
            target = self.encoder.continuation(rows[0], text)
            logprobs = first
            # The prompt's pass predicts the first token. The others need a pass over the target.
            if len(target) > 1:
                beginning = torch.tensor([target[:-1]] * len(rows), device=ids.device)
                longer = torch.cat([mask, torch.ones_like(beginning)], dim=1)
                cache = copy.deepcopy(prompts.past_key_values)  # the next pass appends to it
                logits = self.forward(beginning, longer, cache).logits
                logprobs = torch.cat([first, torch.log_softmax(logits.float(), dim=-1)], dim=1)
            scores.append(logprobs[:, range(len(target)), target].sum(dim=-1).clamp(max=0.0).tolist())
        return list(zip(*scores, strict=True))

    def hidden(self, rows: Sequence[EncodedPrompt], layers: Sequence[PooledLayer]) -> list[Float32Array]:
        """Return the pooled states of each prompt with the text after it, each of shape (layers, hidden size)."""
        ids, mask = self._padded(rows)
        states = self.forward(ids, mask, logits_to_keep=1, output_hidden_states=True).hidden_states
        results = []
        for i, row in enumerate(rows):
            # Padding is on the left.
            by_layer = {layer: states[layer][i, -len(row) :].float() for layer in layer_numbers(layers)}
            results.append(pool_tensors(by_layer, row.question, len(row.ids), len(row.text), layers))
        return results

    def _padded(self, rows: Sequence[EncodedPrompt]) -> tuple[torch.Tensor, torch.Tensor]:
        return pad_left(
            [(*row.ids, *row.text) for row in rows],
            self.encoder.tokenizer.pad_token_id,
            self.model.device,
        )

    def forward(self, ids: torch.Tensor, mask: torch.Tensor, cache: Any = None, **options: Any) -> Any:
        """Run the model on new tokens of a batch that is padded on the left, and return its output.

        Args:
            ids: Ids of the new tokens, shape (rows, new tokens).
            mask: Shape (rows, all tokens including cached ones); 0 for padding.
            cache: Keys and values of the earlier tokens, extended in place; None without earlier ones.
            options: Further arguments of the model.
        """
        # A token's position is the number of tokens before it in its row. Padding needs a valid position, too.
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        return self.model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions[:, -ids.shape[1] :],
            past_key_values=cache,
            use_cache=True,
            **options,
        )


def pad_left(
    rows: Sequence[Sequence[int]], pad_token_id: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows padded on the left, and a mask that is 0 for padding, both of shape (rows, longest row)."""
    texts = [torch.tensor(row, device=device) for row in rows]
    pad = partial(pad_sequence, batch_first=True, padding_side="left")
    return pad(texts, padding_value=pad_token_id), pad(list(map(torch.ones_like, texts)))


def choose_tokens(
    logits: torch.Tensor, temperature: float, generators: Sequence[torch.Generator]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the next token of each row, and return ids and log-probabilities, both of shape (rows,).

    Sampling adds Gumbel noise to the scaled logits and takes the maximum, which draws exactly from the softmax. Each
    row has its own generator, so that a sample does not depend on its batch.

    Args:
        logits: Shape (rows, vocabulary).
        temperature: Divides the logits; 0 is greedy.
        generators: One per row.
    """
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    ranked = logprobs
    if temperature > 0:
        noise = [
            torch.rand(logits.shape[-1], generator=generator, device=logits.device)
            for generator in generators
        ]
        uniform = torch.stack(noise).clamp(1e-20, 1 - 1e-7)  # keeps both logarithms finite
        ranked = logprobs / temperature - torch.log(-torch.log(uniform))
    ids = ranked.argmax(dim=-1)
    return ids, logprobs.gather(-1, ids[:, None]).squeeze(-1).clamp(max=0.0)


def pool_tensors(
    states: Mapping[int, torch.Tensor],
    question: range,
    prompt: int,
    draft: int,
    layers: Sequence[PooledLayer],
) -> Float32Array:
    """Return the pooled states of one text, shape (layers, hidden size); see `pool_states`."""
    return torch.stack(pool_states(states, question, prompt, draft, layers)).cpu().numpy()


def fingerprint(model: Any) -> str:
    """Return a hash of every parameter's name and first 8 values, rounded to bfloat16, as 16 hex digits.

    It is the same for every device and float type, and takes milliseconds.
    """
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters(), key=lambda item: item[0]):
        first = parameter.detach().flatten()[:_HASHED_VALUES].to("cpu", torch.bfloat16)
        digest.update(name.encode() + first.view(torch.int16).numpy().tobytes())
    return digest.hexdigest()[:16]
