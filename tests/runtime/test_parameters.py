"""Distributed parameters in a world of one rank: identity, ties, refusals, and the guard of optimizers."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from moefx.errors import CheckpointError, ModelError, StaleOptimizerError, UnsupportedUse
from moefx.layout import Layout
from moefx.runtime.expert_tensor import ExpertTensor, layout_of
from moefx.runtime.optimizer_guard import guard_optimizers, register_step_check
from moefx.runtime.parameters import (
    ExpertStack,
    allocate,
    distribute_parameters,
    front,
    full,
    lay_out,
    load_full_,
    local,
    replaced_parameters,
    wrap_gradient,
)
from tests.gloo.test_parameters_gloo import CHECKS


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeviceMesh]:
    store = dist.FileStore(str(Path(tmp_path_factory.mktemp("store")) / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "ep"))
    dist.destroy_process_group()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.rnn = nn.LSTM(4, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight
        self.experts = nn.ParameterList([torch.randn(2, 2) for _ in range(3)])
        self.register_buffer("seen", torch.zeros(3))


@pytest.mark.parametrize("check", CHECKS)
def test_one_rank(check, mesh: DeviceMesh) -> None:
    check(mesh, [0, 0, 0, 0])


def test_distributing_keeps_storage_ties_flags_and_attributes(mesh: DeviceMesh) -> None:
    model = Model()
    model.experts[1].requires_grad_(False)
    model.experts[0].tag = "mine"
    model.experts[0].grad = torch.ones(2, 2)
    model.experts[2].data = torch.randn(2, 2).t()
    before = dict(model.named_parameters())
    distribute_parameters(model, mesh)
    after = dict(model.named_parameters())
    assert list(after) == list(before)
    for name, old in before.items():
        new = after[name]
        assert isinstance(new, nn.Parameter)
        assert isinstance(new, DTensor)
        assert new.placements == (Replicate(), Replicate())
        assert local(new).data_ptr() == old.data_ptr()
        assert new.stride() == old.stride()
        assert new.requires_grad == old.requires_grad
    assert model.head.weight is model.embed.weight
    assert model.rnn._flat_weights[0] is model.rnn.weight_ih_l0
    assert model.experts[0].tag == "mine"
    assert torch.equal(model.experts[0].grad.full_tensor(), torch.ones(2, 2))
    assert type(model.seen) is torch.Tensor


def test_distributing_twice_or_a_foreign_parameter_is_refused_before_any_change(mesh: DeviceMesh) -> None:
    class Special(nn.Parameter):
        pass

    model = Model()
    model.head.weight = Special(torch.ones(6, 4))
    with pytest.raises(ModelError, match=r"`head.weight` is a Special"):
        distribute_parameters(model, mesh)
    assert not any(isinstance(p, DTensor) for p in model.parameters())
    model = Model()
    distribute_parameters(model, mesh)
    with pytest.raises(ModelError, match=r"`embed\.weight` is a DTensor already"):
        distribute_parameters(model, mesh)


def test_resharding_frees_the_full_tensor_and_keeps_the_object(mesh: DeviceMesh) -> None:
    model = nn.ParameterList([torch.randn(4, 2)])
    distribute_parameters(model, mesh)
    param, values = model[0], full(model[0])
    old_storage = local(param).data_ptr()
    lay_out(param, Layout.rows(4, "ep"))
    assert model[0] is param
    assert param.placements == (Replicate(), Shard(0))
    assert local(param).data_ptr() != old_storage
    assert torch.equal(full(param), values)
    now = local(param)
    lay_out(param, Layout.rows(4, "ep"))
    assert local(param) is now


def test_resharding_what_something_else_holds_is_refused(mesh: DeviceMesh) -> None:
    model = nn.ParameterList([torch.randn(4, 2)])
    distribute_parameters(model, mesh)
    observer = weakref.ref(model[0])
    with pytest.raises(UnsupportedUse, match="could not be re-sharded"):
        lay_out(model[0], Layout.rows(4, "ep"))
    assert observer() is model[0]
    assert model[0].placements == (Replicate(), Replicate())


def test_memory_behind_the_rows_of_a_parameter(mesh: DeviceMesh) -> None:
    model, rows = nn.ParameterList([torch.randn(4, 2)]), Layout.rows(4, "ep")
    distribute_parameters(model, mesh)
    param, values = model[0], full(model[0])
    lay_out(param, rows, memory=6)
    assert torch.equal(front(local(param), 6), torch.cat([values, torch.zeros(2, 2)]))
    param.grad = wrap_gradient(param, torch.arange(12.0).view(6, 2))
    now = local(param)
    for memory in (None, 5, 6):  # there is enough
        lay_out(param, rows, memory=memory)
        assert local(param) is now
    lay_out(param, rows, memory=8)
    assert torch.equal(front(local(param), 8), torch.cat([values, torch.zeros(4, 2)]))
    assert torch.equal(full(param.grad), torch.arange(8.0).view(4, 2))
    torch.optim.SGD(model, lr=1.0).step()
    assert torch.equal(front(local(param), 4), values - torch.arange(8.0).view(4, 2))
    with torch.device("meta"):
        model = nn.ParameterList([torch.empty(4, 2)])
    distribute_parameters(model, mesh)
    lay_out(model[0], rows, memory=6)
    allocate(model[0], torch.device("cpu"), 6)
    assert front(local(model[0]), 6)[4:].tolist() == [[0, 0], [0, 0]]


def test_stack_is_the_memory_of_its_parameters(mesh: DeviceMesh) -> None:
    model = Model()
    distribute_parameters(model, mesh)
    stack = ExpertStack.build(list(model.experts), [Layout(owner=(("ep",), 0))] * 3, memory=5)
    assert stack.local.shape == (3, 2, 2)
    assert stack.memory.shape == (5, 2, 2)
    assert not stack.memory[3:].any()
    assert stack.params == tuple(model.experts)
    assert stack.rows == (0, 1, 2)
    for row, param in enumerate(model.experts):
        assert local(param).data_ptr() == stack.local[row].data_ptr()
    whole = torch.randn(4, 2, 2)
    grads = stack.split_grad(whole)
    for row, (param, grad) in enumerate(zip(model.experts, grads)):
        assert isinstance(grad, ExpertTensor)
        assert layout_of(grad) == Layout(owner=(("ep",), 0))
        assert local(grad).data_ptr() == whole[row].data_ptr()
        param.grad = grad
    torch.optim.SGD(model.experts, lr=1.0).step()
    assert torch.equal(stack.local[1], full(model.experts[1]))


def test_stack_of_unlike_or_shared_parameters_is_refused(mesh: DeviceMesh) -> None:
    model = nn.ParameterList([torch.ones(2), torch.ones(3)])
    distribute_parameters(model, mesh)
    with pytest.raises(ModelError, match="differ"):
        ExpertStack.build(list(model), [Layout()] * 2)
    with pytest.raises(ModelError, match="share one parameter"):
        ExpertStack.build([model[0], model[0]], [Layout()] * 2)


def test_loading_checks_what_it_is_given(mesh: DeviceMesh) -> None:
    model = Model()
    distribute_parameters(model, mesh)
    weight = model.embed.weight
    version = local(weight)._version
    load_full_(weight, torch.ones(6, 4))
    assert torch.equal(full(weight), torch.ones(6, 4))
    assert local(weight)._version > version
    for wrong, reason in (
        (torch.ones(4, 6), "does not fit"),
        (torch.ones(6, 4).half(), "float16"),
        (weight, "DTensor"),
    ):
        with pytest.raises(CheckpointError, match=reason):
            load_full_(weight, wrong)


def test_optimizer_built_before_is_refused_by_name_at_its_first_step(mesh: DeviceMesh) -> None:
    guard_optimizers()
    guard_optimizers()
    model = Model()
    stale = torch.optim.SGD(model.parameters(), lr=1.0)
    distribute_parameters(model, mesh)
    with pytest.raises(
        StaleOptimizerError, match=r"8 parameters.*`embed\.weight`, `rnn\.(?s:.*)build the optimizer after"
    ):
        stale.step()
    other = nn.Linear(2, 2)
    other(torch.ones(2)).sum().backward()
    before = other.weight.detach().clone()
    torch.optim.SGD(other.parameters(), lr=1.0).step()
    assert not torch.equal(other.weight, before)
    torch.optim.SGD(model.parameters(), lr=1.0).step()


def test_replaced_parameters_are_not_kept_alive(mesh: DeviceMesh) -> None:
    model = nn.Linear(2, 2)
    old = weakref.ref(model.weight)
    distribute_parameters(model, mesh)
    gc.collect()
    assert old() is None
    model = nn.Linear(2, 2)
    held = model.weight
    distribute_parameters(model, mesh)
    assert replaced_parameters[held] == "weight"


def test_step_checks_run_before_the_step_and_are_held_weakly(mesh: DeviceMesh) -> None:
    guard_optimizers()

    class Program:
        def __init__(self) -> None:
            self.seen: list[torch.optim.Optimizer] = []

        def check(self, optimizer: torch.optim.Optimizer) -> None:
            self.seen.append(optimizer)
            raise UnsupportedUse("gradients wait for their synchronisation")

    program = Program()
    register_step_check(program.check)
    param = nn.Parameter(torch.ones(2))
    param.grad = torch.ones(2)
    optimizer = torch.optim.SGD([param], lr=1.0)
    with pytest.raises(UnsupportedUse, match="gradients wait"):
        optimizer.step()
    assert program.seen == [optimizer]
    assert torch.equal(param, torch.ones(2))
    alive = weakref.ref(program)
    del program
    gc.collect()
    assert alive() is None
    optimizer.step()
    assert torch.equal(param, torch.zeros(2))


def test_guard_keeps_optimizers_and_models_mortal(mesh: DeviceMesh) -> None:
    guard_optimizers()
    model = nn.Linear(2, 2)
    distribute_parameters(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    for param in model.parameters():
        param.grad = wrap_gradient(param, torch.ones_like(local(param)))
    optimizer.step()
    alive = [weakref.ref(optimizer), weakref.ref(model)]
    del model, optimizer, param
    gc.collect()
    assert [ref() for ref in alive] == [None, None]
