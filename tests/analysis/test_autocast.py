"""autocast: modes inside of a model become casts."""

from __future__ import annotations

from contextlib import closing

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import moefx
from moefx import _torch_compat as compat
from moefx.analysis import autocast
from tests.support.graphs import graph, short
from tests.support.ranks import one_rank
from tests.support.styles import D, E, K, Layer

BF16 = (("cpu", torch.bfloat16),)
PLAIN = """
def graph(x: "f32[s0, 8]", w: "f32[8, 8]"):
    up = F.linear(x, w)
    total = up.softmax(-1)
    down = F.linear(total, w)
    return (down,)
"""


def inside(source, **entered):
    """The graph with its first three ops inside of an autocast, run under which they have their values."""
    gm, _ = graph(source)
    ops = [n for n in gm.graph.nodes if n.op.startswith("call")]
    with gm.graph.inserting_before(ops[0]):
        enter = gm.graph.call_function(compat.enter_autocast, ("cpu", torch.bfloat16, entered["enabled"], None))
    with gm.graph.inserting_after(ops[2]):
        gm.graph.call_function(compat.exit_autocast, (enter,))
    if entered["enabled"]:
        for node in ops[::2]:  # the matmuls; torch's softmax gives single precision
            node.meta["val"] = node.meta["val"].to(torch.bfloat16)
    return gm


def test_casts_stand_where_torch_would_cast():
    gm = inside(PLAIN, enabled=True)
    assert autocast.make_explicit(gm, ()) == ()
    gm.graph.lint()
    text = short(gm)
    assert "autocast" not in text
    assert text.count("w.to(torch.bfloat16)") == 1, "the cast of a parameter is shared, as in torch's cache"
    assert "up.to(torch.float32)" in text
    x, w = torch.randn(3, 8), torch.randn(8, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        wanted = F.linear(F.linear(x, w).softmax(-1), w)
    gm.recompile()
    assert torch.equal(gm(x, w)[0], wanted)


@pytest.mark.parametrize(("enabled", "ambient"), [(True, BF16), (False, ())])
def test_a_mode_that_is_on_already_is_dropped(enabled, ambient):
    gm = inside(PLAIN, enabled=enabled)
    assert autocast.make_explicit(gm, ambient) == ambient
    assert not [n for n in gm.graph.nodes if n.target in (compat.enter_autocast, compat.exit_autocast, "to")]


class PreciseRouter(Layer):
    """A router in single precision, whatever autocast the model is trained under."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, D)
        with torch.autocast(x.device.type, enabled=False):
            scores = F.linear(rows.float(), self.router.weight, self.router.bias)
            weights, ids = scores.softmax(-1).topk(K, dim=-1)
        out = torch.zeros_like(rows)
        for e in range(E):
            token, choice = torch.where(ids == e)
            out.index_add_(0, token, (self.experts[e](rows[token]) * weights[token, choice, None]).to(out.dtype))
        return out.view_as(x)


class CoarseExperts(PreciseRouter):
    """Experts in half precision, whatever else is."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
            return super().forward(x)


@pytest.mark.parametrize("coarse", [False, True], ids=["by itself", "under autocast"])
@pytest.mark.parametrize("style", [PreciseRouter, CoarseExperts])
def test_numbers_are_those_of_the_model(style, coarse):
    torch.manual_seed(0)
    plain, x = style(), torch.randn(2, 9, D)
    with one_rank(), torch.autocast("cpu", dtype=torch.bfloat16, enabled=coarse):
        wanted = plain(x)
        wanted.float().square().sum().backward()
        grads = {name: param.grad.clone() for name, param in plain.named_parameters()}
        plain.zero_grad()
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("ep",))
        with closing(moefx.compile(plain, mesh, verify=2)) as compiled:
            given = compiled(x)
            given.float().square().sum().backward()  # inside, where torch would cast what is computed in full precision
            torch.testing.assert_close(given, wanted, rtol=1e-2, atol=1e-3)
            for name, param in compiled.named_parameters():
                torch.testing.assert_close(param.grad.full_tensor(), grads[name], rtol=3e-2, atol=3e-3, msg=name)


def test_a_router_in_full_precision_is_exact_under_autocast():
    torch.manual_seed(0)
    plain, x = Scores(), torch.randn(2, 9, D)
    with one_rank(), torch.autocast("cpu", dtype=torch.bfloat16):
        wanted = plain(x)[1]
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("ep",))
        with closing(moefx.compile(plain, mesh)) as compiled:
            given = compiled(x)[1]
    assert given.dtype is torch.float32
    torch.testing.assert_close(given, wanted, rtol=0, atol=1e-6)


class Scores(PreciseRouter):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast(x.device.type, enabled=False):
            scores = F.linear(x, self.router.weight, self.router.bias)
        return super().forward(x), scores


class OneCoarse(Layer):
    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.router(x).softmax(-1).topk(K, dim=-1)
        out = torch.zeros_like(x)
        for e in range(E):
            token, choice = torch.where(ids == e)
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=e == 1):
                rows = self.experts[e](x[token])
            out = out.index_add(0, token, rows.float() * weights[token, choice, None])
        return out


def test_experts_of_several_precisions_are_refused():
    with one_rank():
        compiled = moefx.compile(OneCoarse(), init_device_mesh("cpu", (1,), mesh_dim_names=("ep",)))
        with closing(compiled), pytest.raises(moefx.errors.RaiseError, match="experts of a loop"):
            compiled(torch.randn(12, D))
