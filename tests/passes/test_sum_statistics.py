"""sum_statistics: golden, no-op, what is left alone, meaning."""

from __future__ import annotations

import pytest
from expecttest import assert_expected_inline

from moefx.analysis.checking.compare import Comparison
from moefx.compiler.pipeline import refresh
from moefx.errors import VerifyError
from moefx.ir.edit import copy_of
from moefx.passes import sum_statistics
from tests.support.graphs import context, graph, short

COUNTING = """
def graph(x: "f32[s0, 16]", gate: "f32[4, 16]", buffer: "f32[4]"):
    topk = torch.topk(F.linear(x, gate), 2, dim=-1)
    values = topk[0]
    idx = topk[1]
    seen = torch.bincount(idx.reshape(-1), minlength=4).float()
    added = buffer.add_(seen)
    return (values,)
"""


def summed(source, **axes):
    gm, mode = graph(source, frozen=("gate",))
    before, ctx = copy_of(gm), context(mode, **axes)
    result = sum_statistics.run(gm, ctx)
    gm.graph.lint()
    refresh(gm, ctx)
    return before, gm, result, ctx


def test_golden():
    _, gm, result, _ = summed(COUNTING, dp=2, ep=2)
    assert_expected_inline(short(gm), """\
def graph(x: "f32[s0, 16]", gate: "f32[4, 16]", buffer: "f32[4]"):
    clone = buffer.clone()  # f32[4]
    linear = F.linear(x, gate)  # f32[s0, 4]
    topk = torch.topk(linear, 2, dim=-1)  # (f32[s0, 2], i64[s0, 2])
    values = topk[0]  # f32[s0, 2]
    idx = topk[1]  # i64[s0, 2]
    reshape = idx.reshape(-1)  # i64[2*s0]
    bincount = torch.bincount(reshape, minlength=4)  # i64[4]
    seen = bincount.float()  # f32[4]
    added = buffer.add_(seen)  # f32[4]
    sum_statistic_default = m.sum_statistic.default(clone, buffer, 'dp+ep')  # f32[4]
    copy_ = buffer.copy_(sum_statistic_default)  # f32[4]
    return (values,)  # (f32[s0, 2],)
""")
    assert result.changes == ["buffer is summed over dp+ep"]


def test_what_is_read_afterwards_is_still_the_ranks_own():
    source = COUNTING.replace("return (values,)", "view = buffer[1]\n    y = values * view\n    return (y,)")
    before, gm, _, ctx = summed(source, dp=2, ep=2)
    assert short(gm).index("y = ") < short(gm).index("sum_statistic")
    Comparison(before, ctx).whole(gm, placed=True, exact=False)


@pytest.mark.parametrize(("source", "axes"), [
    (COUNTING, {"dp": 1, "ep": 1}),
    (COUNTING.replace("buffer.add_(seen)", "buffer + seen"), {"dp": 2, "ep": 2}),
    (COUNTING.replace("buffer.add_(seen)", "buffer.add_(x.sum())"), {"dp": 2, "ep": 2}),
], ids=["one rank", "read only", "not of the routing"])  # fmt: skip
def test_noop(source, axes):
    before, gm, result, _ = summed(source, **axes)
    assert short(gm) == short(before)
    assert result.changes == []


@pytest.mark.parametrize("axes", [{"ep": 1}, {"ep": 2}, {"dp": 2, "ep": 2}])
def test_meaning(axes):
    before, gm, _, ctx = summed(COUNTING, **axes)
    Comparison(before, ctx).whole(gm, placed=True, exact=False)


def test_wrong_axis_changes_the_meaning():
    before, gm, _, ctx = summed(COUNTING, dp=2, ep=2)
    node = next(n for n in gm.graph.nodes if "sum_statistic" in str(n.target))
    node.args = (*node.args[:2], "ep")
    with pytest.raises(VerifyError, match="the value of buffer differs"):
        Comparison(before, ctx).whole(gm, placed=True, exact=False)


@pytest.mark.parametrize("write", [
    "buffer.copy_(0.9 * buffer + 0.1 * seen)", "buffer.lerp_(seen, 0.1)", "buffer.add_((seen - buffer) * 0.1)",
    "buffer.mul_(0.9).add_(seen)",
])  # fmt: skip
def test_an_average_that_fades_is_each_ranks_own(write):
    source = COUNTING.replace("buffer.add_(seen)", write)
    before, gm, result, _ = summed(source, dp=2, ep=2)
    assert not result.changes
    assert short(gm) == short(before)


def test_a_correction_by_signs_is_summed():
    source = COUNTING.replace("buffer.add_(seen)", "buffer.add_(0.1 * (seen.mean() - seen).sign())")
    _, _, result, _ = summed(source, dp=2, ep=2)
    assert result.changes == ["buffer is summed over dp+ep"]


def test_counts_that_are_filled_in_one_by_one_are_summed():
    source = COUNTING.replace("seen = torch.bincount(idx.reshape(-1), minlength=4).float()", "\n    ".join(
        ["seen = torch.zeros(4)", *(f"put{e} = operator.setitem(seen, {e}, (idx == {e}).sum())" for e in range(4))]))
    before, gm, result, ctx = summed(source, dp=2, ep=2)
    assert result.changes == ["buffer is summed over dp+ep"]
    Comparison(before, ctx).whole(gm, placed=True, exact=False)


@pytest.mark.parametrize("write", [
    "buffer.copy_(seen)", "buffer.zero_().add_(seen)", "operator.setitem(buffer, slice(None), seen)",
    "buffer.index_copy_(0, torch.tensor([0, 1, 2, 3]), seen)", "buffer.add_(seen).masked_fill_(buffer > 9.0, 0.0)",
    "buffer[1:].copy_(seen[1:])", "buffer.scatter_(0, torch.tensor([0, 2]), 1.0)",
    "buffer.copy_(torch.maximum(buffer, seen))",
])  # fmt: skip
def test_what_is_put_over_what_was_there_is_each_ranks_own(write):
    source = COUNTING.replace("buffer.add_(seen)", write)
    before, gm, result, _ = summed(source, dp=2, ep=2)
    assert not result.changes
    assert short(gm) == short(before)


@pytest.mark.parametrize("write", [
    "buffer.copy_(buffer + seen)", "buffer.view(2, 2).add_(seen.view(2, 2))", "buffer[1:].add_(seen[1:])",
    "operator.setitem(buffer, 1, buffer[1] + seen[1])", "buffer.index_put_([torch.tensor([1])], seen[1:2], True)",
    "operator.iadd(buffer, seen)", "buffer.index_put_([torch.tensor([1])], seen[1:2], accumulate=True)",
    "buffer.scatter_(0, torch.tensor([0, 2]), seen[:2], reduce='add')", "buffer.detach().add_(seen)",
])  # fmt: skip
def test_every_way_to_add_is_summed(write):
    before, gm, result, ctx = summed(COUNTING.replace("buffer.add_(seen)", write), dp=2, ep=2)
    assert result.changes == ["buffer is summed over dp+ep"]
    Comparison(before, ctx).whole(gm, placed=True, exact=False)
