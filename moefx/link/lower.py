"""Scheduled graph -> linked graph: every dialect op becomes the plain call into `moefx.runtime` that its record names.

The linked graph takes `session` and `step` first. What differs from rank to rank comes from them alone, so the code is
the same on all ranks.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from moefx.axes import MeshSpec, split_axes
from moefx.context.region_facts import RegionFacts, module_name, region_names
from moefx.errors import VerifyError
from moefx.ir import edit, regions
from moefx.ir.describe import module_path
from moefx.ir.level import Level
from moefx.ir.memory import IN_PLACE, INTO_GRADIENT, is_owned, taken
from moefx.ir.op import OpDef, argument
from moefx.ir.ops.order import unsplit, wait
from moefx.ir.text import resolve
from moefx.ir.verify import Facts, verify
from moefx.link import implementations
from moefx.runtime.gradients import told_apart


class Linker:
    """Links one graph. `names`: the parameter or input name of every program input, for messages and buffers. regions:
    of the program. path: of the module in the model."""

    def __init__(self, gm: GraphModule, names: Sequence[str], device_type: str, regions: Iterable[RegionFacts] = (),
                 path: str = "") -> None:  # fmt: skip
        self.gm, self.names, self.device_type, self.path = gm, names, device_type, path
        self.regions = region_names(regions, path)
        self.learners = {each.number: each.placed_as(path) for each in regions if each.counted}
        self.lowered: dict[Node, str] = {}  # names of the nodes that were lowered, before
        self.renamed: dict[str, str] = {}  # {a node's name: its name before, which means something else here}
        with gm.graph.inserting_before(next(iter(gm.graph.nodes))):
            self.session = gm.graph.placeholder("session")
            self.step = gm.graph.placeholder("step")

    def run(self) -> GraphModule:
        for node in list(self.gm.graph.nodes):
            if node.op in ("placeholder", "output"):
                continue
            self._lower(node)
        verify(self.gm, Level.LINKED, Facts(MeshSpec({})))
        names = {node: self.lowered.get(node) or node.meta.get("named", node.name) for node in self.gm.graph.nodes}
        self.renamed = edit.rename(self.gm, names)
        return self.gm

    def _lower(self, node: Node) -> None:
        op, call = unsplit(node)
        if node.target is wait:
            new = self.gm.graph.call_method("wait", (node.args[0],))
        elif op is not None:
            new = self._call(node, op, call)
        else:
            place_on_device(node)
            if "takes" in node.meta:
                _take(node)
            return
        node.prepend(new)
        new.meta.update(node.meta)
        node.replace_all_uses_with(new)
        self.lowered[new] = node.name
        self.gm.graph.erase_node(node)

    def region_of(self, node: Node) -> str:
        """The region that a collective belongs to, as users know it."""
        return self.regions.get(regions.region_of(node)) or module_name(self.path, module_path(node))

    def _call(self, node: Node, op: OpDef, call: Any) -> Node:
        """What the op's record says that it becomes, see `RuntimeCall`."""
        if op.runtime is None:
            raise VerifyError(f"{op.name} has no runtime function", where=node.name,
                              hint="say in its define(..) what it becomes")  # fmt: skip

        def meant(given: ast.expr) -> Any:
            if isinstance(given, ast.Constant):
                return given.value
            if given.id in declared:
                found = argument(call, given.id)
                return split_axes(found) if given.id == "axes" else found
            return self._known(given.id, node, call)

        declared = {each.name for each in call.target._schema.arguments}
        named = {name: meant(given) for name, given in op.runtime.kwargs.items()}
        named = {name: found for name, found in named.items() if found is not None}
        if "input_names" in op.runtime.words:
            _by_name(node, self._known("input_names", node, call))
        function = implementations.choose(op.runtime.function, call, self.device_type)
        return self.gm.graph.call_function(resolve(function), tuple(map(meant, op.runtime.args)), named)

    def _known(self, word: str, node: Node, call: Any) -> Any:
        """What the linker knows beside an op's arguments, one of `op.LINKER_WORDS`."""
        if word == "region":
            return self.region_of(node)
        if word == "input_name":
            return self.names[argument(call, "param")]
        if word == "input_names":
            return [self.names[index] for index in argument(call, "inputs")]
        if word == "is_owned":
            return is_owned(call.args[0], node)
        if word == "are_inputs":
            return all(each.op == "placeholder" and "moefx" in each.meta for each in call.args[0])
        if word == "is_fixed":
            return isinstance(call.args[0], int) or None
        if word == "learner":
            return self.learners.get(regions.region_of(node))
        return {"session": self.session, "step_state": self.step}[word]


def _by_name(started: Node, names: Sequence[str]) -> None:
    """What is made for several inputs is taken by their names: so lines of equal layers differ in a layer's number."""
    names = told_apart(names)
    for part in [part for waited in started.users for part in waited.users if part.target is operator.getitem]:
        part.args = (part.args[0], names[part.args[1]])


def place_on_device(node: Node) -> None:
    """`cuda:3` in the graph of rank 3 becomes `cuda`: every rank works on its own current device."""

    def plain(value):
        is_device = isinstance(value, torch.device) and value.index is not None
        return torch.device(value.type) if is_device else value

    node.args = torch.utils._pytree.tree_map(plain, node.args)
    node.kwargs = torch.utils._pytree.tree_map(plain, node.kwargs)


def _take(node: Node) -> None:
    """Let a result lie in the memory that it takes, see `ir.memory`."""
    operand = taken(node)
    if node.target in INTO_GRADIENT:
        node.kwargs = {**node.kwargs, "grad_input": operand}
    else:
        node.args = (operand, *(each for each in node.args if each is not operand))
    node.target = {**IN_PLACE, **INTO_GRADIENT}[node.target]


def free_points(gm: GraphModule) -> dict[Node, list[Node]]:
    """{node: values whose last reader it is}: what the emitted code lets go of after each line."""
    last: dict[Node, Node] = {}
    for node in gm.graph.nodes:
        map_arg((node.args, node.kwargs), lambda a, n=node: last.__setitem__(a, n))
    frees: dict[Node, list[Node]] = {}
    for value, reader in last.items():
        if reader.op != "output":
            frees.setdefault(reader, []).append(value)
    return frees
