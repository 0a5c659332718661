"""r: to how many of the ranks that share an expert a token's rows go, weights gathered over the others. Numbers of the
eager model, for every r and from step to step; what is sent, to the byte; where parameters lie."""

from __future__ import annotations

import contextlib
import math
from contextlib import closing
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import moefx
from moefx.errors import MeshError, UnsupportedUse
from tests.support.handmade import D
from tests.support.models import shallow
from tests.support.parity import compare, gradients, one_token, routing, skew
from tests.support.peaks import measured, noting_rows, planned
from tests.support.ranks import fake_world, run_ranks
from tests.support.scenarios import check_compiled, check_steps, compiled_case, steps_of, sum_of
from tests.support.sharing import run_sharing

EVEN, UNEVEN = [(2, 8), (2, 8)], [(2, 6), (3, 10)]
EP_ESP, WIDE, SIX = ((2, 2), ("ep", "esp")), ((2, 4), ("ep", "esp")), ((6,), ("esp",))
EXPERTS, FULL = 8, pytest.mark.full


def with_r(options, model, mesh):
    return moefx.compile(model, mesh, **options)


def check(world, layout, name, case=None, **options):
    case = case or shallow(name)
    shapes = (EVEN if name.startswith("gshard") else UNEVEN) * world
    run_sharing(world, check_steps, layout, case, steps_of(case, [shapes[:world]]), partial(with_r, options))


@pytest.mark.parametrize(("name", "layout", "options"), [
    ("loop-plain", EP_ESP, {"r": 1, "keep": "eager", "chunks": 2, "scheduler": "optsche"}),
    # Interleaved halves, and both biases.
    pytest.param("gpt_oss-grouped_mm", ((1, 4), ("ep", "esp")), {"r": 2, "verify": 2}, marks=FULL),
    pytest.param("gshard-grouped", EP_ESP, {"r": 1, "chunks": 2, "verify": 2}, marks=FULL),
    pytest.param("gshard-grouped", EP_ESP, {"r": 0, "verify": 2}, marks=FULL),
    pytest.param("mixtral-router_logits", WIDE, {"r": 2, "verify": 2}, marks=FULL),
    pytest.param("loop-ungated", SIX, {"r": 2, "verify": 2}, marks=FULL),
    pytest.param("loop-ungated", SIX, {"r": 3, "verify": 2}, marks=FULL),
    pytest.param("loop-ungated", WIDE, {"r": 2, "split": "s3", "verify": 2}, marks=FULL),
    pytest.param("qwen3_moe-frozen", EP_ESP, {"r": 1, "verify": 2}, marks=FULL),
    pytest.param("deepseek_v3-eager", ((2, 2, 2), ("dp", "ep", "esp")), {"r": 1, "verify": 2}, marks=FULL),
    pytest.param("loop-plain", ((2, 2), ("dp", "ep")), {"r": 0, "verify": 2}, marks=FULL),
    pytest.param("loop-plain", EP_ESP, {"r": 1, "shard_dense": True, "verify": 2}, marks=FULL),
], ids=str)  # fmt: skip
def test_every_style(name, layout, options):
    check(math.prod(layout[0]), layout, name, **options)


def test_experts_that_ranks_share_have_no_homes():
    """A checkpoint says so, and nobody moves them."""
    with fake_world(4):
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("esp",))
        case = shallow("loop-plain")
        with closing(moefx.compile(case.build(), mesh, r=2, example_inputs=case.batch(0))) as compiled:
            assert compiled.placement_state()["homes"] == {}
            with pytest.raises(UnsupportedUse, match=r"no program spreads experts of mlp(.|\n)*on a mesh with ep"):
                compiled.move_experts({"mlp": [0] * EXPERTS})


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
        for _ in range(2):
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
    # Some of the ranks that share an expert and none of them: all and one are taken in turns on EP_ESP below.
    (8, WIDE, (2, 0), run_sharing), pytest.param(8, WIDE, (2, 4, 1, 0), run_sharing, marks=FULL),
    pytest.param(4, EP_ESP, (1, 2, 0), run_ranks, marks=FULL),
    pytest.param(4, ((1, 4), ("ep", "esp")), (2, 4, 1, 0), run_sharing, marks=FULL),
    pytest.param(6, ((1, 6), ("ep", "esp")), (2, 3, 6, 1, 0), run_sharing, marks=FULL),
    pytest.param(8, ((2, 2, 2), ("dp", "ep", "esp")), (2, 1, 0), run_sharing, marks=FULL),
], ids=lambda each: str(each[0]) if isinstance(each, tuple) else "")  # fmt: skip
def test_r_changes_every_step(world, layout, rs, run):
    case = shallow("loop-plain")
    steps = steps_of(case, [(UNEVEN * world)[:world]])
    ids = [routing(case.build(), batch).chosen[-1] for batch in steps[0][0]]
    run(world, check_r_every_step, layout, case, steps, rs, ids)


def check_sums(rank, world, layout, case, steps, rs):
    """Gradients of several forwards, each with another r, are one sum: in `no_sync`, and with all forwards before all
    backwards."""
    wanted = sum_of(steps)
    with closing(compiled_case(case, layout, partial(with_r, {"r": rs[0]}))) as compiled:
        for again in range(2):
            compiled.zero_grad()
            outs = []
            for number, (batches, _) in enumerate(steps):
                is_last = number == len(steps) - 1
                compiled.use(r=rs[(number + again) % len(rs)])
                with contextlib.nullcontext() if is_last else compiled.no_sync():
                    outs.append(compiled(**batches[rank]))
                    if not again:
                        outs.pop().loss.backward()
            for out in outs:
                out.loss.backward()
            compare(gradients(compiled), wanted).check(f"{case.name}, {again}, rank {rank}")


def test_another_r_in_every_micro_step():
    case = shallow("loop-plain")
    run_sharing(4, check_sums, EP_ESP, case, steps_of(case, [UNEVEN * 2] * 3), (1, 2, 0))


@pytest.mark.parametrize("r", [1, pytest.param(0, marks=FULL)])
def test_all_tokens_go_to_two_experts(r):
    case = replace(shallow("gpt_oss-grouped_mm"), edit=partial(skew, experts=[0, 1]))
    check(4, EP_ESP, case.name, case, r=r)


@pytest.mark.parametrize("r", [1, pytest.param(0, marks=FULL)])
def test_most_experts_are_idle(r):
    case = shallow("loop-sigmoid")
    steps = steps_of(case, [EVEN * 2], change=partial(one_token, token=7))
    run_sharing(4, check_steps, EP_ESP, case, steps, partial(with_r, {"r": r}))


def test_refusals():
    """An r that the mesh does not have is named before anything is compiled, and changes nothing."""
    with fake_world(4):
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("esp",))
        with pytest.raises(MeshError, match="r is 3, and 4 ranks share an expert"):
            with_r({"r": 3}, shallow("loop-plain").build(), mesh)
        with closing(with_r({}, shallow("loop-plain").build(), mesh)) as compiled:
            with pytest.raises(MeshError, match=r"'esp' was not divided.*\n.*r=4"):
                compiled.use(r=2)
            compiled.use(r=1)
        with closing(with_r({"r": 4}, shallow("loop-plain").build(), mesh)) as compiled:
            assert compiled.mesh.mesh_dim_names == ("esp0", "esp1")
            compiled.use(r=2)


class Layer(nn.Module):
    """Experts whose weights are much larger than what goes through them."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(64, 4)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(64, 512, bias=False), nn.ReLU(),
                                                   nn.Linear(512, 64, bias=False)) for _ in range(4))  # fmt: skip

    def forward(self, x):
        weights, chosen = self.gate(x).softmax(-1).topk(2)
        y = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            token, choice = torch.where(chosen == e)
            y.index_add_(0, token, expert(x[token]) * weights[token, choice, None])
        return x + y


@pytest.mark.parametrize("r", [1, pytest.param(0, marks=FULL)])
def test_memory(r):
    """As was planned, with three layers: one matrix is used while the next arrives, where it is put together."""
    matrix = 64 * 512 * 4 * (2 if r else 4)
    with fake_world(4), noting_rows():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "esp"))
        with closing(with_r({"r": r, "dynamic": False}, nn.Sequential(Layer(), Layer(), Layer()), mesh)) as model:
            x = torch.randn(8, 64)
            model(x).sum().backward()
            wanted, found = planned(model), measured(model, x, steps=1)
    assert {name: found[name] == pytest.approx(wanted[name], rel=0.05) for name in found} == dict.fromkeys(found, True)
    assert 3 * matrix < found["forward"] < 4 * matrix
