"""What stands in models that no capture can hold is named."""

from __future__ import annotations

import threading
from contextlib import closing

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import moefx
from moefx.errors import CaptureError
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


class GivesAnotherBuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(1))
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        self.seen = self.seen + 1
        return self.linear(x) * self.seen


class WritesToItsParameter(nn.Linear):
    def forward(self, x):
        with torch.no_grad():
            self.weight[0].div_(self.weight.norm())
        return super().forward(x)


@pytest.mark.parametrize(("model", "message"), [
    (GivesAnotherBuffer(), "the forward puts another tensor in the place of the buffer `seen`"),
    (WritesToItsParameter(4, 4), "the model writes to its parameter weight in its forward"),
])  # fmt: skip
def test_what_no_graph_shows_is_refused(model, message):
    with one_rank():
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
        with pytest.raises(CaptureError, match=message):
            moefx.compile(model, mesh, example_inputs=(torch.randn(2, 4),))


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


_LOCK = threading.Lock()


class Locks(nn.Linear):
    def forward(self, x):
        with _LOCK:
            return super().forward(x)


class Branches(nn.Linear):
    def forward(self, x):
        return super().forward(x if x.sum() > 0 else -x)


@pytest.mark.parametrize(("module", "said", "hint"), [
    (Locks(4, 4), "not know how to enter a `lock` context manager: `with _LOCK:`", "fullgraph=True"),
    (Branches(4, 4), "depends on values of tensors: `return super().forward(x if x.sum() > 0 else -x)`", "torch.where"),
])  # fmt: skip
def test_what_cannot_be_captured_is_named_with_its_line(module, said, hint):
    with one_rank():
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
        with pytest.raises(CaptureError) as error:
            moefx.compile(module, mesh, example_inputs=(torch.randn(2, 4),))
    assert said in error.value.what
    assert error.value.where.endswith("in forward")
    assert hint in error.value.hint
