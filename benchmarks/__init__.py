"""Measurements against other tools and against ourselves; each prints a table, or JSON with ``--json``."""
