"""Tuning: from the questions of a log to a gate for one's own LLM, thresholds with a guarantee, and evaluation."""

from rgate_integrations.tuning.calibrate import calibrate
from rgate_integrations.tuning.evaluate import compare, evaluate
from rgate_integrations.tuning.paired import read_paired
from rgate_integrations.tuning.policies import Budget, MaxLoss, MinCost

__all__ = ["Budget", "MaxLoss", "MinCost", "calibrate", "compare", "evaluate", "read_paired"]
