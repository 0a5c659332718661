"""join_blocks: golden, no-op where it must not act, meaning."""

from __future__ import annotations

import pytest
from expecttest import assert_expected_inline

from moefx.axes import MeshSpec
from moefx.ir.edit import copy_of
from moefx.ir.level import Level
from moefx.ir.verify import Facts, verify
from moefx.passes import join_blocks, raise_einsum
from tests.support.graphs import assert_same_meaning, context, graph, short

PARAMS = ", ".join(f'up{e}: "f32[24, 16]", bias{e}: "f32[24]", down{e}: "f32[16, 24]"' for e in range(3))
HEAD = f"""
def graph(x: "f32[s0, 16]", xs: "f32[s0, 3, 5]", {PARAMS}):
    mask = xs * (xs == xs.max(-1, keepdim=True)[0])
    blocks = torch.einsum("tec,td->ecd", mask, x)
"""
CHOSEN = "xs * (xs == xs.max(-1, keepdim=True)[0])"
CHUNK = "    parts = blocks.chunk(3, dim=0)\n" + "".join(f"    p{e} = parts[{e}]\n" for e in range(3))
UNBIND = CHUNK.replace("chunk(3, dim=0)", "unbind(0)")
ITEM = "".join(f"    p{e} = blocks[{e}]\n" for e in range(3))
SLICE = "".join(f"    p{e} = blocks[{e}:{e + 1}]\n" for e in range(3))
INNER = "    inner = blocks.transpose(0, 1)\n" + "".join(f"    p{e} = inner[:, {e}]\n" for e in range(3))
GROUPS = "    four = blocks.unsqueeze(0)\n    parts = four.split(1, 1)\n" + "".join(
    f"    p{e} = parts[{e}]\n" for e in range(3))  # fmt: skip
EXPERT = "    y{e} = F.linear(F.silu(F.linear(p{e}, up{e}, bias{e})), down{e})\n"
CAT = "    y = torch.cat([y0, y1, y2])\n"
STACK = "    y = torch.stack([y0, y1, y2])\n"
TAIL = "    return (torch.einsum('tec,ecd->td', mask, y),)\n"


def source(cut=CHUNK, expert=EXPERT, end=CAT, tail=TAIL):
    return HEAD + cut + "".join(expert.format(e=e) for e in range(3)) + end + tail


def joined(text):
    gm, mode = graph(text)
    before, ctx = copy_of(gm), context(mode, ep=1)
    result = join_blocks.run(gm, ctx)
    gm.graph.lint()
    return before, gm, result, ctx


def test_golden():
    _, gm, result, _ = joined(source())
    assert_expected_inline(short(gm), """\
def graph(
    x: "f32[s0, 16]",
    xs: "f32[s0, 3, 5]",
    up0: "f32[24, 16]",
    bias0: "f32[24]",
    down0: "f32[16, 24]",
    up1: "f32[24, 16]",
    bias1: "f32[24]",
    down1: "f32[16, 24]",
    up2: "f32[24, 16]",
    bias2: "f32[24]",
    down2: "f32[16, 24]",
):
    y_stack_2 = stack_experts([down0, down1, down2])  # f32[3, 16, 24]
    y_stack_1 = stack_experts([bias0, bias1, bias2])  # f32[3, 24]
    y_stack = stack_experts([up0, up1, up2])  # f32[3, 24, 16]
    max_1 = xs.max(-1, keepdim=True)  # (f32[s0, 3, 1], i64[s0, 3, 1])
    getitem = max_1[0]  # f32[s0, 3, 1]
    eq = xs == getitem  # bool[s0, 3, 5]
    mask = xs * eq  # f32[s0, 3, 5]
    blocks = torch.einsum('tec,td->ecd', mask, x)  # f32[3, 5, 16]
    transpose = y_stack.transpose(1, 2)  # f32[3, 16, 24]
    bmm = blocks.bmm(transpose)  # f32[3, 5, 24]
    reshape = y_stack_1.reshape(-1, 1, 24)  # f32[3, 1, 24]
    add = bmm + reshape  # f32[3, 5, 24]
    y_silu = F.silu(add)  # f32[3, 5, 24]
    transpose_1 = y_stack_2.transpose(1, 2)  # f32[3, 24, 16]
    bmm_1 = y_silu.bmm(transpose_1)  # f32[3, 5, 16]
    einsum = torch.einsum('tec,ecd->td', mask, bmm_1)  # f32[s0, 16]
    return (einsum,)  # (f32[s0, 16],)
""")
    assert result.changes == ["y: the blocks of 3 experts are computed as one"]


@pytest.mark.parametrize("text", [
    source(),
    source(UNBIND, end=STACK),
    source(ITEM, end=STACK),
    source(SLICE),
    source(INNER, end=STACK.replace("y2])", "y2], 1).transpose(0, 1)")),
    source(GROUPS, end=CAT.replace("y2])", "y2], 1).squeeze(0)")),
    source(expert=EXPERT.replace("F.silu(", "F.dropout(").replace("bias{e})), ", "bias{e}), 0.0), ")),
    source(expert=EXPERT.replace("F.linear(F.silu(", "F.linear(p{e} @ up{e}.t() + ").replace(")), down", "), down")),
    source().replace(CHOSEN, "xs.softmax(-1)"),
], ids=["chunk", "unbind", "item", "slice", "other dim", "groups", "dropout", "matmul", "soft"])  # fmt: skip
def test_meaning(text):
    before, gm, result, ctx = joined(text)
    assert result.changes
    for rows in (1, 2, 7):
        assert_same_meaning(before, gm, exact=False, s0=rows)
    assert raise_einsum.run(gm, ctx).changes
    assert_same_meaning(before, gm, exact=False)
    verify(gm, Level.MOE, Facts(MeshSpec.named({"ep": 1})))


@pytest.mark.parametrize("text", [
    source(end=CAT.replace("y0, y1", "y1, y0")),
    source(end=CAT.replace("y2", "y1")),
    source(expert=EXPERT.replace("F.silu(", "F.softmax(").replace("bias{e})), ", "bias{e}), 1), ")),
    source(expert=EXPERT.replace("up{e}", "up0").replace("bias{e}", "bias0").replace("down{e}", "down0")),
    source().replace("y2 = F.linear(F.silu(", "y2 = F.linear(F.relu("),
    source().replace("p2, up2", "p1, up2"),
    source(tail="    return (y.sum(0),)\n").replace(CHOSEN, "xs.softmax(-1)"),
    source().replace(CHOSEN, "xs.sigmoid()"),
], ids=["other order", "one twice", "rows mixed", "one function", "another function", "another block",
        "as heads of attention", "no routing"])  # fmt: skip
def test_noop(text):
    before, gm, result, _ = joined(text)
    assert short(gm) == short(before)
    assert result.changes == []
