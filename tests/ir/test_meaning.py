"""What an op's gradient may read, and what others may write to in the meantime."""

from __future__ import annotations

import torch

import moefx.ir.ops  # noqa: F401 (defines ops)
from moefx.ir.meaning import Like


def test_others_may_write_to_the_first_argument_before_its_gradient():
    """As in `x.add_(mixture(x))`."""
    weight = torch.randn(3, 4, requires_grad=True)
    perm = torch.tensor([2, 0, 1, 5, 4, 3])
    x = weight * 1.0
    rows = torch.ops.moefx.dispatch(x, perm, 2)
    x.add_(torch.ops.moefx.combine(rows, perm, 2))
    x.sum().backward()
    torch.testing.assert_close(weight.grad, torch.full_like(weight, 3.0))


def test_of_the_first_argument_its_type_is_known():
    x = torch.randn(3, 4, dtype=torch.float64)
    assert Like.of(x) == Like(torch.Size((3, 4)), torch.float64, torch.device("cpu"))
