"""What the core calls of this room."""

from __future__ import annotations

from moefx.context.pass_types import Pass
from moefx.features.exact import calibration, ops, plan_exactly, rules
from moefx.placement.policies import Policy, register_placement
from moefx.rooms import Feature, Insertion

__all__ = ["FEATURE", "ops"]  # the latter registers its ops

FEATURE = Feature(
    "exact", passes=(Insertion("place-regions", Pass("plan-exactly", plan_exactly.run)),),
    rules=(rules.rows_go_by_their_plan,), in_call=True,
)  # fmt: skip
register_placement(Policy("calibrated", calibration.forecast, calibration.plan, in_every_call=True, is_weighed=True))
register_placement(Policy("exact", in_every_call=True))
