"""Options for the LLMs that commands use, and functions that open these LLMs."""

from __future__ import annotations

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
        help=f"URL of an OpenAI-compatible server (key: {KEY}); PROVIDER:NAME, such as openai:gpt-5, through "
        "LangChain; or a local model: name (rgate download), folder or Hub id.",
    ),
]
ModelOnServer = Annotated[str | None, typer.Option("--model", help="Name of the model on the server.")]
Judge = Annotated[
    str | None,
    typer.Option(help=f"Model that judges: NAME, PROVIDER:NAME, or NAME@URL on a server (key: {JUDGE_KEY})."),
]
Think = Annotated[
    Literal["off", "low", "as-is"],
    typer.Option(help="How much the LLM should think first; as-is sends no setting."),
]
ExtraBody = Annotated[
    str,
    typer.Option(help="JSON object with additional fields of each request, as your application sends them."),
]
ThinkingTokens = Annotated[
    int, typer.Option(min=0, help="Additional tokens for an answer if the LLM thinks first.")
]

_TOKENS_PER_SECOND = 10  # speed of the slowest LLM that the timeout allows for
_PROVIDER = re.compile(r"([a-z][a-z_]+):(.+)")


def request_options(think: Literal["off", "low", "as-is"], extra_body: str, tokens: int) -> RequestOptions:
    """Return the options of requests to an LLM.

    Args:
        think: The value of ``--think``.
        extra_body: The value of ``--extra-body``.
        tokens: The value of ``--thinking-tokens``: additional tokens for an answer if the LLM thinks first.

    Raises:
        ConfigurationError: ``extra_body`` is not a JSON object.
    """
    from rgate_integrations.models.request_options import RequestOptions
    from rgate_integrations.runtime.files import parse_json

    try:
        return RequestOptions(think, tokens, parse_json(extra_body))
    except ValueError as error:
        problem = str(getattr(error, "message", error)).removesuffix(".")  # without a hint
        raise ConfigurationError(
            f"--extra-body {extra_body[:100]!r} is not a JSON object: {problem}.",
            hint='Pass a JSON object such as {"top_p": 0.9}.',
        ) from None


def open_llm(
    llm: str, model: str | None, concurrency: int, options: RequestOptions, *, key: str = KEY
) -> LanguageModel:
    """Return the LLM of an application: on a server, at a provider, or a local one.

    Args:
        llm: The value of ``--llm``.
        model: Name of the model on a server, otherwise unused.
        concurrency: Maximum concurrent requests to a server.
        options: Options of the requests.
        key: Environment variable with the key of a server.

    Raises:
        ConfigurationError: The name of the server's model is missing, the URL or provider is invalid, or the LLM is
            local and ``options`` sets how much it thinks or an extra body.
        MissingDependencyError: LangChain or the provider's package is not installed.
    """
    if llm.startswith(("http://", "https://")):
        if model is None:
            raise ConfigurationError(
                "A server's URL was given without the name of a model.",
                hint="For --llm URL, add --model with the name that the server gives the LLM. For a judge, write "
                "--judge NAME@URL.",
            )
        from rgate_integrations.models.remote import RemoteModel

        # A thinking LLM may send nothing for a long time, so the timeout grows with its tokens.
        return RemoteModel(
            llm,
            model,
            api_key=os.environ.get(key) or None,
            timeout=60.0 + options.thinking_tokens / _TOKENS_PER_SECOND,
            max_concurrency=concurrency,
            options=options,
        )
    provider = _PROVIDER.fullmatch(llm)
    if provider is not None:
        from rgate_integrations.langchain.provider_model import ProviderModel

        return ProviderModel(provider[1], provider[2], options)
    if options.facts:
        raise ConfigurationError(
            f"A local model accepts neither --think nor --extra-body, and --llm {llm!r} is local.",
            hint="Omit them, or pass the URL of a server or PROVIDER:NAME as --llm.",
        )
    from rgate_integrations.models.local import shared_proxy

    return shared_proxy(llm)


def open_judge(judge: str | None, concurrency: int, thinking_tokens: int) -> LanguageModel | None:
    """Return the model that judges answers, from ``NAME``, ``PROVIDER:NAME`` or ``NAME@URL``; None without a judge.

    Raises the errors of `open_llm`.
    """
    if judge is None:
        return None
    name, at, address = judge.partition("@http")
    llm, model = (f"http{address}", name) if at else (name, None)
    return open_llm(llm, model, concurrency, request_options("as-is", "{}", thinking_tokens), key=JUDGE_KEY)


def say_habits(llm: LanguageModel) -> None:
    """Print what was learned about an LLM from its answers, for example that it thinks first."""
    if llm.habits is not None and str(llm.habits):
        say(f"{llm.name} {llm.habits}.")
