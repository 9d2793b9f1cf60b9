"""What goes over the wire, as Pydantic models: ``/v1/decide``, ``/v1/queries``, and the common ``/v1/systemone``.

A System One request has a *state* and typed *questions* by name; the answer has probabilities under the same names
(TypeSafe's API, which vLLM, Ollama, SGLang and others speak too). A gate can answer two of all questions: a noul
``known``, and a choice between ``retrieve`` and ``direct``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from rgate_integrations.answering.claims import QueryPlan
from rgate_integrations.decision import Decision, Draft
from rgate_integrations.errors import ConfigurationError

QUESTION_KEYS = ("question", "input", "query", "messages")
_SPEAKERS = ("user", "assistant")


@dataclass(frozen=True)
class Asked:
    """A question and what was said before it.

    Attributes:
        question: The question.
        history: The earlier turns, oldest first, as gates read them: ``user: …`` and ``assistant: …``.
        place: Place of its message among the messages; -1 where there are none.
    """

    question: str
    history: tuple[str, ...] = ()
    place: int = -1

    @property
    def search_text(self) -> str:
        """What to search for: of a question that follows on others, also the last thing that the user said."""
        said = [turn for turn in self.history if turn.startswith("user: ")]
        return f"{said[-1].removeprefix('user: ')}\n{self.question}" if said else self.question


def question_in(state: object) -> Asked | None:
    """Return the question in a text, in a mapping under one of `QUESTION_KEYS`, or in messages; None without any."""
    if isinstance(state, str):
        return Asked(state)
    if isinstance(state, Mapping):
        for key in QUESTION_KEYS:
            if key in state:
                return question_in(state[key])
        return None
    return question_in_messages(state)


def question_in_messages(messages: object) -> Asked | None:
    """Return the question of a conversation: its last message, if that is the user's and is text alone."""
    if not isinstance(messages, list) or not messages:
        return None
    last = messages[-1]
    question = _text(last) if isinstance(last, Mapping) and last.get("role") == "user" else None
    if question is None:
        return None
    turns = []
    for message in messages[:-1]:
        # System messages and the results of tools were not said by anybody.
        if isinstance(message, Mapping) and message.get("role") in _SPEAKERS:
            text = _text(message)
            if text:
                turns.append(f"{message['role']}: {text}")
    return Asked(question, tuple(turns), place=len(messages) - 1)


def _text(message: Mapping[str, Any]) -> str | None:
    """Return the text of a message; None where it is, or holds, something else, such as an image."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        return None
    texts = []
    for part in content:
        if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
            return None
        texts.append(part["text"])
    return "\n".join(texts)


MOST_QUESTIONS = 256
"""Questions of one request."""

NO_LLM = "rgate"
"""The model of a System One request that names no LLM."""
KNOWN = "known"
ROUTES = ("retrieve", "direct")
_CAN_ASK = (
    'Ask {"known": {"type": "noul"}} for P(the LLM knows), or a choice between the criteria "retrieve" and "direct". '
    'The state is the question, an object with "question" or "messages", or messages that end with the user\'s.'
)

LLMName = Annotated[str, Field(max_length=200, pattern=r"^[\w.:@/+ -]*$")]
"""Name of the LLM whose knowledge is judged; empty for the one that the server was started for."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Passage(_Strict):
    """A passage that a search of the client's found."""

    text: str
    title: str = ""


class DecideItem(_Strict):
    """A question, and what came with it; see `DecisionEngine.decide_batch`.

    With ``passages``, best first, the decision also says whether they help (look first).
    """

    question: str
    draft: str | Draft | None = None
    popularity: float | None = None
    history: list[str] = []
    threshold: float | None = Field(default=None, ge=0.0, allow_inf_nan=False)
    passages: list[Passage] = Field(default=[], max_length=100)


class DecideRequest(_Strict):
    """Questions to decide about, each alone or with what came with it.

    ``llm`` names the LLM whose knowledge is judged. Where the client only found that name, ``llm_known_by`` says
    where: then a name that the server was started with goes before it.
    """

    questions: list[str | DecideItem] = Field(min_length=1, max_length=MOST_QUESTIONS)
    llm: LLMName = ""
    llm_known_by: Annotated[str, Field(max_length=100)] = ""

    def items(self) -> list[DecideItem]:
        """Return every question as an item."""
        items = []
        for each in self.questions:
            items.append(DecideItem(question=each) if isinstance(each, str) else each)
        return items


class DecideResponse(BaseModel):
    """One decision a question, in order."""

    decisions: list[Decision]


class QueriesResponse(BaseModel):
    """What to search for, one plan a question, in order; empty for a question that needs no retrieval."""

    plans: list[QueryPlan]


class SystemOneQuestion(BaseModel):
    """A typed question. The instructions are not read: a gate's questions are always the same."""

    type: str
    criteria: Any = None


class SystemOneRequest(BaseModel):
    """A state and questions about it. ``model`` names the LLM whose knowledge is judged; ``rgate`` names none."""

    state: str | dict[str, Any] | list[Any]
    questions: dict[str, SystemOneQuestion] = Field(min_length=1, max_length=64)
    model: LLMName = NO_LLM

    def asked(self) -> Asked:
        """Return the user's question.

        Raises:
            ConfigurationError: There is none in the state, or a question about it is not one that a gate can answer.
        """
        for name, question in self.questions.items():
            is_known = question.type == "noul" and name == KNOWN
            is_route = question.type == "choice" and _is_route(question.criteria)
            if not (is_known or is_route):
                raise ConfigurationError(
                    f"A retrieval gate cannot answer the question {name[:40]!r} of type {question.type[:20]!r}.",
                    hint=_CAN_ASK,
                )
        asked = question_in(self.state)
        if asked is None or not asked.question.strip():
            raise ConfigurationError("There is no question in the state.", hint=_CAN_ASK)
        return asked


def way_of(decision: Decision) -> Literal["retrieve", "direct"]:
    """Return what a decision says as clients and metrics have it."""
    return "retrieve" if decision.retrieve else "direct"


def likeliest_kind(decision: Decision) -> str:
    """Return the likeliest kind of request; empty for gates that tell none.

    The default gate has a signal for each kind, and one for what the LLM knows.
    """
    kinds = dict(decision.signals)
    kinds.pop("known", None)
    return max(kinds, key=kinds.__getitem__, default="")


class NoulAnswer(BaseModel):
    """P(the LLM knows)."""

    type: Literal["noul"] = "noul"
    noul: float


class ChoiceAnswer(BaseModel):
    """Whether to retrieve. The gate's threshold decides: the choice need not be the likelier one."""

    type: Literal["choice"] = "choice"
    choice: Literal["retrieve", "direct"]
    probabilities: dict[str, float]
    confidence: float


class Usage(BaseModel):
    """Tokens of the gate's own model; none were written unless the gate drafts."""

    input_tokens: int
    output_tokens: int


class SystemOneResponse(BaseModel):
    """The answers by the names of their questions."""

    model: str
    answers: dict[str, NoulAnswer | ChoiceAnswer]
    usage: Usage

    @classmethod
    def of(cls, request: SystemOneRequest, decision: Decision) -> SystemOneResponse:
        """Return the answers that a decision gives."""
        known = decision.p_known
        choice = ChoiceAnswer(
            choice=way_of(decision),
            probabilities={"retrieve": 1 - known, "direct": known},
            confidence=1 - known if decision.retrieve else known,
        )
        answers: dict[str, NoulAnswer | ChoiceAnswer] = {}
        for name, question in request.questions.items():
            answers[name] = NoulAnswer(noul=known) if question.type == "noul" else choice
        usage = Usage(input_tokens=decision.cost.tokens_in, output_tokens=decision.cost.tokens_out)
        return cls(model=request.model, answers=answers, usage=usage)


class Problem(BaseModel):
    """What went wrong, in the shape that clients of OpenAI's API and of System One read."""

    message: str
    type: str
    hint: str = ""


class ProblemResponse(BaseModel):
    """The body of every status from 400 on."""

    error: Problem


def _is_route(criteria: object) -> bool:
    return isinstance(criteria, dict) and sorted(criteria) == sorted(ROUTES)
