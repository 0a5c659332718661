"""Let blocks of schedule S2 come back in phases, each of which is gathered while the next one is on its way (SAA).

Contract
    takes  PLACED   forward or backward graph at ATen level, with the way back of static blocks as one exchange
    gives  PLACED   the same in phases, by the distance between places, and their results joined in the order of places
    never  changes a bit, or a region whose schedule "s2" nobody asked for or chose; chunks, other all-to-alls and
           codecs keep their one exchange

Pseudo-code
    a place: the ranks along `mp`, who gather, and along `esp`, whose partial sums are one before they are gathered
    phase d: send to the place d further on, receive from the place d before; sum; gather over `mp`
    gradients of what went out come back in the same way, and are gathered in the same way
    phase d + 1 starts before the gather of phase d, so that both are on their way at once

    y = all_rows(all_to_all_capacity(x, .., reverse))
        ->  a = return_phase(x, .., 0);  b = return_phase(x, .., 1);  y = join_phases([all_rows(a), all_rows(b)])
Source: Parm, section III-D, Fig. 5.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.fx import GraphModule, Node

from moefx.context.pass_types import PassContext, PassResult
from moefx.features.saa import transport
from moefx.features.saa.transport import phase_axis
from moefx.ir import edit
from moefx.ir.op import argument
from moefx.ir.regions import region_of
from moefx.transport.codecs import IDENTITY

_ops = torch.ops.moefx


def run(gm: GraphModule, ctx: PassContext) -> PassResult:
    result = PassResult()
    for node in gm.graph.find_nodes(op="call_function", target=_ops.all_to_all_capacity.default):
        number = region_of(node)
        if not argument(node, "reverse") or not _is_phased(number, ctx):
            continue
        chain = _chain(node)
        reason = _why_whole(node, number, chain, ctx)
        path = ctx.decisions.regions[number].module
        if reason is not None:
            result.skip(node, reason)
            ctx.report.schedules[path] = f"s2, not in phases: {reason}"
            continue
        count = _in_phases(node, chain, ctx)
        ctx.report.schedules[path] = f"s2, gathered in {count} phases as it comes back"
        result.changed(f"{node.name} in {count} phases")
    return result


def _is_phased(region: int, ctx: PassContext) -> bool:
    """Whether the blocks of a region come back in phases if they can: somebody asked for "s2", or the planner chose it.
    The planner looks at regions that come back at once."""
    asked = ctx.options.parallel.split, ctx.options.formula, ctx.machine
    is_s2 = ctx.decisions.schedules.get(ctx.uncut(region)) == "s2" and ctx.split(region) in (None, "s2")
    return is_s2 and asked != (None, None, None) and not ctx.decisions.whole


def _chain(node: Node) -> list[Node]:
    """What reads an exchange: perhaps the sum of parts, and the gather; empty if others read it, too."""
    found: list[Node] = []
    while len(node.users) == 1 and node.target is not _ops.all_rows.default:
        (node,) = node.users
        if node.target not in (_ops.local_combine.default, _ops.all_rows.default):
            break
        found.append(node)
    return found if found and found[-1].target is _ops.all_rows.default else []


def _why_whole(node: Node, number: int, chain: Sequence[Node], ctx: PassContext) -> str | None:
    choice, dims = ctx.choice(number), edit.tensor_value(node).dim()
    if choice.chunks > 1:
        return "one of its chunks is gathered while the next comes back"
    if choice.alltoall != "direct":
        return f"the all-to-all '{choice.alltoall}' has steps of its own"
    if choice.codec != IDENTITY:
        return f"rows are sent as '{choice.codec}'"
    if not ctx.mesh.axis("ep", but="mp"):
        return f"all ranks along '{argument(node, 'axis')}' are one place"
    if not phase_axis(ctx.mesh, argument(node, "axis")):
        return f"the ranks of a place along '{argument(node, 'axis')}' are no neighbours"
    if not chain or argument(chain[-1], "dim") % dims != argument(node, "row_dim") % dims:
        return f"{node.name} is not gathered as it comes"
    return None


def _in_phases(exchange: Node, chain: Sequence[Node], ctx: PassContext) -> int:
    """How many phases there are."""
    x, sizes, out_rows, expert_dim, row_dim, n, axis, _ = exchange.args
    gather, over = chain[-1], phase_axis(ctx.mesh, axis)
    places = ctx.mesh.size(over)
    count, m = transport.count(places), ctx.mesh.nodes_of(axis)[1] or n
    with edit.at(gather) as graph:

        def add(name: str, op, *args) -> Node:
            new = edit.call(graph, op.default, *args, name=name)
            edit.inherit(new, exchange)
            return edit.valued(new, ctx.fake_mode)

        def gathered(slab: Node, phase: int) -> Node:
            for node in chain:
                _, *args = node.args
                if node.target is _ops.local_combine.default:
                    args[1] = args[1] * len(transport.distances(places, count, phase)) // places
                slab = add(f"{node.name}_phase{phase}", node.target.overloadpacket, slab, *args)
            return slab

        slabs: list[Node] = []
        for phase in range(count):
            slabs.append(add(f"{exchange.name}_phase{phase}", _ops.return_phase, x, sizes, out_rows, expert_dim,
                             row_dim, n, axis, m, places, count, phase))  # fmt: skip
            if phase:  # the next one has started
                slabs[phase - 1] = gathered(slabs[phase - 1], phase - 1)
        slabs[-1] = gathered(slabs[-1], count - 1)
        joined = add(f"{gather.name}_joined", _ops.join_phases, slabs, expert_dim, places, over)
    gather.replace_all_uses_with(joined)
    edit.erase_unused([exchange, *chain])
    return count
