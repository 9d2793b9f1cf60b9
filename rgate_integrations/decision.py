"""`Request` (what a gate decides about), `Decision` (the result), and their parts; all are immutable."""

from __future__ import annotations

import math
import reprlib
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from numbers import Integral, Real
from typing import Annotated, Any, Literal, TypedDict, TypeVar, Unpack

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

from rgate_integrations.errors import ConfigurationError, EvidenceError, InvalidQuestionError, limit_hint
from rgate_integrations.runtime import replies
from rgate_integrations.runtime.records import check_logprob
from rgate_integrations.runtime.segments import label_turns
from rgate_integrations.runtime.text import encodable, tidy

_T = TypeVar("_T")


def valid_threshold(threshold: object) -> float:
    """Return a threshold as a float; raise a `ConfigurationError` unless it is finite and at least 0."""
    number = to_float(threshold)
    if number is None or not 0 <= number < math.inf:
        # Abbreviated, because a server's client may send a long text.
        raise ConfigurationError(
            f"A threshold must be a finite number of at least 0, not {reprlib.repr(threshold)}."
        )
    return number


def valid_timeout(timeout: object) -> float | None:
    """Return a timeout in seconds as a float, lowered to `threading.TIMEOUT_MAX` if it is larger; None stays None.

    Raises:
        ConfigurationError: It is neither None nor a number above 0.
    """
    number = math.inf if timeout is None else to_float(timeout)
    if number is None or not number > 0:  # also rejects NaN
        raise ConfigurationError(
            f"A timeout must be a number of seconds above 0, not {reprlib.repr(timeout)}."
        )
    return None if timeout is None else min(number, threading.TIMEOUT_MAX)


def valid_count(count: object, name: str, *, least: int = 1, most: float = math.inf) -> int:
    """Return a count as an int; raise a `ConfigurationError` unless it is whole and from ``least`` to ``most``."""
    if not isinstance(count, Integral) or isinstance(count, bool) or not least <= int(count) <= most:
        bounds = f"of at least {least}" if most == math.inf else f"from {least} to {most:,}"
        raise ConfigurationError(f"{name} must be a whole number {bounds}, not {count!r}.")
    return int(count)


def valid_flag(value: object, name: str) -> bool:
    """Return the value of an option that is on or off; raise a `ConfigurationError` unless it is True or False."""
    if not isinstance(value, bool):
        raise ConfigurationError(f"{name} must be True or False, not {value!r}.")
    return value


def valid_choice(value: _T, name: str, choices: Sequence[str]) -> _T:
    """Return the value of an option; raise a `ConfigurationError` unless it is one of the choices."""
    if value not in choices:
        raise ConfigurationError(f"{name} cannot be {value!r}.", hint=f"Choose one of {', '.join(choices)}.")
    return value


def to_float(value: object) -> float | None:
    """Return a number as a float; None for booleans, other types and numbers too large for a float."""
    with suppress(OverflowError):
        return float(value) if isinstance(value, Real) and not isinstance(value, bool) else None
    return None


DraftSource = Literal["proxy", "llm", "recorded"]
Outcome = Literal["direct", "retrieve", "abstain"]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Probability = Annotated[float, Field(ge=0.0, le=1.0, allow_inf_nan=False)]
Threshold = Annotated[float, BeforeValidator(valid_threshold), Field(ge=0.0)]
# Text from any source. Lone surrogates are replaced first, because pydantic rejects them in subclasses of str, which
# frameworks use.
Text = Annotated[str, BeforeValidator(lambda value: encodable(value) if isinstance(value, str) else value)]
_LogProbs = Annotated[tuple[Annotated[float, AfterValidator(check_logprob)], ...], Field(fail_fast=True)]
MAX_TOKEN_CHARACTERS = 32
"""`Draft.head` keeps at most this many characters per token: some servers return a whole text as one token."""


class Options(BaseModel):
    """Base class of models whose numbers cannot be True or False, which pydantic would read as 1 and 0."""

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_booleans(cls, value: Any, info: ValidationInfo) -> Any:
        annotation = cls.model_fields[str(info.field_name)].annotation
        if isinstance(value, bool) and annotation in (int, float, int | None, float | None):
            raise ConfigurationError(f"{info.field_name} must be a number, not {value}.")
        return value


class Frozen(BaseModel):
    """Base class of immutable values that reject unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)


class Cost(Frozen):
    """What one decision cost.

    Attributes:
        model_calls: Model calls that included this question. A call for a batch counts once per question.
        tokens_in: Prompt tokens of this question, without padding.
        tokens_out: Tokens generated for this question, thinking included; words if the model reports no
            tokens.
        milliseconds: Wall time of the batch, divided by its number of questions.
    """

    model_calls: int = Field(default=0, ge=0)
    tokens_in: int = Field(default=0, ge=0)
    tokens_out: int = Field(default=0, ge=0)
    milliseconds: float = Field(default=0.0, ge=0.0, allow_inf_nan=False)

    def __add__(self, other: Cost) -> Cost:
        return Cost(**{name: getattr(self, name) + getattr(other, name) for name in Cost.model_fields})


class Draft(Frozen):
    """The beginning of an answer: its text and, if the source reports them, its tokens and log-probabilities.

    Thoughts in the text, such as ``<think>…</think>``, are removed, and so are their tokens. If the LLM thought
    but `tokens` is empty or does not contain the answer, all tokens, ids and log-probabilities are removed: it is
    unknown which belong to the thoughts.

    Attributes:
        text: The text without thoughts; empty if the LLM was cut off before its answer.
        token_ids: Token ids in the vocabulary of ``model``; may be empty.
        tokens: The text of each token; may be empty.
        logprobs: Natural log-probability of each token, <= 0; None if unknown.
        finished: Whether the LLM ended the answer itself; False if it was cut off, for example by a token
            limit.
        source: Who wrote it: a small ``proxy`` model, the answering ``llm``, or ``recorded`` (passed by the caller).
        model: Name of the model that wrote it; may be empty.
        prompt_tokens: Length of its prompt in tokens; 0 if unknown.
        response_id: Id under which a local LLM keeps the hidden states of this response; empty if none are kept, or
            if the LLM thought first.
        thinking_tokens: How long the LLM thought first: tokens, or words if tokens are not counted; 0 if it did not.

    Raises:
        ValueError: A field is invalid, such as a log-probability that is above 0 by more than rounding. Or `tokens`
            is not empty, and `logprobs` has another length.
    """

    text: Text
    token_ids: tuple[int, ...] = Field(default=(), fail_fast=True)  # a client may send millions of wrong ones
    tokens: tuple[Text, ...] = Field(default=(), fail_fast=True)
    logprobs: _LogProbs | None = None
    finished: bool = True
    source: DraftSource = "recorded"
    model: Text = ""
    prompt_tokens: int = Field(default=0, ge=0)
    response_id: Text = ""
    thinking_tokens: int = Field(default=0, ge=0)

    @classmethod
    def from_message(cls, message: Any, *, usage: Any = None, reason: Any = None, **fields: Any) -> Draft:
        """Return a draft made from an LLM's reply.

        Args:
            message: A message or completion: a server's JSON, or an object of LangChain or LlamaIndex.
            usage: The token counts that came with it. Only the number of thinking tokens is read.
            reason: The finish reason. Without one, or with one that means "cut off", the draft is not ``finished``.
            **fields: Other fields of the draft, such as ``source`` and ``logprobs``.
        """
        thoughts, answer = replies.read_reply(message)
        thinking = replies.count_thinking(usage)
        if thoughts is not None:  # at least 1, because an LLM may hide its thoughts and their length
            thinking = thinking or len(thoughts.split()) or 1
        finished = bool(reason) and not replies.is_truncated(reason)
        return cls(text=answer.strip(), thinking_tokens=thinking, finished=finished, **fields)

    @property
    def non_answer(self) -> str:
        """What `text` is if not an answer, such as ``"nothing"`` or ``"a refusal"``; empty if it is an answer."""
        return replies.describe_non_answer(self.text)

    @property
    def is_cut_off(self) -> bool:
        """Whether the text is empty because the LLM was cut off before its answer, or wrote nothing but thoughts."""
        return not self.text and bool(self.thinking_tokens or not (self.finished or self.tokens))

    @model_validator(mode="before")
    @classmethod
    def _remove_thoughts(cls, values: Any) -> Any:
        if not isinstance(values, dict) or not isinstance(values.get("text"), str):
            return values
        thoughts, answer = replies.split_thoughts(values["text"])
        thinking = values.get("thinking_tokens") or 0
        if thoughts is None and not thinking and answer == values["text"]:
            return values
        start = replies.find_answer_start(values.get("tokens") or (), answer.strip())
        if thoughts is not None:
            thinking = thinking or start or len(thoughts.split()) or 1
        # Only the tokens' texts show where the answer starts; without them, ids and log-probabilities are useless.
        columns: dict[str, Any] = {"tokens": (), "token_ids": (), "logprobs": None}
        if tuple(values.get("tokens") or ())[start:]:
            columns |= {name: tuple(values[name])[start:] for name in columns if values.get(name)}
        # The hidden states that a local LLM keeps begin with its thoughts, so the id is dropped, too.
        return {**values, **columns, "text": answer.strip(), "thinking_tokens": thinking, "response_id": ""}

    @model_validator(mode="after")
    def _check_lengths(self) -> Draft:
        if self.logprobs is not None and self.tokens and len(self.logprobs) != len(self.tokens):
            raise ValueError(f"tokens has {len(self.tokens)} entries, but logprobs has {len(self.logprobs)}")
        return self

    def head(self, tokens: int) -> Draft:
        """Return the draft cut to ``tokens`` tokens, or to as many words if it has no tokens.

        Each token is also cut to `MAX_TOKEN_CHARACTERS` characters. A text without tokens is also cut to
        ``tokens * MAX_TOKEN_CHARACTERS`` characters. A draft that is cut is no longer ``finished``; one that is short
        enough is returned unchanged.

        With greedy decoding, a shorter draft is the beginning of a longer one, so one long draft serves all gates.
        """
        max_characters = tokens * MAX_TOKEN_CHARACTERS
        head = tuple(token[:MAX_TOKEN_CHARACTERS] for token in self.tokens[:tokens])
        if self.tokens:
            is_complete = head == self.tokens
            text = "".join(head).strip()
        else:
            words = self.text[:max_characters].split(" ") if self.text else []
            is_complete = max(len(words), len(self.logprobs or ())) <= tokens
            text = " ".join(words[:tokens])
        if is_complete and len(self.text) <= max_characters:
            return self
        return self.model_copy(
            update={
                "text": text,
                "token_ids": self.token_ids[:tokens],
                "tokens": head,
                "logprobs": None if self.logprobs is None else self.logprobs[:tokens],
                "finished": False,
            }
        )


class Failure(Frozen):
    """Why a question could not be judged: an error's type, message and hint. The decision then retrieves."""

    type: Text
    message: Text
    hint: Text = ""

    @classmethod
    def from_error(cls, error: BaseException) -> Failure:
        """Return the failure that describes an exception, even one whose ``__str__`` fails."""
        name = type(error).__name__
        # Other libraries' errors may have a message or hint of any type, or fail in a property or in __str__.
        message = hint = None
        with suppress(Exception):
            message, hint = getattr(error, "message", ""), getattr(error, "hint", "")
        if not (isinstance(message, str) and message):
            message = name
            with suppress(Exception):
                message = str(error) or name
        return cls(type=name, message=message, hint=(isinstance(hint, str) and hint) or limit_hint(message))


class PartialAnswerInfo(Frozen):
    """With answer first, how much of the LLM's answer was held back to be judged, and how long it took, in ms.

    Attributes:
        tokens_held: Tokens of the answer held back until the decision; 0 if the LLM was not asked before it.
        tokens_dropped: How many of these were discarded; 0 if the answer continued.
        screening: Time to judge the question before the LLM starts and, with look first, to search; 0 if the
            question was judged only together with the answer.
        judging: Time to judge the tokens held back.
        first_token: Time from the call until the answer held back was passed on; None if it was discarded, or if
            the LLM was not asked before the decision.
    """

    tokens_held: int = Field(default=0, ge=0)
    tokens_dropped: int = Field(default=0, ge=0)
    screening: float = Field(default=0.0, ge=0.0)
    judging: float = Field(default=0.0, ge=0.0)
    first_token: float | None = Field(default=None, ge=0.0)


class RequestFields(TypedDict, total=False):
    """The fields of a `Request` other than the question, as keyword arguments."""

    history: Sequence[str] | None
    draft: Draft | str | None
    metadata: Mapping[str, Any] | None
    threshold: float | None
    popularity: float | None
    timeout: float | None


@dataclass(frozen=True)
class Request:
    """A question and everything else that a gate may use.

    Examples:
        >>> Request("And when?", history=["user: Who wrote Hamlet?", "assistant: Shakespeare."]).question
        'And when?'

    Attributes:
        question: What the user asks, without surrounding white space.
        history: The earlier turns, oldest first: lines such as ``user: Who wrote Hamlet?`` and
            ``assistant: Shakespeare.`` Other common labels, such as ``Human:`` and ``AI:``, are replaced by these. A
            line without a label continues the turn before it; if no line has one, they are by user and assistant in
            turn, the last by the assistant. A gate that does not read turns retrieves if there are any.
        draft: The beginning of an answer to judge, as a `Draft` or as text. If it is None and the gate needs one, the
            gate's option ``source`` says who writes it: the ``"proxy"`` model, or the ``"llm"`` given to `load_gate`.
            With ``"recorded"``, or without that LLM, the decision fails.
        metadata: What the application knows about the request, for rules that are functions.
        threshold: Overrides the gate's threshold, at least 0; None uses the gate's.
        popularity: Popularity of the question's subject, at least 0 on any scale, for gates that use it.
        timeout: Maximum wait in seconds; None uses the gate's limit, infinity waits forever. In a batch, the
            longest limit applies to all questions.

    Raises:
        InvalidQuestionError: The question is empty, or not a string.
        EvidenceError: The draft, history, metadata or popularity has the wrong type, or the popularity is NaN or
            below 0.
        ConfigurationError: The threshold is not a finite number of at least 0, or the timeout is not above 0.
    """

    question: str
    history: Sequence[str] = ()
    draft: Draft | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict, hash=False)
    threshold: float | None = None
    popularity: float | None = None
    timeout: float | None = None

    def __post_init__(self) -> None:
        draft: Any = self.draft
        if isinstance(draft, str):
            draft = Draft(text=draft.strip(), source="recorded")
        if not isinstance(draft, Draft | None):
            raise EvidenceError(f"A draft must be a Draft or a string, not {type(draft).__name__}.")
        metadata = {} if self.metadata is None else self.metadata
        if not isinstance(metadata, Mapping):
            raise EvidenceError(f"metadata must be a mapping, not {type(metadata).__name__}.")
        popularity = to_float(self.popularity)
        if self.popularity is not None and not (popularity is not None and popularity >= 0):  # NaN neither
            raise EvidenceError(
                f"popularity must be a number of at least 0, not {reprlib.repr(self.popularity)}."
            )
        checked = {
            "question": _valid_question(self.question),
            "history": _valid_history(self.history),
            "draft": draft,
            "metadata": metadata,
            "threshold": None if self.threshold is None else valid_threshold(self.threshold),
            "popularity": popularity,
            "timeout": valid_timeout(self.timeout),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    @classmethod
    def coerce(cls, question: str | Request, **fields: Unpack[RequestFields]) -> Request:
        """Return a request: a question with these fields, or the given request with these fields replaced.

        Raises the errors of `Request`.
        """
        if isinstance(question, cls):
            return replace(question, **fields) if fields else question  # type: ignore[arg-type]  # checked there
        return cls(question, **fields)  # type: ignore[arg-type]


def _valid_question(question: object) -> str:
    if not isinstance(question, str):
        raise InvalidQuestionError(
            f"A question must be a string, not {type(question).__name__}.",
            hint="Pass the text of the question.",
        )
    text = tidy(question)
    if not text:
        raise InvalidQuestionError("The question is empty.", hint="Pass at least one word.")
    return text


def _valid_history(history: object) -> tuple[str, ...]:
    turns: Any = () if history is None else history
    is_list = isinstance(turns, Sequence) and not isinstance(turns, str | bytes)
    bad = [turn for turn in turns if not isinstance(turn, str)] if is_list else []
    if not is_list or bad:
        problem = "one item" if bad else "it"
        raise EvidenceError(
            f"history must be a list of strings, but {problem} is of type {type((bad or [turns])[0]).__name__}.",
            hint='For example, history=["user: Who wrote Hamlet?", "assistant: Shakespeare."].',
        )
    return tuple(f"{role}: {text}" for role, text in label_turns([tidy(turn) for turn in turns]))


class Override(Frozen):
    """A decision that takes precedence over P(known), with a human-readable reason."""

    retrieve: bool
    reason: Text


class Decision(Frozen):
    """Whether to retrieve for a question, and why.

    Attributes:
        question: The question that was judged.
        retrieve: Whether to retrieve: ``p_known < threshold``, unless `override`, `error` or `outcome` decides.
        p_known: Probability in [0, 1] that the LLM answers correctly without retrieval; higher means skip. 0.0 if
            the question could not be judged; 0.0 or 1.0 if a rule decided.
        threshold: The threshold that applies to `p_known`; see `retrieve`.
        reason: A human-readable reason, in a few sentences.
        override: What decided instead of the threshold; None if the threshold, `error` or look first decided.
        gate: Name of the gate.
        draft: The draft that was judged, if any.
        cost: What the decision cost.
        error: Why the question could not be judged; the decision then retrieves. None if it was judged.
        warnings: Problems that did not stop the gate, such as a truncated question.
        partial_answer: What answer first held back, and how long it took; None without answer first.
        signals: Probabilities in [0, 1] behind `p_known`, by name; empty for most gates.
        p_helps: Probability in [0, 1] that the LLM answers correctly with the passages found; None if none
            were judged.
        outcome: With look first, the arm chosen, ``"direct"`` or ``"retrieve"``, or ``"abstain"`` if neither
            is likely to be correct. With corpora, ``"direct"`` or ``"abstain"`` if the option ``when_uncovered`` says
            so for a question that no corpus covers and whose answer the LLM may not know. None otherwise.
        llm: The LLM whose knowledge was judged, and the source of its name; empty if the gate knows no name.
        p_covered: Probability in [0, 1] that a corpus has something on the question; None without a corpus, or if
            the question was not compared with it, for example because a rule decided.
        corpus: The first of `corpora` if the decision retrieves and there is one; otherwise None.
        corpora: Names of the corpora to search if the decision retrieves, best first; empty if the gate named
            none.
    """

    question: Text
    retrieve: bool
    p_known: Probability
    threshold: Threshold = 0.5
    reason: Text = ""
    override: Override | None = None
    gate: Text = ""
    draft: Draft | None = None
    cost: Cost = Cost()
    error: Failure | None = None
    warnings: tuple[Text, ...] = ()
    partial_answer: PartialAnswerInfo | None = None
    signals: dict[str, Finite] = Field(default_factory=dict)
    p_helps: Probability | None = None
    outcome: Outcome | None = None
    llm: Text = ""
    p_covered: Probability | None = None
    corpus: Text | None = None
    corpora: tuple[Text, ...] = ()

    def with_threshold(self, threshold: float) -> Decision:
        """Return this decision at another threshold. If an override, an error or an outcome decided, it still does.

        Raises:
            ConfigurationError: The threshold is not a finite number of at least 0.
        """
        threshold = valid_threshold(threshold)
        retrieve, reason = self.retrieve, self.reason
        if self.override is None and self.error is None and self.outcome is None:
            retrieve = not self.p_known >= threshold  # NaN retrieves
        if retrieve != self.retrieve:  # the gate's reason refers to its own threshold
            comparison = f"But P(known) is {self.p_known:.2f}, and the caller's threshold is {threshold:.2f}."
            reason = f"{reason} {comparison}".strip()
        return self.with_retrieve(retrieve, threshold=threshold, reason=reason)

    def with_retrieve(self, retrieve: bool, **changes: Any) -> Decision:
        """Return a copy with this ``retrieve`` and other changed fields.

        ``corpus`` is set, too: to the first of `corpora` if the copy retrieves, and to None if not.
        """
        corpus = self.corpora[0] if retrieve and self.corpora else None
        return self.model_copy(update={"retrieve": retrieve, "corpus": corpus, **changes})

    @property
    def effective_p_known(self) -> float:
        """P(known); with an override, 0 if it retrieves and 1 if not. Compare this with your own threshold."""
        return self.p_known if self.override is None else float(not self.override.retrieve)

    def __hash__(self) -> int:
        # Leaves out `signals`, because a dict cannot be hashed; equal decisions still have equal hashes.
        return hash((self.question, self.gate, self.retrieve, self.p_known, self.threshold))
