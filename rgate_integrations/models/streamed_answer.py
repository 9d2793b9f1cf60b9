"""An answer of a local model, generated token by token as the caller reads it; a gate can use its hidden states.

torch is imported only where it is used, so that framework adapters can be imported without it.
"""

from __future__ import annotations

import secrets
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple
from weakref import WeakValueDictionary

from pydantic import BeforeValidator, Field

from rgate_integrations.decision import Draft, Options
from rgate_integrations.errors import ConfigurationError
from rgate_integrations.models.base import PooledLayer, Values, layer_numbers
from rgate_integrations.prompts import PromptTemplate
from rgate_integrations.runtime.arrays import Float32Array

if TYPE_CHECKING:
    import torch

    from rgate_integrations.models.model_runner import ModelRunner, NextTokens


_ONE_OR_SEVERAL = BeforeValidator(lambda stop: (stop,) if isinstance(stop, str) else stop or ())


class GenerationOptions(Options):
    """Options of generation; local chat models and LLMs inherit them as fields.

    Attributes:
        temperature: 0 is greedy; above 0, tokens are sampled.
        max_tokens: Maximum number of tokens of an answer, at least 1; None for as many as fit into the
            model's context.
        stop: Texts that end an answer, and are removed from it.
        seed: Seed for sampling; None takes a new one for each answer. Greedy answers do not depend on it.
        logprobs: Whether to return the log-probabilities of the tokens, as OpenAI's models do. With None, they are
            returned only to gates, which request them for drafts and with ``answer_first=True``.
        layers: Layers whose hidden states are kept during generation, from 0 to the number of layers; by
            default those that ``rgate train`` reads. ``()`` keeps none.
    """

    temperature: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    max_tokens: int | None = Field(default=512, ge=1)
    stop: Annotated[tuple[str, ...], _ONE_OR_SEVERAL] = ()
    seed: int | None = None
    logprobs: bool | None = None
    layers: tuple[int, ...] | None = None

    def for_call(self, call: Mapping[str, Any]) -> GenerationOptions:
        """Return these options, overridden by those of one call.

        Raises:
            ConfigurationError: An option is unknown.
            pydantic.ValidationError: An option has an invalid value.
        """
        options = {name: getattr(self, name) for name in GenerationOptions.model_fields}
        unknown = call.keys() - options.keys()
        if unknown:
            raise ConfigurationError(
                f"{type(self).__name__} got an unexpected keyword argument {min(unknown)!r}.",
                hint=f"It accepts {', '.join(options)}.",
            )
        return GenerationOptions(**{**options, **call})


class GeneratedToken(NamedTuple):
    """A token of an answer.

    Attributes:
        text: The text that it adds; empty if its last character is still incomplete.
        logprob: Its log-probability, <= 0.
    """

    text: str
    logprob: float


class TextChunk(NamedTuple):
    """A part of an answer: its text, and the tokens generated for it.

    The tokens may include text that is held back, or a stop sequence; the text leaves both out.
    """

    text: str
    tokens: tuple[GeneratedToken, ...]


class StreamedAnswer:
    """An answer that is generated lazily, as its chunks are read.

    Other callers may use the model between two tokens. An abandoned answer need not be closed.

    Args:
        use_model: Function that returns a context manager, inside which the calling thread holds the model.
        prompt: Token ids of the prompt.
        options: Options of the generation.
        layers: Layers whose hidden states are kept.

    Attributes:
        id: Id of the response, by which `find_answer` finds it if ``layers`` is not empty.
        encoder: The model's prompt encoder.
        text: The text so far.
        ids: The token ids so far, including those of a stop sequence.
        finish_reason: ``"stop"`` if the model or a stop sequence ended it, ``"length"`` if it was cut off, None if it
            has not ended.
        fingerprint: Fingerprint of the model.

    Raises:
        ConfigurationError: The prompt fills the model's context, or a layer does not exist.
    """

    def __init__(
        self,
        use_model: Callable[[], AbstractContextManager[ModelRunner]],
        prompt: Sequence[int],
        options: GenerationOptions,
        layers: Sequence[int],
    ) -> None:
        # Random, so that no client can guess the id of another answer.
        self.id = f"rgate-{uuid.uuid4().hex}"
        self.prompt = tuple(prompt)
        self.options = options
        self.layers = tuple(layers)
        self.text = ""
        self.ids: list[int] = []
        self.finish_reason: Literal["stop", "length"] | None = None
        self._use_model = use_model
        self._ahead: NextTokens | None = None  # already computed, but not yet part of the answer
        self._states: dict[int, list[torch.Tensor]] = {layer: [] for layer in self.layers}
        with use_model() as runner:
            room = runner.context_size - len(prompt)
            if room < 1:
                raise ConfigurationError(
                    f"The prompt has {len(prompt)} tokens, and the model's context holds "
                    f"{runner.context_size}: there is no room for an answer.",
                    hint="Use fewer passages or fewer earlier turns.",
                )
            if not all(0 <= layer <= runner.num_layers for layer in self.layers):
                raise ConfigurationError(
                    f"layers must be between 0 and {runner.num_layers}, not {self.layers}."
                )
            self.fingerprint = runner.fingerprint
            self.encoder = runner.encoder
            self._limit = min(options.max_tokens or room, room)
            seed = secrets.randbits(32) if options.seed is None else options.seed
            # This answer has its own key-value cache, so other callers may use the model between two tokens.
            self._steps = runner.steps([self.prompt], options.temperature, [seed], states=bool(self.layers))
        if self.layers:
            _live[self.id] = self

    def chunks(self) -> Iterator[TextChunk]:
        """Yield the answer as it is generated, holding back characters that may begin a stop sequence.

        The last chunk comes after the answer has ended, and may be empty.
        """
        sent = 0
        tokens: list[GeneratedToken] = []
        stops = [stop for stop in self.options.stop if stop]
        # All of a stop sequence but its last character may already be at the end of the text.
        held_back = max(map(len, stops), default=1) - 1
        for token in iter(self._next, None):
            tokens.append(token)
            matches = [self.text.find(stop) for stop in stops if stop in self.text]
            if matches:
                self.finish_reason = "stop"
                self.text = self.text[: min(matches)]
                break
            safe = len(self.text) - held_back
            if safe > sent:
                yield TextChunk(self.text[sent:safe], tuple(tokens))
                sent, tokens = safe, []
        yield TextChunk(self.text[sent:], tuple(tokens))

    def states(self, question: range, layers: Sequence[PooledLayer], tokens: int) -> Float32Array:
        """Return the pooled states of the prompt and the answer's first tokens, shape (layers, hidden size).

        Args:
            question: Positions of the question in the prompt.
            layers: The states to return, of the layers that are kept.
            tokens: Number of the answer's tokens to include; they must have been generated.
        """
        import torch

        from rgate_integrations.models.model_runner import pool_tensors

        with self._use_model():
            # A token is read only when the next one is chosen, so choose the next one now, but only once.
            self._ahead = self._ahead or self._step()
            length = len(self.prompt) + tokens
            states = {layer: torch.cat(parts)[:length].float() for layer, parts in self._states.items()}
            return pool_tensors(states, question, len(self.prompt), tokens, layers)

    def _step(self) -> NextTokens:
        """Compute the next token, and keep the states of this step."""
        step = next(self._steps)
        for layer, parts in self._states.items():
            parts.append(step.states[layer][0])
        return step

    def _next(self) -> GeneratedToken | None:
        """Generate a token; None at the end of the answer."""
        # Hold the model for one token at a time, so that concurrent answers take turns.
        with self._use_model() as runner:
            if len(self.ids) >= self._limit:
                self.finish_reason = "length"
                return None
            step = self._ahead or self._step()
            self._ahead = None
            (token,) = step.ids
            if runner.ends(token):
                self.finish_reason = "stop"
                return None
            self.ids.append(token)
            added = runner.encoder.added_text(self.ids, self.text, is_last=len(self.ids) == self._limit)
            self.text += added
            return GeneratedToken(added, step.logprobs[0])


# Weak references, so that an answer and its states live only as long as its stream or its judgment.
_live: WeakValueDictionary[str, StreamedAnswer] = WeakValueDictionary()


def find_answer(response_id: str) -> StreamedAnswer | None:
    """Return the local answer with that id; None if it keeps no states, is no longer in use, or is remote."""
    return _live.get(response_id)


def recall_states(
    draft: Draft, fingerprint: str, prompt: PromptTemplate, values: Values, layers: Sequence[PooledLayer]
) -> Float32Array | None:
    """Return the states that a local LLM kept while it wrote a draft, pooled to shape (layers, hidden size).

    Args:
        draft: The beginning of the LLM's answer.
        fingerprint: Fingerprint of the model whose states are needed.
        prompt: The prompt whose states are needed.
        values: The template's fields.
        layers: The states to return.

    Returns:
        The pooled states. None if the answer is no longer in use, was written by another model or for another
        prompt, or kept no states of one of the layers. Also None if the draft has no tokens, or more than the answer
        has so far.
    """
    answer = find_answer(draft.response_id)
    if answer is None or answer.fingerprint != fingerprint:
        return None
    # The gate's prompt must equal the LLM's, token by token, because states depend on everything before them.
    row = answer.encoder.encode(prompt, values)
    is_written = 0 < len(draft.tokens) <= len(answer.ids)
    if not is_written or answer.prompt != row.ids or not set(layer_numbers(layers)) <= set(answer.layers):
        return None
    return answer.states(row.question, layers, len(draft.tokens))
