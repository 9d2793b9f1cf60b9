"""The LLMs that commands ask: how they are named, opened, and asked as the application asks them."""

from __future__ import annotations

import json
import os
import re
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from rgate_integrations.cli.terminal import KEY, say
from rgate_integrations.errors import ConfigurationError

if TYPE_CHECKING:
    from rgate_integrations.models.base import LanguageModel
    from rgate_integrations.models.request_options import RequestOptions

JUDGE_KEY = "RGATE_JUDGE_API_KEY"

AnsweringLLM = Annotated[
    str,
    typer.Option(
        "--llm",
        help=f"URL of an OpenAI-compatible server (its key in {KEY}); a provider's, such as openai:gpt-5 or "
        "anthropic:NAME, by LangChain; or a local model.",
    ),
]
ModelOnServer = Annotated[str | None, typer.Option("--model", help="Name of the model on the server.")]
Judge = Annotated[
    str | None,
    typer.Option(help=f"Model that judges: NAME, PROVIDER:NAME, or NAME@URL on a server (key: {JUDGE_KEY})."),
]
Think = Annotated[
    Literal["off", "low", "as-is"], typer.Option(help="How much an LLM thinks before it answers, if it can.")
]
ExtraBody = Annotated[
    str,
    typer.Option(help="JSON object: more fields of each request, as your application sends them."),
]
ThinkingTokens = Annotated[
    int, typer.Option(min=0, help="How much longer an answer may be if the LLM thinks before it.")
]

_TOKENS_PER_SECOND = 10  # of the slowest LLM that is waited for
_PROVIDER = re.compile(r"([a-z][a-z_]+):(.+)")


def request_options(think: Literal["off", "low", "as-is"], extra_body: str, tokens: int) -> RequestOptions:
    """Return how an LLM is asked.

    Raises:
        ConfigurationError: ``extra_body`` is no JSON object.
    """
    from rgate_integrations.models.request_options import RequestOptions

    try:
        return RequestOptions(think, tokens, json.loads(extra_body))
    except ValueError as error:
        if isinstance(error, ConfigurationError):
            raise
        raise ConfigurationError("--extra-body is no JSON.", hint='{"top_p": 0.9}') from None


def open_llm(llm: str, model: str | None, concurrency: int, options: RequestOptions) -> LanguageModel:
    """Return the LLM of an application: on a server, at a provider, or a local one.

    Raises:
        ConfigurationError: The name of the model on the server is missing, or a local model is asked to think less.
    """
    if llm.startswith(("http://", "https://")):
        if model is None:
            raise ConfigurationError("--model is required with a server URL.", hint="--model NAME")
        return _open(model, llm, KEY, concurrency, options)
    if options.facts and not _PROVIDER.fullmatch(llm):
        raise ConfigurationError("A local model takes neither --think nor --extra-body.", hint="--llm URL")
    return _open(llm, "", KEY, concurrency, options)


def open_judge(judge: str | None, concurrency: int, thinking_tokens: int) -> LanguageModel | None:
    """Return the model that judges answers: ``NAME``, ``PROVIDER:NAME`` or ``NAME@URL``; None without one."""
    if judge is None:
        return None
    name, at, address = judge.partition("@http")
    options = request_options("as-is", "{}", thinking_tokens)
    return _open(name, f"http{address}" if at else "", JUDGE_KEY, concurrency, options)


def _open(name: str, url: str, key: str, concurrency: int, options: RequestOptions) -> LanguageModel:
    if url:
        from rgate_integrations.models.served import ServedProxy

        api_key = os.environ.get(key) or None
        return ServedProxy(
            url,
            name,
            api_key=api_key,
            timeout=60.0 + options.thinking_tokens / _TOKENS_PER_SECOND,
            max_concurrency=concurrency,
            options=options,
        )
    provider = _PROVIDER.fullmatch(name)
    if provider is not None:
        from rgate_integrations.langchain.provider_model import ProviderModel

        return ProviderModel(provider[1], provider[2], options)
    from rgate_integrations.models.local import shared_proxy

    return shared_proxy(name)


def say_habits(llm: LanguageModel) -> None:
    """Say what was found out about an LLM by asking, if that is anything."""
    if llm.habits is not None and str(llm.habits):
        say(f"{llm.name} {llm.habits}.")
