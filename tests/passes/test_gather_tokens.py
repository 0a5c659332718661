"""gather_tokens: golden, no-op, refusal, meaning, also through placement: Parm's baseline."""

# ruff: noqa: E501 (golden texts)

from __future__ import annotations

import re

import pytest
import torch
from expecttest import assert_expected_inline

from moefx.analysis.checking.compare import run
from moefx.axes import MeshSpec
from moefx.compiler.pipeline import place_experts
from moefx.errors import UnsupportedUse, VerifyError
from moefx.ir.level import Level
from moefx.ir.op import value
from moefx.ir.verify import verify
from moefx.ir.world import ThreadWorld
from moefx.options import Options
from moefx.passes import gather_tokens
from tests.passes.test_shard_dense import again, called, changed, without
from tests.passes.test_split_tokens import BLOCKS, behind
from tests.support.graphs import short
from tests.support.placing import facts_of, placed
from tests.support.small import MOE

_ops = torch.ops.moefx
SUM, GATHER, KEEP = _ops.sum_rows.default, _ops.gather_rows.default, _ops.keep_rows.default
OWN, COMMON = _ops.own_copy.default, _ops.common_copy.default
WHOLE = MOE.replace("F.silu(m.grouped", "F.softmax(m.grouped").replace(
    "grouped_linear.default(inside, up_e, counts, False))", "grouped_linear.default(inside, up_e, counts, False), -1)")
RESHAPED = BLOCKS.replace("bmm(inside, w_e)", "bmm(F.silu(inside), w_e)").replace(
    'w: "f32[4, 16, 24]"', 'w: "f32[4, 16, 24]", v: "f32[4, 24, 16]"').replace(
    "    result", "    v_e = expert_parameter(v, 0)\n    out_1 = torch.bmm(out.tanh(), v_e)\n    result").replace(
    "leave(out,", "leave(out_1,")


BASELINE = Options.named(split="baseline")
PLAIN = MeshSpec.named({"ep": 2, "esp": 2})
FOLDED = MeshSpec.folded({"dp": 2, "mp": 2}, 2, 2)  # ep is dp, esp is mp
OVER_ALL = MeshSpec.folded({"dp": 2, "mp": 2}, 1, 4)


def gathered(source: str, options: Options | None = BASELINE, **axes: int):
    return placed(source, run=gather_tokens.run, options=options, **axes)


def test_golden():
    _, gm, result, _ = gathered(MOE, ep=2, esp=2)
    assert_expected_inline(short(gm), """\
def graph(x: "f32[s0, 16]", gate: "f32[8, 16]", up: "f32[8, 24, 16]", down: "f32[8, 16, 24]"):
    up_e = expert_parameter(up, 0)  # f32[8, 24, 16]
    down_e = expert_parameter(down, 0)  # f32[8, 16, 24]
    linear = F.linear(x, gate)  # f32[s0, 8]
    scores = F.softmax(linear, dim=-1)  # f32[s0, 8]
    topk = torch.topk(scores, 2, dim=-1)  # (f32[s0, 2], i64[s0, 2])
    weights = topk[0]  # f32[s0, 2]
    idx = topk[1]  # i64[s0, 2]
    size = idx.size(0)  # s0
    sizes = m.exchange_sizes.default(size, 2, 'esp')  # i64[2]
    rows_of_all = m.total_size.default(sizes)  # u0
    idx_gathered = m.gather_rows.default(idx, sizes, rows_of_all, 0, 2, 'esp')  # i64[u0, 2]
    route = m.route.default(idx_gathered, 8)  # (i64[2*u0], i64[8])
    perm = route[0]  # i64[2*u0]
    counts = route[1]  # i64[8]
    x_gathered = m.gather_rows.default(x, sizes, rows_of_all, 0, 2, 'esp')  # f32[u0, 16]
    rows = m.dispatch.default(x_gathered, perm, 2)  # f32[2*u0, 16]
    inside = enter(rows, counts, -1, -1, 0)  # f32[2*u0, 16]
    grouped_linear_default = m.grouped_linear.default(inside, up_e, counts, False)  # f32[2*u0, 24]
    hidden = F.silu(grouped_linear_default)  # f32[2*u0, 24]
    out = m.grouped_linear.default(hidden, down_e, counts, False)  # f32[2*u0, 16]
    outside = leave(out, counts, -1, -1, 0)  # f32[2*u0, 16]
    weights_gathered = m.gather_rows.default(weights, sizes, rows_of_all, 0, 2, 'esp')  # f32[u0, 2]
    result = m.combine.default(outside, perm, 2, weights_gathered)  # f32[u0, 16]
    result_own = m.keep_rows.default(result, sizes, size, 0, 2, 'esp')  # f32[s0, 16]
    return (result_own,)  # (f32[s0, 16],)
""")
    assert result.changes == ["region 0 gets the tokens of 2 ranks"]


def test_golden_behind_placement():
    """Rows are exchanged over ep alone, and what parts of experts made of them is summed before they go back."""
    _, gm, *_ = placed(MOE, options=BASELINE, ep=2, esp=2)
    lines = [line.split("  #")[0].strip() for line in short(gm).splitlines()]
    assert_expected_inline("\n".join(line for line in lines if re.search(r"all_to_all|regroup|sum_rows|keep_rows", line)), """\
r0_enter_a2a = m.all_to_all.default(rows, r0_host, r0_rows, 2, 'ep', False)
r0_enter_regroup = m.regroup.default(r0_enter_a2a, r0_host, 2, 'ep', False)
grouped_linear_default = m.grouped_linear.default(r0_enter_regroup, use_up, r0_slots, False)
r0_sum = m.sum_rows.default(out, r0_slots, -1, 'esp')
r0_leave_regroup = m.regroup.default(r0_sum, r0_host, 2, 'ep', True)
r0_leave_a2a = m.all_to_all.default(r0_leave_regroup, r0_host, r0_sent, 2, 'ep', True)
result_own = m.keep_rows.default(result, sizes, size, 0, 2, 'esp')""")


def test_golden_where_ranks_gather_copies():
    """Ranks of `esp` that read the same data have a copy each, of which each counts for its share."""
    _, gm, *_ = gathered(MOE, mesh=FOLDED)
    lines = [line.split("  #")[0].strip() for line in short(gm).splitlines()]
    assert_expected_inline("\n".join(line for line in lines if re.search(r"gather|copy|keep", line)), """\
idx_gathered = m.gather_rows.default(idx, sizes, rows_of_all, 0, 2, 'mp')
route = m.route.default(idx_gathered, 8)
x_copy = m.own_copy.default(x, 2, 'mp')
x_gathered = m.gather_rows.default(x_copy, sizes, rows_of_all, 0, 2, 'mp')
rows = m.dispatch.default(x_gathered, perm, 2)
weights_copy = m.own_copy.default(weights, 2, 'mp')
weights_gathered = m.gather_rows.default(weights_copy, sizes, rows_of_all, 0, 2, 'mp')
result = m.combine.default(outside, perm, 2, weights_gathered)
result_own = m.keep_rows.default(result, sizes, size, 0, 2, 'mp')
result_own_copy = m.common_copy.default(result_own, 2, 'mp')
return (result_own_copy,)""")


@pytest.mark.parametrize(("options", "axes"), [(None, {"esp": 2}), (BASELINE, {"ep": 2}), (BASELINE, {"mp": 2})])
def test_noop(options, axes):
    before, gm, result, _ = gathered(MOE, options, **axes)
    assert short(gm) == short(before)
    assert not result.changes


def test_refusal():
    with pytest.raises(UnsupportedUse, match=r"'baseline' cannot be: counts depends on the routing"):
        gathered(behind("    spread = counts.float().std()", "result, spread"), esp=2)
    with pytest.raises(UnsupportedUse, match=r"needs experts that are cut over 'esp', and these are whole: .*softmax"):
        placed(WHOLE, options=BASELINE, esp=2)


@pytest.mark.parametrize(("source", "mesh"), [
    (MOE, MeshSpec.named({"esp": 2})), (MOE, PLAIN), (MOE, FOLDED), (MOE, OVER_ALL),
    (RESHAPED, MeshSpec.named({"esp": 2})), (RESHAPED, MeshSpec.folded({"mp": 2}, 1, 2)),
], ids=["esp", "ep esp", "folded", "esp over dp and mp", "blocks", "folded blocks"])  # fmt: skip
def test_meaning(source, mesh):
    check_meaning(source, mesh, BASELINE)


def check_meaning(source: str, mesh: MeshSpec, options: Options, run_passes=place_experts.run) -> None:
    """Every rank has the outputs and the gradients of its own tokens; those of parameters are means over what ranks
    read."""
    before, gm, *_ = placed(source, run=run_passes, options=options, mesh=mesh)
    layouts = {node.name: node.meta["moefx"].layout for node in gm.graph.find_nodes(op="placeholder")}
    torch.manual_seed(0)
    shapes = {node.name: value(node).shape for node in before.graph.find_nodes(op="placeholder")}
    params = {name: torch.randn(tuple(shape)) for name, shape in shapes.items() if not name.startswith("x")}
    batches = [torch.randn([s if isinstance(s, int) else 3 + 2 * place for s in shapes["x"]])
               for place in range(mesh.size("data"))]  # fmt: skip
    wanted = [_differentiated(before, {"x": x, **params}) for x in batches]
    order = [node.name for node in gm.graph.find_nodes(op="placeholder")]

    def body(rank: int):
        place = mesh.coordinates(rank)
        mine = {"x": batches[mesh.place("data", place)], "r0_table": torch.arange(8).unsqueeze(1)}
        mine |= {name: layouts[name].take(param, mesh.root, place).clone() for name, param in params.items()}
        return _differentiated(gm, {name: mine[name] for name in order})

    for rank, (out, grads) in enumerate(ThreadWorld(mesh.root).run(body)):
        mine = wanted[mesh.place("data", mesh.coordinates(rank))]
        torch.testing.assert_close(out, mine[0], rtol=1e-4, atol=1e-4)
        for name, grad in grads.items():
            want = mine[1][name]
            if name != "x":
                mean = sum(each[name] for _, each in wanted) / len(wanted)
                want = layouts[name].take(mean, mesh.root, mesh.coordinates(rank))
            error = (grad - want).abs().max() / want.abs().max()
            assert error < 1e-5, f"the gradient of {name} on rank {rank} is off by {error:.1e}"


def _differentiated(gm, inputs):
    mine = {name: x.clone().requires_grad_(x.is_floating_point()) for name, x in inputs.items()}
    y = run(gm, list(mine.values()))[0]
    (y * torch.linspace(-1, 1, y.numel()).view(y.shape)).sum().backward()
    return y.detach(), {name: x.grad for name, x in mine.items() if x.is_floating_point()}


FAULTS = {
    "parts are not summed": (without(SUM), "back by a2a over 'ep' after 1 hops"),
    "parts are summed twice": (again(SUM), "back by sum over 'esp' after 2 hops"),
    "choices are not gathered": (without(GATHER, "idx"), r"dispatch: x is of u\d+ tokens, its routing of s\d+"),
    "tokens are not gathered": (without(GATHER, "x"), r"dispatch: x is of s\d+ tokens, its routing of u\d+"),
    "weights are not gathered": (without(GATHER, "weights"), r"weights is of s\d+ tokens, its routing of u\d+"),
    "tokens are gathered twice": (again(GATHER, "x"), r"gather_rows takes u\d+ rows, of s\d+ that ranks told"),
    "tokens of others": (changed(GATHER, 5, "ep", "x"), "gather_rows runs over 'ep'.*sum over 'esp'"),
    "sizes of others": (changed(_ops.exchange_sizes.default, 2, "ep"), "exchange_sizes runs over 'ep'"),
    "all results are kept": (without(KEEP), "output 0 was .* and became"),
    "results are kept twice": (again(KEEP), r"keep_rows takes s\d+ rows, of u\d+ that ranks told"),
    "results of others are kept": (changed(KEEP, 5, "ep"), "keep_rows runs over 'ep'"),
}
FAULTS_OF_COPIES = {
    "no copy": (without(OWN), "over 'mp', gather_rows takes what is a part, and gets what is the same on every rank"),
    "two copies": (again(OWN), "over 'mp', own_copy takes what is the same on every rank, and gets what is a part"),
    "not common": (without(COMMON), "over 'mp', output 0 is a part"),
    "copies of other ranks": (changed(OWN, 2, "dp"), "over 'mp', gather_rows takes what is a part, and gets what is the"),
    "copies that are none": (changed(COMMON, 1, 4), "takes 'mp' for 4 ranks, it has 2"),
    "another share": (lambda gm: called(gm, COMMON).insert_arg(3, 0.25), "2 copies are scaled by 0.25"),
}


@pytest.mark.parametrize(("mesh", "fault"), [*((PLAIN, name) for name in FAULTS),
                                             *((FOLDED, name) for name in FAULTS_OF_COPIES)],
                         ids=lambda each: each if isinstance(each, str) else "")  # fmt: skip
def test_faults_are_named(mesh, fault):
    damage, message = (FAULTS | FAULTS_OF_COPIES)[fault]
    before, gm, *_, ctx = placed(MOE, options=BASELINE, mesh=mesh)
    facts = facts_of(before, gm, ctx)
    verify(gm, Level.PLACED, facts)
    damage(gm)
    with pytest.raises(VerifyError, match=re.compile(message, re.DOTALL)):
        verify(gm, Level.PLACED, facts)
