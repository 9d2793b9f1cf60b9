"""Tuning: from the questions of a log to a gate for one's own LLM; see `rgate_integrations.tuning.tune`."""
