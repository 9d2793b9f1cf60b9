"""The chat models inside what a user calls "my LLM": bound, retried, with fallbacks, or a step of a chain."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from langchain_core.language_models import BaseLanguageModel
from langchain_core.runnables import (
    Runnable,
    RunnableBranch,
    RunnableGenerator,
    RunnableLambda,
    RunnableParallel,
    RunnableSequence,
)
from langchain_core.runnables.base import RunnableBindingBase, RunnableEachBase
from langchain_core.runnables.configurable import (
    DynamicRunnable,
    RunnableConfigurableAlternatives,
    RunnableConfigurableFields,
)
from langchain_core.runnables.fallbacks import RunnableWithFallbacks
from langchain_core.runnables.history import RunnableWithMessageHistory
from langchain_core.runnables.passthrough import RunnableAssign
from langchain_core.runnables.utils import ConfigurableFieldMultiOption, ConfigurableFieldSingleOption

from rgate_integrations.errors import ConfigurationError
from rgate_integrations.gates.abilities.resolve import weakest

_NAMES = ("base_model_id", "model_name", "model", "deployment_name", "model_id")
"""Where chat models keep the name of the LLM. Bedrock's first: its ``model_id`` may be an ARN that says nothing."""


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
        places = [place for place, step in enumerate(llm.steps) if _llm_names(step, {})]
        if places:
            *before, last = llm.steps[: places[-1] + 1]
            models = models_in_turn(last)
            return [RunnableSequence(*before, model) for model in models] if before else models
    return [llm]


def takes_options(llm: Runnable[Any, Any]) -> bool:
    """Return whether a model that `models_in_turn` returned may take options; a plain function does not."""
    if isinstance(llm, RunnableBindingBase):
        return takes_options(llm.bound)
    if isinstance(llm, DynamicRunnable):
        return takes_options(llm.default)
    if isinstance(llm, RunnableSequence):
        return takes_options(llm.steps[-1])
    return not isinstance(llm, RunnableLambda | RunnableGenerator)


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


def llm_name(arm: Runnable[Any, Any]) -> str:
    """Return the name of the LLM that answers in an arm; of several, such as fallbacks, the one that knows least.

    Empty where no model is found, or where one of them tells no name and the others know more than the default.
    """
    names = _llm_names(arm, {})
    return weakest(names) if names else ""


def _llm_names(arm: Runnable[Any, Any], options: Mapping[str, Any]) -> list[str]:
    """Return the name of each model that may answer in an arm; an empty one for a model that tells none."""
    if isinstance(arm, RunnableBindingBase):
        return _llm_names(arm.bound, {**arm.kwargs, **options})
    if isinstance(arm, RunnableSequence):
        for step in reversed(arm.steps):  # the last model is the one that answers
            names = _llm_names(step, {})
            if names:
                return names
        return []
    if isinstance(arm, RunnableConfigurableFields):
        names = _llm_names(arm.default, options)
        for name, field in arm.fields.items():  # a call's config may choose among several models
            if name in _NAMES and isinstance(
                field, ConfigurableFieldSingleOption | ConfigurableFieldMultiOption
            ):
                names += [str(option) for option in field.options.values()]
        return names
    parts = _parts(arm)
    if parts is None:  # a model, or such as what init_chat_model returns, which is no model itself
        name = _name_of(arm, options)
        return [name] if name or isinstance(arm, BaseLanguageModel) else []
    found = []
    for part in parts:
        # What a factory would make is not known before it is called.
        found += _llm_names(part, options) if isinstance(part, Runnable) else [""]
    return found


def _parts(arm: Runnable[Any, Any]) -> Iterable[Any] | None:
    """Return the runnables of which any may answer; None for a runnable that is not made of others."""
    if isinstance(arm, RunnableWithFallbacks):
        return arm.runnables
    if isinstance(arm, RunnableConfigurableAlternatives):
        return [arm.default, *arm.alternatives.values()]
    if isinstance(arm, RunnableParallel):
        return arm.steps__.values()
    if isinstance(arm, RunnableAssign):
        return [arm.mapper]
    if isinstance(arm, RunnableBranch):
        return [*(branch for _, branch in arm.branches), arm.default]
    if isinstance(arm, RunnableEachBase):
        return [arm.bound]
    if isinstance(arm, RunnableLambda):
        return arm.deps
    return None


def _name_of(model: Runnable[Any, Any], options: Mapping[str, Any]) -> str:
    """Return the name that a model, or the options of its call, tell; empty if they tell none."""
    bound = options.get("model") or options.get("model_name")
    if isinstance(bound, str) and bound.strip():
        return bound
    chosen: Any = getattr(model, "model_fields_set", ())
    elsewhere = bool(getattr(model, "openai_api_base", None))
    for place in _NAMES:
        told = getattr(model, place, None)
        # OpenAI's default says nothing of another server.
        if isinstance(told, str) and told.strip() and (place in chosen or not elsewhere):
            return told
    return ""
