"""Buffers that the forward writes to, in every way to say it: what is added is summed over ranks, the tensors stay."""

from __future__ import annotations

import copy
import warnings
from contextlib import closing

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import moefx
from moefx.errors import CaptureError, UnsupportedUse
from tests.support.ranks import one_rank, run_threads


class Counts(nn.Module):
    """A router that counts its choices, in the way that `how` says; and `other`, which no one reads."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.gate, self.how = nn.Linear(6, 4, bias=False), how
        self.register_buffer("seen", torch.tensor([3.0, 0.0, 1.0, 2.0]))
        self.register_buffer("last", torch.zeros(4))

    def forward(self, x):
        weights, ids = self.gate(x).softmax(-1).topk(2, -1)
        with torch.no_grad():
            counts = torch.bincount(ids.flatten(), minlength=4)
            getattr(self, self.how)(counts)
        return weights * self.gate.weight.square().sum()

    def in_place(self, counts):
        self.seen += counts

    def assigned(self, counts):
        self.seen = self.seen + counts
        self.last = counts.float()

    def by_name(self, counts):
        setattr(self, "seen", counts + self.seen)  # noqa: B010

    def data(self, counts):
        self.seen.data += counts

    def data_assigned(self, counts):
        self.seen.data = self.seen + counts

    def in_the_table(self, counts):
        self._buffers["seen"] += counts

    def with_gradient(self, counts):
        with torch.enable_grad():
            self.seen = self.seen + counts + 0 * self.gate.weight.sum()

    def overwritten(self, counts):
        self.last = counts.float()

    def none_of_its_own(self, counts):
        self.last = counts


WAYS = ["in_place", "assigned", "by_name", "data", "data_assigned", "in_the_table", "with_gradient", "overwritten"]


def _batches() -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(7)
    return [torch.randn(5, 6, generator=draw) for _ in range(2)]


def _own_model(rank, world, models):
    mesh, batches = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",)), _batches()
    with closing(moefx.compile(models[rank], mesh)) as compiled:
        tensors = compiled.seen, compiled.last
        for _ in range(3):
            compiled(batches[rank]).sum().backward()
        assert compiled.seen is tensors[0]
        assert compiled.last is tensors[1]
        assert not compiled.seen.requires_grad
        return compiled.seen.clone(), compiled.last.clone(), compiled.gate.weight.grad.full_tensor()


@pytest.mark.parametrize("how", WAYS)
def test_what_ranks_add_is_summed_and_what_they_overwrite_is_their_own(how):
    torch.manual_seed(1)
    plain = Counts(how)
    models = [copy.deepcopy(plain) for _ in range(2)]
    found = run_threads(2, _own_model, models)
    last = []
    for batch in _batches():
        for _ in range(3):
            (plain(batch).sum() / 2).backward()
        last.append(plain.last.clone())
    for (seen, own, grad), wanted in zip(found, last):
        torch.testing.assert_close((seen, own, grad), (plain.seen.detach(), wanted, plain.gate.weight.grad))
    assert last[0].equal(last[1]) == (how not in ("assigned", "overwritten"))


def test_a_buffer_that_would_be_of_another_dtype_is_refused():
    message = r"replaces the buffer `last` of torch\.float32 with a tensor of torch\.int64"
    with one_rank():
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
        with pytest.raises(CaptureError, match=message):
            moefx.compile(Counts("none_of_its_own"), mesh, example_inputs=(_batches()[0],))


class Twins(nn.Module):
    """Two routers over one tensor."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.first, self.second = Counts(how), Counts(how)
        self.second.seen = self.first.seen

    def forward(self, x):
        return self.first(x).sum() + self.second(x).sum()


class Parts(nn.Module):
    """A counter of which layers hold parts."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("load", torch.zeros(2, 4))
        self.layers = nn.ModuleList(Counts("in_place") for _ in range(2))
        for layer, part in zip(self.layers, self.load):
            layer.seen = part

    def forward(self, x):
        return sum(layer(x).sum() for layer in self.layers) + self.load.sum()


def test_a_buffer_of_two_modules_keeps_its_tensor():
    with one_rank():
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
        with closing(moefx.compile(Twins("in_place"), mesh)) as compiled:
            compiled(_batches()[0])
            assert compiled.first.seen is compiled.second.seen
            assert compiled.first.seen.sum() == 6 + 20
        twice = Twins("assigned")
        twice.second = twice.first
        with closing(moefx.compile(twice, mesh)) as compiled:  # one module by two names
            compiled(_batches()[0])
            assert compiled.first.seen.sum() == 6 + 20
        with pytest.raises(CaptureError, match=r"buffer `first\.seen`, which is also `second\.seen`"):
            moefx.compile(Twins("assigned"), mesh, example_inputs=(_batches()[0],))


def test_parts_of_a_buffer_that_is_read_are_refused():
    with one_rank():
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
        with pytest.raises(UnsupportedUse, match="shares memory with another one"):
            moefx.compile(Parts(), mesh, example_inputs=(_batches()[0],))


class Scales(nn.Linear):
    """What the backward needs of a buffer is what it was."""

    def __init__(self) -> None:
        super().__init__(6, 6)
        self.register_buffer("scale", torch.ones(6))

    def forward(self, x):
        out = F.silu(super().forward(x) * self.scale)
        self.scale = self.scale * 0.5 + out.detach().mean(0)
        return out * self.scale


def test_the_backward_sees_what_a_buffer_was():
    torch.manual_seed(2)
    plain, batch = Scales(), _batches()[0]
    model = copy.deepcopy(plain)
    with one_rank(), closing(moefx.compile(model, init_device_mesh("cpu", (1,), mesh_dim_names=("dp",)))) as compiled:
        for _ in range(3):
            wanted, found = (_step(each, batch) for each in (plain, compiled))
            torch.testing.assert_close(found, wanted)
            torch.testing.assert_close(compiled.scale, plain.scale)
            torch.testing.assert_close(compiled.weight.grad.full_tensor(), plain.weight.grad)


def _step(model, batch):
    model.zero_grad()
    out = model(batch)
    out.square().sum().backward()
    return out.detach()


class Corrected(nn.Module):
    """A correction of scores that is written to by another name, in a layer whose experts are spread."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.gate, self.how = nn.Linear(6, 4), how
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.register_buffer("bias", torch.zeros(4))

    def forward(self, x):
        scores = self.gate(x).sigmoid()
        ids = (scores + self.bias).topk(2, -1).indices
        load = F.one_hot(ids, 4).float().mean((0, 1))
        with torch.no_grad():
            bias = {"alias": lambda: self.bias, "view": lambda: self.bias.view(-1), "data": lambda: self.bias.data}
            other = bias[self.how]()
            other += 0.1 * (load.mean() - load)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            token, _ = torch.where(ids == number)
            out.index_add_(0, token, expert(x[token]) * scores[token, number, None])
        return out


def _corrected(rank, world, models):
    mesh, batches = init_device_mesh("cpu", (world,), mesh_dim_names=("ep",)), _batches()
    with closing(moefx.compile(models[rank], mesh)) as compiled:
        for _ in range(2):
            compiled(batches[rank]).sum().backward()
        return compiled.bias.clone()


@pytest.mark.parametrize("how", ["alias", "view", "data"])
def test_a_write_by_another_name_is_not_dropped(how):
    torch.manual_seed(3)
    plain = Corrected(how)
    found = run_threads(2, _corrected, [copy.deepcopy(plain) for _ in range(2)])
    for _ in range(2):
        before, changes = plain.bias.clone(), torch.zeros(4)
        for batch in _batches():
            plain.bias.copy_(before)
            plain(batch)
            changes += plain.bias - before
        plain.bias.copy_(before + changes)
    assert plain.bias.any()
    for bias in found:
        torch.testing.assert_close(bias, plain.bias)


class Clamped(Corrected):
    def forward(self, x):
        out = super().forward(x)
        with torch.no_grad():
            self.bias.clamp_(-1, 1)
        return out


def _explained(rank, world, models):
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("ep",))
    with closing(moefx.compile(models[rank], mesh)) as compiled:
        compiled(_batches()[rank])
        return str(moefx.explain(compiled))


def test_a_correction_that_is_each_ranks_own_is_told():
    clamped, added = Clamped("alias"), Corrected("alias")
    with pytest.warns(UserWarning, match=r"choose differently: .*\n  bias: what the forward writes to it is made"):
        said = run_threads(2, _explained, [copy.deepcopy(clamped) for _ in range(2)])
    assert all("decides choices: bias: what" in each for each in said)
    with warnings.catch_warnings(action="error"):
        said = run_threads(2, _explained, [copy.deepcopy(added) for _ in range(2)])
    assert all("decides choices" not in each for each in said)
