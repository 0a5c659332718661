"""What the core calls of this room."""

from __future__ import annotations

from moefx.features.fastermoe import shadowing
from moefx.placement.policies import Policy, register_placement
from moefx.rooms import Feature

FEATURE = Feature("fastermoe")
register_placement(Policy("fastermoe", in_call=shadowing.plan, in_every_call=True, is_weighed=True))
