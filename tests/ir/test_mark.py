"""A marked graph can be put back, whatever was done to it."""

from __future__ import annotations

import operator

import torch

from moefx.ir import edit
from moefx.ir.mark import Mark
from moefx.ir.text import text
from tests.support.graphs import graph

SOURCE = """\
def graph(x: "f32[s0, 16]", w: "f32[16, 16]"):
    a = x @ w
    b = a.relu()
    c = torch.zeros_like(b)
    c[0] = b[0]
    return (c,)
"""


def test_nodes_that_were_erased_added_moved_and_changed():
    gm, _ = graph(SOURCE)
    nodes, printed = list(gm.graph.nodes), text(gm)
    mark, by_name = Mark(gm), {node.name: node for node in nodes}
    a, b, c = (by_name[name] for name in "abc")
    with edit.at(b):
        new = gm.graph.call_method("sigmoid", (a,))
    b.replace_all_uses_with(new)
    gm.graph.erase_node(b)
    c.target = torch.ones_like
    c.meta["val"] = None
    new.append(by_name["w"])
    c.args = (a,)
    for node in gm.graph.find_nodes(op="call_function", target=operator.setitem):
        gm.graph.erase_node(node)
    mark.put_back()
    gm.graph.lint()
    assert text(gm) == printed
    assert list(gm.graph.nodes) == nodes
    assert gm.graph.find_nodes(op="call_function", target=torch.zeros_like) == [c]
    assert list(a.users) == [b]
