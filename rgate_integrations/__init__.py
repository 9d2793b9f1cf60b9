"""Retrieval gates for LangChain and LlamaIndex: retrieve only when the LLM does not know.

>>> from rgate_integrations import load_gate
>>> gate = load_gate()
>>> gate.decide("who wrote hamlet?").retrieve  # doctest: +SKIP
False
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rgate_integrations.decision import Cost, Decision, Draft
    from rgate_integrations.engine.decision_engine import DecisionEngine
    from rgate_integrations.engine.loading import load_gate
    from rgate_integrations.gates.base import Gate
    from rgate_integrations.gates.registry import list_gates

__version__ = "0.1.0"

__all__ = ["Cost", "Decision", "DecisionEngine", "Draft", "Gate", "list_gates", "load_gate"]

_HOME = {
    "Cost": "decision",
    "Decision": "decision",
    "DecisionEngine": "engine.decision_engine",
    "Draft": "decision",
    "Gate": "gates.base",
    "list_gates": "gates.registry",
    "load_gate": "engine.loading",
}


if not TYPE_CHECKING:  # a type checker is to refuse names that do not exist

    def __getattr__(name: str) -> object:
        """Import public names on first use, so that importing the package costs next to nothing."""
        if name not in _HOME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        import importlib

        value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
