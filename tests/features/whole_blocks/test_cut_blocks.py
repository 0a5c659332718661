"""cut_blocks: golden, no-op, what is left whole and why, the same meaning; also through differentiation and order."""

# ruff: noqa: E501 (golden texts)

from __future__ import annotations

import pytest
from expecttest import assert_expected_inline

from moefx import rooms
from moefx.analysis.checking.compare import Comparison
from moefx.compiler import pipeline
from moefx.compiler.pipeline import place_experts, refresh
from moefx.errors import UnsupportedUse
from moefx.features.whole_blocks import cut_blocks
from moefx.ir.edit import copy_of
from moefx.options import Options
from moefx.passes import chunk
from tests.support.graphs import assert_same_meaning, context, graph, short

INPUTS = """
def graph(x: "f32[s0, s1, 16]", x_mask: "f32[s0, s1]", q: "f32[16, 16]", gate: "f32[4, 16]", up: "f32[4, 16, 16]", head: "f32[50, 16]"):
"""
MIXTURE = """
    tokens{n} = {x}.view(x.size(0) * x.size(1), 16)
    logits{n} = F.linear(tokens{n}, gate)
    topk{n} = torch.topk(logits{n}.softmax(-1), 2, dim=-1)
    weights{n} = topk{n}[0]
    idx{n} = topk{n}[1]
    route{n} = m.route.default(idx{n}, 4)
    perm{n} = route{n}[0]
    counts{n} = route{n}[1]
    up_e{n} = expert_parameter(up, {n})
    rows{n} = m.dispatch.default(tokens{n}, perm{n}, 2)
    inside{n} = enter(rows{n}, counts{n}, -1, -1, {n})
    out{n} = m.grouped_linear.default(inside{n}, up_e{n}, counts{n}, False)
    outside{n} = leave(out{n}, counts{n}, -1, -1, {n})
    y{n} = m.combine.default(outside{n}, perm{n}, 2, weights{n})
    h{n} = {x} + y{n}.view_as({x})
"""
ATTENTION = """
    k{n} = F.linear({x}, q) * x_mask.unsqueeze(-1)
    a{n} = F.scaled_dot_product_attention(k{n}.unsqueeze(1), k{n}.unsqueeze(1), k{n}.unsqueeze(1)).squeeze(1)
"""
ONE = INPUTS + ATTENTION.format(n=0, x="x") + MIXTURE.format(n=0, x="a0") + "    return (h0,)\n"
TWO = (INPUTS + ATTENTION.format(n=0, x="x") + MIXTURE.format(n=0, x="a0") + ATTENTION.format(n=1, x="h0")
       + MIXTURE.format(n=1, x="a1"))  # fmt: skip
PLAIN = TWO + "    return (F.linear(h1, head),)\n"


def cut(source, n=2, *, whole_blocks=True, samples=4):
    """(the graph before, and after, what the pass said) for a call with so many samples."""
    gm, mode = graph(source)
    before, ctx = copy_of(gm), context(mode, Options.named(chunks=n, whole_blocks=whole_blocks))
    ctx.sizes[str(next(iter(gm.graph.nodes)).meta["val"].shape[0])] = samples
    chunk.run(gm, ctx)
    refresh(gm, ctx)
    result = cut_blocks.run(gm, ctx)
    gm.graph.lint()
    gm.recompile()
    refresh(gm, ctx)
    return before, gm, result


def test_golden():
    _, gm, result = cut(ONE)
    assert_expected_inline(
        short(gm),
        """\
def graph(
    x: "f32[s0, s1, 16]",
    x_mask: "f32[s0, s1]",
    q: "f32[16, 16]",
    gate: "f32[4, 16]",
    up: "f32[4, 16, 16]",
    head: "f32[50, 16]",
):
    sym_size_int = ops.aten.sym_size.int(x, 0)  # s0
    samples = m.num_chunk_rows.default(x, 0, 0, 2)  # u0
    sub_1 = sym_size_int - samples  # s0 - u0
    x_parts = x.split([samples, sub_1], 0)  # (f32[u0, s1, 16], f32[s0 - u0, s1, 16])
    x_0of2 = x_parts[0]  # f32[u0, s1, 16]
    x_1of2 = x_parts[1]  # f32[s0 - u0, s1, 16]
    linear_c0 = F.linear(x_0of2, q)  # f32[u0, s1, 16]
    linear_c1 = F.linear(x_1of2, q)  # f32[s0 - u0, s1, 16]
    sym_size_int_1 = ops.aten.sym_size.int(x, 1)  # s1
    mul_1 = samples * sym_size_int_1  # s1*u0
    mul_2 = sub_1 * sym_size_int_1  # s1*(s0 - u0)
    mul_3 = sym_size_int_1 * sym_size_int  # s0*s1
    unsqueeze = x_mask.unsqueeze(-1)  # f32[s0, s1, 1]
    unsqueeze_parts = unsqueeze.split([samples, sub_1], 0)  # (f32[u0, s1, 1], f32[s0 - u0, s1, 1])
    unsqueeze_0of2 = unsqueeze_parts[0]  # f32[u0, s1, 1]
    unsqueeze_1of2 = unsqueeze_parts[1]  # f32[s0 - u0, s1, 1]
    k0_c0 = linear_c0 * unsqueeze_0of2  # f32[u0, s1, 16]
    k0_c1 = linear_c1 * unsqueeze_1of2  # f32[s0 - u0, s1, 16]
    unsqueeze_1_c0 = k0_c0.unsqueeze(1)  # f32[u0, 1, s1, 16]
    unsqueeze_1_c1 = k0_c1.unsqueeze(1)  # f32[s0 - u0, 1, s1, 16]
    unsqueeze_2_c0 = k0_c0.unsqueeze(1)  # f32[u0, 1, s1, 16]
    unsqueeze_2_c1 = k0_c1.unsqueeze(1)  # f32[s0 - u0, 1, s1, 16]
    unsqueeze_3_c0 = k0_c0.unsqueeze(1)  # f32[u0, 1, s1, 16]
    unsqueeze_3_c1 = k0_c1.unsqueeze(1)  # f32[s0 - u0, 1, s1, 16]
    scaled_dot_product_attention_c0 = F.scaled_dot_product_attention(unsqueeze_1_c0, unsqueeze_2_c0, unsqueeze_3_c0)  # f32[u0, 1, s1, 16]
    scaled_dot_product_attention_c1 = F.scaled_dot_product_attention(unsqueeze_1_c1, unsqueeze_2_c1, unsqueeze_3_c1)  # f32[s0 - u0, 1, s1, 16]
    a0_c0 = scaled_dot_product_attention_c0.squeeze(1)  # f32[u0, s1, 16]
    a0_c1 = scaled_dot_product_attention_c1.squeeze(1)  # f32[s0 - u0, s1, 16]
    tokens0_c0 = a0_c0.view(mul_1, 16)  # f32[s1*u0, 16]
    tokens0_c1 = a0_c1.view(mul_2, 16)  # f32[s1*(s0 - u0), 16]
    logits0_c0 = F.linear(tokens0_c0, gate)  # f32[s1*u0, 4]
    logits0_c1 = F.linear(tokens0_c1, gate)  # f32[s1*(s0 - u0), 4]
    softmax_c0 = logits0_c0.softmax(-1)  # f32[s1*u0, 4]
    softmax_c1 = logits0_c1.softmax(-1)  # f32[s1*(s0 - u0), 4]
    topk0_c0 = torch.topk(softmax_c0, 2, dim=-1)  # (f32[s1*u0, 2], i64[s1*u0, 2])
    topk0_c1 = torch.topk(softmax_c1, 2, dim=-1)  # (f32[s1*(s0 - u0), 2], i64[s1*(s0 - u0), 2])
    weights0_c0 = topk0_c0[0]  # f32[s1*u0, 2]
    weights0_c1 = topk0_c1[0]  # f32[s1*(s0 - u0), 2]
    idx0_c0 = topk0_c0[1]  # i64[s1*u0, 2]
    idx0_c1 = topk0_c1[1]  # i64[s1*(s0 - u0), 2]
    route0_c0 = m.route.default(idx0_c0, 4)  # (i64[2*s1*u0], i64[4])
    route0_c1 = m.route.default(idx0_c1, 4)  # (i64[2*s1*(s0 - u0)], i64[4])
    perm0_c0 = route0_c0[0]  # i64[2*s1*u0]
    perm0_c1 = route0_c1[0]  # i64[2*s1*(s0 - u0)]
    counts0_c0 = route0_c0[1]  # i64[4]
    counts0_c1 = route0_c1[1]  # i64[4]
    up_e0 = expert_parameter(up, 0)  # f32[4, 16, 16]
    rows0_c0 = m.dispatch.default(tokens0_c0, perm0_c0, 2)  # f32[2*s1*u0, 16]
    rows0_c1 = m.dispatch.default(tokens0_c1, perm0_c1, 2)  # f32[2*s1*(s0 - u0), 16]
    inside0_c0 = enter(rows0_c0, counts0_c0, -1, -1, 0)  # f32[2*s1*u0, 16]
    inside0_c1 = enter(rows0_c1, counts0_c1, -1, -1, 1)  # f32[2*s1*(s0 - u0), 16]
    out0_c0 = m.grouped_linear.default(inside0_c0, up_e0, counts0_c0, False)  # f32[2*s1*u0, 16]
    out0_c1 = m.grouped_linear.default(inside0_c1, up_e0, counts0_c1, False)  # f32[2*s1*(s0 - u0), 16]
    outside0_c0 = leave(out0_c0, counts0_c0, -1, -1, 0)  # f32[2*s1*u0, 16]
    outside0_c1 = leave(out0_c1, counts0_c1, -1, -1, 1)  # f32[2*s1*(s0 - u0), 16]
    y0_c0 = m.combine.default(outside0_c0, perm0_c0, 2, weights0_c0)  # f32[s1*u0, 16]
    y0_c1 = m.combine.default(outside0_c1, perm0_c1, 2, weights0_c1)  # f32[s1*(s0 - u0), 16]
    view_as_c0 = y0_c0.view_as(a0_c0)  # f32[u0, s1, 16]
    view_as_c1 = y0_c1.view_as(a0_c1)  # f32[s0 - u0, s1, 16]
    h0_c0 = a0_c0 + view_as_c0  # f32[u0, s1, 16]
    h0_c1 = a0_c1 + view_as_c1  # f32[s0 - u0, s1, 16]
    h0_all = torch.cat([h0_c0, h0_c1], 0)  # f32[s0, s1, 16]
    return (h0_all,)  # (f32[s0, s1, 16],)
""",
    )
    assert_expected_inline("; ".join(result.changes), """16 values of 1 regions in 2 parts of the batch""")


@pytest.mark.parametrize("n", [2, 3, 5])
def test_same_meaning(n):
    before, gm, result = cut(PLAIN, n, samples=6)
    assert not result.skipped
    assert_same_meaning(before, gm, exact=False, double=True)
    assert_same_meaning(before, gm, exact=False, double=True, s0=1)


DENSE = (INPUTS + MIXTURE.format(n=0, x="x") + "    a1 = F.silu(F.linear(h0, q))" + MIXTURE.format(n=1, x="a1")
         + "    return (F.linear(h1, head), logits1)\n")  # fmt: skip


@pytest.mark.parametrize("n", [2, 3])
def test_one_sample_is_cut_along_its_sequence(n):
    """Of other batches in the same way."""
    before, gm, result = cut(DENSE, n, samples=1)
    assert not result.skipped
    assert result.changes[0].endswith(f"2 regions in {n} parts of the sequence")
    joined = [line.split("=")[0].strip() for line in short(gm).splitlines() if "torch.cat" in line]
    assert joined == ["logits1_all", "h1_all"]
    for sizes in ({"s0": 1}, {}, {"s1": 1}):
        assert_same_meaning(before, gm, exact=False, double=True, **sizes)


@pytest.mark.parametrize("sizes", ["s0, s1", "1, 6"])
def test_attention_needs_the_whole_sequence(sizes):
    """What it reads is computed part by part, and what reads it."""
    before, gm, result = cut(PLAIN.replace("s0, s1", sizes), samples=1)
    assert [reason for _, reason in result.skipped] == [
        "all parts of the sequence meet in scaled_dot_product_attention_1: it mixes positions"]  # fmt: skip
    text = short(gm)
    assert "k1_c1 =" in text
    assert "a1_c1 =" in text
    assert " k0_c1" not in text
    assert_same_meaning(before, gm, exact=False, double=True)


@pytest.mark.parametrize(("samples", "attends"), [(4, []), (1, ["k1_all"])])
def test_what_is_put_together_between_layers(samples, attends):
    """What attention reads of the whole sequence, once, however it is viewed. What is computed beside experts from what
    these take is in parts."""
    source = PLAIN.replace("y0.view_as", "(torch.zeros_like(tokens0) + y0).view_as")
    source = source.replace("y1.view_as", "(torch.zeros_like(tokens1) + y1).view_as")
    _, gm, _ = cut(source, samples=samples)
    joined = [line.split("=")[0].strip() for line in short(gm).splitlines() if "torch.cat" in line]
    assert joined == [*attends, "h1_all"]


def test_what_is_read_whole_in_two_views_is_put_together_once():
    before, gm, _ = cut(TWO + "    return (h1, h1.view(-1, 16).float())\n")
    assert short(gm).count("torch.cat(") == 1
    assert_same_meaning(before, gm, exact=False)


def test_logits_are_computed_once():
    _, gm, _ = cut(PLAIN)
    assert short(gm).count(", head)") == 1


def test_no_op():
    _, gm, result = cut(PLAIN, whole_blocks=False)
    assert not result.changes
    assert "k0_c0" not in short(gm)


def between(text):
    """What a second layer reads is `m1`."""
    source = PLAIN.replace("    k1 =", f"    {text}\n    k1 =").replace("F.linear(h0, q)", "F.linear(m1, q)")
    return cut(source)


def test_what_mixes_samples_reads_all_of_them():
    before, gm, result = between("m1 = h0 - h0.mean(0)")
    assert_same_meaning(before, gm, exact=False, double=True)
    assert "mean = h0_all.mean(0)" in short(gm)
    assert "m1_c1 = h0_c1 - mean" in short(gm)
    assert [reason for _, reason in result.skipped] == ["all parts of the batch meet in mean: it mixes samples"]


@pytest.mark.parametrize("text", [
    "m1 = h0.transpose(1, 2).reshape(h0.size())", "m1 = h0 * torch.ones(h0.size())", "m1 = h0.reshape_as(x)"])
def test_who_reads_all_sizes_of_a_tensor_gets_those_of_the_part(text):
    before, gm, result = between(text)
    assert not result.skipped
    assert_same_meaning(before, gm, exact=False, double=True)
    assert short(gm).count("torch.cat(") == 1


@pytest.mark.parametrize(("text", "why"), [
    ("m1 = F.dropout(h0, 0.5)", "m1: it draws random numbers"),
    ("m1 = h0 * h0.softmax(0)", "softmax_1: it mixes samples"),
    ("m1 = h0.flip(0)", "m1: it mixes samples"),
    ("m1 = torch.einsum('bsd,csd->bsd', h0, h0)", "m1: it mixes samples"),
])  # fmt: skip
def test_a_seam_is_named_and_the_cut_goes_on_behind_it(text, why):
    before, gm, result = between(text)
    assert [reason for _, reason in result.skipped] == [f"all parts of the batch meet in {why}"]
    assert "torch.cat([h0_c0, h0_c1]" in short(gm)
    assert "h1_c1" in short(gm)
    if "dropout" not in text:
        assert_same_meaning(before, gm, exact=False, double=True)


@pytest.mark.parametrize("sizes", ["3, 5", "s0, s1"])
def test_rows_that_data_choose_stay_whole(sizes):
    """Of a batch of 3 they are no multiple, whatever a third of them is."""
    text = "m1 = h0 - F.linear(h0[h0.sum(-1) > 0], q).sum(0)"
    source = PLAIN.replace("    k1 =", f"    {text}\n    k1 =").replace("F.linear(h0, q)", "F.linear(m1, q)")
    before, gm, result = cut(source.replace("s0, s1", sizes))
    assert result.changes[0].endswith("2 regions in 2 parts of the batch")
    assert [reason for _, reason in result.skipped] == ["all parts of the batch meet in getitem: it mixes samples"]
    assert_same_meaning(before, gm, exact=False, double=True)


def test_samples_of_a_size_that_data_choose_stay_whole():
    before, gm, _ = between("""rows = h0[:, h0.sum((0, 2)) > 0]
    flat = F.linear(rows, q).flatten(0, 1) + rows.flatten(0, 1).cumsum(0)
    m1 = h0 + flat.view(x.size(0), -1, 16).sum(1, keepdim=True)""")
    assert "flat_c0" not in short(gm)
    assert "h1_c0" in short(gm)
    assert_same_meaning(before, gm, exact=False, double=True)


def test_a_number_of_rows_that_is_written_down_is_that_of_the_part():
    source = PLAIN.replace("s0, s1", "3, 5").replace("x.size(0) * x.size(1)", "15")
    assert "view(15, 16)" in source
    before, gm, result = cut(source)
    assert not result.skipped
    assert_same_meaning(before, gm, exact=False, double=True)


@pytest.mark.parametrize("text", [
    "m1 = h0 + F.linear((h0.unsqueeze(1) - h0.unsqueeze(2)).view(x.size(0) * x.size(1) * x.size(1), 16), q)"
    ".view(x.size(0), -1, 16).mean(1, keepdim=True)",
    "m1 = F.linear(F.pad(h0, (0, 0, 0, 1)).view(x.size(0) * (x.size(1) + 1), 16), q)"
    ".view(x.size(0), x.size(1) + 1, 16)[:, 1:]"], ids=["power", "sum"])  # fmt: skip
def test_a_multiple_of_the_batch_by_a_polynomial(text):
    before, gm, result = between(text)
    assert not result.skipped
    assert short(gm).count("torch.cat(") == 1
    assert_same_meaning(before, gm, exact=False, double=True)


def test_samples_that_lie_one_in_another_are_cut():
    source = PLAIN.replace("    k1 =", "    m1 = h0.transpose(0, 1)\n    k1 =").replace(
        "F.linear(h0, q)", "F.linear(m1, q)"
    )
    source = source.replace("q) * x_mask.unsqueeze(-1)\n    a1", "q)\n    a1").replace("a1.view(", "a1.reshape(")
    before, gm, result = cut(source)
    assert [reason for _, reason in result.skipped] == [
        "all parts of the batch meet in scaled_dot_product_attention_1: it mixes samples"]  # fmt: skip
    assert "h1_c1" in short(gm)
    assert_same_meaning(before, gm, exact=False, double=True)


def test_a_region_that_is_not_cut_is_named():
    source = ONE.replace("    return (h0,)", "    m1 = F.pad(h0.view(x.size(0) * x.size(1), 16), (0, 0, 0, 1))"
                         + MIXTURE.format(n=1, x="m1").replace("m1.view(x.size(0) * x.size(1), 16)", "m1")
                         + "    return (h1,)")  # fmt: skip
    before, gm, result = cut(source)
    assert [reason for _, reason in result.skipped] == [
        "region 1 is not cut with the batch: m1: it mixes samples"]  # fmt: skip
    assert_same_meaning(before, gm, exact=False, double=True)


@pytest.mark.parametrize("samples", [4, pytest.param(1, marks=pytest.mark.full)])
def test_through_placement_and_differentiation(samples):
    gm, mode = graph(PLAIN)
    ctx = context(mode, Options.named(chunks=2, whole_blocks=True, scheduler="heuristic"), ep=2)
    ctx.sizes[str(next(iter(gm.graph.nodes)).meta["val"].shape[0])] = samples
    comparison = Comparison(gm, ctx)
    for each in (chunk.run, cut_blocks.run, place_experts.run):
        each(gm, ctx)
        refresh(gm, ctx)
    step = pipeline.differentiated(gm, ctx)
    step.note_sources(gm)
    comparison.step(step, exact=False)


@pytest.mark.parametrize("chunks", [None, 1])
def test_parts_are_chunks(chunks):
    with pytest.raises(UnsupportedUse, match="whole_blocks"):
        rooms.check(Options.named(whole_blocks=True, chunks=chunks))
