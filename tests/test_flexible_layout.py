"""What experts compute does not depend on how many ranks there are, only on how many rows come: an expert's rows of all
ranks are one operand (Tutel's flexible all-to-all, section 3.3), be there 4 ranks with 512 rows each or 1024 with two.

The fake process group stands in for the other ranks.
"""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

import moefx
from tests.support.ranks import fake_world, fork_server

D, INNER, PER_RANK, ROWS = 16, 24, 2, 2048  # rows: of every expert, over all ranks
_PRODUCTS = ("mm", "bmm", "addmm", "baddbmm", "_grouped_mm")


class Products(TorchDispatchMode):
    """Notes the shapes of products with weights of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in _PRODUCTS:
            shapes = tuple(tuple(a.shape) for a in args if isinstance(a, Tensor))
            if any(INNER in shape for shape in shapes):
                self.seen.append((func.overloadpacket.__name__, *shapes))
        return out


class Blocks(nn.Module):
    """One-hot blocks of `capacity` rows per expert."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.experts = experts
        self.gate = nn.Linear(D, experts, bias=False)
        self.up, self.down = nn.Parameter(torch.randn(experts, D, INNER)), nn.Parameter(torch.randn(experts, INNER, D))

    def forward(self, x: Tensor, capacity: int) -> Tensor:
        weight, chosen = self.gate(x).softmax(-1).max(-1)
        hot = F.one_hot(chosen, self.experts)
        place = (hot.cumsum(0) * hot).sum(-1) - 1
        fits = place < capacity
        block = (hot * fits[:, None]).unsqueeze(-1) * F.one_hot(place * fits, capacity).unsqueeze(1)
        sent = torch.einsum("tec,td->ecd", block.to(x.dtype), x)
        back = torch.einsum("eci,eid->ecd", torch.einsum("ecd,edi->eci", sent, self.up).relu(), self.down)
        return torch.einsum("tec,ecd->td", block * weight[:, None, None], back)


    @staticmethod
    def given(ranks: int) -> tuple[Tensor, int]:
        return torch.randn(6, D), ROWS // ranks


class Grouped(Blocks):
    """Every row goes to its expert, none is dropped. With the ids that are given, every rank has as many rows for each.
    """

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        weights, order = self.gate(x).softmax(-1).gather(1, ids), ids.flatten().argsort(stable=True)
        offs = torch.bincount(ids.flatten(), minlength=self.experts).cumsum(0).to(torch.int32)
        hidden = F.grouped_mm(x[order // 1], self.up, offs=offs).relu()
        out = F.grouped_mm(hidden, self.down, offs=offs) * weights.flatten()[order, None]
        return torch.zeros_like(x).index_add(0, order // 1, out)

    @staticmethod
    def given(ranks: int) -> tuple[Tensor, Tensor]:
        experts = ranks * PER_RANK
        ids = torch.arange(ROWS // ranks * experts) % experts
        return torch.randn(len(ids), D), ids[:, None]


def products(ranks: int, model: type[Blocks], chunks: int) -> list[tuple]:
    torch.manual_seed(0)
    with fake_world(ranks):
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("ep",))
        given = model.given(ranks)
        options = moefx.Options(chunks=chunks)
        compiled = moefx.compile(model(ranks * PER_RANK), mesh, options, example_inputs=given)
        with Products() as found:
            compiled(*given).sum().backward()
        compiled.close()
    return found.seen


@pytest.mark.full
@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("model", [Blocks, Grouped])
def test_experts_of_4_and_of_1024_ranks(model, chunks):
    with ProcessPoolExecutor(2, mp_context=fork_server()) as pool:
        few, many = pool.map(partial(products, model=model, chunks=chunks), (4, 1024))
    assert few == many
    name, dim = {Blocks: ("bmm", 1), Grouped: ("mm", 0)}[model]
    assert ROWS // chunks in {shapes[0][dim] for found, *shapes in few if found == name}
