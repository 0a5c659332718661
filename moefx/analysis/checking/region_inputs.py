"""What a region is run on by itself: sizes, and numbers for all that it reads, such that a routing and what is computed
of it fit together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.fx import Node

from moefx import _torch_compat as compat
from moefx.analysis.checking.evaluate import Evaluator, held
from moefx.analysis.recognition.routings import may_name_nobody
from moefx.analysis.recognition.signs import is_positive
from moefx.ir import edit
from moefx.ir.names import op_name
from moefx.ir.op import expr
from moefx.ir.randomness import is_random
from moefx.ir.regions import Layout

ROWS = 5  # per expert in a static block, where any number must do


class Calm(Evaluator):
    """Dropout lets everything through: it draws for every entry by itself, and two runs would draw differently."""

    def _evaluate(self, node: Node) -> Any:
        return self.values[node.all_input_nodes[0]] if is_dropout(node) else super()._evaluate(node)


def symbol_values(nodes: Sequence[Node]) -> dict[sympy.Symbol, int]:
    """Sizes for the symbols of the boundary, all different. The first one is the batch: what stands in front. Those
    that the model fixes to each other or to a number are as in the example."""
    shapes = [[expr(size) for size in shape_of(node) or ()] for node in nodes]
    leading = {shape[0] for shape in shapes if shape and shape[0].is_Symbol}
    symbols = {symbol for shape in shapes for size in shape for symbol in size.free_symbols}
    ordered = sorted(symbols, key=lambda symbol: (symbol not in leading, str(symbol)))
    found = {symbol: (3 if i == 0 else 5 + 2 * i) for i, symbol in enumerate(ordered)}
    for guard in broken_guards(nodes[0], found) if found else ():
        hints = compat.size_hints(edit.tensor_value(nodes[0]).fake_mode)
        found |= {symbol: hints[symbol] for symbol in guard.free_symbols & found.keys()}
    return found


def broken_guards(node: Node, sizes: Mapping[sympy.Symbol, int]) -> Iterator[sympy.Expr]:
    """What capture found of sizes that is not so with these; `sizes` may change in between."""
    for guard in edit.tensor_value(node).fake_mode.shape_env.guards:
        if guard.expr.free_symbols & sizes.keys() and _breaks(guard.expr, sizes):
            yield guard.expr


def _breaks(guard: sympy.Expr, sizes: Mapping[sympy.Symbol, int]) -> bool:
    try:
        return guard.subs(sizes) == sympy.false
    except ZeroDivisionError:  # it divides by tokens // 8, of which there is none
        return True


def draw(node: Node, symbols: dict, generator: torch.Generator, idx: Node | None, experts: int, trial: int,
          args_of: Callable[[Node], tuple] = lambda node: node.args) -> Tensor:  # fmt: skip
    value = edit.tensor_value(node)
    if (given := held(node)) is not None:
        return given.detach().cpu().clone()
    shape = drawn_shape(node, symbols)
    if node is idx:
        drawn = _routing(shape, experts, generator, trial)
        if may_name_nobody(idx):
            spread = torch.rand(shape, generator=generator)
            drawn = torch.where((spread[:1] if trial == 2 else spread) < 0.5, drawn, experts)
        return drawn.to(value.dtype)
    if value.dtype.is_floating_point:
        scale = 0.5 if not is_parameter(node) else 0.3
        drawn = torch.randn(shape, generator=generator, dtype=torch.float32) * scale
        return (drawn.abs() if is_positive(node, args_of) else drawn).to(value.dtype)
    if value.dtype == torch.bool:
        return torch.rand(shape, generator=generator) < 0.5
    least = 0 if shape else 1  # something may be divided by a number
    return torch.randint(least, 4, shape, generator=generator).to(value.dtype)


def behind(idx: Node, inputs: Iterable[Node]) -> list[Node]:
    """The inputs, but for numbers that are computed of the routing: what else these are computed of. Drawn by
    themselves, they would not fit the routing that is drawn, as gates that are zero where nobody was chosen."""
    computed, found = edit.descendants([idx]) - {idx}, []
    for node in inputs:
        between = edit.ancestors([node]) & computed
        read = edit.ancestors(between, stop=lambda n: n not in computed and not _is_filled(n)) if between else set()
        sources = {n for n in read if n not in computed and n is not idx and not _is_filled(n)}
        of_tokens = all(shape_of(n)[:1] == shape_of(idx)[:1] for n in {node, *sources} if shape_of(n) is not None)
        found += sorted(sources) if of_tokens and between and not any(map(is_random, between)) else [node]
    return list(dict.fromkeys(found))


def _is_filled(node: Node) -> bool:
    """Whether it has the same numbers whatever it is computed of."""
    return op_name(node) in _FILLED


_FILLED = tuple(f"{before}{name}{behind}" for name in ("zeros", "ones", "full", "empty")
                for before, behind in (("", ""), ("", "_like"), ("new_", "")))  # fmt: skip


def draw_parts(ids: Node, masks: Sequence[Node], symbols: dict, generator: torch.Generator, trial: int
                ) -> Iterator[tuple[Node, Tensor]]:  # fmt: skip
    """Masks that are parts of a routing, and its ids [..] or [.., K]."""
    experts, tokens = len(masks), drawn_shape(masks[0], symbols)
    shape = drawn_shape(ids, symbols)
    by_choice = torch.Size(shape).numel() != torch.Size(tokens).numel()
    drawn = _routing(shape if by_choice else [*shape, 1], experts, generator, trial)
    yield ids, drawn.view(shape)
    for e, mask in enumerate(masks):
        yield mask, (drawn == e).any(-1).view(tokens) & (torch.rand(tokens, generator=generator) < 0.7)


def drawn_shape(node: Node, symbols: dict) -> list[int]:
    return [Evaluator(symbols, {}).size(s) for s in edit.tensor_value(node).shape]


def draw_block(node: Node, symbols: dict, generator: torch.Generator, layout: Layout | None) -> Tensor:
    """A value that static blocks read; of a block itself with `ROWS` rows."""
    drawn = draw(node, symbols, generator, None, 0, 0)
    if layout is None:
        return drawn
    shape = list(drawn.shape)
    shape[layout.row_dim] = ROWS
    return torch.randn(shape, generator=generator).to(drawn.dtype)


def _routing(shape: list[int], experts: int, generator: torch.Generator, trial: int) -> Tensor:
    """k different experts per token: of all, of the upper half, or always the same ones."""
    k = shape[-1]
    tokens = int(torch.Size(shape[:-1]).numel())
    score = torch.rand(tokens, experts, generator=generator)
    if trial == 1 and experts // 2 >= k:
        score[:, : experts // 2] = -1
    if trial == 2:
        score = score[:1].expand(tokens, experts)
    return score.topk(k, dim=-1).indices.reshape(shape)


def shape_of(node: Node) -> tuple | None:
    value = edit.tensor_value(node)
    return None if value is None else tuple(value.shape)


def narrowed(idx: Node) -> tuple[Node, Node] | None:
    """(ids, mask) of where(mask, ids, nobody)."""
    mask, ids = idx.args[:2] if idx.target is torch.where and len(idx.args) == 3 else (None, None)
    return (ids, mask) if isinstance(ids, Node) and shape_of(ids) == shape_of(idx) else None


def is_size(node: Node) -> bool:
    return edit.tensor_value(node) is None


def is_parameter(node: Node) -> bool:
    source = node.meta.get("moefx")
    return source is not None and source.kind == "param"


def is_dropout(node: Node) -> bool:
    return op_name(node) in ("dropout", "dropout_", "alpha_dropout")
