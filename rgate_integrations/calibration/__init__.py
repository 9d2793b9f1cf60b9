"""Calibration: what P(known) is worth as a probability, and thresholds and bands that keep a promise."""

from rgate_integrations.calibration.bands import Band, BandOptions, calibrate_band, choose_band
from rgate_integrations.calibration.calibrate import Calibration, calibrate
from rgate_integrations.calibration.policies import Budget, LowestCost, MaxLoss, Policy

__all__ = [
    "Band",
    "BandOptions",
    "Budget",
    "Calibration",
    "LowestCost",
    "MaxLoss",
    "Policy",
    "calibrate",
    "calibrate_band",
    "choose_band",
]
