"""Let the first of equal layers stand for all of them, so that passes look at it alone.

Contract
    takes  CAPTURED   one graph
    gives  CAPTURED   the same, in which of three and more equal layers all but the first are one call (`layer_again`);
                      `unfold_layers` writes them out again
    never  a layer that writes to what it reads, gives others a number, or shares a parameter with another one; nor
           modules that stand beside one another, as experts do

Pseudo-code
    for kind in kinds of equal layers                                       # analysis/kinds.py
        reads and results of the first go through edges, which no pass looks through
        every other layer becomes a call of the first one's results; what it reads stays beside it
"""

from __future__ import annotations

import operator
from collections import Counter

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from moefx import _torch_compat as compat
from moefx.analysis import kinds
from moefx.analysis.checking.evaluate import held
from moefx.analysis.kinds import Block, Kind
from moefx.context.pass_types import PassContext, PassResult
from moefx.ir import edit
from moefx.ir.forms import data_symbols
from moefx.ir.op import expr, value
from moefx.ir.ops.layers import layer_again, layer_edge
from moefx.ir.writes import storage, writes
from moefx.options import by_kinds


def run(gm: GraphModule, ctx: PassContext) -> PassResult:
    result = PassResult()
    found = kinds.find(gm).several().found if by_kinds() else ()
    reasons = [_why_not(kind, _written(gm, kind)) for kind in found]
    now: dict[Node, Node] = {}  # what layers gave: what is read in its place
    for kind, reason in zip(found, reasons):
        if reason:
            result.skipped.append((str(kind), f"looked at one by one: {reason}"))
        else:
            _fold(kind, now)
            result.changed(f"{kind}: the first stands for all")
    return result


def _written(gm: GraphModule, kind: Kind) -> set[int | None]:
    """The memory that is written to outside of the layers."""
    inside = {node for block in kind.blocks for node in block.nodes}
    return {storage(node.args[0]) for node in gm.graph.nodes
            if node not in inside and writes(node) and isinstance(node.args[0], Node)} - {None}  # fmt: skip


def _why_not(kind: Kind, written: set[int]) -> str | None:
    first = kind.blocks[0]
    if not all(map(_follows, kind.blocks[1:], kind.blocks)):
        return "they stand beside one another, as experts do"
    if any(node.target is compat.grad_mode_setter for node in first.nodes):
        return "they switch gradients off and on"
    own = {storage(node) for node in first.nodes} - {storage(node) for node in first.inputs}
    if any(writes(node) and storage(node.args[0]) not in own for node in first.nodes):
        return "they write to what they read"
    given = [block.nodes[place] for block in kind.blocks for place in kind.gives]
    if not all(isinstance(value(node), Tensor) for node in given):
        return "they give others what is no tensor"
    if any(symbol in block.symbols for block in kind.blocks for place in kind.gives
           for size in value(block.nodes[place]).shape for symbol in data_symbols(expr(size))):  # fmt: skip
        return "what they give has sizes that only data tells"
    if any(storage(node) in written for node in given):
        return "others write to what they give"
    for of, *others in zip(*(block.inputs for block in kind.blocks)):
        if not isinstance(value(of), Tensor) and any(other is not of for other in others):
            return "they read other numbers"
        if any(not _holds_the_same(of, other) for other in others):
            return "they read tables that hold other numbers"
    if any(_is_parameter(node) and found > 1 for node, found in
           Counter(node for block in kind.blocks for node in block.inputs).items()):  # fmt: skip
        return "they share parameters"
    return None


def _follows(block: Block, other: Block) -> bool:
    """Whether a layer reads what is computed of another one."""
    theirs = {*other.nodes}
    return not theirs.isdisjoint(edit.ancestors(block.inputs, stop=theirs.__contains__))


def _holds_the_same(one: Node, other: Node) -> bool:
    a, b = held(one), held(other)
    return a is b or (a is not None and b is not None and a.dtype == b.dtype and torch.equal(a, b))


def _is_parameter(node: Node) -> bool:
    return getattr(node.meta.get("moefx"), "kind", None) == "param"


def _fold(kind: Kind, now: dict[Node, Node]) -> None:
    first, *others = kind.blocks
    mine = {*first.nodes}
    read = [now.get(node, node) for node in first.inputs]
    read = [node if node.op == "placeholder" or not isinstance(value(node), Tensor)
            else _edge(node, min(node.users.keys() & mine), mine) for node in read]  # fmt: skip
    given = []
    for place in kind.gives:
        node = first.nodes[place]
        given.append(_edge(node, first.nodes[-1].next, node.users.keys() - mine))
        now[node] = given[-1]
    for block in others:
        now |= _replace(block, kind.gives, given, read, [now.get(node, node) for node in block.inputs], first)


def _edge(node: Node, before: Node, users: set[Node]) -> Node:
    readers = [user for user in node.users if user in users]
    with node.graph.inserting_before(before):
        edge = edit.call(node.graph, layer_edge, node)
    edit.inherit(edge, node)
    edge.meta["val"] = value(node)
    for user in readers:
        user.replace_input_with(node, edge)
    return edge


def _replace(block: Block, gives: tuple[int, ...], given: list[Node], read: list[Node], reads: list[Node],
             first: Block) -> dict[Node, Node]:  # fmt: skip
    """Returns {what the layer gave: what others read now}."""
    mine, graph = {*block.nodes}, block.nodes[0].graph
    with edit.at(block.nodes[-1], after=True):
        again = edit.call(graph, layer_again, given, read, reads)
        parts = {block.nodes[place]: edit.call(graph, operator.getitem, again, number)
                 for number, place in enumerate(gives)}  # fmt: skip
    again.meta |= {"val": [value(node) for node in parts], "layer": (first, block),
                   "values": [(value(a), value(b)) for a, b in zip(first.nodes, block.nodes)]}  # fmt: skip
    for node, part in parts.items():
        part.meta["val"] = value(node)
        for user in [user for user in node.users if user not in mine and user is not part]:
            user.replace_input_with(node, part)
    for node in reversed(block.nodes):
        graph.erase_node(node)
    return parts
