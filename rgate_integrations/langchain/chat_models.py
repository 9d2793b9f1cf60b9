"""The chat models inside what a user calls "my LLM": bound, retried, with fallbacks, or a step of a chain."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from langchain_core.language_models import BaseLanguageModel
from langchain_core.runnables import Runnable, RunnableGenerator, RunnableLambda, RunnableSequence
from langchain_core.runnables.base import RunnableBindingBase
from langchain_core.runnables.configurable import DynamicRunnable
from langchain_core.runnables.fallbacks import RunnableWithFallbacks
from langchain_core.runnables.history import RunnableWithMessageHistory

from rgate_integrations.errors import ConfigurationError


def models_in_turn(llm: Runnable[Any, Any]) -> list[Runnable[Any, Any]]:
    """Return the models that are asked one after another: a model and its fallbacks, each in the wrappers it has.

    The steps of a chain that come after its model are left out: a parser would drop the log-probabilities.

    Raises:
        ConfigurationError: It writes what it is asked into a message history.
    """
    if isinstance(llm, RunnableWithMessageHistory):
        raise ConfigurationError(
            "An LLM that keeps a message history would keep the drafts in it too.",
            hint="Pass the chat model itself as llm=, and wrap the chain that answers.",
        )
    if isinstance(llm, RunnableWithFallbacks):
        return [model for each in llm.runnables for model in models_in_turn(each)]
    if isinstance(llm, RunnableBindingBase):
        return [llm.model_copy(update={"bound": model}) for model in models_in_turn(llm.bound)]
    if isinstance(llm, RunnableSequence):
        return _ending_with_a_model(llm)
    return [llm]


def takes_options(llm: Runnable[Any, Any]) -> bool:
    """Return whether a model that `models_in_turn` returned may take options; a plain function does not."""
    return not isinstance(_innermost(llm), RunnableLambda | RunnableGenerator)


def with_options(llm: Runnable[Any, Any], options: Mapping[str, Any]) -> Runnable[Any, Any]:
    """Bind options to a model that `models_in_turn` returned; they win over those that the user has bound."""
    if not options:
        return llm
    if isinstance(llm, RunnableSequence):
        # Options of a sequence go to its first step only.
        return RunnableSequence(*llm.steps[:-1], with_options(llm.steps[-1], options))
    if isinstance(llm, RunnableBindingBase):
        kept = {name: value for name, value in llm.kwargs.items() if name not in options}
        return llm.model_copy(update={"bound": with_options(llm.bound, options), "kwargs": kept})
    return llm.bind(**options)


def _ending_with_a_model(
    chain: RunnableSequence[Any, Any],
) -> list[Runnable[Any, Any]]:
    steps = chain.steps
    places = [place for place, step in enumerate(steps) if _holds_model(step)]
    if not places:
        return [chain]
    last = places[-1]
    models = models_in_turn(steps[last])
    if last == 0:
        return models
    return [RunnableSequence(*steps[:last], model) for model in models]


def _holds_model(step: Runnable[Any, Any]) -> bool:
    if isinstance(step, RunnableWithFallbacks):
        return _holds_model(step.runnable)
    if isinstance(step, RunnableSequence):
        return any(_holds_model(inner) for inner in step.steps)
    if isinstance(step, RunnableBindingBase):
        return _holds_model(step.bound)
    if isinstance(step, DynamicRunnable):
        return _holds_model(step.default)
    return isinstance(step, BaseLanguageModel)


def _innermost(llm: Runnable[Any, Any]) -> Runnable[Any, Any]:
    while True:
        if isinstance(llm, RunnableBindingBase):
            llm = llm.bound
        elif isinstance(llm, DynamicRunnable):
            llm = llm.default
        elif isinstance(llm, RunnableSequence):
            llm = llm.steps[-1]
        else:
            return llm
