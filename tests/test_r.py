"""r: to how many of the ranks that share an expert a token's rows go, weights gathered over the others. Numbers of the
eager model, for every r and from step to step; what is sent, to the byte; where parameters lie."""

from __future__ import annotations

import math
from contextlib import closing
from functools import partial

import pytest

import moefx
from tests.support.handmade import D
from tests.support.models import shallow
from tests.support.parity import routing
from tests.support.ranks import run_ranks
from tests.support.scenarios import check_compiled, check_steps, compiled_case, steps_of
from tests.support.sharing import run_sharing

EVEN, UNEVEN = [(2, 8), (2, 8)], [(2, 6), (3, 10)]
EP_ESP, WIDE, SIX = ((2, 2), ("ep", "esp")), ((2, 4), ("ep", "esp")), ((6,), ("esp",))
EXPERTS, FULL = 8, pytest.mark.full


def with_r(options, model, mesh):
    return moefx.compile(model, mesh, moefx.Options(**options))


def check(world, layout, name, case=None, **options):
    case = case or shallow(name)
    shapes = (EVEN if name.startswith("gshard") else UNEVEN) * world
    run_sharing(world, check_steps, layout, case, steps_of(case, [shapes[:world]]), partial(with_r, options))


@pytest.mark.parametrize(("name", "layout", "options"), [
    ("gpt_oss-grouped_mm", ((1, 4), ("ep", "esp")), {"r": 2, "verify": 2}),  # interleaved halves, and both biases
    pytest.param("gshard-grouped", EP_ESP, {"r": 1, "chunks": 2, "verify": 2}, marks=FULL),
    pytest.param("gshard-grouped", EP_ESP, {"r": 0, "verify": 2}, marks=FULL),
    pytest.param("mixtral-router_logits", WIDE, {"r": 2, "verify": 2}, marks=FULL),
    pytest.param("loop-ungated", SIX, {"r": 2, "verify": 2}, marks=FULL),
    pytest.param("loop-ungated", SIX, {"r": 3, "verify": 2}, marks=FULL),
    pytest.param("loop-ungated", WIDE, {"r": 2, "schedule": "s3", "verify": 2}, marks=FULL),
    pytest.param("qwen3_moe-frozen", EP_ESP, {"r": 1, "verify": 2}, marks=FULL),
    pytest.param("deepseek_v3-eager", ((2, 2, 2), ("dp", "ep", "esp")), {"r": 1, "verify": 2}, marks=FULL),
    pytest.param("loop-plain", ((2, 2), ("dp", "ep")), {"r": 0, "verify": 2}, marks=FULL),
    pytest.param("loop-plain", EP_ESP, {"r": 1, "keep": "eager", "chunks": 2, "scheduler": "optsche"}, marks=FULL),
    pytest.param("loop-plain", EP_ESP, {"r": 1, "shard_dense": True, "verify": 2}, marks=FULL),
], ids=str)  # fmt: skip
def test_every_style(name, layout, options):
    check(math.prod(layout[0]), layout, name, **options)


# From step to step


def exchanged(compiled, kind, axes):
    """Bytes of the layer in the last step; those of counts go over other axes."""
    axes, trace = {dim for dim in axes if compiled._spec.root[dim] > 1}, compiled._session.trace
    return sum(each.num_bytes for each in trace if (each.kind, {*each.axes}, each.region) == (kind, axes, "mlp"))


def check_r_every_step(rank, world, layout, case, steps, rs, chosen):
    """Another r in every step, round and round: right numbers, no program made twice, no parameter moved, and as many
    bytes as the formulas say."""
    esp = dict(zip(layout[1], layout[0]))["esp"]
    with closing(compiled_case(case, layout, partial(with_r, {"r": esp}))) as compiled:
        addresses = None
        for turn in range(2):
            for r in rs:
                compiled.use(r=r)
                check_compiled(rank, layout, case, steps, compiled)
                found = {name: param.to_local().data_ptr() for name, param in compiled.named_parameters()}
                assert addresses in (None, found), f"parameters moved for r={r}"
                addresses = found
                check_bytes(compiled, rank, chosen, r)
        assert len(compiled._variants) == len(rs)


def check_bytes(compiled, rank, chosen, r):
    """Weights are gathered twice and their gradients scattered once; of rows all but those that stay go out, and as
    many as arrive come back, forward and backward."""
    spec = compiled._spec
    tokens = spec.token_dims(r)
    rest = [dim for dim in spec.dims("esp" if r else "ep+esp") if dim not in tokens and spec.root[dim] > 1]
    others = spec.size(rest) - 1
    weights = sum(param.to_local().numel() * 4 for name, param in compiled.named_parameters() if ".experts." in name)
    assert exchanged(compiled, "all_gather", rest) == 2 * others * weights
    assert exchanged(compiled, "reduce_scatter", rest) == others * weights
    if r:
        place, here = spec.place("ep", spec.coordinates(rank)), spec.coordinates(rank)
        near = [each for each in range(len(chosen)) if all(spec.coordinates(each)[dim] == here[dim] for dim in
                                                           {*spec.root} - {*spec.dims("ep"), *tokens})]  # fmt: skip
        each = EXPERTS // spec.size("ep")
        stay = {other: int((chosen[other].flatten() // each == place).sum()) for other in near}
        rows = r * chosen[rank].numel() - stay[rank] + sum(stay.values()) - stay[rank]
        assert exchanged(compiled, "all_to_all", [*spec.dims("ep"), *tokens]) == 2 * rows * D * 4


@pytest.mark.parametrize(("world", "layout", "rs", "run"), [
    (4, ((2, 2), ("ep", "esp")), (1, 2, 0), run_ranks), (8, WIDE, (2, 4, 1, 0), run_sharing),
    pytest.param(4, ((1, 4), ("ep", "esp")), (2, 4, 1, 0), run_sharing, marks=FULL),
    pytest.param(6, ((1, 6), ("ep", "esp")), (2, 3, 6, 1, 0), run_sharing, marks=FULL),
    pytest.param(8, ((2, 2, 2), ("dp", "ep", "esp")), (2, 1, 0), run_sharing, marks=FULL),
], ids=lambda each: str(each[0]) if isinstance(each, tuple) else "")  # fmt: skip
def test_r_changes_every_step(world, layout, rs, run):
    case = shallow("loop-plain")
    steps = steps_of(case, [(UNEVEN * world)[:world]])
    ids = [routing(case.build(), batch).chosen[-1] for batch in steps[0][0]]
    run(world, check_r_every_step, layout, case, steps, rs, ids)
