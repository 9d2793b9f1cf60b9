"""`GatedTool`: a tool that runs only if the agent's LLM does not know the answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from itertools import islice
from typing import Any

from llama_index.core.schema import QueryBundle
from llama_index.core.tools import BaseTool, FunctionTool, ToolOutput
from llama_index.core.tools.types import adapt_to_async_tool

from rgate_integrations.decision import Decision, Override, Request
from rgate_integrations.engine.decider import Failed
from rgate_integrations.engine.own_gate import GateLike
from rgate_integrations.errors import ConfigurationError, EvidenceError, unknown_name
from rgate_integrations.llama_index.decider import QueryDecider, check_part
from rgate_integrations.runtime.flow import Call, Flow, arun, run
from rgate_integrations.runtime.text import logger

ANSWER_YOURSELF = "You know this. Answer from what you know, without calling this tool again."
QUESTION_KEYS = ("input", "question", "query")
_FUNCTIONS = ("_fn", "_async_fn", "_real_fn")
# Asks the gate whether the LLM knows what an argument is about. Of 936 calls with a private one (a name, an id),
# 67 skip, and of 405 with a harmless one (a limit, a language), 115 retrieve. With "Tell me about NAME VALUE.",
# these are 147 and 150.
_ASK_ABOUT = "Tell me more about {} in {}."
_MAX_DETAILS = 16


class GatedTool(FunctionTool):
    """Guards a tool of a ``FunctionAgent``, a ``ReActAgent`` or an ``AgentWorkflow``.

    A call with a known question does not reach the tool: the call's output asks the agent to answer from its
    own knowledge, and its ``raw_output`` is the decision. The gate judges the question that the agent writes
    for the tool, which is already independent of earlier turns. If that skips, and no rule says so, the gate without
    its rules also judges what the other arguments are about, since "What is a penalty clause?" may be asked about one
    customer: their texts and whole numbers, also in lists and mappings, that are neither empty nor the default, and
    keys as in ``{"Hansen": True}``. If one retrieves, so does the call, from all corpora. A call without a question
    reaches the tool.

    Args:
        tool: The guarded tool, or a function that LlamaIndex can turn into one.
        gate: A gate, or an argument for `load_gate`, such as ``load_gate(llm_name=…)`` with the name of your LLM; the
            default gate when None.
        question: Name of the argument with the question, the only one to be judged. By default, the question is the
            first of ``input``, ``question`` and ``query`` that is a text, or else the only text argument.
        known_message: The output for a known question.

    Raises:
        ConfigurationError: The gate is invalid, ``tool`` is not a tool or function, or it has
            ``return_direct=True``: the user would see the message that is meant for the agent.
        UnknownNameError: No gate has that name, or ``question`` names an argument that the tool lacks.
        ModelLoadError: A trained gate cannot be read or downloaded.
        MissingDependencyError: The gate is a URL, and the extra ``openai`` is not installed.

    Examples:
        >>> tool = GatedTool(QueryEngineTool.from_defaults(engine), gate)  # doctest: +SKIP
        >>> agent = FunctionAgent(tools=[tool], llm=llm)  # doctest: +SKIP
    """

    def __init__(
        self,
        tool: BaseTool | Callable[..., Any],
        gate: GateLike | str | None = None,
        *,
        question: str | None = None,
        known_message: str = ANSWER_YOURSELF,
    ) -> None:
        check_part(tool, "__call__")
        self.tool = adapt_to_async_tool(
            tool if isinstance(tool, BaseTool) else FunctionTool.from_defaults(tool)
        )
        if self.tool.metadata.return_direct:
            raise ConfigurationError(
                f"The tool {self.tool.metadata.name!r} has return_direct=True: its output goes to the user, but the "
                "message for a known question is meant for the agent.",
                hint="Set return_direct=False, or guard the tool's engine with a GatedQueryEngine.",
            )
        # Kept, because making the schema takes longer than a call.
        parameters = self.tool.metadata.get_parameters_dict().get("properties", {})
        self._defaults = {name: parameter.get("default") for name, parameter in parameters.items()}
        if question is not None and parameters and question not in parameters:  # the tool would always run
            raise unknown_name(f"parameter of the tool {self.tool.metadata.name!r}", question, parameters)
        self.decider = QueryDecider(gate)
        self._without_rules = self.decider.gate.without_rules()
        self.question = question
        self.known_message = known_message
        super().__init__(fn=self.call, async_fn=self.acall, metadata=self.tool.metadata)
        # Agents pass their context to function tools that ask for it, so ask for it if the guarded tool does.
        self.requires_context = getattr(self.tool, "requires_context", False)
        self.ctx_param_name = getattr(self.tool, "ctx_param_name", None)

    def __getstate__(self) -> dict[str, Any]:
        """Pickle and copy without the two functions, because LlamaIndex's wrappers of them cannot be copied."""
        return {name: value for name, value in vars(self).items() if name not in _FUNCTIONS}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__init__(fn=self.call, async_fn=self.acall, metadata=state["_metadata"])
        vars(self).update(state)

    def call(self, *args: Any, **kwargs: Any) -> ToolOutput:
        """Call the tool, or return the message for a known question."""
        return run(self._call(args, kwargs))

    async def acall(self, *args: Any, **kwargs: Any) -> ToolOutput:
        """Call the tool, or return the message for a known question."""
        return await arun(self._call(args, kwargs))

    def _call(self, args: Sequence[Any], arguments: Mapping[str, Any]) -> Flow[ToolOutput]:
        bound = getattr(self.tool, "partial_params", None) or {}
        named = {**bound, **dict(zip(self._defaults, args, strict=False)), **arguments}
        question = _question(named, self.question) or ""
        bundle = QueryBundle(question)
        decision: Decision | None = None
        if question:
            decision = yield from self._decide(bundle, named)
        if decision is not None and not decision.retrieve:
            inputs = {name: value for name, value in arguments.items() if name != self.ctx_param_name}
            return ToolOutput(
                tool_name=self.metadata.get_name(),
                content=self.known_message,
                raw_input={"args": args, "kwargs": inputs},
                raw_output=decision,
            )
        # Without a question, no decision was made.
        with nullcontext() if decision is None else self.decider.bind(decision, bundle):
            output: ToolOutput = yield Call(self.tool.call, self.tool.acall, *args, **arguments)
        return output

    def _decide(self, bundle: QueryBundle, arguments: Mapping[str, Any]) -> Flow[Decision]:
        """Return the decision about the question and, if it skips, about the other arguments."""
        decision = yield from self.decider.judge(bundle)
        # A rule that skips settles it; what no corpus covers has an outcome, too.
        is_settled = decision.override is not None and decision.outcome is None
        if self.question is None and not decision.retrieve and not is_settled:
            decision = yield from self._judge_details(decision, bundle.query_str, arguments)
        if decision is not self.decider.reusable(bundle):  # otherwise it has been emitted
            self.decider.emit(decision)
        return decision

    def _judge_details(
        self, decision: Decision, question: str, arguments: Mapping[str, Any]
    ) -> Flow[Decision]:
        """Return the decision, changed to retrieve if an argument is about something that the LLM may not know."""
        try:
            details = list(islice(_details(arguments, self._defaults, question), _MAX_DETAILS + 1))
        except Exception as error:  # an argument may be any object
            return (yield from self._fail(error, decision))
        items = [Request(text) for _, text in details[:_MAX_DETAILS]]
        if not items:
            return decision
        judged = yield from self._without_rules.flow(items)
        cost = sum((other.cost for other in judged), decision.cost)
        reason = ""
        if len(details) > len(items):
            reason = f"The other arguments have more than {_MAX_DETAILS} values."
        for (name, _), other in zip(details, judged, strict=False):
            if other.error is not None:
                return other.model_copy(update={"question": decision.question, "cost": cost})
            if other.retrieve:
                reason = f"The argument “{name}” seems to be about something that the LLM does not know."
        if not reason:
            return decision.model_copy(update={"cost": cost})
        override = Override(retrieve=True, reason=reason)
        reason = f"{reason} {decision.reason}".strip()
        # The decision's corpora are near to the question; what the argument is about may be in another.
        return decision.with_retrieve(
            True, outcome=None, override=override, reason=reason, cost=cost, corpora=(), corpus=None
        )

    def _fail(self, error: Exception, decision: Decision) -> Flow[Decision]:
        """Return the decision about arguments that cannot be read; raise with the gate's ``on_error="raise"``."""
        # Without the error's message, which may quote an argument.
        failure = EvidenceError(
            f"The arguments of the tool {self.metadata.name!r} cannot be read: {type(error).__name__}.",
            hint='Pass texts, numbers, lists and mappings, or let question="NAME" say which argument to judge.',
        )
        failure.__cause__ = error
        (failed,) = yield from self._without_rules.flow([Failed(failure, decision.question)])
        logger.warning("The gate %r retrieves: %s", self._without_rules.name, failure)
        return failed.model_copy(update={"cost": decision.cost})


def _question(arguments: Mapping[str, Any], name: str | None) -> str | None:
    """Return the question among a call's arguments; None without one, or if several texts could be the question."""
    for key in QUESTION_KEYS if name is None else (name,):
        if isinstance(arguments.get(key), str):
            return str(arguments[key])
    if name is not None:
        return None
    texts = [value for value in arguments.values() if isinstance(value, str)]
    return texts[0] if len(texts) == 1 else None


def _details(
    arguments: Mapping[str, Any], defaults: Mapping[str, Any], question: str
) -> Iterator[tuple[str, str]]:
    """Yield what to ask about a call's arguments, without question and defaults, each with the argument's name."""
    for argument, value in arguments.items():
        usual = set(_named_values(argument, defaults.get(argument)))
        for name, text in _named_values(argument, value):
            if (name, text) not in usual and text != question:
                yield argument, _ASK_ABOUT.format(text, name.replace("_", " "))


def _named_values(name: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yield the name and text of each text and whole number in a value; in a mapping, the key is the name."""
    if isinstance(value, dict):
        for key, inner in value.items():
            # In {"Hansen": True}, the key is the value.
            named = (name, str(key)) if inner is True else (str(key), inner)
            yield from _named_values(*named)
    elif isinstance(value, list | tuple | set | frozenset):
        for inner in value:
            yield from _named_values(name, inner)
    elif isinstance(value, float) and value.is_integer():  # as some LLMs and clients write a whole number
        yield from _named_values(name, int(value))
    # Any other object says nothing, and neither do 0, True and measures such as 0.5.
    elif isinstance(value, str | int) and not isinstance(value, bool) and value and str(value).strip():
        yield name, str(value)
