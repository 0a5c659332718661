"""fold_layers and unfold_layers: golden, no-op, refusal, meaning."""

from __future__ import annotations

import operator
import re
from dataclasses import replace

import pytest
import torch
from expecttest import assert_expected_inline

from moefx.analysis import kinds
from moefx.analysis.checking.compare import Comparison
from moefx.compiler import pipeline
from moefx.compiler.pipeline import Pipeline, refresh
from moefx.errors import RaiseError, VerifyError
from moefx.ir.edit import copy_of
from moefx.ir.infer import Values
from moefx.ir.ops.layers import layer_again, layer_edge
from moefx.options import Debug, Options
from moefx.passes import fold_layers, raise_loop, refuse_unraised, unfold_layers
from tests.support.graphs import assert_same_meaning, context, graph, short

PLAIN = """
    begin{n} = F.linear(h{i}, w{n})
    h{n} = h{i} + F.silu(begin{n})
"""
MIXTURE = """
    begin{n} = F.linear(h{i}, gate{n})
    topk{n} = torch.topk(F.softmax(begin{n}, dim=-1), 2, dim=-1)
    weights{n} = topk{n}[0]
    idx{n} = topk{n}[1]
    out{n}_0 = torch.zeros_like(h{i})
    token{n}_0, choice{n}_0 = torch.where(idx{n} == 0)
    rows{n}_0 = F.linear(h{i}[token{n}_0], w{n}[0]) * weights{n}[token{n}_0, choice{n}_0].unsqueeze(-1)
    out{n}_1 = out{n}_0.index_add(0, token{n}_0, rows{n}_0)
    token{n}_1, choice{n}_1 = torch.where(idx{n} == 1)
    rows{n}_1 = F.linear(h{i}[token{n}_1], w{n}[1]) * weights{n}[token{n}_1, choice{n}_1].unsqueeze(-1)
    h{n} = h{i} + out{n}_1.index_add(0, token{n}_1, rows{n}_1)
"""


def unpacked(body):
    """Where a line takes a tuple apart, the reader of graphs wants two."""
    lines = []
    for line in body.strip("\n").splitlines():
        names, _, call = line.partition(" = ")
        if "," in names:
            first, second = names.strip().split(", ")
            lines += [f"    found_{first} = {call}",
                      f"    {first} = found_{first}[0]", f"    {second} = found_{first}[1]"]  # fmt: skip
        else:
            lines.append(line)
    return "\n".join(lines) + "\n"


def layers(count, body=PLAIN, *, inputs="", ends="", gives="h{count}"):
    weights = "".join(f', w{n}: "f32[16, 16]"' for n in range(1, count + 1))
    if "gate{n}" in body:
        weights = "".join(f', gate{n}: "f32[2, 16]", w{n}: "f32[2, 16, 16]"' for n in range(1, count + 1))
    text = "".join(unpacked(body).format(n=n, i=n - 1) for n in range(1, count + 1))
    return (f'def graph(xs: "f32[s0, 16]", w0: "f32[16, 16]"{weights}{inputs}):\n'
            f"    h0 = F.linear(xs, w0)\n{text}{ends}"
            f"    return ({gives.format(count=count)},)\n")  # fmt: skip


def read(source, **how):
    gm, mode = graph(source, **how)
    here = None
    for node in gm.graph.nodes:
        if node.op.startswith("call"):
            if node.name.startswith("end"):
                here = None
            elif node.name.startswith("begin") and node.name[5:].isdigit():
                here = node.name[5:]
            node.meta["nn_module_stack"] = {"": (f"layers.{here}" if here else "", torch.nn.Module)}
    return gm, context(mode, ep=2)


def run(gm, ctx, *passes):
    values = Values()
    for each in passes:
        result = each.run(gm, ctx)
        if each is unfold_layers:
            values.learn(gm, copied=True)
        else:
            refresh(gm, ctx, values)
        gm.recompile()
        gm.graph.lint()
    return result


def calls(gm, target):
    return gm.graph.find_nodes(op="call_function", target=target)


# ---- golden, no-op


def test_golden():
    gm, ctx = read(layers(3))
    assert run(gm, ctx, fold_layers).changes == ["3 equal layers, layers.1 to layers.3: the first stands for all"]
    assert_expected_inline(short(gm).replace("moefx.ir.ops.layers.", ""), """\
def graph(
    xs: "f32[s0, 16]",
    w0: "f32[16, 16]",
    w1: "f32[16, 16]",
    w2: "f32[16, 16]",
    w3: "f32[16, 16]",
):
    h0 = F.linear(xs, w0)  # f32[s0, 16]
    layer_edge = layer_edge(h0)  # f32[s0, 16]
    begin1 = F.linear(layer_edge, w1)  # f32[s0, 16]
    silu = F.silu(begin1)  # f32[s0, 16]
    h1 = layer_edge + silu  # f32[s0, 16]
    layer_edge_1 = layer_edge(h1)  # f32[s0, 16]
    layer_again = layer_again([layer_edge_1], [layer_edge, w1], [layer_edge_1, w2])  # (f32[s0, 16],)
    getitem = layer_again[0]  # f32[s0, 16]
    layer_again_1 = layer_again([layer_edge_1], [layer_edge, w1], [getitem, w3])  # (f32[s0, 16],)
    getitem_1 = layer_again_1[0]  # f32[s0, 16]
    return (getitem_1,)  # (f32[s0, 16],)
""")  # fmt: skip
    run(gm, ctx, unfold_layers)
    assert_same_meaning(read(layers(3))[0], gm)
    assert [node.target for node in gm.graph.nodes] == [node.target for node in read(layers(3))[0].graph.nodes]


@pytest.mark.parametrize("source", [layers(2), layers(1), "def graph(xs: 'f32[s0, 16]'):\n    return (xs * 2.0,)\n"])
def test_two_layers_stay(source):
    gm, ctx = read(source)
    before = short(gm)
    assert run(gm, ctx, fold_layers, unfold_layers).changes == []
    assert short(gm) == before


def test_a_switch_compiles_flat(monkeypatch):
    monkeypatch.setenv("MOEFX_LAYERS", "0")
    gm, ctx = read(layers(3))
    assert run(gm, ctx, fold_layers).changes == []


class Called:
    """No function, as what dynamo makes of a function of numpy."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, x):
        return x * self.factor


@pytest.mark.parametrize(("factors", "folded"), [((2.0, 2.0, 2.0), 2), ((2.0, 2.0, 3.0), 0)])
def test_objects_that_are_called(factors, folded):
    gm, ctx = read(layers(3))
    for node, factor in zip(gm.graph.find_nodes(op="call_function", target=torch.nn.functional.silu), factors):
        node.target = Called(factor)
    fold_layers.run(gm, ctx)
    assert len(calls(gm, layer_again)) == folded


# ---- refusals


@pytest.mark.parametrize(("source", "why"), [
    (layers(3, PLAIN + "    buffer.add_(begin{n}.sum())\n", inputs=', buffer: "f32[]"',
            ends="    end = h3 * 1.0\n"), "they write to what they read"),
    (layers(3, PLAIN + "    rows{n} = (h{n} > 0).nonzero()\n", ends="    end = h3 * 1.0\n",
            gives="end, rows1, rows2"), "sizes that only data"),
    (layers(3, ends="    end = h1.add_(1.0)\n", gives="h{count}, end, h2"), "others write to what they give"),
    (layers(3, PLAIN.replace("h{i} +", "w0[0] + h{i} *")), "they share parameters"),
    (layers(3, PLAIN.replace("h{i}", "h0"), gives="h1, h2, h3"), "beside one another"),
    (layers(3, PLAIN + "    wide{n} = h{n}.shape[0] * 2\n",
            ends="".join(f"    end{n} = h3 * wide{n}\n" for n in (1, 2, 3)), gives="end1, end2, end3"),
     "what is no tensor"),
])  # fmt: skip
def test_what_is_looked_at_one_by_one(source, why):
    gm, ctx = read(source)
    result = fold_layers.run(gm, ctx)
    assert result.skipped, [str(kind) for kind in kinds.find(gm).found]
    ((kind, reason),) = result.skipped
    assert kind == "3 equal layers, layers.1 to layers.3"
    assert why in reason
    assert not calls(gm, layer_again)


def test_tables_that_hold_other_numbers():
    inputs = "".join(f', buffer{n}: "i64[16]"' for n in (1, 2, 3))
    source = layers(3, PLAIN.replace("h{i} +", "h{i}[:, buffer{n}] +"), inputs=inputs)
    for differs in (False, True):
        gm, ctx = read(source)
        for node in gm.graph.find_nodes(op="placeholder"):
            if node.name.startswith("buffer"):
                node.meta["held"] = torch.arange(16) + (differs and node.name == "buffer3")
        assert bool(fold_layers.run(gm, ctx).skipped) is differs


# ---- meaning


@pytest.mark.parametrize(("ends", "gives"), [("", "h4"), ("    end = begin1 * begin3\n", "end, h4, begin2")])
def test_unfolded_layers_compute_the_same(ends, gives):
    gm, ctx = read(layers(4, ends=ends, gives=gives))
    before = copy_of(gm)
    run(gm, ctx, fold_layers)
    assert calls(gm, layer_again)
    run(gm, ctx, unfold_layers)
    assert not calls(gm, layer_again)
    assert not calls(gm, layer_edge)
    assert_same_meaning(before, gm)


@pytest.mark.parametrize("turns", ["abababab", "aaabbbab", "abcabcabc"])
def test_kinds_that_take_turns(turns):
    bodies = {"a": PLAIN, "b": PLAIN.replace("silu", "gelu"), "c": PLAIN.replace("+", "*")}
    weights = "".join(f', w{n}: "f32[16, 16]"' for n in range(len(turns) + 1))
    text = "".join(unpacked(bodies[kind]).format(n=n, i=n - 1) for n, kind in enumerate(turns, 1))
    gm, ctx = read(f'def graph(xs: "f32[s0, 16]"{weights}):\n    h0 = F.linear(xs, w0)\n{text}'
                   f"    return (h{len(turns)},)\n")  # fmt: skip
    before = copy_of(gm)
    run(gm, ctx, fold_layers)
    assert len(calls(gm, layer_again)) == sum(turns.count(kind) - 1 for kind in set(turns))
    run(gm, ctx, unfold_layers)
    assert_same_meaning(before, gm)
    assert [node.target for node in gm.graph.nodes] == [node.target for node in before.graph.nodes]


def test_experts_of_all_layers_are_raised_as_those_of_the_first():
    folded, flat = read(layers(3, MIXTURE)), read(layers(3, MIXTURE))
    before = copy_of(folded[0])
    run(*folded, fold_layers, raise_loop)
    assert "r0_route" in short(folded[0])
    assert "r1_" not in short(folded[0])
    run(*folded, unfold_layers)
    run(*flat, raise_loop)
    assert_same_meaning(before, folded[0])
    names = [sorted(re.sub(r"w\d", "w", node.name) for node in gm.graph.nodes if node.name.startswith("r"))
             for gm, _ in (folded, flat)]  # fmt: skip
    assert names[0] == names[1]
    symbols = [str(node.meta["val"].shape[0]) for node in folded[0].graph.nodes if node.name.endswith("_rows")]
    assert len(set(symbols)) == len(symbols), "every layer has rows of its own number"


def test_what_passes_took_from_the_first_is_computed_for_none():
    body = PLAIN.replace("F.silu(begin{n})", "mask * begin{n}")
    gm, ctx = read(layers(3, body).replace("    h0 =", "    mask = torch.exp(xs)\n    h0 ="))
    run(gm, ctx, fold_layers)
    (product,) = [node for node in gm.graph.nodes if node.target is operator.mul]
    product.replace_input_with(*product.args)
    run(gm, ctx, unfold_layers)
    assert "exp" not in short(gm)


def test_memory_of_copies_is_their_own():
    gm, ctx = read(layers(3, MIXTURE))
    run(gm, ctx, fold_layers, raise_loop, unfold_layers)
    known = [node.meta["val"].untyped_storage()._cdata for node in gm.graph.nodes if node.name.endswith("_enter")]
    assert len(set(known)) == len(known) == 3


def test_what_one_layer_is_left_with_others_are_too():
    body = MIXTURE.replace("out{n}_1 = out{n}_0.index_add(0, token{n}_0, rows{n}_0)",
                           "out{n}_1 = out{n}_0.index_add(0, token{n}_0, rows{n}_0.cumsum(0))")  # fmt: skip
    gm, ctx = read(layers(3, body))
    ctx.options = Options(debug=Debug(strict=False))
    run(gm, ctx, fold_layers, raise_loop, refuse_unraised, unfold_layers)
    reason = "the experts of a loop compute different ops (['cumsum', 'mul']) (layers.{})"
    assert ctx.report.left == {f"idx{n}": reason.format(n) for n in (1, 2, 3)}


def test_what_is_refused_is_looked_at_layer_by_layer():
    body = MIXTURE.replace("rows{n}_0)\n", "rows{n}_0.cumsum(0))\n")
    with pytest.raises(pipeline.OptionalPassFailed) as failed:
        Pipeline((given := read(layers(3, body)))[1]).run(given[0])
    assert (failed.value.name, failed.value.refused) == ("fold-layers", True)
    gm, ctx = read(layers(3, body))
    with pytest.raises(RaiseError) as caught:
        Pipeline(ctx, skip=frozenset({"fold-layers"})).run(gm)
    assert str(caught.value.where).startswith("layers.1 to 3")


# ---- seeded faults


def test_a_pass_that_goes_round_the_edges_is_noticed():
    gm, ctx = read(layers(3))
    run(gm, ctx, fold_layers)
    edge = calls(gm, layer_edge)[0]
    edge.replace_all_uses_with(edge.args[0], delete_user_cb=lambda user: user.target is torch.nn.functional.linear or (
        user.target is operator.add))  # fmt: skip
    with pytest.raises(VerifyError, match=r"in and outside of layers\.1"):
        unfold_layers.run(gm, ctx)


def test_where_layers_cannot_be_written_out_all_are_looked_at(monkeypatch):
    def fails(gm, ctx):
        raise NotImplementedError("seeded")

    gm, ctx = read(layers(3, MIXTURE))
    broken = tuple(replace(each, run=fails) if each.name == "unfold-layers" else each for each in pipeline.WHOLE)
    monkeypatch.setattr(pipeline, "WHOLE", broken)
    with pytest.raises(pipeline.OptionalPassFailed) as caught:
        Pipeline(ctx).run(gm)
    again, ctx = read(layers(3, MIXTURE))
    pipe = Pipeline(ctx, skip=frozenset({caught.value.name}))
    ctx.decisions.num_user_outputs = 1
    pipe.run(again)
    assert not {"fold-layers", "unfold-layers"} & {record.name for record in pipe.records}


@pytest.mark.parametrize("fault", ["another input", "forgotten layer"])
def test_two_graphs_are_told_apart(fault):
    gm, ctx = read(layers(3))
    comparison = Comparison(copy_of(gm), ctx)
    run(gm, ctx, fold_layers)
    again = calls(gm, layer_again)[-1]
    if fault == "forgotten layer":
        for part in list(again.users):
            part.replace_all_uses_with(again.args[2][0])
    else:
        given, read_, reads = again.args
        again.args = (given, read_, [reads[0], *calls(gm, layer_again)[0].args[2][1:]])
    run(gm, ctx, unfold_layers)
    with pytest.raises(Exception, match=r"differ|other"):
        comparison.whole(gm, placed=False, exact=True, summed=None)
