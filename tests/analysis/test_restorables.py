"""What the backward reads, in classes: which there are, what each way keeps, and what it does again."""

from __future__ import annotations

import pytest
import sympy

from moefx.compiler import pipeline
from moefx.compiler.pipeline import place_experts, refresh
from moefx.context.decisions import Chunk
from moefx.ir.describe import op_name
from moefx.options import Options
from moefx.passes import join_gates
from tests.support.graphs import context, graph
from tests.support.placing import STATIC
from tests.support.small import MOE

GATED = MOE.replace("F.silu(m.grouped_linear.default(inside, up_e, counts, False))",
                    "F.silu(m.grouped_linear.default(inside, up_e, counts, False)) "
                    "* m.grouped_linear.default(inside, up_e, counts, False)")  # fmt: skip
TWO_LAYERS = """
def graph(x: "f32[s0, 16]", w0: "f32[16, 16]", w1: "f32[16, 16]"):
    a0 = F.gelu(F.linear(x, materialize(w0, 'identity', 'dp', 0.5, 1)))
    b0 = F.gelu(a0 * a0)
    a1 = F.gelu(F.linear(b0, materialize(w1, 'identity', 'dp', 0.5, 2)))
    b1 = a1 * a1
    return (b1,)
"""


def split(source=MOE, keep="eager", table=None, chunk=None, weighable=frozenset(), paths=None, joined=False):
    """(StepGraphs, context) of a region on two ranks, which may say that it is one of several chunks. paths: {an op's
    name: the module that its nodes come from}."""
    gm, mode = graph(source)
    for node in gm.graph.nodes:
        if op_name(node) in (paths or {}):
            node.meta["nn_module_stack"] = {"1": (paths[op_name(node)], "")}
    ctx = context(mode, Options(keep=keep), dp=1, ep=2)
    ctx.decisions.num_user_outputs = 1
    ctx.decisions.restoring, ctx.decisions.weighable = table or {}, {*weighable}
    place_experts.run(gm, ctx)
    refresh(gm, ctx)
    if joined:
        ctx.has_kernel = lambda call: True
        assert join_gates.run(gm, ctx).changes
    if chunk is not None:
        ctx.decisions.chunks = {0: chunk}
    return pipeline.differentiated(gm, ctx), ctx


def of_forward(step):
    """The forward's ops that the backward runs again, but for views."""
    forward = {node.name for node in step.forward.graph.nodes if node.op == "call_function"}
    return [op_name(n).split(".")[0] for n in step.backward.graph.nodes
            if n.op == "call_function" and n.name in forward and op_name(n) != "t"]  # fmt: skip


def test_rows_of_a_region_are_classes_by_what_was_done_to_them():
    _, ctx = split(GATED)
    found = {each.name: each for each in ctx.decisions.restorables}
    assert set(found) == {"the model", "0.T_DI", "0.T_M", "0.R"}
    inner = found["0.T_M"]
    (rows,) = inner.nbytes["keep"].free_symbols
    assert [inner.nbytes[way] / (24 * 4 * rows) for way in ("keep", "lean", "redo", "offload")] == [3, 2, 0, 2]
    assert [len(inner.again[way]) for way in ("keep", "lean", "offload")] == [0, 1, 1]
    assert found["0.T_DI"].nbytes["keep"] == 16 * 4 * rows


@pytest.mark.parametrize(("way", "again"), [("eager", ["silu"]), ("lean", ["silu", "mul"])])
def test_a_gated_activation_that_is_one_op_is_kept_and_done_again_as_before(way, again):
    (plain, one), (joined, other) = (split(GATED, way, joined=joined) for joined in (False, True))
    assert of_forward(plain) == again
    assert of_forward(joined) == (["gated"] if "mul" in again else [])
    assert len(plain.saved) == len(joined.saved)
    found = ({each.name: {key: str(size) for key, size in each.nbytes.items()} for each in ctx.decisions.restorables}
             for ctx in (one, other))  # fmt: skip
    assert next(found) == next(found)


def test_scores_that_could_be_inside_take_one_number_a_row():
    _, plain = split(GATED)
    assert all(each.weighing is None for each in plain.decisions.restorables)
    _, ctx = split(GATED, weighable={0})
    found = {each.name: each for each in ctx.decisions.restorables if each.weighing is not None}
    assert set(found) == {"0.R"}
    weighing = found["0.R"].weighing
    (arrived,) = weighing.nbytes.free_symbols
    weighed, sent = weighing.again
    assert weighing.nbytes == 24 * 4 * arrived  # inner rows
    assert weighed.volume.hbm_bytes == 2 * weighing.nbytes
    (tokens,) = sent.payload.free_symbols
    assert (sent.collective, sent.payload) == ("all_to_all", 2 * 4 * tokens)  # two choices


def test_what_arrived_is_sent_again_once_to_the_byte_and_no_routing():
    step, ctx = split(keep="mpipemoe-s4")
    assert of_forward(step) == ["dispatch", "all_to_all", "regroup", "grouped_linear", "silu"]
    (arrived,) = (each for each in ctx.decisions.restorables if each.name == "0.T_DI")
    sent = sympy.Add(*(a.volume.wire_bytes.get("ep", 0) for a in arrived.again["redo"]))
    (tokens,) = sent.free_symbols
    assert sent == 2 * tokens * 16 * 4 / 2  # two choices, of which half leave one of two ranks
    assert ctx.decisions.rings == 2


def test_numbers_of_experts_are_not_those_of_layers():
    """The activation of experts that are Sequentials comes from `experts.0.1`."""
    source = MOE.replace("F.silu(", "F.relu(")
    step, ctx = split(source, keep="mpipemoe-s4", paths={"relu": "experts.0.1"})
    assert "relu" in of_forward(step)
    names = [each.name for each in ctx.decisions.restorables]
    assert len(names) == len({*names})


def test_a_table_says_it_chunk_by_chunk():
    table = {"0.T_M": ("redo", "keep"), "0.R": ("redo",)}
    first, _ = split(table=table, chunk=Chunk(0, 0, 3))
    assert of_forward(first) == ["all_to_all", "grouped_linear", "silu"], "R is sent from T_DO, which is kept"
    last, ctx = split(table=table, chunk=Chunk(0, 2, 3))
    assert of_forward(last) == ["all_to_all", "silu"], "the last way is for all that follow"
    assert ctx.decisions.moved == {}


def test_static_blocks_are_made_again_as_well():
    blocks = STATIC.replace("x: ", 'x_mask: "f32[8, 6, 6]", x: ').replace("enter(x,", "enter(torch.bmm(x_mask, x),")
    step, _ = split(blocks, keep="mpipemoe-s4")
    wanted = ["bmm", "all_to_all_capacity"]
    assert [name for name in of_forward(step) if name in wanted] == wanted
    assert {"x_mask", "x"} <= {*step.saved}


@pytest.mark.parametrize(("dropped", "times"), [(0.0, 1), (0.1, 0)])
def test_attention_is_done_again_unless_it_drops(dropped, times):
    source = f"""
        def graph(x: "f32[2, 4, s0, 16]", w: "f32[16, 16]"):
            q = F.linear(x, w)
            y = F.scaled_dot_product_attention(q, q, q, None, {dropped})
            return (y * y,)
    """
    gm, mode = graph(source)
    ctx = context(mode, dp=1)
    ctx.decisions.num_user_outputs, ctx.decisions.restoring = 1, {"the model": ("redo",)}
    step = pipeline.differentiated(gm, ctx)
    again = [name for name in of_forward(step) if "attention" in name or "sdpa" in name]
    assert len(again) == times


def test_dense_work_is_done_again_from_where_its_layer_begins():
    gm, mode = graph(TWO_LAYERS)
    ctx = context(mode, dp=2)
    ctx.decisions.num_user_outputs = 1
    layer = "layers.0"
    for node in (n for n in gm.graph.nodes if n.op == "call_function"):
        node.meta["nn_module_stack"] = {"": (layer, object)}
        layer = "layers.1" if node.name == "b0" else layer
    ctx.decisions.restoring = {"layers.0": ("redo",), "layers.1": ("redo",)}
    step = pipeline.differentiated(gm, ctx)
    assert "b0" in step.saved
    assert of_forward(step).count("mm") == 2, "each layer once"
    assert not {"a0", "a1", "linear", "linear_1"} & {*step.saved}
