"""refuse_unraised: golden, no-op, refusal, meaning."""

from __future__ import annotations

import pytest
from expecttest import assert_expected_inline

from moefx.errors import RaiseError
from moefx.ir.edit import copy_of
from moefx.options import Options
from moefx.passes import refuse_unraised
from tests.support.graphs import assert_same_meaning, context, graph, short
from tests.support.small import MOE

GATHERED = """
def graph(x: "f32[s0, 16]", gate: "f32[8, 16]", up: "f32[8, 24, 16]", bias: "f32[8, 24]"):
    idx = torch.topk(F.linear(x, gate), 2, dim=-1)[1]
    flat = idx.reshape(-1)
    chosen = up[flat]
    shift = bias[flat]
    hidden = torch.bmm(chosen, x[torch.arange(x.size(0) * 2) // 2].unsqueeze(-1)).squeeze(-1) + shift
    return (hidden,)
"""
SELECTED = (GATHERED.replace("up[flat]", "torch.index_select(up, 0, flat)")
            .replace("torch.topk(F.linear(x, gate), 2, dim=-1)[1]", "F.linear(x, gate).argsort(-1)[:, :2]"))
# A loop whose branches end in something else than an addition to the output.
LOOP = """
def graph(x: "f32[s0, 16]", gate: "f32[2, 16]", up: "f32[2, 16, 16]"):
    idx = torch.topk(F.linear(x, gate), 1, dim=-1)[1]
    token = torch.where(idx == 1)[0]
    rows = F.linear(x[token], up[1])
    y = torch.scatter(x, 0, token.unsqueeze(-1).expand(-1, 16), rows)
    return (y,)
"""
MASKED = LOOP.replace("token = torch.where(idx == 1)[0]", "token = (idx == 1).any(-1)").replace(
    "y = torch.scatter(x, 0, token.unsqueeze(-1).expand(-1, 16), rows)", "y = rows.sum(0)")
WEIGHED = """
def graph(x: "f32[s0, 16]", gate: "f32[2, 16]", up: "f32[2, 16, 16]"):
    topk = torch.topk(F.linear(x, gate), 1, dim=-1)
    mine = (topk[0] * (topk[1] == 1)).sum(-1, keepdim=True)
    y = F.linear(x * mine, up[1])
    return (y,)
"""
DENSE = """
def graph(x: "f32[s0, 16]", w: "f32[24, 16]", table: "f32[7, 16]", ids: "i64[s0]", heads: "f32[7, 16, 4]"):
    y = F.linear(x + table[ids], w)
    order = torch.argsort(ids)
    z = heads[ids]
    return (y, x[order], z)
"""
PLAIN = DENSE.replace(', heads: "f32[7, 16, 4]"', "").replace("heads[ids]", "x + 1.0")


def checked(source, **axes):
    gm, mode = graph(source)
    before = copy_of(gm)
    result = refuse_unraised.run(gm, context(mode, **axes))
    gm.graph.lint()
    return before, gm, result


def test_golden():
    """What it says is its product: the graph stays as it is."""
    before, gm, result = checked(GATHERED, dp=2)
    assert_expected_inline("\n".join(f"{node}: {reason}" for node, reason in result.skipped), """\
chosen (chosen): weights of the chosen experts are gathered per token""")
    assert short(gm) == short(before)
    assert result.changes == []


@pytest.mark.parametrize(("source", "axes"), [
    (MOE, {"ep": 2}), (MOE, {"dp": 2, "ep": 4}), (MOE, {"dp": 2}), (DENSE, {"dp": 2}), (DENSE, {"dp": 2, "ep": 1}),
], ids=["raised", "raised-dp", "no ep", "dense", "dense, one rank of ep"])  # fmt: skip
def test_noop(source, axes):
    before, gm, result = checked(source, **axes)
    assert short(gm) == short(before)
    assert (result.changes, result.skipped) == ([], [])


@pytest.mark.parametrize(("source", "place", "message"), [
    (GATHERED, "chosen", "weights of the chosen experts are gathered per token"),
    (SELECTED, "chosen", "weights of the chosen experts are gathered per token"),
    (LOOP, "token", "the tokens of expert 1 are picked, but what is done with them is not recognised"),
    (MASKED, "token", "the tokens of expert 1 are picked, but what is done with them is not recognised"),
    (WEIGHED, "mine", "tokens are weighed for expert 1, but what is done with them is not recognised"),
    (PLAIN, "the whole model", "no mixture of experts was found in the model"),
    (DENSE, "z", "no mixture of experts was found in the model, though `heads` looks like a part of one"),
], ids=["gathered", "selected", "loop", "masked", "weighed", "dense", "dense, of three dims"])  # fmt: skip
def test_refusal(source, place, message):
    with pytest.raises(RaiseError) as caught:
        checked(source, dp=1, ep=2)
    assert message in caught.value.what
    assert caught.value.where == place
    assert "einsums over one-hot blocks" in caught.value.hint
    if source not in (DENSE, PLAIN):
        with pytest.raises(RaiseError):  # even where one rank has all experts: another mesh would not
            checked(source, ep=1)
        assert checked(source, dp=2)[2].skipped


def test_what_looks_like_experts_stays_if_the_user_allows_it():
    gm, mode = graph(DENSE)
    ctx = context(mode, Options.named(strict=False), dp=1, ep=2)
    refuse_unraised.run(gm, ctx)
    assert list(ctx.report.left) == ["z"]
    assert "`heads` looks like a part of one" in ctx.report.left["z"]
    gm, mode = graph(PLAIN)
    with pytest.raises(RaiseError, match="for a dense model use a mesh with the dim 'dp' only"):
        refuse_unraised.run(gm, context(mode, Options.named(strict=False), dp=1, ep=2))


def test_one_raised_layer_does_not_hide_another():
    both = MOE.replace("    return (result,)", GATHERED.split("bias: ")[1].split("\n", 1)[1].split("    shift")[0]
                       .replace("gate", "gate[:, :]") + "    return (result, chosen)")
    with pytest.raises(RaiseError, match="gathered per token"):
        checked(both, dp=1, ep=2)


@pytest.mark.parametrize("source", [MOE, GATHERED, LOOP])
def test_meaning(source):
    before, gm, _ = checked(source, dp=2)
    assert_same_meaning(before, gm, s0=5)
