"""Parameters in all kinds of layouts on eight ranks: stock torch against a plain model, files and checkpoints."""

from __future__ import annotations

import itertools
import logging
import math
import random
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor

from moefx.layout import Cut, Layout, Spread
from moefx.runtime.expert_tensor import ExpertTensor
from moefx.runtime.parameters import (
    ExpertStack,
    distribute_parameters,
    full,
    lay_out,
    layout_of,
    load_full_,
    local,
    take_local,
    wrap_gradient,
)
from moefx.weights.transformers_names import Recipe
from moefx.weights.values import Files, _fill
from tests.gloo.test_parameters_gloo import collectives
from tests.support.ranks import run_ranks
from tests.support.torches import IS_2_11

SHAPE, DIMS = (8, 16, 4), {"a": 2, "b": 2, "c": 2}
LAYOUTS = {
    "whole": Layout(),
    "rows": Layout.rows(8, "a"),
    "columns": Layout((Cut(1, ("b", "c"), (16,)),)),
    "rows and depth": Layout((Cut(0, ("a", "b"), (8,)), Cut(2, ("c",), (4,)))),
    "halves": Layout((Cut(1, ("c",), (8, 8)),)),
    "halves of two": Layout((Cut(0, ("b",), (8,)), Cut(1, ("a", "c"), (8, 8)))),
    "out of order": Layout((Cut(0, ("c", "a"), (8,)),)),
    "halves out of order": Layout((Cut(1, ("b", "a"), (8, 8)),)),
    "packed": Layout((Cut(1, ("b",), (8, 6, 2)),)),
    "packed and rows": Layout((Cut(0, ("a",), (8,)), Cut(1, ("c", "b"), (8, 4, 4)))),
    "rows by owner": Layout.spread((1, 0, 0, 0, 1, 0, 0, 0), "a", 2),
    "rows nowhere": Layout((Spread(("c", "b"), (3, 1, 1, 0, 0, 0, 3, 0)), Cut(1, ("a",), (8, 8)))),
    "owned": Layout(owner=(("b",), 1)),
    "owned on two": Layout(owner=(("c", "a"), 2)),
    "owned and cut": Layout((Cut(1, ("b",), (16,)),), (("a",), 1)),
    "owned halves": Layout((Cut(1, ("c",), (8, 8)),), (("a", "b"), 3)),
    "owned and packed": Layout((Cut(1, ("b",), (8, 6, 2)), Cut(0, ("c",), (8,))), (("a",), 0)),
    **{f"drawn {number}": None for number in range(4)},
}  # fmt: skip
PLAIN = ("whole", "rows", "columns", "rows and depth")


def layouts_drawn() -> list[Layout]:
    rng = random.Random(3)  # torch does not gather two dims of several pieces each, which others draw
    return [layout or any_layout(rng) for layout in LAYOUTS.values()]


def any_layout(rng: random.Random) -> Layout:
    """One that fits SHAPE."""
    free, cuts = rng.sample(list(DIMS), 3), []
    for dim in rng.sample(range(3), rng.randint(0, 3)):
        axis = tuple(free.pop() for _ in range(min(len(free), rng.randint(1, 2))))
        n, size = 2 ** len(axis), SHAPE[dim]
        if dim == 0 and axis and rng.random() < 0.5:
            cuts.append(Spread(axis, tuple(rng.randrange(n) for _ in range(size))))
            continue
        ends = sorted(rng.sample(range(n, size, n), rng.randint(0, min(2, size // n - 1))))
        pieces = tuple(b - a for a, b in itertools.pairwise([0, *ends, size]))
        cuts += [Cut(dim, axis, pieces)] if axis else []
    axis = tuple(free[: rng.randint(0, 2)])
    return Layout(tuple(cuts), (axis, rng.randrange(2 ** len(axis))) if axis else None)


class Net(nn.ParameterDict):
    def __init__(self, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        super().__init__(OrderedDict((name, torch.randn(SHAPE, generator=generator)) for name in LAYOUTS))


def spread(mesh: DeviceMesh, layouts: list[Layout], seed: int = 0) -> Net:
    net = Net(seed)
    distribute_parameters(net, mesh)
    for param, layout in zip(net.parameters(), layouts):
        lay_out(param, layout)
    return net


def train(net: Net, plain: Net, steps: range) -> list[torch.optim.Optimizer]:
    return [_trained(each, steps, torch.optim.AdamW(each.parameters(), lr=0.1, foreach=True)) for each in (net, plain)]


def _trained(net: Net, steps: range, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    for step in steps:
        set_grads(net, step)
        with collectives() as calls:
            optimizer.step()
        assert not calls
    return optimizer


def set_grads(net: Net, seed: int) -> None:
    generator = torch.Generator().manual_seed(100 + seed)
    for param in net.parameters():
        whole = torch.randn(SHAPE, generator=generator)
        is_spread = isinstance(param, DTensor)
        param.grad = wrap_gradient(param, take_local(param, whole).clone()) if is_spread else whole


def assert_same(net: Net, plain: Net, of: Callable = lambda param: param.detach(), **tolerance: float) -> None:
    tolerance = tolerance or {"rtol": 0, "atol": 0}
    for name in plain:
        found, expected = of(net[name]), of(plain[name])
        found = found.full_tensor() if isinstance(found, DTensor) else found
        torch.testing.assert_close(found, expected, **tolerance, msg=lambda text, name=name: f"{name}: {text}")


def check_values(mesh: DeviceMesh, layouts: list[Layout]) -> None:
    net, plain = spread(mesh, layouts), Net()
    assert_same(net, plain)
    for (name, param), layout in zip(net.items(), layouts):
        whole = plain[name].detach()
        assert layout_of(param) == layout
        if not name.startswith("drawn"):
            assert isinstance(param, ExpertTensor) == (name not in PLAIN), name
        assert torch.equal(local(param), take_local(param, whole))
        if layout.owner is None and all(cut.placements(DIMS) for cut in layout.cuts):  # placements tell the truth
            said = distribute_tensor(whole, mesh, param.placements)
            assert torch.equal(said.to_local(), local(param)), name
            if not IS_2_11:  # which takes them for another order of ranks, or refuses
                assert torch.equal(said.full_tensor(), whole), name
        held = param.detach()
        for found, expected in ((held.sum(1), whole.sum(1)), (held * held.norm() + held, whole * whole.norm() + whole),
                                (held.norm(math.inf) ** 2, whole.norm(math.inf) ** 2)):  # fmt: skip
            torch.testing.assert_close(found.full_tensor(), expected, msg=lambda text, name=name: f"{name}: {text}")
        load_full_(param, whole * 2)
        assert torch.equal(full(param), whole * 2), name
        param.full_tensor().pow(2).sum().backward()
        assert type(param.grad) is (type(param.detach()))
        torch.testing.assert_close(param.grad.full_tensor(), whole * 4)


def check_training(mesh: DeviceMesh, layouts: list[Layout]) -> None:
    net, plain = spread(mesh, layouts), Net()
    train(net, plain, range(2))
    assert_same(net, plain)
    for norm_type in (2.0, math.inf):
        for each in (net, plain):
            set_grads(each, 7)
        found = nn.utils.clip_grad_norm_(net.parameters(), 0.5, norm_type).full_tensor()
        torch.testing.assert_close(found, nn.utils.clip_grad_norm_(plain.parameters(), 0.5, norm_type))
        assert_same(net, plain, lambda param: param.grad, rtol=1e-6, atol=1e-8)
    for poisoned in (None, *range(0, len(layouts), 4)):
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        scaler.scale(torch.ones(()))
        set_grads(net, 8)
        if poisoned is not None:  # one element of the whole
            bad = torch.zeros(SHAPE)
            bad[5, 3, 1] = math.inf
            param = list(net.parameters())[poisoned]
            local(param.grad).add_(take_local(param, bad))
        scaler.step(torch.optim.SGD(net.parameters(), lr=0.0))
        scaler.update()
        assert scaler.get_scale() == (4.0 if poisoned is None else 2.0), poisoned
        if poisoned is None:
            set_grads(plain, 8)
            assert_same(net, plain, lambda param: param.grad * (1 if isinstance(param, DTensor) else 0.25))


def check_checkpoints(mesh: DeviceMesh, layouts: list[Layout], folder: Path) -> None:
    """Into the plain model, from it, and into other layouts; each goes on as if nothing had been."""
    net, plain, later = spread(mesh, layouts), Net(), Net()
    _trained(later, range(3), torch.optim.AdamW(later.parameters(), lr=0.1, foreach=True))
    for each, optimizer in zip((net, plain), train(net, plain, range(2))):
        model_state, optimizer_state = get_state_dict(each, optimizer)
        dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder / str(each is plain))
    for source in ("True", "False"):
        for target in (Net(1), spread(mesh, layouts[4:] + layouts[:4], 1)):
            optimizer = torch.optim.AdamW(target.parameters(), lr=0.1, foreach=True)
            model_state, optimizer_state = get_state_dict(target, optimizer)
            state = {"model": model_state, "optimizer": optimizer_state}
            dcp.load(state, checkpoint_id=folder / source)
            set_state_dict(target, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
            assert_same(target, plain)
            _trained(target, range(2, 3), optimizer)
            assert_same(target, later)
    target = spread(mesh, layouts, 1)
    whole = {name: param.detach().clone() for name, param in plain.items()}
    set_model_state_dict(target, whole, options=StateDictOptions(full_state_dict=True))
    assert_same(target, plain)


def check_files(mesh: DeviceMesh, layouts: list[Layout], folder: Path) -> None:
    plain, net = Net(), spread(mesh, layouts, 1)
    read: list[int] = []
    for name, param in net.items():
        files = Files(folder / "model.safetensors")
        original = files.read
        files.read = lambda *args, original=original: (read.append((found := original(*args)).numel()), found)[1]
        _fill(name, param, Recipe(name, {name: [name]}), files)
        assert sum(read) == local(param).numel()  # no more than the rank stores
        assert torch.equal(full(param), plain[name].detach())
        read.clear()


def check_stacks(mesh: DeviceMesh) -> None:
    """Experts of which each is cut itself; the stack is their memory."""
    even, uneven = Cut(0, ("a",), (4,)), Spread(("a",), (1, 0, 1, 1))
    for cuts in ((even, Cut(1, ("b",), (8,))), (even, Cut(2, ("c",), (8, 8))), (uneven, Cut(2, ("b", "c"), (8, 4, 4)))):
        stacked = Layout(cuts)
        whole = torch.arange(4.0 * 8 * 16).view(4, 8, 16)
        net = nn.ParameterList([row.clone() for row in whole])
        distribute_parameters(net, mesh)
        stack = ExpertStack.build(list(net), [stacked.of_row(row, DIMS) for row in range(4)])
        place = {dim: mesh.get_local_rank(dim) for dim in DIMS}
        assert torch.equal(stack.local, stacked.take(whole, DIMS, place))
        for param, grad in zip(net, stack.split_grad(stack.local * 2)):
            assert isinstance(param, ExpertTensor)
            param.grad = grad
        torch.optim.SGD(net, lr=1.0, foreach=True).step()
        assert torch.equal(stack.local, -stacked.take(whole, DIMS, place))
        for row, param in zip(whole, net):
            assert torch.equal(full(param), -row)


def run(rank: int, n: int, folder: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=tuple(DIMS))
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)  # one collective per mesh dim
    layouts = layouts_drawn()
    if rank == 0:
        save_file({name: param.detach() for name, param in Net().items()}, f"{folder}/model.safetensors")
    dist.barrier()
    check_values(mesh, layouts)
    check_training(mesh, layouts)
    check_files(mesh, layouts, Path(folder))
    check_checkpoints(mesh, layouts, Path(folder))
    check_stacks(mesh)


def test_on_eight_ranks(tmp_path) -> None:
    run_ranks(8, run, str(tmp_path))
