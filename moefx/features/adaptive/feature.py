"""What the core calls of this room."""

from __future__ import annotations

from moefx.features.adaptive import closed_form, prices
from moefx.rooms import Degrees, Feature

FEATURE = Feature("adaptive", degrees=Degrees(prices.allowed, prices.change, prices.more, prices.arrived,
                                              closed_form.of_region))  # fmt: skip
