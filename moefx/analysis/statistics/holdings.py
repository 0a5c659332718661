"""What the values of a graph hold of what a buffer held before the step.

A buffer is added to if it ends as what it was plus something that holds nothing of that. An average that fades, a
maximum, a shift or a reset holds something else of it, or nothing. What a comparison or a choice makes of a buffer
decides, but holds nothing of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from moefx.ir import edit
from moefx.ir.names import arg, op_name
from moefx.ir.writes import writes

CHOOSERS = ("topk", "sort", "max", "min", "kthvalue", "median", "mode", "cummax", "cummin")  # (values, indices)
_CHOICES = ("argmax", "argmin", "argsort", "multinomial")
_COUNTERS = ("bucketize", "searchsorted", "nonzero", "one_hot")
# Forms of the same numbers in the same order.
_SAME = ("view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "view_as", "reshape_as", "detach", "clone",
         "contiguous", "to", "type_as", "float", "double", "long", "int", "alias")  # fmt: skip
_PARTS = ("getitem", "select", "narrow", "transpose", "permute", "t", "swapaxes", "movedim", "diagonal", "expand",
          "expand_as", "chunk", "split", "unbind")  # fmt: skip
_VIEWS = ("view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "view_as", "detach", "alias", *_PARTS)
_AS = ("to", "type_as", "view_as", "reshape_as", "expand_as")  # of other arguments they take dtype and form alone
# Of a tensor they have its form and nothing of its values.
LIKE = ("new_ones", "new_zeros", "new_full", "new_empty", "ones_like", "zeros_like", "full_like", "empty_like")


@dataclass(frozen=True)
class Part:
    """The old values, of this part of the buffer, plus what holds nothing of them."""

    place: tuple = ()


class Other:
    """Something else of the old values."""


NOTHING, OTHER, WHOLE = None, Other(), Part()
Holding = Part | Other | None


def is_added_to(gm: GraphModule, buffer: Node) -> bool:
    """Whether the buffer ends the graph as its old values plus something that holds nothing of them."""
    return _Walk(buffer).end_of(gm) == WHOLE


class _Walk:
    """holds: by tensor of its own memory. views: (that tensor, the place in it), of tensors that are views."""

    def __init__(self, buffer: Node) -> None:
        self.buffer = buffer
        self.holds: dict[Node, Holding] = {buffer: WHOLE}
        self.views: dict[Node, tuple[Node, tuple]] = {buffer: (buffer, ())}

    def end_of(self, gm: GraphModule) -> Holding:
        for node in gm.graph.nodes:
            if node.op.startswith("call"):
                self._visit(node)
        return self.holds[self.buffer]

    def _visit(self, node: Node) -> None:
        target = node.args[0] if node.args and isinstance(node.args[0], Node) else None
        if target is not None and writes(node):
            base, place = self.views.get(target, (target, ()))
            self.holds[base] = self._written(node, base, place)
            self.views[node] = base, place
        elif _decides(node):
            return
        elif target in self.views and op_name(node) in _VIEWS and op_name(target) not in CHOOSERS:
            base, place = self.views[target]
            self.views[node] = base, (*place, *_part_of(node))
        elif (found := self._made(node)) is not NOTHING:
            self.holds[node], self.views[node] = found, (node, ())

    def _of(self, value: Any) -> Holding:
        """What an argument holds."""
        if isinstance(value, (tuple, list)):
            found = [self._of(each) for each in value]
            return NOTHING if all(f is NOTHING for f in found) else OTHER
        if not isinstance(value, Node) or _decides(value):
            return NOTHING
        base, place = self.views.get(value, (value, ()))
        found = self.holds.get(base, NOTHING)
        return Part((*found.place, *place)) if isinstance(found, Part) else found

    def _made(self, node: Node) -> Holding:
        """What a new tensor holds."""
        name = op_name(node)
        held = [self._of(a) for a in (*node.args, *node.kwargs.values())]
        held = held[1:] if name in LIKE else held[:1] if name in _AS else held
        if all(h is NOTHING for h in held):
            return NOTHING
        first, rest = held[0], held[1:]
        if name in ("stack", "cat") and arg(node, 1, "dim", 0) == 0 and self._is_whole(name, node.args[0]):
            return WHOLE
        if name in _SAME or name in _PARTS:
            part = () if name in _SAME else _part_of(node)
            alone = isinstance(first, Part) and all(h is NOTHING for h in rest)
            return Part((*first.place, *part)) if alone else OTHER
        return self._added(node, name, held)

    def _is_whole(self, name: str, parts: list[Any]) -> bool:
        """Whether what is put together are all items, or slices, of the buffer in their order."""
        size, end = edit.tensor_value(self.buffer).shape[:1], 0
        for part in map(self._of, parts):
            ((kind, item, *_),) = part.place if isinstance(part, Part) and len(part.place) == 1 else (("", None),)
            is_slice = kind == "item" and isinstance(item, tuple) and item[:1] == ("slice",) and item[3] in (None, 1)
            if name == "cat" and is_slice and item[1] in (end, end or None):
                end = size[0] if item[2] is None else item[2]
            elif name == "stack" and (kind, item) in (("item", end), ("select", (0, end))):
                end += 1
            else:
                return False
        return size == (end,)

    def _added(self, node: Node, name: str, held: list[Holding]) -> Holding:
        first, rest = held[0], held[1:]
        plain = all(h is NOTHING for h in rest)
        if name in ("add", "iadd", "radd"):
            second_alone = first is NOTHING and len(rest) > 0 and isinstance(rest[0], Part) and not rest[1:]
            return first if plain else rest[0] if second_alone and not node.kwargs else OTHER
        if name in ("sub", "isub", "addcmul", "addcdiv", "index_add", "scatter_add") and plain:
            return first
        if name in ("index_put", "scatter", "scatter_reduce") and plain and accumulates(node):
            return first
        if name == "where" and len(held) == 3 and isinstance(held[1], Part) and held[1] == held[2]:
            return held[1]
        return OTHER

    def _written(self, node: Node, base: Node, place: tuple) -> Holding:
        """What is in the memory of `base` after an op has written to this place of it."""
        name, before = op_name(node).rstrip("_"), self.holds.get(base, NOTHING)
        values = [self._of(a) for a in (*node.args[1:], *node.kwargs.values())]
        if name in ("copy", "setitem", "fill", "zero", "set"):
            new = self._of(node.args[-1]) if name in ("copy", "setitem", "set") else NOTHING
            at = (*place, *_part_of(node)) if name == "setitem" else place
            if not at:
                return new
            kept = before is NOTHING and new is NOTHING
            return before if kept or (before == WHOLE and new == Part(at)) else OTHER
        if before is NOTHING and all(v is NOTHING for v in values):
            return NOTHING
        return self._added(node, name, [before, *values])


def _part_of(node: Node) -> tuple:
    """What says which part of a tensor a node takes, or sets; nothing where it is the whole."""
    item = node.args[1] if op_name(node) in ("getitem", "setitem") else None
    if op_name(node) in _SAME or item in (slice(None), Ellipsis, (slice(None),)):
        return ()
    if op_name(node) in ("getitem", "setitem"):
        return (("item", _frozen(item)),)
    return ((op_name(node), _frozen(node.args[1:]), _frozen(tuple(node.kwargs.items()))),)


def _frozen(item: Any) -> Any:
    if isinstance(item, slice):
        return "slice", item.start, item.stop, item.step
    return tuple(map(_frozen, item)) if isinstance(item, (tuple, list)) else item


def _decides(node: Node) -> bool:
    """Whether a value is a choice, or true or false."""
    tensor = edit.tensor_value(node)
    is_truth = tensor is not None and tensor.dtype is torch.bool
    return node.op.startswith("call") and (is_truth or is_choice(node) or op_name(node) in _COUNTERS)


def is_choice(node: Node) -> bool:
    """Whether a tensor has the places of what was chosen."""
    source = node.args[0] if op_name(node) == "getitem" and node.args else None
    of_several = isinstance(source, Node) and op_name(source) in CHOOSERS and node.args[1] == 1
    return of_several or op_name(node) in _CHOICES


def accumulates(node: Node) -> bool:
    """index_put, scatter and scatter_reduce may add, too."""
    name = op_name(node).rstrip("_")
    if name == "scatter_reduce":
        return arg(node, 4, "reduce") == "sum" and node.kwargs.get("include_self", True) is True
    given = (*node.args[3:], node.kwargs.get("accumulate"), node.kwargs.get("reduce"))
    return any(each is True or each == "add" for each in given if isinstance(each, (bool, str)))
