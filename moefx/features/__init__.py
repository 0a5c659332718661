"""Rooms of features: each folder here has all of one. The core runs without any of them.

A room has `feature.py`: FEATURE, a `moefx.rooms.Feature`. It may have `options.py`: FIELDS, {group of options, None at
the top: {name: field}}, and VALUES, {option: {value: what it means}}, values of options of others; it imports
`moefx.options.declare` alone. And `runtime.py`, what emitted code calls of it, which imports what `moefx.runtime` may,
and that. What is listed is loaded.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from moefx import rooms

LISTED = (
    "dedup",
    "fastermoe",
    "fsdp",
    "llep",
    "offload",
    "tuning",
)


def option_fields(group: str | None = None) -> dict[str, Any]:
    """{name: field} that the rooms add to `moefx.Options`, or to its field `group`."""
    found: dict[str, Any] = {}
    for name in LISTED:
        if importlib.util.find_spec(f"{__name__}.{name}.options") is not None:
            found |= getattr(importlib.import_module(f"{__name__}.{name}.options"), "FIELDS", {}).get(group, {})
    return found


def option_values(option: str) -> list[tuple[str, str]]:
    """(value, what it means) that the rooms add to an option."""
    found: list[tuple[str, str]] = []
    for name in LISTED:
        if importlib.util.find_spec(f"{__name__}.{name}.options") is not None:
            module = importlib.import_module(f"{__name__}.{name}.options")
            found += getattr(module, "VALUES", {}).get(option, {}).items()
    return found


def load() -> None:
    for name in LISTED:
        rooms.register(importlib.import_module(f"{__name__}.{name}.feature").FEATURE)
