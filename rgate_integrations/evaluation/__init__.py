"""Evaluation: metrics, paired data, both arms, break-even."""

from rgate_integrations.evaluation.break_even import StageTimes
from rgate_integrations.evaluation.evaluate import compare, evaluate
from rgate_integrations.evaluation.metrics import auc
from rgate_integrations.evaluation.paired import Paired, read_paired

__all__ = ["Paired", "StageTimes", "auc", "compare", "evaluate", "read_paired"]
