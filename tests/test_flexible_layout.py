"""What experts compute does not depend on how many ranks there are, only on how many rows come: an expert's rows of all
ranks are one operand (Tutel's flexible all-to-all, section 3.3), be there 4 ranks with 256 rows each or 1024 with one.

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

D, INNER, PER_RANK, ROWS = 16, 24, 2, 1024  # rows: of every expert, over all ranks
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


def products(ranks: int, chunks: int) -> list[tuple]:
    torch.manual_seed(0)
    with fake_world(ranks):
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("ep",))
        given = torch.randn(6, D), ROWS // ranks
        options = moefx.Options(chunks=chunks)
        compiled = moefx.compile(Blocks(ranks * PER_RANK), mesh, options, example_inputs=given)
        with Products() as found:
            compiled(*given).sum().backward()
        compiled.close()
    return found.seen


@pytest.mark.full
@pytest.mark.parametrize("chunks", [1, 2])
def test_blocks_of_4_and_of_1024_ranks(chunks):
    # A process each: torch's caches hold on to the groups of a world that is gone.
    with ProcessPoolExecutor(2, mp_context=fork_server()) as pool:
        few, many = pool.map(partial(products, chunks=chunks), (4, 1024))
    assert few == many
    rows = [shape[1] for name, *shapes in few for shape in shapes[:1] if name == "bmm"]
    assert set(rows) & {ROWS // chunks}
