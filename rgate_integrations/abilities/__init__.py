"""Whose knowledge is judged: from the name of an LLM, or a folder of `rgate ability`, to its ability."""

from rgate_integrations.abilities.resolve import DEFAULT_LLM, resolve_ability, weakest

__all__ = ["DEFAULT_LLM", "resolve_ability", "weakest"]
