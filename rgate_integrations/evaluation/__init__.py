"""Evaluation of gates on recorded answers."""

from rgate_integrations.evaluation.metrics import auc

__all__ = ["auc"]
