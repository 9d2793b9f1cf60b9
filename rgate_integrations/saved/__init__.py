"""Saved gates: written whole, read with their checksums, described by a card. Below gates and training."""

from rgate_integrations.saved.adapter import AdapterArtifact, save_adapter
from rgate_integrations.saved.calibrated import save_calibrated
from rgate_integrations.saved.folder import (
    TrainedOn,
    check_fingerprint,
    read_config,
    saved_folder,
    shipped,
    trained_on,
)
from rgate_integrations.saved.hub import push_to_hub
from rgate_integrations.saved.probe import EarlyExit, ProbeArtifact, read_probe, save_probe

__all__ = [
    "AdapterArtifact",
    "EarlyExit",
    "ProbeArtifact",
    "TrainedOn",
    "check_fingerprint",
    "push_to_hub",
    "read_config",
    "read_probe",
    "save_adapter",
    "save_calibrated",
    "save_probe",
    "saved_folder",
    "shipped",
    "trained_on",
]
