"""Let the rows of every region travel to their experts and back. The third part of the step place-experts.

Contract
    takes  the graph behind `place_parameters`: marked regions, parameters of this rank's experts
    gives  one program for every rank, without markers: rows take the hops of their region's way, and inside counts and
           sizes are those of this rank's slots
    never  changes values; on one rank the markers only go

Pseudo-code
    the way of a region: one exchange over `ep` out and one back, of rows or of static blocks (see `ir/ways.py`); where
    experts are cut over `esp`, the exchange is over both, of copies out, and of partial sums back; where ranks gather
    weights over some dims of `esp`, over the others; where they gather all experts, there is none; in Parm's baseline
    it is over `ep`, of rows that all ranks along `esp` have, behind a sum of what these made of them; in S3 over `ep`,
    and ranks along `esp` gather what arrived, and scatter what they made of it
    rows: route by the placement table; exchange counts; a hop out is all_to_all + regroup, a hop back the reverse
    static blocks: exchange capacities; a hop is one equal all_to_all
    where the region is nested in an outer routing: the hop of that between its markers, then the others between those
    of the region; one exchange of counts, of the outer routing, tells all of them
    where ranks that read the same data exchange rows, each sends its own copy, and gets the common result

    y = leave(grouped_linear(enter(rows), w, counts))
        ->  y = all_to_all(regroup(grouped_linear(regroup(all_to_all(rows)), w, slot_counts)))
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule, Node

from moefx import rooms
from moefx.analysis.recognition.blocks import count_blocks
from moefx.analysis.region_rows import refuse_draws
from moefx.axes import MeshSpec
from moefx.context.pass_types import PassContext, PassResult
from moefx.errors import RaiseError, UnsupportedUse
from moefx.ir import edit, regions, ways
from moefx.ir.describe import module_path
from moefx.ir.op import expr, value
from moefx.ir.ops.regions import enter_experts, leave_experts
from moefx.ir.ways import A2A, BLOCKS, COMBINE, DUMP, GATHER, INTER, INTRA, SCATTER, SUM, Hop, Way

_ops = torch.ops.moefx
_RESIZES = ("view", "reshape", "expand", "new_zeros", "new_ones", "new_empty")  # methods whose sizes follow x


def run(gm: GraphModule, ctx: PassContext) -> PassResult:
    result = PassResult()
    enters = gm.graph.find_nodes(op="call_function", target=enter_experts)
    numbers = sorted({n.args[-1] for n in enters})
    for number in numbers:
        _place_region(gm, number, ctx)
        result.changed(f"region {number} over {ctx.mesh.size(ctx.decisions.regions[number].way.axis)} ranks")
    if any(ctx.decisions.regions[number].way.hops for number in numbers):
        edit.move_in_order(gm)
    return result


def _place_region(gm: GraphModule, number: int, ctx: PassContext) -> None:
    nesting = rooms.nesting(ctx.choice(number).alltoall)
    enters, leaves = _marked(gm, number, enter_experts, leave_experts)
    goes, comes = ([], []) if nesting is None else _marked(gm, number, *nesting.markers)
    crossings = goes + comes
    counts, path, experts = enters[0].args[1], module_path(enters[0]), regions.num_experts(enters[0])
    way = _way(number, BLOCKS if counts is None else A2A, path, ctx, nesting if crossings else None)
    copies = ctx.copies(number, f"{way.axis}+{ctx.weights_over(number)}")
    experts_do = _between(enters, leaves)
    of_all = ctx.copies(number, "+".join([*(hop.axis for hop in way.hops), ctx.weights_over(number)]))
    refuse_draws(sorted(experts_do), of_all, path)
    travel: _Rows | _Blocks | None = None
    if counts is None:
        regions.tag(experts_do, number)
        load, choices = count_blocks(gm, enters[0]) if _is_first(number, ctx) else (None, ())
        travel = _Blocks(gm, number, ctx) if way.axis else None
    else:
        nested = _Nested(nesting, crossings[0].args[1].args[0]) if crossings else None
        first = counts.args[0] if nested is None else nested.outer
        inside = edit.descendants([first], until=_ops.combine.default)
        inside |= edit.descendants(comes, until=_ops.combine.default)
        regions.tag((n for n in inside if n.op != "output"), number)
        load, choices = counts, (first.args[0],)
        if way.axis:
            travel = _Rows(gm, number, enters, leaves, way, ctx, nested)
            load = travel.load
    outermost = crossings or enters + leaves
    for marker in enters + leaves + crossings:
        x, reverse = marker.args[0], marker in leaves or marker in comes
        is_copied = copies and marker in outermost and edit.tensor_value(x).is_floating_point()
        with edit.at(marker):
            if is_copied and not reverse:
                x = _copy(gm, _ops.own_copy, x, copies, ctx)
            for hop in way.back if reverse else way.out:
                if (hop.kind == INTER) is not (marker in crossings):
                    continue
                if hop.kind == SUM:
                    x = edit.call(gm.graph, _ops.sum_rows.default, x, counts if travel is None else travel.slots,
                                  marker.args[2], hop.axis, name=ctx.name_in(number, "sum"))  # fmt: skip
                else:
                    x = travel.dump(x, marker, hop) if hop.kind in (DUMP, COMBINE) else (
                        travel.hop(x, marker, hop, reverse=reverse))  # fmt: skip
            if is_copied and reverse:
                x = _copy(gm, _ops.common_copy, x, copies, ctx)
        marker.replace_all_uses_with(x)
        gm.graph.erase_node(marker)
    ctx.add_region(number, path, experts, load, choices, way)
    split = ctx.report.schedules.get(path, "")
    if any(hop.kind == GATHER for hop in way.out) and not split.startswith("s3"):
        ctx.report.schedules[path] = f"s3, split as in {split}" if split else "s3"


def _marked(gm: GraphModule, number: int, *markers: Callable) -> list[list[Node]]:
    """Of each of these, those of the region."""
    return [[n for n in gm.graph.find_nodes(op="call_function", target=marker) if n.args[-1] == number]
            for marker in markers]  # fmt: skip


def _between(enters: list[Node], leaves: list[Node]) -> set[Node]:
    """The nodes on the ways from one to the other, without a look at the layers before and behind."""
    first, last = min(enters), max(leaves)
    behind = edit.closure(enters, lambda node: [user for user in node.users if user <= last])
    return behind & edit.closure(leaves, lambda node: [each for each in node.all_input_nodes if each >= first])


def _copy(gm: GraphModule, op: Any, x: Node, axis: str, ctx: PassContext) -> Node:
    return edit.call(gm.graph, op.default, x, ctx.mesh.size(axis), axis, name=f"{x.name}_copy")


def _way(number: int, kind: str, path: str, ctx: PassContext, nesting: rooms.Nesting | None) -> Way:
    """The way of a region's rows. nesting: how they cross first."""
    asked, parts, why = ctx.split(number), ctx.tokens_over(number), ctx.report.whole_over_esp.get(number)
    gathers_rows, places = asked == "s3" and ctx.mesh.axis("esp") != "", ctx.places_over(number)
    if why is not None and (ctx.gathers_tokens(number) or gathers_rows):
        raise UnsupportedUse(f"the split '{asked}' needs experts that are cut over 'esp', and these are whole: "
                             f"{why}", where=path, hint="split=None")  # fmt: skip
    if nesting is not None:
        return nesting.way(places, parts, ctx.mesh)
    if ctx.gathers_tokens(number):
        return ways.of_gathered(kind, places, parts)
    if gathers_rows and parts:
        return ways.gathered_there(kind, places, parts)
    return ways.there_and_back(kind, ctx.mesh.axis(f"{places}+{parts}"), parts)


def _is_first(number: int, ctx: PassContext) -> bool:
    return number not in ctx.decisions.chunks or ctx.decisions.chunks[number].index == 0


# ---- dropless rows


class _Travel:
    """The steps of a region's way. counts: rows per expert, None for static blocks. legs: {axis of an exchange: (how
    many rows every rank has, those of this rank before it, those behind it)}."""

    mesh: MeshSpec
    counts: Node | None
    slots: Node | None  # the same of this rank's slots
    named: Callable[[str], str]  # what a value of the region is called
    legs: dict[str, tuple[Node, Any, Node]]

    def dump(self, x: Node, marker: Node, hop: Hop) -> Node:
        """Copies of rows for all ranks that have a part of their expert, or the sum of what these computed."""
        op = _ops.dump if hop.kind == DUMP else _ops.local_combine
        places, n = self.mesh.size("ep"), self.mesh.size(hop.axis)
        return edit.call(marker.graph, op.default, x, self.counts, places, n, marker.args[2], hop.axis,
                         name=self.named(hop.kind))  # fmt: skip

    def gather(self, x: Node, row_dim: int, hop: Hop) -> Node:
        """The rows of all ranks that have parts of the same experts, or the sums of what these made of them."""
        sizes, before, behind = self.legs[hop.axis]
        op, size = (_ops.gather_parts, behind) if hop.kind == GATHER else (_ops.scatter_parts, before)
        return edit.call(x.graph, op.default, x, sizes, size, row_dim, self.mesh.size(hop.axis), hop.axis,
                         name=self.named(hop.kind))  # fmt: skip


class _Nested(NamedTuple):
    """How rows cross first, and the node of the routing by which they do."""

    how: rooms.Nesting
    outer: Node


class _Rows(_Travel):
    """The hops of dropless rows, and what they read: the traffic of all ranks along the way's axis, and sizes. load:
    rows per expert of all ranks."""

    def __init__(self, gm: GraphModule, number: int, enters: list[Node], leaves: list[Node], way: Way,
                 ctx: PassContext, nested: _Nested | None = None) -> None:  # fmt: skip
        self.mesh, counts, axis = ctx.mesh, enters[0].args[1], way.axis
        self.counts, route, n, graph = counts, counts.args[0], ctx.mesh.size(axis), gm.graph
        named, self.legs = partial(ctx.name_in, number), {}
        self.named = named
        parts = "+".join(hop.axis for hop in way.out if hop.kind in (DUMP, GATHER))
        copies, is_gathered = ctx.mesh.size(parts), any(hop.kind == GATHER for hop in way.out)
        table = self._by_slots(gm, number, route, ctx)
        counted = counts if nested is None else nested.how.counts(nested.outer, table)
        with edit.at(counted, after=True):
            exchanged = edit.call(graph, _ops.exchange_counts.default, counted, n, axis, name=named("traffic"))
            traffic = self.load = exchanged
            if nested is not None:
                self.load, self.legs[INTER], traffic = nested.how.cross(nested.outer, exchanged, n, axis, named)
            elif ctx.slots(number) is not None:
                self.load = edit.call(graph, _ops.expert_load.default, traffic, table, name=named("load"))
            if copies > 1:
                traffic = edit.call(graph, _ops.dump_counts.default, traffic, ctx.mesh.size("ep"), copies, parts,
                                    name=named("dumped"))  # fmt: skip
            host = edit.call(graph, _ops.counts_to_host.default, traffic, axis, name=named("host"))
            self.received = edit.call(graph, _ops.received_rows.default, host, n, axis, name=named("rows"))
            self.slots = slots = edit.call(graph, _ops.slot_counts.default, traffic, n, axis, name=named("slots"))
            perm = _part_of(route, 0)
            sent = graph.create_node("call_method", "size", (perm, 0), name=named("sent"))
            if is_gathered:
                self.legs |= self._two_legs(host, sent, way)
            else:
                behind = sent if copies == 1 else edit.call(graph, operator.mul, sent, copies, name=named("copies"))
                self.legs[axis] = host, behind, self.received
        if perm > sent:
            counts.append(perm)  # the size is read from perm, which may stand behind the counts
        if nested is not None:
            self._leave_out(perm, nested.outer, ctx.mesh.axis("ep"))
        inside = _between(enters, leaves)
        total = expr(value(perm).shape[0])
        for node in inside | set(counts.users):
            if node is not exchanged and node.target not in (enter_experts, leave_experts, _ops.dump.default):
                _use_local_sizes(node, counts, slots, self.received, total)

    def _by_slots(self, gm: GraphModule, number: int, route: Node, ctx: PassContext) -> Node:
        """Rows go to slots by the region's table, and to copies by shares."""
        table, slots, quota = regions.table_of(gm, ctx.uncut(number)), ctx.slots(number), ()
        if slots is not None and slots.spare:
            ends = regions.table_of(gm, ctx.uncut(number), "ends")
            with edit.at(route):
                quota = (edit.call(gm.graph, _ops.shared_rows.default, route.args[0], ends, name=self.named("quota")),)
        places = route.args[1] if slots is None else slots.cap * self.mesh.size("ep")
        route.args = (route.args[0], places, table, *quota)
        return table

    def _leave_out(self, perm: Node, outer: Node, axis: str) -> None:
        """Of the pairs that crossed, most may be of other ranks: where nothing else reads them, rows are made of those
        that go on from here alone."""
        host, sent, _ = self.legs[axis]
        goes = [u for u in perm.users if u.target is _ops.dispatch.default]
        comes = [u for u in perm.users if u.target is _ops.combine.default]
        others = perm.users.keys() - {sent, *goes, *comes}
        ends = {u.target for each in goes for u in each.users} | {each.args[0].target for each in comes}
        if others or ends != {enter_experts, leave_experts}:
            return
        edit.erase_unused([sent])
        with edit.at(host, after=True) as graph:
            sizes = (graph.call_method("size", (outer.args[0], dim)) for dim in range(2))
            pairs = edit.call(graph, operator.mul, *sizes, name=self.named("pairs"))
            kept = edit.call(graph, _ops.sent_rows.default, host, pairs, self.mesh.size(axis), axis,
                             name=self.named("kept"))  # fmt: skip
        self.legs = {over: (sizes, kept if before is sent else before, behind)
                     for over, (sizes, before, behind) in self.legs.items()}  # fmt: skip
        for each in goes:
            each.args = (*each.args[:3], kept)

    def _two_legs(self, host: Node, sent: Node, way: Way) -> dict[str, tuple[Node, Any, Node]]:
        """Those of rows that go to one rank of a place, over the one axis, and to all of it over the other. What is
        known of dumped rows says all of them."""
        graph, places = host.graph, self.mesh.axis("ep")
        parts = next(hop.axis for hop in way.out if hop.kind == GATHER)
        n, legs = self.mesh.size(places), {}
        if places:
            across = edit.call(graph, _ops.across_places.default, host, self.mesh.size(parts), parts,
                               name=self.named("across"))  # fmt: skip
            legs[places] = across, sent, sent
            if any(hop.axis == places for hop in way.out):
                arrived = edit.call(graph, _ops.received_rows.default, across, n, places, name=self.named("arrived"))
                legs[places], sent = (across, sent, arrived), arrived
        within = edit.call(graph, _ops.within_place.default, host, n, places, name=self.named("within"))
        return {**legs, parts: (within, sent, self.received)}

    def hop(self, x: Node, marker: Node, hop: Hop, *, reverse: bool) -> Node:
        graph, where = marker.graph, (self.mesh.size(hop.axis), hop.axis, reverse)
        part = (hop.kind, self.mesh.nodes_of(hop.axis)[1]) if hop.kind in (INTER, INTRA) else ()
        side = "leave" if reverse else "enter"
        regrouped, moved = self.named(f"{side}_regroup"), self.named(f"{side}_a2a")
        host, before, behind = self.legs[INTER if hop.kind == INTER else hop.axis]
        if hop.kind == INTER:  # in the order of the outer routing, and a rank has no others there
            size = before if reverse else behind
            return edit.call(graph, _ops.all_to_all.default, x, host, size, *where, *part, name=f"{marker.name}_a2a")
        if reverse:
            x = edit.call(graph, _ops.regroup.default, x, host, *where, name=regrouped)
        if hop.kind in (GATHER, SCATTER):
            x = self.gather(x, 0, hop)
        else:
            x = edit.call(graph, _ops.all_to_all.default, x, host, before if reverse else behind, *where, *part,
                          name=moved)  # fmt: skip
        if not reverse:
            x = edit.call(graph, _ops.regroup.default, x, host, *where, name=regrouped)
        return x


def _part_of(route: Node, number: int) -> Node:
    """The order of a routing's pairs (0), or its counts (1)."""
    return next(u for u in route.users if u.target is operator.getitem and u.args[1] == number)


def _use_local_sizes(node: Node, counts: Node, local: Node, rows: Node, total) -> None:
    """Inside the experts counts are those of the local slots, and there are `rows` rows."""
    node.replace_input_with(counts, local)
    if total.is_Integer:
        _use_local_rows(node, rows, int(total))
    for argument in list(node.all_input_nodes):
        found = value(argument)
        if isinstance(found, torch.SymInt) and argument is not rows:
            if found.node.expr == total:
                node.replace_input_with(argument, rows)
            elif total.free_symbols and found.node.expr.has(*total.free_symbols):
                raise RaiseError(
                    f"{node.name} uses the size {found.node.expr} of the tokens inside the experts",
                    where=edit.place(node),
                    hint="use -1 in views of experts' rows",
                )


def _use_local_rows(node: Node, rows: Node, total: int) -> None:
    """The same in a program of one size, which has no symbol for its rows: where the op says that its number is one."""
    x, *sizes = node.args or (None,)
    if node.target is _ops.expert_rows.default:
        node.args = (x, sizes[0], rows)
    elif node.target in _RESIZES and int(edit.tensor_value(node).shape[0]) == total:
        nested = len(sizes) == 1 and isinstance(sizes[0], (list, tuple))
        first, *others = sizes[0] if nested else sizes
        if first == total:
            node.args = (x, (rows, *others)) if nested else (x, rows, *others)


# ---- static blocks


class _Blocks(_Travel):
    """The hops of static blocks, of which every rank has its own capacity."""

    counts = slots = None

    arrived: Node | None = None  # how many rows of every expert there are behind the hop before

    def __init__(self, gm: GraphModule, number: int, ctx: PassContext) -> None:
        self.gm, self.mesh, self.legs = gm, ctx.mesh, {}
        self.named = partial(ctx.name_in, number)

    def hop(self, x: Node, marker: Node, hop: Hop, *, reverse: bool) -> Node:
        _, _, expert_dim, row_dim, _ = marker.args
        n = self.mesh.size(hop.axis)
        if not reverse:
            size = self.arrived if hop.kind == GATHER else None
            self.legs[hop.axis] = *_, self.arrived = _exchanged_size(self.gm, marker, size, n, hop.axis)
        if hop.kind in (GATHER, SCATTER):
            return self.gather(x, row_dim, hop)
        sizes, before, behind = self.legs[hop.axis]
        return edit.call(self.gm.graph, _ops.all_to_all_capacity.default, x, sizes, before if reverse else behind,
                         expert_dim, row_dim, n, hop.axis, reverse,
                         name=self.named(f"{'leave' if reverse else 'enter'}_a2a"))  # fmt: skip


def _exchanged_size(gm: GraphModule, enter: Node, size: Any, n: int, axis: str) -> tuple[Node, Any, Node]:
    """(all ranks' capacities, this rank's, their sum); exchanged once per capacity and program. size: this rank's, of
    which nothing is known yet; None: that of the blocks that enter."""
    found = edit.tensor_value(enter).shape[enter.args[3]]
    for known in gm.graph.find_nodes(op="call_function", target=_ops.exchange_sizes.default):
        other, _, over = known.args
        if over == axis and (expr(value(other)) == expr(found) if size is None else other is size):
            return known, other, next(u for u in known.users if u.target is _ops.total_size.default)
    if size is None:
        size = found
        if isinstance(found, torch.SymInt):
            size = gm.graph.create_node("call_method", "size", (enter.args[0], enter.args[3]), name="capacity")
            size.meta["val"] = found
    sizes = edit.call(gm.graph, _ops.exchange_sizes.default, size, n, axis, name="capacities")
    return sizes, size, edit.call(gm.graph, _ops.total_size.default, sizes, name="capacity_sum")
