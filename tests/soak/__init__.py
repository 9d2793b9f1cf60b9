"""A soak: everything at once, for many minutes, with faults by a seeded schedule. Run it with ``make soak``."""
