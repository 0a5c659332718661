"""What the core calls of this room."""

from __future__ import annotations

from dataclasses import replace

from moefx.features.llep.least_loaded import LeastLoaded
from moefx.options.groups import Placement
from moefx.placement.policies import Policy, register_placement
from moefx.rooms import Feature


def _bound(policy: Policy, options: Placement) -> Policy:
    return replace(policy, in_call=LeastLoaded(options.llep_capacity, options.llep_rows, options.llep_threshold))


FEATURE = Feature("llep")
register_placement(Policy("llep", in_call=LeastLoaded(), in_every_call=True, is_weighed=True, bound=_bound))
