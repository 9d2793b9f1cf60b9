"""Evaluation: paired data, metrics of a gate on both arms, and a paired comparison of two gates."""

from rgate_integrations.evaluation.evaluate import compare, evaluate
from rgate_integrations.evaluation.paired import read_paired

__all__ = ["compare", "evaluate", "read_paired"]
