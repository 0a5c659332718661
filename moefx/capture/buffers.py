"""Buffers that a forward puts another tensor in the place of: `self.n = self.n + x`, and `self.n += x`, which does so
with the same tensor.

Dynamo gives the tensor as an output of the graph and stores it behind the call. Here it becomes a write to the buffer
in the graph, `n.copy_(..)`, where passes see it, and the buffer stays the tensor that it was.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from moefx.errors import CaptureError
from moefx.ir import edit
from moefx.ir.names import op_name
from moefx.ir.op import value
from moefx.ir.writes import storage, users_of_memory

Tables = dict[nn.Module, dict[str, Tensor | None]]


def tables(model: nn.Module) -> Tables:
    """The buffers that every module has now."""
    return {module: dict(module._buffers) for module in model.modules()}


def replaced(model: nn.Module, before: Tables) -> dict[str, tuple[Tensor, Tensor]]:
    """What has another tensor of its shape now, by name: (the buffer, the other tensor). Raises CaptureError if the
    other one has another dtype: the buffer would be of another one from the second call on."""
    found = {}
    for path, module in model.named_modules():
        for name, old in before[module].items():
            new = module._buffers.get(name)
            if new is old or old is None or new is None or new.shape != old.shape:
                continue
            if new.dtype != old.dtype:
                raise CaptureError(
                    f"the forward replaces the buffer `{name}` of {old.dtype} with a tensor of {new.dtype}",
                    where=f"{path or 'the model'}, of class {type(module).__name__}",
                    hint=f"give the buffer the dtype that it is set to, or write to it: self.{name}.copy_(..)",
                )
            found[f"{path}.{name}".lstrip(".")] = old, new
    return found


def write(graph: torch.fx.Graph, found: dict[str, tuple[Tensor, Tensor]], names: dict[str, str],
          placeholder: Callable[[str, Tensor], Any]) -> list[str]:  # fmt: skip
    """Write to the buffers what is put in their place, at the end of the graph; returns which.

    found: what `replaced` gave, of the values of this graph. names: the first name of every buffer, by each of its
    names. placeholder: of a buffer, by its first name, made if there is none. Raises CaptureError where another tensor
    takes the place of a buffer that has several names: some would be the old one.
    """
    output, written = graph.output_node(), []
    by_value = {id(value(node)): node for node in output.all_input_nodes}
    for name, (old, new) in found.items():
        node = by_value.get(id(new))
        if node is None:  # no tensor of the graph's: an argument, or something that was there before
            continue
        buffer = placeholder(names[name], old)
        if storage(node) != storage(buffer):  # else it was written to
            _check_alone(name, names)
            _keep_for_backward(graph, buffer)
            with edit.at(output):
                if value(node).requires_grad:
                    node = _noted(graph.call_method("detach", (node,)), value(node).detach())
                _noted(graph.call_method("copy_", (buffer, node)), value(buffer))
        written.append(name)
    return written


def first_names(model: nn.Module) -> dict[str, str]:
    """{every name of a buffer: its first}. A module that has several names is one, and so is its buffer."""
    first = {id(buffer): name for name, buffer in model.named_buffers()}
    return {f"{path}.{name}".lstrip("."): first[id(buffer)] for path, module in model.named_modules()
            for name, buffer in module._buffers.items() if buffer is not None}  # fmt: skip


def _check_alone(name: str, names: dict[str, str]) -> None:
    others = [other for other, first in names.items() if first == names[name] and other != name]
    if others:
        module, _, attribute = name.rpartition(".")
        raise CaptureError(
            f"the forward replaces the buffer `{name}`, which is also `{others[0]}`, with another tensor: they "
            "would be two from then on", where=module or "the model",
            hint=f"write to it: self.{attribute}.copy_(..), or self.{attribute} += ..")  # fmt: skip


def _keep_for_backward(graph: torch.fx.Graph, buffer: torch.fx.Node) -> None:
    """What the backward needs of a buffer is what was in it before."""
    users = users_of_memory(buffer)
    if any(users.values()) or not any(getattr(value(user), "requires_grad", False) for user in users):
        return
    with edit.at(graph.find_nodes(op="placeholder")[-1], after=True):
        before = _noted(graph.call_method("clone", (buffer,)), value(buffer).clone())
    buffer.replace_all_uses_with(before, delete_user_cb=lambda user: user is not before)


def _noted(node: torch.fx.Node, fake: Any) -> torch.fx.Node:
    node.meta["example_value"] = fake
    return node


def plain_data(graph: torch.fx.Graph, placeholders: Collection[torch.fx.Node]) -> None:
    """`self.n.data` is `self.n.detach()`; what is set to it is written to the buffer."""
    for node in list(graph.nodes):
        if op_name(node) == "_get_data_attr":
            node.op, node.target = "call_method", "detach"
        if op_name(node) != "set_" or node.args[0] not in placeholders or len(node.args) != 2:
            continue
        buffer, other = node.args
        if value(other).shape != value(buffer).shape or value(other).dtype != value(buffer).dtype:
            continue
        for user in list(node.users):  # which counts versions
            graph.erase_node(user)
        if users_of_memory(buffer).get(other):  # `self.n.data += x` wrote to it
            graph.erase_node(node)
        else:
            node.op, node.target = "call_method", "copy_"


@contextlib.contextmanager
def kept(model: nn.Module, names: list[str]) -> Iterator[None]:
    """Whatever is set in here, these buffers stay the tensors that they are."""
    owners = [(model.get_submodule(path)._buffers, name) for path, _, name in (n.rpartition(".") for n in names)]
    before = [table[name] for table, name in owners]
    try:
        yield
    finally:
        for (table, name), buffer in zip(owners, before):
            table[name] = buffer
