"""The answering chat model's own first tokens as drafts, with log-probabilities where its API gives them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from langchain_core.messages import BaseMessage, HumanMessage, SystemMessage
from langchain_core.runnables import Runnable, RunnableConfig

from rgate_integrations.answering.drafting import DraftRequest, says_unsupported
from rgate_integrations.decision import Draft
from rgate_integrations.langchain.chat_models import models_in_turn, takes_options, with_options
from rgate_integrations.langchain.decision_context import bound_draft
from rgate_integrations.langchain.runnable import BatchCall
from rgate_integrations.prompts import ANSWER
from rgate_integrations.runtime.flow import Flow
from rgate_integrations.runtime.logprobs import message_logprobs

DRAFT_TAG = "rgate_draft"
CONDENSE_TAG = "rgate_condense"
NO_STREAM_TAG = "nostream"  # LangGraph keeps the tokens of a run with this tag from its message stream

_log = logging.getLogger("rgate_integrations")
_CUT = ("length", "max_tokens", "MAX_TOKENS")


class ChatDrafter:
    """Lets a chat model write the first tokens of its answer.

    The model is asked with ``max_tokens`` and ``logprobs``, also inside ``bind``, ``with_retry``, ``with_config``, a
    chain and the like. One that says that it does not take them is asked with fewer of them, and what it took is
    remembered. Any other error, such as a timeout, costs that question its draft and changes nothing for the next
    call; a model that has fallbacks leaves the draft to them.

    The runs of drafts carry the tags `DRAFT_TAG` and `NO_STREAM_TAG`: they are no part of the answer.

    Args:
        llm: The answering chat model, or any runnable from messages to a message or string.
        tokens: Maximum number of tokens.

    Raises:
        ConfigurationError: ``llm`` writes what it is asked into a message history.
    """

    def __init__(self, llm: Runnable[Any, Any], tokens: int = 32) -> None:
        self.llm = llm
        self.tokens = tokens
        self._asked = [
            (model, DraftRequest(tokens, options=takes_options(model))) for model in models_in_turn(llm)
        ]

    def drafting(
        self,
        questions: Sequence[str],
        configs: Sequence[RunnableConfig],
        histories: Sequence[Sequence[BaseMessage]] | None = None,
    ) -> Flow[list[Draft | None]]:
        """Write a draft for each question, as one batch; those that a model failed for are left to its fallbacks.

        A draft that the same LLM has written for the same question in the same request is not written again.

        Args:
            questions: The questions.
            configs: A config for each of them.
            histories: The earlier turns of each; none when None.

        Returns:
            One draft a question, in order; None where every model failed.
        """
        turns = histories or [()] * len(questions)
        prompts: list[list[BaseMessage]] = [
            [SystemMessage(ANSWER.system), *earlier, HumanMessage(question)]
            for question, earlier in zip(questions, turns, strict=True)
        ]
        hidden = [tagged(config, DRAFT_TAG) for config in configs]
        drafts = [
            bound_draft(config, question, llm=self.llm, tokens=self.tokens)
            for config, question in zip(configs, questions, strict=True)
        ]
        answers: dict[int, Any] = {}
        waiting = [place for place, draft in enumerate(drafts) if draft is None]
        for model, request in self._asked:
            if not waiting:
                break
            found = yield from _asking(
                model, request, [prompts[i] for i in waiting], [hidden[i] for i in waiting]
            )
            answers.update(zip(waiting, found, strict=True))
            waiting = [place for place in waiting if isinstance(answers[place], Exception)]
        for place, answer in answers.items():
            drafts[place] = self._draft(answer)
        return drafts

    def _draft(self, answer: Any) -> Draft | None:
        if isinstance(answer, Exception):
            _log.warning("The LLM wrote no draft: %s: %s", type(answer).__name__, answer)
            return None
        draft = _read(answer).head(self.tokens)
        if not draft.text:
            _log.warning("The LLM wrote no draft: its answer has no text.")
            return None
        return draft


def tagged(config: RunnableConfig, tag: str) -> RunnableConfig:
    """Return the config of a run that is no part of the answer: with this tag, and hidden from message streams."""
    return {**config, "tags": [*(config.get("tags") or []), NO_STREAM_TAG, tag]}


def _asking(
    model: Runnable[Any, Any],
    request: DraftRequest,
    prompts: Sequence[Sequence[BaseMessage]],
    configs: Sequence[RunnableConfig],
) -> Flow[list[Any]]:
    """Ask one model for a batch; those prompts whose form it refused are asked again. Returns answers and errors."""
    answers: dict[int, Any] = {}
    waiting = list(range(len(prompts)))
    any_answered = False
    for form in request.forms:
        asked = with_options(model, form)
        found = yield BatchCall(asked, [prompts[i] for i in waiting], [configs[i] for i in waiting])
        answers.update(zip(waiting, found, strict=True))
        answered = any(not isinstance(answer, Exception) for answer in found)
        # A form that worked for another question of this batch is one that the model takes.
        if answered and not any_answered:
            request.worked(form)
            any_answered = True
        waiting = [i for i in waiting if _is_refusal(answers[i])]
        if not waiting:
            break
        _log.info("The LLM does not take %s: %s", ", ".join(form) or "the prompt", answers[waiting[0]])
    return [answers[i] for i in range(len(prompts))]


def _read(answer: Any) -> Draft:
    """Return what a model answered as a draft."""
    if not isinstance(answer, BaseMessage):
        return Draft(text=str(answer).strip(), source="llm")
    metadata = answer.response_metadata
    tokens, logprobs = message_logprobs(metadata)
    reason = metadata.get("finish_reason") or metadata.get("stop_reason")
    return Draft(
        text=answer.text.strip(),
        tokens=tokens,
        logprobs=logprobs or None,
        finished=reason not in _CUT,
        source="llm",
        model=str(metadata.get("model_name") or metadata.get("model") or ""),
    )


def _is_refusal(answer: Any) -> bool:
    return isinstance(answer, Exception) and says_unsupported(answer)
