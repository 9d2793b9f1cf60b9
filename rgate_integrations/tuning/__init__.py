"""Tuning: from the questions of a log to a gate for one's own LLM, thresholds with a guarantee, and evaluation."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rgate_integrations.tuning.calibration import calibrate
    from rgate_integrations.tuning.evaluation import compare, evaluate
    from rgate_integrations.tuning.paired import collect, read_paired
    from rgate_integrations.tuning.policies import Budget, MaxLoss, MinCost
    from rgate_integrations.tuning.tuner import TuneOptions, tune

__all__ = [
    "Budget",
    "MaxLoss",
    "MinCost",
    "TuneOptions",
    "calibrate",
    "collect",
    "compare",
    "evaluate",
    "read_paired",
    "tune",
]

_HOME = {
    "Budget": "policies",
    "MaxLoss": "policies",
    "MinCost": "policies",
    "TuneOptions": "tuner",
    "calibrate": "calibration",
    "collect": "paired",
    "compare": "evaluation",
    "evaluate": "evaluation",
    "read_paired": "paired",
    "tune": "tuner",
}


def __getattr__(name: str) -> object:
    """Import names on first use: the trainings import parts of this package, and it imports parts of them."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
