"""Profiles of corpora: what a corpus is about, and whether it covers a question. Independent of frameworks."""

from rgate_integrations.corpus.profile import CorpusProfile

__all__ = ["CorpusProfile"]
