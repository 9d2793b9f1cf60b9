"""What a gate returns: an immutable `Decision`, the `Draft` it was made from, and what it cost."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from rgate_integrations.runtime.records import as_logprob
from rgate_integrations.runtime.text import encodable

DraftSource = Literal["proxy", "llm", "recorded"]
Outcome = Literal["direct", "retrieve", "abstain"]
Override = Literal["", "always", "never"]
LONGEST_TOKEN = 32
"""Characters of a draft's token that are read. What is given as one token may be a whole text."""


def _refuse_bool(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("a threshold is a number, and neither true nor false")
    return value


Finite = Annotated[float, Field(allow_inf_nan=False)]
Probability = Annotated[float, Field(ge=0.0, le=1.0, allow_inf_nan=False)]
Threshold = Annotated[float, BeforeValidator(_refuse_bool), Field(ge=0.0, allow_inf_nan=False)]


def _replace_surrogates(value: Any) -> Any:
    return encodable(value) if isinstance(value, str) else value


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
    milliseconds: float = Field(default=0.0, ge=0.0)

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            model_calls=self.model_calls + other.model_calls,
            tokens_in=self.tokens_in + other.tokens_in,
            tokens_out=self.tokens_out + other.tokens_out,
            milliseconds=self.milliseconds + other.milliseconds,
        )


class Draft(Frozen):
    """The beginning of an answer: text and, where the source gives them, tokens and their probabilities.

    Attributes:
        text: The text of the draft, without surrounding white space.
        token_ids: Token ids in the vocabulary of ``model``; empty when the source gives none.
        tokens: The text of each token; empty when the source gives none.
        logprobs: Natural log-probability of each token, each <= 0; None when the source gives none.
        finished: Whether the answer ended by itself; False means that it was cut at a token limit.
        source: Who wrote it: the ``proxy``, the answering ``llm``, or ``recorded`` (given by the caller).
        model: Name of the model that wrote it; empty when unknown.
        prompt_tokens: Length of the prompt it was written for, in tokens; 0 when unknown.
        response_id: Id of the response that it is the beginning of, where a local LLM keeps its hidden states while
            it is judged; empty otherwise.
    """

    text: Text
    token_ids: tuple[int, ...] = ()
    tokens: tuple[Text, ...] = ()
    logprobs: tuple[Annotated[float, AfterValidator(as_logprob)], ...] | None = None
    finished: bool = True
    source: DraftSource = "recorded"
    model: Text = ""
    prompt_tokens: int = Field(default=0, ge=0)
    response_id: Text = ""

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
    def of(cls, error: BaseException) -> Failure:
        """Describe an exception."""
        return cls(
            type=type(error).__name__,
            message=getattr(error, "message", "") or str(error) or type(error).__name__,
            hint=getattr(error, "hint", ""),
        )


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


class Decision(Frozen):
    """Whether to retrieve for a question, and why.

    Attributes:
        question: The question as it was judged.
        retrieve: Whether to retrieve: ``p_known < threshold``, or the gate failed. After a look at what was found, as
            `outcome` says.
        p_known: Probability in [0, 1] that the LLM answers rightly without retrieval. Higher means skip.
            0.0 when the gate failed; `error` then says why.
        threshold: What `p_known` was compared with.
        reason: One sentence for a person.
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
            that ``"retrieve"``, or neither: ``"abstain"``; None without `p_helps`.
        llm: The LLM whose knowledge was judged, and how it is known which; empty where no LLM in particular was.
        override: The rule of yours that decided, whatever the threshold: ``"always"`` or ``"never"``; else empty.
    """

    question: Text
    retrieve: bool
    p_known: Probability
    threshold: Threshold = 0.5
    reason: Text = ""
    gate: Text = ""
    draft: Draft | None = None
    cost: Cost = Cost()
    error: Failure | None = None
    warnings: tuple[Text, ...] = ()
    partial_answer: PartialAnswerInfo | None = None
    signals: dict[str, float] = Field(default_factory=dict)
    p_helps: Probability | None = None
    outcome: Outcome | None = None
    llm: Text = ""
    override: Override = ""

    def __hash__(self) -> int:
        # Without the signals, which are a dict: decisions that are equal still hash alike.
        return hash((self.question, self.gate, self.retrieve, self.p_known, self.threshold))
