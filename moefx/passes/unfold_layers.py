"""Write out the layers for which another one stood: copies of what passes made of that one.

Contract
    takes  MOE   one graph, behind `fold_layers`
    gives  MOE   the same with every layer in its place; regions are numbered in the order of the graph
    never  a copy of what stands outside of the layer, or is read there but through its edges

Pseudo-code
    for layer that stands for others
        its nodes: all from its edges to its edges, and what is computed of these
        for every call `layer_again`: copies of the nodes, with what that layer reads; new sizes that data tells
    erase edges, and what layers do not read any more; number regions anew
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from moefx import _torch_compat as compat
from moefx.analysis.kinds import Block
from moefx.context.pass_types import PassContext, PassResult
from moefx.errors import VerifyError
from moefx.ir import edit, regions
from moefx.ir.copies import Copies, Fakes
from moefx.ir.forms import data_symbols
from moefx.ir.op import expr, value
from moefx.ir.ops.layers import layer_again, layer_edge
from moefx.ir.randomness import draws


def run(gm: GraphModule, ctx: PassContext) -> PassResult:
    result = PassResult()
    calls: dict[Block, list[Node]] = {}
    for node in gm.graph.find_nodes(op="call_function", target=layer_again):
        calls.setdefault(node.meta["layer"][0], []).append(node)
    for first, agains in calls.items():
        body, read = _body(agains), agains[0].args[1]
        reads = list(read)
        sizes = _symbols(body)
        for again in agains:
            reads += again.args[2]
            _write_out(gm, again, body, sizes, ctx)
        # what passes took from the layer, as a mask that its attention knows
        edit.erase_unused(node for node in edit.ancestors(reads)
                          if node.op != "placeholder" and not node.is_impure() and not draws(node))  # fmt: skip
        result.changed(f"{len(agains)} layers as {first.path}")
    for edge in gm.graph.find_nodes(op="call_function", target=layer_edge):
        edge.replace_all_uses_with(edge.args[0])
        gm.graph.erase_node(edge)
    if calls:
        regions.number(gm)
    return result


# ---- what the layer is by now


def _body(agains: list[Node]) -> list[Node]:
    """The nodes of the layer that stands for these, in order. Raises VerifyError where a pass went round its edges."""
    again, (results, read, _) = agains[0], agains[0].args
    before = edit.ancestors(read)
    others = {*before, *results, *agains}
    found: set[Node] = set()
    new = {edge.args[0] for edge in results}
    new |= {user for node in read if node.target is layer_edge for user in node.users}
    while new := {node for node in new if node.op != "placeholder"} - found - others:
        found |= new
        new = {each for node in new for each in (*node.users, *node.all_input_nodes)}
    for node in found:
        around = node.op == "output" or node.target in (layer_again, layer_edge)
        if around or not all(each in found or each in read or _is_of_all(each) for each in node.all_input_nodes):
            raise VerifyError(f"{node.name} is in and outside of {again.meta['layer'][0].path}", where=edit.place(node))
    return [node for node in again.graph.nodes if node in found]


def _is_of_all(node: Node) -> bool:
    """Whether a node is an input that is the same to all layers."""
    return node.op == "placeholder" and node.meta["moefx"].kind not in ("param", "buffer")


# ---- copies


class _Values(Fakes):
    """Values of a layer that had some before it was folded: those are still right where no pass changed them in the
    first."""

    def __init__(self, mode: Any, symbols: dict[Any, Any], known: list[tuple[Any, Any]]) -> None:
        super().__init__(mode, symbols, known)
        self.known = {id(mine): theirs for mine, theirs in known}

    def of(self, found: Any) -> Any:
        return self.known[id(found)] if id(found) in self.known else super().of(found)


def _write_out(gm: GraphModule, again: Node, body: list[Node], sizes: list[Any], ctx: PassContext) -> None:
    results, read, reads = again.args
    first, block = again.meta["layer"]
    known = [*again.meta["values"], *((value(a), value(b)) for a, b in zip(read, reads))]
    symbols = dict(zip(first.symbols, block.symbols))
    given = {symbol for node in read for symbol in _symbols([node])}
    made = [symbol for symbol in sizes if symbol not in symbols and symbol not in given]
    symbols |= compat.same_sizes(ctx.fake_mode, made) if made else {}
    copies = Copies(first.nodes, block.nodes, _Values(ctx.fake_mode, symbols, known), {}, 0)
    copies.new |= zip(read, reads)
    copies.new |= {node: node for each in body for node in each.all_input_nodes
                   if node.op == "placeholder" and node not in read}  # fmt: skip
    copies.put(body, again)
    _renumber(gm, [copies.new[node] for node in body])
    for part in list(again.users):
        part.replace_all_uses_with(copies.new[results[part.args[1]].args[0]])
        gm.graph.erase_node(part)
    gm.graph.erase_node(again)
    others = {node.meta["moefx"]: other.meta["moefx"] for node, other in zip(read, reads) if "moefx" in node.meta}
    ctx.decisions.relied += [(others[source], values) for source, values in ctx.decisions.relied
                             if others.get(source, source) != source]  # fmt: skip
    _report(first, block, ctx)


def _symbols(nodes: Iterable[Node]) -> list[Any]:
    """Of sizes that only data tells, in order."""

    def of(found: Any) -> list[Any]:
        if isinstance(found, (tuple, list)):
            return [symbol for each in found for symbol in of(each)]
        sizes = (*found.shape, *found.stride()) if isinstance(found, Tensor) else (found,)
        return [symbol for size in sizes if isinstance(size, torch.SymInt) for symbol in data_symbols(expr(size))]

    return list(dict.fromkeys(symbol for node in nodes for symbol in of(value(node))))


def _renumber(gm: GraphModule, copies: list[Node]) -> None:
    """Regions of copies get numbers that no other has."""
    numbers = {number: None for node in copies for number in [regions.marked(node)] if number is not None}
    free = regions.next_region(gm)
    regions.renumber(copies, {old: free + place for place, old in enumerate(numbers)})


def _report(first: Block, block: Block, ctx: PassContext) -> None:
    """What is left as it is in one layer is so in the other. It is known by its place or by its name."""
    there = {edit.place(a): edit.place(b) for a, b in zip(first.nodes, block.nodes)}
    there |= {a.name: b.name for a, b in zip(first.nodes, block.nodes)}
    path = re.compile(rf"{re.escape(first.path)}(?!\w)")
    ctx.report.left |= {there[where]: path.sub(block.path, reason)
                        for where, reason in ctx.report.left.items() if where in there}  # fmt: skip
