"""What a corpus is about, and so whether it has something on a question. It knows no framework."""

from rgate_integrations.corpus.profile import CorpusProfile

__all__ = ["CorpusProfile"]
