"""The command line, ``rgate``. Each command is a module of this package; heavy imports wait for the call."""

from rgate_integrations.cli.main import main

__all__ = ["main"]
