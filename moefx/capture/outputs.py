"""Outputs that are views of one another (`return logits, logits[:, -1]`) become tensors of their own.

The program's outputs are those of an autograd function, which cannot be views of one another. A user who writes to one
of them in place does not change the other.
"""

from __future__ import annotations

import operator

import torch
from torch.fx import Graph, Node

from moefx.ir import edit
from moefx.ir.op import value
from moefx.ir.writes import storage


def set_apart(graph: Graph) -> None:
    """Copy, at the end, all but the first made of the outputs that share memory; those that share it with an input stay
    views of that."""
    output = graph.output_node()
    order = {node: i for i, node in enumerate(graph.nodes)}
    given = {storage(node) for node in graph.find_nodes(op="placeholder")}
    sharing: dict[int | None, list[Node]] = {}
    for node in output.all_input_nodes:
        sharing.setdefault(storage(node), []).append(node)
    for memory, nodes in sharing.items():
        if memory is None or memory in given or len(nodes) == 1 or _are_parts(nodes):
            continue
        for node in sorted(nodes, key=order.__getitem__)[1:]:
            with graph.inserting_before(output):
                new = graph.call_method("clone", (node,))
            edit.inherit(new, node)
            new.meta["example_value"] = value(node).clone()
            output.replace_input_with(node, new)


def _are_parts(nodes: list[Node]) -> bool:
    """Of one op with several results, such as split: autograd copes with those."""
    sources = {node.args[0] if node.target is operator.getitem else node for node in nodes}
    return len(sources) == 1 and not isinstance(value(sources.pop()), torch.Tensor)
