"""The formats of requests and responses, as Pydantic models: ``/v1/decide``, ``/v1/queries``, ``/v1/systemone``.

A System One request has a *state*, here what the user asked, and named, typed *questions* about it; the
response has probabilities under the same names (TypeSafe's API, which vLLM, Ollama, SGLang and others also
support). A gate can answer two types of question: a noul (a probability) called ``known``, and a choice
between ``retrieve`` and ``direct``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Annotated, Any, Literal
from urllib.parse import quote

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from starlette.responses import Response

from rgate_integrations.answering.query_plan import QueryPlan
from rgate_integrations.decision import Decision, Draft, Text, Threshold
from rgate_integrations.errors import ConfigurationError
from rgate_integrations.gates.passage_utility import FoundPassage
from rgate_integrations.serving.llm_requests import keep_latest, parse_question

METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]
"""HTTP methods that clients may use, and that the gateway forwards."""

NO_LLM = "rgate"
"""The ``model`` of a System One request that names no LLM."""

# Servers and proxies limit the size of headers, often to 8 KiB in total.
_MAX_LINE = 300
# A body with many questions may have thousands of errors, and the first few show what is wrong.
_MAX_READ_ERRORS, _MAX_ERRORS = 100, 5
_MAX_FIELD = 100  # characters of a field's name in an error
_KEPT = "".join(map(chr, range(32, 127))).replace("%", "")
_IN_ASCII = str.maketrans({"“": '"', "”": '"', "‘": "'", "’": "'", "–": "-", "—": "-", "…": "..."})


class DecideItem(BaseModel):
    """A question with its context; see `Request`.

    With ``passages``, best first, the decision also considers whether they help (look first).
    """

    model_config = ConfigDict(extra="forbid")

    question: Text
    draft: Text | Draft | None = None
    popularity: float | None = None
    # Cut before it is checked: a body may have millions of lines, and all clients would wait while they are read.
    history: Annotated[list[Text], BeforeValidator(keep_latest)] = Field(default=[], fail_fast=True)
    threshold: Threshold | None = None
    passages: list[FoundPassage] = Field(default=[], max_length=100)


class DecideRequest(BaseModel):
    """Questions to decide about, with or without context.

    ``llm`` names the LLM whose knowledge is judged. If the client detected this name (no user gave it),
    ``llm_name_source`` says where; the name that the server was started with then takes precedence.
    """

    model_config = ConfigDict(extra="forbid")

    # At most half of the server's default queue, so that a single request cannot fill it.
    questions: list[str | DecideItem] = Field(min_length=1, max_length=256)
    llm: Text = ""
    llm_name_source: Annotated[str, Field(max_length=100)] = ""

    def items(self) -> list[DecideItem]:
        """Return all questions as `DecideItem` objects."""
        return [DecideItem(question=item) if isinstance(item, str) else item for item in self.questions]


class DecideResponse(BaseModel):
    """One decision per question, in order."""

    decisions: list[Decision]


class QueriesResponse(BaseModel):
    """One query plan per question, in order; a plan is empty if its question needs no retrieval."""

    plans: list[QueryPlan]


class SystemOneQuestion(BaseModel):
    """One of the typed questions of a System One request.

    For the type ``choice``, ``criteria`` is an object whose keys are the options. Other fields, such as instructions,
    are ignored, because a gate only answers fixed questions.
    """

    type: str
    criteria: Any = None

    @property
    def is_route(self) -> bool:
        """Whether the question is the choice between retrieving and answering directly."""
        return (
            self.type == "choice"
            and isinstance(self.criteria, dict)
            and sorted(self.criteria) == ["direct", "retrieve"]
        )


class SystemOneRequest(BaseModel):
    """What the user asked (the state), and typed questions about it.

    ``model`` names the LLM whose knowledge is judged. Its default, ``"rgate"``, means the LLM that the server was
    started for (``--llm-name``).
    """

    state: str | dict[str, Any] | list[Any]
    questions: dict[Text, SystemOneQuestion] = Field(min_length=1, max_length=64)
    model: Text = NO_LLM

    def item(self) -> DecideItem:
        """Return the user's question with the turns before it.

        Raises:
            ConfigurationError: The field ``state`` has no question of the user, or ``questions`` has one that a gate
                cannot answer.
        """
        for name, question in self.questions.items():
            if not question.is_route and (name, question.type) != ("known", "noul"):
                raise ConfigurationError(
                    f"A retrieval gate cannot answer the question {name[:40]!r} of type {question.type[:20]!r}.",
                    hint='Ask {"known": {"type": "noul"}} for P(the LLM knows), or {"route": {"type": "choice", '
                    '"criteria": {"retrieve": null, "direct": null}}} for the decision.',
                )
        turn = parse_question(self.state)
        if turn is None:
            raise ConfigurationError(
                "The field 'state' contains no question.",
                hint='Send the question, an object with "question" or "messages", or a list of messages, the last by '
                "the user.",
            )
        return DecideItem(question=turn.question, history=list(turn.history))


class NoulAnswer(BaseModel):
    """The answer to a question of type ``noul``, which asks for a probability.

    ``noul`` is P(the LLM knows), or 0 or 1 if an override decided.
    """

    type: Literal["noul"] = "noul"
    noul: float


class ChoiceAnswer(BaseModel):
    """The answer to a question of type ``choice``: whether to retrieve.

    ``probabilities`` has P(known) for ``direct`` and the rest for ``retrieve``. If an override decides, it has 1 for
    the choice and 0 for the other. ``confidence`` is the probability of the choice, and can be below 0.5 if the
    threshold is not 0.5.
    """

    type: Literal["choice"] = "choice"
    choice: Literal["retrieve", "direct"]
    probabilities: dict[str, float]
    confidence: float


class SystemOneResponse(BaseModel):
    """The answers to a System One request, by name of the question, and the tokens that the decision cost."""

    model: str
    answers: dict[str, NoulAnswer | ChoiceAnswer]
    usage: dict[str, int]

    @classmethod
    def from_decision(cls, request: SystemOneRequest, decision: Decision) -> SystemOneResponse:
        """Return the response for a decision."""
        known = decision.effective_p_known  # the response has no field for an override
        probabilities = {"retrieve": 1 - known, "direct": known}
        route = route_label(decision)
        choice = ChoiceAnswer(choice=route, probabilities=probabilities, confidence=probabilities[route])
        answers: dict[str, NoulAnswer | ChoiceAnswer] = {}
        for name, question in request.questions.items():
            answers[name] = choice if question.is_route else NoulAnswer(noul=known)
        usage = {"input_tokens": decision.cost.tokens_in, "output_tokens": decision.cost.tokens_out}
        return cls(model=request.model, answers=answers, usage=usage)


class Problem(BaseModel):
    """An error, in the format of OpenAI's API and of System One."""

    message: str
    type: str
    hint: str = ""


class ProblemResponse(BaseModel):
    """The body of this server's own error responses, with a status of 400 or above."""

    error: Problem


def problem(
    status: int, kind: str, message: str, hint: str = "", headers: Mapping[str, str] | None = None
) -> Response:
    """Return an error response; ``kind`` is the error's ``type`` in its body."""
    body = ProblemResponse(error=Problem(message=message, type=kind, hint=hint))
    return Response(body.model_dump_json(), status, headers, media_type="application/json")


def describe_errors(errors: Sequence[Mapping[str, Any]], body: object) -> str:
    """Return what is wrong with an invalid request, with the fields named as in its body.

    Pydantic also names the types of a union that it tried, such as ``str``, and lists the errors of each. These names
    are left out, and so are errors about a whole value if others are about its parts. The values are left out, too:
    one may be a long question, which does not belong in a log.
    """
    messages: dict[tuple[Any, ...], list[str]] = {}
    for error in islice(errors, _MAX_READ_ERRORS):
        source, *location = error["loc"]
        value: Any = body
        path = []
        for step in location:
            # A step that leads nowhere is the name of a type.
            if (isinstance(value, dict) and step in value) or (
                isinstance(value, list) and isinstance(step, int)
            ):
                path.append(step)
                value = value[step]
        if source != "body":
            path = location
        elif error["type"] == "missing":
            path.append(location[-1])
        messages.setdefault(tuple(path), []).append(error["msg"].removeprefix("Value error, "))
    wholes = {path[:end] for path in messages for end in range(len(path))}
    described = [
        f"{'.'.join(map(str, path))[:_MAX_FIELD]}: {', or: '.join(alternatives)}"
        for path, alternatives in messages.items()
        if path not in wholes
    ]
    return "; ".join(described[:_MAX_ERRORS])


def one_line(text: str) -> str:
    """Return at most 300 characters of a text for a header: one line of printable ASCII.

    White space, also line breaks, becomes single spaces. Typographic quotes, dashes and ellipses become ASCII; any
    other non-ASCII or control character, and ``%``, is percent-encoded.
    """
    # A line break would let a client forge the next header.
    line = " ".join(text[:_MAX_LINE].translate(_IN_ASCII).split())
    return quote(line, safe=_KEPT, errors="replace")


def route_label(decision: Decision) -> Literal["retrieve", "direct"]:
    """Return ``"retrieve"`` or ``"direct"``, the arm that a decision chose."""
    return "retrieve" if decision.retrieve else "direct"


def likeliest_kind(decision: Decision) -> str:
    """Return the likeliest kind of request, such as ``private``; empty without kinds, as after a rule or failure.

    The default gate has one signal per kind. Its other signal, ``"known"``, is not a kind.
    """
    kinds = {name: probability for name, probability in decision.signals.items() if name != "known"}
    return max(kinds, key=kinds.__getitem__, default="")
