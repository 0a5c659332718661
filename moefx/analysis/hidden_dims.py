"""How the experts of a region can be cut along their hidden dims, so that ranks compute partial sums with parts of them
(Megatron's columns and rows; Parm's expert sharding).

Rows that enter are the same on all of these ranks. The first products of a region make hidden entries, whose weights
are cut by columns; what is computed entry by entry stays cut; a product that sums over hidden entries has its weights
cut by rows and gives partial sums, which must leave through nothing but linear ops.

Which entries belong together is found by following their numbers: entries that meet in an op are of one class, ops
that only move entries are run on the numbers, and a class is on the rank that has its row of the second product. So
halves of a fused gate and up projection, interleaved ones and separate ones need no rule of their own.
"""

from __future__ import annotations

import itertools
import operator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_aggregate

from moefx.ir import edit
from moefx.ir.dim_arguments import hold, sizes_held
from moefx.ir.dims import CASTS, tensor_of, trace
from moefx.ir.expert_weights import is_weight
from moefx.ir.fates import Fate, How, Operand
from moefx.ir.names import arg, op_name
from moefx.ir.op import value
from moefx.ir.ops.regions import enter_experts, expert_parameter, leave_experts
from moefx.ir.randomness import is_random
from moefx.layout import Cut

_SUMS = ("add", "sub")
_LINEAR = (*CASTS, "neg", "view", "reshape", "flatten", "unflatten", "unsqueeze", "squeeze", "view_as", "transpose",
           "permute", "movedim", "getitem", "chunk", "split", "sum", "expand")  # fmt: skip


class NotCut(Exception):
    """Why experts stay whole."""


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
    """classes: of a hidden entry, by its number. ids: {value: the numbers of its entries, with size 1 in dims that all
    entries share}, or a tuple of these. partial: values that are partial sums on every rank."""

    def __init__(self, gm: GraphModule, number: int, n: int) -> None:
        self.gm, self.n = gm, n
        self.enters, self.leaves = ([m for m in gm.graph.find_nodes(op="call_function", target=marker)
                                     if m.args[-1] == number] for marker in (enter_experts, leave_experts))  # fmt: skip
        self.parent: list[int] = [0]
        self.label: dict[int, int] = {}  # of a class: the rank
        self.ids: dict[Node, Any] = {}
        self.partial: set[Node] = set()
        self.weights: dict[tuple[Node, int], Tensor] = {}  # (weight, dim) -> numbers of its entries
        self.rows: list[Tensor] = []  # numbers of the rows of second products, in order
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
        for ids in self.rows:
            self._assign(ids)
        for (node, dim), ids in self.weights.items():
            self._cut_weight(node, dim, self._labels(ids, node), axis)
        for node in self.moved:
            self._resize(node)
        return self.found

    # ---- numbers of entries

    def _fresh(self, count: int) -> Tensor:
        first = len(self.parent)
        self.parent.extend(range(first, first + count))
        return torch.arange(first, first + count)

    def _class(self, entry: int) -> int:
        while self.parent[entry] != entry:
            self.parent[entry] = self.parent[self.parent[entry]]
            entry = self.parent[entry]
        return entry

    def _join(self, one: Tensor, other: Tensor) -> None:
        for a, b in zip(*(each.flatten().tolist() for each in torch.broadcast_tensors(one, other))):
            self.parent[self._class(a)] = self._class(b)

    # ---- what ops do

    def _fail(self, node: Node, why: str) -> None:
        raise NotCut(f"{why}: {op_name(node)} ({edit.place(node)})")

    def _follow(self, node: Node) -> None:
        if node.target is operator.getitem and isinstance(value(node.args[0]), (tuple, list)):
            source = node.args[0]
            if source in self.ids:
                self.ids[node] = self.ids[source][node.args[1]]
            elif source in self.partial:
                self.partial.add(node)
            return
        cut = [a for a in node.all_input_nodes if a in self.ids]
        sums = [a for a in node.all_input_nodes if a in self.partial]
        if tensor_of(node) is None:
            return  # a size
        if sums:
            self._of_sums(node, sums, cut)
        elif is_random(node) and not cut:
            self._fail(node, "ranks would draw other random numbers for the same rows")
        else:
            operands = trace(node)
            if operands is None:
                if cut:
                    self._fail(node, "nothing is known of an op on hidden entries")
                return
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
        numbers = self._fresh(count)
        self.ids[node] = _along(numbers, dim, tensor_of(node).dim())
        for o in weights:
            self._bind(o, dim, numbers, node)

    def _of_entries(self, node: Node, operands: list[Operand]) -> None:
        carried = [(o, fate, dim) for o in operands if o.node in self.ids
                   for dim, fate in enumerate(o.dims) if self._ids(o.node).shape[dim] > 1]  # fmt: skip
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

    def _ids(self, node: Node) -> Tensor:
        found = self.ids[node]
        return found[0] if isinstance(found, tuple) else found

    def _sum_over(self, node: Node, operands: list[Operand], carried: list[tuple[Operand, int]]) -> None:
        """A second product: its weights are cut by rows."""
        weights = [o for o in operands if is_weight(o.node)]
        rows = [(o, d) for o in weights for d, fate in enumerate(o.dims) if fate.how is How.CONTRACTED]
        if len(carried) != 1 or len(rows) != 1:
            self._fail(node, "it sums products of hidden entries")
        (given, dim), (weight, row) = carried[0], rows[0]
        numbers = self._ids(given.node).flatten()
        if numbers.numel() != self._ids(given.node).shape[dim]:
            self._fail(node, "a product over more than one hidden dim")
        self.rows.append(numbers)
        self._bind_dim(weight.node, row, numbers, node)
        self.partial.add(node)
        for o in weights:
            if o is not weight:  # a bias
                self.found.shared.append((node, o.node))

    def _together(self, node: Node, operands: list[Operand]) -> None:
        """Entry by entry: those that meet are of one class."""
        ids = [self._ids(o.node) for o in operands if o.node in self.ids]
        shape = torch.broadcast_shapes(*(each.shape for each in ids), (1,) * tensor_of(node).dim())
        for other in ids[1:]:
            self._join(ids[0], other)
        full = ids[0].expand(torch.broadcast_shapes(ids[0].shape, shape))
        self.ids[node] = full
        others = [o for o in operands if o.node not in self.ids]
        for dim in (d for d, size in enumerate(full.shape) if size > 1):
            for o in others:
                if any(p.dim == dim for f in o.dims if f.how is not How.SHARED for p in f.to):
                    if not _is_of_weights(o.node):
                        self._fail(node, f"it reads {o.node.name}, of which every rank has all entries")
                    if full.numel() != full.shape[dim]:
                        self._fail(node, "weights meet more than one hidden dim")
                    self._bind(o, dim, full.flatten(), node)

    def _halves(self, node: Node, dim: int) -> None:
        """The entries of one half of a dim meet those of the other."""
        (given,) = [a for a in node.all_input_nodes if a in self.ids]
        first, second = self._ids(given).chunk(2, dim) if self._ids(given).shape[dim] > 1 else [self._ids(given)] * 2
        self._join(first, second)
        self.ids[node] = first

    def _move(self, node: Node) -> None:
        """Entries go to other places: they are moved as numbers."""
        (given,) = [a for a in node.all_input_nodes if tensor_of(a) is not None]
        try:
            moved = self._run(node, given, self.ids[given], node.args, node.kwargs)
        except Exception as error:
            raise NotCut(f"entries cannot be followed through {op_name(node)} ({edit.place(node)})") from error
        self.ids[node] = moved
        self.moved.append(node)

    def _run(self, node: Node, given: Node, ids: Tensor, args: tuple, kwargs: dict) -> Any:
        """The op on numbers instead of entries; dims that share them stay as large as they are."""
        real = [int(s.node.hint) if isinstance(s, torch.SymInt) and s.node.has_hint() else 2 if not isinstance(s, int)
                else s for s in tensor_of(given).shape]  # fmt: skip
        full = ids.expand([size if ids.shape[d] == 1 else ids.shape[d] for d, size in enumerate(real)])
        known: dict[Node, Any] = {given: full}

        def concrete(arg: Any) -> Any:
            if not isinstance(arg, Node):
                return arg
            found = known.get(arg, value(arg))
            return int(found.node.hint) if isinstance(found, torch.SymInt) else found

        args, kwargs = map_aggregate(args, concrete), map_aggregate(kwargs, concrete)
        if node.op == "call_method":
            found = getattr(args[0], node.target)(*args[1:], **kwargs)
        else:
            found = node.target(*args, **kwargs)
        return tuple(map(_collapsed, found)) if isinstance(found, (tuple, list)) else _collapsed(found)

    def _of_sums(self, node: Node, sums: list[Node], cut: list[Node]) -> None:
        """Partial sums stay that through linear ops alone."""
        name = op_name(node).removesuffix("_")
        tensors = [a for a in node.all_input_nodes if tensor_of(a) is not None]
        scalars = [a for a in node.args if isinstance(a, (int, float)) and not isinstance(a, bool)]
        if cut:
            self._fail(node, "partial sums meet hidden entries")
        elif name in _SUMS and not scalars:
            self.found.shared += [(node, a) for a in tensors if a not in self.partial]
        elif (name == "mul" and len(sums) == 1) or (name in ("truediv", "div") and node.args[0] in sums == tensors[:1]):
            pass
        elif name not in _LINEAR or len(tensors) > 1:
            self._fail(node, "it is no linear op, and reads sums that are not complete")
        self.partial.add(node)

    # ---- weights

    def _bind(self, operand: Operand, dim: int, numbers: Tensor, node: Node) -> None:
        """The weight's dim that becomes dim `dim` of a node has these entries."""
        mine = [d for d, fate in enumerate(operand.dims) if any(p.dim == dim for p in fate.to)]
        if not mine:
            return
        if len(mine) != 1 or not _is_whole(operand.dims[mine[0]], operand, mine[0]):
            self._fail(node, f"the weight {operand.node.name} has no hidden dim of its own")
        self._bind_dim(operand.node, mine[0], numbers, node)

    def _bind_dim(self, weight: Node, dim: int, numbers: Tensor, reader: Node) -> None:
        """Down to the parameters that a weight is computed from."""
        known = self.weights.get((weight, dim))
        if known is not None:
            self._join(known, numbers)
            return
        self.weights[weight, dim] = numbers
        if weight.target is expert_parameter:
            if dim == 0:
                self._fail(reader, "it sums over experts")
            return
        found = trace(weight)
        if found is None or weight.op == "placeholder":
            self._fail(reader, f"nothing is known of how its weight {weight.name} is computed")
        mine = [o for o in found if any(p.dim == dim for fate in o.dims for p in fate.to)]
        if not any(fate.how is How.KEPT for o in mine for fate in o.dims for p in fate.to if p.dim == dim):
            self._fail(weight, "it mixes the hidden entries of weights")
        for operand in mine:
            kept = [d for d, fate in enumerate(operand.dims) if any(p.dim == dim for p in fate.to)]
            if len(kept) != 1:
                self._fail(weight, "it mixes the hidden entries of weights")
            if operand.dims[kept[0]].how is How.SHARED:
                continue
            if not _is_whole(operand.dims[kept[0]], operand, kept[0]):
                self._fail(weight, "it mixes the hidden entries of weights")
            self._bind_dim(operand.node, kept[0], numbers, weight)

    def _cut_weight(self, node: Node, dim: int, labels: Tensor, axis: tuple[str, ...]) -> None:
        pieces = pieces_of(labels.tolist(), self.n)
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

    # ---- ranks

    def _assign(self, numbers: Tensor) -> None:
        """The ranks have equal runs of the rows of a second product."""
        count = numbers.numel()
        if count % self.n:
            raise NotCut(f"{count} hidden entries do not divide over {self.n} ranks")
        for place, entry in enumerate(numbers.tolist()):
            rank = place * self.n // count
            if self.label.setdefault(self._class(entry), rank) != rank:
                raise NotCut("entries that belong together are summed at different places")

    def _labels(self, ids: Tensor, node: Node) -> Tensor:
        found = [self.label.get(self._class(entry), -1) for entry in ids.flatten().tolist()]
        if -1 in found:
            raise NotCut(f"hidden entries of {node.name} ({edit.place(node)}) come into no sum")
        return torch.tensor(found).view(ids.shape)

    def _resize(self, node: Node) -> None:
        """Arguments with which an op moves a rank's entries as it moves all: tried on their numbers."""
        (given,) = [a for a in node.all_input_nodes if tensor_of(a) is not None]
        before, after = self.ids[given], self.ids[node]
        sizes = self._sizes_cut(before, given) | self._sizes_cut(after, node)
        for args, kwargs in _with_sizes(node, given, sizes, self.n):
            if all(self._moves_alike(node, given, rank, args, kwargs) for rank in range(self.n)):
                if (args, kwargs) != (node.args, node.kwargs):
                    self.found.arguments[node] = (args, kwargs)
                return
        self._fail(node, "its sizes cannot be those of a rank")

    def _sizes_cut(self, ids: Any, node: Node) -> set[int]:
        each = ids if isinstance(ids, tuple) else (ids,)
        return {one.shape[self._line(one, node)[0]] for one in each}

    def _moves_alike(self, node: Node, given: Node, rank: int, args: tuple, kwargs: dict) -> bool:
        mine = self._part(self.ids[given], rank, given)
        wanted = self.ids[node]
        wanted = tuple(self._part(w, rank, node) for w in wanted) if isinstance(wanted, tuple) else (
            self._part(wanted, rank, node))  # fmt: skip
        try:
            found = self._run(node, given, mine, args, kwargs)
        except Exception:  # these sizes do not fit
            return False
        pairs = zip(found, wanted) if isinstance(wanted, tuple) else [(found, wanted)]
        return isinstance(found, tuple) == isinstance(wanted, tuple) and (
            not isinstance(wanted, tuple) or len(found) == len(wanted)) and all(torch.equal(a, b) for a, b in pairs)

    def _part(self, ids: Tensor, rank: int, node: Node) -> Tensor:
        """The entries of a rank: some places of one dim."""
        dim, ranks = self._line(ids, node)
        return ids.index_select(dim, (ranks == rank).nonzero().flatten())

    def _line(self, ids: Tensor, node: Node) -> tuple[int, Tensor]:
        """The dim that is cut, and the rank of each of its places."""
        labels = self._labels(ids, node)
        for dim in range(labels.dim()):
            line = labels.movedim(dim, 0).flatten(1)
            if (line == line[:, :1]).all() and len(line) > 1:
                return dim, line[:, 0]
        raise NotCut(f"a rank's entries of {node.name} ({edit.place(node)}) are no part of one dim")


def pieces_of(labels: list[int], n: int) -> tuple[int, ...] | None:
    """The pieces of a dim of which each is spread evenly over n ranks, by the ranks that have its entries; None if it
    has none: [0, 0, 1, 1, 0, 1] -> (4, 2)."""
    runs = [(rank, len(list(group))) for rank, group in itertools.groupby(labels)]
    pieces = []
    while runs:
        ranks, sizes = zip(*runs[:n])
        if ranks != tuple(range(n)):
            return None
        if len(set(sizes)) > 1:
            return None
        pieces.append(sizes[0] * n)
        runs = runs[n:]
    return tuple(pieces)


def _is_of_weights(node: Node) -> bool:
    """Whether all entries of a value are those of weights, perhaps one set of them for every row."""
    found = trace(node)
    return is_weight(node) or (
        found is not None and all(is_weight(o.node) for o in found if any(fate.to for fate in o.dims))
    )


def _along(numbers: Tensor, dim: int, dims: int) -> Tensor:
    return numbers.view([-1 if i == dim % dims else 1 for i in range(dims)])


def _collapsed(ids: Tensor) -> Tensor:
    """One entry of the dims that share theirs."""
    for dim in range(ids.dim()):
        if ids.shape[dim] > 1 and (ids.stride(dim) == 0 or bool((ids == ids.narrow(dim, 0, 1)).all())):
            ids = ids.narrow(dim, 0, 1)
    return ids


def _is_whole(fate: Fate, operand: Operand, dim: int) -> bool:
    """Whether a dim becomes one dim of the result, as it is."""
    return fate.how is How.KEPT and len(fate.to) == 1 and fate.to[0].outer == 1


def _stays(operand: Operand, fate: Fate, dim: int, node: Node) -> bool:
    """Whether a dim is where it was, counted from the right."""
    shift = tensor_of(node).dim() - tensor_of(operand.node).dim()
    return _is_whole(fate, operand, dim) and fate.to[0].dim == dim + shift and (
        tensor_of(node).shape[dim + shift] == tensor_of(operand.node).shape[dim])  # fmt: skip


def _with_sizes(node: Node, given: Node, sizes: set[int], n: int) -> list[tuple[tuple, dict]]:
    """Arguments of an op with sizes and bounds of hidden dims as they may be on one of n ranks."""

    def changed(args: Any, which: Any) -> Any:
        if isinstance(args, slice):
            return slice(*(changed(each, which) for each in (args.start, args.stop)), args.step)
        if isinstance(args, (tuple, list)):
            return type(args)(changed(each, which) for each in args)
        return args // n if type(args) is int and which(args) else args

    tests = [lambda i: False, lambda i: i in sizes, lambda i: i > 1 and i % n == 0]
    first, *rest = node.args
    return [((first, *changed(tuple(rest), test)), {k: changed(v, test) for k, v in node.kwargs.items()})
            for test in tests]  # fmt: skip
