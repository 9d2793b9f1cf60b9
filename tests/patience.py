"""How long tests wait for what is certain to come, and a clock that does not run."""

PATIENCE = 600
"""Seconds that nothing needs, on however busy a machine: a test that would hang fails instead."""

ENDS_SOON = "import rgate_integrations.runtime.threads as ends; ends._JOIN_SECONDS = 0.1"
"""For scripts whose threads never end: at its end a process waits for them for 2 s. One test lets it."""


class Clock:
    """Seconds that pass when a test says so."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now
