"""Tuning: from the questions of a log to a gate for one's own LLM."""

from rgate_integrations.tuning.tune import Tuned, TuneOptions, tune

__all__ = ["TuneOptions", "Tuned", "tune"]
