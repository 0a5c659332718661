"""Roles within an all-to-all of several steps: every step takes rows in one order and gives them in another.

    sorted --repack--> 2dh(4)/by_number --exchange_phase--> 2dh(4)/intra --..--> source          and back

So steps that are swapped, missing, or of another algorithm, cluster or direction are type errors. Rows that are encoded
keep their order, and nothing but exchanges and `decode` may read them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sympy
from torch.fx import Node

from moefx.ir.op import Stage, expr, value
from moefx.ir.regions import region_of
from moefx.ir.rules import Call, Role, View
from moefx.ir.ways import A2A, INTRA
from moefx.transport.algorithms import INPUT, all_to_all_named
from moefx.transport.blocks import row_shape

DUMPED = 1 << 20  # what the number of a routing is raised by for rows that were dumped
NESTED = 1 << 21  # for rows of a routing that are routed once more
COUNTED = 1 << 22  # for counts of both
_PLACE = ("host", "n", "axis", "m", "algorithm", "step", "reverse")


class TransportRoles:
    """What `rules_moe` says of the ops of `ir.ops.transport` and `ir.ops.sharding`."""

    view: View
    known: dict[Node, Role]
    block_routes: dict[tuple[int, sympy.Expr], int]  # (exchange of capacities, rows per place) -> route

    def _step(self, call: Call) -> None:
        rows = call.args["rows"] if isinstance(call.args["rows"], (list, tuple)) else [call.args["rows"]]
        route = self._role(call, "host", "host").route
        algorithm = all_to_all_named(call.args["algorithm"])
        step = algorithm.step(call.args["step"])
        first, last = ("source", "sorted") if call.args["reverse"] else ("sorted", "source")
        codecs = set()
        for name, node in zip(algorithm.reads(step), rows):
            codecs.add(self._rows_of(call, "rows", node, first if name == INPUT else _between(call, name), route))
        if len(codecs) > 1:
            self.view.fail(call.node, f"{call.name} joins rows of different codecs: {sorted(codecs)}")
        is_last = step is algorithm.steps[-1]
        if is_last:
            self._arriving(call, route, last)
        else:
            self._is_size_of(call, call.args["out_rows"])
        self._give(call.result, Role(last if is_last else _between(call, step.name), route, codec=codecs.pop()))

    def _is_size_of(self, call: Call, size: Any) -> None:
        found = self.view.call_of.get(size) if isinstance(size, Node) else None
        if found is None or self.known.get(size, Role("", 0)).kind != "held":
            self.view.fail(call.node, f"{call.name}: out_rows does not come from phase_rows")
        other = [name for name in _PLACE if found.args[name] != call.args[name]]
        if other:
            self.view.fail(call.node, f"{call.name}: out_rows are the rows of another {other[0]}")

    def _encoded(self, call: Call) -> None:
        role = self.known.get(call.args["rows"])
        if role is None:
            return
        if role.codec:
            self.view.fail(call.node, f"rows that are encoded by '{role.codec}' are encoded again")
        self._give(call.result, Role(role.kind, role.route, codec=call.args["codec"]))

    def _decoded(self, call: Call) -> None:
        role = self.known.get(call.args["payload"])
        if role is None:
            return
        if role.codec != call.args["codec"]:
            self.view.fail(call.node, f"'{call.args['codec']}' decodes rows of the codec '{role.codec or 'identity'}'")
        self._give(call.result, Role(role.kind, role.route))

    # ---- rows for several ranks each

    def _dumped_counts(self, call: Call) -> None:
        """What follows from counts of dumped rows is of a routing of their own."""
        self._give(call.result, Role("traffic", self._role(call, "traffic", "traffic").route + DUMPED))

    def _node_traffic(self, call: Call) -> None:
        """Counts of rows by node and of pairs by slot say what travels between nodes .."""
        self._give(call.result, Role("traffic", self._role(call, "traffic", "traffic").route - COUNTED))

    def _nested_traffic(self, call: Call) -> None:
        """.. and what follows once rows have crossed."""
        self._give(call.result, Role("traffic", self._role(call, "traffic", "traffic").route - COUNTED + NESTED))

    def _dumped(self, call: Call) -> None:
        if call.args["counts"] is None:
            return
        route = self._role(call, "counts", "counts").route
        back = call.stage is Stage.BACK
        self._rows(call, "rows", "sorted", route + DUMPED if back else route)
        self._give(call.result, Role("sorted", route if back else route + DUMPED))

    def _across(self, call: Call) -> None:
        """Of dumped rows, the traffic of those that were not."""
        route = self._role(call, "host", "host").route
        if not route & DUMPED:
            self.view.fail(call.node, f"{call.name} takes the traffic of rows that are not dumped")
        self._give(call.result, Role("host", route - DUMPED))

    def _gathered(self, call: Call) -> None:
        """Rows of a place, which every rank of it has from there on: as if they had been dumped."""
        sizes = self._role(call, "sizes", "host", "capacities")
        if sizes.kind == "capacities":
            self._block_arrives(call, sizes.route, call.args["out_rows"])
            return
        way = self.view.facts.ways.get(region_of(call.node))
        arrived = "slot" if way is not None and {hop.kind for hop in way.out} & {A2A, INTRA} else "sorted"
        before, behind = Role(arrived, sizes.route - DUMPED), Role("source", sizes.route)
        given, made = (behind, before) if call.stage is Stage.BACK else (before, behind)
        self._rows(call, "x", given.kind, given.route)
        self._arriving(call, made.route, made.kind)
        self._give(call.result, made)

    # ---- static blocks

    def _traffic(self, call: Call) -> None:
        self.known[call.result] = Role("host", self._block_route(call, call.args["shape"], call.args["reverse"]))

    def _packed(self, call: Call) -> None:
        route = self._block_route(call, value(call.args["x"]).shape, call.args["reverse"])
        self._give(call.result, Role("source" if call.args["reverse"] else "sorted", route))

    def _unpacked(self, call: Call) -> None:
        # What came out stands in the form that would go the other way.
        route = self._block_route(call, call.args["shape"], not call.args["reverse"])
        self._rows(call, "rows", "sorted" if call.args["reverse"] else "source", route)
        number = self._role(call, "sizes", "capacities").route
        self._block_arrives(call, number, call.args["shape"][call.args["row_dim"]])

    def _block_route(self, call: Call, shape: Sequence[Any], reverse: bool) -> int:
        """The number of the blocks' rows: routings count from 0 upwards, blocks from -1 downwards, those of equal
        capacities and equally many rows per place of capacity being one."""
        number = self._role(call, "sizes", "capacities").route
        sizes = [value(size) for size in shape]
        unit, _ = row_shape(sizes, call.args["expert_dim"], call.args["row_dim"], call.args["n"], reverse=reverse)
        return self.block_routes.setdefault((number, expr(unit)), -1 - len(self.block_routes))


def _between(call: Call, step: str) -> str:
    """The order in which rows stand after a step that is not the last."""
    back = " back" if call.args["reverse"] else ""
    return f"{call.args['algorithm']}({call.args['m']})/{step}{back}"
