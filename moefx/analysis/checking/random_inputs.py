"""Random values for the inputs of a captured graph, and the share of them that a rank of a placed graph gets.

Sizes are larger than those of the trace, and differ from rank to rank, where the guards allow it. Masks hold both
values, labels also those that a loss ignores; token ids stay below the number of rows of every embedding of the graph.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import sympy
import torch
from torch import Tensor
from torch.fx import GraphModule

from moefx.analysis.checking.integer_inputs import Integers, integers
from moefx.analysis.checking.random_homes import draw_homes, draw_plan
from moefx.context.pass_types import PassContext
from moefx.ir.op import expr, value
from moefx.ir.regions import TABLES
from moefx.layout import Layout

Sizes = dict[sympy.Symbol, int]


@dataclass
class Draft:
    """The full values of one rank, by the key of their source and, for buffers, by name."""

    seed: int
    named: dict[Any, Tensor]

    def cotangent(self, index: int, output: Tensor) -> Tensor:
        """What the rest of the world sends back for an output; the same whenever it is asked."""
        return _normal(output.shape, output.dtype, f"cotangent {self.seed} {index}")


def rank_sizes(gm: GraphModule, ctx: PassContext, factor: int = 1) -> list[Sizes]:
    """{symbol: size} for every rank that reads data of its own. No two of them have a size in common, nor one with the
    example, so that a size that became a number shows, where the guards allow it. factor: this many times as many
    rows."""
    hints, leading = _hints(gm)
    guards = [guard.expr for guard in ctx.fake_mode.shape_env.guards]

    def allowed(sizes: Sizes) -> bool:
        numbers = {symbol: sympy.Integer(size) for symbol, size in sizes.items()}
        return all(guard.xreplace(numbers) != sympy.false for guard in guards)

    return [_larger(hints, leading, rank + 1, factor, allowed) for rank in range(ctx.mesh.size("data"))]


def _larger(hints: Sizes, leading: set[sympy.Symbol], more: int, factor: int,
            allowed: Callable[[Sizes], bool]) -> Sizes:  # fmt: skip
    """Sizes that are larger by `more` or a multiple of it: all of them, else as many as may be."""
    at_least = {s: hint * (factor if s in leading or not leading else 1) for s, hint in hints.items()}
    every = {s: size + more for s, size in at_least.items()}
    if allowed(every):
        return every
    sizes = dict(hints)
    for symbol in sorted(hints, key=lambda s: s not in leading):
        for step in (1, 2, 4, hints[symbol]):
            larger = sizes | {symbol: at_least[symbol] + more * step}
            if allowed(larger):
                sizes = larger
                break
    return sizes


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


@dataclass(frozen=True)
class Style:
    """How the user's masks and integers are drawn. masks: with both values, `True` first or `False` first, or with one.
    zeros: integers may be 0. ignored: labels may be what a loss ignores."""

    masks: str
    zeros: bool
    ignored: bool


# The first with which the model computes numbers is taken: a row of attention that is masked as a whole gives none.
STYLES = (
    Style("true first", True, True), Style("false first", True, True),
    Style("true", False, False), Style("false", False, False),
)  # fmt: skip


def draw(gm: GraphModule, sizes: Sizes, rank: int, style: Style = STYLES[0]) -> Draft:
    """Values for all inputs: parameters and buffers equal on all ranks, the user's inputs the rank's own. Integers in
    buffers are those that the model has."""
    draft, high = Draft(rank, {}), vocabulary(gm)
    for node in gm.graph.find_nodes(op="placeholder"):
        source, fake = node.meta["moefx"], value(node)
        shape = [int(expr(s).subs(sizes)) for s in fake.shape]
        if source.kind == "constant":
            continue
        if "held" in node.meta:
            draft.named[source.key] = node.meta["held"].detach().cpu().clone()
            continue
        own = f" {rank}" if source.kind == "input" else ""
        key = f"{source.kind} {source.key}{own}"
        if fake.dtype == torch.bool:
            mask = _mask(shape, key, style.masks) if own else torch.ones(shape, dtype=torch.bool)
            draft.named[source.key] = mask
        elif not fake.dtype.is_floating_point:
            draft.named[source.key] = _numbers(shape, key, integers(node, high), style).to(fake.dtype)
        else:
            draft.named[source.key] = _floats(shape, fake.dtype, key, is_weight=source.kind == "param")
    return draft


def vocabulary(gm: GraphModule) -> int:
    """One more than the largest id that every embedding of the graph takes."""
    rows = []
    for node in gm.graph.find_nodes(op="call_function", target=torch.nn.functional.embedding):
        rows.append(int(value(node.args[1]).shape[0]))
    for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.embedding.default):
        rows.append(int(value(node.args[0]).shape[0]))
    return min(rows, default=4)


def _mask(shape: list[int], key: str, style: str) -> Tensor:
    """Rows that begin with one value and end with the other, and hold more of the first."""
    first = "true" in style
    mask = torch.full(shape, first)
    rows = mask.squeeze()
    if rows.dim() and "first" in style:
        rows ^= torch.rand(rows.shape, generator=_generator(key)) < 0.3
        rows[..., -1] = not first
        rows[..., 0] = first
    return mask


def _numbers(shape: list[int], key: str, allowed: Integers, style: Style) -> Tensor:
    """Integers below a limit, a zero among them. They may be a mask, too: no row begins with one."""
    low = min(1, allowed.high - 1)
    numbers = torch.randint(0 if style.zeros else low, allowed.high, shape, generator=_generator(key))
    if numbers.numel() > 1 and style.zeros:
        numbers.view(-1)[-1] = 0
        numbers[..., 0].clamp_(min=low)
    for i, label in enumerate(allowed.ignored if style.ignored else ()):
        numbers.view(-1)[2 + i :: 4] = label
    return numbers


def _floats(shape: list[int], dtype: torch.dtype, key: str, *, is_weight: bool) -> Tensor:
    drawn = _normal(shape, dtype, key)
    # Weights are scaled so that values neither vanish nor explode over many layers.
    return drawn * min(shape[-2:]) ** -0.5 if is_weight and len(shape) > 1 else drawn


def _normal(shape: Any, dtype: torch.dtype, key: str) -> Tensor:
    return torch.randn(list(shape), generator=_generator(key)).to(dtype)


def _generator(key: str) -> torch.Generator:
    return torch.Generator().manual_seed(zlib.crc32(key.encode()))


def value_of(source: Any, fake: Tensor, draft: Draft, ctx: PassContext, place: dict[str, int]) -> Tensor:
    """What a rank has of an input whose source is `source`. place: of the rank on each root dim. Where experts may be
    anywhere, they are somewhere (`random_homes`), and behind a rank's own experts is anything."""
    if source.kind == "constant":
        return source.key
    if source.kind in TABLES:
        return _table(source, fake.shape[0], ctx, place)
    is_stack = source.kind == "stack"
    whole = torch.stack([draft.named[key] for key in source.key]) if is_stack else draft.named[source.key]
    part = layout_of(source, ctx).take(whole, ctx.mesh.root, place)
    if source.room is None:
        return part
    rest = _normal((source.room - part.shape[0], *part.shape[1:]), part.dtype, f"behind {source.key} {place}")
    return torch.cat([part, rest])


def layout_of(source: Any, ctx: PassContext) -> Layout:
    """How an input is cut in these runs."""
    if source.room is None:
        return source.layout
    slots = next(slots for slots in ctx.decisions.slots.values() if source.key in slots.params)
    experts, ranks = len(slots.owners), ctx.mesh.size("ep")
    owners = np.repeat(draw_homes(experts, ranks, slots.room), source.room // slots.room)
    return Layout.spread(owners.tolist(), ctx.mesh.axis("ep"), ranks)


def _table(source: Any, experts: int, ctx: PassContext, place: dict[str, int]) -> Tensor:
    slots, ranks = ctx.slots(source.key), ctx.mesh.size("ep")
    if slots is None:
        return torch.arange(experts)[:, None]
    plan = draw_plan(source.key, experts, ranks, slots)
    return torch.from_numpy(plan.ends[ctx.mesh.place("ep", place)] if source.kind == "ends" else plan.slots)
