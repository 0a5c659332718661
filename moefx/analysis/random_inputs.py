"""Random values for the inputs of a captured graph, and the share of them that a rank of a placed graph gets.

Sizes are those of the trace; ranks other than the first get larger leading sizes where the guards allow it. Token ids
stay below the number of rows of every embedding of the graph.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.fx import GraphModule

from moefx.ir.op import expr, value
from moefx.pass_types import PassContext

Sizes = dict[sympy.Symbol, int]


@dataclass
class Draft:
    """The full values of one rank, by the key of their source and, for buffers, by name."""

    seed: int
    named: dict[Any, Tensor]

    def cotangent(self, index: int, output: Tensor) -> Tensor:
        """What the rest of the world sends back for an output; the same whenever it is asked."""
        return _normal(output.shape, output.dtype, f"cotangent {self.seed} {index}")


def rank_sizes(gm: GraphModule, ctx: PassContext) -> list[Sizes]:
    """{symbol: size} for every rank: equal to the example's on rank 0, others have more rows if no guard forbids it."""
    env = ctx.fake_mode.shape_env
    hints, leading = _hints(gm)
    ranks = []
    for rank in range(ctx.mesh.data_ranks):
        sizes = {s: hint + (rank if s in leading else 0) for s, hint in hints.items()}
        allowed = all(guard.expr.subs(sizes) != sympy.false for guard in env.guards)
        ranks.append(sizes if allowed else hints)
    return ranks


def _hints(gm: GraphModule) -> tuple[Sizes, set[sympy.Symbol]]:
    hints: Sizes = {}
    leading: set[sympy.Symbol] = set()
    for node in gm.graph.find_nodes(op="placeholder"):
        for dim, size in enumerate(value(node).shape):
            if isinstance(size, torch.SymInt) and isinstance(expr(size), sympy.Symbol):
                hints[expr(size)] = int(size.node.hint)
                if dim == 0:
                    leading.add(expr(size))
    return hints, leading


def draw(gm: GraphModule, sizes: Sizes, rank: int) -> Draft:
    """Values for all inputs: parameters and buffers equal on all ranks, the user's inputs the rank's own. Integers in
    buffers are those that the model has."""
    draft = Draft(rank, {})
    high = vocabulary(gm)
    for node in gm.graph.find_nodes(op="placeholder"):
        source, fake = node.meta["moefx"], value(node)
        shape = [int(expr(s).subs(sizes)) for s in fake.shape]
        if source.kind == "constant":
            continue
        if "held" in node.meta:
            draft.named[source.key] = node.meta["held"].detach().cpu().clone()
            continue
        own = f" {rank}" if source.kind == "input" else ""
        draft.named[source.key] = _random(
            shape, fake.dtype, f"{source.kind} {source.key}{own}", high, is_weight=source.kind == "param"
        )
    return draft


def vocabulary(gm: GraphModule) -> int:
    """One more than the largest id that every embedding of the graph takes."""
    rows = []
    for node in gm.graph.find_nodes(op="call_function", target=torch.nn.functional.embedding):
        rows.append(int(value(node.args[1]).shape[0]))
    for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.embedding.default):
        rows.append(int(value(node.args[0]).shape[0]))
    return min(rows, default=4)


def _random(shape: list[int], dtype: torch.dtype, key: str, high: int, *, is_weight: bool) -> Tensor:
    if dtype == torch.bool:
        return torch.ones(shape, dtype=dtype)
    if not dtype.is_floating_point:
        return torch.randint(min(1, high - 1), high, shape, generator=_generator(key)).to(dtype)
    drawn = _normal(shape, dtype, key)
    # Weights are scaled so that values neither vanish nor explode over many layers.
    return drawn * min(shape[-2:]) ** -0.5 if is_weight and len(shape) > 1 else drawn


def _normal(shape: Any, dtype: torch.dtype, key: str) -> Tensor:
    return torch.randn(list(shape), generator=_generator(key)).to(dtype)


def _generator(key: str) -> torch.Generator:
    return torch.Generator().manual_seed(zlib.crc32(key.encode()))


def value_of(source: Any, fake: Tensor, draft: Draft, slot: tuple[int, int]) -> Tensor:
    """The value of an input whose source is `source`. slot: (place on the expert axis, its size)."""
    place, ranks = slot
    if source.kind == "constant":
        return source.key
    if source.kind == "table":
        return torch.arange(fake.shape[0])[:, None]
    if source.kind == "experts":
        return draft.named[source.key].chunk(ranks)[place]
    if source.kind == "stack":
        return torch.stack([draft.named[key] for key in source.key]).chunk(ranks)[place]
    return draft.named[source.key]
