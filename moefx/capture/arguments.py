"""Arguments that a forward writes to: `x *= noise`.

The graph writes to a copy, and gives what that holds at the end. Behind the program this is written to the argument,
where autograd sees it, as it sees such a write of eager code: the argument may need a gradient.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import Tensor
from torch.fx import Graph

from moefx import _torch_compat as compat
from moefx.capture.inputs import flatten_call
from moefx.errors import UnsupportedUse
from moefx.ir import edit
from moefx.ir.op import value
from moefx.ir.writes import users_of_memory


def write_to_copies(graph: Graph, mode: Any, leaves: list[Any]) -> dict[int, str]:
    """Put copies in the place of arguments that are written to, and what they hold at the end behind the outputs.
    Returns {index of these among the arguments `leaves`: name of the placeholder}, in that order."""
    written, ends = {}, []
    placeholders, output = graph.find_nodes(op="placeholder"), graph.output_node()
    for node in placeholders:
        source = node.meta["moefx"]
        if source.kind != "input" or not any(users_of_memory(node).values()):
            continue
        with edit.at(placeholders[-1], after=True):
            copy = graph.call_method("clone", (node,))
        node.replace_all_uses_with(copy, delete_user_cb=lambda user, copy=copy: user is not copy)
        # Views that the forward takes are of the copy's memory.
        copy.meta["example_value"] = fake = value(node)
        node.meta["example_value"] = compat.fake_like(mode, fake).requires_grad_(leaves[source.key].requires_grad)
        written[source.key] = node.name
        ends.append(copy)
    output.args = ((*output.args[0], *ends),)
    return written


def check_apart(leaves: list[Any], written: Collection[int]) -> None:
    """Raises UnsupportedUse where an argument that is written to shares memory with another one, which would see it."""
    tensors = {i: leaf for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.numel()}
    for index in written:
        for other, tensor in tensors.items():
            if other != index and index in tensors and _meet(tensor, tensors[index]):
                raise UnsupportedUse(f"the forward writes to its tensor argument {index}, which shares memory with "
                                     f"argument {other}", hint="pass a copy: x.clone()")  # fmt: skip


def _meet(a: Tensor, b: Tensor) -> bool:
    """Whether the memory from the first entry to the last is in part the same."""
    (start, end), (first, last) = map(_extent, (a, b))
    return a.device == b.device and start < last and first < end


def _extent(tensor: Tensor) -> tuple[int, int]:
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def write_back(flat: list[Any], written: Collection[int], args: tuple, kwargs: dict[str, Any]) -> list[Any]:
    """Writes to the user's arguments what the program gives behind the outputs; returns the outputs."""
    count = len(flat) - len(written)
    leaves = flatten_call(args, kwargs)[0] if written else []
    for index, held in zip(written, flat[count:]):
        leaves[index].copy_(held)
    return flat[:count]
