"""The answering chat model's own first tokens as drafts, with log-probabilities where its API gives them."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import BaseMessage, HumanMessage, SystemMessage
from langchain_core.runnables import Runnable, RunnableConfig

from rgate_integrations.decision import Draft
from rgate_integrations.drafting import DraftRequest, says_unsupported
from rgate_integrations.flow import Flow
from rgate_integrations.langchain.runnable import BatchCall
from rgate_integrations.prompts import ANSWER

_log = logging.getLogger("rgate_integrations")
_CUT = ("length", "max_tokens", "MAX_TOKENS")


class ChatDrafter:
    """Lets a chat model write the first tokens of its answer.

    The model is asked with ``max_tokens`` and ``logprobs``. One that says that it does not take them is asked with
    fewer of them, and what it took is remembered. Any other error, such as a timeout, costs that question its draft
    and changes nothing for the next call.

    Args:
        llm: The answering chat model, or any runnable from messages to a message or string.
        tokens: Maximum number of tokens.
    """

    def __init__(self, llm: Runnable[Any, Any], tokens: int = 32) -> None:
        self.llm = llm
        self.tokens = tokens
        self.request = DraftRequest(tokens, options=isinstance(llm, BaseChatModel))

    def drafting(
        self, questions: Sequence[str], configs: Sequence[RunnableConfig]
    ) -> Flow[list[Draft | None]]:
        """Write a draft for each question, as one batch; those whose form was refused are asked again.

        Args:
            questions: The questions.
            configs: A config for each of them.

        Returns:
            One draft a question, in order; None where the model failed.
        """
        prompts = [[SystemMessage(ANSWER.system), HumanMessage(question)] for question in questions]
        answers: dict[int, Any] = {}
        waiting = list(range(len(questions)))
        any_answered = False
        for form in self.request.forms:
            llm = self.llm.bind(**form) if form else self.llm
            found = yield BatchCall(llm, [prompts[i] for i in waiting], [configs[i] for i in waiting])
            answers.update(zip(waiting, found, strict=True))
            answered = any(not isinstance(answer, Exception) for answer in found)
            # A form that worked for another question of this batch is one that the model takes.
            if answered and not any_answered:
                self.request.worked(form)
                any_answered = True
            waiting = [i for i in waiting if _is_refusal(answers[i])]
            if not waiting:
                break
            _log.info("The LLM does not take %s: %s", ", ".join(form) or "the prompt", answers[waiting[0]])
        return [self._draft(answers[i]) for i in range(len(questions))]

    def _draft(self, answer: Any) -> Draft | None:
        if isinstance(answer, Exception):
            _log.warning("The LLM wrote no draft: %s: %s", type(answer).__name__, answer)
            return None
        if not isinstance(answer, BaseMessage):
            return Draft(text=str(answer).strip(), source="llm").head(self.tokens)
        metadata = answer.response_metadata
        tokens, logprobs = token_logprobs(metadata)
        reason = metadata.get("finish_reason") or metadata.get("stop_reason")
        draft = Draft(
            text=answer.text.strip(),
            tokens=tokens,
            logprobs=logprobs,
            finished=reason not in _CUT,
            source="llm",
            model=str(metadata.get("model_name") or metadata.get("model") or ""),
        )
        return draft.head(self.tokens)


def token_logprobs(metadata: Mapping[str, Any]) -> tuple[tuple[str, ...], tuple[float, ...] | None]:
    """Read tokens and log-probabilities from a message's ``response_metadata``, as OpenAI-style servers give them.

    Returns:
        The tokens and their log-probabilities; ``((), None)`` when there are none.
    """
    given = metadata.get("logprobs")
    content = given.get("content") if isinstance(given, Mapping) else given
    if not isinstance(content, Sequence) or isinstance(content, str) or not content:
        return (), None
    try:
        tokens = tuple(str(entry["token"]) for entry in content)
        logprobs = tuple(min(float(entry["logprob"]), 0.0) for entry in content)
    except (KeyError, TypeError, ValueError):
        return (), None
    return tokens, logprobs


def _is_refusal(answer: Any) -> bool:
    return isinstance(answer, Exception) and says_unsupported(answer)
