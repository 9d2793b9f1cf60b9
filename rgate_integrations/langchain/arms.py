"""The two arms of a LangChain router, and what is left to run of them once it is decided."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from langchain_core.language_models import BaseChatModel
from langchain_core.runnables import Runnable, RunnableConfig, RunnableSequence
from langchain_core.runnables.base import RunnableBindingBase
from langchain_core.runnables.config import patch_config

from rgate_integrations.answering.routing import Strategy
from rgate_integrations.decision import Decision
from rgate_integrations.langchain.runnable import BatchCall, RunBatch
from rgate_integrations.langchain.search_ahead import split


class Arms:
    """The arms of a router, and their parts as a strategy needs them.

    Args:
        retrieve: The arm for unknown questions.
        direct: The arm for known ones.
        strategy: What is looked at before there is a decision.

    Attributes:
        search: The retrieve arm up to its retriever, where it searches ahead.
        rest: What goes on with what that found.
        with_logprobs: The direct arm, asked for log-probabilities where it answers first; None where its LLM has
            none, or has refused to give them.

    Raises:
        ConfigurationError: The retrieve arm cannot search ahead.
    """

    def __init__(self, retrieve: Runnable[Any, Any], direct: Runnable[Any, Any], strategy: Strategy) -> None:
        self.retrieve = retrieve
        self.direct = direct
        self.search, self.rest = split(retrieve) if strategy.searches_ahead else (retrieve, retrieve)
        self.with_logprobs = None if strategy.answer_first is None else with_logprobs(direct)


@dataclass(frozen=True)
class ArmRun:
    """An arm that is left to run for an input."""

    arm: Runnable[Any, Any]
    input: Any
    config: RunnableConfig
    options: dict[str, Any]

    def stream(self) -> Iterator[Any]:
        """Run it as a stream."""
        return self.arm.stream(self.input, self.config, **self.options)

    def astream(self) -> AsyncIterator[Any]:
        """Run it as an asynchronous stream."""
        return self.arm.astream(self.input, self.config, **self.options)

    @staticmethod
    def batch(runs: Sequence[ArmRun]) -> BatchCall:
        """Return the step that runs one arm for several inputs."""
        first = runs[0]
        return BatchCall(
            first.arm, [run.input for run in runs], [run.config for run in runs], **first.options
        )


def arm_config(batch: RunBatch, place: int, decision: Decision) -> RunnableConfig:
    """Return the config an arm runs with: its tag, what was decided, and the draft to go on with if there is one."""
    tag = "retrieve" if decision.retrieve else "direct"
    metadata: dict[str, Any] = {"rgate_retrieve": decision.retrieve, "rgate_p_known": decision.p_known}
    draft = decision.draft
    if not decision.retrieve and draft is not None and draft.source == "llm":
        metadata["rgate_draft"] = draft.text  # the beginning of the answer, for models that can go on with it
    config = patch_config(batch.configs[place], callbacks=batch.managers[place].get_child(tag))
    config["tags"] = [*config.get("tags", []), tag]
    config["metadata"] = {**config.get("metadata", {}), **metadata}
    return config


def with_logprobs(arm: Runnable[Any, Any]) -> Runnable[Any, Any] | None:
    """Return a copy of an arm whose chat model is asked for log-probabilities; None if it does not know them."""
    if isinstance(arm, BaseChatModel):
        return arm.bind(logprobs=True) if knows_logprobs(arm) else None
    if isinstance(arm, RunnableBindingBase):
        inner = None if "logprobs" in arm.kwargs else with_logprobs(arm.bound)
        return None if inner is None else arm.model_copy(update={"bound": inner})
    if isinstance(arm, RunnableSequence):
        steps = list(arm.steps)
        for place in reversed(range(len(steps))):  # the last model is the one that answers
            inner = with_logprobs(steps[place])
            if inner is not None:
                steps[place] = inner
                return RunnableSequence(*steps, name=arm.name)
    return None


def knows_logprobs(model: BaseChatModel) -> bool:
    """Whether a model has a field ``logprobs`` that nobody has set, as LangChain's OpenAI models have."""
    return "logprobs" in type(model).model_fields and getattr(model, "logprobs", None) is None
