"""Whether a model does nothing more for an expert without tokens than to leave it out.

`if token.numel() == 0: continue` is captured as if every expert had tokens; an idle one then adds no rows. That is what
the model means only if the way that was not captured does nothing else. So the model is captured twice more, with
every second number of tokens zero in turn, and the graphs must compute the same where those rows are empty. And `if
token.numel() > n: token = token[:n]` is captured as if every expert had more, and compared with what is captured where
every second one has not: there token[:n] is token.

    o = torch.zeros_like(x)                        o = torch.zeros_like(x)
    o = o.index_add(0, t0, f0(x[t0]))              o = o.index_add(0, t0, f0(x[t0]))
    o = o.index_add(0, t1, f1(x[t1]))              o = o + 0.5                          # refused
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

import sympy
import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from moefx import _torch_compat as compat
from moefx.analysis.recognition import host_numbers
from moefx.analysis.recognition.indexing import ZEROS
from moefx.analysis.recognition.structure import structure
from moefx.errors import CaptureError
from moefx.ir import edit, names
from moefx.ir.names import arg
from moefx.ir.op import expr, value


def check(full: GraphModule, asked: compat.Trust, part: GraphModule, asked_part: compat.Trust) -> None:
    """full: captured with tokens for all, and more of them than any bound that was asked for; part: with every second
    of the sizes that were asked for zero (or equal to another), or not above its bound: the first, third .., or the
    second, fourth ... Raises CaptureError where they mean something else."""
    table: dict[Any, int] = {}
    zero, short = asked_part.zero, asked_part.short
    of_part = _Numbering(part, _zeros(asked_part, zero), asked_part.uncut(short), table)
    of_full = _Numbering(full, _zeros(asked, zero), asked.uncut(short), table, skipped_but=set(of_part.keys))
    more = list(asked_part.sizes)[len(asked.sizes) :] + [{size} for size, _ in asked_part.cuts][len(asked.cuts) :]
    if more:
        raise CaptureError(
            "what an expert does without tokens, or with fewer than a bound, depends on another such condition",
            where=_place_of(part, more[-1]),
            hint="ask for the number of tokens of one expert at a time, and not behind other conditions",
        )
    if short in (0, 1) and len(asked.cuts) != len(asked_part.cuts):
        raise _other(of_part, of_full)
    for mine, theirs in zip(of_part.ends, of_full.ends):
        if mine != theirs:
            raise _other(of_part, of_full)
    if len(of_part.ends) != len(of_full.ends):
        raise _other(of_part, of_full)
    _check_owners(full, _zeros(asked, zero), of_full.skipped)


def left_out(full: GraphModule, parts: Sequence[tuple[GraphModule, compat.Trust]]) -> dict[str, tuple[int, int]]:
    """The inputs, by their targets, that are read behind the conditions alone: as often as they are read at all, some
    part does not read them. How often the part with even conditions zero does not, and how often that with odd ones."""
    reads, lost = _reads(full), {}
    for part, trust in parts:
        if trust.zero is not None:
            of_part = _reads(part)
            lost[trust.zero] = {name: reads[name] - of_part[name] for name in reads}
    turns = {name: tuple(lost[zero].get(name, 0) if zero in lost else 0 for zero in (0, 1)) for name in reads}
    return {name: found for name, found in turns.items() if sum(found) == reads[name]}


def _reads(gm: GraphModule) -> Counter[str]:
    """How often every input is read on the way to what the graph gives back or writes."""
    live = edit.ancestors(n for n in gm.graph.nodes if n.op == "output" or _writes(n))
    inputs = gm.graph.find_nodes(op="placeholder")
    return Counter({n.target: count for n in inputs if (count := len(live.intersection(n.users)))})


def _writes(node: Node) -> bool:
    name = _op_name(node)
    return name in _WRITES or (name.endswith("_") and not name.endswith("__"))


def _zeros(asked: compat.Trust, which: int | None) -> dict[sympy.Expr, sympy.Expr]:
    pairs = asked.zeros(which)
    return {each: right for left, right in pairs for each in (left.free_symbols if left.is_Add else [left])}


def _place_of(gm: GraphModule, sizes: Collection[sympy.Expr]) -> str | None:
    """Where a tensor comes up that has one of these sizes."""
    for node in gm.graph.nodes:
        shapes = [each.shape for each in _flat(value(node)) if isinstance(each, torch.Tensor)]
        if any(expr(size) in sizes for shape in shapes for size in shape):
            return edit.place(node)
    return None


def _other(part: _Numbering, full: _Numbering) -> CaptureError:
    known = set(full.numbers.values())
    extra = [n for n, number in part.numbers.items() if number not in known and n.op != "output"]
    lost = [n for n, number in full.numbers.items() if number not in set(part.numbers.values()) and n.op != "output"]
    where = next(iter([*extra, *lost]), None)
    if full.uncut:
        return CaptureError(
            "for an expert with fewer tokens than a bound the model does something other than keep them all",
            where=edit.place(where) if where is not None else None,
            hint="slice without an if, tokens[:bound], or compute a mask of those to keep from tensors",
        )
    return CaptureError(
        "for an expert without tokens the model does more than leave it out, or asks for its tokens elsewhere",
        where=edit.place(where) if where is not None else None,
        hint="compute what depends on idle experts from tensors (counts == 0, say) instead of with Python's if",
    )


def _check_owners(gm: GraphModule, zeros: dict[sympy.Expr, sympy.Expr], skipped: list[Node]) -> None:
    """Where both can be told, the experts that were said to be idle are those whose rows were left out."""
    numbers = {}
    for node in gm.graph.nodes:
        found = value(node)
        if isinstance(found, torch.SymInt):
            numbers.setdefault(expr(found), node)
    idle = [numbers.get(left) for left, right in zeros.items() if right == 0]
    idle = {_expert(node) for node in idle if node is not None}
    own = {_expert(node) for node in skipped}
    if None not in own and None not in idle and own and idle and not own <= idle:
        raise CaptureError(
            f"expert {min(own - idle)} is left out because of the number of tokens of another one",
            where=edit.place(skipped[0]),
            hint="leave out an expert because of its own number of tokens alone",
        )


def _expert(node: Node) -> int | None:
    """The number of the expert in idx == 3, counts[3] or masks[3], behind what follows from it."""
    while node.op.startswith("call") and node.all_input_nodes:
        name, what = _op_name(node), node.args[1] if len(node.args) > 1 else None
        items = what if isinstance(what, tuple) else (what,)
        if name in ("eq", "select") or (name == "getitem" and not _is_result_of_many(node.args[0])):
            found = [i for i in (*items, arg(node, 2, "index") if name == "select" else None) if type(i) is int]
            if name == "select":
                found = found[-1:]
            if found:
                return found[0]
        indices = [i for i in items if isinstance(i, Node)] if name == "getitem" else []
        node = [*indices, *node.all_input_nodes][0]
    return None


def _is_result_of_many(node: Node) -> bool:
    """Whether an op gave several tensors, which are taken apart by numbers that say nothing of experts."""
    return isinstance(value(node), (tuple, list)) and not host_numbers.is_number(node)


class _Numbering:
    """Numbers for the values of a graph, where some rows are empty: equal ones, equal values.

    numbers  of every node      ends  of what the graph writes to and gives back, in order
    keys     of every node that was numbered as itself
    skipped  with `skipped_but`, the keys of another graph: nodes that pick rows there are not in it, so these are empty
    """

    def __init__(self, gm: GraphModule, zeros: dict, uncut: dict, table: dict[Any, int],
                 skipped_but: set | None = None) -> None:  # fmt: skip
        self.zeros, self.table, self.skipped_but = dict(zeros), table, skipped_but
        self.uncut, self.whole = uncut, {smaller: size for (size, _), smaller in uncut.items()}
        self.numbers: dict[Node, int] = {}
        self.keys: dict[Any, Node] = {}
        self.fresh: set[int] = set()  # numbers of tensors that were made full of zeros
        self.ends: list[int] = []
        self.skipped: list[Node] = []
        self.names: dict[sympy.Symbol, sympy.Symbol] = {}  # of sizes that depend on data: by what they come from
        for node in gm.graph.nodes:
            self.numbers[node] = self._number(node)

    def _number(self, node: Node) -> int:
        if node.op == "output":
            given = [self.numbers[a] if isinstance(a, Node) else a for a in _flat(node.args)]
            self.ends += [self._id(("out", each)) for each in given]
            return 0
        if isinstance(value(node), (torch.SymInt, torch.SymBool)):
            self._name(value(node), node)
            return self._id(("number", str(self._size(value(node)))))
        key = self._key(node)
        if _op_name(node) == "getitem":
            self._note_cut(node)
        if self._leaves_out(node, key) and not any(self._is_empty(value(a)) for a in node.all_input_nodes):
            self.skipped.append(node)  # what is picked of no rows is left out with these
        found = value(node)
        for number, each in enumerate(_flat(found)):
            for size in each.shape if isinstance(each, torch.Tensor) else [each]:
                if isinstance(size, torch.SymInt):
                    self._name(size, node, key, number)
        if _writes(node):
            return self._write(node, key)
        if any(self._is_empty(each) for each in _flat(found)):
            return self._id("empty")
        return self._same(node, key)

    def _same(self, node: Node, key: Any) -> int:
        """Of a value that may be another one's, as nothing is added to it."""
        name, inputs = _op_name(node), [a for a in node.args if isinstance(a, Node)]
        zero = self._id("zero")
        if name == "getitem" and (self._is_whole(node) or self._is_shuffled(node)):
            return self.numbers[node.args[0]]
        if name in ("mul", "imul") and any(type(a) in (int, float) and a == 0 for a in node.args):
            return zero
        if name in ("sum", "mean") and len(inputs) == 1 and self.numbers[inputs[0]] == zero:
            return zero
        if name in ("add", "iadd") and len(node.args) == 2 and not node.kwargs:
            left, right = (self.numbers[a] if isinstance(a, Node) else a for a in node.args)
            if zero in (left, right):
                return left if right == zero else right
            for other, part in (node.args, node.args[::-1]):
                if self._is_nothing(other) and _is_alike(part, node):
                    return self.numbers[part]
        if name in _PUTS and inputs and self._puts_nothing(node):
            return self.numbers[inputs[0]]
        self.keys[key] = node
        number = self._id(key)
        if name in ZEROS:
            self.fresh.add(number)
        return number

    def _is_nothing(self, part: Any) -> bool:
        """Whether it is the number zero, or zeros into which nothing was put."""
        return self.numbers[part] in self.fresh if isinstance(part, Node) else part == 0

    def _note_cut(self, node: Node) -> None:
        """Of x[:bound] and x[bound:] of no more rows than that, whose sizes torch 2.11 knows nothing of."""
        rows, cut = value(node.args[0]), node.args[1]
        if not isinstance(rows, torch.Tensor) or rows.dim() == 0 or not isinstance(cut, slice) or cut.step:
            return
        ends = (value(end) if isinstance(end, Node) else end for end in (cut.start, cut.stop))
        start, stop = (expr(end) if isinstance(end, (int, torch.SymInt)) else None for end in ends)
        whole = start is None or start == 0
        if (not whole and stop is not None) or (expr(rows.shape[0]), stop if whole else start) not in self.uncut:
            return
        size = expr(value(node).shape[0])
        if whole:
            self.whole[size] = expr(rows.shape[0])
            self.zeros |= {expr(rows.shape[0]): zero for cut, zero in self.zeros.items() if cut == size}
        elif size.is_Symbol:
            self.zeros[size] = sympy.Integer(0)

    def _is_whole(self, node: Node) -> bool:
        """Whether this is x[:n] of no more rows than that."""
        rows, cut = value(node.args[0]), node.args[1]
        if not isinstance(rows, torch.Tensor) or rows.dim() == 0 or not isinstance(cut, slice) or cut.start or cut.step:
            return False
        return self._assumed(expr(rows.shape[0])) == self._assumed(expr(value(node).shape[0]))

    def _is_shuffled(self, node: Node) -> bool:
        """Whether this is x[randperm(n)] of no more than a bound: a sample of all of them."""
        rows, order = node.args
        while isinstance(order, Node) and _op_name(order) == "getitem" and self._is_whole(order):
            order = order.args[0]
        if not isinstance(order, Node) or _op_name(order) != "randperm" or not isinstance(value(rows), torch.Tensor):
            return False
        size = self._assumed(expr(value(rows).shape[0]))
        return size == self._assumed(expr(value(order).shape[0])) and any(
            size == self._assumed(cut) for cut, _ in self.uncut)  # fmt: skip

    def _write(self, node: Node, key: Any) -> int:
        """Of what an op leaves in its first argument; writing empty rows changes nothing."""
        base = arg(node, 0, "input")
        if not isinstance(base, Node):
            return self._id(key)
        if self._is_empty(value(base)) or (_op_name(node).rstrip("_") in _PUTS and self._puts_nothing(node)):
            return self.numbers[base]
        before = self.numbers[base]
        self.numbers[base] = self._same(node, key)
        if self.numbers[base] != before:
            self.ends.append(self.numbers[base])
        return self.numbers[base]

    def _puts_nothing(self, node: Node) -> bool:
        rest = [a for a in _flat((node.args[1:], tuple(node.kwargs.values()))) if isinstance(a, Node)]
        return any(self._is_empty(value(a)) for a in rest)

    def _leaves_out(self, node: Node, key: Any) -> bool:
        """Whether a node picks rows by data, and the other graph has none like it: then there are none to pick."""
        if self.skipped_but is None or key in self.skipped_but:
            return False
        sizes = {expr(s) for t in _flat(value(node)) if isinstance(t, torch.Tensor) for s in t.shape}
        sizes -= {*self.names, *self.zeros, *self.whole}
        new = {s for s in sizes if s.is_Symbol and s.name.startswith("u")}
        self.zeros |= {s: sympy.Integer(0) for s in new}
        return bool(new)

    def _key(self, node: Node) -> Any:
        if node.op in ("placeholder", "get_attr"):
            return (node.op, _attribute(node))
        args, kwargs, parts = node.args, dict(node.kwargs), arg(node, 0, "tensors")
        if _op_name(node) in ("cat", "concat", "concatenate", "stack", "vstack") and isinstance(parts, (list, tuple)):
            kwargs.pop("tensors", None)
            args = ([a for a in parts if self.numbers.get(a) != self._id("empty")], *args[1:])
        args, kwargs = map_arg((args, kwargs), self._ref)
        return (node.op, str(node.target), str(args), str(kwargs))

    def _ref(self, node: Node) -> Any:
        found = self._size(value(node)) if isinstance(value(node), torch.SymInt) else None
        return int(found) if found is not None and found.is_Integer else _Ref(self.numbers[node])

    def _name(self, size: Any, node: Node, key: Any = None, number: int = 0) -> None:
        for symbol in size.node.expr.free_symbols:
            if symbol.name.startswith("u") and symbol not in self.names:
                key = self._key(node) if key is None else key
                name = f"rows_{self._id(('rows', key, number, len(self.names) if key is None else 0))}"
                taken = sum(1 for other in self.names.values() if other.name.startswith(name))
                self.names[symbol] = sympy.Symbol(f"{name}_{taken}")

    def _size(self, size: Any) -> sympy.Expr:
        return self._assumed(size.node.expr).xreplace(self.names)

    def _assumed(self, found: sympy.Expr) -> sympy.Expr:
        return found.xreplace(self.whole).xreplace(self.zeros)

    def _is_empty(self, found: Any) -> bool:
        return isinstance(found, torch.Tensor) and any(_is_zero(self._assumed(expr(s))) for s in found.shape)

    def _id(self, key: Any) -> int:
        return self.table.setdefault(key, len(self.table))


def _is_zero(size: sympy.Expr) -> bool:
    """Sizes are not negative: of two of which one is zero, that is the smaller one."""
    return size == 0 or (size.func.__name__ == "Min" and 0 in size.args)


def _is_alike(part: Any, total: Node) -> bool:
    """Whether what is added to nothing is the sum, in size and dtype, too."""
    mine, whole = value(part) if isinstance(part, Node) else None, value(total)
    if not isinstance(mine, torch.Tensor) or mine.dtype != whole.dtype:
        return False
    return list(map(expr, mine.shape)) == list(map(expr, whole.shape))


def _op_name(node: Node) -> str:
    """As everywhere, and for special methods, which dynamo wrote until torch 2.12, the operator's."""
    name = names.op_name(node)
    return name[2:-2] if name[:2] == "__" == name[-2:] else name


class _Ref:
    """A value among the arguments of an op."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __repr__(self) -> str:
        return f"%{self.number}"


_WRITES = ("setitem", *(op.__name__ for op in (operator.iadd, operator.isub, operator.imul, operator.itruediv)))
_PUTS = ("index_add", "index_copy", "index_put", "scatter_add", "scatter", "index_reduce", "scatter_reduce", "setitem",
         "index_add_", "index_fill", "masked_scatter")  # fmt: skip


def _attribute(node: Node) -> Any:
    """What an attribute holds: names of attributes follow from the order of all."""
    found = getattr(node.graph.owning_module, node.target, None) if node.op == "get_attr" else None
    if isinstance(found, torch.Tensor):
        return str(found.tolist()) if found.numel() < 64 else str(tuple(found.shape))
    return structure(found.graph.nodes) if isinstance(found, GraphModule) else node.target


def _flat(found: Any) -> list[Any]:
    if isinstance(found, (tuple, list)):
        return [each for part in found for each in _flat(part)]
    if isinstance(found, dict):
        return _flat(list(found.values()))
    return [found]
