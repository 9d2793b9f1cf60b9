"""One answer of a local model, written token by token as it is asked for; a gate can use the states that it keeps.

torch is imported by what needs it, so that adapters can be imported without.
"""

from __future__ import annotations

import secrets
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple
from weakref import WeakValueDictionary

from pydantic import BaseModel, BeforeValidator, Field

from rgate_integrations.decision import Draft
from rgate_integrations.errors import ConfigurationError
from rgate_integrations.models.base import Values
from rgate_integrations.models.pooling import PooledLayer, layer_numbers
from rgate_integrations.prompts import PromptTemplate
from rgate_integrations.runtime.arrays import Float32Array

if TYPE_CHECKING:
    import torch

    from rgate_integrations.models.model_runner import ModelRunner, NextTokens


_ONE_OR_SEVERAL = BeforeValidator(lambda stop: (stop,) if isinstance(stop, str) else stop or ())


class GenerationOptions(BaseModel):
    """How an answer is written. A chat model or LLM that runs here has these fields, too.

    Attributes:
        temperature: 0 is greedy; above that, tokens are drawn.
        max_tokens: Maximum number of tokens of an answer; None is as many as the model's context holds.
        stop: Texts that end an answer, and are no part of it.
        seed: Of the draw; None draws another answer each time.
        logprobs: Whether the log-probabilities of its tokens are given, as OpenAI's models do. Answer first asks for
            them if it is None.
        layers: Layers whose hidden states are kept while an answer is written; by default those that ``rgate train``
            reads. ``()`` keeps none.
    """

    temperature: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    max_tokens: int | None = Field(default=512, ge=1)
    stop: Annotated[tuple[str, ...], _ONE_OR_SEVERAL] = ()
    seed: int | None = None
    logprobs: bool | None = None
    layers: tuple[int, ...] | None = None

    def for_call(self, call: Mapping[str, Any]) -> GenerationOptions:
        """Return the options of one call: what it gives, and these for the rest.

        Raises:
            ConfigurationError: There is no such option.
        """
        own = self.model_dump(include=set(GenerationOptions.model_fields))
        unknown = call.keys() - own.keys()
        if unknown:
            raise ConfigurationError(
                f"{type(self).__name__} got an unexpected keyword argument {min(unknown)!r}.",
                hint=f"It takes {', '.join(own)}.",
            )
        return GenerationOptions(**{**own, **call})


class GeneratedToken(NamedTuple):
    """A token of an answer.

    Attributes:
        text: The text that it adds; empty where a character is not complete yet.
        logprob: Its log-probability, <= 0.
    """

    text: str
    logprob: float


class TextChunk(NamedTuple):
    """A part of an answer: its text, without a stop sequence, and the tokens that were written for it."""

    text: str
    tokens: tuple[GeneratedToken, ...]


class StreamedAnswer:
    """An answer that is written as its chunks are asked for. Nothing is computed ahead, and no token twice.

    The model is free between two tokens, and nobody has to end an answer that is not wanted any more.

    Args:
        use_model: Gives the model to the thread that calls it, for a short time.
        prompt: Token ids of what is answered.
        options: How.
        layers: Layers whose hidden states are kept.

    Attributes:
        id: Id of the response, under which `find_answer` finds it.
        encoder: Makes the model's token ids.
        text: The text written so far.
        ids: Its token ids.
        finish_reason: Why it ended: by itself or at a stop sequence, or because it was long enough; None before.
        fingerprint: Of the model.

    Raises:
        ConfigurationError: The prompt fills the model's context, or there is no such layer.
    """

    def __init__(
        self,
        use_model: Callable[[], AbstractContextManager[ModelRunner]],
        prompt: Sequence[int],
        options: GenerationOptions,
        layers: Sequence[int],
    ) -> None:
        self.id = f"rgate-{uuid.uuid4().hex}"
        self.prompt = tuple(prompt)
        self.options = options
        self.layers = tuple(layers)
        self.text = ""
        self.ids: list[int] = []
        self.finish_reason: Literal["stop", "length"] | None = None
        self._use_model = use_model
        self._ahead: NextTokens | None = None  # computed, and not yet taken
        self._states: dict[int, list[torch.Tensor]] = {layer: [] for layer in self.layers}
        with use_model() as runner:
            room = runner.context_size - len(prompt)
            if room < 1:
                raise ConfigurationError(
                    f"The prompt has {len(prompt)} tokens, and the model's context holds {runner.context_size}.",
                    hint="Ask with less text: fewer passages, or fewer earlier turns.",
                )
            if not all(0 <= layer <= runner.num_layers for layer in self.layers):
                raise ConfigurationError(f"The model has {runner.num_layers} layers, not {self.layers}.")
            self.fingerprint = runner.fingerprint
            self.encoder = runner.encoder
            self._limit = min(options.max_tokens or room, room)
            seed = secrets.randbits(32) if options.seed is None else options.seed
            # Its keys and values are this answer's own, so others may use the model between two tokens.
            self._steps = runner.steps([self.prompt], options.temperature, [seed], states=bool(self.layers))
        if self.layers:
            _live[self.id] = self

    def chunks(self) -> Iterator[TextChunk]:
        """Yield the answer as it comes; what may be the beginning of a stop sequence is held back.

        The last chunk comes when the answer has ended, and may be empty.
        """
        given = 0
        tokens: list[GeneratedToken] = []
        stop = [each for each in self.options.stop if each]
        held_back = max(map(len, stop), default=1) - 1
        for token in iter(self._next, None):
            tokens.append(token)
            found = [self.text.find(each) for each in stop if each in self.text]
            if found:
                self.finish_reason = "stop"
                self.text = self.text[: min(found)]
                break
            safe = len(self.text) - held_back
            if safe > given:
                yield TextChunk(self.text[given:safe], tuple(tokens))
                given = safe
                tokens = []
        yield TextChunk(self.text[given:], tuple(tokens))

    def states(self, question: range, layers: Sequence[PooledLayer], tokens: int) -> Float32Array:
        """Pool what was kept of the prompt and the first tokens, to shape (layers, hidden size).

        Args:
            question: Positions of the question in the prompt.
            layers: Which states; those of their layers are kept.
            tokens: How many tokens of the answer, at most as many as are written.
        """
        import torch

        from rgate_integrations.models.model_runner import pool_tensors

        with self._use_model():
            # The last token is read only when the next one is chosen. So that one is chosen now, and not again then.
            self._ahead = self._ahead or self._step()
            length = len(self.prompt) + tokens
            kept = {layer: torch.cat(parts)[:length].float() for layer, parts in self._states.items()}
            return pool_tensors(kept, question, len(self.prompt), tokens, layers)

    def _step(self) -> NextTokens:
        """Compute another token, and keep the states of what is read for it."""
        step = next(self._steps)
        for layer, kept in self._states.items():
            kept.append(step.states[layer][0])
        return step

    def _next(self) -> GeneratedToken | None:
        """Write a token; None at the end of the answer."""
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
            is_last = len(self.ids) == self._limit
            added = runner.encoder.added_text(self.ids, self.text, is_last=is_last)
            self.text += added
            return GeneratedToken(added, step.logprobs[0])


# Weak: an answer is found while it is being written or judged.
_live: WeakValueDictionary[str, StreamedAnswer] = WeakValueDictionary()


def find_answer(response_id: str) -> StreamedAnswer | None:
    """Return the local answer with that id; None for those of other LLMs, and once it is written and judged."""
    return _live.get(response_id)


def recall_states(
    draft: Draft, fingerprint: str, prompt: PromptTemplate, values: Values, layers: Sequence[PooledLayer]
) -> Float32Array | None:
    """Return states that a local LLM kept while it wrote a draft, shape (layers, hidden size).

    Args:
        draft: The beginning of its answer.
        fingerprint: The model whose states are wanted.
        prompt: The prompt that they are wanted under.
        values: The template's fields.
        layers: Which states.

    Returns:
        The states; None if it kept none, or those of another model, prompt or layer.
    """
    answer = find_answer(draft.response_id)
    if answer is None or answer.fingerprint != fingerprint:
        return None
    row = answer.encoder.encode(prompt, values)
    is_written = 0 < len(draft.tokens) <= len(answer.ids)
    if not is_written or answer.prompt != row.ids or not set(layer_numbers(layers)) <= set(answer.layers):
        return None
    return answer.states(row.question, layers, len(draft.tokens))
