"""canonicalize: golden, no-op, refusal, meaning."""

from __future__ import annotations

import operator
import re

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn

from moefx.ir.edit import copy_of
from moefx.passes import canonicalize
from tests.support.graphs import assert_same_meaning, context, graph, short

UNTIDY = """
def graph(x: "f32[s0, 8]", bias: "f32[8]", buffer: "f32[8]"):
    rows = x.size(0)
    width = x.size(1)
    out = x.relu()
    added = out.add_(bias)
    halved = operator.itruediv(added, 2)
    seen = buffer.add_(1.0)
    same = halved.to(torch.float32)
    other = halved.to(torch.float64)
    flat = same.view(rows, width)
    return (flat, other)
"""


def canonical(source):
    gm, mode = graph(source)
    before = copy_of(gm)
    result = canonicalize.run(gm, context(mode, ep=1))
    gm.graph.lint()
    return before, gm, result


def test_golden():
    _, gm, result = canonical(UNTIDY)
    assert_expected_inline(short(gm), """\
def graph(x: "f32[s0, 8]", bias: "f32[8]", buffer: "f32[8]"):
    rows = x.size(0)  # s0
    out = x.relu()  # f32[s0, 8]
    add = out.add(bias)  # f32[s0, 8]
    truediv = add / 2  # f32[s0, 8]
    seen = buffer.add_(1.0)  # f32[8]
    other = truediv.to(torch.float64)  # f64[s0, 8]
    flat = truediv.view(rows, 8)  # f32[s0, 8]
    return (flat, other)  # (f32[s0, 8], f64[s0, 8])
""")
    assert_expected_inline("\n".join(result.changes), """\
add made functional
truediv made functional""")


def test_einsums_have_a_letter_for_every_axis():
    before, gm, _ = canonical("""
        def graph(x: "f32[s0, 3, 8]", w: "f32[8, 4]"):
            y = torch.einsum("... d, d f -> ... f", x, w)
            return (y,)
    """)
    assert "torch.einsum('abd,df->abf', x, w)" in short(gm)
    assert_same_meaning(before, gm, s0=5)


def test_special_methods_are_operators():
    before, gm, _ = canonical("""
        def graph(x: "f32[s0, 8]", idx: "i64[s0]"):
            equal = idx.__eq__(3)
            less = idx.__lt__(2)
            either = equal.__or__(less)
            return (x, either)
        """)
    assert not [n for n in gm.graph.nodes if n.op == "call_method"]
    assert [n.target for n in gm.graph.nodes if n.op == "call_function"] == [operator.eq, operator.lt, operator.or_]
    assert_same_meaning(before, gm)


@pytest.mark.parametrize("choice", [
    "torch.argmax(scores, -1)", "scores.max(dim=-1)[1]", "torch.topk(scores, 1, dim=-1)[1].squeeze(-1)",
])  # fmt: skip
def test_a_single_choice_becomes_a_routing(choice):
    before, gm, result = canonical(f"""
        def graph(x: "f32[s0, 8]", gate: "f32[3, 8]", ids: "i64[s0]"):
            scores = F.linear(x, gate)
            chosen = {choice}
            first = chosen == 0
            second = chosen == 1
            other = ids == 1
            return (first, second, other)
    """)
    assert result.changes == ["chosen is a single choice per token"]
    assert short(gm).split("chosen = ")[1].split("\n", 1)[1] == """\
    unsqueeze = chosen.unsqueeze(-1)  # i64[s0, 1]
    eq = unsqueeze.eq(0)  # bool[s0, 1]
    any_1 = eq.any(-1)  # bool[s0]
    eq_1 = unsqueeze.eq(1)  # bool[s0, 1]
    any_2 = eq_1.any(-1)  # bool[s0]
    other = ids == 1  # bool[s0]
    return (any_1, any_2, other)  # (bool[s0], bool[s0], bool[s0])
"""
    assert_same_meaning(before, gm)


def test_numbers_of_any_origin_that_pick_tokens_are_a_routing():
    before, gm, result = canonical("""
        def graph(x: "f32[s0, 8]", ids: "i64[s0]", labels: "i64[s0]"):
            hashed = ids % 2
            first = torch.where(hashed == 0)
            second = torch.where(hashed == 1)
            padding = torch.where(labels == 0)
            return (x[first[0]], x[second[0]], x[padding[0]])
    """)
    assert result.changes == ["hashed is a single choice per token"]
    assert sum(n.target == "any" for n in gm.graph.nodes) == 2
    assert_same_meaning(before, gm)


ONE_HOT = """
def graph(x: "f32[s0, s1, 8]", scores: "f32[s0, s1, 4]"):
    ids = scores.argmax(-1)
    chosen = torch.nn.functional.one_hot(ids, 4)
    mask = {}
    return (x[mask],)
"""


@pytest.mark.parametrize("mask", ["chosen[:, :, 2].bool()", "chosen.to(torch.bool)[..., 2]", "chosen[..., 2] == 1",
                                  "chosen.float().select(-1, 2) > 0"])  # fmt: skip
def test_a_column_of_one_hot_choices_is_a_comparison(mask):
    before, gm, _ = canonical(ONE_HOT.format(mask))
    assert "one_hot" not in short(gm)
    assert ".eq(2)" in short(gm)
    assert_same_meaning(before, gm, s0=3, s1=5)


@pytest.mark.parametrize("mask", ["chosen[:, :, 2][:, 1].bool()", "chosen[:, 2].bool()", "chosen[..., 2] == 0",
                                  "chosen[:, :, 1:2].bool().squeeze(-1)"])  # fmt: skip
def test_other_parts_of_one_hot_choices_stay(mask):
    before, gm, _ = canonical(ONE_HOT.replace("x[mask]", "mask.nonzero()").format(mask))
    assert "one_hot" in short(gm)
    assert_same_meaning(before, gm, s0=3, s1=5)


def test_equal_views_are_one_and_copies_are_not():
    before, gm, _ = canonical("""
        def graph(x: "f32[s0, 8]", w: "f32[8, 8]"):
            y = F.linear(x, w)
            first = y.view(-1, 4)
            copied = y.t().reshape(-1)
            second = y.view(-1, 4)
            other = y.view(-1, 2)
            y[0] = 1.0
            again = y.t().reshape(-1)
            return (first + second, other, copied, again)
    """)
    assert [n.name for n in gm.graph.nodes if n.target in ("view", "reshape")] == ["first", "copied", "other", "again"]
    assert_same_meaning(before, gm)


def test_a_mask_that_is_turned_again_and_again_is_one():
    before, gm, _ = canonical("""
        def graph(x: "f32[s0, 8]"):
            mask = x > 0
            first, second = ~mask, ~mask
            written = x > 1
            third = ~written
            written[0] = True
            fourth = ~written
            return (first & second, third, fourth)
    """)
    assert sum(n.target is operator.invert for n in gm.graph.nodes) == 3
    assert_same_meaning(before, gm)


def test_noop():
    before, gm, result = canonical("""
        def graph(x: "f32[s0, 8]", w: "f32[4, 8]"):
            rows = ops.aten.sym_size.int(x, 0)
            y = F.linear(x, w).view(rows, 2, 2)
            return (y,)
    """)
    assert short(gm) == short(before)
    assert (result.changes, result.skipped) == ([], [])


def test_refuses_what_another_view_would_see():
    before, gm, result = canonical("""
        def graph(x: "f32[s0, 8]"):
            y = x.relu()
            view = y[:, 0]
            done = y.mul_(2.0)
            return (done, view)
    """)
    assert short(gm) == short(before)
    assert_expected_inline(str(result.skipped), """[('done (done)', 'another view of the tensor is used later')]""")


def test_what_is_written_to_a_whole_tensor_in_another_shape_is_functional():
    before, gm, _ = canonical("""
def graph(x: "f32[s0, 4, 8]", m: "bool[s0, 4]"):
    out = torch.zeros_like(x)
    rows = out.view(-1, 8)
    mine = m.view(-1)
    first = rows.index_put_((mine,), x.view(-1, 8)[mine], True)
    early = out + 1.0
    again = out.view(-1, 8)
    second = again.add_(1.0)
    return (out, early)
""")
    text = short(gm)
    assert "index_put_" not in text
    assert "add_(" not in text
    assert text.count(".view_as(out)") == 2
    assert "again" not in text
    assert_same_meaning(before, gm)


def test_a_part_that_is_written_to_and_read_as_a_whole_stays():
    before, gm, _ = canonical("""
def graph(x: "f32[s0, 4, 8]"):
    out = torch.zeros_like(x)
    part = out[:, 0]
    more = out.view(-1, 8)
    first = part.add_(1.0)
    second = more.mul_(x.view(-1, 8))
    return (out, part)
""")
    assert "part.add_(" in short(gm)
    assert_same_meaning(before, gm)


def test_leaves_effects_on_inputs_alone():
    before, gm, _ = canonical("""
        def graph(x: "f32[s0, 8]", buffer: "f32[8]"):
            view = buffer[:4]
            one = view.add_(1.0)
            two = buffer.mul_(2.0)
            return (x + buffer,)
    """)
    assert short(gm) == short(before)
    assert_same_meaning(before, gm)


def test_meaning():
    before, gm, _ = canonical(UNTIDY)
    assert_same_meaning(before, gm)
    before, gm, _ = canonical("""
        def graph(x: "f32[s0, 8]", counts: "i64[8]"):
            out = x.clone()
            first = out.mul_(2.0)
            view = first[:, ::2]
            total = operator.iadd(view, 1.0)
            return (out, total)
    """)
    assert_same_meaning(before, gm)


def test_tensor_attribute_becomes_an_input():
    gm, mode = graph('def graph(x: "f32[4, 8]"):\n    y = x + 1.0\n    return (y,)')
    gm.table = nn.Parameter(torch.randn(8))
    output = gm.graph.output_node()
    with gm.graph.inserting_before(output):
        read = gm.graph.get_attr("table")
        total = gm.graph.call_function(torch.mul, (output.args[0][0], read))
    output.args = ((total,),)
    result = canonicalize.run(gm, context(mode, ep=1))
    assert result.changes == ["constant const_table lifted"]
    source = gm.graph.find_nodes(op="placeholder")[1].meta["moefx"]
    assert source.kind == "constant"
    assert torch.equal(source.key, gm.table)
    assert not source.key.requires_grad


INDICES = """
def graph(x: "f32[s0, 8]", ids: "i64[s0, 2]", w: "f32[s0, 2]"):
    out = torch.zeros_like(x)
    m0 = ids[:, 0] == 0
    m1 = ids[:, 0] == 1
    read = out[m0]
    sum0 = read + x[m0] * w[m0, 0].unsqueeze(-1)
    out[m0] = sum0
    read_1 = out[m1]
    sum1 = read_1 + x[m1, :] * w[m1, 0, None]
    out[m1] = sum1
    return (out,)
"""


COLUMNS = """
def graph(x: "f32[s0, 8]", g: "f32[s0, 4]", ids: "i64[s0]"):
    gates = g * 2.0
    mine = ids == 1
    one = gates[mine, 1:2]
    same = gates[mine][:, 1:2]
    near = ids % 2
    first = gates[near, :1]
    wide = gates[mine, 1:3]
    own = g[mine][:, 1]
    return (one, same, first, wide, own)
"""


def test_columns_of_rows_have_one_form():
    before, gm, _ = canonical(COLUMNS)
    text = short(gm)
    assert text.count("gates[mine, 1]") == 1
    assert text.count("gates[near, 0]") == 1
    assert text.count(".unsqueeze(1)") == 2
    assert "gates[mine, 1:3]" in text
    assert_same_meaning(before, gm)


def test_a_column_of_picked_rows_is_read_where_nobody_writes():
    before, gm, _ = canonical("""
        def graph(x: "f32[s0, 8]", ids: "i64[s0]"):
            gates = x * 2.0
            mine = ids == 1
            column = gates[mine][:, 1]
            picked = gates[mine]
            kept = picked[:, 2]
            changing = x + 1.0
            rows = changing[mine]
            changing.view(-1)[0] = 5.0
            return (column, kept + 0.0, rows[:, 3])
    """)
    text = short(gm)
    assert "gates[mine, 1]" in text
    assert "gates[mine, 2]" in text
    assert "[:, 3]" in text
    assert_same_meaning(before, gm)


def test_what_rows_are_picked_of_is_computed_once_unless_it_changes():
    before, gm, _ = canonical("""
        def graph(x: "f32[s0, 8]", ids: "i64[s0]"):
            total = x.sum(0)
            first, second = (x / total)[ids == 1], (x / total)[ids == 2]
            changing = x.abs().sum(0)
            third = (x * changing)[ids == 1]
            changing.view(-1)[0] = 3.0
            fourth = (x * changing)[ids == 2]
            return (first, second, third, fourth)
    """)
    assert sum(n.target is operator.truediv for n in gm.graph.nodes) == 1
    assert sum(n.target is operator.mul for n in gm.graph.nodes) == 2
    assert_same_meaning(before, gm)


def test_indices_have_one_form():
    before, gm, _ = canonical(INDICES)
    text = short(gm)
    assert text.count(".index_put(") == 2
    assert "setitem" not in text
    assert "out[" not in text
    assert "x[m1]" in text or re.search(r"x\[any_\d\]", text)
    assert text.count("w.select(-1, 0)") == 1
    assert_same_meaning(before, gm)


def test_places_in_a_column_are_on_one_axis():
    before, gm, _ = canonical("""
def graph(x: "f32[s0, 8]", ids: "i64[s0]"):
    out = torch.zeros_like(x)
    places = torch.nonzero(ids == 1)
    rows = x[places]
    out[places] = rows * 2.0
    return (out, rows)
""")
    text = short(gm)
    assert text.count("places.squeeze(1)") == 1
    assert "x[places]" not in text
    assert "setitem(out, squeeze, squeeze_1)" in text
    assert_same_meaning(before, gm)


def test_what_is_added_by_a_mask_may_be_of_lower_precision():
    before, gm, _ = canonical(INDICES.replace("sum0 = read + x[m0] * w[m0, 0].unsqueeze(-1)", "scores = w[m0, 0]\n"
                                              "    low0 = x[m0].bfloat16()\n    sum0 = low0 + read"))  # fmt: skip
    assert short(gm).count(".index_put(") == 2
    assert_same_meaning(before, gm)


@pytest.mark.parametrize("change", [
    ("read + x[m0]", "read - x[m0]"),
    ("    out[m0] = sum0", "    out[m0] = sum0\n    y = read * 2.0\n    out[m0] = y"),
    ("sum0 = read + x[m0] * w[m0, 0].unsqueeze(-1)", "sum0 = read + 1.0"),
    ("sum0 = read + x[m0] * w[m0, 0].unsqueeze(-1)", "sum0 = torch.add(read, x[m0], alpha=2)"),
    ("    out[m0] = sum0", "    out[m1] = x[m1]\n    out[m0] = sum0"),
    ("    out[m0] = sum0", "    out.add_(1.0)\n    out[m0] = sum0"),
    ("    out[m0] = sum0", "    view = out[:, :4]\n    view.add_(1.0)\n    out[m0] = sum0"),
], ids=["no sum", "read twice", "a number", "scaled", "assigned between", "changed between",
        "a view changed"])  # fmt: skip
def test_what_is_no_addition_by_a_mask_stays(change):
    before, gm, _ = canonical(INDICES.replace(*change))
    assert short(gm).count(".index_put(") + short(gm).count(".index_put_(") == 1
    assert_same_meaning(before, gm)



NO_GRAD = """
def graph(x: "f32[s0, 8]", gate: "f32[3, 8]"):
    off = torch._C._set_grad_enabled(False)
    fixed = F.linear(x, gate)
    twice = F.linear(fixed, gate.t().contiguous())
    on = torch._C._set_grad_enabled(True)
    return (F.linear(x, gate), twice)
"""


def test_what_runs_without_gradients_reads_detached_tensors():
    before, gm, result = canonical(NO_GRAD)
    assert_expected_inline(short(gm), """\
def graph(x: "f32[s0, 8]", gate: "f32[3, 8]"):
    detach = gate.detach()  # f32[3, 8]
    fixed = F.linear(x, detach)  # f32[s0, 3]
    t = detach.t()  # f32[8, 3]
    contiguous = t.contiguous()  # f32[8, 3]
    twice = F.linear(fixed, contiguous)  # f32[s0, 8]
    linear = F.linear(x, gate)  # f32[s0, 3]
    return (linear, twice)  # (f32[s0, 3], f32[s0, 8])
""")
    assert result.changes == ["1 tensors are detached, as gradients are off where they are read"]
    assert_same_meaning(before, gm)


def test_tensors_of_literals_are_inputs():
    _, gm, result = canonical("""
        def graph(x: "f32[s0, 2]"):
            scale = torch.tensor([1.0, 2.0])
            return (x * scale,)
        """)
    assert_expected_inline(short(gm), """\
def graph(x: "f32[s0, 2]", const_scale: "f32[2]"):
    mul = x * const_scale  # f32[s0, 2]
    return (mul,)  # (f32[s0, 2],)
""")
    (constant,) = [n.meta["moefx"].key for n in gm.graph.find_nodes(op="placeholder") if n.name == "const_scale"]
    assert constant.tolist() == [1.0, 2.0]
    assert result.changes == ["constant const_scale lifted"]


def test_ids_among_tokens_whose_number_depends_on_data():
    """Their number may be one, which says nothing of a single choice."""
    before, gm, _ = canonical("""
        def graph(x: "f32[s0, 8]", ids: "i64[s0]"):
            token = torch.where(ids == 0)[0]
            inner = F.softmax(x[token], dim=-1).max(-1)[1]
            first = (inner == 0).nonzero()
            second = (inner == 1).nonzero()
            return (first, second)
        """)
    assert_same_meaning(before, gm)
