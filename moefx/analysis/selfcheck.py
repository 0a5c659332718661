"""The numeric half of every raise: a raised region is run beside the user's own code on random numbers.

Facts about a graph are found by rules that may be fooled. So the original nodes of a region and the raised ones are
evaluated from the same values at the region's boundary: hidden states, routing, scores, parameters. Routings are
drawn balanced, with idle experts, and all to the same few experts; numbers are non-degenerate, biases included; outputs
and the gradients of everything that floats are compared. A second run on a part of the tokens shows whether rows are
computed independently of each other, which spreading them over ranks relies on.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import sympy
import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from moefx.analysis.evaluate import Evaluator, boundary
from moefx.errors import RaiseError
from moefx.ir import edit
from moefx.ir.op import expr

log = logging.getLogger("moefx.raise")

_BUDGET_ELEMENTS = 2**27  # of parameters; beyond it the rules alone must do
_TOLERANCE = {torch.float64: 1e-8, torch.float32: 2e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}


class SelfCheck:
    """Keeps the graph as it was before a raise. Regions of one structure are compared once."""

    def __init__(self, gm: GraphModule, autocast: tuple = ()) -> None:
        self.autocast = autocast
        self.before = edit.copy_of(gm)
        self.nodes = {node.name: node for node in self.before.graph.nodes}
        self.seen: set[tuple] = set()

    def compare(self, old: str, new: Node, idx: Node, inputs: Sequence[Node], experts: int) -> None:
        """Compare `new` with what the node named `old` was. `idx` [.., K] is the routing; `inputs` are the values of
        the token side that the region reads, none of which the raise has changed. Raises RaiseError if they differ."""
        twins = {self.nodes[n.name]: n for n in [idx, *inputs] if n.name in self.nodes}
        reads_new = boundary([new], twins.values())
        reads_old = boundary([self.nodes[old]], twins)
        structure = self._structure(new, set(reads_new))
        numel = sum(edit.tensor_value(n).numel() for n in reads_new if _is_parameter(n))
        if structure in self.seen:
            return
        self.seen.add(structure)
        if numel > _BUDGET_ELEMENTS:
            log.info("region at %s: too large to compare by running (%d parameters)", edit.place(new), numel)
            return
        if any(_is_random(n) for n in edit.ancestors([new]) - edit.ancestors(reads_new)):
            log.info("region at %s: random ops, compared by rules only", edit.place(new))
            return
        for trial in range(3):
            self._trial(trial, self.nodes[old], new, twins, reads_old, reads_new, idx, experts)

    def _structure(self, new: Node, stop: set[Node]) -> tuple:
        region = [n for n in new.graph.nodes if n in edit.ancestors([new]) and n not in edit.ancestors(stop)]
        number = {n: i for i, n in enumerate(region)}
        return tuple(
            (str(n.target), tuple(number.get(a, -1) for a in n.all_input_nodes), str(_shape(n))) for n in region
        )

    def _trial(self, trial, old, new, twins, reads_old, reads_new, idx, experts) -> None:
        generator = torch.Generator().manual_seed(trial)
        symbols = _symbol_values([*reads_new, *reads_old], batch=3)
        drawn = {n: _draw(n, symbols, generator, idx, experts, trial) for n in reads_new if not _is_size(n)}
        twin_of = {b: a for a, b in twins.items()}
        by_name = {n.name: v for n, v in drawn.items()}
        known_old = {}
        for node in reads_old:
            name = twins[node].name if node in twins else node.name
            if name in by_name:
                known_old[node] = by_name[name]
            elif not _is_size(node):
                known_old[node] = _draw(node, symbols, generator, twin_of.get(idx), experts, trial)
        out_new, grads_new = _run(new, symbols, drawn)
        out_old, grads_old = _run(old, symbols, known_old)
        self._expect(out_new, out_old, "output", new)
        names_old = {(twins[n].name if n in twins else n.name): g for n, g in grads_old.items()}
        for node, grad in grads_new.items():
            other = names_old.get(node.name)
            if other is not None or grad is not None:
                zero = torch.zeros_like(drawn[node])
                self._expect(
                    zero if grad is None else grad, zero if other is None else other, f"gradient of {node.name}", new
                )
        if trial == 0:
            self._part(new, reads_new, drawn, symbols, out_new)

    def _part(self, new, reads, drawn, symbols, whole) -> None:
        """The first tokens alone give the first rows of the whole."""
        fewer = _symbol_values(reads, batch=2)
        if fewer == symbols:
            return
        part = {}
        evaluator = Evaluator(fewer, {})
        for node, value in drawn.items():
            shape = [evaluator.size(s) for s in edit.tensor_value(node).shape]
            part[node] = value[tuple(slice(0, s) for s in shape)]
        alone, _ = _run(new, fewer, part)
        self._expect(alone, whole[: alone.shape[0]], "output of a part of the tokens", new)

    def _expect(self, new: Tensor, old: Tensor, what: str, node: Node) -> None:
        scale = old.abs().max().clamp_min(1e-6) if old.numel() else torch.tensor(1.0)
        error = ((new.float() - old.float()).abs().max() / scale).item() if old.numel() else 0.0
        # Autocast rounds inside of both, not always at the same place.
        dtype = self.autocast[0][1] if self.autocast else old.dtype
        if not error <= _TOLERANCE.get(dtype, 1e-4):
            raise RaiseError(
                f"the raised region's {what} differs from the original by {error:.1e}",
                where=edit.place(node),
                hint="this way of writing experts is not understood; please report it",
            )


def _run(node: Node, symbols: dict, known: dict[Node, Tensor]) -> tuple[Tensor, dict[Node, Tensor | None]]:
    leaves = {n: v.clone().requires_grad_(v.dtype.is_floating_point) for n, v in known.items()}
    (out,) = Evaluator(symbols, leaves).run([node])
    wanting = {n: v for n, v in leaves.items() if v.requires_grad}
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    with torch.enable_grad():  # the user may compile for a call without gradients
        grads = torch.autograd.grad((out * weights).sum(), list(wanting.values()), allow_unused=True)
    return out.detach(), dict(zip(wanting, grads))


def _symbol_values(nodes: Sequence[Node], batch: int) -> dict[sympy.Symbol, int]:
    """Sizes for the symbols of the boundary: the first symbol is the batch, the others fixed and different."""
    symbols: list[sympy.Symbol] = []
    for node in nodes:
        for size in _shape(node) or ():
            for symbol in sorted(expr(size).free_symbols, key=str):
                if symbol not in symbols:
                    symbols.append(symbol)
    symbols.sort(key=str)
    return {s: (batch if i == 0 else 5 + 2 * i) for i, s in enumerate(symbols)}


def _draw(node: Node, symbols: dict, generator: torch.Generator, idx: Node | None, experts: int, trial: int) -> Tensor:
    value = edit.tensor_value(node)
    shape = [Evaluator(symbols, {}).size(s) for s in value.shape]
    if node is idx:
        return _routing(shape, experts, generator, trial).to(value.dtype)
    if value.dtype.is_floating_point:
        scale = 0.5 if not _is_parameter(node) else 0.3
        return (torch.randn(shape, generator=generator, dtype=torch.float32) * scale).to(value.dtype)
    if value.dtype == torch.bool:
        return torch.rand(shape, generator=generator) < 0.5
    return torch.randint(0, 4, shape, generator=generator).to(value.dtype)


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


def _shape(node: Node) -> tuple | None:
    value = edit.tensor_value(node)
    return None if value is None else tuple(value.shape)


def _is_size(node: Node) -> bool:
    return edit.tensor_value(node) is None


def _is_parameter(node: Node) -> bool:
    source = node.meta.get("moefx")
    return source is not None and source.kind == "param"


def _is_random(node: Node) -> bool:
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return "dropout" in name or name.startswith(("rand", "bernoulli"))
