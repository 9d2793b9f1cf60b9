"""Has the traffic changed since the gate was calibrated?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rgate_integrations.errors import DataFormatError

MODERATE, STRONG = 0.1, 0.25
_BINS = 10


@dataclass(frozen=True)
class Drift:
    """How far logged scores are from those of the calibration.

    Attributes:
        n: Number of logged scores.
        psi: Population stability index over the deciles of the calibration; below 0.1 nothing changed, above
            0.25 a lot did (the usual rule of thumb).
        threshold_rate: Retrieval rate in the log.
        expected_rate: Retrieval rate at calibration.
    """

    n: int
    psi: float
    threshold_rate: float
    expected_rate: float

    @property
    def advice(self) -> str:
        """One sentence: whether to calibrate again."""
        if self.psi >= STRONG:
            return "The traffic has changed: calibrate again."
        if self.psi >= MODERATE:
            return "The traffic has changed somewhat: calibrate again soon."
        return "The traffic is like that of the calibration."


def drift(quantiles: Sequence[float], logged: Sequence[float], threshold: float) -> Drift:
    """Compare logged P(known) with the calibration's.

    Args:
        quantiles: Evenly spaced quantiles of P(known) at calibration, from the least to the greatest.
        logged: P(known) of logged decisions, at least 50.
        threshold: The gate's threshold.

    Raises:
        DataFormatError: There are fewer than 50 logged decisions.
    """
    if len(logged) < 50:
        raise DataFormatError(f"{len(logged)} logged decisions are too few.", hint="At least 50 are needed.")
    before, now = np.asarray(quantiles, dtype=float), np.asarray(logged, dtype=float)
    edges = np.unique(np.quantile(before, np.linspace(0, 1, _BINS + 1)))[1:-1]
    # Equal scores share a bin, so the calibration's own share of each bin is counted and not one tenth.
    then = np.bincount(np.searchsorted(edges, before, side="right"), minlength=len(edges) + 1) / len(before)
    here = np.bincount(np.searchsorted(edges, now, side="right"), minlength=len(edges) + 1) / len(now)
    a, b = np.maximum(then, 1e-4), np.maximum(here, 1e-4)
    psi = float(((b - a) * np.log(b / a)).sum())
    return Drift(len(now), psi, float((now < threshold).mean()), float((before < threshold).mean()))
