"""Retrieval gates for LangChain and LlamaIndex: retrieve only when the LLM does not know.

>>> from rgate_integrations import load_gate
>>> gate = load_gate()
>>> gate.decide("who wrote hamlet?").retrieve  # doctest: +SKIP
False
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rgate_integrations.answering.answer_first import AnswerFirst
    from rgate_integrations.answering.look_first import LookFirst
    from rgate_integrations.answering.query_plan import QueryPlan, plan_queries
    from rgate_integrations.corpus.profile import CorpusProfile
    from rgate_integrations.decision import Cost, Decision, Draft, Override, Request
    from rgate_integrations.engine.decision_engine import DecisionEngine
    from rgate_integrations.engine.loading import load_gate
    from rgate_integrations.gates.base import Gate, Score
    from rgate_integrations.gates.registry import list_gates
    from rgate_integrations.gates.rules import Rules

__version__ = "0.1.0"

_MODULES = {
    "AnswerFirst": "answering.answer_first",
    "CorpusProfile": "corpus.profile",
    "Cost": "decision",
    "Decision": "decision",
    "DecisionEngine": "engine.decision_engine",
    "Draft": "decision",
    "Gate": "gates.base",
    "LookFirst": "answering.look_first",
    "Override": "decision",
    "QueryPlan": "answering.query_plan",
    "Request": "decision",
    "Rules": "gates.rules",
    "Score": "gates.base",
    "list_gates": "gates.registry",
    "load_gate": "engine.loading",
    "plan_queries": "answering.query_plan",
}

__all__ = [
    "AnswerFirst",
    "CorpusProfile",
    "Cost",
    "Decision",
    "DecisionEngine",
    "Draft",
    "Gate",
    "LookFirst",
    "Override",
    "QueryPlan",
    "Request",
    "Rules",
    "Score",
    "list_gates",
    "load_gate",
    "plan_queries",
]


if not TYPE_CHECKING:  # type checkers should report names that do not exist

    def __getattr__(name: str) -> object:
        """Import a public name when it is used, so that importing the package costs next to nothing."""
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        import importlib

        return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
