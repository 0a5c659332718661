"""Keep activations cut along tokens between products that are cut over `mp`: Megatron's sequence parallelism. A part of
the step place-experts, behind `place_regions`; only where it is asked for (`Parallel.rows`) or chosen.

Contract
    takes  the graph of one rank: sums over ranks behind products that are cut by rows, `vary` before those that are cut
           by columns, shares of tokens around regions
    gives        the same; what treats every row by itself between these is done by shares
    never  touches what mixes or orders rows, writes in place, draws random numbers, or makes more of a row than it
           reads: before that, rows are gathered

Pseudo-code
    a sum over ranks is one of this rank's rows (a reduce-scatter); results of a region are not gathered
    what every rank has whole, as embeddings, it takes its rows of
    what all rows read alike, as a gate of one row, is read through `vary`, unless parameters alone make it
    before what needs all rows gather them: before columns by a gather whose transpose is a reduce-scatter
    [B, S, D] is [1, rows, D] then: rows of all sequences, one after the other

    y = linear(vary(norm(x + sum_parts(a))), w)
        ->  y = linear(vary_rows(norm(own_rows(x) + sum_own_rows(a))), w)
Source: Korthikanti et al. 2022, Reducing Activation Recomputation in Large Transformer Models, section 4.2.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.fx import GraphModule, Node

from moefx.analysis.sharding.kept_rows import ALONE, KeptRows, is_size, is_varied, met, rows_of_source
from moefx.context.pass_types import PassContext, PassResult
from moefx.errors import UnsupportedUse
from moefx.ir import edit
from moefx.ir.describe import module_path
from moefx.ir.dim_arguments import hold, sizes_held
from moefx.ir.dims import is_reshape, tensor_of, trace
from moefx.ir.fates import Size, shape_of
from moefx.ir.op import expr
from moefx.ir.ops.dense import vary

_ops = torch.ops.moefx


def run(gm: GraphModule, ctx: PassContext) -> PassResult:
    result, axis = PassResult(), ctx.mesh.axis("mp")
    if not ctx.rows or not axis:
        return result
    sources = {node: rows_of_source(node, axis) for node in gm.graph.nodes}
    apart = [node for node, rows in sources.items() if node.target in (_ops.all_rows.default, _ops.sum_parts.default)
             and axis in node.args and rows is None and tensor_of(node).dim() > 1]  # fmt: skip
    whole: dict[Node, str] = {}
    for total in dict.fromkeys(size for size in sources.values() if size is not None):
        found = KeptRows(gm, axis, total)
        found.find()
        whole |= {node: why for node, why in found.whole.items() if node not in found.lead and (
            sources[node] or not found.sources or any(a in found.lead for a in node.all_input_nodes))}  # fmt: skip
        if found.sources:
            for node in found.sources:
                ctx.report.rows[module_path(node)] = "rows stay cut"
            _Rewrite(gm, found, ctx).run()
            result.changed(f"{len(found.lead)} values of {total} rows are done by shares")
    if ctx.options.parallel.rows is None:  # nobody asks for it: all layers, or none
        left = {node: why for node, why in whole.items() if sources.get(node) is not None and why != ALONE}
        _check_all({**dict.fromkeys(apart, "they are not shared out as tokens, or written to"), **left})
    for node, why in whole.items():
        ctx.report.rows.setdefault(module_path(node), f"whole: {node.name}: {why}")
        result.skip(node, why)
    if not result.changes:
        known = ((node, whole[node]) for node in sources if sources[node] and node in whole)
        node, why = next(known, (gm.graph.output_node(), "no layer is cut over 'mp'"))
        raise UnsupportedUse(f"rows cannot stay cut over 'mp': {node.name}: {why}", where=edit.place(node),
                             hint="rows=None gathers them behind every layer")  # fmt: skip
    return result


def _check_all(left: dict[Node, str]) -> None:
    """Raises UnsupportedUse if results of a layer are not cut, though others read the same rows."""
    for node, why in left.items():
        raise UnsupportedUse(f"{node.name} has all rows: {why}", where=module_path(node),
                             hint="rows=True keeps those of the others cut")  # fmt: skip


class _Rewrite:
    """share: how many rows this rank has. mine: {value: this rank's rows of it}. sizes: {a size of the inputs: a node
    that has it}."""

    def __init__(self, gm: GraphModule, found: KeptRows, ctx: PassContext) -> None:
        self.gm, self.found, self.how = gm, found, (ctx.mesh.size("mp"), ctx.mesh.axis("mp"))
        self.regions = ctx.decisions.regions
        self.mine: dict[Node, Node] = {}
        self.sizes: dict[Size, Node] = {}
        self.first = next(node for node in gm.graph.nodes if node.op != "placeholder")

    def run(self) -> None:
        found = self.found
        order = {node: place for place, node in enumerate(self.gm.graph.nodes)}
        done = sorted(found.lead, key=order.__getitem__)
        outside = {node: found.outside(node) for node in done}
        shapes = {node: shape_of(tensor_of(node)) for node in done}
        self.share = self._shared()
        for node in done:
            self.mine[node] = self._rows(node)
        for node in done:
            for user in [u for u in node.users if is_size(u)]:
                user.replace_all_uses_with(self._size(shapes[node][user.args[1] % len(shapes[node])]))
                self.gm.graph.erase_node(user)
            if node not in found.given:
                self._gather(node, outside[node], shapes[node])
        for node in done:
            if node in found.sources or node in found.given:
                for user in [u for u in node.users if found.is_done(u)]:
                    user.replace_input_with(node, self.mine[node])
            for own in [u for u in node.users if u.target is _ops.own_rows.default]:
                if own is not self.mine[node] and found.is_inside(own, node):
                    self._replace(own, self.mine[node])
        edit.erase_unused(found.sources)
        edit.move_in_order(self.gm)

    def _replace(self, own: Node, rows: Node) -> None:
        own.replace_all_uses_with(rows)
        for number, facts in self.regions.items():
            choices = tuple(rows if node is own else node for node in facts.choices)
            self.regions[number] = replace(facts, choices=choices)
        self.gm.graph.erase_node(own)

    def _shared(self) -> Node:
        """The number of rows of a rank, for all regions."""
        graph = self.gm.graph
        shares = [n for n in graph.find_nodes(op="call_function", target=_ops.num_own_rows.default) if (
            n.args[3] == self.how[1] and expr(tensor_of(n.args[0]).shape[n.args[1]]) == self.found.total)]  # fmt: skip
        tokens = self.found.tokens
        with edit.at(self.first):
            flat = edit.call(graph, torch.flatten, tokens, 0, self.found.leading(tokens) - 1, name="tokens")
            share = edit.call(graph, _ops.num_own_rows.default, flat, 0, *self.how, name="rows")
            if not isinstance(self.found.total, int):
                self.sizes[self.found.total] = edit.call(graph, torch.ops.aten.sym_size.int, flat, 0, name="all_tokens")
        for each in shares:
            each.replace_all_uses_with(share)
            graph.erase_node(each)
        return share

    def _lead(self, lead: int) -> tuple:
        return (*[1] * (lead - 1), self.share)

    def _flat(self, node: Node, lead: int) -> Node:
        """All rows in one dim."""
        if lead == 1:
            return node
        rest = shape_of(tensor_of(node))[lead:]
        return self.gm.graph.call_method("reshape", (node, (*[1] * (lead - 1), -1, *rest)))

    def _rows(self, node: Node) -> Node:
        """This rank's rows of a value."""
        found, graph, lead = self.found, self.gm.graph, self.found.lead[node]
        if node in found.given:
            return self._own(node, lead, node, after=True)
        if node.target is _ops.all_rows.default and node in found.sources:
            return node.args[0]
        if node in found.sources:
            with edit.at(node, after=True):
                flat = self._flat(node.args[0], lead)
                return edit.call(graph, _ops.sum_own_rows.default, flat, self.share, lead - 1, *self.how,
                                 name=f"{node.args[0].name}_rows")  # fmt: skip
        operands = trace(node)
        if is_reshape(node):
            node.op, node.target, node.kwargs = "call_method", "reshape", {}
            node.args = (node.args[0], (*self._lead(lead), *shape_of(tensor_of(node))[lead:]))
            return node
        hold(node, {dim: size for dim, size in enumerate(self._lead(lead)) if dim in sizes_held(node)})
        for given in [a for a in node.all_input_nodes if tensor_of(a) is not None and a not in found.lead]:
            if any(met(o, lead) for o in operands if o.node is given):
                node.replace_input_with(given, self._own(given, lead, node))
            elif tensor_of(given).is_floating_point() and (
                    not _is_of_parameters(given) or any(user not in found.lead for user in given.users)):  # fmt: skip
                with edit.at(node):
                    new = edit.call(graph, vary, given, self.how[1], name=f"{given.name}_varied")
                node.replace_input_with(given, new)
        return node

    def _own(self, given: Node, lead: int, node: Node, *, after: bool = False) -> Node:
        if given not in self.mine:
            with edit.at(node, after=after):
                self.mine[given] = edit.call(self.gm.graph, _ops.own_rows.default, self._flat(given, lead), self.share,
                                             lead - 1, *self.how, name=f"{given.name}_rows")  # fmt: skip
        return self.mine[given]

    def _gather(self, node: Node, users: list[Node], shape: tuple[Size, ...]) -> None:
        """All rows, for those that need them."""
        if not users:
            return
        varied = [user for user in users if is_varied(user, self.how[1])]
        op, lead, rows = _ops.all_rows, self.found.lead[node], self.mine[node]
        if len(varied) == len(users):
            op = _ops.vary_rows
        elif rows is not node and node.target is _ops.all_rows.default:
            return
        with edit.at(node, after=True):
            whole = edit.call(self.gm.graph, op.default, rows, self._size(self.found.total), lead - 1, *self.how,
                              name=f"{node.name}_all")  # fmt: skip
            if lead > 1:
                whole = self.gm.graph.call_method("reshape", (whole, tuple(map(self._size, shape))))
        for user in users:
            if op is _ops.vary_rows:
                user.replace_all_uses_with(whole)
                self.gm.graph.erase_node(user)
            else:
                user.replace_input_with(node, whole)

    def _size(self, size: Size) -> Node | int:
        """A size of the inputs, before everything else."""
        if isinstance(size, int):
            return size
        if size not in self.sizes:
            given = self.found.input_of(size)
            with edit.at(self.first):
                self.sizes[size] = edit.call(self.gm.graph, torch.ops.aten.sym_size.int, given,
                                             shape_of(tensor_of(given)).index(size))  # fmt: skip
        return self.sizes[size]


def _is_of_parameters(node: Node) -> bool:
    """Whether parameters alone make a value: their gradients are summed over ranks anyhow. One of some other value is
    not, as that of a gate that has a single row."""
    stack, seen = [node], set()
    while stack:
        each = stack.pop()
        if each.op == "placeholder" and each.meta["moefx"].kind == "input":
            return False
        stack += [given for given in each.all_input_nodes if given not in seen and not seen.add(given)]
    return True
