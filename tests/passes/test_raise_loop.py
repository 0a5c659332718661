"""raise_loop: golden, no-op, refusal, meaning."""

from __future__ import annotations

import pytest
from expecttest import assert_expected_inline

from moefx.axes import MeshSpec
from moefx.errors import RaiseError
from moefx.ir.edit import copy_of
from moefx.ir.level import Level
from moefx.ir.verify import Facts, verify
from moefx.passes import raise_loop
from tests.support.graphs import assert_same_meaning, context, graph, short

HEAD = """
def graph(x: "f32[s0, 16]", gate: "f32[3, 16]", {params}):
    topk = torch.topk(F.softmax(F.linear(x, gate), dim=-1), 2, dim=-1)
    weights = topk[0]
    idx = topk[1]
    out = torch.zeros_like(x)
"""
EXPERT = """
    found{e} = torch.where(idx == {e})
    token{e} = found{e}[0]
    choice{e} = found{e}[1]
    hidden{e} = F.{act}(F.linear(x[token{e}], up{e}, bias{e}))
    rows{e} = F.linear(hidden{e}, down{e}) * weights[token{e}, choice{e}].unsqueeze(-1)
"""
# The same rows, picked by a boolean mask, by columns of `nonzero`, or not at all.
MASKED = """
    mask{e} = (idx == {e}).any(-1)
    hidden{e} = F.{act}(F.linear(x[mask{e}], up{e}, bias{e}))
    rows{e} = F.linear(hidden{e}, down{e}) * (weights * (idx == {e})).sum(-1)[mask{e}].unsqueeze(-1)
    out[mask{e}] = out[mask{e}] + rows{e}
"""
PAIRS = """
    pairs{e} = idx == {e}
    mask{e} = pairs{e}.any(dim=1)
    hidden{e} = F.{act}(F.linear(x[mask{e}], up{e}, bias{e}))
    out[mask{e}] = out[mask{e}] + F.linear(hidden{e}, down{e}) * weights[pairs{e}].unsqueeze(-1)
"""
COLUMNS = """
    found{e} = (idx == {e}).nonzero()
    token{e} = found{e}[:, 0]
    hidden{e} = F.{act}(F.linear(x[token{e}], up{e}, bias{e}))
    rows{e} = F.linear(hidden{e}, down{e}) * weights[token{e}, found{e}[:, 1]].unsqueeze(-1)
    out = out.index_add(0, token{e}, rows{e})
"""
ONE_COLUMN = """
    token{e} = (idx == {e}).any(-1).nonzero().flatten()
    hidden{e} = F.{act}(F.linear(x[token{e}], up{e}, bias{e}))
    mine{e} = torch.where(idx == {e}, weights, 0.0).sum(1)
    out = out.index_add(0, token{e}, F.linear(hidden{e}, down{e}) * mine{e}[token{e}].unsqueeze(-1))
"""
DENSE = """
    hidden{e} = F.{act}(F.linear(x, up{e}, bias{e}))
    rows{e} = F.linear(hidden{e}, down{e}) * (weights * (idx == {e})).sum(-1, keepdim=True)
    out = out + rows{e}
"""
FULL = """
    full{e} = torch.zeros_like(x).scatter(1, idx, weights)
    out = out + full{e}[:, {e}].unsqueeze(-1) * F.linear(F.{act}(F.linear(x, up{e}, bias{e})), down{e})
"""
# One expert per token, weights [T]: rows may be assigned.
HEAD_1 = """
def graph(x: "f32[s0, 16]", gate: "f32[3, 16]", {params}):
    best = F.softmax(F.linear(x, gate), dim=-1).max(-1)
    weights = best[0]
    idx = best[1].unsqueeze(-1)
    out = torch.empty_like(x)
"""
BRANCH_1 = """
    mask{e} = (idx == {e}).any(-1)
    token{e} = mask{e}.nonzero().squeeze(-1)
    hidden{e} = F.{act}(F.linear(x[token{e}], up{e}, bias{e}))
    rows{e} = F.linear(hidden{e}, down{e}) * weights[token{e}].unsqueeze(-1)
"""
ASSIGN = BRANCH_1 + "    out[token{e}] = rows{e}\n"
COPY = BRANCH_1 + "    out = out.index_copy(0, token{e}, rows{e})\n"
PUT = BRANCH_1 + "    out = out.index_put((token{e},), rows{e})\n"
ACCUMULATE = BRANCH_1 + "    out = out.index_put((token{e},), rows{e}, accumulate=True)\n"
DENSE_1 = """
    mask{e} = (idx == {e}).any(-1)
    hidden{e} = F.{act}(F.linear(x, up{e}, bias{e}))
    out = out + F.linear(hidden{e}, down{e}) * (weights * mask{e})[:, None]
"""
BEFORE = """
    mine{e} = (weights * (idx == {e})).sum(-1, keepdim=True)
    out = out + F.linear(F.{act}(F.linear(x * mine{e}, up{e}, bias{e})), down{e})
"""
# Numbers of every expert that are computed apart from its rows, on rows and on scores.
OWN = EXPERT.replace("rows{e} = ", "own{e} = F.softmax(F.linear(x, gate), -1)[:, {e}].mean()\n    rows{e} = own{e} * ")
OWN_SCORE = EXPERT.replace("weights[token{e}, choice{e}]", "(weights[token{e}, choice{e}] / (idx == {e}).sum())")
OWN_ROWS = EXPERT.replace("    rows{e} =", "    own{e} = hidden{e}.mean()\n    rows{e} = own{e} *")
# Weights that are computed before use, with a part of all experts and a number of each.
COMPUTED = EXPERT.replace("rows{e} = F.linear(hidden{e}, down{e})", """scale{e} = F.softmax(gate, -1)[{e}].mean()
    parts{e} = (down{e} + torch.outer(F.normalize(bias{e}, dim=0)[:16], gate.sum(0)[:1].expand(24))).chunk(2)
    rows{e} = F.linear(hidden{e}, torch.cat([parts{e}[1], parts{e}[0] * 2.0]) / scale{e})""")
# Tokens that are numbered by two dims.
HEAD_3 = HEAD.replace("f32[s0, 16]", "f32[s0, s1, 16]")
WHERE_3 = """
    found{e} = torch.where(idx == {e})
    hidden{e} = F.{act}(F.linear(x[found{e}[0], found{e}[1]], up{e}, bias{e}))
    mine{e} = weights[found{e}[0], found{e}[1], found{e}[2]]
    rows{e} = F.linear(hidden{e}, down{e}) * mine{e}.unsqueeze(-1)
"""
PUT_3 = WHERE_3 + "    out = out.index_put((found{e}[0], found{e}[1]), rows{e}, accumulate=True)\n"
SET_3 = WHERE_3 + "    out[found{e}[0], found{e}[1]] = out[found{e}[0], found{e}[1]] + rows{e}\n"
PAIRS_3 = PAIRS.replace("any(dim=1)", "any(dim=2)")
FULL_3 = FULL.replace("scatter(1,", "scatter(-1,").replace("[:, {e}]", "[..., {e}]")
# The weights of all experts as one matrix, one expert below the other.
FLAT = HEAD.format(params='up: "f32[72, 16]", bias: "f32[72]", down: "f32[48, 24]"') + """
    ups = up.view(3, 24, 16)
    downs = down.reshape(-1, 16, 24)
"""
BY_SLICE = """
    token{e} = torch.where(idx == {e})[0]
    choice{e} = torch.where(idx == {e})[1]
    hidden{e} = F.silu(F.linear(x[token{e}], up[{e} * 24 : {e} * 24 + 24], bias[{e} * 24 : {e} * 24 + 24]))
    rows{e} = F.linear(hidden{e}, downs[{e}]) * weights[token{e}, choice{e}].unsqueeze(-1)
    out = out.index_add(0, token{e}, rows{e})
"""
BY_VIEW = BY_SLICE.replace("up[{e} * 24 : {e} * 24 + 24]", "ups[{e}]")


def flat(branch):
    return FLAT + "".join(branch.format(e=e).lstrip("\n") for e in range(3)) + "    return (out,)\n"


MORE_ROWS = flat(BY_VIEW).replace("f32[72, 16]", "f32[96, 16]").replace("(3, 24", "(4, 24")  # nobody reads the last
ADD = "    out = out.index_add(0, token{e}, rows{e})\n"
SET = "    out[token{e}] = out[token{e}] + rows{e}\n"


def loop(*, experts=(0, 1, 2), act=None, expert=EXPERT, add=ADD, head=HEAD, tail="    return (out,)\n"):
    params = ", ".join(f'up{e}: "f32[24, 16]", bias{e}: "f32[24]", down{e}: "f32[16, 24]"' for e in range(3))
    body = head.format(params=params)
    for e in experts:
        add = add if expert is EXPERT else ""
        body += expert.format(e=e, act=(act or {}).get(e, "silu")).lstrip("\n") + add.format(e=e)
    return body + tail


TWICE = loop(add=SET).replace("idx = topk[1]", "idx = topk[1] % 3").replace("gate: \"f32[3,", "gate: \"f32[6,")


def raised(source):
    gm, mode = graph(source)
    before = copy_of(gm)
    result = raise_loop.run(gm, context(mode, ep=1))
    gm.graph.lint()
    return before, gm, result


def test_golden():
    _, gm, result = raised(loop())
    assert_expected_inline(short(gm), """\
def graph(
    x: "f32[s0, 16]",
    gate: "f32[3, 16]",
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
    r0_stack_2 = stack_experts([down0, down1, down2])  # f32[3, 16, 24]
    r0_r0_stack_2 = expert_parameter(r0_stack_2, 0)  # f32[3, 16, 24]
    r0_stack_1 = stack_experts([bias0, bias1, bias2])  # f32[3, 24]
    r0_r0_stack_1 = expert_parameter(r0_stack_1, 0)  # f32[3, 24]
    r0_stack = stack_experts([up0, up1, up2])  # f32[3, 24, 16]
    r0_r0_stack = expert_parameter(r0_stack, 0)  # f32[3, 24, 16]
    linear = F.linear(x, gate)  # f32[s0, 3]
    softmax = F.softmax(linear, dim=-1)  # f32[s0, 3]
    topk = torch.topk(softmax, 2, dim=-1)  # (f32[s0, 2], i64[s0, 2])
    weights = topk[0]  # f32[s0, 2]
    idx = topk[1]  # i64[s0, 2]
    r0_route = m.route.default(idx, 3)  # (i64[2*s0], i64[3])
    r0_perm = r0_route[0]  # i64[2*s0]
    r0_counts = r0_route[1]  # i64[3]
    r0_dispatch = m.dispatch.default(x, r0_perm, 2)  # f32[2*s0, 16]
    r0_enter = enter(r0_dispatch, r0_counts, -1, -1, 0)  # f32[2*s0, 16]
    r0_linear = m.grouped_linear.default(r0_enter, r0_r0_stack, r0_counts, False, r0_r0_stack_1)  # f32[2*s0, 24]
    r0_hidden0 = F.silu(r0_linear)  # f32[2*s0, 24]
    r0_linear_1 = m.grouped_linear.default(r0_hidden0, r0_r0_stack_2, r0_counts, False)  # f32[2*s0, 16]
    r0_leave = leave(r0_linear_1, r0_counts, -1, -1, 0)  # f32[2*s0, 16]
    r0_combine = m.combine.default(r0_leave, r0_perm, 2, weights)  # f32[s0, 16]
    return (r0_combine,)  # (f32[s0, 16],)
""")
    assert result.changes == ["region 0: a loop over 3 experts (out_1)"]


def test_golden_of_computed_weights():
    _, gm, _ = raised(loop(expert=EXPERT.replace("down{e})", "down{e} + 0.5 * F.normalize(up{e}, dim=-1).t())") + ADD))
    assert_expected_inline("\n".join(line for line in short(gm).splitlines() if "per_expert" in line), """\
    per_expert = per_expert('F.normalize', (0,), r0_r0_stack, dim=-1)  # f32[3, 24, 16]
    transpose = per_expert.transpose(-2, -1)  # f32[3, 16, 24]
    per_expert_1 = per_expert('operator.mul', (1,), 0.5, transpose)  # f32[3, 16, 24]
    per_expert_2 = per_expert('operator.add', (0, 1), r0_r0_stack_2, per_expert_1)  # f32[3, 16, 24]
    r0_linear_1 = m.grouped_linear.default(r0_hidden0, per_expert_2, r0_counts, False)  # f32[2*s0, 16]""")


def test_noop():
    before, gm, result = raised("""
        def graph(x: "f32[s0, 16]", token: "i64[s0]", y: "f32[s0, 16]"):
            out = torch.zeros_like(x).index_add(0, token, y)
            return (out,)
    """)
    assert short(gm) == short(before)
    assert result.changes == []


@pytest.mark.parametrize("source", [
    loop(expert=BEFORE),
    loop(expert=ASSIGN),
    loop(expert=ASSIGN, head=HEAD_1.replace("torch.empty_like(x)", "x * 2.0")),
    loop(expert=MASKED).replace("idx = topk[1]", "idx = topk[1].clamp(max=1)"),
    TWICE,
], ids=["weights before an expert", "assigned, two choices", "assigned onto something",
        "masks of choices that may be equal", "sums put where a token may stand twice"])  # fmt: skip
def test_other_functions_are_left_alone(source):
    before, gm, result = raised(source)
    assert short(gm) == short(before)
    assert result.changes == []


def of_samples(source):
    """Samples [s1, 16] are routed as they are on average."""
    source = source.replace("s0, 16", "s0, s1, 16").replace("linear(x, gate)", "linear(x.mean(1), gate)")
    source = source.replace("unsqueeze(-1)", "unsqueeze(-1).unsqueeze(-1)")
    return source.replace(".sum(-1)\n", ".sum(-1)[:, None, None]\n")


def of_columns(source):
    """Samples whose tokens are columns, [16, s1]."""
    source = of_samples(source).replace("s0, s1, 16", "s0, 16, s1").replace("x.mean(1)", "x.mean(2)")
    for e in range(3):
        source = source.replace(f"x[token{e}]", f"x[token{e}].mT").replace(f", rows{e})", f", rows{e}.mT)")
    return source


def two_levels(outer):
    """Two groups of two experts; `outer` adds what comes of group g."""
    names = [f"{g}{e}" for g in range(2) for e in range(2)]
    params = ", ".join(['gate: "f32[2, 16]", gate0: "f32[2, 16]", gate1: "f32[2, 16]"',
                        *(f'up{n}: "f32[24, 16]", bias{n}: "f32[24]", down{n}: "f32[16, 24]"' for n in names)])
    body = HEAD.replace("f32[3, 16]", "f32[2, 16]").replace('gate: "f32[2, 16]", {params}', params)
    for g in range(2):
        picked, _, added = outer.format(g=g).partition("    ...\n")
        body += picked + f"    best{g} = torch.topk(F.softmax(F.linear(x{g}, gate{g}), dim=-1), 1, dim=-1)\n"
        body += f"    w{g} = best{g}[0]\n    idx{g} = best{g}[1]\n    out{g} = torch.zeros_like(x{g})\n"
        for e in range(2):
            inner = (EXPERT + ADD).format(e=f"{g}{e}", act="silu").replace(f"== {g}{e}", f"== {e}")
            inner = inner.replace("(idx ", f"(idx{g} ").replace(" x[", f" x{g}[").replace("(x[", f"(x{g}[")
            body += inner.replace("weights[", f"w{g}[").replace("out = out.", f"out{g} = out{g}.").lstrip("\n")
        body += added
    return body + "    return (out,)\n"


PICKED = """    found{g} = torch.where(idx == {g})
    token{g} = found{g}[0]
    x{g} = x[token{g}]
    ...
    out = out.index_add(0, token{g}, out{g} * weights[token{g}, found{g}[1]].unsqueeze(-1))
"""
WEIGHED = """    x{g} = x * 1.0
    ...
    out = out + out{g} * (weights * (idx == {g})).sum(-1, keepdim=True)
"""


def test_a_layer_before_is_no_part_of_an_expert():
    """Rows are picked by an index for every entry, which the look for experts that are mixtures does not know."""
    text = 'def graph(x: "f32[s0, 16]", gate: "f32[2, 16]", up0: "f32[16, 16]", up1: "f32[16, 16]"):\n'
    for before, now in (("x", "y"), ("y", "z")):
        text += f"    best{now} = torch.topk(F.softmax(F.linear({before}, gate), dim=-1), 1, dim=-1)\n"
        text += f"    w{now} = best{now}[0]\n    idx{now} = best{now}[1]\n    {now} = torch.zeros_like({before})\n"
        for e in range(2):
            text += (f"    at{now}{e} = torch.where(idx{now} == {e})\n"
                     f"    index{now}{e} = at{now}{e}[0].unsqueeze(-1).expand(-1, 16)\n"
                     f"    rows{now}{e} = F.linear(torch.gather({before}, 0, index{now}{e}), up{e})\n"
                     f"    scaled{now}{e} = rows{now}{e} * w{now}[at{now}{e}[0], at{now}{e}[1]].unsqueeze(-1)\n"
                     f"    {now} = {now}.scatter_add(0, index{now}{e}, scaled{now}{e})\n")  # fmt: skip
    _, _, result = raised(text + "    return (z,)\n")
    assert [change.partition(" (")[0] for change in result.changes] == [
        f"region {number}: a loop over 2 experts" for number in range(2)]  # fmt: skip
    assert not result.skipped


@pytest.mark.parametrize("outer", [PICKED, WEIGHED], ids=["picked", "weighed"])
def test_experts_that_are_mixtures(outer):
    before, gm, result = raised(two_levels(outer))
    assert [change.partition(" (")[0] for change in result.changes] == [
        f"region {g}: a loop over 2 experts" for g in range(2)]  # fmt: skip
    assert [reason for _, reason in result.skipped] == [
        "each of its experts is a mixture itself: the experts of those are spread"]  # fmt: skip
    for rows in (1, 2, 7):
        assert_same_meaning(before, gm, exact=False, s0=rows)


@pytest.mark.parametrize(("source", "message"), [
    (loop(experts=(0, 2)), "leaves out experts [1]"),
    (loop().replace("(0, token1, rows1)", "(0, token1, rows1, alpha=2.0)"),
     "what expert 1 computes is not added to the output as that of expert 2 is"),
    (loop(tail="    return (out, other)\n").replace("out = out.index_add(0, token0", "other = x.index_add(0, token0"),
     "experts [0] add to another output than expert 1"),
    (loop(experts=(0, 1, 2, 2)), "expert 2 adds to the output twice"),
    (loop(act={1: "relu"}), "expert"),
    (flat(BY_SLICE).replace("up[0 * 24 : 0 * 24", "up[1 * 24 : 1 * 24"), "read the weights of experts [1, 1, 2]"),
    (loop(expert=EXPERT + ADD + "    seen{e} = out.mean()\n", tail="    return (out + seen1,)\n"),
     "mean reads what some"),
    (loop(expert=EXPERT.replace("hidden{e} =", "copy{e} = up{e}.clone()\n    copy{e}[0] = 0.0\n    hidden{e} =")
          .replace("up{e}, bias", "copy{e}, bias") + ADD), "write to copy0, or to a part of it"),
    (loop(expert=OWN_ROWS + ADD), "mean along dim 0 mixes the rows"),
    (loop(expert=MASKED).replace("torch.zeros_like(x)", "torch.zeros_like(x)[:]"), "adds to a part of a tensor"),
    (of_columns(loop()), "from rank to rank"),
], ids=["missing", "another way", "another output", "twice", "different", "another's rows", "a partial sum",
        "a part written to", "a number of its rows", "a view", "sizes"])  # fmt: skip
def test_refusal(source, message):
    with pytest.raises(RaiseError) as caught:
        raised(source)
    assert message in str(caught.value)
    assert "\n  at: " in str(caught.value)


@pytest.mark.parametrize("source", [
    loop(),
    loop(add=SET),
    loop(experts=(2, 0, 1)),
    loop().replace("torch.zeros_like(x)", "x * 2.0"),
    loop(add=SET).replace("torch.zeros_like(x)", "x * 2.0"),
    loop(expert=MASKED),
    loop(expert=PAIRS),
    loop(expert=COLUMNS),
    loop(expert=ONE_COLUMN),
    loop(expert=OWN + ADD),
    loop(expert=OWN_SCORE + ADD),
    loop(expert=COMPUTED + ADD),
    loop(expert=DENSE),
    loop(expert=DENSE).replace("idx = topk[1]", "idx = topk[1].clamp(max=1)"),
    loop(expert=DENSE).replace("torch.zeros_like(x)", "x * 2.0"),
    loop(expert=FULL),
    loop(expert=ASSIGN, head=HEAD_1),
    loop(expert=COPY, head=HEAD_1),
    loop(expert=PUT, head=HEAD_1),
    loop(expert=ACCUMULATE, head=HEAD_1.replace("empty", "zeros")),
    loop(expert=DENSE_1, head=HEAD_1.replace("empty", "zeros")),
    flat(BY_VIEW),
    MORE_ROWS,
    flat(BY_SLICE),
    *(loop(expert=expert, head=HEAD_3) for expert in (PUT_3, SET_3, MASKED, PAIRS_3, DENSE, FULL_3)),
    loop(expert=PUT_3, head=HEAD_3).replace("torch.zeros_like(x)", "x * 2.0"),
    loop(expert=DENSE, head=HEAD_3).replace("torch.zeros_like(x)", "0"),
    of_samples(loop()),
    of_samples(loop(expert=MASKED)),
    of_samples(loop(expert=DENSE).replace("-1, keepdim=True)", "-1)")),
], ids=["index_add", "setitem", "any order", "onto something", "set onto something", "masks", "masks of pairs",
        "columns", "one column", "numbers of experts", "scores by numbers of experts", "computed weights",
        "dense", "dense, equal choices", "dense, onto something", "scattered weights", "assigned",
        "copied", "put", "accumulated", "dense, one choice",
        "views of one matrix", "rows of no expert", "slices of one matrix",
        *(f"tokens of two dims, {how}" for how in (
            "put", "assigned", "masks", "masks of pairs", "dense", "scattered weights", "put onto something",
            "from nothing")), "samples", "masks of samples", "samples, dense"])  # fmt: skip
def test_meaning(source):
    before, gm, _ = raised(source)
    for rows in (1, 2, 7):
        assert_same_meaning(before, gm, exact=False, s0=rows, **({"s1": 3} if "s1" in source else {}))
    verify(gm, Level.MOE, Facts(MeshSpec.named({"ep": 1})))
    assert sum("grouped_linear" in str(n.target) for n in gm.graph.nodes) == 2
