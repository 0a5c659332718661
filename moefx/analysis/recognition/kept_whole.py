"""Which weights of experts every rank has to keep whole, and why. A rank takes its own experts' part of them."""

from __future__ import annotations

from typing import NamedTuple

from torch.fx import Node

from moefx.ir import edit
from moefx.ir.expert_weights import is_given
from moefx.ir.names import called, op_name
from moefx.ir.ops.regions import expert_parameter, stack_experts


class Reason(NamedTuple):
    """name: the parameters; empty for buffers, of which every rank has all in any case."""

    name: str
    why: str


def why_whole(root: Node, whole_before: frozenset[str] = frozenset()) -> Reason | None:
    """Why a rank cannot have its own experts of a marked root alone (see `expert_weights.roots`); None: it can.
    whole_before: the parameters that programs for other calls read whole."""
    if root.op == "placeholder" and root.meta["moefx"].kind != "param":
        return Reason("", "a buffer")
    given = [n for n in edit.ancestors([root]) if n.op == "placeholder" and n.meta["moefx"].kind == "param"]
    keys = sorted(str(n.meta["moefx"].key) for n in given)
    name = " and ".join(keys) if len(keys) < 3 else f"{keys[0]} and {len(keys) - 1} more"
    if root.target == "narrow":
        return Reason(name, "it has rows that belong to no expert")
    if not is_given(root):
        return Reason(name, f"{root.name} ({edit.place(root)}) mixes experts")
    reader = _reader_outside(root)
    if reader is not None:
        return Reason(name, f"{called(reader)} ({edit.place(reader)}) reads it outside of the experts")
    shared = _shared(root)
    if shared is not None:
        return Reason(name, shared)
    if not whole_before.isdisjoint(keys):
        return Reason(name, "another kind of call needs it whole")
    if len({edit.tensor_value(n).requires_grad for n in given}) > 1:
        return Reason(name, "some of these are frozen and others are not")
    return None


def _reader_outside(root: Node) -> Node | None:
    """An op that needs a parameter of all experts, wherever they are."""
    users = [u for u in root.users if u.target is not expert_parameter]
    if root.target is stack_experts:
        users += [u for param in root.args[0] for u in param.users if u is not root and not _is_marked(u)]
    reader = next(iter(users), None)
    while reader is not None and op_name(reader) == "detach" and reader.users:  # where gradients are off
        reader = min(reader.users)
    return reader


def _shared(root: Node) -> str | None:
    """Another mixture, with other experts besides, that has a parameter of these: no rank's part would suit both."""
    for param in root.args[0] if root.target is stack_experts else ():
        for user in param.users:
            if _is_marked(user) and user.args[0] != root.args[0]:
                keys = [str(each.meta["moefx"].key) for each in (param, user.args[0][0], user.args[0][-1])]
                return f"{keys[0]} also belongs to another mixture, that of {keys[1]} to {keys[2]}"
    return None


def _is_marked(stack: Node) -> bool:
    """Whether a node stacks parameters of experts for a region."""
    return stack.target is stack_experts and any(u.target is expert_parameter for u in stack.users)
