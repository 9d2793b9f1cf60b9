"""What a model returns for a prompt: drafts, hidden states, scores of continuations, completions and samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, TypeAlias

from rgate_integrations.decision import MAX_TOKEN_CHARACTERS, Cost, Draft, DraftSource, Request
from rgate_integrations.errors import EvidenceError
from rgate_integrations.gates.evidence.base import Context, EvidenceSpec, Piece, expand_specs
from rgate_integrations.models.base import PooledLayer, RequestLayers
from rgate_integrations.models.encoder import ENCODER
from rgate_integrations.models.proxies import language_model, read_states, state_reader
from rgate_integrations.prompts import ANSWER, SHORT_ANSWER, PromptTemplate
from rgate_integrations.runtime.arrays import Float32Array
from rgate_integrations.runtime.closings import shorten_turn
from rgate_integrations.runtime.quotations import leave_out, split_quotation
from rgate_integrations.runtime.segments import (
    Segmented,
    count_words,
    layout,
    outside_code,
    split_joined,
    user_turns,
)

Scope: TypeAlias = Literal[
    "conversation", "message", "before", "parts", "quotation", "about quotation", "rest"
]


@dataclass(frozen=True)
class DraftSpec(EvidenceSpec[Draft]):
    """Evidence: the first tokens of an answer.

    A draft from the caller is used whatever the source. Drafts of more than ``tokens`` tokens are cut.

    Attributes:
        tokens: Maximum number of tokens, at least 1.
        source: Who writes it if the caller gives none: ``"proxy"``, a small model, or ``"llm"``, the answering LLM.
            With ``"recorded"``, a request without a draft fails.
        prompt: The proxy's prompt; unused for other sources.
        model: Name of the proxy model that writes the draft if ``source`` is ``"proxy"``; its tokenizer also cuts the
            caller's text to ``tokens``. Empty for the gate's own.
    """

    reads_draft: ClassVar[bool] = True

    tokens: int = 32
    source: DraftSource = "proxy"
    prompt: PromptTemplate = ANSWER
    model: str = ""

    def compute(self, context: Context) -> list[Piece[Draft]]:
        """Return the caller's draft or a new one for each request."""
        unwritten = [evidence for evidence in context.evidence if evidence.request.draft is None]
        written = iter(self._write(replace(context, evidence=unwritten)) if unwritten else ())
        pieces = []
        for request in context.requests:
            if request.draft is None:
                draft = next(written)  # an LLM may write more than requested
                pieces.append(Piece(draft.head(self.tokens), generation_cost(draft)))
            else:
                pieces.append(Piece(self._cut(request.draft, context).head(self.tokens)))
        return pieces

    def _cut(self, draft: Draft, context: Context) -> Draft:
        """Return a caller's draft. If it is only a text, cut it to ``tokens`` tokens of the proxy, as in training."""
        # For a text of at most `tokens` characters, it is not worth loading a tokenizer.
        if not draft.tokens and draft.logprobs is None and len(draft.text) > self.tokens:
            # Only a part, because tokenizing a book takes minutes.
            part = draft.text[: self.tokens * MAX_TOKEN_CHARACTERS]
            text = context.sources.proxy(self.model).truncate(part, self.tokens) or part
            if text != draft.text:
                draft = draft.model_copy(update={"text": text.strip(), "finished": False})
        return draft

    def _write(self, context: Context) -> Sequence[Draft]:
        if self.source == "proxy":
            return language_model(context.use_proxy(self.model)).generate(
                self.prompt, prompt_values(context), tokens=self.tokens
            )
        if self.source == "recorded":
            raise EvidenceError(
                "This gate judges recorded drafts, but the request has no draft.",
                hint="Pass the beginning of an answer: Request(question, draft=...). For rgate evaluate and "
                "calibrate, use --draft recorded.",
            )
        if context.sources.llm is None:
            raise EvidenceError(
                "This gate judges the beginning of the LLM's answer, but it has neither an LLM nor a draft.",
                hint="Load it with load_gate(..., llm=...), or pass Request(question, draft=...). For rgate evaluate "
                "and calibrate, use --draft recorded.",
            )
        drafts = context.sources.llm.draft([request.question for request in context.requests], self.tokens)
        if len(drafts) != len(context.requests):
            raise EvidenceError(
                f"llm.draft() returned {len(drafts)} drafts for {len(context.requests)} questions.",
                hint="It must return one draft per question.",
            )
        return [draft.model_copy(update={"source": "llm"}) for draft in drafts]


def generation_cost(draft: Draft) -> Cost:
    """Return the cost of a text that was generated for a question."""
    written = len(draft.tokens) or count_words(draft.text)  # some LLMs report no tokens
    return Cost(model_calls=1, tokens_in=draft.prompt_tokens, tokens_out=written + draft.thinking_tokens)


def prompt_values(context: Context, draft: DraftSpec | None = None) -> list[dict[str, str]]:
    """Return the values of a prompt's fields for each question, with its draft if ``draft`` is given."""
    questions = [request.question for request in context.requests]
    if draft is None:
        return [{"question": question} for question in questions]
    pairs = zip(questions, context.get(draft), strict=True)
    return [{"question": question, "draft": answer.text} for question, answer in pairs]


@dataclass(frozen=True)
class HiddenSpec(EvidenceSpec[Float32Array]):
    """Evidence: pooled hidden states of a question, or of a question and its draft, shape (layers, hidden size).

    Attributes:
        layers: The states to read, as (layer, span, pooling); layer 0 is the embedding, the last is the output.
        draft: The draft to read as the assistant's turn, or None for the question alone.
        prompt: The prompt around the question.
        model: Name of the proxy model that reads; empty for the gate's own.
    """

    layers: tuple[PooledLayer, ...]
    draft: DraftSpec | None = None
    prompt: PromptTemplate = ANSWER
    model: str = ""

    def compute(self, context: Context) -> list[Piece[Float32Array]]:
        """Return the states of each question, read with its draft if any."""
        drafts = None if self.draft is None else context.get(self.draft)
        states = read_states(
            context.use_proxy(self.model), self.prompt, prompt_values(context), drafts, self.layers
        )
        return [Piece(pooled.states, _reading_cost(pooled.prompt_tokens)) for pooled in states]


@dataclass(frozen=True)
class ReadRequest:
    """Pooled hidden states of a request and of its segments.

    Attributes:
        texts: The segments (sentences or lines), in order.
        whole: States of the request, shape (layers, hidden size).
        segments: States of each segment, shape (segments, layers, hidden size).
        layout: Position and form of each segment, shape (segments, 11); see
            `rgate_integrations.runtime.segments.layout`.
        in_context: Whether the request has several segments or earlier turns.
    """

    texts: tuple[str, ...]
    whole: Float32Array = field(repr=False)
    segments: Float32Array = field(repr=False)
    layout: Float32Array = field(repr=False)
    in_context: bool


@dataclass(frozen=True)
class RequestSpec(EvidenceSpec[ReadRequest]):
    """Evidence: pooled hidden states of a request and of its segments, read in one pass if the model can.

    Runs of spaces count as one space.

    Attributes:
        whole: The request's states to read, as (layer, span, pooling); layer 0 is the embedding.
        segments: The same for each segment; the span is ``"question"``.
        in_context: More states to read for each segment if the request has several segments or earlier turns; they
            follow those of `segments`.
        model: Name of the proxy model that reads; empty for the gate's own.
        scope: What to read: the message in its ``"conversation"``, the ``"message"`` without its earlier turns, what
            the user said ``"before"`` it, in the conversation up to there, or the ``"parts"`` of the message in its
            conversation: what is outside code, or the requests that a line joins. Of a request that quotes a text,
            the ``"quotation"``, or what it says ``"about quotation"`` (see `split_quotation`). Or the ``"rest"`` of
            the message (see `leave_out`).
        left_out: Indices of the segments that the ``"rest"`` leaves out.
    """

    reads_history: ClassVar[bool] = True
    prompt: ClassVar[PromptTemplate] = ANSWER

    whole: tuple[PooledLayer, ...]
    segments: tuple[PooledLayer, ...] = ()
    in_context: tuple[PooledLayer, ...] = ()
    model: str = ""
    scope: Scope = "conversation"
    left_out: tuple[int, ...] = ()

    def compute(self, context: Context) -> list[Piece[ReadRequest]]:
        """Return the states of each request; requests that need the same layers are read in one batch.

        Raises:
            StopIteration: The user said nothing before.
        """
        texts = [self._in_scope(request) for request in context.requests]
        requests = [Segmented.from_text(text, list(map(shorten_turn, turns))) for text, turns in texts]
        groups: dict[RequestLayers, list[Segmented]] = {}
        for request in requests:
            groups.setdefault(self._layers(request), []).append(request)
        pooled = {}
        for layers, group in groups.items():
            model = state_reader(context.use_proxy(self.model), self.prompt, layers.every)
            pooled[layers] = iter(model.request_states(self.prompt, group, layers))
        pieces = []
        for (text, _), request in zip(texts, requests, strict=True):
            states = next(pooled[self._layers(request)])
            value = ReadRequest(
                request.segments,
                states.whole,
                states.segments,
                layout(text),
                in_context=not request.stands_alone,
            )
            pieces.append(Piece(value, _reading_cost(states.prompt_tokens)))
        return pieces

    def _in_scope(self, request: Request) -> tuple[str, Sequence[str]]:
        """Return the text to read, and the turns before it."""
        if self.scope == "before":
            return next(user_turns(request.history))
        if self.scope == "parts":
            return outside_code(request.question) or split_joined(request.question), request.history
        if self.scope == "rest":
            return leave_out(request.question, self.left_out), ()
        if self.scope in ("quotation", "about quotation"):
            quotation = split_quotation(request.question)
            return (quotation.text if self.scope == "quotation" else quotation.about), ()
        return request.question, request.history if self.scope == "conversation" else ()

    def _layers(self, request: Segmented) -> RequestLayers:
        # Most requests are a single segment, which needs fewer layers and so less time.
        in_context = () if request.stands_alone else self.in_context
        return RequestLayers(self.whole, (*self.segments, *in_context))


def encoder_passes(specs: Sequence[EvidenceSpec[Any]]) -> list[RequestSpec]:
    """Return the passes of the encoder among these specs and all that they need."""
    return [spec for spec in expand_specs(specs) if isinstance(spec, RequestSpec) and spec.model == ENCODER]


def encoder_pass(
    specs: Sequence[EvidenceSpec[Any]], whole: tuple[PooledLayer, ...], segments: tuple[PooledLayer, ...]
) -> RequestSpec:
    """Return the first of the `encoder_passes` that pools these layers; without one, a new pass."""
    for spec in encoder_passes(specs):
        if {*whole} <= {*spec.whole} and {*segments} <= {*spec.segments}:
            return spec
    return RequestSpec(whole, segments, model=ENCODER)


def _reading_cost(prompt_tokens: int) -> Cost:
    """Return the cost of one pass over a prompt, or no cost for 0 tokens.

    With 0 tokens, nothing was read, because the answering LLM had kept the states since it wrote the draft.
    """
    return Cost(model_calls=int(prompt_tokens > 0), tokens_in=prompt_tokens)


@dataclass(frozen=True)
class TargetsSpec(EvidenceSpec[tuple[float, ...]]):
    """Evidence: the log-probabilities of some continuations of a prompt, in their order.

    Attributes:
        prompt: The prompt; its fields are ``question`` and, if ``draft`` is given, ``draft``.
        targets: The continuations. A local model scores each as a whole token sequence; on a server, only the first
            token in which they differ is scored.
        draft: The draft that the prompt quotes, or None.
        adapter: Folder or Hub id of a LoRA adapter of the proxy, or its name on the server; None for the base model.
    """

    prompt: PromptTemplate
    targets: tuple[str, ...]
    draft: DraftSpec | None = None
    adapter: str | None = None

    def compute(self, context: Context) -> list[Piece[tuple[float, ...]]]:
        """Return the targets' log-probabilities after each question's prompt."""
        values = prompt_values(context, self.draft)
        scores = language_model(context.use_proxy()).score(
            self.prompt, values, self.targets, adapter=self.adapter
        )
        return [Piece(score.logprobs, Cost(model_calls=1, tokens_in=score.prompt_tokens)) for score in scores]


@dataclass(frozen=True)
class CompletionSpec(EvidenceSpec[Draft]):
    """Evidence: a short greedy completion of a prompt.

    Attributes:
        prompt: The prompt; its fields are ``question`` and, if ``draft`` is given, ``draft``.
        tokens: Maximum number of tokens.
        draft: The draft that the prompt quotes, or None.
        adapter: Folder or Hub id of a LoRA adapter of the proxy, or its name on the server; None for the base model.
    """

    prompt: PromptTemplate
    tokens: int = 16
    draft: DraftSpec | None = None
    adapter: str | None = None

    def compute(self, context: Context) -> list[Piece[Draft]]:
        """Return the completion of each question's prompt."""
        values = prompt_values(context, self.draft)
        written = language_model(context.use_proxy()).generate(
            self.prompt, values, tokens=self.tokens, adapter=self.adapter
        )
        return [Piece(draft, generation_cost(draft)) for draft in written]


@dataclass(frozen=True)
class SamplesSpec(EvidenceSpec[tuple[Draft, ...]]):
    """Evidence: several sampled answers to each question.

    Attributes:
        n: Number of samples per question.
        temperature: Sampling temperature, > 0.
        tokens: Maximum number of tokens of a sample.
        seed: Seed; the samples depend on it and on the question, not on the batch. A server may ignore it.
    """

    prompt: ClassVar[PromptTemplate] = SHORT_ANSWER

    n: int = 10
    temperature: float = 1.0
    tokens: int = 32
    seed: int = 0

    def compute(self, context: Context) -> list[Piece[tuple[Draft, ...]]]:
        """Return the sampled answers to each question."""
        sampled = language_model(context.use_proxy()).sample(
            self.prompt,
            prompt_values(context),
            n=self.n,
            tokens=self.tokens,
            temperature=self.temperature,
            seed=self.seed,
        )
        return [Piece(answers, sum(map(generation_cost, answers), Cost())) for answers in sampled]
