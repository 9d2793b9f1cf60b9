"""What goes into a gate, a `Request`, and what comes out, a `Decision`. Both are immutable."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Annotated, Any, Literal, TypeAlias, TypedDict, Unpack

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from rgate_integrations.errors import ConfigurationError, EvidenceError, InvalidQuestionError
from rgate_integrations.runtime.records import check_logprob
from rgate_integrations.runtime.replies import (
    count_thinking,
    describe_non_answer,
    find_answer_start,
    is_truncated,
    read_reply,
    split_thoughts,
)
from rgate_integrations.runtime.text import encodable

DraftSource = Literal["proxy", "llm", "recorded"]
Outcome = Literal["direct", "retrieve", "abstain"]
LONGEST_TOKEN = 32
"""Characters of a draft's token that are read. What is given as one token may be a whole text."""


def _refuse_bool(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("a threshold is a number, and neither true nor false")
    return value


def _replace_surrogates(value: Any) -> Any:
    return encodable(value) if isinstance(value, str) else value


Finite = Annotated[float, Field(allow_inf_nan=False)]
Probability = Annotated[float, Field(ge=0.0, le=1.0, allow_inf_nan=False)]
Threshold = Annotated[float, BeforeValidator(_refuse_bool), Field(allow_inf_nan=False, ge=0.0)]
# Before pydantic looks at it: of a subclass of str, such as LangChain's `message.text`, it refuses such text.
Text: TypeAlias = Annotated[str, BeforeValidator(_replace_surrogates)]
"""Text that may come from anywhere, such as a user or a server."""


class Frozen(BaseModel):
    """Base of the immutable values of this package."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)


class Cost(Frozen):
    """What one decision cost.

    Attributes:
        model_calls: How many model calls this question took part in (a call for a whole batch counts
            once for each of its questions).
        tokens_in: Tokens of this question's prompts, without padding.
        tokens_out: Tokens generated for this question.
        milliseconds: Wall time of the batch, divided by the number of its questions.
    """

    model_calls: int = Field(default=0, ge=0)
    tokens_in: int = Field(default=0, ge=0)
    tokens_out: int = Field(default=0, ge=0)
    milliseconds: float = Field(default=0.0, ge=0.0, allow_inf_nan=False)

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            model_calls=self.model_calls + other.model_calls,
            tokens_in=self.tokens_in + other.tokens_in,
            tokens_out=self.tokens_out + other.tokens_out,
            milliseconds=self.milliseconds + other.milliseconds,
        )


class Draft(Frozen):
    """The beginning of an answer: text and, where the source gives them, tokens and their probabilities.

    What an LLM thinks before it answers is no part of it: thoughts in the text, such as ``<think>…</think>``, are
    taken out, with their tokens.

    Attributes:
        text: The text of the draft, without surrounding white space; empty if it was cut off before the answer.
        token_ids: Token ids in the vocabulary of ``model``; empty when the source gives none.
        tokens: The text of each token; empty when the source gives none.
        logprobs: Natural log-probability of each token, each <= 0; None when the source gives none.
        finished: Whether the answer ended by itself; False means that it was cut at a token limit.
        source: Who wrote it: the ``proxy``, the answering ``llm``, or ``recorded`` (given by the caller).
        model: Name of the model that wrote it; empty when unknown.
        prompt_tokens: Length of the prompt it was written for, in tokens; 0 when unknown.
        response_id: Id of the response that it is the beginning of, where a local LLM keeps its hidden states while
            it is judged; empty otherwise.
        thinking_tokens: How long the LLM thought before, in tokens, or in words where nobody counts tokens; at least
            1 if it did, 0 if it did not.
    """

    text: Text
    token_ids: tuple[int, ...] = ()
    tokens: tuple[Text, ...] = ()
    logprobs: tuple[Annotated[float, AfterValidator(check_logprob)], ...] | None = None
    finished: bool = True
    source: DraftSource = "recorded"
    model: Text = ""
    prompt_tokens: int = Field(default=0, ge=0)
    response_id: Text = ""
    thinking_tokens: int = Field(default=0, ge=0)

    @classmethod
    def from_message(cls, message: Any, *, usage: Any = None, reason: Any = None, **fields: Any) -> Draft:
        """Return what an LLM wrote: a message as a server sends it, or an object of a framework.

        Args:
            message: The message.
            usage: What was counted for it.
            reason: Why it ended; whoever does not say may have cut it.
            **fields: The other fields.
        """
        thoughts, answer = read_reply(message)
        thinking = count_thinking(usage)
        if thoughts is not None:
            thinking = thinking or len(thoughts.split()) or 1
        finished = bool(reason) and not is_truncated(reason)
        return cls(text=answer.strip(), thinking_tokens=thinking, finished=finished, **fields)

    @property
    def missing(self) -> str:
        """What it is instead of an answer, such as ``"nothing"`` or ``"a refusal"``; empty if it is an answer."""
        return describe_non_answer(self.text)

    @property
    def is_cut_off(self) -> bool:
        """Whether it ended before the answer began, as of an LLM that thinks first."""
        return not self.text and bool(self.thinking_tokens or not (self.finished or self.tokens))

    @model_validator(mode="before")
    @classmethod
    def _without_thoughts(cls, values: Any) -> Any:
        """Leave the answer alone, of text, tokens and log-probabilities."""
        if not isinstance(values, dict) or not isinstance(values.get("text"), str):
            return values
        thoughts, answer = split_thoughts(values["text"])
        thinking = values.get("thinking_tokens") or 0
        if thoughts is None and not thinking and answer == values["text"]:
            return values
        tokens = values.get("tokens") or ()
        start = find_answer_start(tokens, answer.strip())
        if thoughts is not None:
            thinking = thinking or start or len(thoughts.split()) or 1
        kept: dict[str, Any] = {}
        for name in ("tokens", "token_ids", "logprobs"):
            kept[name] = tuple(values.get(name) or ())[start:]
        if not kept["tokens"]:  # of the others, nobody knows where the answer begins
            kept = {"tokens": (), "token_ids": (), "logprobs": None}
        # What a local LLM keeps is of the thoughts.
        shown = {"text": answer.strip(), "thinking_tokens": thinking, "response_id": ""}
        return {**values, **kept, **shown}

    @model_validator(mode="after")
    def _same_lengths(self) -> Draft:
        if self.logprobs is not None and self.tokens and len(self.logprobs) != len(self.tokens):
            raise ValueError(f"{len(self.tokens)} tokens do not match {len(self.logprobs)} logprobs.")
        return self

    def head(self, tokens: int) -> Draft:
        """Return the first ``tokens`` tokens of this draft.

        A greedy draft of n tokens begins with the greedy draft of fewer, so one long draft serves every
        gate that asks for a shorter one. A draft without tokens is cut at white space instead: the text
        is all there is to count. A token has at most `LONGEST_TOKEN` characters: what is longer is cut before any
        model reads it.

        Args:
            tokens: How many to keep; 0 gives an empty draft.
        """
        longest = tokens * LONGEST_TOKEN
        kept = tuple(token[:LONGEST_TOKEN] for token in self.tokens[:tokens])
        if self.tokens:
            is_whole = kept == self.tokens
            text = "".join(kept).strip()
        else:
            partial_answer = self.text[:longest]
            words = partial_answer.split(" ") if partial_answer else []
            is_whole = max(len(words), len(self.logprobs or ())) <= tokens
            text = " ".join(words[:tokens])
        if is_whole and len(self.text) <= longest:
            return self
        return self.model_copy(
            update={
                "text": text,
                "token_ids": self.token_ids[:tokens],
                "tokens": kept,
                "logprobs": None if self.logprobs is None else self.logprobs[:tokens],
                "finished": False,
            }
        )


class Failure(Frozen):
    """Why a decision could not be made from evidence. Such a decision always retrieves.

    Attributes:
        type: Name of the error class.
        message: What went wrong.
        hint: What to do about it; may be empty.
    """

    type: Text
    message: Text
    hint: Text = ""

    @classmethod
    def from_error(cls, error: BaseException) -> Failure:
        """Describe an exception."""
        name = type(error).__name__
        # Errors of others have a message or a hint of any type, and the text of some cannot be made.
        message, hint = getattr(error, "message", ""), getattr(error, "hint", "")
        if not (isinstance(message, str) and message):
            try:
                message = str(error)
            except Exception:
                message = ""
        return cls(type=name, message=message or name, hint=hint if isinstance(hint, str) else "")


class PartialAnswerInfo(Frozen):
    """What became of an answer that was begun before it was judged. Times are in milliseconds.

    Attributes:
        tokens_held: Tokens that were held back until the decision.
        tokens_dropped: How many of them were thrown away; 0 when the answer went on.
        first_look: Time of the first look, at the question and at what was found if a search came first; 0 without
            one.
        judging: Time of judging what was begun.
        first_token: Time from the call to the release of the first token; None when there was none to release.
    """

    tokens_held: int = Field(default=0, ge=0)
    tokens_dropped: int = Field(default=0, ge=0)
    first_look: float = Field(default=0.0, ge=0.0)
    judging: float = Field(default=0.0, ge=0.0)
    first_token: float | None = Field(default=None, ge=0.0)


class RequestFields(TypedDict, total=False):
    """What may be said of a question; see `Request`."""

    history: Sequence[str] | None
    draft: Draft | str | None
    metadata: Mapping[str, Any] | None
    threshold: float | None
    popularity: float | None
    timeout: float | None


@dataclass(frozen=True)
class Request:
    """A question, and everything that a gate may look at beside it.

    >>> Request("And when?", history=["user: Who wrote Hamlet?", "assistant: Shakespeare."]).question
    'And when?'

    Attributes:
        question: What the user asks.
        history: The turns before it, oldest first: lines such as ``user: Who wrote Hamlet?`` and
            ``assistant: Shakespeare.`` A gate that does not read them retrieves.
        draft: The beginning of an answer, to judge instead of writing one: a `Draft`, or recorded text.
        metadata: What the application knows of the request, for rules that are functions.
        threshold: Used instead of the gate's own, at least 0.
        popularity: Popularity score of what is asked about, for gates that use one.
        timeout: How long the caller waits, in seconds; None for the gate's own limit, infinity for none.

    Raises:
        InvalidQuestionError: The question is empty, not a string, or holds NUL bytes.
        EvidenceError: The draft, the history, the metadata or the popularity has the wrong type.
        ConfigurationError: The threshold is not a number of at least 0, or the timeout not one above 0.
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
            raise EvidenceError(
                f"The metadata of a question must be a mapping, not {type(metadata).__name__}."
            )
        popularity = _as_number(self.popularity)
        if popularity is None and self.popularity is not None:
            raise EvidenceError("The popularity of a question must be a number.")
        checked = {
            "question": valid_question(self.question),
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
        """Return a question as a request; one that is a request already, with some fields replaced."""
        if isinstance(question, cls):
            return replace(question, **fields) if fields else question  # type: ignore[arg-type]  # checked there
        return cls(question, **fields)  # type: ignore[arg-type]


def valid_question(question: object) -> str:
    """Return a question without surrounding white space.

    Raises:
        InvalidQuestionError: It is not a string, is empty, or holds NUL bytes.
    """
    if not isinstance(question, str):
        raise InvalidQuestionError(
            f"A question must be a string, not {type(question).__name__}.",
            hint="Pass the text of the question.",
        )
    if not question.strip():
        raise InvalidQuestionError("The question is empty.", hint="Pass at least one word.")
    if "\0" in question:
        raise InvalidQuestionError(
            "The question holds NUL bytes.", hint="Is this text, and in the right encoding?"
        )
    return encodable(question.strip())


def valid_threshold(threshold: object) -> float:
    """Return a threshold as a number.

    Raises:
        ConfigurationError: It is not a number of at least 0.
    """
    number = _as_number(threshold)
    if number is None or not 0 <= number < math.inf:
        raise ConfigurationError(f"A threshold must be a number of at least 0, not {_shown(threshold)}.")
    return number


def valid_timeout(timeout: object) -> float | None:
    """Return a time in seconds that can be waited for, or None for no time.

    Raises:
        ConfigurationError: It is not a number above 0.
    """
    if timeout is None:
        return None
    number = _as_number(timeout)
    if number is None or not number > 0:  # NaN is above nothing
        raise ConfigurationError(f"A timeout must be a number of seconds above 0, not {_shown(timeout)}.")
    return min(number, threading.TIMEOUT_MAX)


def _as_number(value: object) -> float | None:
    """Return a number as a float; None if it is not one, such as True, or too large."""
    try:
        return float(value) if isinstance(value, Real) and not isinstance(value, bool) else None
    except OverflowError:
        return None


def _shown(value: object) -> str:
    """Return a value for an error; of what is not a number the type: it may not be printable."""
    number = _as_number(value)
    return type(value).__name__ if number is None else str(number)


def _valid_history(history: object) -> tuple[str, ...]:
    if history is None:
        return ()
    turns: Sequence[Any] = history if isinstance(history, Sequence) else ()
    if (
        isinstance(history, str | bytes)
        or not isinstance(history, Sequence)
        or not all(isinstance(turn, str) and "\0" not in turn for turn in turns)
    ):
        raise EvidenceError(
            "The history of a question must be a list of strings without NUL bytes.",
            hint='history=["user: Who wrote Hamlet?", "assistant: Shakespeare."]',
        )
    return tuple(encodable(turn.strip()) for turn in turns if turn.strip())


class Override(Frozen):
    """A named reason to retrieve, or not to, whatever P(known) is.

    Attributes:
        retrieve: What it decides.
        reason: Why, as a sentence for a person.
    """

    retrieve: bool
    reason: Text

    def __str__(self) -> str:
        return f"{'retrieve' if self.retrieve else 'direct'}: {self.reason}"


class Decision(Frozen):
    """Whether to retrieve for a question, and why.

    Attributes:
        question: The question as it was judged.
        retrieve: Whether to retrieve: ``p_known < threshold``, unless there is an `override` or an `error`. After a
            look at what was found, as `outcome` says.
        p_known: Probability in [0, 1] that the LLM answers rightly without retrieval. Higher means skip.
            0.0 when the gate failed; `error` then says why. Where a rule decided, the gate was not asked: 0.0 or 1.0.
        threshold: What `p_known` was compared with.
        reason: Why, in a sentence or two for a person.
        override: What decided in place of the threshold; None where the threshold did.
        gate: Name of the gate.
        draft: The draft that was judged, if the gate used one.
        cost: What the decision cost.
        error: Set when the gate failed and the decision is the safe one, to retrieve.
        warnings: What was noticed on the way, such as a question that was cut.
        partial_answer: What became of the begun answer, where the direct arm answers first.
        signals: Probabilities in [0, 1] that `p_known` was made of, by name; empty for most gates.
        p_helps: Probability in [0, 1] that the LLM answers rightly with the passages that were found; None where
            nothing was found, or nobody looked.
        outcome: What `p_known` and `p_helps` say together: ``"direct"`` answers are likely to be right, or those
            that ``"retrieve"``, or neither: ``"abstain"``; None without `p_helps`. Where no corpus
            covers a question that the LLM may not know, what a gate that knows corpora was told to do.
        llm: The LLM whose knowledge was judged, and how it is known which; empty where no LLM in particular was.
        p_covered: Probability in [0, 1] that a corpus has something on the question; None where no corpus is known.
        corpus: Name of the corpus to search; None if it does not retrieve, or no corpus is known.
        corpora: Names of the corpora to search if it retrieves, best first.
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
        """Return this decision at another threshold, of the caller's; an override or an error still decides.

        Raises:
            ConfigurationError: The threshold is not a number of at least 0.
        """
        threshold = valid_threshold(threshold)
        retrieve, reason = self.retrieve, self.reason
        if self.override is None and self.error is None:
            retrieve = not self.p_known >= threshold  # NaN retrieves
        if retrieve != self.retrieve:  # the gate wrote its reason for its own threshold
            turned = f"But P(known) is {self.p_known:.2f}, and the caller's threshold {threshold:.2f}."
            reason = f"{reason} {turned}".strip()
        return self.turned(retrieve, threshold=threshold, reason=reason)

    def turned(self, retrieve: bool, **changes: Any) -> Decision:
        """Return this decision with other fields, as one that retrieves, from the first of `corpora`, or does not."""
        corpus = self.corpora[0] if retrieve and self.corpora else None
        return self.model_copy(update={"retrieve": retrieve, "corpus": corpus, **changes})

    @property
    def effective_p_known(self) -> float:
        """P(known), or 0 or 1 if an override decides: for whoever compares it with a threshold of their own."""
        if self.override is None:
            return self.p_known
        return float(not self.override.retrieve)

    def __hash__(self) -> int:
        # Without the signals, which are a dict: decisions that are equal still hash alike.
        return hash((self.question, self.gate, self.retrieve, self.p_known, self.threshold))
