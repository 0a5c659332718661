"""Rooms of features: each folder here has all of one. The core runs without any of them.

A room has `feature.py`: FEATURE, a `moefx.rooms.Feature`. It may have `options.py`: FIELDS, {group of options, None at
the top: {name: field}}, which imports `moefx.options.declare` alone; `runtime.py`, what emitted code calls of it, which
imports what `moefx.runtime` may, and that; and `transport.py`, what this and the compiler know, which imports what
`moefx.runtime` may. What is listed is loaded.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from moefx import rooms

LISTED = ("fsdp", "papers", "saa", "tuning")


def option_fields(group: str | None = None) -> dict[str, Any]:
    """{name: field} that the rooms add to `moefx.Options`, or to its field `group`."""
    found: dict[str, Any] = {}
    for name in LISTED:
        if importlib.util.find_spec(f"{__name__}.{name}.options") is not None:
            found |= importlib.import_module(f"{__name__}.{name}.options").FIELDS.get(group, {})
    return found


def load() -> None:
    for name in LISTED:
        rooms.register(importlib.import_module(f"{__name__}.{name}.feature").FEATURE)
