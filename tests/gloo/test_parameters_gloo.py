"""Distributed parameters on real ranks: stock optimizers, clipping, autograd and checkpoints against a plain model."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import math
from collections.abc import Callable, Iterator
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from moefx.errors import CheckpointError, UnsupportedUse
from moefx.layout import Layout
from moefx.model.moves import Moves
from moefx.runtime import rehome
from moefx.runtime.expert_tensor import ExpertTensor, layout_of
from moefx.runtime.optimizer_guard import guard_optimizers
from moefx.runtime.parameters import (
    ExpertStack,
    distribute_parameters,
    front,
    full,
    lay_out,
    load_full_,
    local,
    take_local,
    wrap_gradient,
)
from moefx.runtime.session import Session
from moefx.runtime.together import Ranks
from tests.support.ranks import run_ranks

# Ranks -> mesh -> owners of the four experts: uneven, out of order, and with a coordinate that holds nothing.
MESHES = {
    1: [((1, 1), [0, 0, 0, 0])],
    2: [((1, 2), [1, 0, 1, 1]), ((2, 1), [0, 0, 0, 0])],
    4: [((2, 2), [1, 0, 1, 1]), ((1, 4), [3, 1, 1, 0])],
}

ADAM = {"lr": 0.1, "weight_decay": 0.3}
OPTIMIZERS: list[tuple[type[torch.optim.Optimizer], dict]] = [
    (torch.optim.AdamW, ADAM | {"foreach": True}),
    (torch.optim.AdamW, ADAM | {"foreach": False}),
    (torch.optim.AdamW, ADAM | {"fused": True}),
    (torch.optim.Adam, ADAM | {"foreach": True, "amsgrad": True}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "foreach": True}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "foreach": False, "maximize": True}),
]


class Grams(torch.optim.Optimizer):
    """Keeps a product of the gradients of each matrix: what is made of one expert lives where it does."""

    @torch.no_grad()
    def step(self) -> None:
        for p in self.param_groups[0]["params"]:
            if p.ndim < 2:
                p.sub_(p.grad)
                continue
            state, gram = self.state[p], p.grad @ p.grad.mT
            state["gram"] = state["gram"] * 0.5 + gram if "gram" in state else gram
            p.sub_(state["gram"] @ p.grad * 0.01)


class Toy(nn.Module):
    """Experts fill whole SIMD registers, so that kernels round alike however the stack is cut."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(shape, generator=generator))

        self.dense = nn.Linear(3, 5)
        self.dense.weight, self.dense.bias = draw(5, 3), draw(5)
        self.stacked = draw(4, 4, 16)
        self.experts = nn.ParameterList([draw(4, 16) for _ in range(4)])
        self.scales = nn.ParameterList([draw() for _ in range(4)])
        self.tied = self.dense.weight
        self.register_buffer("steps", torch.zeros(3))


def more(rows: Tensor) -> Tensor:
    """What a program gives back: rows of experts, and of places that no expert fills."""
    return torch.cat([rows, rows.new_full((2, *rows.shape[1:]), math.nan)])


class Distributed:
    """A Toy on a mesh, its stacks, and the way to give it gradients of the plain model."""

    def __init__(self, mesh: DeviceMesh, owner: list[int], seed: int = 0, sharded: bool = True) -> None:
        self.mesh, self.owner, self.model = mesh, owner, Toy(seed)
        self.rows = Layout.spread(owner, "ep", mesh["ep"].size())
        distribute_parameters(self.model, mesh)
        if sharded:
            self.shard()

    def shard(self) -> None:
        lay_out(self.model.stacked, self.rows, memory=5)
        experts = [list(self.model.experts), list(self.model.scales)]
        layouts = [Layout(owner=(("ep",), place)) for place in self.owner]
        self.stacks = [ExpertStack.build(params, layouts, memory=4) for params in experts]

    def move(self, session: Session, owner: tuple[int, ...]) -> None:
        def put(number: int, stack: ExpertStack) -> None:
            self.stacks[number] = stack

        stacks = [rehome.move_of_stack(stack, owner, functools.partial(put, i)) for i, stack in enumerate(self.stacks)]
        rehome.run(session, "ep", [rehome.move_of(self.model.stacked, owner, 5), *stacks])

    def set_grads(self, grads: dict[str, Tensor]) -> None:
        for name, param in self.model.named_parameters():
            param.grad = wrap_gradient(param, take_local(param, grads[name]).clone())
        model = self.model
        model.stacked.grad = wrap_gradient(model.stacked, more(local(model.stacked.grad)))
        for attribute, stack in zip(("experts", "scales"), self.stacks):
            mine = [grads[f"{attribute}.{e}"] for e, row in enumerate(stack.rows) if row is not None]
            for param, grad in zip(stack.params, stack.split_grad(more(torch.stack(mine) if mine else stack.local))):
                param.grad = grad


def draw_grads(model: nn.Module, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(p.shape, generator=generator) for name, p in model.named_parameters()}


def train(model: Toy, optimizer: torch.optim.Optimizer, set_grads: Callable, steps: range) -> None:
    for step in steps:
        set_grads(draw_grads(model, 100 + step))
        optimizer.step()
        optimizer.zero_grad()


def plain_setter(model: nn.Module) -> Callable[[dict[str, Tensor]], None]:
    def set_grads(grads: dict[str, Tensor]) -> None:
        for name, param in model.named_parameters():
            param.grad = grads[name].clone()

    return set_grads


def assert_same_parameters(model: nn.Module, plain: nn.Module, **tolerance: float) -> None:
    for (name, param), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        value = full(param) if isinstance(param, DTensor) else param.detach()
        tolerance = tolerance or {"rtol": 0, "atol": 0}
        torch.testing.assert_close(value, expected.detach(), msg=lambda text, name=name: f"{name}: {text}", **tolerance)


@contextlib.contextmanager
def collectives() -> Iterator[list[str]]:
    """Names of the collectives that expert tensors start (debug modes do not see inside a tensor subclass)."""
    calls: list[str] = []

    def recorded(name: str, call: Callable) -> Callable:
        return lambda *args, **kwargs: (calls.append(name), call(*args, **kwargs))[1]

    names = ("broadcast", "all_gather")
    with contextlib.ExitStack() as stack:
        for name in names:
            stack.enter_context(mock.patch.object(dist, name, recorded(name, getattr(dist, name))))
        yield calls


def each_mesh(n: int) -> list[tuple[DeviceMesh, list[int]]]:
    return [(init_device_mesh("cpu", shape, mesh_dim_names=("dp", "ep")), owner) for shape, owner in MESHES[n]]


# --- the checks; each runs on every rank of every mesh ---


def check_values(mesh: DeviceMesh, owner: list[int]) -> None:
    toy, plain = Distributed(mesh, owner), Toy()
    assert_same_parameters(toy.model, plain)
    here = mesh.get_local_rank("ep")
    assert toy.stacks[0].local.shape == (owner.count(here), 4, 16)
    for e, param in enumerate(toy.stacks[0].params):
        assert isinstance(param, ExpertTensor)
        assert isinstance(param, nn.Parameter)
        assert param is toy.model.experts[e]
        assert param.shape == (4, 16)
        assert tuple(local(param).shape) == ((4, 16) if owner[e] == here else (0, 16))
        torch.testing.assert_close(param.full_tensor(), plain.experts[e], rtol=0, atol=0)
        assert f"layout=at place {owner[e]} of ep" in repr(param)
    toy.stacks[0].local.fill_(2.0)
    assert all(bool((full(p) == 2).all()) for p in toy.stacks[0].params)
    stacked = local(toy.model.stacked)
    assert stacked.shape == (owner.count(here), 4, 16)
    assert torch.equal(front(stacked, 5)[: owner.count(here)], stacked)
    assert not front(stacked, 5)[owner.count(here) :].any()

    whole = torch.arange(64.0).view(4, 16)
    version = toy.stacks[0].local._version
    load_full_(toy.model.experts[1], whole)
    assert torch.equal(full(toy.model.experts[1]), whole)
    assert (toy.stacks[0].local._version > version) == (owner[1] == here)
    load_full_(toy.model.stacked, plain.stacked.detach() * 2)
    assert torch.equal(full(toy.model.stacked), plain.stacked.detach() * 2)
    with pytest.raises(CheckpointError, match="does not fit"):
        load_full_(toy.model.experts[1], whole[:1])
    with pytest.raises(CheckpointError, match="float64"):
        load_full_(toy.model.experts[1], whole.double())


def check_optimizers(mesh: DeviceMesh, owner: list[int]) -> None:
    for kind, options in OPTIMIZERS:
        toy, plain = Distributed(mesh, owner), Toy()
        optimizer, expected = kind(toy.model.parameters(), **options), kind(plain.parameters(), **options)
        train(toy.model, optimizer, toy.set_grads, range(3))
        train(plain, expected, plain_setter(plain), range(3))
        assert_same_parameters(toy.model, plain)
        for name, value in optimizer.state[toy.model.experts[0]].items():
            assert isinstance(value, ExpertTensor) or name == "step"


def check_moves(mesh: DeviceMesh, owner: list[int]) -> None:
    """Two moves in six steps: the optimizer's state follows before the next one."""
    if (n := mesh["ep"].size()) == 1:
        return
    with contextlib.closing(Session(mesh, "moves", timedelta(seconds=60))) as session:
        across = (torch.optim.Adafactor, {"lr": 0.1}), (Grams, {"defaults": {}})
        for kind, options in [*OPTIMIZERS[::2], OPTIMIZERS[-1], *across]:
            toy, plain, moves, places = Distributed(mesh, owner), Toy(), Moves(), owner
            model, ranks = toy.model, Ranks(session, ("dp", "ep"))
            optimizer, expected = kind(model.parameters(), **options), kind(plain.parameters(), **options)
            moves.follow(ranks, optimizer, model)
            for step in range(6):
                if step in (2, 4):
                    places = [(place + 1) % n for place in places[::-1]]
                    toy.move(session, tuple(places))
                    moves._count += 1
                moves.follow(ranks, optimizer, model)
                train(model, optimizer, toy.set_grads, range(step, step + 1))
                train(plain, expected, plain_setter(plain), range(step, step + 1))
            is_exact = (kind, options) not in across
            assert_same_parameters(model, plain, rtol=0 if is_exact else 1e-5, atol=0 if is_exact else 1e-6)
            for param, reference in zip(model.parameters(), plain.parameters()):
                for key, value in optimizer.state[param].items():
                    torch.testing.assert_close(value.full_tensor() if isinstance(value, DTensor) else value,
                                               expected.state[reference][key])  # fmt: skip


def check_clipping(mesh: DeviceMesh, owner: list[int]) -> None:
    for norm_type, foreach, left_out in itertools.product((2.0, math.inf, 1.0), (None, True, False), ("", "stacked")):
        toy, plain = Distributed(mesh, owner), Toy()
        grads = draw_grads(plain, 7)
        toy.set_grads(grads)
        plain_setter(plain)(grads)
        params, expected = ([param for name, param in model.named_parameters() if name != left_out]
                            for model in (toy.model, plain))  # fmt: skip
        options = {"max_norm": 0.5, "norm_type": norm_type, "foreach": foreach}
        with collectives() as calls:
            norm = nn.utils.clip_grad_norm_(params, **options)
        assert calls == ["all_gather"]  # one for all expert tensors; DTensor adds its own for `stacked`
        norm = norm.full_tensor()
        torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(expected, **options))
        for param, each in zip(params, expected):
            torch.testing.assert_close(param.grad.full_tensor(), each.grad)


def check_clipped_steps(mesh: DeviceMesh, owner: list[int]) -> None:
    toy, plain = Distributed(mesh, owner), Toy()
    models = (toy.model, toy.set_grads), (plain, plain_setter(plain))
    for model, set_grads in models:
        optimizer = torch.optim.AdamW(model.parameters(), **ADAM)
        for step in range(6):
            set_grads(draw_grads(model, 100 + step))
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
    assert_same_parameters(toy.model, plain, rtol=1e-6, atol=1e-6)


def check_operators(mesh: DeviceMesh, owner: list[int]) -> None:
    toy, plain = Distributed(mesh, owner), Toy()
    param, other, value = toy.model.experts[0].detach(), toy.model.experts[1].detach(), plain.experts[0].detach()
    beside = plain.experts[1].detach()
    replicated = DTensor.from_local(beside, mesh, [Replicate()] * 2, run_check=False)
    with collectives() as calls:
        results = {
            "clone": (param.clone(), value),
            "new": (param.new_zeros(4, 16), torch.zeros(4, 16)),
            "zeros": (torch.zeros_like(param), torch.zeros_like(value)),
            "dtype": (param.to(torch.bfloat16), value.bfloat16()),
            "compare": (param > 0, value > 0),
            "mix": (param + replicated, value + beside),
            "where": (torch.where(param > 0, param, 0.0), torch.where(value > 0, value, 0.0)),
            "in place": (param.clone().add_(1).addcmul_(param, param), (value + 1).addcmul_(value, value)),
            "copy": (torch.empty_like(param).copy_(replicated), beside),
            "deepcopy": (copy.deepcopy(toy.model.experts[0]), value),
        }
    assert not calls
    for name, (result, expected) in results.items():
        assert isinstance(result, ExpertTensor), name
        assert layout_of(result) == layout_of(param), name
        assert result.dtype == expected.dtype, name
        torch.testing.assert_close(full(result), expected, rtol=0, atol=0)
    with collectives() as calls:
        torch.testing.assert_close(full(param + other), value + beside)
    assert len(calls) == (
        2 if owner[0] != owner[1] else 1
    )  # `other` goes to the owner of `param`, then the result to all
    torch.testing.assert_close(full(param.clone().copy_(other)), beside)
    torch.testing.assert_close(param.sum(dim=0).full_tensor(), value.sum(dim=0))
    torch.testing.assert_close((param @ replicated.t()).full_tensor(), value @ beside.t())
    torch.testing.assert_close(torch.stack([param, other]).full_tensor(), torch.stack([value, beside]))
    assert param.new_ones(3).full_tensor().tolist() == [1, 1, 1]
    assert param.sum().item() == value.sum().item()
    assert param.norm().item() == value.norm().item()
    assert bool(torch.equal(param, param.clone()))
    tracked = toy.model.experts[0]
    for write in (lambda: param.normal_(), lambda: tracked[0], lambda: param.copy_(value), lambda: param.t_()):
        with pytest.raises(UnsupportedUse):
            write()
    assert full(param).equal(value)


def check_at_home(mesh: DeviceMesh, owner: list[int]) -> None:
    """What is made of one expert is made where it lives, and written there."""
    toy, plain = Distributed(mesh, owner), Toy()
    param, value = toy.model.experts[0].detach(), plain.experts[0].detach()
    here = mesh.get_local_rank("ep") == owner[0]
    with collectives() as calls:
        gram, expected = param @ param.T, value @ value.T
        results = {
            "product": (gram, expected),
            "sum of products": (torch.addmm(gram, gram, gram), torch.addmm(expected, expected, expected)),
            "normed": (param / (param.norm() + 1e-7), value / (value.norm() + 1e-7)),
            "roots": (torch.linalg.eigh(gram).eigenvalues, torch.linalg.eigh(expected).eigenvalues),
            "flat": (param.T.reshape(-1), value.T.reshape(-1)),
            "sum": (param.sum(), value.sum()),
        }
    assert not calls
    for name, (result, wanted) in results.items():
        assert isinstance(result, ExpertTensor), name
        assert result.shape == wanted.shape, name
        assert local(result).numel() == (wanted.numel() if here else 0), name
        torch.testing.assert_close(full(result), wanted, msg=name)
    with torch.no_grad():
        for model in (toy.model, plain):
            model.experts[0][1].fill_(5)
            model.experts[0].T[2].mul_(3)
            model.experts[0][model.experts[0] > 4] = 0
    assert_same_parameters(toy.model, plain)


def check_autograd(mesh: DeviceMesh, owner: list[int]) -> None:
    toy, plain = Distributed(mesh, owner), Toy()

    def penalty(params: nn.ParameterList) -> Tensor:
        return sum(p.pow(2).sum() + torch.linalg.vector_norm(p) for p in params)

    for loss, expected in (
        (penalty(toy.model.experts), penalty(plain.experts)),
        (sum((p.full_tensor() ** 3).sum() for p in toy.model.experts), sum((p**3).sum() for p in plain.experts)),
    ):
        loss.backward()
        expected.backward()
        torch.testing.assert_close(loss.full_tensor() if isinstance(loss, DTensor) else loss, expected)
        for param, reference in zip(toy.model.experts, plain.experts):
            torch.testing.assert_close(param.grad.full_tensor(), reference.grad)

    param, reference = toy.model.experts[0], plain.experts[0]
    param.grad = None
    (param.to_local() ** 3).sum().backward()
    assert isinstance(param.grad, ExpertTensor)
    torch.testing.assert_close(param.grad.full_tensor(), 3 * reference.detach() ** 2)


def check_late_sharding(mesh: DeviceMesh, owner: list[int]) -> None:
    """An optimizer with state, gradients and hooks, made before the experts are sharded, goes on bit for bit."""
    guard_optimizers()
    toy, plain = Distributed(mesh, owner, sharded=False), Toy()
    optimizer = torch.optim.AdamW(toy.model.parameters(), **ADAM)
    expected = torch.optim.AdamW(plain.parameters(), **ADAM)
    seen: list[str] = []
    params = {name: param for name, param in toy.model.named_parameters()}
    handle = params["experts.0"].register_post_accumulate_grad_hook(lambda p: seen.append("after"))
    params["experts.0"].register_hook(lambda g: seen.append("grad"))
    params["experts.0"].note = "kept"
    params["stacked"].requires_grad_(False)
    grads = draw_grads(plain, 1)
    for step in range(2):
        for name, param in params.items():
            param.grad = wrap_gradient(param, grads[name].clone())
        plain_setter(plain)(grads)
        if step == 1:
            toy.shard()
        optimizer.step()
        expected.step()
    assert {name: param for name, param in toy.model.named_parameters()} == params
    assert isinstance(params["experts.0"].grad, ExpertTensor)
    assert not params["stacked"].requires_grad
    assert params["experts.0"].note == "kept"
    assert_same_parameters(toy.model, plain)
    moments = optimizer.state[params["experts.0"]]["exp_avg"]
    assert isinstance(moments, ExpertTensor)
    assert local(moments).shape == local(params["experts.0"]).shape

    params["experts.0"].full_tensor().sum().backward()
    assert seen == ["grad", "after"]
    handle.remove()
    params["experts.0"].full_tensor().sum().backward()
    assert seen == ["grad", "after", "grad"]
    lay_out(params["stacked"], toy.rows)  # the same layout again: nothing happens
    assert_same_parameters(toy.model, plain)


def check_scaler(mesh: DeviceMesh, owner: list[int]) -> None:
    for poisoned in (False, True):
        toy = Distributed(mesh, owner)
        optimizer = torch.optim.SGD(toy.model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        scaler.scale(torch.ones(()))
        grads = draw_grads(toy.model, 3)
        if poisoned:
            grads["experts.0"][0, 0] = math.inf
        toy.set_grads(grads)
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == (2.0 if poisoned else 4.0)
        if not poisoned:
            torch.testing.assert_close(toy.model.experts[0].grad.full_tensor(), grads["experts.0"] / 4)
        moved = not torch.equal(full(toy.model.experts[0]), Toy().experts[0].detach())
        assert moved != poisoned


def check_pytree(mesh: DeviceMesh, owner: list[int]) -> None:
    param = Distributed(mesh, owner).model.experts[0]
    names, context = param.__tensor_flatten__()
    inner = {name: getattr(param, name) for name in names}
    again = ExpertTensor.__tensor_unflatten__(inner, context, param.shape, param.stride())
    assert isinstance(again, ExpertTensor)
    assert again.requires_grad
    assert torch.equal(full(again), full(param))


CHECKS = [
    check_values,
    check_operators,
    check_at_home,
    check_optimizers,
    check_moves,
    check_clipping,
    check_clipped_steps,
    check_autograd,
    check_late_sharding,
    check_scaler,
    check_pytree,
]


def run_checks(rank: int, n: int) -> None:
    for mesh, owner in each_mesh(n):
        for check in CHECKS:
            check(mesh, owner)


@pytest.mark.parametrize("n", [pytest.param(2, marks=pytest.mark.full), 4])
def test_every_check_on_ranks(n: int) -> None:
    run_ranks(n, run_checks)


# --- checkpoints: saved on one mesh, loaded on another and into a plain model ---


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), **ADAM)


def save(rank: int, n: int, folder: str) -> None:
    mesh, owner = each_mesh(n)[-1]
    toy = Distributed(mesh, owner)
    optimizer = adamw(toy.model)
    train(toy.model, optimizer, toy.set_grads, range(2))
    model_state, optimizer_state = get_state_dict(toy.model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder + "/both")
    dcp.async_save(toy.model.state_dict(), checkpoint_id=folder + "/weights").result()
    whole = get_model_state_dict(toy.model, options=StateDictOptions(full_state_dict=True))
    assert torch.equal(whole["experts.0"], full(toy.model.experts[0]))
    assert type(whole["stacked"]) is Tensor
    if rank == 0:
        torch.save(whole, folder + "/whole.pt")


def restore(model: nn.Module, folder: str) -> torch.optim.Optimizer:
    optimizer = adamw(model)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(state, checkpoint_id=folder + "/both")
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return optimizer


def load(rank: int, n: int, folder: str) -> None:
    """The reference is trained without interruption; both then go on for two more steps."""
    plain = Toy()
    expected = adamw(plain)
    train(plain, expected, plain_setter(plain), range(2))
    loaded = Toy(seed=1)
    expected_again = restore(loaded, folder)
    assert_same_parameters(loaded, plain)
    train(plain, expected, plain_setter(plain), range(2, 4))
    train(loaded, expected_again, plain_setter(loaded), range(2, 4))
    assert_same_parameters(loaded, plain)
    for mesh, owner in each_mesh(n):
        for late in (False, True):
            toy = Distributed(mesh, owner, seed=1, sharded=not late)
            guard_optimizers()
            optimizer = restore(toy.model, folder)
            if late:
                toy.shard()
            train(toy.model, optimizer, toy.set_grads, range(2, 4))
            assert_same_parameters(toy.model, plain)
        for name in ("weights", "whole"):
            toy = Distributed(mesh, owner, seed=1)
            if name == "weights":
                dcp.load(toy.model.state_dict(), checkpoint_id=folder + "/weights")
            else:
                whole = torch.load(folder + "/whole.pt")
                set_model_state_dict(toy.model, whole, options=StateDictOptions(full_state_dict=True))
            saved = torch.load(folder + "/whole.pt")
            for key, param in toy.model.named_parameters():
                assert torch.equal(full(param), saved[key]), (name, key)


@pytest.mark.full  # tests/gloo/test_checkpoint.py does so with whole models
def test_checkpoint_from_four_ranks_loads_everywhere(tmp_path) -> None:
    run_ranks(4, save, str(tmp_path))
    for n in (1, 2, 4):
        run_ranks(n, load, str(tmp_path))
