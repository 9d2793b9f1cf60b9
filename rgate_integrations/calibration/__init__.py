"""Calibration: what P(known) is worth as a probability, and thresholds that keep a promise."""

from rgate_integrations.calibration.calibrate import calibrate
from rgate_integrations.calibration.policies import Budget, LowestCost, MaxLoss

__all__ = ["Budget", "LowestCost", "MaxLoss", "calibrate"]
