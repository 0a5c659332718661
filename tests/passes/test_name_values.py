"""name-values: golden, no-op, what keeps its name, the same graph."""

from __future__ import annotations

from moefx.ir.text import text
from moefx.passes import clean_up, differentiate, name_values
from tests.passes.test_clean_up import SIZES, halves, results
from tests.support.graphs import context, graph

ROUTER = """
def graph(x: "f32[s0, s1, 16]", gate: "f32[8, 16]", norm: "f32[16]"):
    use_gate = materialize(gate, 'identity', 'dp', 0.5, 1)
    use_norm = materialize(norm, 'identity', 'dp', 0.5, 2)
    hidden = x * use_norm
    flat = hidden.view(-1, 16)
    linear = F.linear(flat, use_gate)
    top = torch.topk(linear.softmax(-1), 2)
    weights = top[0]
    chosen = top[1]
    linear_1 = F.linear(hidden, use_gate)
    y = linear_1.sum() + weights.sum()
    return (y, chosen)
"""


def joint_of(source: str):
    gm, mode = graph(source, sizes=SIZES)
    for node in gm.graph.nodes:
        if node.name == "linear":
            node.meta["nn_module_stack"] = {"1": ("layers.0.router", "")}
        elif node.op == "call_function" or node.op == "call_method":
            node.meta["nn_module_stack"] = {"1": ("layers.0", "")}
    ctx = context(mode, dp=1)
    ctx.decisions.num_user_outputs = 2
    joint = differentiate.run(gm, ctx)
    clean_up.run(joint, ctx)
    return gm, joint, ctx


def test_golden_names_are_those_of_the_model():
    gm, joint, ctx = joint_of(ROUTER)
    name_values.run(joint, ctx, gm)
    step = halves(gm, joint, ctx)
    forward = {node.name for node in step.forward.graph.nodes}
    assert {"hidden", "flat", "router", "router_t", "weights", "chosen", "y", "s0", "s1"} <= forward
    assert "linear" in forward, "the second one is no whole module's value: it keeps the name of its op"
    assert {"linear_sum", "weights_sum"} <= forward, "Python has the name sum"
    assert "s0_times_s1" in forward
    assert step.backward.graph.find_nodes(op="placeholder")[-1].name == "grad_y"
    backward = {node.name for node in step.backward.graph.nodes}
    assert {"grad_router", "grad_hidden", "grad_gate", "reduced_grad_gate", "reduced_grad_norm"} <= backward
    assert not any(name.startswith(("mm", "view", "getitem", "sym_size")) for name in forward | backward)
    numbered = {name for name in backward if name.endswith("_1")}
    assert all(name.removesuffix("_1") in backward | forward for name in numbered)


def test_sizes_have_the_names_that_types_show():
    gm, joint, ctx = joint_of(ROUTER)
    name_values.run(joint, ctx, gm)
    for part in halves(gm, joint, ctx).graphs.values():
        shown = text(part)
        for name in ("s0", "s1"):
            assert f"{name}: \"{name}\"" in shown or f"{name} = ops.aten.sym_size.int" in shown
            assert all(f"# {name}" in line for line in shown.splitlines() if f" {name} = " in line)


def test_only_names_change():
    gm, joint, ctx = joint_of(ROUTER)
    before = results(joint)
    ops = [(node.op, node.target) for node in joint.graph.nodes if node.op != "placeholder"]
    inputs = [node.name for node in joint.graph.find_nodes(op="placeholder")]
    name_values.run(joint, ctx, gm)
    assert [(node.op, node.target) for node in joint.graph.nodes if node.op != "placeholder"] == ops
    assert [node.name for node in joint.graph.find_nodes(op="placeholder")] == inputs, "inputs keep their names"
    assert all(found.equal(wanted) for found, wanted in zip(results(joint), before, strict=True))


def test_noop_a_second_time():
    gm, joint, ctx = joint_of(ROUTER)
    name_values.run(joint, ctx, gm)
    once = [node.name for node in joint.graph.nodes]
    name_values.run(joint, ctx, gm)
    assert [node.name for node in joint.graph.nodes] == once
