"""Fits a gate to your LLM from a log of questions, chooses thresholds, and evaluates gates."""

from rgate_integrations.tuning.calibration import Budget, MaxLoss, calibrate
from rgate_integrations.tuning.evaluation import evaluate
from rgate_integrations.tuning.labelling import collect
from rgate_integrations.tuning.questions import read_paired
from rgate_integrations.tuning.tuner import TuneOptions, tune

__all__ = [
    "Budget",
    "MaxLoss",
    "TuneOptions",
    "calibrate",
    "collect",
    "evaluate",
    "read_paired",
    "tune",
]
