"""raise_einsum: golden, no-op, refusal, meaning."""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline

from moefx.axes import MeshSpec
from moefx.compiler.pipeline import place_experts, refresh
from moefx.errors import RaiseError
from moefx.ir.edit import copy_of
from moefx.ir.level import Level
from moefx.ir.op import value
from moefx.ir.verify import Facts, verify
from moefx.passes import raise_einsum
from tests.support.breadth import places
from tests.support.graphs import assert_same_meaning, context, graph, short

# GShard's experts with three places each, filled in the order of the tokens; who finds none is dropped.
BLOCKS = """
def graph(x: "f32[s0, 16]", gate: "f32[4, 16]", up: "f32[4, 16, 24]", bias: "f32[4, 24]", down: "f32[4, 24, 16]"):
    scores = F.softmax(F.linear(x, gate), dim=-1)
    mask = (scores == scores.amax(-1, keepdim=True)).float()
    place = mask.cumsum(0) * mask - 1.0
    block = (place.unsqueeze(-1) == torch.arange(3)).float()
    rows = torch.einsum('tec,td->ecd', block, x)
    hidden = F.silu(torch.einsum('ecd,edi->eci', rows, up) + bias.view(4, 1, -1))
    out = torch.einsum('eci,eid->ecd', hidden, down)
    y = torch.einsum('tec,ecd->td', block * scores.unsqueeze(-1), out)
    return (y,)
"""
MATMULS = (BLOCKS.replace("torch.einsum('ecd,edi->eci', rows, up)", "torch.bmm(rows, up)")
           .replace("torch.einsum('eci,eid->ecd', hidden, down)", "hidden @ down"))
GROUPED = """
def graph(x: "f32[2, s0, 16]", up: "f32[4, 16, 24]", down: "f32[4, 24, 16]", xs: "f32[2, s0, 4, 3]"):
    rows = torch.einsum('gsec,gsd->egcd', xs, x)
    both = torch.einsum('egcd,edi->egci', rows, up).chunk(2, dim=-1)
    hidden = F.pad(F.gelu(both[0]) * both[1], (0, 12))
    out = torch.einsum('egci,eid->egcd', hidden, down)
    y = torch.einsum('gsec,egcd->gsd', xs, out)
    return (y,)
"""
# As many groups as the batch has rows.
ROWS = """
def graph(x: "f32[s1, s0, 16]", up: "f32[4, 16, 24]", down: "f32[4, 24, 16]", xs: "f32[s1, s0, 4, 3]"):
    rows = torch.einsum('gsec,gsd->egcd', xs, x)
    hidden = F.gelu(torch.einsum('egcd,edi->egci', rows, up))
    out = torch.einsum('egci,eid->egcd', hidden, down)
    return (torch.einsum('gsec,egcd->gsd', xs, out),)
"""
# A soft mixture: each slot is a mean of all tokens of its sequence; the experts are not the first dim of the blocks.
SOFT = """
def graph(x: "f32[s1, s0, 16]", phi: "f32[16, 4, 3]", up: "f32[4, 16, 24]", bias: "f32[4, 24]", down: "f32[4, 24, 16]"):
    scores = torch.einsum('bsd,dep->bsep', x, phi)
    rows = torch.einsum('bsd,bsep->bepd', x, F.softmax(scores, dim=1))
    hidden = F.gelu(torch.einsum('bepd,edi->bepi', rows, up) + BIAS)
    out = torch.einsum('bepi,eid->bepd', hidden, down)
    y = torch.einsum('bepd,bsep->bsd', out, F.softmax(scores.flatten(2), dim=-1).unflatten(2, (4, 3)))
    return (y,)
"""
# Every expert computes every token.
DENSE = """
def graph(x: "f32[s0, 16]", gate: "f32[4, 16]", up: "f32[4, 24, 16]", down: "f32[4, 24, 16]"):
    scores = F.softmax(F.linear(x, gate), dim=-1)
    rows = x.unsqueeze(0).expand(4, -1, -1)
    out = torch.bmm(F.relu(torch.bmm(rows, up.transpose(1, 2))), down)
    y = (out * scores.t().unsqueeze(-1)).sum(0)
    return (y,)
"""


# A projection by groups of features, which is no mixture of experts: its weight has no dim of groups.
BY_GROUPS = """
def graph(x: "f32[s0, 16]", proj: "f32[12, 8]"):
    groups = x.view(-1, 2, 8).transpose(0, 1)
    out = torch.bmm(groups, proj.view(2, 6, 8).transpose(1, 2))
    y = out.transpose(0, 1).reshape(-1, 12)
    return (y,)
"""


def between(code, source=BLOCKS):
    """The text with more code between the experts' ops; H stands for their hidden values."""
    return source.replace("    out =", f"    hidden = {code.replace('H', 'hidden')}\n    out =")


def raised(source, **axes):
    gm, mode = graph(source)
    before = copy_of(gm)
    result = raise_einsum.run(gm, context(mode, **(axes or {"ep": 1})))
    gm.graph.lint()
    return before, gm, result


def test_golden():
    _, gm, result = raised(BLOCKS)
    assert_expected_inline(short(gm), """\
def graph(
    x: "f32[s0, 16]",
    gate: "f32[4, 16]",
    up: "f32[4, 16, 24]",
    bias: "f32[4, 24]",
    down: "f32[4, 24, 16]",
):
    r0_up = expert_parameter(up, 0)  # f32[4, 16, 24]
    r0_bias = expert_parameter(bias, 0)  # f32[4, 24]
    r0_down = expert_parameter(down, 0)  # f32[4, 24, 16]
    linear = F.linear(x, gate)  # f32[s0, 4]
    scores = F.softmax(linear, dim=-1)  # f32[s0, 4]
    amax = scores.amax(-1, keepdim=True)  # f32[s0, 1]
    eq = scores == amax  # bool[s0, 4]
    mask = eq.float()  # f32[s0, 4]
    cumsum = mask.cumsum(0)  # f32[s0, 4]
    mul = cumsum * mask  # f32[s0, 4]
    place = mul - (1.0)  # f32[s0, 4]
    unsqueeze = place.unsqueeze(-1)  # f32[s0, 4, 1]
    arange = torch.arange(3)  # i64[3]
    eq_1 = unsqueeze == arange  # bool[s0, 4, 3]
    block = eq_1.float()  # f32[s0, 4, 3]
    rows = torch.einsum('tec,td->ecd', block, x)  # f32[4, 3, 16]
    r0_enter = enter(rows, None, 0, 1, 0)  # f32[4, 3, 16]
    einsum = torch.einsum('ecd,edi->eci', r0_enter, r0_up)  # f32[4, 3, 24]
    view = r0_bias.view(-1, 1, 24)  # f32[4, 1, 24]
    add = einsum + view  # f32[4, 3, 24]
    hidden = F.silu(add)  # f32[4, 3, 24]
    out = torch.einsum('eci,eid->ecd', hidden, r0_down)  # f32[4, 3, 16]
    r0_leave = leave(out, None, 0, 1, 0)  # f32[4, 3, 16]
    unsqueeze_1 = scores.unsqueeze(-1)  # f32[s0, 4, 1]
    mul_1 = block * unsqueeze_1  # f32[s0, 4, 3]
    y = torch.einsum('tec,ecd->td', mul_1, r0_leave)  # f32[s0, 16]
    return (y,)  # (f32[s0, 16],)
""")
    assert result.changes == ["region 0: 4 experts on static blocks (einsum)"]


def test_noop():
    before, gm, result = raised("""
        def graph(x: "f32[s0, 4, 3, 16]", w: "f32[16, 24]", heads: "f32[4, 16]"):
            y = torch.einsum('tecd,di->teci', x, w)
            z = torch.einsum('tecd,ed->tec', x, heads)
            return (y, z)
    """)
    assert short(gm) == short(before)
    assert (result.changes, result.skipped) == ([], [])


MIXED = [
    ("H - H.mean(1, keepdim=True)", "mean between the experts' ops mixes experts or places"),
    ("H.clamp_min(H.max())", "max between the experts' ops mixes experts or places"),
    ("F.log_softmax(H, dim=0)", "log_softmax between the experts' ops mixes experts"),
    ("H.roll(1, 0)", "roll between the experts' ops mixes experts"),
    ("H.flip(1)", "flip between the experts' ops mixes rows"),
    ("H.cumprod(1)", "cumprod between the experts' ops mixes rows"),
    ("F.normalize(F.dropout(H, 0.5, True), dim=1)", "normalize between the experts' ops mixes rows"),
    ("H / H.shape[1]", "truediv between the experts' ops mixes rows"),
    ("F.layer_norm(H, (3, 24))", "layer_norm between the experts' ops needs all experts, or the model's own number of"),
    ("H * block.sum(0).unsqueeze(-1)", "mul between the experts' ops needs all experts, or the model's own number of"),
]


# Two experts that compute every token, weighed inside by what the graph around them made: shared experts.
SHARED = """
def graph(x: "f32[s0, 16]", gate: "f32[2, 16]", up: "f32[2, 24, 16]", down: "f32[2, 16, 24]"):
    weights = torch.sigmoid(F.linear(x, gate)).view(-1, 2, 1).transpose(0, 1)
    rows = x.unsqueeze(0).expand(2, -1, -1)
    hidden = F.silu(torch.bmm(rows, up.transpose(1, 2))) * weights
    y = torch.bmm(hidden, down.transpose(1, 2)).sum(0)
    return (y,)
"""


def test_experts_of_all_tokens_may_stay():
    before, gm, result = raised(SHARED, ep=2)
    assert short(gm) == short(before)
    assert "needs all experts" in result.skipped[0][1]


def test_weights_without_a_dim_of_experts_stay():
    before, gm, result = raised(BY_GROUPS, ep=2)
    assert short(gm) == short(before)
    assert "no row of its own for each of 2 blocks" in result.skipped[0][1]


@pytest.mark.parametrize(("code", "message"), MIXED, ids=[code for code, _ in MIXED])
def test_refusal(code, message):
    with pytest.raises(RaiseError) as caught:
        raised(between(code))
    assert message in str(caught.value)
    assert "\n  at: " in str(caught.value)
    assert "elementwise ops" in caught.value.hint


@pytest.mark.parametrize("code", ["H.flip(1)", "H - H.mean(1, keepdim=True)"])
def test_what_mixes_is_left_alone_where_nothing_is_spread(code):
    before, gm, result = raised(between(code), dp=2)
    assert short(gm) == short(before)
    assert not result.changes
    assert result.skipped[0][1] in dict(MIXED)[code]


@pytest.mark.parametrize(
    "code",
    ["F.layer_norm(H, (24,))", "F.normalize(H, dim=-1)", "F.dropout(H, 0.5, True)", "H * H.sigmoid()", "H.flip(-1)"],
)
def test_ops_on_rows_are_taken(code):
    before, gm, result = raised(between(code))
    assert len(result.changes) == 1
    if "dropout" not in code:
        assert_same_meaning(before, gm, s0=5)


def test_regions_of_different_constants_are_both_looked_at():
    """Layers are mostly alike and then looked at once: not if they differ in an argument."""
    lines = between("H.flip(-1)").splitlines(keepends=True)
    second = "".join(lines[2:-1]).replace("(x, gate)", "(y, gate)")
    for param in ("up", "bias", "down"):
        second = second.replace(f" {param}", f" {param}2")
    alike = "".join([*lines[:-1], second, lines[-1]]).replace(
        'down: "f32[4, 24, 16]"',
        'down: "f32[4, 24, 16]", up2: "f32[4, 16, 24]", bias2: "f32[4, 24]", down2: "f32[4, 24, 16]"')
    _, _, result = raised(alike)
    assert len(result.changes) == 2
    before, _, after = alike.rpartition("flip(-1)")
    with pytest.raises(RaiseError, match="flip between the experts' ops mixes rows"):
        raised(f"{before}flip(1){after}")


def test_under_autocast():
    gm, mode = graph(between("F.layer_norm(H, (24,))"))
    ctx = context(mode, ep=1)
    ctx.autocast = (("cpu", torch.bfloat16),)
    refresh(gm, ctx)
    assert raise_einsum.run(gm, ctx).changes
    assert value(next(n for n in gm.graph.nodes if n.name == "out")).dtype == torch.bfloat16


@pytest.mark.parametrize("source", [BLOCKS, MATMULS, GROUPED, DENSE], ids=["einsum", "matmul", "grouped", "dense"])
def test_meaning(source):
    before, gm, result = raised(source)
    assert len(result.changes) == 1
    for tokens in (1, 2, 9):
        assert_same_meaning(before, gm, s0=tokens)
    verify(gm, Level.MOE, Facts(MeshSpec.named({"ep": 1})))


@pytest.mark.parametrize("source", [BLOCKS, GROUPED, DENSE], ids=["einsum", "grouped", "dense"])
def test_experts_can_be_spread(source):
    """The number of experts is baked in nowhere: half of them run as well."""
    gm, mode = graph(source)
    ctx = context(mode, dp=1, ep=2)
    raise_einsum.run(gm, ctx)
    place_experts.run(gm, ctx)
    refresh(gm, ctx)
    verify(gm, Level.PLACED, Facts(MeshSpec.named({"dp": 1, "ep": 2})))


@pytest.mark.parametrize("bias", places([
    "bias.unsqueeze(1)", "bias[:, None]", "bias[None, :, None]", "bias[None, :, None, :]", "bias.view(1, 4, 1, 24)",
    "bias.unsqueeze(0).unsqueeze(2)", "bias.t().contiguous().t()[None, :, None]",
], 0, 3, 4, 6))  # fmt: skip
def test_biases_of_each_form_can_be_spread(bias):
    before, gm, _ = raised(SOFT.replace("BIAS", bias))
    for tokens in (1, 5):
        assert_same_meaning(before, gm, s0=tokens, s1=2)
    test_experts_can_be_spread(SOFT.replace("BIAS", bias))


def test_biases_of_places_are_refused():
    source = SOFT.replace("BIAS", "bias.view(1, 1, 4, 24)").replace("4, 3", "4, 4")
    with pytest.raises(RaiseError, match="add between the experts' ops needs all experts"):
        raised(source)


def merged(source):
    gm, mode = graph(source)
    before = copy_of(gm)
    result = raise_einsum.run(gm, context(mode, dp=1, ep=2))
    gm.graph.lint()
    return before, gm, result


def test_groups_are_merged_with_the_places():
    before, gm, result = merged(ROWS)
    assert_expected_inline(short(gm), """\
def graph(
    x: "f32[s0, s1, 16]",
    up: "f32[4, 16, 24]",
    down: "f32[4, 24, 16]",
    xs: "f32[s0, s1, 4, 3]",
):
    r0_up = expert_parameter(up, 0)  # f32[4, 16, 24]
    r0_down = expert_parameter(down, 0)  # f32[4, 24, 16]
    rows = torch.einsum('gsec,gsd->egcd', xs, x)  # f32[4, s0, 3, 16]
    size = rows.size(1)  # s0
    size_1 = rows.size(2)  # 3
    movedim = rows.movedim(1, 1)  # f32[4, s0, 3, 16]
    flatten = movedim.flatten(1, 2)  # f32[4, 3*s0, 16]
    unsqueeze = flatten.unsqueeze(1)  # f32[4, 1, 3*s0, 16]
    r0_enter = enter(unsqueeze, None, 0, 2, 0)  # f32[4, 1, 3*s0, 16]
    einsum = torch.einsum('egcd,edi->egci', r0_enter, r0_up)  # f32[4, 1, 3*s0, 24]
    hidden = F.gelu(einsum)  # f32[4, 1, 3*s0, 24]
    out = torch.einsum('egci,eid->egcd', hidden, r0_down)  # f32[4, 1, 3*s0, 16]
    r0_leave = leave(out, None, 0, 2, 0)  # f32[4, 1, 3*s0, 16]
    squeeze = r0_leave.squeeze(1)  # f32[4, 3*s0, 16]
    reshape = squeeze.reshape(4, size, size_1, 16)  # f32[4, s0, 3, 16]
    movedim_1 = reshape.movedim(1, 1)  # f32[4, s0, 3, 16]
    einsum_1 = torch.einsum('gsec,egcd->gsd', xs, movedim_1)  # f32[s0, s1, 16]
    return (einsum_1,)  # (f32[s0, s1, 16],)
""")
    assert len(result.changes) == 1
    for groups in (1, 2, 5):
        assert_same_meaning(before, gm, s0=4, s1=groups)


@pytest.mark.parametrize(("gelu", "message"), [
    ("F.gelu(h - h.mean(1, keepdim=True))", "lose the groups of tokens"),
    ("F.gelu(h) / x.size(0)", "takes a size of the tokens"),
], ids=["mixed groups", "their number"])  # fmt: skip
def test_groups_that_are_not_apart_are_refused(gelu, message):
    cut = ROWS.replace("    hidden = F.gelu(torch", "    h = (torch").replace(
        "    out =", f"    hidden = {gelu}\n    out =")  # fmt: skip
    with pytest.raises(RaiseError, match=message):
        merged(cut)
