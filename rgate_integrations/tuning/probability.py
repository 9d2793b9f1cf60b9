"""Maps of P(known) that make it a probability: Platt scaling, temperature, isotonic regression."""

from __future__ import annotations

from rgate_integrations.errors import missing_dependency
from rgate_integrations.gates.probability import Method, ProbabilityMap, logits
from rgate_integrations.runtime.arrays import BoolArray, Float64Array


def fit_map(p: Float64Array, known: BoolArray, method: Method = "platt") -> ProbabilityMap:
    """Fit a map by scikit-learn; it never turns the order of scores around.

    Args:
        p: Scores in [0, 1], shape (n,).
        known: Labels, shape (n,). With one class only nothing can be fitted, and the scores stay as they are.
        method: Which map.
    """
    if method == "none" or known.all() or not known.any():
        return ProbabilityMap()
    try:
        from sklearn.isotonic import IsotonicRegression
        from sklearn.linear_model import LogisticRegression
    except ImportError as error:
        raise missing_dependency("sklearn", "train") from error
    if method == "isotonic":
        model = IsotonicRegression(y_min=0, y_max=1, out_of_bounds="clip").fit(p, known)
        x, y = model.X_thresholds_.tolist(), model.y_thresholds_.tolist()
        return ProbabilityMap(method="isotonic", x=tuple(x), y=tuple(y))
    fitted = LogisticRegression(C=1e4, fit_intercept=method == "platt").fit(logits(p)[:, None], known)
    slope = max(float(fitted.coef_[0, 0]), 0.0)
    return ProbabilityMap(
        method=method, slope=slope, intercept=float(fitted.intercept_[0] if method == "platt" else 0)
    )
