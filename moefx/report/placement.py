"""Who has copies of which experts, in words: what `moefx.explain` says."""

from __future__ import annotations

from moefx.compiler.variant import Variant
from moefx.context.region_facts import RegionFacts
from moefx.placement import decide


def words_of(variant: Variant, facts: RegionFacts) -> tuple[str, ...]:
    """The policy of a region, and why experts have copies in the plan that is in force; nothing if there is none."""
    home, options = variant.program.home, variant.context.options
    region = home.session.placements.regions.get(facts.placed_as(home.path)) if facts.counted else None
    if options.placement.policy is None or facts.slots is None:
        return ()
    slots = facts.slots
    room = f"{options.placement.policy}, room for {slots.room} experts and {slots.spare} copies on every rank"
    in_call = variant.context.plans_in_call(facts.number)
    room += ", corrected" if variant.context.corrects else ", planned" if in_call else ""
    room += " in the call, after the gate" if in_call else ""
    loads = None if region is None else region.counted if in_call else region.tables.loads
    if loads is None:
        return (f"{room}; no copies were planned yet",)
    plan = home.session.placements.of_call(region, loads) if in_call else region.tables.plan
    return (room, *decide.reasons(plan, loads, region.cap))
