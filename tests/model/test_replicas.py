"""Ranks whose copies of the weights come apart in training are told so."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import moefx
from moefx.errors import DivergenceError, MoefxError
from moefx.layout import Cut, Layout
from moefx.model.replicas import Replicas
from moefx.runtime.expert_tensor import ExpertTensor
from moefx.runtime.parameters import distribute_parameters, lay_out, local
from moefx.runtime.session import Session
from tests.support.handmade import Loop, OneLayer
from tests.support.ranks import run_threads
from tests.support.sharing import run_sharing

pytestmark = pytest.mark.usefixtures("cached")
LAYOUTS = {
    "columns": Layout((Cut(1, ("mp",), (6,)),)), "halves": Layout((Cut(0, ("mp",), (2, 2)),)),
    "rows": Layout.rows(4, "ep"), "uneven": Layout.spread((1, 0, 1, 1), "ep", 2),
    "owned": Layout(owner=(("ep",), 1)), "whole": Layout(),
}  # fmt: skip
TOKENS = torch.arange(12).view(2, 6)


def same_models(count: int) -> list[nn.Module]:
    torch.manual_seed(0)
    model = OneLayer(Loop(num_experts=4))
    return [copy.deepcopy(model) for _ in range(count)]


def train(axes: dict[str, int], steps: int, update: Callable, *, prepare: Callable | None = None,
          **options) -> list[tuple[int, str | None]]:  # fmt: skip
    """Of every rank: how many steps it came through, and what it was told then. update(rank, step, optimizer)."""

    def body(rank: int, world: int) -> tuple[int, str | None]:
        mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
        compiled = moefx.compile(models[rank], mesh, verify=0, dynamic=False, **options)
        optimizer = torch.optim.AdamW(compiled.parameters(), lr=1e-3)
        try:
            for step in range(steps):
                compiled(TOKENS).logits.square().mean().backward()
                update(rank, step, optimizer)
                optimizer.zero_grad()
        except DivergenceError as error:
            return step, str(error)
        finally:
            compiled.close()
        return steps, None

    models = same_models(math.prod(axes.values()))
    for model in models if prepare else ():
        prepare(model)
    return run_sharing(len(models), body)


def skips(who: int, when: int) -> Callable:
    return lambda rank, step, optimizer: None if (rank, step) == (who, when) else optimizer.step()


def test_ranks_that_train_alike_go_on():
    assert train({"dp": 2, "ep": 2}, 6, lambda rank, step, optimizer: optimizer.step()) == [(6, None)] * 4


@pytest.mark.parametrize("axes", [{"ep": 2}, {"dp": 2}])
def test_an_update_that_one_rank_skips(axes):
    (first, text), (second, other) = train(axes, 6, skips(1, 2))
    assert (first, second) == (4, 4)  # compared after 1, 2, 4 steps
    assert text == other
    assert "rank 1 of the mesh has made 3 optimizer steps where rank 0 has made 4" in text
    assert "same optimizer, learning rate and number of steps" in text


def freeze_all_but_experts(model: nn.Module) -> None:
    for name, param in model.named_parameters():
        param.requires_grad_(".experts." in name)


@pytest.mark.parametrize("prepare", [None, freeze_all_but_experts])
def test_another_learning_rate(prepare):
    """Also of experts alone, of which there is one copy."""

    def update(rank, step, optimizer):
        optimizer.param_groups[0]["lr"] = 1e-3 * (1 + rank)
        optimizer.step()

    for step, text in train({"ep": 2}, 6, update, prepare=prepare):
        assert step == 1
        assert "rank 1 of the mesh has made optimizer steps with settings other than rank 0's" in text
        assert "lr is 0.001 on rank 0 but 0.002 on that rank" in text


def test_another_learning_rate_of_a_step_before():
    def update(rank, step, optimizer):
        optimizer.param_groups[0]["lr"] = 1e-3 * (1 + (rank and step == 2))
        optimizer.step()

    for step, text in train({"ep": 2}, 6, update, prepare=freeze_all_but_experts):
        assert step == 4
        assert "settings other than rank 0's before the last step" in text


def test_another_value_of_a_parameter():
    def update(rank, step, optimizer):
        optimizer.step()
        with torch.no_grad():
            optimizer.param_groups[0]["params"][0].mul_(1 + rank * 1e-6)

    for step, text in train({"ep": 2}, 6, update):
        assert step == 1
        assert "rank 1 of the mesh has different values of embed.weight than rank 0" in text


def test_an_update_of_experts_of_which_there_is_one_copy():
    for step, text in train({"ep": 2}, 6, skips(0, 0), prepare=freeze_all_but_experts):
        assert step == 1
        assert "rank 1 of the mesh has made 1 optimizer steps where rank 0 has made 0" in text


def test_experts_of_one_place_come_apart():
    """Copies of an expert are on those ranks alone that stand at its place on the expert axis; all ranks are told."""

    def update(rank, step, optimizer):
        optimizer.step()
        for param in optimizer.param_groups[0]["params"] if rank == 3 else ():
            if isinstance(param, ExpertTensor):
                with torch.no_grad():
                    param.to_local().add_(1e-3)

    found = train({"dp": 2, "ep": 2}, 6, update)
    assert [step for step, _ in found] == [1] * 4
    for _, text in found:
        assert "rank 3 of the mesh has different values of mlp.experts." in text
        assert "than rank 1 (" in text


@pytest.mark.parametrize("axes", [("ep", "mp"), ("mp", "ep")])
def test_parts_of_dense_parameters_are_compared_among_the_ranks_that_share_them(axes):
    """Whatever the mesh: parts of others are no copies, and copies along an axis that experts are spread over are."""

    def body(rank: int, world: int, wrong: tuple[int, str] | None) -> str | None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=axes)
        model = nn.ParameterDict({name: value.clone() for name, value in values.items()})
        distribute_parameters(model, mesh)
        for name, layout in LAYOUTS.items():
            lay_out(model[name], layout)
        if wrong and wrong[0] == rank:
            local(model[wrong[1]]).mul_(2)
        session = Session(mesh, "test", timedelta(seconds=30))
        try:
            Replicas(model, session, every=1).compare([])
        except DivergenceError as error:
            return str(error)
        finally:
            session.close()
        return None

    torch.manual_seed(0)  # here: ranks that are threads share one generator
    values = {name: torch.randn(4, 6) for name in LAYOUTS}
    assert run_threads(4, body, None) == [None] * 4
    # The mesh coordinates of a rank are (rank // 2, rank % 2): whom it shares a part with, the lower one of the two.
    peers = {"columns": {0: None, 1: None, 2: 0, 3: 1}, "rows": {0: None, 1: 0, 2: None, 3: 2}}
    along_mp = peers["columns"] if axes == ("ep", "mp") else peers["rows"]
    along_ep = peers["rows"] if axes == ("ep", "mp") else peers["columns"]
    for rank, name, first in [(3, "columns", along_mp[3]), (3, "halves", along_mp[3]), (3, "rows", along_ep[3]),
                              (3, "uneven", along_ep[3]), (3, "owned", along_ep[3]), (3, "whole", 0)]:  # fmt: skip
        for text in run_threads(4, body, (rank, name)):
            assert f"rank {rank} of the mesh has different values of {name} than rank {first} (1 of 6 tensors" in text


def test_how_often():
    """After 1, 2 and every 3rd: what goes wrong after the fourth is seen after the sixth."""
    assert [step for step, _ in train({"ep": 2}, 8, skips(0, 4), compare_every=3)] == [6, 6]
    assert [step for step, _ in train({"ep": 2}, 7, skips(0, 4), compare_every=0)] == [7, 7]


def test_micro_steps_and_evaluation_are_no_steps():
    def body(rank: int, world: int) -> str:
        compiled = moefx.compile(models[rank], init_device_mesh("cpu", (2,), mesh_dim_names=("ep",)))
        compiled(TOKENS)
        with torch.no_grad():
            for param in compiled.parameters() if rank else ():
                param.to_local().mul_(2)
            compiled(TOKENS)
        with compiled.no_sync():
            compiled(TOKENS)
        with pytest.raises(DivergenceError) as caught:
            compiled(TOKENS)
        compiled.close()
        return str(caught.value)

    models = same_models(2)
    first, second = run_sharing(2, body)
    assert first == second
    assert "rank 1 of the mesh has different values" in first


def test_what_is_no_number_of_steps():
    with pytest.raises(MoefxError, match="compare_every is -1"):
        moefx.Options.named(compare_every=-1)
