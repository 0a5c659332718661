"""Policies of placement: who gets copies of which experts, and who takes which rows.

Some plan between steps, from rows that are expected; some in the call, behind the gate, from the rows that there are,
as far as a feature has the passes for it; some do both. All are pure functions of the same integers on all ranks, so no
rank tells another what it decided. Numbers of rows as in `decide` and `after_gate`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from moefx import rooms
from moefx.errors import MoefxError, UnsupportedUse
from moefx.options import CHECKS, NAMES, Options
from moefx.options.groups import Placement
from moefx.placement import after_gate, decide
from moefx.placement.after_gate import InCall
from moefx.placement.score import Costs
from moefx.placement.tables import Plan

Ahead = Callable[[np.ndarray, Sequence[int], tuple[int, int], Costs | None, int], Plan]


@dataclass(frozen=True)
class Policy:
    """ahead: (loads [n, E], owners [E], (room, spare), costs, per_node) -> the plan of the next step, before it; None:
    nothing is planned then. in_call: plans behind the gate, see `after_gate.InCall`. Where both are, in_call corrects
    what was planned ahead. in_every_call: it plans in every region, else in those that the planner names. is_weighed:
    in_call is told what the machine takes. even_if_equal: a step is planned again though loads hardly changed.
    needs_machine: it chooses by a machine alone. bound: the same with what other options say of it.
    """

    name: str
    ahead: Ahead | None = None
    in_call: InCall = after_gate.balanced
    in_every_call: bool = False
    is_weighed: bool = False
    even_if_equal: bool = False
    needs_machine: bool = False
    bound: Callable[[Policy, Placement], Policy] = lambda policy, options: policy

    @property
    def corrects(self) -> bool:
        """Whether what is planned in the call comes to copies that were planned before."""
        return self.ahead is not None and self.in_every_call


POLICIES: dict[str, Policy] = {}


def register_placement(policy: Policy) -> None:
    """On every rank, before `moefx.compile(.., placement=name)`. Raises MoefxError for a name that there is."""
    if policy.name in POLICIES:
        raise MoefxError(f"there is a policy of placement '{policy.name}' already", hint="another name")
    POLICIES[policy.name] = policy


def chosen(options: Placement) -> Policy | None:
    """The one that options name, with what else they say of it."""
    policy = POLICIES.get(options.policy)
    return None if policy is None else policy.bound(policy, options)


def _check(options: Options) -> None:
    policy = chosen(options.placement)
    if policy is None or not policy.in_every_call:
        return
    if not rooms.plan_in_call():
        raise UnsupportedUse(f"placement is {policy.name!r}, which plans in the call, and no feature does that",
                             where="moefx.Options", hint="placement='balanced'")  # fmt: skip
    if not options.placement.copies:
        raise MoefxError(f"placement is {policy.name!r} with no room for copies", where="moefx.Options",
                         hint="copies=1")  # fmt: skip


for each in (
    Policy("balanced", partial(decide.plan, "balanced")),
    Policy("auto", partial(decide.plan, "auto"), is_weighed=True, needs_machine=True),
):
    register_placement(each)
NAMES["placement"] = "policy of placement", POLICIES.keys
CHECKS.append(_check)
