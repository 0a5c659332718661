"""edit: what passes and the capture do to graphs."""

from __future__ import annotations

import operator

import torch
from torch import fx, nn

from moefx.analysis.checking.compare import run
from moefx.ir import edit
from tests.support.graphs import graph


def test_checkpointed_body_stands_inline_and_is_tagged():
    body = fx.Graph()
    a, b = body.placeholder("a"), body.placeholder("b")
    body.output((body.call_function(torch.relu, (a,)), body.call_function(torch.mul, (a, b))))
    gm, _ = graph('def graph(x: "f32[4, 8]", w: "f32[8]"):\n    y = x + 1.0\n    return (y,)')
    gm.body_0 = fx.GraphModule(nn.Module(), body)
    y, output = next(n for n in gm.graph.nodes if n.name == "y"), gm.graph.output_node()
    w = gm.graph.find_nodes(op="placeholder")[1]
    with gm.graph.inserting_before(output):
        attribute = gm.graph.get_attr("body_0")
        both = gm.graph.call_function(torch.ops.higher_order.tag_activation_checkpoint, (attribute, y, w))
        parts = [gm.graph.call_function(operator.getitem, (both, i)) for i in range(2)]
    output.args = (tuple(parts),)
    assert edit.inline_checkpoints(gm) == 1
    assert [n.op for n in gm.graph.nodes] == ["placeholder"] * 2 + ["call_function"] * 3 + ["output"]
    tagged = [n.name for n in gm.graph.nodes if n.meta.get("ac_graph_id") == 1 and "recompute" in n.meta]
    assert tagged == ["relu", "mul"]
    x, weight = torch.randn(4, 8), torch.randn(8)
    for found, wanted in zip(run(gm, [x, weight]), (torch.relu(x + 1), (x + 1) * weight)):
        assert torch.equal(found, wanted)


def test_checkpoints_inside_of_a_body_and_what_it_holds_stand_inline_too():
    checkpoint, bodies = torch.ops.higher_order.tag_activation_checkpoint, []
    for inner in (None, "body_0"):
        body = fx.Graph()
        x, root = body.placeholder("x"), nn.Module()
        root.scale = torch.tensor(3.0)
        if inner is not None:
            root.add_module(inner, bodies[-1])
            made = body.call_function(checkpoint, (body.get_attr(inner), x))
            x = body.call_function(operator.getitem, (made, 0))
        body.output((body.call_function(torch.mul, (x, body.get_attr("scale"))),))
        bodies.append(fx.GraphModule(root, body))
    gm, _ = graph('def graph(x: "f32[4, 8]"):\n    y = x + 1.0\n    return (y,)')
    gm.body_1 = bodies[-1]
    y, output = next(n for n in gm.graph.nodes if n.name == "y"), gm.graph.output_node()
    with gm.graph.inserting_before(output):
        outer = gm.graph.call_function(checkpoint, (gm.graph.get_attr("body_1"), y))
        output.args = ((gm.graph.call_function(operator.getitem, (outer, 0)),),)
    assert edit.inline_checkpoints(gm) == 1
    assert not gm.graph.find_nodes(op="call_function", target=checkpoint)
    tagged = [n.target for n in gm.graph.nodes if n.meta.get("ac_graph_id") == 1 and "recompute" in n.meta]
    assert tagged.count(torch.mul) == 2
    x = torch.randn(4, 8)
    gm.recompile()
    torch.testing.assert_close(gm(x), ((x + 1) * 9,))
