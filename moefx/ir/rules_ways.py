"""Rules of ways: the rows of a region take every hop of its way once, in order, over its axis.

What an exchange of rows gives is on its way until the last hop back, and so is whatever is computed from it. Rows may
also be made where the experts are (a number of every expert for each of its rows): they only go back. So a hop that is
missing, doubled or over another axis is found where the next one begins, or where the rows leave the model.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.fx import Node

from moefx.axes import split_axes
from moefx.ir import edit
from moefx.ir.level import Level
from moefx.ir.op import VALUES, Stage, known_same, value
from moefx.ir.regions import region_of
from moefx.ir.rules import BACKWARD, FORWARD, WHOLE, Call, View, rule
from moefx.ir.ways import A2A, BLOCKS, COMBINE, DUMP, GATHER, SCATTER, SUM, Hop, Way
from moefx.transport.algorithms import all_to_all_named

_OF_PARTS = (DUMP, COMBINE, SUM, GATHER, SCATTER)  # hops between ranks that have parts of the same experts
_KINDS = {"all_gather": GATHER, "reduce_scatter": SCATTER, "all_reduce": SUM}  # of what exchanges nothing else


@rule(Level.PLACED, Level.SCHEDULED)
def rows_take_their_way(view: View) -> None:
    """Every exchange of rows is the next hop of its region's way, see the module's docstring. In a backward graph,
    where gradients go the other way, only axes are checked."""
    ways = view.facts.ways
    if view.facts.graph == BACKWARD:
        for call in dict.fromkeys(view.call_of.values()) if ways else ():
            if _moves(call):
                _check_axis(view, call)
        return
    if any(way.hops for way in ways.values()):
        _Travels(view).follow()


@rule(Level.PLACED, Level.SCHEDULED, graphs=(WHOLE, FORWARD))
def gathered_rows_are_those_of_all(view: View) -> None:
    """Rows are gathered, and a rank's own are kept, along the axis where their way sums what parts of experts made of
    them, as many as the ranks told one another."""
    for name in ("gather_rows", "keep_rows"):
        for call in view.calls.get(name, ()):
            exchange = view.call_of[call.args["sizes"]]
            way = view.facts.ways.get(region_of(exchange.node), Way())
            axes = {hop.axis for hop in way.back if hop.kind == SUM}
            for each in (call, exchange):
                if axes and each.args["axis"] not in axes:
                    view.fail(each.node, f"{each.name} runs over '{each.args['axis']}'", f"their way: {_text(way)}")
            total = next(user for user in exchange.result.users if isinstance(value(user), (int, torch.SymInt)))
            wanted = value(total if name == "keep_rows" else exchange.args["size"])
            found = value(call.args["x"]).shape[call.args["dim"]]
            if not known_same(found, wanted):
                view.fail(call.node, f"{name} takes {found} rows, of {wanted} that ranks told one another")


@rule(Level.PLACED, graphs=(WHOLE,))
def experts_are_cut_as_rows_travel(view: View) -> None:
    """Rows that are copied to, or added up from, ranks along an axis are worked on by experts that are cut over it, and
    no others are."""
    mesh, found = view.facts.mesh, {}  # over which dims what a region uses of a parameter is still cut
    for cuts, gathered, region in _uses_of_parameters(view):
        for role in ("ep", "esp"):
            mine = [{*each.axis} & {*mesh.dims(role)} for each in cuts if (each.dim == 0) is (role == "ep")]
            if role == "esp" or any(mine):
                found.setdefault((region, role), set()).update(*(each - gathered for each in mine))
    for (region, role), dims in found.items():
        way = view.facts.ways[region]
        hops = [hop for hop in way.hops if role == "ep" or hop.kind in _OF_PARTS]
        parts = {dim for hop in hops for dim in split_axes(hop.axis)} & {*mesh.dims(role)}
        if parts != dims:
            node = next(n for n in view.nodes if region_of(n) == region)
            over, towards = ("+".join(sorted(each)) for each in (dims, parts))
            view.fail(node, f"the experts of region {region} are cut over '{over}', and their rows go to parts over "
                      f"'{towards}'", f"their way: {_text(way)}")  # fmt: skip


def _uses_of_parameters(view: View) -> Iterator[tuple[tuple, set[str], int]]:
    """(how a parameter is cut, over which dims it was gathered before, region that uses what came of it) of every use.
    """
    uses = {call.node: call for call in view.calls.get("materialize", ())}
    of_weights = set(uses)  # what is computed from weights alone
    for node in view.nodes:
        if node.op.startswith("call") and node.all_input_nodes and of_weights.issuperset(node.all_input_nodes):
            of_weights.add(node)
    gathers = {call.node: call for call in view.of_stage(Stage.WEIGHTS) if call.op.along.gives == "R"}
    passes_on = of_weights - gathers.keys()
    for use, call in uses.items():
        mine = edit.closure([use], lambda n: n.users if n in of_weights else ())
        for node in (use, *(mine & gathers.keys())):
            gathered = {*view.facts.mesh.dims(gathers[node].args["axis"])} if node in gathers else set()
            near = edit.closure([node], lambda n, first=node: n.users if n is first or n in passes_on else ())
            for region in {region_of(n) for n in near - of_weights} & view.facts.ways.keys():
                yield call.args["param"].meta["moefx"].layout.cuts, gathered, region


def _moves(call: Call) -> bool:
    """Whether a call is a hop, or part of one."""
    return call.op.tokens is not None and call.stage in (Stage.OUT, Stage.BACK)


def _check_axis(view: View, call: Call) -> Way:
    """The way of the region that an exchange belongs to, which goes over its axis."""
    region, axis = region_of(call.node), call.args["axis"]
    way = view.facts.ways.get(region)
    if way is None or not way.hops:
        view.fail(call.node, f"{call.name} takes rows over '{axis}', but belongs to no region whose rows travel")
    if axis not in {hop.axis for hop in way.hops}:
        view.fail(call.node, f"{call.name} takes the rows of region {region} over '{axis}'", f"their way: {_text(way)}")
    over, m = call.args.get("over"), view.facts.mesh.nodes_of(axis)[1]
    if over is not None and (Hop(over, axis) not in way.hops or call.args["m"] != m):
        view.fail(call.node, f"{call.name} takes the rows of region {region} '{over}' nodes of {call.args['m']} ranks",
                  f"nodes have {m}; their way: {_text(way)}")  # fmt: skip
    return way


class _Travels:
    """far: where rows are on their way, as (region, hops taken). taken: (region, number of a hop of its way)."""

    def __init__(self, view: View) -> None:
        self.view = view
        self.far: dict[Node, tuple[int | None, int]] = {}
        self.taken: set[tuple[int | None, int]] = set()

    def follow(self) -> None:
        view = self.view
        for node in view.nodes:
            call = view.call_of.get(node)
            if call is not None and call.result is not node:
                continue  # a start; its wait has the result
            given = (call.node if call is not None else node).all_input_nodes
            here = next((self.far[a] for a in given if a in self.far), None)
            if call is not None and _moves(call):
                here = self._hop(call, _check_axis(view, call), here)
            elif here is None:
                here = self._made_there(given)
            if here is not None and not self._is_of_routing(node, call):
                self.far[node] = here
        for node in view.returned[view.facts.first_output :][: len(view.facts.outputs or ())]:
            if node in self.far:
                region, taken = self.far[node]
                view.fail(node, f"rows of region {region} leave the model on their way, after {taken} hops",
                          f"their way: {_text(view.facts.ways[region])}")  # fmt: skip
        for region, way in view.facts.ways.items() if view.facts.graph == WHOLE else ():
            for number, hop in enumerate(way.hops):
                if (region, number) not in self.taken:
                    view.fail(view.nodes[-1], f"no rows of region {region} go {_side(way, number)} over '{hop.axis}'",
                              f"their way: {_text(way)}")  # fmt: skip

    @staticmethod
    def _is_of_routing(node: Node, call: Call | None) -> bool:
        """Whether it is a size, or what a routing of rows on their way says of them."""
        gives = call.op.tokens.gives if call is not None and call.op.tokens is not None else ""
        return isinstance(value(node), (int, torch.SymInt)) or isinstance(gives, tuple) or gives in VALUES

    def _made_there(self, given: list[Node]) -> tuple[int | None, int] | None:
        """Where rows are that an op makes, as many as arrived at the experts."""
        for node in given:
            call = self.view.call_of.get(node)
            way = self.view.facts.ways.get(region_of(node))
            if call is not None and call.op.tokens and call.op.tokens.gives == "received" and way and way.hops:
                return region_of(node), len(way.out)
        return None

    def _hop(self, call: Call, way: Way, here: tuple[int | None, int] | None) -> tuple[int | None, int] | None:
        """Where the rows are behind an exchange that begins where they are `here`."""
        region, packed = region_of(call.node), self._are_packed(call)
        if here is not None and here[0] != region:
            self.view.fail(call.node, f"rows of region {here[0]} on their way take a hop of region {region}")
        if call.op.tokens.rule != "unpacked" and (packed or not _is_last_step(call)):
            return here
        number = 0 if here is None else here[1]
        side = call.stage.value
        kind = BLOCKS if packed or call.op.tokens.rule == "block" else call.args.get("over") or A2A
        kind = _KINDS.get(call.op.collective, kind)
        if call.op.tokens.rule == "dumped":
            kind = DUMP if call.stage is Stage.OUT else COMBINE
        if (way.hops[number], _side(way, number)) != (Hop(kind, call.args["axis"]), side):
            self.view.fail(call.node, f"{call.name} takes the rows of region {region} {side} by {kind} over "
                           f"'{call.args['axis']}' after {number} hops", f"their way: {_text(way)}")  # fmt: skip
        self.taken.add((region, number))
        return (region, number + 1) if number + 1 < len(way.hops) else None

    def _are_packed(self, call: Call) -> bool:
        """Whether an exchange is a step of one of static blocks, which ends where they are unpacked."""
        made = self.view.call_of.get(call.args.get("host"))
        return call.op.tokens.rule == "unpacked" or (made is not None and made.op.tokens.rule == "traffic")


def _is_last_step(call: Call) -> bool:
    if call.op.tokens.rule != "step":
        return True
    return all_to_all_named(call.args["algorithm"]).steps[-1].name == call.args["step"]


def _side(way: Way, number: int) -> str:
    return "out" if number < len(way.out) else "back"


def _text(way: Way) -> str:
    out, back = (", ".join(f"{hop.kind} over '{hop.axis}'" for hop in hops) for hops in (way.out, way.back))
    return f"out by {out}, back by {back}"
