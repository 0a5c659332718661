"""join_slices: golden, no-op, refusal, meaning."""

from __future__ import annotations

import pytest
from expecttest import assert_expected_inline

from moefx.axes import MeshSpec
from moefx.errors import CaptureError, RaiseError
from moefx.ir.edit import copy_of
from moefx.ir.level import Level
from moefx.ir.verify import Facts, verify
from moefx.passes import join_slices, raise_grouped, raise_loop, refuse_unraised
from tests.support.graphs import assert_same_meaning, context, graph, short

PARAMS = ", ".join(f'up{e}: "f32[24, 16]", bias{e}: "f32[24]", down{e}: "f32[16, 24]"' for e in range(3))
HEAD = f"""
def graph(x: "f32[s0, 16]", gate: "f32[3, 16]", {PARAMS}):
    topk = torch.topk(F.softmax(F.linear(x, gate), dim=-1), 2, dim=-1)
    weights = topk[0]
    idx = topk[1]
    flat = idx.reshape(-1)
    order = flat.argsort()
    counts = m.bincount(flat, 3)
    rows = x[order // 2]
"""
SPLIT = """
    sizes = counts.tolist()
    parts = rows.split([sizes[0], sizes[1], sizes[2]])
    p0 = parts[0]
    p1 = parts[1]
    p2 = parts[2]
"""
SLICES = """
    ends = counts.cumsum(0).tolist()
    p0 = rows[:ends[0]]
    p1 = rows[ends[0]:ends[1]]
    p2 = rows[ends[1]:ends[2]]
"""
NARROW = """
    n0 = counts[0].item()
    n1 = counts[1].item()
    p0 = rows.narrow(0, 0, n0)
    p1 = rows.narrow(0, n0, n1)
    p2 = rows.narrow(0, n0 + n1, counts[2].item())
"""
EXPERT = "    y{e} = F.linear(F.silu(F.linear(p{e}, up{e}, bias{e})), down{e})\n"
JOINED = "    y = torch.cat([y0, y1, y2])\n"
ASSIGNED = """
    y = torch.empty_like(rows)
    y[:ends[0]] = y0
    y[ends[0]:ends[1]] = y1
    y[ends[1]:ends[2]] = y2
"""
SCORED = "    y = y * weights.reshape(-1)[order].unsqueeze(-1)\n"
ADDED = SCORED + "    return (torch.zeros_like(x).index_add(0, order // 2, y),)\n"
SCATTERED = SCORED + """
    index = (order // 2).reshape(-1, 1).expand(-1, 16)
    return (torch.zeros_like(x).scatter_add(0, index, y),)
"""
INVERSE = "    return ((y[order.argsort()].view(-1, 2, 16) * weights.unsqueeze(-1)).sum(1),)\n"
UNSORTED = """
    pairs = torch.empty_like(y)
    pairs[order] = y
    return (pairs.view(-1, 2, 16).mul(weights.unsqueeze(-1)).sum(dim=1),)
"""
PER_PAIR = """
    pairs = torch.zeros_like(y).index_add(0, order, y)
    return (torch.einsum("tkd,tk->td", pairs.view(-1, 2, 16), weights), pairs.view(-1, 2, 16)[:, 0])
"""


# Every expert adds to the output by its own slice of the order.
CUT_ORDER = """
    ends = counts.cumsum(0).tolist()
    token = order // 2
    t0 = token[:ends[0]]
    t1 = token[ends[0]:ends[1]]
    t2 = token[ends[1]:ends[2]]
    o0 = order[:ends[0]]
    o1 = order[ends[0]:ends[1]]
    o2 = order[ends[1]:ends[2]]
    out0 = torch.zeros_like(x)
"""
SPLIT_ORDER = """
    sizes = counts.tolist()
    parts = order.split([sizes[0], sizes[1], sizes[2]])
    o0 = parts[0]
    o1 = parts[1]
    o2 = parts[2]
    t0 = o0 // 2
    t1 = o1 // 2
    t2 = o2 // 2
    out0 = torch.zeros_like(x)
"""
ADDING = """
    y{e} = F.linear(F.silu(F.linear(x[t{e}], up{e}, bias{e})), down{e}) * weights.flatten()[o{e}].unsqueeze(-1)
    out{next} = out{e}.index_add(0, t{e}, y{e})
"""


def adding(cut=CUT_ORDER, order=(0, 1, 2), tail="    return (out3,)\n"):
    body = "".join(ADDING.format(e=e, next=e + 1) for e in range(3))
    for at, e in enumerate(order):  # out1 adds expert order[0], and so on
        body = body.replace(f"out{at}.index_add(0, t{at}, y{at})", f"out{at}.index_add(0, t_{e}, y_{e})")
    body = body.replace("t_", "t").replace("y_", "y")
    lines = [line for line in body.splitlines() if line]
    head = [line for block in (HEAD, cut) for line in block.splitlines() if line]
    lines = [*head, *sorted(lines, key=lambda line: line.startswith("    out"))]
    return "\n".join(lines) + "\n" + tail


def experts(cut=SPLIT, expert=EXPERT, joined=JOINED, tail=ADDED):
    body = "".join(expert.format(e=e) for e in range(3))
    parts = "\n".join(line for block in (HEAD, cut, body, joined, tail) for line in block.splitlines() if line)
    return parts + "\n"


def joined(source):
    gm, mode = graph(source)
    before = copy_of(gm)
    result = join_slices.run(gm, context(mode, ep=1))
    gm.graph.lint()
    return before, gm, mode, result


def raised(source):
    before, gm, mode, _ = joined(source)
    for each in (raise_grouped, raise_loop, refuse_unraised):
        each.run(gm, context(mode, ep=1))
    return before, gm


def test_golden():
    _, gm, _, result = joined(experts())
    assert_expected_inline("\n".join(short(gm).splitlines()[14:]), """\
    y_stack_1 = stack_experts([bias0, bias1, bias2])  # f32[3, 24]
    y_stack = stack_experts([up0, up1, up2])  # f32[3, 24, 16]
    linear = F.linear(x, gate)  # f32[s0, 3]
    softmax = F.softmax(linear, dim=-1)  # f32[s0, 3]
    topk = torch.topk(softmax, 2, dim=-1)  # (f32[s0, 2], i64[s0, 2])
    weights = topk[0]  # f32[s0, 2]
    idx = topk[1]  # i64[s0, 2]
    flat = idx.reshape(-1)  # i64[2*s0]
    order = flat.argsort()  # i64[2*s0]
    counts = m.bincount(flat, 3)  # i64[3]
    floordiv = order // 2  # i64[2*s0]
    rows = x[floordiv]  # f32[2*s0, 16]
    y_linear = m.grouped_linear.default(rows, y_stack, counts, False, y_stack_1)  # f32[2*s0, 24]
    y_silu = F.silu(y_linear)  # f32[2*s0, 24]
    y_linear_1 = m.grouped_linear.default(y_silu, y_stack_2, counts, False)  # f32[2*s0, 16]
    reshape = weights.reshape(-1)  # f32[2*s0]
    getitem_3 = reshape[order]  # f32[2*s0]
    unsqueeze = getitem_3.unsqueeze(-1)  # f32[2*s0, 1]
    y_1 = y_linear_1 * unsqueeze  # f32[2*s0, 16]
    zeros_like = torch.zeros_like(x)  # f32[s0, 16]
    floordiv_1 = order // 2  # i64[2*s0]
    index_add = zeros_like.index_add(0, floordiv_1, y_1)  # f32[s0, 16]
    return (index_add,)  # (f32[s0, 16],)""")
    assert result.changes == ["y: the slices of 3 experts are computed as one"]


def test_noop():
    before, gm, _, result = joined("""
        def graph(x: "f32[s0, 16]", y: "f32[s0, 16]"):
            return (torch.cat([x[:2].relu(), y[2:]]), torch.cat([x, y]))
    """)
    assert short(gm) == short(before)
    assert result.changes == []


@pytest.mark.parametrize(("source", "message"), [
    (experts().replace("F.silu(F.linear(p1", "F.relu(F.linear(p1"), "compute different ops"),
    (experts().replace("cat([y0, y1, y2])", "cat([y1, y0, y2])"), "what is done then is not recognised"),
    (experts().replace("F.linear(p1, ", "F.linear(p1 + p0.mean(), "), "not recognised"),
    (experts().replace("p0, up0", "p0 - p0.mean(0), up0").replace(
        "p1, up1", "p1 - p1.mean(0), up1").replace(
        "p2, up2", "p2 - p2.mean(0), up2"), "mean along dim 0 mixes the rows"),
], ids=["different", "another order", "rows of another", "mixed rows"])  # fmt: skip
def test_refusal(source, message):
    with pytest.raises(RaiseError) as caught:
        joined(source)
    assert message in str(caught.value)
    assert "\n  at: " in str(caught.value)


@pytest.mark.parametrize("source", [
    adding(tail="    return (out3 + out1,)\n"),
    adding().replace("out2.index_add(0, t2, y2)", "out2.index_add(0, t1, y1)"),
    adding().replace("out2.index_add(0, t2, y2)", "out2.index_add(0, t2, y2, alpha=2)"),
    adding().replace("return (out3,)", "out4 = out3.index_add(0, t1, y1)\n    return (out4,)"),
    adding().replace("    out1 = out0", "    more = out0.index_add(0, t0, y0)\n    out1 = more"),
], ids=["read between", "one twice", "scaled", "all, and one more", "the first twice"])  # fmt: skip
def test_sums_that_are_not_of_every_expert_are_refused(source):
    with pytest.raises(RaiseError) as caught:
        raised(source)
    assert "\n  at: " in str(caught.value)


def test_numbers_that_are_used_elsewhere_are_refused():
    with pytest.raises(CaptureError, match="not known before the model runs") as caught:
        raised(experts().replace("index_add(0, order // 2, y)", "index_add(0, order // 2, y) * sizes[0]"))
    assert "\n  at: " in str(caught.value)


def test_rows_that_the_model_returns_are_refused():
    _, gm, mode, _ = joined(experts(tail="    return (y,)\n"))
    with pytest.raises(RaiseError, match="returns rows that stand in the order of their experts"):
        raise_grouped.run(gm, context(mode, ep=1))


@pytest.mark.parametrize("source", [
    experts(),
    experts(SLICES),
    experts(NARROW),
    experts(SLICES, joined=ASSIGNED),
    experts().replace("m.bincount(flat, 3)", "m.one_hot(idx, 3).sum((0, 1))"),
    experts().replace("m.bincount(flat, 3)", "torch.zeros_like(m.one_hot(flat, 3)[:, 0].reshape(-1, 2)[:, :1]"
                      ".expand(-1, 3)).scatter(1, idx, 1).sum(0)"),
    experts().replace("m.bincount(flat, 3)", "torch.histc(flat.float(), bins=3, min=0, max=3).long()"),
    experts().replace("x[order // 2]", "x.repeat_interleave(2, dim=0)[order]"),
    experts(tail=SCATTERED),
    experts(tail=INVERSE),
    experts(tail=UNSORTED),
    experts(tail=PER_PAIR),
    adding(),
    adding(SPLIT_ORDER),
    adding(order=(2, 0, 1)),
], ids=["split", "slices", "narrow", "assigned", "one-hot", "scattered ones", "histc", "repeated", "scattered",
        "inverse", "unsorted", "per pair", "cut order", "split order", "other order"])  # fmt: skip
def test_meaning(source):
    before, gm = raised(source)
    assert not [n for n in gm.graph.nodes if n.target in ("tolist", "item", "split", "_assert_scalar")]
    for rows in (1, 2, 7):
        assert_same_meaning(before, gm, exact=False, s0=rows)
    verify(gm, Level.MOE, Facts(MeshSpec.named({"ep": 1})))
    assert sum("grouped_linear" in str(n.target) for n in gm.graph.nodes) == 2
