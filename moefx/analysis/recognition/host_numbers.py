"""Numbers that a captured graph computes on the host, of sizes or of `.tolist()`, the checks that read them, and how
numbers of picked tokens are counted without the host."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from moefx.ir import edit, ragged
from moefx.ir.names import arg, op_name
from moefx.ir.op import NUMBERS, value

_CHECKS = ("_assert_scalar", "_check", "_check_is_size", "sym_constrain_range_for_size", "sym_constrain_range")


def is_check(node: Node) -> bool:
    """Whether the node only demands something of a number."""
    return op_name(node) in _CHECKS


def readers(node: Node, but: Node | None = None) -> list[Node] | None:
    """The users of `node`, theirs, and so on, the last first, where they are only numbers on the host and checks of
    such; None if something else comes of it. but: a user that does not count."""
    found = [user for user in node.users if user is not but]
    for each in found:
        if not is_check(each) and not is_number(each):
            return None
        found += [user for user in each.users if user not in found]
    return sorted(found, reverse=True)


def is_returned(node: Node) -> bool:
    """Whether nothing but checks reads numbers on the host, and the model returns or keeps them."""
    return all(user.op == "output" or is_check(user) or (is_number(user) and is_returned(user)) for user in node.users)


def is_number(node: Node) -> bool:
    """Whether the node has a number on the host, or a list of such."""
    return _are_numbers(value(node))


def _are_numbers(found: Any) -> bool:
    return all(map(_are_numbers, found)) if isinstance(found, (list, tuple)) else isinstance(found, NUMBERS)


def drop_idle(gm: GraphModule) -> None:
    """Lists of numbers that only conditions have read, which capture decided: `if counts[e] == 0: continue`."""
    for node in [n for n in gm.graph.nodes if op_name(n) == "tolist"]:
        for each in (*found, node) if (found := readers(node)) is not None else ():
            gm.graph.erase_node(each)


def count_picked(gm: GraphModule) -> list[str]:
    """Numbers of picked tokens that go into tensors, torch.tensor([len(tokens_0), ..]) or load[e] += len(tokens_e) / n,
    become the numbers of nonzeros of the masks that these were picked by, which need no host. What became so."""
    changed: list[str] = []
    counts = _Counts(gm)
    for node in list(gm.graph.nodes):
        numbers = node.args[0] if op_name(node) == "tensor" and len(node.args) == 1 else None
        if isinstance(numbers, (list, tuple)) and numbers and not node.kwargs.get("requires_grad"):
            if all(_picked_by(n) is not None for n in numbers):
                changed.append(node.name)
                like, tensors = edit.tensor_value(node), [counts.of(n) for n in numbers]
                with edit.at(node):
                    new = counts.emit.method("to", counts.emit.stacked(tensors, 0), like.device, like.dtype)
                node.replace_all_uses_with(new)
                edit.erase_unused([node])
        elif op_name(node) in _READERS and not is_number(node):
            places = (2,) if op_name(node) == "setitem" else (0, 1)  # what is set, not where
            tensors = [counts.of(a) if i in places and isinstance(a, Node) and is_number(a) else None
                       for i, a in enumerate(node.args)]  # fmt: skip
            if any(t is not None for t in tensors):
                changed.append(node.name)
                node.args = tuple(a if t is None else t for a, t in zip(node.args, tensors))
    counts.erase_read()
    return changed


_ARITHMETIC = ("add", "sub", "mul", "truediv")
_READERS = (*_ARITHMETIC, "iadd", "isub", "imul", "itruediv", "div", "setitem")  # as good with a tensor of no dims


class _Counts:
    """Numbers of picked tokens, and what is computed of them, as tensors of no dims."""

    def __init__(self, gm: GraphModule) -> None:
        mode = next(v.fake_mode for v in map(edit.tensor_value, gm.graph.nodes) if v is not None)
        self.emit = ragged.Rows(gm, mode, "")
        self.read: list[Node] = []

    def of(self, number: Node) -> Node | None:
        """None: it is no such number."""
        pick = _picked_by(number)
        if pick is not None:
            source = pick.args[1] if op_name(pick) == "getitem" else pick.args[0]
            with edit.at(pick, after=True):
                found = self.emit.emit_call(torch.count_nonzero, source)
        elif op_name(number) in _ARITHMETIC and is_number(number):
            tensors = [self.of(a) if isinstance(a, Node) else None for a in number.args]
            if all(t is None for t in tensors):
                return None
            with edit.at(number):
                args = (a if t is None else t for a, t in zip(number.args, tensors))
                found = self.emit.emit_call(number.target, *args)
        else:
            return None
        self.read += [number, *number.all_input_nodes, *([] if pick is None else [pick])]
        return found

    def erase_read(self) -> None:
        """Drop the numbers that nobody reads any more but to check them."""
        checks = {each for number in self.read for each in readers(number) or ()}
        for each in sorted(checks, reverse=True):
            each.graph.erase_node(each)
        edit.erase_unused(set(self.read) - checks)


def _picked_by(size: Any) -> Node | None:
    """nonzero(mask) or where(mask), of whose index vectors this is the length, or x[mask], of whose rows."""
    if not isinstance(size, Node) or op_name(size) not in ("sym_size", "size") or arg(size, 1, "dim") != 0:
        return None
    found = size.args[0]
    if op_name(found) == "nonzero" and not arg(found, 1, "as_tuple", False):
        return found
    if op_name(found) != "getitem":
        return None
    picks, item = found.args
    if isinstance(item, Node) and (mask := edit.tensor_value(item)) is not None and mask.dtype is torch.bool:
        return found
    is_tuple = op_name(picks) == "nonzero" and arg(picks, 1, "as_tuple", False) is True
    is_vector = isinstance(item, int) and (is_tuple or (op_name(picks) == "where" and len(picks.args) == 1))
    return picks if is_vector else None
