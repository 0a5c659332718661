"""group_keys: golden, meaning, and what it must leave alone."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from expecttest import assert_expected_inline

from moefx import _torch_compat as compat
from moefx.ir.edit import copy_of
from moefx.ir.op import value
from moefx.passes import group_keys
from tests.support.graphs import assert_same_meaning, context, graph, short

TEXT = '''
def graph(x: "f32[s0, 4, s1, 8]", x_k: "f32[s0, 2, s1, 8]", x_v: "f32[s0, 2, s1, 8]"):
    b = x.size(0)
    n = x.size(2)
    k_1 = x_k[:, :, None, :, :]
    k_2 = k_1.expand(b, 2, 2, n, 8)
    k_3 = k_2.reshape(b, 4, n, 8)
    v_1 = x_v.unsqueeze(2)
    v_2 = v_1.expand(b, 2, 2, n, 8)
    v_3 = v_2.reshape(b, 4, n, 8)
    y = F.scaled_dot_product_attention(x, k_3, v_3, None, 0.0, True)
    return (y,)
'''


def rewritten(text):
    gm, mode = graph(text)
    before = copy_of(gm)
    result = group_keys.run(gm, context(mode, ep=2))
    gm.graph.lint()
    return before, gm, result


def test_golden():
    before, gm, result = rewritten(TEXT)
    assert_expected_inline(short(gm), """\
def graph(x: "f32[s0, 4, s1, 8]", x_k: "f32[s0, 2, s1, 8]", x_v: "f32[s0, 2, s1, 8]"):
    y = F.scaled_dot_product_attention(x, x_k, x_v, None, 0.0, True, enable_gqa=True)  # f32[s0, 4, s1, 8]
    return (y,)  # (f32[s0, 4, s1, 8],)
""")
    assert result.changes == ["y: x_k and x_v are not repeated"]
    assert_same_meaning(before, gm, exact=False, s0=2, s1=7)


OTHERS = {
    "a mask": TEXT.replace("v_3, None, 0.0, True)", "v_3, torch.ones((n, n)) > 0)"),
    "interleaved": TEXT.replace("[:, :, None, :, :]", "[:, None, :, :, :]").replace("unsqueeze(2)", "unsqueeze(1)"),
    "values of their own": TEXT.replace("k_3, v_3", "k_3, x"),
    "other groups": TEXT.replace(
        'x_v: "f32[s0, 2', 'x_v: "f32[s0, 1').replace("v_1.expand(b, 2, 2", "v_1.expand(b, 1, 4"),
    "a part of the heads": TEXT.replace('x: "f32[s0, 4', 'x: "f32[s0, 2').replace(
        "(x, k_3, v_3", "(x, k_3[:, 1:3], v_3[:, 1:3]"),
}  # fmt: skip


@pytest.mark.parametrize("text", OTHERS.values(), ids=OTHERS)
def test_other_keys_stay(text):
    before, gm, result = rewritten(text)
    assert not result.changes
    assert short(gm) == short(before)


def test_a_kernel_that_takes_no_groups():
    with mock.patch.object(compat, "flash_groups_keys", return_value=False):
        before, gm, result = rewritten(TEXT)
    assert not result.changes
    assert short(gm) == short(before)
    assert "as many heads of keys as of queries" in result.skipped[0][1]


@pytest.mark.parametrize(("autocast", "dtype", "done"), [
    ((), "f32", False), ((), "bf16", True), ((("cuda", torch.bfloat16),), "f32", True)])  # fmt: skip
def test_on_a_gpu_keys_of_single_precision_are_repeated(autocast, dtype, done):
    """There the kernel that takes them has as many heads of keys; in groups, all scores would be kept."""
    gm, mode = graph(TEXT.replace("f32", dtype))
    with mode:
        for node in gm.graph.nodes:
            found = value(node)
            if isinstance(found, torch.Tensor):
                node.meta["val"] = torch.empty_like(found, device="cuda")
    ctx = context(mode, ep=2)
    ctx.autocast = autocast
    result = group_keys.run(gm, ctx)
    assert bool(result.changes) == done
    assert bool(result.skipped) != done
