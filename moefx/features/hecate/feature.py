"""What the core calls of this room."""

from __future__ import annotations

from functools import partial

from moefx.features.hecate.materialise import algorithm_1
from moefx.placement import decide
from moefx.placement.policies import Policy, register_placement
from moefx.rooms import Feature

FEATURE = Feature("hecate")
decide.PROPOSALS["hecate"] = algorithm_1
register_placement(Policy("hecate", partial(decide.plan, "hecate"), even_if_equal=True))
