"""GShard layers whose capacity is another one in every step, wherever the model has it from.

T tokens, D width, I inner width, E experts, K choices per token, C capacity.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

D, INNER, E, K = 16, 24, 8, 2


@dataclass
class Output:
    loss: Tensor
    out: Tensor
    dropped: Tensor


def places_of(chosen: Tensor) -> Tensor:
    """Of every choice [T, K] its place among those of its expert, all first choices before all second ones: [T, K]."""
    hot = F.one_hot(chosen.t().reshape(-1), E)
    return ((hot.cumsum(0) - 1) * hot).sum(-1).view(K, -1).t()


class CapacityLayer(nn.Module):
    """One-hot blocks [E, C, D]. What does not fit is dropped, and counted."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(D, E, bias=False)
        self.up, self.down = nn.Parameter(torch.randn(E, D, INNER) / 4), nn.Parameter(torch.randn(E, INNER, D) / 5)

    def capacity(self, chosen: Tensor, given: float | None) -> int:
        raise NotImplementedError

    def forward(self, x: Tensor, given: float | None = None) -> Output:
        rows = x.reshape(-1, D)
        weight, chosen = self.gate(rows).softmax(-1).topk(K)
        capacity = self.capacity(chosen, given)
        places = places_of(chosen)
        fits = places < capacity
        block = F.one_hot(chosen, E).unsqueeze(-1) * F.one_hot((places * fits), capacity).unsqueeze(-2)
        block = (block * fits[..., None, None]).to(x.dtype)
        combine = torch.einsum("tk,tkec->tec", weight, block)
        sent = torch.einsum("tec,td->ecd", block.sum(1), rows)
        hidden = F.gelu(torch.einsum("ecd,edi->eci", sent, self.up))
        back = torch.einsum("eci,eid->ecd", hidden, self.down)
        out = torch.einsum("tec,ecd->td", combine, back).view_as(x)
        return Output(out.pow(2).mean(), out, (~fits).sum())


class ByFactor(CapacityLayer):
    """A factor that is an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = 1.0

    def capacity(self, chosen: Tensor, given: float | None) -> int:
        return max(1, int(self.factor * K * chosen.shape[0] / E))


class ByNumber(CapacityLayer):
    """A number of places that is an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.places = 4

    def capacity(self, chosen: Tensor, given: float | None) -> int:
        return self.places


class ByArgument(CapacityLayer):
    def capacity(self, chosen: Tensor, given: float | None) -> int:
        return math.ceil(given * chosen.shape[0] * K / E)


class ByBuffer(CapacityLayer):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("factor", torch.tensor(1.0))

    def capacity(self, chosen: Tensor, given: float | None) -> int:
        return max(int((self.factor * (chosen.shape[0] * K / E)).ceil().item()), 1)


class AsNeeded(CapacityLayer):
    """As many places as the fullest expert needs: nothing is dropped."""

    def capacity(self, chosen: Tensor, given: float | None) -> int:
        return int(F.one_hot(chosen.flatten(), E).sum(0).max().item())


class ByTutel(CapacityLayer):
    """f > 0: by the factor f; 0: as many as are needed; f < 0: so many, but at most those of the factor |f|."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = 1.0

    def capacity(self, chosen: Tensor, given: float | None) -> int:
        at_factor = K * max(1, int(abs(self.factor) * ((chosen.shape[0] + E - 1) // E)))
        if self.factor > 0:
            return at_factor
        needed = F.one_hot(chosen.flatten(), E).sum(0).max()
        if self.factor == 0:
            return int(needed.item())
        return int(needed.clamp(max=at_factor).item())
