"""Finds the chat models inside a chain, their names and length limits, and requests log-probabilities."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

from langchain_core.language_models import BaseChatModel, BaseLanguageModel
from langchain_core.runnables import (
    Runnable,
    RunnableAssign,
    RunnableConfig,
    RunnableLambda,
    RunnableParallel,
    RunnableSequence,
)
from langchain_core.runnables.base import RunnableBindingBase, coerce_to_runnable
from langchain_core.runnables.config import merge_configs
from langchain_core.runnables.configurable import DynamicRunnable
from pydantic import BaseModel

from rgate_integrations.errors import ConfigurationError
from rgate_integrations.gates.ability import least_capable

_T = TypeVar("_T")

_NAMES = ("base_model_id", "model_name", "model", "deployment_name", "model_id")
"""Fields with the LLM's name, best first. Bedrock's ``model_id`` may be an ARN that does not contain it."""

_LENGTH_FIELDS = ("max_tokens", "max_output_tokens", "num_predict")


def as_runnable(value: Any, option: str) -> Runnable[Any, Any]:
    """Return a runnable, function or mapping as a runnable.

    Args:
        value: The value of an option.
        option: What it is in the error, such as the option's name.

    Raises:
        ConfigurationError: The value is none of these, but for example a string.
    """
    try:
        return coerce_to_runnable(value)
    except TypeError as error:
        raise ConfigurationError(
            f"{option} must be a runnable or a function, not an object of type {type(value).__name__}.",
            hint="Pass a chain, a retriever such as vector_store.as_retriever(), or a chat model such as "
            'ChatOpenAI(model="gpt-4o").',
        ) from error


def length_field(llm: Any) -> str | None:
    """Return the name of the field that limits the length of a chat model's answers; None if it has none."""
    return next(filter(getattr(type(llm), "model_fields", {}).__contains__, _LENGTH_FIELDS), None)


def list_parts(runnable: Any, around: Sequence[Any] = ()) -> list[Runnable[Any, Any]]:
    """Return the runnables that a runnable is made of, in order; none for a model.

    Args:
        runnable: The runnable.
        around: The runnables that contain this one. If they include this one, it is a function that calls itself, and
            no parts are returned.
    """
    if isinstance(runnable, RunnableLambda):
        return [] if runnable in around else list(runnable.deps)
    if isinstance(runnable, BaseLanguageModel) or not isinstance(runnable, BaseModel):
        return []
    # LangChain has no common interface for parts, but all composed runnables keep them in fields.
    return list(instances_in(vars(runnable), Runnable))  # type: ignore[type-abstract]  # only for isinstance


def runnables_in(runnable: Any, kind: type[Any], around: Sequence[Any] = ()) -> Iterator[Any]:
    """Yield the outermost runnables of a type in a runnable; see `list_parts`.

    If the runnable itself has the type, it is the only one.
    """
    if isinstance(runnable, kind):
        yield runnable
        return
    for part in list_parts(runnable, around):
        yield from runnables_in(part, kind, [*around, runnable])


def instances_in(value: Any, kind: type[_T]) -> Iterator[_T]:
    """Yield the objects of a type in nested mappings, lists and tuples."""
    if isinstance(value, kind):
        yield value
    elif isinstance(value, Mapping):
        yield from instances_in(list(value.values()), kind)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from instances_in(item, kind)


def with_logprobs(arm: Runnable[Any, Any]) -> Runnable[Any, Any] | None:
    """Return a copy of an arm that requests log-probabilities from its LLM; None if the arm has no suitable LLM.

    The LLM is the last chat model that has a field ``logprobs`` and leaves it unset. Only chains, bindings and
    parallel steps are searched. A `RunnableParallel` with such models in several steps is skipped, because it is not
    clear which of them answers.
    """
    if isinstance(arm, BaseChatModel):
        if "logprobs" in type(arm).model_fields and getattr(arm, "logprobs", None) is None:
            return arm.bind(logprobs=True)
    elif isinstance(arm, RunnableBindingBase | RunnableAssign) and "logprobs" not in getattr(
        arm, "kwargs", ()
    ):
        field = "bound" if isinstance(arm, RunnableBindingBase) else "mapper"
        inner = with_logprobs(getattr(arm, field))
        if inner is not None:
            return arm.model_copy(update={field: inner})
    elif isinstance(arm, RunnableParallel):
        changed = {name: inner for name, step in arm.steps__.items() if (inner := with_logprobs(step))}
        if len(changed) == 1:  # with several it is not clear which of them answers
            return arm.model_copy(update={"steps__": {**arm.steps__, **changed}})
    elif isinstance(arm, RunnableSequence):
        steps = list(arm.steps)
        for index in reversed(range(len(steps))):  # the last model is the one that answers
            inner = with_logprobs(steps[index])
            if inner is not None:
                steps[index] = inner
                return RunnableSequence(*steps, name=arm.name)
    return None


def chooses_llm(arm: Runnable[Any, Any]) -> bool:
    """Return whether a call's config may choose the LLM that answers in an arm, so that each call must ask again."""
    kinds: Any = (DynamicRunnable, _proxy_class())
    return next(runnables_in(arm, kinds), None) is not None


def takes_any_option(arm: Runnable[Any, Any]) -> bool:
    """Return whether an arm has a model of `init_chat_model` that takes every key of a call's config as an option."""
    # Not as attributes: those that such a model lacks are looked up in its default model.
    models = map(vars, runnables_in(arm, _proxy_class()))
    return any(own.get("_configurable_fields") == "any" and not own.get("_config_prefix") for own in models)


def get_llm_name(arm: Runnable[Any, Any], config: RunnableConfig | None = None) -> str:
    """Return the name of the LLM that answers in an arm; with several, such as fallbacks, the least capable one.

    Empty if the arm has no model. A model without a name counts as the LLM that the gate assumes for an empty
    name; if that one is the least capable, the result is empty, too.

    Args:
        arm: The arm.
        config: The config of a call, which may choose the LLM; None for any call.

    Raises:
        Exception: The config chooses an LLM that does not exist.
    """
    names = _llm_names(arm, {}, config)
    return least_capable(names) if names else ""


def _proxy_class() -> Any:
    """Return the class of `init_chat_model`'s models that a call may choose; ``()`` if it is not imported."""
    return getattr(sys.modules.get("langchain.chat_models.base"), "_ConfigurableModel", ())


def _llm_names(
    arm: Runnable[Any, Any],
    options: Mapping[str, Any],
    config: RunnableConfig | None,
    around: Sequence[Any] = (),
) -> list[str]:
    """Return the name of each model that may answer in an arm; an empty name for a model without one.

    Args:
        arm: The arm.
        options: What ``bind`` has bound to the arm, which may name another model.
        config: See `get_llm_name`.
        around: The runnables that contain the arm; see `list_parts`.
    """
    if isinstance(arm, RunnableBindingBase):
        config = None if config is None else merge_configs(arm.config, config)
        return _llm_names(arm.bound, {**arm.kwargs, **options}, config, around)
    if isinstance(arm, DynamicRunnable) and config is not None:
        chosen, config = arm.prepare(config)
        return _llm_names(chosen, options, config, around)
    if isinstance(arm, _proxy_class()):
        try:
            model = arm._model(config)  # type: ignore[attr-defined]  # noqa: SLF001  it has no public form of this
        except TypeError:  # without a default model, each call must name one
            return []
        return _llm_names(model, options, config, around)
    names: list[str] = []
    if isinstance(arm, RunnableSequence):
        for step in reversed(arm.steps):  # the last model is the one that answers
            names = names or _llm_names(step, {}, config, around)
        return names
    parts = list_parts(arm, around)
    for part in parts:
        names += _llm_names(part, options, config, [*around, arm])
    if not parts:  # a model
        name = _get_model_name(arm, options)
        if name or isinstance(arm, BaseLanguageModel):
            names.append(name)
    return names


def _get_model_name(model: Runnable[Any, Any], options: Mapping[str, Any]) -> str:
    """Return the name in the options bound to a model, or else its own; empty without either."""
    bound = options.get("model") or options.get("model_name")
    if isinstance(bound, str) and bound.strip():
        return bound
    fields_set: Any = getattr(model, "model_fields_set", ())
    is_other_server = bool(getattr(model, "openai_api_base", None))
    for field in _NAMES:
        name = getattr(model, field, None)
        # On another server, the default name of OpenAI's class says nothing about the model.
        if isinstance(name, str) and name.strip() and (field in fields_set or not is_other_server):
            return name
    return ""
