"""Kinds of blocks: the layers of a model that compute the same of other inputs.

A block is the run of nodes of one layer ("model.layers.3"). Its form is what it computes, written without names: ops,
operands by their place in the block, types of values, and what differs from layer to layer (numbers of inputs and of
regions, sizes that only data tells) by the order in which it appears. Blocks of equal form are one kind: whatever is
found out of one of them holds for all, with the others' inputs in the place of its own.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from moefx import _torch_compat as compat
from moefx.ir import edit
from moefx.ir.describe import layer_of, module_path
from moefx.ir.forms import Writer, function
from moefx.ir.names import called
from moefx.ir.op import NUMBERS, input_numbers, value
from moefx.ir.regions import region_of
from moefx.ir.writes import storage, writes

_MARKS = ("recompute", "ac_graph_id")  # of activation checkpoints
_NAMED = 3  # blocks of a kind whose paths are listed


@dataclass(frozen=True, eq=False)
class Block:
    """The nodes of one layer, in order.

    inputs: what they read from outside, in the order of reading. gives: the places of nodes that are read outside.
    numbers: of the program's inputs, as arguments of its ops have them. symbols: of sizes that data alone tells. Both
    in the order in which the form numbers them. form: a line per node, then one per input.
    """

    path: str
    nodes: tuple[Node, ...]
    inputs: tuple[Node, ...]
    gives: tuple[int, ...]
    numbers: tuple[int, ...]
    symbols: tuple[sympy.Symbol, ...]
    form: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Kind:
    """Blocks of equal form, at least two. gives: the places of nodes that are read outside of any of them."""

    blocks: tuple[Block, ...]
    gives: tuple[int, ...]

    def __str__(self) -> str:
        paths = [block.path for block in self.blocks]
        return f"{len(paths)} equal layers, {paths[0]} to {paths[-1]}"


@dataclass(frozen=True)
class Kinds:
    """Those of one graph. alone: {a layer that no other is like: why, compared with the kind that it is nearest to}."""

    found: tuple[Kind, ...] = ()
    alone: dict[str, str] = field(default_factory=dict)

    def several(self, least: int = 3) -> Kinds:
        """Those of so many blocks: compiling one of fewer saves nothing."""
        return Kinds(tuple(kind for kind in self.found if len(kind.blocks) >= least), self.alone)


def find(gm: GraphModule) -> Kinds:
    """The kinds of blocks of a graph whose nodes have fake values."""
    spans = _spans(gm)
    shared = _shared(spans.values())
    by_form: dict[tuple[str, ...], list[Block]] = defaultdict(list)
    alone: dict[str, str] = {}
    for path, span in spans.items():
        nodes = [node for node in span if node not in shared]
        odd = next((node for node in nodes if node.op not in ("call_function", "call_method")), None)
        if odd is not None:
            alone[path] = f"{called(odd)} is a graph of its own"
            continue
        block = _Reader(path, nodes).block()
        by_form[block.form].append(block)
    kinds = tuple(Kind(tuple(blocks), tuple(sorted({place for each in blocks for place in each.gives})))
                  for blocks in by_form.values() if len(blocks) > 1)  # fmt: skip
    for blocks in by_form.values():
        if len(blocks) == 1:
            alone[blocks[0].path] = _why_alone(blocks[0], kinds)
    return Kinds(kinds, alone)


# ---- where blocks begin and end


def _spans(gm: GraphModule) -> dict[str, list[Node]]:
    """{path of a layer: its nodes, and those that stand between them}, of layers that stand one behind the other.

    What belongs to a layer and stands in the one before, as a gather that starts early, is a part of that one."""
    nodes = [node for node in gm.graph.nodes if node.op not in ("placeholder", "output")]
    layers = [layer_of(module_path(node)) for node in nodes]
    last = {layer: place for place, layer in enumerate(layers) if layer}
    first: dict[str, int] = {}
    end: dict[str, int] = {}  # of the layer before, by the list that layers stand in
    for layer in sorted(last, key=last.__getitem__):
        begin = end.get(_list_of(layer), -1) + 1
        first[layer] = next(place for place in range(begin, last[layer] + 1) if layers[place] == layer)
        end[_list_of(layer)] = last[layer]
    order = sorted(first, key=first.__getitem__)
    apart = [layer for i, layer in enumerate(order)
             if (i == 0 or last[order[i - 1]] < first[layer])
             and (i + 1 == len(order) or last[layer] < first[order[i + 1]])]  # fmt: skip
    return {layer: nodes[first[layer] : last[layer] + 1] for layer in apart}


def _list_of(layer: str) -> str:
    return layer.rpartition(".")[0]


def _shared(spans: Any) -> set[Node]:
    """What stands in one block, is computed of values from before all blocks, and is read by others: dynamo computes
    equal values once. It is no part of the block, unless what it is depends on where it stands: of a block that turns
    gradients off and on, and of memory that is written to."""
    turning = [{*span} for span in spans if any(node.target is compat.grad_mode_setter for node in span)]
    block_of = {node: place for place, span in enumerate(spans) for node in span}
    written = {storage(node.args[0]) for node in block_of if writes(node) and isinstance(node.args[0], Node)} - {None}
    found: set[Node] = set()
    sizes: set[Node] = set()  # what they are computed of may stand in this block alone
    for node, place in block_of.items():
        if any(node in span for span in turning) or any(storage(each) in written for each in node.all_input_nodes):
            continue
        if node.all_input_nodes and all(
            each not in block_of or each in found or each in sizes for each in node.all_input_nodes
        ):
            if any(block_of.get(user, place) != place for user in node.users):
                found.add(node)
            elif isinstance(value(node), NUMBERS):
                sizes.add(node)
    return edit.ancestors(found, stop=lambda node: node not in sizes | found) & (sizes | found)


# ---- what a block is


class _Reader:
    """Writes down the form of one block."""

    def __init__(self, path: str, nodes: list[Node]) -> None:
        self.path, self.nodes = path, nodes
        self.places = {node: place for place, node in enumerate(nodes)}
        self.inputs: dict[Node, int] = {}
        self.numbers: dict[int, int] = {}
        self.writer = Writer()
        self.marks: dict[Any, int] = {}  # regions and checkpoints

    def block(self) -> Block:
        lines = [self._line(node) for node in self.nodes]
        memory = _Numbered(storage) if any(map(writes, self.nodes)) else None
        for node in self.inputs:
            kind = node.op if node.op == "placeholder" else "value"
            shared = f" over memory {memory(node)}" if memory is not None and isinstance(value(node), Tensor) else ""
            lines.append(f"{kind}: {self.writer.type(value(node))}{shared}")
        gives = tuple(place for node, place in self.places.items() if any(u not in self.places for u in node.users))
        return Block(self.path, tuple(self.nodes), tuple(self.inputs), gives, tuple(self.numbers),
                     tuple(self.writer.symbols), tuple(lines))  # fmt: skip

    def _line(self, node: Node) -> str:
        args, numbered = list(node.args), input_numbers(node)
        if node.target is torch.ops.aten._assert_scalar.default:
            del args[1]  # what it says names sizes and nodes
        for place, numbers in numbered.items():
            args[place] = [f"input {self.numbers.setdefault(each, len(self.numbers))}" for each in numbers]
        how = self.writer.arguments(tuple(args), dict(node.kwargs), self._name)
        marks = [self.marks.setdefault(("region", region), len(self.marks)) for region in [region_of(node)]
                 if region is not None]  # fmt: skip
        marks += [(key, self.marks.setdefault((key, node.meta[key]), len(self.marks))) for key in _MARKS
                  if node.meta.get(key) is not None]  # fmt: skip
        return f"{function(node)}{how} -> {self.writer.type(value(node))} {marks}"

    def _name(self, node: Node) -> str:
        if node in self.places:
            return f"%{self.places[node]}"
        return f"<{self.inputs.setdefault(node, len(self.inputs))}"


class _Numbered(dict):
    """Numbers what a key says of things, in the order in which they are asked for."""

    def __init__(self, key: Callable[[Any], Any]) -> None:
        super().__init__()
        self.key = key

    def __call__(self, thing: Any) -> int:
        return self.setdefault(self.key(thing), len(self))


# ---- why blocks are not equal


def difference(block: Block, other: Block) -> str:
    """In what a block is another than `other`, in words."""
    mine, theirs = block.form[: len(block.nodes)], other.form[: len(other.nodes)]
    ours = list(zip(block.form[len(mine) :], other.form[len(theirs) :]))
    for node, (a, b) in zip(block.inputs, ours):
        if a != b and ("with gradient" in a) != ("with gradient" in b):
            return f"its input {node.name} needs {'a' if 'with gradient' in a else 'no'} gradient"
    for node, (a, b) in zip(block.inputs, ours):
        if a != b and len(mine) == len(theirs):
            return f"its input {node.name} is {a}, not {b}"
    for node, a, b in zip(block.nodes, mine, theirs):
        if a != b:
            return f"{called(node)} computes {_shortest(a, b)}"
    return f"it has {len(mine)} ops, not {len(theirs)}" if len(mine) != len(theirs) else "it is equal"


def _shortest(a: str, b: str) -> str:
    """Both from where they differ, give or take a word."""
    at = next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
    start = max(a.rfind(" ", 0, at), a.rfind("(", 0, at), 0)
    cut = re.compile(r"\s+")
    return f"{cut.sub(' ', a[start : at + 40]).strip()}, not {cut.sub(' ', b[start : at + 40]).strip()}"


def _why_alone(block: Block, kinds: tuple[Kind, ...]) -> str:
    near = [kind.blocks[0] for kind in kinds if _list_of(kind.blocks[0].path) == _list_of(block.path)]
    if not near:
        return "no other layer is like it"
    closest = max(near, key=lambda each: sum(a == b for a, b in _side_by_side(block, each)))
    return f"unlike {closest.path}: {difference(block, closest)}"


def _side_by_side(block: Block, other: Block) -> Iterator[tuple[str, str]]:
    return zip(block.form, other.form)
