"""Shared by the tests: rank launchers (ranks), tiny models (models, handmade), and the comparison (parity)."""

import os

os.environ.setdefault("MOEFX_CACHE", "off")  # who uses them asks of the compiler, perhaps with a part of it replaced
