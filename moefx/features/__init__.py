"""Rooms of features: each folder here has all of one. The core runs without any of them.

A room may have `options.py` (FIELDS of `moefx.Options`; it imports `moefx.options.declare` alone) and has `feature.py`
(FEATURE, a `moefx.rooms.Feature`). What is listed is loaded.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from moefx import rooms

LISTED = ("tuning",)


def option_fields() -> dict[str, Any]:
    """{name: field} that the rooms add to `moefx.Options`."""
    found: dict[str, Any] = {}
    for name in LISTED:
        if importlib.util.find_spec(f"{__name__}.{name}.options") is not None:
            found |= importlib.import_module(f"{__name__}.{name}.options").FIELDS
    return found


def load() -> None:
    for name in LISTED:
        rooms.register(importlib.import_module(f"{__name__}.{name}.feature").FEATURE)
