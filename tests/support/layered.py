"""Several equal layers one after the other."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from tests.support import handmade


class Normed(nn.Module):
    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(handmade.D), mlp

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


def layered(make: Callable[[], nn.Module], count: int) -> nn.Module:
    """Embedding, `count` layers with a norm each, head."""
    return handmade.with_layer(lambda: nn.Sequential(*(Normed(make()) for _ in range(count))))
