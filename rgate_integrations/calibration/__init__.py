"""Calibration: what P(known) is worth as a probability, and thresholds that keep a promise."""

from rgate_integrations.calibration.calibrate import Calibration, calibrate
from rgate_integrations.calibration.policies import Budget, Cost, MaxLoss, Policy

__all__ = ["Budget", "Calibration", "Cost", "MaxLoss", "Policy", "calibrate"]
