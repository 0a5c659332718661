"""The levels a graph goes through."""

from __future__ import annotations

import enum


class Level(enum.Enum):
    """What a graph may hold; `ir.verify` has the rules."""

    CAPTURED = "captured"
    MOE = "moe"
    PLACED = "placed"
    SCHEDULED = "scheduled"
    LINKED = "linked"
