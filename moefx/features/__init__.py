"""Rooms of features: each folder here has all of one. The core runs without any of them.

A room has `feature.py`: FEATURE, a `moefx.rooms.Feature`. It may have `options.py`: FIELDS, {group of options, None at
the top: {name: field}}, and VALUES, {option: {value: what it means}}, values of options of others; it imports
`moefx.options.declare` alone. `runtime.py`, what emitted code calls of it, imports what `moefx.runtime` may, and that;
`transport.py`, what this and the compiler know, what `moefx.runtime` may. What is listed is loaded.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from moefx import rooms

LISTED = (
    "adaptive",
    "dedup",
    "exact",
    "fastermoe",
    "fp8",
    "fsdp",
    "hecate",
    "islands",
    "llep",
    "offload",
    "papers",
    "rehoming",
    "saa",
    "tuning",
    "whole_blocks",
)


def _modules(name: str) -> Iterator[ModuleType]:
    """Those of this name that rooms have."""
    for room in LISTED:
        if importlib.util.find_spec(f"{__name__}.{room}.{name}") is not None:
            yield importlib.import_module(f"{__name__}.{room}.{name}")


def option_fields(group: str | None = None) -> dict[str, Any]:
    """{name: field} that the rooms add to `moefx.Options`, or to its field `group`, there by keyword alone."""
    found: dict[str, Any] = {}
    for module in _modules("options"):
        found |= getattr(module, "FIELDS", {}).get(group, {})
    for each in found.values() if group is not None else ():
        each.kw_only = True  # their places depend on which rooms there are
    return found


def option_values(option: str) -> list[tuple[str, str]]:
    """(value, what it means) that the rooms add to an option."""
    return [each for module in _modules("options") for each in getattr(module, "VALUES", {}).get(option, {}).items()]


def load() -> None:
    for module in _modules("feature"):
        rooms.register(module.FEATURE)
