"""Shared by the tests: rank launchers (ranks), tiny models (models, handmade), and the comparison (parity)."""
