"""Every expert cut over `esp`: outputs and gradients of the whole model, on meshes of `dp`, `ep` and `esp`."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import moefx
from tests.support.handmade import D, with_layer
from tests.support.models import Case, chosen, shallow
from tests.support.parity import one_token, routing, skew
from tests.support.ranks import fake_world
from tests.support.scenarios import check_steps, steps_of
from tests.support.sharing import run_sharing

EVEN, UNEVEN = [(2, 8), (2, 8)], [(2, 6), (3, 10)]
EP_ESP = ((2, 2), ("ep", "esp"))
ESP = ((2,), ("esp",))
# Fused halves, interleaved halves with both biases, separate experts with biases, static blocks with biases; a loss of
# the router.
STYLES = ["mixtral-router_logits", "gpt_oss-grouped_mm", "loop-ungated", "gshard-grouped", "deepseek_v3-eager"]


@pytest.mark.parametrize("name", chosen(["loop-ungated", "gshard-grouped"], STYLES))
def test_every_style(name):
    shapes = [EVEN * 2] if name.startswith("gshard") else [UNEVEN * 2]
    case = shallow(name)
    run_sharing(4, check_steps, EP_ESP, case, steps_of(case, shapes))


@pytest.mark.parametrize("layout", [
    pytest.param(ESP, marks=pytest.mark.full), ((2, 2), ("dp", "esp")),
    pytest.param(((2, 2), ("esp", "dp")), marks=pytest.mark.full),
    pytest.param(((4,), ("etp",)), marks=pytest.mark.full),
    pytest.param(((2, 2, 2), ("dp", "ep", "esp")), marks=pytest.mark.full),
], ids=lambda layout: "-".join(f"{name}{size}" for size, name in zip(*layout)))  # fmt: skip
@pytest.mark.parametrize("name", chosen(["gpt_oss-grouped_mm"], ["gpt_oss-grouped_mm", "loop-plain", "gshard-swiglu"]))
def test_meshes(name, layout):
    world = 8 if len(layout[0]) == 3 else sum(layout[0]) if len(layout[0]) == 2 else layout[0][0]
    shapes = (EVEN if name.startswith("gshard") else UNEVEN) * 4
    case = shallow(name)
    run_sharing(world, check_steps, layout, case, steps_of(case, [shapes[:world]]))


def test_all_tokens_go_to_the_ranks_of_two_experts():
    case = replace(shallow("gpt_oss-grouped_mm"), edit=partial(skew, experts=[0, 1]))
    steps = steps_of(case, [UNEVEN * 2])
    assert sorted(routing(case.build(), steps[0][0][0]).chosen[-1].unique().tolist()) == [0, 1]
    run_sharing(4, check_steps, EP_ESP, case, steps)


def test_most_experts_are_idle():
    case = shallow("loop-sigmoid")
    run_sharing(4, check_steps, EP_ESP, case, steps_of(case, [EVEN * 2], change=partial(one_token, token=7)))


@pytest.mark.parametrize("options", [
    {"chunks": 2, "scheduler": "optsche", "alltoall": "pipe"},
    # The ways of rows are those of any mesh: tests/test_pipelining.py.
    pytest.param({"chunks": 3, "alltoall": "2dh", "ranks_per_node": 2}, marks=pytest.mark.full),
    pytest.param({"split": "baseline"}, marks=pytest.mark.full),
], ids=["optsche pipe", "2dh", "Parm's baseline"])  # fmt: skip
def test_pipelines(options):
    case = shallow("mixtral-grouped_mm")
    compile_fn = partial(moefx.compile, options=moefx.Options.named(**options))
    run_sharing(4, check_steps, EP_ESP, case, steps_of(case, [UNEVEN * 2]), compile_fn)


class Normed(nn.Module):
    """Experts that normalise over their hidden dim."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(D, 4)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(D, 24), nn.LayerNorm(24, elementwise_affine=False),
                                                   nn.Linear(24, D)) for _ in range(4))  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, -2)
        weights, chosen = self.gate(flat).softmax(-1).topk(2)
        y = torch.zeros_like(flat)
        for e, expert in enumerate(self.experts):
            token, choice = torch.where(chosen == e)
            y.index_add_(0, token, expert(flat[token]) * weights[token, choice, None])
        return y.view_as(x)


def test_experts_that_stay_whole_have_right_gradients():
    case = Case("normed", partial(with_layer, Normed))
    run_sharing(4, check_steps, EP_ESP, case, steps_of(case, [UNEVEN * 2]))


def test_what_cannot_be_cut_stays_whole_and_is_named():
    with fake_world(4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "esp"))
        with closing(moefx.compile(with_layer(Normed), mesh)) as compiled:
            with pytest.warns(UserWarning, match=r"not cut over 'esp':\n  mlp.*: it mixes hidden entries: layer_norm"):
                compiled.prepare(torch.arange(12).view(2, 6))
            found = moefx.explain(compiled)
    (where, why), = found.programs[0].not_cut
    assert "layer_norm" in why
    assert f"whole on every rank of 'esp': {where}: {why}" in " ".join(str(found).split())
