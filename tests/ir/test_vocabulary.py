"""Loss and embedding over a cut vocabulary: half precision, logits that are masked, ids that there are not."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from moefx.ir.ops.vocabulary import loss_of_parts
from moefx.ir.world import ThreadWorld
from moefx.transport import vocabulary

T, V, N = 6, 24, 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loss_of_masked_logits(dtype):
    """One rank has none that count, for some tokens; sums are in single precision."""
    torch.manual_seed(0)
    logits, labels = torch.randn(T, V, dtype=dtype) * 5, torch.tensor([0, 3, 11, -100, 7, 23])
    logits[:4, V // N :] = -torch.inf
    exact = logits.clone().float().requires_grad_()
    wanted = F.cross_entropy(exact, labels)
    wanted.backward()

    def body(rank: int):
        mine = logits.chunk(N, 1)[rank].clone().requires_grad_()
        found = loss_of_parts(mine, labels, torch.float32, -100, "mean", 0.0, N, "mp")
        found.backward()
        return found.detach(), mine.grad

    results = ThreadWorld({"mp": N}).run(body)
    for found, _ in results:
        torch.testing.assert_close(found, wanted.detach())
    torch.testing.assert_close(torch.cat([grad for _, grad in results], 1), exact.grad.to(dtype))


def test_ids_that_there_are_not():
    with pytest.raises(IndexError, match="24 is no id of a vocabulary of 24: 0 to 23"):
        vocabulary.own_embedding(torch.ones(12, 4), torch.tensor([[3, 24]]), N, 0)
    with pytest.raises(IndexError, match="-1 is no id of a vocabulary of 24: 0 to 23"):
        vocabulary.label_terms(torch.ones(2, 12), torch.tensor([-100, -1]), -100, N, 0)
