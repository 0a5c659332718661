"""Numbers that a captured graph computes on the host, of sizes or of `.tolist()`, the checks that read them, and how
numbers of picked tokens are counted without the host."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from moefx.ir import edit, ragged
from moefx.ir.names import arg, op_name
from moefx.ir.op import value

_CHECKS = ("_assert_scalar", "_check", "_check_is_size", "sym_constrain_range_for_size", "sym_constrain_range")
_NUMBERS = (bool, int, float, torch.SymBool, torch.SymInt, torch.SymFloat)


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


def is_number(node: Node) -> bool:
    """Whether the node has a number on the host, or a list of such."""
    return _are_numbers(value(node))


def _are_numbers(found: Any) -> bool:
    return all(map(_are_numbers, found)) if isinstance(found, (list, tuple)) else isinstance(found, _NUMBERS)


def count_picked(gm: GraphModule) -> list[str]:
    """torch.tensor([len(tokens_0), len(tokens_1), ..]) becomes the numbers of nonzeros of the masks that these were
    picked by, which need no host. The names of what became so."""
    changed: list[str] = []
    for node in list(gm.graph.nodes):
        numbers = node.args[0] if op_name(node) == "tensor" and len(node.args) == 1 else None
        picks = [_picked_by(n) for n in numbers] if isinstance(numbers, (list, tuple)) else []
        if not picks or None in picks or node.kwargs.get("requires_grad"):
            continue
        changed.append(node.name)
        like = edit.tensor_value(node)
        emit, counts = ragged.Rows(gm, like.fake_mode, ""), []
        for pick in picks:
            with edit.at(pick, after=True):
                counts.append(emit.emit_call(torch.count_nonzero, pick.args[0]))
        with edit.at(node):
            node.replace_all_uses_with(emit.method("to", emit.stacked(counts, 0), like.device, like.dtype))
        edit.erase_unused([node, *numbers, *(n.args[0] for n in numbers), *picks])
    return changed


def _picked_by(size: Any) -> Node | None:
    """nonzero(mask) or where(mask), of whose index vectors this is the length."""
    if not isinstance(size, Node) or op_name(size) not in ("sym_size", "size") or arg(size, 1, "dim") != 0:
        return None
    found = size.args[0]
    if op_name(found) == "nonzero" and not arg(found, 1, "as_tuple", False):
        return found
    if op_name(found) != "getitem" or not isinstance(found.args[1], int):
        return None
    picks = found.args[0]
    is_tuple = op_name(picks) == "nonzero" and arg(picks, 1, "as_tuple", False) is True
    return picks if is_tuple or (op_name(picks) == "where" and len(picks.args) == 1) else None
