"""What stands in models that no capture can hold is named."""

from __future__ import annotations

import copy
import logging
import threading
from contextlib import closing

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import moefx
from moefx.capture import substitutes
from moefx.errors import CaptureError, UnsupportedUse
from tests.support.handmade import Loop, make_moe
from tests.support.parity import full
from tests.support.ranks import one_rank


class Mapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 8, 8))

    def forward(self, x):
        scores = (x @ self.weight[0])[:, :4].softmax(-1)
        return torch.einsum("te,etd->td", scores, torch.vmap(lambda w: x @ w)(self.weight))


def test_transforms_of_functions_are_refused_by_name():
    with one_rank():
        compiled = moefx.compile(Mapped(), init_device_mesh("cpu", (1,), mesh_dim_names=("ep",)))
        with closing(compiled), pytest.raises(CaptureError, match=r"torch\.vmap"):
            compiled(torch.randn(5, 8))


class WritesToItsParameter(nn.Linear):
    def forward(self, x):
        with torch.no_grad():
            self.weight[0].div_(self.weight.norm())
        return super().forward(x)


def test_a_forward_that_writes_to_its_parameter_is_refused():
    with one_rank():
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
        with pytest.raises(CaptureError, match="the model writes to its parameter weight in its forward"):
            moefx.compile(WritesToItsParameter(4, 4), mesh, example_inputs=(torch.randn(2, 4),))


def test_so_is_one_that_writes_to_a_frozen_parameter():
    with one_rank():
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
        with pytest.raises(CaptureError, match="the model writes to its parameter weight") as caught:
            moefx.compile(WritesToItsParameter(4, 4).requires_grad_(False), mesh, example_inputs=(torch.randn(2, 4),))
        assert "keep it in a buffer" in str(caught.value)


class Communicates(nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        if dist.is_initialized():
            dist.all_reduce(y)
        return y


def test_a_model_that_communicates_by_itself_is_refused():
    with one_rank():
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
        with pytest.raises(CaptureError, match=r"the model communicates by itself \(all_reduce\)"):
            moefx.compile(Communicates(4, 4), mesh, example_inputs=(torch.randn(2, 4),))


class ClampsEach(nn.Linear):
    def forward(self, x):
        y, z = torch._foreach_mul([super().forward(x), x], [2.0, 3.0])
        torch._foreach_sqrt_([y, z]) if self.out_features == 5 else torch._foreach_maximum_([y, z], 0.5)
        torch._foreach_addcmul_([y, z], [y, z], [y, z], 0.5)
        return y + z.sum()


def test_ops_on_lists_are_taken_apart():
    with one_rank():
        mesh, x = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",)), torch.rand(2, 4)
        plain = ClampsEach(4, 5)
        nn.init.ones_(plain.weight)
        with closing(moefx.compile(copy.deepcopy(plain), mesh)) as compiled:
            torch.testing.assert_close(compiled(x), plain(x), equal_nan=True)
        with pytest.raises(CaptureError, match=r"writes to tensors by torch\._foreach_maximum_"):
            moefx.compile(ClampsEach(4, 4), mesh, example_inputs=(x,))


class Named(nn.Module):
    """Its tensors are called as what emitted code is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.session = nn.Parameter(torch.randn(4, 4))
        self.register_buffer("step", torch.zeros(()))

    def forward(self, inputs):
        self.step += 1
        return inputs @ self.session * self.step


def test_tensors_may_have_any_name():
    x, model = torch.randn(2, 4), Named()
    with one_rank():
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
        wanted = [model(x), model(x)]
        model.step.zero_()
        with closing(moefx.compile(model, mesh, example_inputs=(x,))) as compiled:
            torch.testing.assert_close([compiled(x), compiled(x)], wanted)


class CastsItsPart(nn.Module):
    """As the routers of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Linear(4, 4)

    def forward(self, x):
        self.part = self.part.to(torch.float32)
        return self.part(x).to(self.part.weight.dtype).mul_(2.0)


def test_a_part_that_is_cast_to_what_it_is_is_not_written_to():
    x, model = torch.randn(2, 4), CastsItsPart()
    with one_rank():
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
        wanted = model(x)
        with closing(moefx.compile(model, mesh, example_inputs=(x,))) as compiled:
            torch.testing.assert_close(compiled(x), wanted)


def test_modules_beside_the_capture_still_move():
    with substitutes.modules_stay():
        assert nn.Linear(4, 4).double().weight.dtype is torch.float64


_LOCK = threading.Lock()


class Locks(nn.Linear):
    def forward(self, x):
        with _LOCK:
            return super().forward(x)


class Branches(nn.Linear):
    def forward(self, x):
        return super().forward(x if x.sum() > 0 else -x)


class ReadsAList(nn.Linear):
    """What a tensor would do in another way than the list of its numbers, or not at all, but the first."""

    def __init__(self, how: str) -> None:
        super().__init__(4, 4)
        self.how = how

    def forward(self, x):
        places = torch.where(x[:, 0] > 0)[0].tolist()
        if isinstance(places, torch.Tensor) or (self.how == "compare" and places != []):
            return x
        if self.how == "sort":
            places.sort()
        places = places + places if self.how == "add" else places
        return super().forward(x[None, places]) * len(places)


def test_a_list_of_any_length_is_taken_as_indices():
    with one_rank():
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
        model, x = ReadsAList("index"), torch.tensor([[1.0] * 4, [-1.0] * 4, [2.0] * 4])
        wanted = [model(x), model(x[[1, 1]])]
        with closing(moefx.compile(model, mesh, example_inputs=(x,))) as compiled:
            torch.testing.assert_close([compiled(x), compiled(x[[1, 1]])], wanted)


@pytest.mark.parametrize(("module", "said", "hint"), [
    (ReadsAList("compare"), "indexed by it, but __ne__ is not known", "fullgraph=True"),
    (ReadsAList("sort"), "indexed by it, but sort is not known: `places.sort()`", "fullgraph=True"),
    (ReadsAList("add"), "a list whose length depends on data is read by add", "without `.tolist()`"),
    (Locks(4, 4), "not know how to enter a `lock` context manager: `with _LOCK:`", "fullgraph=True"),
    (Branches(4, 4), "depends on values of tensors: `return super().forward(x if x.sum() > 0 else -x)`", "torch.where"),
])  # fmt: skip
def test_what_cannot_be_captured_is_named_with_its_line(module, said, hint):
    with one_rank():
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
        with pytest.raises(CaptureError) as error:
            moefx.compile(module, mesh, example_inputs=(torch.randn(2, 4),))
    assert said in error.value.what
    assert "test_capture.py:" in error.value.where
    assert hint in error.value.hint


class AsksForRows(nn.Linear):
    def forward(self, x):
        return super().forward(x[x[:, 0] > 0]).logsumexp(-1)


def test_an_op_that_asks_how_many_rows_data_leave_is_named():
    with one_rank():
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
        with pytest.raises(UnsupportedUse, match="logsumexp asks how many rows there are, which depends on") as error:
            moefx.compile(AsksForRows(4, 4), mesh, example_inputs=(torch.randn(5, 4),))
        assert "test_capture.py" in str(error.value)


class Frozen(nn.Module):
    """What its frozen part gives shall require a gradient, as in front of eager checkpoints."""

    def __init__(self, keeps: bool) -> None:
        super().__init__()
        self.keeps = keeps
        self.embed = nn.Linear(4, 4).requires_grad_(False)
        self.head = nn.Linear(4, 4)

    def forward(self, x):
        hidden = self.embed(x).requires_grad_()
        if self.keeps:
            self.hidden = hidden
        return self.head(hidden)


def test_a_new_leaf_changes_nothing_where_nobody_sees_it():
    x = torch.randn(2, 4)
    with one_rank():
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
        model = Frozen(keeps=False)
        wanted = torch.autograd.grad(model(x).square().sum(), list(model.head.parameters()))
        with closing(moefx.compile(model, mesh, example_inputs=(x,))) as compiled:
            compiled(x).square().sum().backward()
            torch.testing.assert_close([p.grad.to_local() for p in model.head.parameters()], list(wanted))
            assert model.embed.weight.grad is None
        with pytest.raises(CaptureError, match=r"lets out a tensor that requires_grad_\(\) was called on"):
            moefx.compile(Frozen(keeps=True), mesh, example_inputs=(x,))


class Hooked(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 4), nn.Linear(4, 4))
        self[1].register_full_backward_hook(lambda *given: None)


def test_backward_hooks_of_modules_are_named():
    with one_rank():
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
        with pytest.raises(CaptureError, match=r"has a backward hook(.|\n)*hook a parameter or a tensor"):
            moefx.compile(Hooked(), mesh, example_inputs=(torch.randn(2, 4),))


class GivesViews(nn.Module):
    def __init__(self, give) -> None:
        super().__init__()
        self.linear, self.give = nn.Linear(8, 8), give

    def forward(self, x):
        return self.give(self.linear(x).relu_())


VIEWS = {
    "a part": lambda y: (y[:, -1], y),
    "another shape": lambda y: {"flat": y.view(-1, 8), "y": y},
    "detached": lambda y: (y, y.detach()),
    "transposed": lambda y: (y.mT, y[0], y.sum()),
    "parts of one op": lambda y: y.split([2, 2, 4], -1),
    "parts and the whole": lambda y: (*y.chunk(2, -1), y),
    "twice": lambda y: (y, y),
}


@pytest.mark.parametrize("what", VIEWS)
def test_outputs_that_are_views_of_one_another(what):
    model = GivesViews(VIEWS[what])
    plain, x, y = copy.deepcopy(model), torch.randn(2, 6, 8), torch.randn(3, 4, 8)

    def run(model, x):
        outputs = torch.utils._pytree.tree_leaves(model(x))
        model.zero_grad()
        sum((out * torch.arange(out.numel()).view(out.shape)).sum() for out in outputs if out.requires_grad).backward()
        return [out.detach().clone() for out in outputs], [full(p.grad) for p in model.parameters()]

    with one_rank(), closing(moefx.compile(model, init_device_mesh("cpu", (1,), mesh_dim_names=("dp",)))) as compiled:
        for batch in (x, y):
            torch.testing.assert_close(run(compiled, batch), run(plain, batch))
        assert len(compiled._variants) == 1


LOG = logging.getLogger("model")


class Prints(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        y = self.linear(x)
        print(f"{y.shape} {y.mean()}", y)
        LOG.warning("mean %s", y.mean())
        return y


def test_what_is_printed_and_logged_is_left_out_and_said(capsys):
    model, x = Prints(), torch.randn(3, 4)
    expected = model(x)
    capsys.readouterr()
    with one_rank():
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
        with pytest.warns(UserWarning, match=r"not print or log .*test_capture.py:\d+, .*test_capture.py:\d+"):
            compiled = moefx.compile(model, mesh, example_inputs=(x,))
        with closing(compiled):
            torch.testing.assert_close(compiled(x), expected)
    said = capsys.readouterr()
    assert not said.out
    assert "mean" not in said.err


class TakesOneBranch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = make_moe(Loop()), make_moe(Loop())

    def forward(self, x):
        return self.a(x) if x.abs().max().item() < 1e9 else self.b(x)


def test_a_block_that_the_first_call_leaves_out_is_named():
    with one_rank():
        compiled = moefx.compile(TakesOneBranch(), init_device_mesh("cpu", (1,), mesh_dim_names=("ep",)))
        with closing(compiled), pytest.raises(CaptureError, match=r"b\.experts: this call does not reach it"):
            compiled(torch.randn(2, 6, 16))
