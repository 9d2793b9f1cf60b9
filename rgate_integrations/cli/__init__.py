"""The command line, ``rgate``. Each module has one command or a few; heavy imports wait for the call."""

from rgate_integrations.cli.main import main

__all__ = ["main"]
