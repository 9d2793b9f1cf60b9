"""The encoder as a proxy, with which the shipped gates read requests in a hundred languages."""

from __future__ import annotations

from collections.abc import Sequence

from rgate_integrations.decision import Draft
from rgate_integrations.errors import EvidenceError
from rgate_integrations.models.base import HasStates, HiddenStates, RequestStates, Values
from rgate_integrations.models.download import fetch_path
from rgate_integrations.models.encoder import (
    ALL_LAYERS,
    ENCODER,
    FINGERPRINT,
    STATES,
    Encoder,
)
from rgate_integrations.models.encoder_file import LAYERS, adapter_digest
from rgate_integrations.models.pooling import PooledLayer, RequestLayers, layer_numbers
from rgate_integrations.prompts import PromptTemplate
from rgate_integrations.runtime.arrays import Float32Array
from rgate_integrations.runtime.segments import Range, Segmented, join_segments

_MAX_HISTORY = 768  # tokens of the earlier turns; of a longer history, only the end is read


class EncoderProxy(HasStates):
    """multilingual-e5-small for gates: an `Encoder` that is loaded on first use.

    It reads requests without a prompt. It can read neither drafts nor partial answers, and cannot write or
    score text.
    """

    name = ENCODER
    num_layers = LAYERS
    question_layers = STATES

    @property
    def fingerprint(self) -> str:
        """Text that identifies the weights and the adapted layers: a hash of each, joined by a hyphen."""
        return f"{FINGERPRINT}-{adapter_digest()}"

    @property
    def encoder(self) -> Encoder:
        """The encoder, shared in the process.

        Raises:
            ModelLoadError: It is missing while downloads are forbidden, or it cannot be loaded.
            DownloadError: It is missing, and could not be downloaded.
            ConfigurationError: The user has no home folder; see `rgate_integrations.models.download.cache_dir`.
        """
        return Encoder.shared(fetch_path(ENCODER, "gate's model"))

    def hidden(
        self,
        prompt: PromptTemplate,
        values: Sequence[Values],
        drafts: Sequence[Draft] | None,
        layers: Sequence[PooledLayer],
    ) -> list[HiddenStates]:
        """Return pooled hidden states of questions; see `HasStates.hidden`.

        Raises:
            EvidenceError: ``drafts`` is not None, a layer is not between 1 and 16, or something other than a
                mean over the question is requested.
        """
        if drafts is not None:
            raise EvidenceError(
                f"{ENCODER} reads questions, but not drafts or partial answers.",
                hint="Use a proxy that reads them, such as proxy='smollm2-135m-instruct' (--proxy).",
            )
        numbers = _check_layers(layers)
        questions = [" ".join(fields["question"].split()) for fields in values]
        encoded = self.encoder.encode(questions, layers=numbers)
        return [HiddenStates(_select(text.whole, layers, numbers), text.prompt_tokens) for text in encoded]

    def request_states(
        self, prompt: PromptTemplate, texts: Sequence[Segmented], layers: RequestLayers
    ) -> list[RequestStates]:
        """Return pooled states of requests and of their segments, from a single pass; see `HasStates.request_states`.

        Raises:
            EvidenceError: A layer is not between 1 and 16, or something other than a mean over the question is
                requested.
        """
        numbers = _check_layers(layers.every)
        inputs = [self.join(text) for text in texts]
        encodings = self.encoder.encode(*zip(*inputs, strict=True), layers=numbers) if texts else []
        results = []
        for text, encoded in zip(texts, encodings, strict=True):
            whole, segments = encoded.whole, encoded.segments
            if len(segments) > len(text.segments):
                whole, segments = segments[0], segments[1:]
            states = RequestStates(
                _select(whole, layers.whole, numbers),
                _select(segments, layers.segments, numbers),
                encoded.prompt_tokens,
            )
            results.append(states)
        return results

    def join(self, text: Segmented) -> tuple[str, list[Range]]:
        """Return one text (the end of the history, then the request) and the ranges of characters to pool.

        The ranges are those of the request's segments. If there is a history, the range of the whole request comes
        before them. The history itself is not pooled: it only contributes through attention.
        """
        history = self.encoder.keep_end(text.history, _MAX_HISTORY)
        request, ranges = join_segments(text.lines)
        every = [(0, len(request)), *ranges] if history else ranges
        return history + request, [(len(history) + begin, len(history) + end) for begin, end in every]

    def truncate(self, text: str, tokens: int) -> str | None:
        """Return a text cut to its first ``tokens`` tokens; None if it is no longer than that."""
        return self.encoder.truncate(text, tokens)


def _check_layers(layers: Sequence[PooledLayer]) -> list[int]:
    """Return the numbers of the layers to pool, ascending.

    Raises:
        EvidenceError: A layer is not between 1 and 16, or something other than a mean over the question is
            requested.
    """
    for layer, span, pooling in layers:
        if not 0 < layer <= ALL_LAYERS or (span, pooling) != ("question", "mean"):
            raise EvidenceError(
                f"This gate cannot use the proxy {ENCODER}: it needs layer {layer} with span {span!r} and pooling "
                f"{pooling!r}, but this proxy has only layers 1 to {ALL_LAYERS}, averaged over the question.",
                hint="Use the model that the gate was made for, such as proxy='smollm2-135m-instruct'.",
            )
    return layer_numbers(layers)


def _select(pooled: Float32Array, layers: Sequence[PooledLayer], numbers: Sequence[int]) -> Float32Array:
    """Return the states of the requested layers, shape (..., layers, 384).

    Args:
        pooled: The states of all layers that were read, shape (..., numbers, 384).
        layers: The requested layers, in the order to return.
        numbers: Numbers of the layers in ``pooled``, in order.
    """
    return pooled[..., [numbers.index(layer) for layer, _, _ in layers], :]
