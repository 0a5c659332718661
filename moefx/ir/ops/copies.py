"""Ranks that read the same data and yet exchange rows among one another: where the experts are folded into `mp`.

Each of the n ranks sends all rows to the experts, who compute them n times: n copies of the tokens, of which every rank
has one. So what ranks have in common becomes theirs by `own_copy`, and what comes back is common by `common_copy`: the
mean of the copies, which are equal. Its gradient is a share of one over n for every copy, and that of `own_copy` their
sum. (Parm's baseline; section 3.1.)
"""

from __future__ import annotations

import torch
from torch import Tensor

from moefx.ir.meaning import meaning
from moefx.ir.op import Along, argument, define


@meaning("x [..] -> [..]", gradient=lambda grad, x, n, axis, scale: common_copy(grad, n, axis, scale * n))
def own_copy(x: Tensor, n: int, axis: str, scale: float = 1.0) -> Tensor:
    """What all n ranks along an axis have, as this rank's copy of n; the transpose of `common_copy` gives each copy a
    share, by `scale` 1/n."""
    return _scaled(x, scale)


@meaning("x [..] -> [..]", gradient=lambda grad, x, n, axis, scale: own_copy(grad, n, axis, scale / n))
def common_copy(x: Tensor, n: int, axis: str, scale: float = 1.0) -> Tensor:
    """A copy that all n ranks along an axis have alike; as the transpose of `own_copy` the sum of all, by `scale` n."""
    return _scaled(x, scale)


def _scaled(x: Tensor, scale: float) -> Tensor:
    return (x * scale if x.is_floating_point() else x.clone()).contiguous()


def _define(op, along, transposed):
    def check(node) -> str | None:
        n, scale = argument(node, "n"), argument(node, "scale")
        wanted = 1.0, transposed(n)
        return None if scale in wanted else f"{n} copies are scaled by {scale}, not by {wanted[0]} or {wanted[1]}"

    define(
        op, check=check, along=along, fresh=True, drawn="routing", runtime="moefx.runtime.kernels.scaled(x, scale)",
    )  # fmt: skip


_define(torch.ops.moefx.own_copy.default, Along("I", "V", dim=None), lambda n: 1 / n)
_define(torch.ops.moefx.common_copy.default, Along("V", "I"), float)
