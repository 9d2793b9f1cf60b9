"""Saved gates: written whole, read with their checksums, described by a card. Below gates and training."""

from rgate_integrations.gates.artifacts.folder import push_to_hub

__all__ = ["push_to_hub"]
