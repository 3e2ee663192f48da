"""How long the tests wait for what must happen."""

PATIENCE_S = 600
"""Only what hangs takes longer, also on a machine that is many times slower, or busy."""
