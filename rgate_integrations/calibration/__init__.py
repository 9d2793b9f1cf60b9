"""Calibration: what P(known) is worth as a probability, and thresholds and bands that keep a promise."""

from rgate_integrations.calibration.bands import BandOptions, calibrate_band
from rgate_integrations.calibration.calibrate import calibrate
from rgate_integrations.calibration.policies import Budget, LowestCost, MaxLoss

__all__ = ["BandOptions", "Budget", "LowestCost", "MaxLoss", "calibrate", "calibrate_band"]
