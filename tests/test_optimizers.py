"""Steps of every optimizer against eager, in double precision, on ranks that are threads."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from contextlib import closing

import pytest
import torch
from torch import Tensor, nn, optim
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import moefx
from moefx.errors import UnsupportedUse
from moefx.runtime.parameters import load_full_
from tests.support.optimizing import ACROSS, OPTIMIZERS, Net, batch, train
from tests.support.parity import compare, full, parameters
from tests.support.scenarios import reads
from tests.support.sharing import run_sharing

FULL = pytest.mark.full
CUT = ["Adafactor", "LBFGS", "Rprop", "SGD fused", "NewtonSchulz", "Shampoo"]
BF16 = 2.0**-4  # Muon iterates in bfloat16, of cut matrices by sums in another order: NewtonSchulz tells what is right


def _net() -> nn.Module:
    torch.manual_seed(0)
    return Net().double()


def _expected(start: nn.Module, names: list[str], readers: int) -> dict[str, dict[str, Tensor]]:
    found = {}
    for name in names:
        model = copy.deepcopy(start)
        train(model, OPTIMIZERS[name](list(model.parameters())), lambda step: [batch(step, r) for r in range(readers)])
        found[name] = parameters(model)
    return found


def _trains(rank: int, world: int, layout, options, start: nn.Module, expected, then: Callable | None) -> None:
    mesh = init_device_mesh("cpu", layout[0], mesh_dim_names=layout[1])
    mine = reads(rank, layout)
    with closing(moefx.compile(copy.deepcopy(start), mesh, dynamic=False, **options)) as model:
        model.prepare(*batch(0, mine))
        for name, wanted in expected.items():
            for param, value in zip(model.parameters(), start.parameters()):
                load_full_(param, value.detach())
            train(model, OPTIMIZERS[name](list(model.parameters())), lambda step: [batch(step, mine)])
            is_exact = name != "Muon" or layout[1] == ("ep",)
            compare(parameters(model), wanted, 1e-10 if is_exact else BF16).check(f"{name}, rank {rank}")
        if then:
            then(model)


class Plain(optim.Optimizer):
    """Mixes parameters with a plain tensor."""

    @torch.no_grad()
    def step(self) -> None:
        for p in self.param_groups[0]["params"]:
            p.add_(torch.ones(p.shape, dtype=p.dtype))


class Rows(optim.Optimizer):
    """Writes to rows of parameters."""

    @torch.no_grad()
    def step(self) -> None:
        for p in self.param_groups[0]["params"]:
            p[0].mul_(2)


class AsHinted(optim.Optimizer):
    """Adds one to all, and doubles the first row."""

    @torch.no_grad()
    def step(self) -> None:
        for p in self.param_groups[0]["params"]:
            p.add_(DTensor.from_local(torch.ones(p.shape, dtype=p.dtype), p.device_mesh))
            x = p.full_tensor()
            x[0] *= 2
            p.copy_(DTensor.from_local(x, p.device_mesh))


def _refused(model: nn.Module) -> None:
    """By name, on all ranks; what the hint says does it."""
    param = model.get_parameter("listed.experts.0.up.weight")
    for kind, said in ((Plain, "a plain tensor"), (Rows, "writes to a view of an expert")):
        before = full(param.detach()).clone()
        with pytest.raises(UnsupportedUse, match=rf"{said}(?s:.*)the step of {kind.__name__}(?s:.*)from_local\(x, p\."):
            kind([param], {}).step()
        assert torch.equal(full(param.detach()), before)
    AsHinted([param], {}).step()
    before += 1
    before[0] *= 2
    assert torch.equal(full(param.detach()), before)


@pytest.mark.parametrize(("layout", "options", "names", "then"), [
    (((2,), ("ep",)), {}, [*ACROSS, "ASGD"], None),
    (((2, 2), ("ep", "esp")), {}, CUT, _refused),
    pytest.param(((2,), ("ep",)), {}, list(OPTIMIZERS), None, marks=FULL),
    pytest.param(((2, 2), ("ep", "esp")), {}, ACROSS, None, marks=FULL),
    pytest.param(((3,), ("ep",)), {}, ACROSS, None, marks=FULL),
    pytest.param(((2, 2), ("mp", "ep")), {}, ACROSS, None, marks=FULL),
    pytest.param(((2, 2), ("dp", "ep")), {"shard_dense": True}, ACROSS, None, marks=FULL),
], ids=["ep", "ep-esp", "ep-all", "ep-esp-all", "uneven", "mp-ep", "shard_dense"])  # fmt: skip
def test_steps(layout, options, names, then):
    start, world = _net(), math.prod(layout[0])
    readers = 1 + max(reads(rank, layout) for rank in range(world))
    expected = _expected(start, names, readers)
    run_sharing(world, _trains, layout, options, start, expected, then)


def test_sparse_adam_says_so_itself():
    """As in eager: gradients are dense."""
    model = _net()
    with pytest.raises(RuntimeError, match="does not support dense gradients"):
        train(model, optim.SparseAdam(list(model.parameters())), lambda step: [batch(step, 0)])
