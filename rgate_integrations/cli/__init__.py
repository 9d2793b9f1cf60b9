"""The command line, ``rgate``. Most modules hold a few commands; heavy imports happen inside the commands."""

from rgate_integrations.cli.main import main

__all__ = ["main"]
