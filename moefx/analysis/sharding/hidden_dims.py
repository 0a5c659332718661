"""How the experts of a region can be cut along their hidden dims, so that ranks compute partial sums with parts of them
(Megatron's columns and rows; Parm's expert sharding).

Rows that enter are the same on all of these ranks. The first products of a region make hidden entries, whose weights
are cut by columns; what is computed entry by entry stays cut; a product that sums over hidden entries has its weights
cut by rows and gives partial sums, which must leave through nothing but linear ops.

Which entries belong together is found by following their numbers (see `entries`), and a class is on the rank that has
its row of the second product. So halves of a fused gate and up projection, interleaved ones and separate ones need no
rule of their own.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from moefx.analysis.sharding.entries import Entries, NotCut, moved, pieces_of, source
from moefx.ir import edit
from moefx.ir.dim_arguments import hold, sizes_held
from moefx.ir.dims import tensor_of, trace
from moefx.ir.expert_weights import is_weight
from moefx.ir.fates import Fate, How, Operand
from moefx.ir.names import arg, op_name
from moefx.ir.op import value
from moefx.ir.ops.regions import enter_experts, expert_parameter, leave_experts
from moefx.ir.randomness import is_random
from moefx.ir.sums import ADDS, against, is_product
from moefx.layout import Cut


@dataclass
class Plan:
    """What to change in a region so that each of n ranks computes with its part of every expert.

    cuts: {marker of a parameter [E, ..]: the dim that is cut, and its pieces}. arguments: {node: (args, kwargs)} with
    a rank's sizes. shared: (node, argument) pairs; every rank adds the argument, so each adds a part of it.
    """

    cuts: dict[Node, Cut] = field(default_factory=dict)
    arguments: dict[Node, tuple[tuple, dict]] = field(default_factory=dict)
    shared: list[tuple[Node, Node]] = field(default_factory=list)


def plan(gm: GraphModule, number: int, axis: tuple[str, ...], n: int) -> Plan:
    """How the experts of a region are cut over the n ranks of an axis. Raises NotCut with the reason if they cannot."""
    return _Region(gm, number, n).plan(axis)


class _Region:
    """ids: {value: the numbers of its entries}, a tuple of these where it is several tensors. partial: values that are
    partial sums on every rank. rows: numbers of the rows of second products. moved: ops that moved entries."""

    def __init__(self, gm: GraphModule, number: int, n: int) -> None:
        self.gm, self.n, self.entries = gm, n, Entries(n)
        self.enters, self.leaves = ([m for m in gm.graph.find_nodes(op="call_function", target=marker)
                                     if m.args[-1] == number] for marker in (enter_experts, leave_experts))  # fmt: skip
        self.ids: dict[Node, Any] = {}
        self.partial: set[Node] = set()
        self.weights: dict[tuple[Node, int], Tensor] = {}  # (weight, dim) -> numbers of its entries
        self.rows: list[Tensor] = []
        self.moved: list[Node] = []
        self.found = Plan()

    def plan(self, axis: tuple[str, ...]) -> Plan:
        inside = edit.descendants(self.enters) & edit.ancestors(self.leaves)
        leaves = set(self.leaves)
        for node in self.gm.graph.nodes:
            if node in leaves:
                self._leave(node)
            elif node in inside and node.op.startswith("call"):
                self._follow(node)
        if not self.rows:
            raise NotCut("no product of its experts sums over what another one computed")
        for numbers in self.rows:
            self.entries.spread(numbers)
        for (node, dim), numbers in self.weights.items():
            self._cut_weight(node, dim, self.entries.ranks(numbers, node), axis)
        for node in self.moved:
            found = self.entries.arguments(node, self.ids[source(node)], self.ids[node])
            if found != (node.args, node.kwargs):
                self.found.arguments[node] = found
        return self.found

    def _fail(self, node: Node, why: str) -> None:
        raise NotCut(f"{why}: {op_name(node)} ({edit.place(node)})")

    # ---- what ops do

    def _follow(self, node: Node) -> None:
        if node.target is operator.getitem and isinstance(value(node.args[0]), (tuple, list)):
            several = node.args[0]
            if several in self.ids:
                self.ids[node] = self.ids[several][node.args[1]]
            elif several in self.partial:
                self.partial.add(node)
            return
        if tensor_of(node) is None:
            return  # a size
        cut = [a for a in node.all_input_nodes if a in self.ids]
        sums = [a for a in node.all_input_nodes if a in self.partial]
        if sums:
            self._of_sums(node, sums, cut)
            return
        if is_random(node) and not cut:
            self._fail(node, "ranks would draw other random numbers for the same rows")
        operands = trace(node)
        if cut and operands is None:
            self._fail(node, "nothing is known of an op on hidden entries")
        if operands is not None:
            self._of_entries(node, operands) if cut else self._of_rows(node, operands)

    def _leave(self, node: Node) -> None:
        x = node.args[0]
        if x in self.ids:
            self._fail(x, "hidden entries leave the experts")
        if x not in self.partial:  # what all ranks have, and is summed over them
            self.found.shared.append((node, x))

    def _of_rows(self, node: Node, operands: list[Operand]) -> None:
        """Of what all ranks have: a product with weights makes hidden entries."""
        weights = [o for o in operands if is_weight(o.node)]
        if not any(fate.how is How.CONTRACTED for o in weights for fate in o.dims):
            return
        taken = {p.dim for o in operands if o not in weights for fate in o.dims for p in fate.to}
        columns = {p.dim for o in weights for fate in o.dims if fate.how is How.KEPT for p in fate.to} - taken
        if len(columns) != 1:
            self._fail(node, "a product with weights of no single hidden dim")
        (dim,) = columns
        count = tensor_of(node).shape[dim]
        if not isinstance(count, int):
            self._fail(node, "a hidden dim whose size is not known")
        numbers = self.entries.fresh(count)
        self.ids[node] = numbers.view([-1 if i == dim else 1 for i in range(tensor_of(node).dim())])
        for o in weights:
            self._bind(o, dim, numbers, node)

    def _of_entries(self, node: Node, operands: list[Operand]) -> None:
        carried = [(o, fate, dim) for o in operands if o.node in self.ids
                   for dim, fate in enumerate(o.dims) if self._first(o.node).shape[dim] > 1]  # fmt: skip
        hows = {fate.how for _, fate, _ in carried}
        if op_name(node) == "glu":
            self._halves(node, arg(node, 1, "dim", -1))
        elif hows and hows <= {How.CONTRACTED}:
            self._sum_over(node, operands, [(o, dim) for o, _, dim in carried])
        elif all(_stays(o, fate, dim, node) for o, fate, dim in carried) and not isinstance(value(node), (tuple, list)):
            self._together(node, operands)
        elif len([a for a in node.all_input_nodes if tensor_of(a) is not None]) == 1 and hows <= {How.KEPT, How.TAKEN}:
            self._move(node)
        else:
            self._fail(node, "it mixes hidden entries")

    def _first(self, node: Node) -> Tensor:
        found = self.ids[node]
        return found[0] if isinstance(found, tuple) else found

    def _sum_over(self, node: Node, operands: list[Operand], carried: list[tuple[Operand, int]]) -> None:
        """A second product: its weights are cut by rows."""
        weights = [o for o in operands if is_weight(o.node)]
        rows = [(o, d) for o in weights for d, fate in enumerate(o.dims) if fate.how is How.CONTRACTED]
        if len(carried) != 1 or len(rows) != 1:
            self._fail(node, "it sums products of hidden entries")
        (given, dim), (weight, row) = carried[0], rows[0]
        numbers = self._first(given.node).flatten()
        if numbers.numel() != self._first(given.node).shape[dim]:
            self._fail(node, "a product over more than one hidden dim")
        self.rows.append(numbers)
        self._bind_dim(weight.node, row, numbers, node)
        self.partial.add(node)
        self.found.shared += [(node, o.node) for o in weights if o is not weight]  # a bias

    def _together(self, node: Node, operands: list[Operand]) -> None:
        """Entry by entry: those that meet are of one class."""
        ids = [self._first(o.node) for o in operands if o.node in self.ids]
        for other in ids[1:]:
            self.entries.join(ids[0], other)
        shape = torch.broadcast_shapes(*(each.shape for each in ids), (1,) * tensor_of(node).dim())
        full = self.ids[node] = ids[0].expand(shape)
        others = [o for o in operands if o.node not in self.ids]
        for dim in (d for d, size in enumerate(full.shape) if size > 1):
            for o in others:
                if o.into(dim, shared=False):
                    if not _is_of_weights(o.node):
                        self._fail(node, f"it reads {o.node.name}, of which every rank has all entries")
                    if full.numel() != full.shape[dim]:
                        self._fail(node, "weights meet more than one hidden dim")
                    self._bind(o, dim, full.flatten(), node)

    def _halves(self, node: Node, dim: int) -> None:
        """The entries of one half of a dim meet those of the other."""
        (given,) = [a for a in node.all_input_nodes if a in self.ids]
        numbers = self._first(given)
        first, second = numbers.chunk(2, dim) if numbers.shape[dim] > 1 else (numbers, numbers)
        self.entries.join(first, second)
        self.ids[node] = first

    def _move(self, node: Node) -> None:
        """Entries go to other places."""
        try:
            self.ids[node] = moved(node, self.ids[source(node)])
        except Exception as error:
            raise NotCut(f"entries cannot be followed through {op_name(node)} ({edit.place(node)})") from error
        self.moved.append(node)

    def _of_sums(self, node: Node, sums: list[Node], cut: list[Node]) -> None:
        """Partial sums stay that through linear ops alone."""
        why = against(node, sums)
        others = [a for a in node.all_input_nodes if tensor_of(a) is not None and a not in sums]
        if cut:
            self._fail(node, "partial sums meet hidden entries")
        elif why == ADDS and others and not is_product(node):
            self.found.shared += [(node, a) for a in others]
        elif why or is_product(node):
            self._fail(node, "it is no linear op, and reads sums that are not complete")
        self.partial.add(node)

    # ---- weights

    def _bind(self, operand: Operand, dim: int, numbers: Tensor, node: Node) -> None:
        """The weight's dim that becomes dim `dim` of a node has these entries."""
        mine = operand.into(dim)
        if mine and (len(mine) > 1 or not operand.dims[mine[0]].is_whole):
            self._fail(node, f"the weight {operand.node.name} has no hidden dim of its own")
        if mine:
            self._bind_dim(operand.node, mine[0], numbers, node)

    def _bind_dim(self, weight: Node, dim: int, numbers: Tensor, reader: Node) -> None:
        """Down to the parameters that a weight is computed from."""
        known = self.weights.get((weight, dim))
        if known is not None:
            self.entries.join(known, numbers)
            return
        self.weights[weight, dim] = numbers
        if weight.target is expert_parameter:
            if dim == 0:
                self._fail(reader, "it sums over experts")
            return
        found = trace(weight)
        if found is None or weight.op == "placeholder":
            self._fail(reader, f"nothing is known of how its weight {weight.name} is computed")
        mine = [(o, o.into(dim)) for o in found if o.into(dim)]
        if not any(o.dims[d].how is How.KEPT for o, dims in mine for d in dims):
            self._fail(weight, "it mixes the hidden entries of weights")
        for o, dims in mine:
            if len(dims) > 1 or not (o.dims[dims[0]].is_whole or o.dims[dims[0]].how is How.SHARED):
                self._fail(weight, "it mixes the hidden entries of weights")
            if o.dims[dims[0]].how is not How.SHARED:
                self._bind_dim(o.node, dims[0], numbers, weight)

    def _cut_weight(self, node: Node, dim: int, ranks: Tensor, axis: tuple[str, ...]) -> None:
        pieces = pieces_of(ranks.tolist(), self.n)
        if pieces is None:
            raise NotCut(f"the hidden entries of {node.name} ({edit.place(node)}) lie in no even pieces")
        if node.target is expert_parameter:
            self.found.cuts[node] = Cut(dim, axis, pieces)
            return
        held = sizes_held(node)
        if dim in held and held[dim].of(node) != -1:
            args, kwargs = node.args, node.kwargs
            hold(node, {dim: sum(pieces) // self.n})
            self.found.arguments[node] = (node.args, node.kwargs)
            node.args, node.kwargs = args, kwargs


def _is_of_weights(node: Node) -> bool:
    """Whether all entries of a value are those of weights, perhaps one set of them for every row."""
    found = trace(node)
    return is_weight(node) or (
        found is not None and all(is_weight(o.node) for o in found if any(fate.to for fate in o.dims))
    )


def _stays(operand: Operand, fate: Fate, dim: int, node: Node) -> bool:
    """Whether a dim is where it was, counted from the right."""
    shift = tensor_of(node).dim() - tensor_of(operand.node).dim()
    return fate.is_whole and fate.to[0].dim == dim + shift and (
        tensor_of(node).shape[dim + shift] == tensor_of(operand.node).shape[dim])  # fmt: skip
