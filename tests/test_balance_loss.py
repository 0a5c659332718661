"""Load balancing over the tokens of all ranks, by the lines that docs/guide/data-and-gradients.md gives for it."""

from __future__ import annotations

import copy
import re
from contextlib import closing
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import moefx
from tests.support.parity import full
from tests.support.sharing import run_sharing
from tests.support.styles import D, E, K, Unbound

GUIDE = (Path(__file__).parents[1] / "docs/guide/data-and-gradients.md").read_text()
(CODE,) = (block for block in re.findall(r"^```python\n(.*?)^```", GUIDE, re.DOTALL | re.MULTILINE)
           if "def balance" in block)  # fmt: skip
GLOBAL = "    totals = over_ranks(totals, mesh)"
WEIGHT = 0.5


class WithLogits(Unbound):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x), self.router(x.reshape(-1, D))


def balance_of(code: str):
    found: dict = {}
    exec(code, found)
    return found["balance"]


def on_rank(rank: int, world: int, model: WithLogits, inputs: list[Tensor]) -> list[tuple[Tensor, dict]]:
    """(loss, gradients) with the line, and without it."""
    mesh, found = init_device_mesh("cpu", (world,), mesh_dim_names=("ep",)), []
    with closing(moefx.compile(copy.deepcopy(model), mesh)) as compiled:
        for code in (CODE, CODE.replace(GLOBAL, "")):
            compiled.zero_grad()
            y, logits = compiled(inputs[rank])
            aux = balance_of(code)((logits,), K, compiled.data_mesh)
            (y.square().mean() + WEIGHT * aux).backward()
            found.append((aux.detach(), {name: full(p.grad) for name, p in compiled.named_parameters()}))
    return found


def test_the_loss_is_that_of_one_device():
    """Of unlike numbers of tokens. Without the line it is each rank's own, and so are its gradients."""
    torch.manual_seed(0)
    model = WithLogits().double()
    inputs = [torch.randn(rows, D, dtype=torch.float64) for rows in (5, 9)]
    assert CODE.count(GLOBAL) == 1
    ranks = run_sharing(2, on_rank, model, inputs)

    outs = [model(x) for x in inputs]
    probs = torch.cat([logits for _, logits in outs]).softmax(-1)
    load = F.one_hot(probs.topk(K).indices, E).sum(1).double().mean(0)
    expected = E * (load * probs.mean(0)).sum()
    (sum(y.square().mean() for y, _ in outs) / 2 + WEIGHT * expected).backward()
    for (aux, gradients), (own_aux, own_gradients) in ranks:
        torch.testing.assert_close(aux, expected.detach(), rtol=1e-12, atol=0)
        for name, p in model.named_parameters():
            torch.testing.assert_close(gradients[name], p.grad, rtol=1e-12, atol=1e-12)
        assert abs(own_aux - expected) > 1e-3
        assert not torch.allclose(own_gradients["router.weight"], model.router.weight.grad, rtol=1e-3)
