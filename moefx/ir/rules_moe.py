"""Rules of meaning: no token is lost.

Every value of a routing has a role: its order, its counts, its sizes, and the rows that it moves. Rows stand in
a known order (`sorted`, `inside`, `source`, `slot`), each op of the dialect takes them in one order and gives them in
another, and ops in between keep it. So a missing, doubled or swapped exchange is a type error.

    sorted --enter--> inside --leave--> sorted                                              level moe
    sorted --all_to_all--> source --regroup--> slot --regroup--> source --all_to_all--> sorted       later

An all-to-all of several steps has orders of its own in between, see `rules_transport`. A routing may be nested in
another one: its choices are rows of that, and so is all that its ops take of tokens, and give.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Node

from moefx.ir import edit
from moefx.ir.level import Level
from moefx.ir.op import VALUES, Stage, known_same, value
from moefx.ir.regions import TABLES, region_of
from moefx.ir.rules import BACKWARD, Call, Role, View, rule
from moefx.ir.rules_placement import check_tables
from moefx.ir.rules_transport import COUNTED, NESTED, TransportRoles


def roles(view: View) -> dict[Node, Role]:
    """The role of every node that has one. Raises VerifyError where an op gets a value that it cannot take."""
    return _Roles(view).infer()


@rule(Level.MOE, Level.PLACED, Level.SCHEDULED)
def tokens_are_conserved(view: View) -> None:
    """What is dispatched is computed in the right order and comes back to its tokens, see the module's docstring."""
    known = roles(view)
    check_tables(view, known)
    if view.facts.graph == BACKWARD:
        return
    calls = [call for call in dict.fromkeys(view.call_of.values()) if call.op.tokens is not None]
    for call in calls:
        if call.op.tokens.moves and (call.result is None or not call.result.users):
            view.fail(call.node, f"the rows of this {call.name} are taken by nobody")
    combined = {known[call.args[call.op.tokens.routing]].route for call in calls if call.op.tokens.ends}
    for call in calls:
        if call.op.tokens.begins and known[call.args[call.op.tokens.routing]].route not in combined:
            view.fail(call.node, "rows are dispatched and never combined", "one combine per routing brings them back")
    for node in view.returned[view.facts.first_output :][: len(view.facts.outputs or ())]:
        role = known.get(node)
        if role is not None and role.is_order:
            view.fail(node, "rows of experts leave the model without a combine")
    _markers_pair_up(view)


def _markers_pair_up(view: View) -> None:
    regions: dict[Any, dict[str, list[Call]]] = {}
    for name in ("enter_experts", "leave_experts"):
        for call in view.calls.get(name, ()):
            regions.setdefault(call.args["region"], {}).setdefault(name, []).append(call)
    for region, sides in regions.items():
        calls = [call for side in sides.values() for call in side]
        if len(sides) != 2:
            view.fail(calls[0].node, f"region {region} has only {calls[0].name}", "enter and leave come in pairs")
        if len({(c.args["counts"] is None, c.args["counts"]) for c in calls}) != 1:
            view.fail(calls[-1].node, f"region {region} is entered and left with different counts")


class _Roles(TransportRoles):
    def __init__(self, view: View) -> None:
        self.view, self.backward = view, view.facts.graph == BACKWARD
        self.known: dict[Node, Role] = {}
        self.rows_of: dict[tuple[int, str], Any] = {}  # (route, order) -> how many rows
        self.routes = self.capacities = 0
        self.block_routes = {}

    def infer(self) -> dict[Node, Role]:
        inputs = iter(self.view.facts.saved)
        for node in self.view.nodes:
            if node.op == "placeholder":
                source = node.meta.get("moefx")
                is_table = source is not None and source.kind in TABLES
                role = Role(source.kind, source.key) if is_table else next(inputs, None)
                if role is not None:
                    self._give(node, role)
                continue
            call = self.view.call_of.get(node)
            if call is not None and call.op.copies:
                self._copied(node, call)
            elif call is None or call.op.tokens is None:
                self._tokens_are_gathered(node, call)
                self._keep(node)
            elif call.result is node:  # a start has no value; its wait has
                self._obey(call, call.op.tokens.rule)
            self._sizes(node)
        return self.known

    def _obey(self, call: Call, rule: str | Callable[[View, Call], Role | None]) -> None:
        if callable(rule):
            role = rule(self.view, call)
            if role is not None:
                self._give(call.result, role)
        else:
            (getattr(self, f"_{rule}") if rule else self._follow)(call)

    def _give(self, node: Node, role: Role) -> None:
        self.known[node] = role
        found = edit.tensor_value(node)
        if role.is_order and found is not None and found.dim():
            self.rows_of.setdefault((role.route, role.kind), found.shape[0])

    def _copied(self, node: Node, call: Call) -> None:
        """In another memory a value is the same to its routing."""
        role = self.known.get(call.node.all_input_nodes[0])
        if role is not None and call.result is node:
            self._give(node, role)

    def _sizes(self, node: Node) -> None:
        """Every value of a routing's rows has as many rows as the first that was seen."""
        role, found = self.known.get(node), edit.tensor_value(node)
        if role is None or not role.is_order or found is None or not found.dim():
            return
        wanted = self.rows_of.setdefault((role.route, role.kind), found.shape[0])
        if not known_same(found.shape[0], wanted):
            self.view.fail(node, f"{found.shape[0]} rows where the routing has {wanted}")

    # ---- ops that are not of a routing

    def _tokens_are_gathered(self, node: Node, call: Call | None) -> None:
        """What ranks have of a tensor is put together in the order of tokens."""
        if call is None or call.op.collective != "all_gather" or self.backward:
            return
        role = next((self.known[a] for a in call.node.all_input_nodes if a in self.known), None)
        if role is not None and role.is_order:
            self.view.fail(node, f"{call.name} gathers rows in the order '{role.kind}'", "combine them first")

    def _keep(self, node: Node) -> None:
        """The order of rows goes through row-wise ops; a routing's own values go through nothing but getitem."""
        if node.op == "output":
            return
        orders = {self.known[a]: a for a in node.all_input_nodes if a in self.known and self.known[a].is_order}
        if not orders:
            return
        coded = next((role.codec for role in orders if role.codec), None)
        if coded:
            self.view.fail(node, f"{node.name} reads rows that are encoded by '{coded}'", "decode them first")
        same = [role for role in orders if self._has_rows(node, role)]
        if len(same) > 1 and not self.backward:
            first, second = same[:2]
            self.view.fail(node, f"rows that are {first.kind} meet rows that are {second.kind}"
                           if first.route == second.route else "rows of two routings meet")
        if len(same) == 1:
            self._give(node, same[0])

    def _has_rows(self, node: Node, role: Role) -> bool:
        found = value(node)
        tensors = [t for t in (found if isinstance(found, (tuple, list)) else [found]) if isinstance(t, torch.Tensor)]
        if not tensors or not tensors[0].dim():
            return False
        rows = self.rows_of.get((role.route, role.kind))
        return rows is not None and known_same(tensors[0].shape[0], rows)

    # ---- the routing

    def _role(self, call: Call, argument: str, *kinds: str) -> Role:
        """The role of an argument, which must be one of `kinds`."""
        node = call.args[argument]
        role = self.known.get(node) if isinstance(node, Node) else None
        if role is None or role.kind not in kinds:
            is_a = f"is {role.kind}" if role else "does not come from a routing"
            self.view.fail(call.node, f"{call.name}: {argument} {is_a}, not {' or '.join(kinds)}")
        return role

    def _rows(self, call: Call, argument: str, order: str, route: int) -> None:
        """Rows must stand in `order` of `route`, and as they are."""
        codec = self._rows_of(call, argument, call.args[argument], order, route)
        if codec:
            self.view.fail(call.node, f"{call.name}: {argument} are encoded by '{codec}'", "decode them first")

    def _rows_of(self, call: Call, argument: str, node: Any, order: str, route: int) -> str:
        """The codec of rows that must stand in `order` of `route`. In a backward graph a gradient's order may be
        unknown."""
        role = self.known.get(node)
        if role is None and self.backward:
            return ""
        if role is None or (role.kind, role.route) != (order, route):
            is_a = "were never dispatched" if role is None else (
                f"are in the order '{role.kind}'" if role.route == route else "belong to another routing")
            self.view.fail(call.node, f"{call.name}: {argument} {is_a}, not in the order '{order}' of its routing")
        return role.codec

    def _follow(self, call: Call) -> None:
        """What the op's record says, see `op.Tokens`."""
        tokens, args = call.op.tokens, call.args
        if tokens.or_blocks and args[tokens.routing] is None:
            return
        before = next((kind for kind in tokens.takes.values() if kind not in VALUES), "")
        meant = {before: tokens.gives, tokens.gives: before} if before and args.get("reverse") else {}
        route, codec = -1, ""
        for name, kind in tokens.takes.items():
            if kind == "slots":
                role = self._counted(call, name)
                route, meant = role.route, {"slot": role.kind}
            elif kind == "received":
                self._arriving(call, route, meant.get(tokens.gives, tokens.gives))
            elif kind in VALUES:
                route = self._value(call, name, kind)
            elif tokens.coded:
                codec = self._rows_of(call, name, args[name], meant.get(kind, kind), route)
            else:
                self._rows(call, name, meant.get(kind, kind), route)
        rest = self._within(call)
        for name in call.op.per_token:
            self._of_tokens(call, name, route)
        given = meant.get(tokens.gives, tokens.gives)
        if isinstance(given, tuple):
            self._give_each(call.result, [Role(kind, route, codec=codec) if kind else rest for kind in given])
        elif given or rest:
            self._give(call.result, Role(given, route, codec=codec) if given else rest)

    def _value(self, call: Call, argument: str, kind: str) -> int:
        """The routing of an argument that is one of the routing's own values."""
        role = self._role(call, argument, kind)
        if kind == "perm" and call.args.get("k", role.k) != role.k:
            self.view.fail(call.node, f"{call.name} takes {call.args['k']} choices per token, its routing has {role.k}")
        return role.route

    def _of_tokens(self, call: Call, argument: str, route: int) -> None:
        """What has an entry for every token is of as many tokens as chose."""
        found, wanted = value(call.args[argument]), self.rows_of.get((route, "tokens"))
        if found is not None and wanted is not None and not known_same(found.shape[0], wanted):
            self.view.fail(call.node, f"{call.name}: {argument} is of {found.shape[0]} tokens, its routing of {wanted}")

    def _give_each(self, node: Node, roles: Sequence[Role | Any]) -> None:
        for user in node.users:
            if user.target is operator.getitem and roles[user.args[1]]:
                self._give(user, roles[user.args[1]])

    def _routing(self, call: Call) -> None:
        (tokens, choices), route = value(call.args["idx"]).shape, self.routes
        within = self.known.get(call.args["idx"])
        if within is not None and within.is_order:
            route = within.route + NESTED
        else:
            self.routes, within = self.routes + 1, None
        self.rows_of[route, "tokens"] = tokens
        nodes = call.args.get("nodes")
        k, counted = (int(choices), route) if nodes is None else (min(int(choices), nodes), route + COUNTED)
        self._give_each(call.node, [Role("perm", route, k, within=within), Role("counts", counted)])

    def _shared(self, call: Call) -> None:
        """`rules_placement` asks of which choices it is."""
        self._give(call.result, Role("quota", self.routes))

    def _within(self, call: Call) -> Role | None:
        """Of an op of a nested routing, what tokens are to the outer one. What it takes of them is in that order."""
        perm = next((name for name, kind in call.op.tokens.takes.items() if kind == "perm"), None)
        within = self.known[call.args[perm]].within if perm else None
        if within is not None:
            for name in call.op.per_token:
                if call.args[name] is not None:
                    self._rows(call, name, within.kind, within.route)
        return within

    def _arriving(self, call: Call, route: int, order: str) -> None:
        """As many rows come out as the routing says; those of static blocks are counted where they are unpacked."""
        if route < 0:
            return
        if call.stage is not Stage.BACK:
            if self._role(call, "out_rows", "received").route != route:
                self.view.fail(call.node, f"{call.name} receives as many rows as another routing sends")
            return
        back, sent = value(call.args["out_rows"]), self.rows_of.get((route, order))
        if sent is not None and not known_same(back, sent):
            self.view.fail(call.node, f"{back} rows come back, {sent} went out")

    # ---- blocks of fixed capacity; `route` numbers the exchanges of capacities

    def _capacities(self, call: Call) -> None:
        self.known[call.result] = Role("capacities", self.capacities)
        self.rows_of[self.capacities, "block"] = value(call.args["size"])
        self.capacities += 1

    def _block(self, call: Call) -> None:
        self._block_arrives(call, self._role(call, "sizes", "capacities").route, call.args["out_rows"])

    def _block_arrives(self, call: Call, number: int, out_rows: Any) -> None:
        """A block comes out with the sum of all ranks' capacities, or with its own on the way back."""
        if call.stage is not Stage.BACK:
            role = self.known.get(out_rows) if isinstance(out_rows, Node) else None
            if role is None or role.kind != "capacity sum":
                self.view.fail(call.node, f"{call.name}: the size of row_dim is not capacity sum")
            if role.route != number:
                self.view.fail(call.node, "a block receives the capacities of another")
            return
        back, own = value(out_rows), self.rows_of.get((number, "block"))
        if own is not None and not known_same(back, own):
            self.view.fail(call.node, f"blocks come back with {back} rows, they had {own}")

    # ---- the experts

    def _counted(self, call: Call, argument: str) -> Role:
        """The role of the rows that the counts of a grouped op speak of."""
        role = self._role(call, argument, "counts", "slots")
        if role.kind == "slots":
            return Role("slot", role.route)
        if self.view.level is Level.MOE:
            return Role("inside", role.route)
        way = self.view.facts.ways.get(region_of(call.node))
        if way is not None and way.axis:
            self.view.fail(call.node, f"{call.name} counts the rows of all experts, but this rank has only some",
                           "use slot_counts")
        return Role("sorted", role.route)
