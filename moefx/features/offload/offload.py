"""Let saved values wait for the backward in the host's memory. The last part of differentiate.

Contract
    takes  PLACED   forward and backward, as `partition` left them
    gives  PLACED   the same results to the bit; what `Decisions.moved` sends here is saved as a copy on the host
    never  does anything where nothing is named; moves an input, what the user gets, a size, or a routing's own values

Whoever decides (a strategy, a limit) puts names of `StepGraphs.saved` into `ctx.decisions.moved` before
`pipeline.differentiated` comes here: the names of the joint graph's nodes, r0_enter_regroup_c0. How early a copy comes
back is for the scheduler to say.

Pseudo-code
    for every memory in which named values lie: the forward copies it to the host behind the op that makes it, and saves
    the copy; the backward copies it back before its first reader, and takes views of it again
    refuse a name that is not saved, and a value whose memory stays on the device in any case

    forward   h = act(x); y = mm(h, w); return y, h         ->   h = act(x); c = to_host(h); y = mm(h, w); return y, c
    backward  (h, g): dw = mm(t(h), g)                      ->   (c, g): b = to_device(c); dw = mm(t(b), g)
"""

from __future__ import annotations

import difflib
import operator
from typing import NoReturn

import torch
from torch.fx import Node

from moefx.context.pass_types import PassContext, PassResult
from moefx.context.step_graphs import StepGraphs
from moefx.costmodel.amounts import is_view
from moefx.errors import UnsupportedUse
from moefx.features.offload.strategies import OFFLOAD
from moefx.ir import edit
from moefx.ir.op import lookup, value

_ops = torch.ops.moefx


def run(step: StepGraphs, ctx: PassContext) -> PassResult:
    """Raises UnsupportedUse for what is named and cannot go, or would free nothing."""
    result = PassResult()
    names = {name for name, way in ctx.decisions.moved.items() if way == OFFLOAD}
    if names and step.backward is not None:
        _Offload(step, names).run(result)
    return result


class _Offload:
    """Moves the named values of one step."""

    def __init__(self, step: StepGraphs, names: set[str]) -> None:
        self.step, self.names = step, names
        self.returned = list(step.forward.graph.output_node().args[0])
        self.first = len(self.returned) - len(step.saved)
        self.saved = dict(zip(step.saved, self.returned[self.first :]))
        self.inputs = dict(zip(step.saved, step.backward.graph.find_nodes(op="placeholder")))
        self.stays: dict[Node, str] = {}  # memory that the user gets, or that is saved as it is
        for place, node in enumerate(self.returned):
            name = step.saved[place - self.first] if place >= self.first else ""
            if isinstance(node, Node) and name not in names:
                self.stays.setdefault(_base(node), f"the saved {name}" if name else f"output {place} of the forward")

    def run(self, result: PassResult) -> None:
        together: dict[Node, list[str]] = {}  # what lies in one memory
        for name in sorted(self.names - self.saved.keys()):
            nearest = difflib.get_close_matches(name, self.saved, n=3) or sorted(self.saved)[:8]
            _refuse(name, "is no saved value", f"saved are {', '.join(nearest)}, ..")
        for name in filter(self.names.__contains__, self.step.saved):
            together.setdefault(self._checked(name), []).append(name)
        for base, names in together.items():
            self._move(base, names)
            result.changed(f"{' and '.join(names)} on the host")
        self.step.saved = list(self.saved)
        self.step.forward.graph.output_node().args = ((*self.returned[: self.first], *self.saved.values()),)
        for part in self.step.graphs.values():
            part.graph.lint()

    def _checked(self, name: str) -> Node:
        """The node in whose memory a value lies."""
        found = self.saved[name]
        if edit.tensor_value(found) is None:
            _refuse(name, "is a size", "name tensors")
        base = _base(found)
        op = lookup(base.args[0] if base.target is operator.getitem else base)
        if base.op == "placeholder":
            _refuse(name, f"lies in the memory of the input {base.name}, which stays", "leave it out")
        if op is not None and not op.again:
            _refuse(name, "belongs to a routing, whose orders and sizes are read where they are", "leave it out")
        if base in self.stays:
            _refuse(name, f"lies in the memory of {self.stays[base]}, which stays",
                    "offload all that lies there, or nothing")  # fmt: skip
        return base

    def _move(self, base: Node, names: list[str]) -> None:
        """Save the copy in the place of the first of the values, and nothing in those of the others."""
        forward, backward = self.step.forward.graph, self.step.backward.graph
        olds = [self.inputs[name] for name in names]
        with edit.at(base, after=True):
            copy = edit.valued(edit.call(forward, _ops.to_host.default, base, name=f"{base.name}_on_host"))
        with backward.inserting_before(olds[0]):
            waiting = backward.placeholder(copy.name)
        waiting.meta = {**olds[0].meta, "val": value(copy)}
        readers = {user for old in olds for user in old.users}
        first = next(node for node in backward.nodes if node in readers)
        with backward.inserting_before(first):
            device = value(base).device.type
            back = edit.valued(edit.call(backward, _ops.to_device.default, waiting, device, name=f"{base.name}_back"))
            edit.inherit(back, base)
            made = {base: back}
            for name, old in zip(names, olds):
                old.replace_all_uses_with(self._again(self.saved[name], made))
        for old in olds:
            backward.erase_node(old)
        moved = {names[0]: [(copy.name, copy, waiting)]} | {name: [] for name in names[1:]}
        left = [each for name, found in self.saved.items()
                for each in moved.get(name, [(name, found, self.inputs[name])])]  # fmt: skip
        self.saved = {name: found for name, found, _ in left}
        self.inputs = {name: given for name, _, given in left}

    def _again(self, node: Node, made: dict[Node, Node]) -> Node:
        """A view, taken in the backward of what came back. Its sizes are saved."""
        if node not in made:
            if isinstance(value(node), torch.SymInt):
                made[node] = self._size(node)
            else:
                for argument in node.all_input_nodes:
                    self._again(argument, made)
                made[node] = self.step.backward.graph.node_copy(node, made.__getitem__)
        return made[node]

    def _size(self, node: Node) -> Node:
        for name, found in self.saved.items():
            if found is node:
                return self.inputs[name]
        with self.step.backward.graph.inserting_after([*self.inputs.values()][-1]):
            given = self.step.backward.graph.placeholder(node.name)
        given.meta = dict(node.meta)
        self.saved[node.name], self.inputs[node.name] = node, given
        return given


def _base(node: Node) -> Node:
    """The node whose memory a value lies in."""
    while is_view(node.target) or (node.target is operator.getitem and is_view(node.args[0].target)):
        node = node.args[0]
    return node


def _refuse(name: str, why: str, hint: str) -> NoReturn:
    raise UnsupportedUse(f"{name} cannot wait for the backward in the host's memory: it {why}", hint=hint)
