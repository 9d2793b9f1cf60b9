"""Answering: strategies without a framework. The LLM answers first, or the search is looked at first."""
