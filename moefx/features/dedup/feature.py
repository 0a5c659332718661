"""What the core calls of this room."""

from __future__ import annotations

from moefx.context.pass_types import Pass
from moefx.features.dedup import dedup_nodes, ops, place, price
from moefx.features.dedup.options import DEDUP
from moefx.ir.level import Level
from moefx.ir.ways import INTER
from moefx.rooms import Feature, Insertion, Nesting

FEATURE = Feature(
    "dedup",
    passes=(Insertion("split-capacity", Pass("dedup-nodes", dedup_nodes.run, Level.MOE, Level.MOE, asked=True)),),
    nesting=Nesting(
        DEDUP, fixed=f"tokens cross to a node once ('{DEDUP}')", markers=(ops.enter_node, ops.leave_node), hop=INTER,
        way=place.way, counts=place.counts, cross=place.cross, may=price.may_cross_once, pieces=price.once_to_a_node,
        note=price.note, form=price.closed_form,
    ),
)  # fmt: skip
