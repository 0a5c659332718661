"""What the core calls of this room."""

from __future__ import annotations

from moefx.features.papers.presets import PRESETS
from moefx.rooms import Feature

FEATURE = Feature("papers", presets={name: each.options for name, each in PRESETS.items()})
