"""How long tests wait for what is certain to come."""

PATIENCE = 600
"""Seconds that nothing needs, on however busy a machine: a test that would hang fails instead."""
