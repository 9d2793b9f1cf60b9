"""What goes over the wire, as Pydantic models: ``/v1/decide``, ``/v1/queries``, and the common ``/v1/systemone``.

A System One request has a *state* and typed *questions* by name; the answer has probabilities under the same names
(TypeSafe's API, which vLLM, Ollama, SGLang and others speak too). A gate can answer two of all questions: a noul
``known``, and a choice between ``retrieve`` and ``direct``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from rgate_integrations.answering.query_plan import QueryPlan
from rgate_integrations.decision import Decision, Draft, Text, Threshold
from rgate_integrations.errors import ConfigurationError
from rgate_integrations.gates.passage_utility import FoundPassage
from rgate_integrations.serving.llm_requests import parse_question

METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]
"""Methods that clients may use, and that a gateway passes on."""

MOST_QUESTIONS = 256
"""Questions of one request."""

NO_LLM = "rgate"
"""The model of a System One request that names no LLM."""

_ROUTES = ["direct", "retrieve"]
_LONGEST_LINE = 300
_IN_ASCII = str.maketrans({"“": '"', "”": '"', "‘": "'", "’": "'", "–": "-", "—": "-", "…": "..."})
_CAN_ASK = (
    'Ask {"known": {"type": "noul"}} for P(the LLM knows), or a choice between the criteria "retrieve" and "direct". '
    'The state is the question, an object with "question" or "messages", or messages that end with the user\'s.'
)

LLMName = Annotated[str, Field(max_length=200, pattern=r"^[\w.:@/+ -]*$")]
"""Name of the LLM whose knowledge is judged; empty for the one that the server was started for."""


class DecideItem(BaseModel):
    """A question, and what came with it; see `DecisionEngine.decide_batch`.

    With ``passages``, best first, the decision also says whether they help (look first).
    """

    model_config = ConfigDict(extra="forbid")

    question: Text
    draft: Text | Draft | None = None
    popularity: float | None = None
    history: list[Text] = []
    threshold: Threshold | None = None
    passages: list[FoundPassage] = Field(default=[], max_length=100)


class DecideRequest(BaseModel):
    """Questions to decide about, each alone or with what came with it.

    ``llm`` names the LLM whose knowledge is judged. Where the client only found that name, ``llm_name_source`` says
    where: then a name that the server was started with goes before it.
    """

    model_config = ConfigDict(extra="forbid")

    questions: list[str | DecideItem] = Field(min_length=1, max_length=MOST_QUESTIONS)
    llm: LLMName = ""
    llm_name_source: Annotated[str, Field(max_length=100)] = ""

    def items(self) -> list[DecideItem]:
        """Return every question as an item."""
        items = []
        for item in self.questions:
            items.append(DecideItem(question=item) if isinstance(item, str) else item)
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

    @property
    def is_route(self) -> bool:
        """Whether it is the choice between retrieving and answering directly."""
        return self.type == "choice" and isinstance(self.criteria, dict) and sorted(self.criteria) == _ROUTES


class SystemOneRequest(BaseModel):
    """A state and questions about it. ``model`` names the LLM whose knowledge is judged; ``rgate`` names none."""

    state: str | dict[str, Any] | list[Any]
    questions: dict[Text, SystemOneQuestion] = Field(min_length=1, max_length=64)
    model: LLMName = NO_LLM

    def item(self) -> DecideItem:
        """Return the user's question.

        Raises:
            ConfigurationError: There is none in the state, or a question about it is not one that a gate can answer.
        """
        for name, question in self.questions.items():
            if not question.is_route and (name, question.type) != ("known", "noul"):
                raise ConfigurationError(
                    f"A retrieval gate cannot answer the question {name[:40]!r} of type {question.type[:20]!r}.",
                    hint=_CAN_ASK,
                )
        turn = parse_question(self.state)
        if turn is None:
            raise ConfigurationError("There is no question in the state.", hint=_CAN_ASK)
        return DecideItem(question=turn.question, history=list(turn.history))


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


class SystemOneResponse(BaseModel):
    """The answers by the names of their questions, and the tokens that the gate's own model read and wrote."""

    model: str
    answers: dict[str, NoulAnswer | ChoiceAnswer]
    usage: dict[str, int]

    @classmethod
    def from_decision(cls, request: SystemOneRequest, decision: Decision) -> SystemOneResponse:
        """Return the answers that a decision gives."""
        known = decision.effective_p_known  # what is answered has no field for an override
        probabilities = {"retrieve": 1 - known, "direct": known}
        route = route_label(decision)
        choice = ChoiceAnswer(choice=route, probabilities=probabilities, confidence=probabilities[route])
        answers: dict[str, NoulAnswer | ChoiceAnswer] = {}
        for name, question in request.questions.items():
            answers[name] = choice if question.is_route else NoulAnswer(noul=known)
        usage = {"input_tokens": decision.cost.tokens_in, "output_tokens": decision.cost.tokens_out}
        return cls(model=request.model, answers=answers, usage=usage)


class Problem(BaseModel):
    """What went wrong, in the shape that clients of OpenAI's API and of System One read."""

    message: str
    type: str
    hint: str = ""


class ProblemResponse(BaseModel):
    """The body of every status from 400 on."""

    error: Problem


def problem(
    status: int, kind: str, message: str, hint: str = "", headers: Mapping[str, str] | None = None
) -> Response:
    """Return the response that says what went wrong."""
    body = ProblemResponse(error=Problem(message=message, type=kind, hint=hint))
    return Response(body.model_dump_json(), status, headers, media_type="application/json")


def one_line(text: str) -> str:
    """Return the beginning of a text as one line of ASCII, for headers and logs, whatever it quotes."""
    line = " ".join(text[:_LONGEST_LINE].translate(_IN_ASCII).split())
    return re.sub(r"[^ -~]", "?", line)[:_LONGEST_LINE]


def route_label(decision: Decision) -> Literal["retrieve", "direct"]:
    """Return what a decision says as clients and metrics have it."""
    return "retrieve" if decision.retrieve else "direct"


def likeliest_kind(decision: Decision) -> str:
    """Return the likeliest kind of request; empty if the gate has no kinds.

    The default gate has a signal for each kind, and one for what the LLM knows.
    """
    kinds = dict(decision.signals)
    kinds.pop("known", None)
    return max(kinds, key=kinds.__getitem__, default="")
