"""`gated_rag`: a whole gated RAG chain in one line, from a retriever and a chat model."""

from __future__ import annotations

from collections.abc import Mapping
from operator import itemgetter
from typing import Any

from langchain_core.documents import Document
from langchain_core.messages import BaseMessage, SystemMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompt_values import ChatPromptValue, PromptValue
from langchain_core.prompts import BasePromptTemplate, ChatPromptTemplate, MessagesPlaceholder
from langchain_core.runnables import Runnable, RunnableLambda, RunnablePassthrough
from langchain_core.runnables.base import RunnableLike

from rgate_integrations.answering.answer_first import AnswerFirst
from rgate_integrations.answering.look_first import LookFirst
from rgate_integrations.decision import valid_flag
from rgate_integrations.engine.follow_ups import list_search_texts
from rgate_integrations.engine.own_gate import GateLike
from rgate_integrations.errors import ConfigurationError
from rgate_integrations.gates.base import Gate
from rgate_integrations.langchain.chat_models import as_runnable
from rgate_integrations.langchain.corpora import (
    CorpusRetriever,
    as_searched,
    format_documents,
    fuse_documents,
    longest,
)
from rgate_integrations.langchain.gate import RetrievalGate
from rgate_integrations.langchain.questions import (
    HISTORY_KEYS,
    QUESTION_KEYS,
    GateCall,
    QuestionInput,
    UserTurn,
    condense_follow_ups,
)
from rgate_integrations.langchain.runnable import FlowRunnable, Run, run_groups
from rgate_integrations.prompts import ANSWER, ANSWER_WITH_PASSAGES, PromptTemplate
from rgate_integrations.runtime.flow import Flow

QUESTION = "question"
HISTORY = "chat_history"
_READ = frozenset((*QUESTION_KEYS, *HISTORY_KEYS))
_EXAMPLES = {"prompt": "{context} {question}", "direct_prompt": "Answer in one sentence: {question}"}


def gated_rag(
    retriever: RunnableLike[str, list[Document]] | Mapping[str, RunnableLike[str, list[Document]]],
    llm: Runnable[Any, Any],
    prompt: BasePromptTemplate[Any] | None = None,
    *,
    direct_prompt: BasePromptTemplate[Any] | None = None,
    gate: RetrievalGate | GateLike | Gate | str | None = None,
    answer_first: bool | AnswerFirst = False,
    look_first: bool | LookFirst = False,
    return_sources: bool = False,
) -> Runnable[QuestionInput, Any]:
    """Return a chain from question to answer that retrieves only if the LLM does not know the answer.

    The question is a string, a dict, messages or a prompt value, as for `RetrievalGate`. The earlier
    messages, or those in a dict under ``chat_history`` or ``history``, become the prompts' ``chat_history``, with
    system messages and, in a message at its end, the question's images. A dict's other keys are variables for the
    prompts, too.
    A gate with ``condense`` rewrites a follow-up as a standalone question once, for itself, the retriever and
    the prompts, whose ``chat_history`` then has only system messages and images.

    Args:
        retriever: Finds passages: a retriever, or any runnable or function from a query to documents. With several
            corpora, also a mapping from their names to retrievers; see `RetrievalGate.guard`.
        llm: The LLM that answers.
        prompt: Prompt for unknown questions, with ``context``, ``question`` and optionally ``chat_history``. The
            default is the prompt of ``rgate ask``.
        direct_prompt: Prompt for known questions, without ``context``. The default asks for one or two sentences.
        gate: A `RetrievalGate`, or a ``gate`` argument for one; the default gate when None.
        answer_first: Judge the first tokens of the LLM's answer; see `RetrievalGate.route`.
        look_first: Search for every question; the LLM reads the passages if they help. See `RetrievalGate.route`.
        return_sources: Return ``{"sources": [...], "answer": "..."}`` instead of the answer.

    Raises:
        RGateError: ``llm`` is not a runnable, but for example a string. A prompt has no ``question``, or ``prompt``
            no ``context``. Or the gate or an option is invalid; see `RetrievalGate` and `RetrievalGate.route`.
        TypeError: A prompt is not a runnable.
        InvalidQuestionError: Raised by a call: the input has no question.
        ConfigurationError: Raised by a call: the retriever does not return documents.
    """
    llm = as_runnable(llm, "llm")
    decider = gate if isinstance(gate, RetrievalGate) else RetrievalGate(gate)
    _check_prompts(decider.input_key, prompt=prompt, direct_prompt=direct_prompt)
    with_passages = prompt or _chat_prompt(ANSWER_WITH_PASSAGES, passages="context", question=QUESTION)
    closed_book = direct_prompt or _chat_prompt(ANSWER, question=QUESTION)
    find = as_searched(retriever, CorpusRetriever, decider.gate.corpora, any_corpora=decider.corpus is True)
    # The search is a separate step, so that look_first can run the arm up to it.
    retrieve: Runnable[Any, Any] = RunnablePassthrough.assign(sources=TurnSearch(retriever=find)).pipe(
        RunnablePassthrough.assign(context=RunnableLambda(itemgetter("sources")) | format_documents),
        RunnablePassthrough.assign(answer=with_passages | llm | StrOutputParser()),
    )
    direct: Runnable[Any, Any] = RunnablePassthrough.assign(answer=closed_book | llm | StrOutputParser())
    keys: Any = ["sources", "answer"] if valid_flag(return_sources, "return_sources") else "answer"
    router = decider.route(
        retrieve=retrieve.pick(keys),
        direct=direct.pick(keys),
        answer_first=answer_first,
        look_first=look_first,
    )
    turns = ReadTurn(input_key=decider.input_key, condense=decider.condense)
    return turns.pipe(router, name="gated_rag")


class ReadTurn(FlowRunnable[QuestionInput, dict[str, Any]]):
    """Reads the question and its history from any input, and condenses follow-ups once for the gate and both arms.

    Attributes:
        input_key: Key of the question in dict inputs; see `RetrievalGate`. The output has the question under this key
            and under ``question``.
        condense: Runnable from messages to one standalone question; None leaves the question unchanged.
    """

    input_key: str | None = None
    condense: Runnable[Any, Any] | None = None

    def flow(self, runs: list[Run]) -> Flow[list[dict[str, Any] | Exception]]:
        """Return the question and history of each input as a dict, with the input's other keys.

        Follow-ups are condensed in one batch.
        """
        calls = [GateCall.read(single, self.input_key) for single in runs]
        yield from condense_follow_ups(self.condense, calls)
        for call in calls:
            if call.result is None:
                given = call.run.input if isinstance(call.run.input, Mapping) else {}
                call.result = {
                    **{name: given[name] for name in given if name not in _READ},
                    QUESTION: call.turn.question,
                    self.input_key or QUESTION: call.turn.question,
                    # A follow-up that could not be condensed keeps its history; the gate reports the error.
                    HISTORY: list(call.turn.earlier),
                    "sources": [],
                }
        return [call.result for call in calls]


class TurnSearch(FlowRunnable[dict[str, Any], list[Document]]):
    """Searches for the question of a `ReadTurn`; after earlier turns, for the texts of `list_search_texts`.

    The documents of several texts are fused; there are no more of them than one search finds.

    Attributes:
        retriever: Finds documents for a text.
    """

    retriever: Runnable[Any, Any]

    def flow(self, runs: list[Run]) -> Flow[list[list[Document] | Exception]]:
        """Search for the texts of all inputs in one batch."""
        texts_of = []
        for single in runs:
            turn = UserTurn(single.input[QUESTION], tuple(single.input[HISTORY]))
            # A message may be only an image, and embedding APIs reject an empty query.
            texts_of.append([text for text in list_search_texts(turn.question, turn.lines) if text.strip()])
        found = yield from run_groups(self.retriever, texts_of, [single.child() for single in runs])
        return [fuse_documents([{}] * len(rankings), rankings, longest(rankings)) for rankings in found]


def _check_prompts(input_key: str | None, **prompts: Any) -> None:
    """Raise a `ConfigurationError` for a prompt that does not show the question or, for ``prompt``, the passages."""
    shows: dict[str, set[str | None]] = {"question": {QUESTION, input_key}, "context": {"context", "sources"}}
    for option, prompt in prompts.items():
        for variable in shows if option == "prompt" else [QUESTION]:
            if shows[variable].isdisjoint(getattr(prompt, "input_variables", shows[variable])):
                raise ConfigurationError(
                    f"{option}= has no {{{variable}}}, so the LLM would not see the {variable}.",
                    hint=f'For example, ChatPromptTemplate.from_template("{_EXAMPLES[option]}").',
                )


def _chat_prompt(template: PromptTemplate, **variables: str) -> Runnable[Any, Any]:
    """Convert one of this package's prompts to LangChain's format; ``variables`` gives the new name of each field."""
    fields = {name: f"{{{variable}}}" for name, variable in variables.items()}
    user = template.user.format(**fields)
    history = MessagesPlaceholder(HISTORY, optional=True)
    # A message, not a template: the system text has no fields, and its braces must stay braces.
    prompt = ChatPromptTemplate.from_messages([SystemMessage(template.system), history, ("human", user)])
    return prompt | _merge_runs


def _merge_runs(prompt: PromptValue) -> ChatPromptValue:
    """Merge messages of one role in a row, such as our system message and the user's: some models refuse them."""
    messages: list[BaseMessage] = []
    for message in prompt.to_messages():
        if messages and isinstance(message, type(messages[-1])):
            # Only the contents: LangChain cannot merge every value that a client may have added to a message.
            messages[-1] = type(message)(_join(messages[-1].content, message.content))
        else:
            messages.append(message)
    return ChatPromptValue(messages=messages)


def _join(*contents: str | list[Any]) -> str | list[Any]:
    """Join the contents of messages; beside images, texts are blocks, because some models refuse strings there."""
    parts = [part for content in contents for part in ([content] if isinstance(content, str) else content)]
    if all(isinstance(content, str) for content in contents):
        return "\n\n".join(parts)
    return [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
