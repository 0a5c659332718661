"""Let each share of the tokens of a layer with capacities be a batch of its own: Parm's own S1.

Contract
    takes  MOE   regions on static blocks between enter_experts and leave_experts
    gives  MOE   the same: every rank along `mp` does the layer, router and capacity included, on its share of the
                 tokens, and gets the results of all
    never  runs unless the schedule "s1" is asked for, since other tokens are dropped: the reference is the eager layer
           on each share, results put together. What cannot be is refused

Pseudo-code
    the layer is what lies between the last value x that all of it is computed from, and the first y that all of the
    experts' results go into and that has the same tokens
    sizes that follow from the number of tokens are computed from that of the share; floats without tokens that leave
    the layer, as auxiliary losses, are means over the shares

    y = layer(x, capacity=T // E); loss = f(x)
        ->  s = T // n; y = all_rows(layer(own_rows(x, s), capacity=s // E)); loss = all_rows(f(own_rows(x, s))).mean(0)
Source: Parm's schedule S1 (section 3.2), in which a rank's gate sees its own tokens.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator

import torch
from torch.fx import GraphModule, Node

from moefx.context.pass_types import PassContext, PassResult
from moefx.errors import UnsupportedUse
from moefx.ir import edit
from moefx.ir.describe import module_path
from moefx.ir.dims import tensor_of, trace
from moefx.ir.op import expr, value
from moefx.ir.ops.dense import vary
from moefx.ir.ops.regions import enter_experts, leave_experts
from moefx.ir.randomness import first_draw
from moefx.ir.writes import writes

_ops = torch.ops.moefx


def run(gm: GraphModule, ctx: PassContext) -> PassResult:
    result, n = PassResult(), ctx.mesh.size("mp")
    if n == 1 or ctx.options.parallel.split != "s1":
        return result
    enters = gm.graph.find_nodes(op="call_function", target=enter_experts)
    layers = {number: _Layer(gm, number) for number in sorted({e.args[-1] for e in enters if e.args[1] is None})}
    if layers and not ctx.options.debug.dynamic:
        raise UnsupportedUse("the split 's1' cannot be: the capacity is a number in a program of one size",
                             hint="dynamic=True, or split='s2'")  # fmt: skip
    for layer in layers.values():  # all of them before the first is changed
        layer.find()
    joined: dict[Node, Node] = {}
    for number, layer in layers.items():
        layer.x = joined.get(layer.x, layer.x)
        joined[layer.y] = _Split(layer, ctx).rewrite()
        ctx.decisions.split.add(number)
        ctx.decisions.batches.add(number)
        ctx.decisions.schedules[number] = "s1"
        ctx.report.schedules[layer.path] = f"s1; each share of {layer.x.name} is a batch of its own"
        result.changed(f"region {number} gets {n} batches of {layer.x.name}")
    return result


class _Layer:
    """A layer whose experts work on static blocks.

    data: what is computed from inputs, other than sizes. x, dim: all of the layer is computed from this value, whose
    tokens stand on this dim. y, joined: what it gives, and its dim of tokens. total: how many tokens. inner: its nodes,
    y among them, in order. leaving: floats without tokens that others read.
    """

    def __init__(self, gm: GraphModule, number: int) -> None:
        self.gm = gm
        self.enters, self.leaves = ([n for n in gm.graph.find_nodes(op="call_function", target=marker)
                                     if n.args[-1] == number] for marker in (enter_experts, leave_experts))  # fmt: skip
        self.path = module_path(self.enters[0])
        given = [n for n in gm.graph.find_nodes(op="placeholder") if n.meta["moefx"].kind == "input"]
        self.data = edit.closure([n for n in given if tensor_of(n) is not None],
                                 lambda node: [u for u in node.users if tensor_of(u) is not None])  # fmt: skip

    def refuse(self, reason: str) -> UnsupportedUse:
        return UnsupportedUse(f"the split 's1' cannot be: {reason}", where=self.path,
                              hint="split='s2' splits capacities, and drops what the eager model drops")  # fmt: skip

    def find(self) -> None:
        self._find_ends()
        self.inner = self._inner()
        self._check()
        inside, symbols = set(self.inner), self.total.free_symbols
        self.leaving = [n for n in self.inner if n is not self.y
                        and any(u not in inside and not _is_number(u) for u in n.users)]  # fmt: skip
        for node in self.leaving:
            if not _is_float(node) or any(expr(s).free_symbols & symbols for s in edit.tensor_value(node).shape):
                reader = next(u for u in node.users if u not in inside and not _is_number(u))
                raise self.refuse(f"{node.name} leaves the layer beside its result, to {reader.name}")

    def _find_ends(self) -> None:
        per_expert = self._per_expert()
        for y in self._all_go_into():
            for x in self._all_come_from(y) if y not in per_expert and _is_float(y) else ():
                dims = None if x in per_expert or not _is_float(x) else self._tokens(x, y)
                if dims is not None:
                    self.x, self.y, (self.dim, self.joined) = x, y, dims
                    self.total = expr(edit.tensor_value(x).shape[self.dim])
                    return
        raise self.refuse("there are no tokens of any number that all of the layer is computed from")

    def _per_expert(self) -> set[Node]:
        """The values around the experts that have a dim of experts."""
        found = {marker: marker.args[2] for marker in self.leaves}
        found |= {marker.args[0]: marker.args[2] for marker in self.enters}
        for node in reversed(self.gm.graph.nodes):
            for operand in trace(node) or () if node in found and node not in self.leaves else ():
                for dim in operand.into(found[node], shared=False):
                    found[operand.node] = dim
        for node in self.gm.graph.nodes:
            for operand in trace(node) or () if node not in found else ():
                if operand.node in found and operand.dims[found[operand.node]].to:
                    found[node] = operand.dims[found[operand.node]].to[0].dim
        return {*found, *self.enters}

    def _all_go_into(self) -> Iterator[Node]:
        """The values that all of what experts give goes into, the first one first."""
        ahead = set(self.leaves)
        for node in self.gm.graph.nodes:
            if node in ahead:
                ahead.discard(node)
                if not ahead:
                    yield node
                ahead |= {user for user in node.users if user in self.data}

    def _all_come_from(self, y: Node) -> Iterator[Node]:
        """The values that all of y is computed from, the last one first."""
        behind = {y}
        for node in reversed(self.gm.graph.nodes):
            if node in behind:
                behind.discard(node)
                if not behind and node is not y:
                    yield node
                if node.op == "placeholder":
                    return
                behind |= {a for a in node.all_input_nodes if a in self.data}

    def _tokens(self, x: Node, y: Node) -> tuple[int, int] | None:
        """The dims of tokens of both: the first of x that is of any size, which may not be a capacity."""
        shape, enter = edit.tensor_value(x).shape, self.enters[0]
        dim = next((i for i, size in enumerate(shape) if expr(size).free_symbols), None)
        capacity = expr(edit.tensor_value(enter).shape[enter.args[3]])
        if dim is None or (expr(shape[dim]) / capacity).is_number:
            return None
        found = [i for i, size in enumerate(edit.tensor_value(y).shape) if expr(size) == expr(shape[dim])]
        return (dim, found[0]) if found else None

    def _inner(self) -> list[Node]:
        """All between x and y, and what else is computed from that alone: losses are whole functions of a share."""
        found = (edit.descendants([self.x]) & edit.ancestors([self.y]) & self.data) - {self.x}
        for node in self.gm.graph.nodes:
            given = {a for a in node.all_input_nodes if a in self.data} - {self.x}
            if node in self.data and given and given <= found - {self.y}:
                found.add(node)
        return [node for node in self.gm.graph.nodes if node in found]

    def _check(self) -> None:
        home, needed = module_path(self.y), edit.ancestors([self.y])
        away = next((n for n in self.inner if n in needed and not f"{module_path(n)}.".startswith(f"{home}.")), None)
        if home and away is not None:
            raise self.refuse(f"{away.name}, of {module_path(away)}, is a part of what {home} is computed from")
        draw = first_draw(self.inner)
        if draw is not None:
            raise self.refuse(f"{draw.name} draws random numbers")
        written = next((u for node in (self.x, *self.inner) for u in node.users if writes(u)), None)
        if written is not None:
            raise self.refuse(f"{written.name} writes in place")


class _Split:
    """size, share: how many tokens there are, and a rank has. made: {what follows from the number of tokens: the same
    of the share}. varied: {what is read in the layer and elsewhere: what the layer reads}."""

    def __init__(self, layer: _Layer, ctx: PassContext) -> None:
        self.layer, self.graph, self.inside = layer, layer.gm.graph, set(layer.inner)
        self.n, self.axis = ctx.mesh.size("mp"), ctx.mesh.axis("mp")
        self.made: dict[Node, Node] = {}
        self.varied: dict[Node, Node] = {}
        total = edit.tensor_value(layer.x).shape[layer.dim]
        if total % self.n != 0:  # a condition of the program from here on
            raise layer.refuse(f"{total.node.hint} tokens in {layer.x.name} do not divide over {self.n} ranks")
        symbols, self.sized = layer.total.free_symbols, set()
        for node in self.graph.nodes:
            is_size = isinstance(value(node), (torch.SymInt, torch.SymFloat)) and _symbols(node) & symbols
            if node not in layer.data and (is_size or self.sized & set(node.all_input_nodes)):
                self.sized.add(node)
        with edit.at(layer.inner[0]):
            self.size = self.graph.call_method("size", (layer.x, layer.dim))
            self.share = edit.call(self.graph, operator.floordiv, self.size, self.n, name="share")
            self.own = edit.call(self.graph, _ops.own_rows.default, layer.x, self.share, layer.dim, self.n, self.axis,
                                 True, name=f"{layer.x.name}_share")  # fmt: skip
        self.size.meta["val"], self.share.meta["val"] = total, total // self.n

    def rewrite(self) -> Node:
        """Returns the results of all."""
        layer = self.layer
        for node in layer.inner:
            for given in node.all_input_nodes:
                if given not in self.inside:
                    node.replace_input_with(given, self._own(given))
        for node in layer.inner:
            for size in [u for u in node.users if _is_number(u) and u in self.sized and node is not layer.y]:
                self._size_elsewhere(size)
        for node in layer.leaving:
            self._mean(node)
        joined = self._join()
        edit.erase_unused(node for node in self.made if node.op.startswith("call"))
        edit.move_in_order(layer.gm)
        return joined

    def _own(self, given: Node) -> Node:
        """What the layer reads of a value from outside."""
        if given is self.layer.x:
            return self.own
        if given in self.sized:
            return self._of_share(given)
        if _is_float(given) and (given in self.varied or any(u not in self.inside for u in given.users)):
            if given not in self.varied:
                with edit.at(self.layer.inner[0]):
                    self.varied[given] = edit.call(self.graph, vary, given, self.axis, name=f"{given.name}_varied")
            return self.varied[given]
        return given

    def _of_share(self, node: Node) -> Node:
        if node not in self.sized:
            return node
        if node not in self.made:
            times = expr(value(node)) / self.layer.total if isinstance(value(node), torch.SymInt) else None
            with edit.at(self.layer.inner[0]):
                if times is not None and times.is_Integer:
                    self.made[node] = self.share if times == 1 else edit.call(self.graph, operator.mul, self.share,
                                                                              int(times))  # fmt: skip
                    return self.made[node]
            if not node.op.startswith("call") or any(a in self.layer.data for a in node.all_input_nodes):
                raise self.layer.refuse(f"it computes with {node.name}, which does not follow from the number of "
                                        f"tokens in {self.layer.x.name}")  # fmt: skip
            given = {a: self._of_share(a) for a in node.all_input_nodes}
            with edit.at(self.layer.inner[0]):
                self.made[node] = self.graph.node_copy(node, given.__getitem__)
        return self.made[node]

    def _size_elsewhere(self, size: Node) -> None:
        """A size that is read of a value in the layer, by others, is that of all tokens."""
        if size.users and expr(value(size)) != self.layer.total:
            raise self.layer.refuse(f"{next(iter(size.users)).name} computes with {size.name}")
        size.replace_all_uses_with(self.size)
        self.graph.erase_node(size)

    def _mean(self, node: Node) -> None:
        with edit.at(node, after=True):
            one = self.graph.call_method("unsqueeze", (node, 0))
            each = edit.call(self.graph, _ops.all_rows.default, one, self.n, 0, self.n, self.axis, True,
                             name=f"{node.name}_each")  # fmt: skip
            mean = self.graph.call_method("mean", (each, 0))
        mean.meta["val"] = edit.tensor_value(node)
        node.replace_all_uses_with(mean, delete_user_cb=lambda u: u is not one and u not in self.inside)

    def _join(self) -> Node:
        y = self.layer.y
        with edit.at(y, after=True):
            joined = edit.call(self.graph, _ops.all_rows.default, y, self.size, self.layer.joined, self.n, self.axis,
                               True, name=f"{y.name}_all")  # fmt: skip
        joined.meta["val"] = edit.tensor_value(y)
        y.replace_all_uses_with(joined, delete_user_cb=lambda user: user is not joined)
        return joined


def _is_number(node: Node) -> bool:
    return node.op.startswith("call") and isinstance(value(node), (torch.SymInt, torch.SymFloat, int, float))


def _is_float(node: Node) -> bool:
    found = edit.tensor_value(node)
    return found is not None and found.is_floating_point()


def _symbols(node: Node) -> set:
    return value(node).node.expr.free_symbols
