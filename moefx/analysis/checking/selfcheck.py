"""The numeric half of every raise: a raised region is run beside the user's own code on random numbers.

Facts about a graph are found by rules that may be fooled. So the original nodes of a region and the raised ones are
evaluated from the same values at the region's boundary: hidden states, routing, scores, parameters. Routings are
drawn balanced, with idle experts, and all to the same few experts; numbers are non-degenerate, biases included; outputs
and the gradients of everything that floats are compared. A second run on a part of the tokens, or with other values in
a part of them, shows whether rows are computed independently of each other, which spreading them over ranks relies on.
Static blocks keep the user's own ops, so only the latter is asked of them: are experts and rows kept apart?
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from moefx.analysis.checking.evaluate import Evaluator, boundary, part_of
from moefx.analysis.checking.region_inputs import (
    ROWS,
    Calm,
    behind,
    broken_guards,
    draw,
    draw_block,
    draw_parts,
    is_dropout,
    is_parameter,
    is_size,
    narrowed,
    shape_of,
    symbol_values,
)
from moefx.analysis.recognition.structure import structure
from moefx.errors import MoefxError, RaiseError
from moefx.ir import edit
from moefx.ir.mark import Mark
from moefx.ir.names import op_name
from moefx.ir.op import expr
from moefx.ir.randomness import is_random
from moefx.ir.regions import Layout

log = logging.getLogger("moefx.raise")

_BUDGET_ELEMENTS = 2**27  # of parameters; beyond it the rules alone must do
_TOLERANCE = {torch.float64: 1e-8, torch.float32: 2e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}


class SelfCheck:
    """Knows the graph as it was before a raise. seen: structures that were compared; regions of one are compared once.
    was: of results that were raised since, what they were."""

    def __init__(self, gm: GraphModule, autocast: tuple = (), seen: set[tuple] | None = None) -> None:
        self.mark, self.autocast = Mark(gm), autocast
        self.seen = set() if seen is None else seen
        self.was: dict[Node, Node] = {}

    def compare(self, old: Node, new: Node, idx: Node | None, inputs: Iterable[Node], experts: int, *,
                by_token: bool = True, parts: tuple[Node, Sequence[Node]] | None = None) -> None:  # fmt: skip
        """Compare `new` with what the node `old` was. `idx` [.., K] is the routing, if there is one; `inputs` are
        the values of the token side that the region reads, none of which the raise has changed. by_token: `new` has one
        row per token, that of no other token. parts: (ids, masks): every mask picks some of those to whom the ids give
        its expert. Raises RaiseError if they differ."""
        inputs = behind(idx, inputs) if idx is not None and by_token else list(inputs)
        stops, copies = self._part(old, [idx, *inputs])
        if idx is not None and (source := narrowed(idx)) is not None and source[0] in copies:  # it reads both
            idx, mask = source
            stops, copies = self._part(old, [idx, mask, *inputs])
        now = {copy: stops.get(node, node) for node, copy in copies.items()}
        reads_new, region = boundary([new], stops.values())
        reads_old, before = boundary([copies[old]], [copies[node] for node in stops])
        self.was[new] = old  # where a later region reads it
        if self._is_to_run(new, region, before, [n for n in reads_new if is_parameter(n)]):
            symbols = symbol_values([*reads_new, *reads_old])
            with _told_off(new):
                for trial in range(3):
                    out, drawn = self._trial(
                        trial, symbols, copies[old], new, now, reads_old, reads_new, idx, experts, parts
                    )
                    if by_token:
                        self._fewer_tokens(new, drawn, symbols, out)
                        of_tokens = [n for n in stops.values() if n in drawn and drawn[n].dim()]
                        self._other_tokens(new, drawn, symbols, out, idx, of_tokens)

    def _part(self, old: Node, inputs: Iterable[Node | None]) -> tuple[dict[Node, Node], dict[Node, Node]]:
        """(inputs, by what they were; copies of what `old` was computed of, by node)"""
        stops = {self.was.get(n, n): n for n in inputs if n is not None}
        stops = {was: n for was, n in stops.items() if was in self.mark.nodes}
        return stops, part_of(self.mark, old, stops)

    def keeps_apart(
        self, inside: Collection[Node], layouts: Mapping[Node, Layout], params: Collection[Node], experts: int
    ) -> None:
        """Check that the ops `inside` compute every expert and every row of static blocks by itself.

        layouts: the dims of experts and rows, by block. params: the per-expert parameters as the ops read them, with
        the experts on dim 0. The number of rows is not the model's: ranks join theirs. Raises RaiseError with the
        first op that makes something else of some experts, or of some rows, than of all.
        """
        order = [n for n in next(iter(inside)).graph.nodes if n in inside]
        if not self._is_to_run(order[-1], inside, (), params, tuple(layouts[n].row_dim for n in order if n in layouts)):
            return
        reads = list(dict.fromkeys(a for n in order for a in n.all_input_nodes if a not in inside))
        symbols, generator = symbol_values(reads), torch.Generator().manual_seed(0)
        drawn = {n: draw_block(n, symbols, generator, layouts.get(n)) for n in reads if not is_size(n)}
        # No middle part: reversing the rows would not move it.
        parts = {"experts": slice(experts // 2, experts), "rows": slice(2, ROWS)}
        whole, some = _Inside(symbols, drawn, inside), {}
        for what, part in parts.items():
            known = {n: _part(v, layouts.get(n), what, part, n in params) for n, v in drawn.items()}
            some[what] = _Inside(symbols, known, inside)
        with torch.autocast("cpu", self.autocast[0][1] if self.autocast else None, enabled=bool(self.autocast)):
            for node, (what, part) in itertools.product(order, parts.items()):
                try:
                    (of_all,), (alone,) = whole.run([node]), some[what].run([node])
                except (RuntimeError, ValueError, IndexError) as error:
                    raise _mixed(node, "needs all experts, or the model's own number of rows") from error
                if isinstance(alone, Tensor) and node in layouts:
                    wanted = _part(of_all, layouts[node], what, part)
                    if alone.shape != wanted.shape or not self._error(alone, wanted) <= self._tolerance(wanted):
                        raise _mixed(node, f"mixes {what}")

    def _is_to_run(self, node: Node, new: Collection[Node], old: Collection[Node], params: Collection[Node],
                   rows: tuple = ()) -> bool:  # fmt: skip
        """Whether a region, the nodes `new` that were the nodes `old`, is another one than before and can be run."""
        found = structure(new), structure(old), rows
        if found in self.seen:
            return False
        self.seen.add(found)
        numel = sum(edit.tensor_value(n).numel() for n in params)
        if numel > _BUDGET_ELEMENTS:
            log.info("region at %s: too large to compare by running (%d parameters)", edit.place(node), numel)
            return False
        if any(is_random(n) and not is_dropout(n) for n in new):
            log.info("region at %s: random ops, compared by rules only", edit.place(node))
            return False
        return True

    def _trial(self, trial, symbols, old, new, now, reads_old, reads_new, idx, experts, parts) -> tuple[Tensor, dict]:
        """What the region gives for the values drawn for what it reads. now: what the nodes around `old` are."""
        generator = torch.Generator().manual_seed(trial)
        drawn = {n: draw(n, symbols, generator, idx, experts, trial) for n in reads_new if not is_size(n)}
        if parts is not None:
            drawn.update((n, v) for n, v in draw_parts(*parts, symbols, generator, trial) if n in drawn)
        known_old = {n: drawn[now[n]] if now[n] in drawn else
                     draw(now[n], symbols, generator, idx, experts, trial, self.mark.args)
                     for n in reads_old if not is_size(n)}  # fmt: skip
        out_new, grads_new = _run(new, symbols, drawn)
        out_old, grads_old = _run(old, symbols, known_old)
        self._expect(out_new, out_old, "output", new)
        of_old = {now[n]: grad for n, grad in grads_old.items()}
        for node, grad in grads_new.items():
            other = of_old.get(node)
            if other is not None or grad is not None:
                zero = torch.zeros_like(drawn[node])
                self._expect(
                    zero if grad is None else grad, zero if other is None else other, f"gradient of {node.name}", new
                )
        return out_new, drawn

    def _fewer_tokens(self, new, drawn, symbols, whole) -> None:
        """The first tokens alone give the first rows of the whole."""
        if not symbols:
            return
        batch = next(iter(symbols))
        fewer = {**symbols, batch: 2}
        behind = (size for node in drawn for size in shape_of(node)[1:])
        if any(batch in expr(size).free_symbols for size in behind) or any(True for _ in broken_guards(new, fewer)):
            return  # the first tokens do not stand in front, or there is one number of tokens only
        part = {}
        evaluator = Evaluator(fewer, {})
        for node, tensor in drawn.items():
            shape = [evaluator.size(s) for s in edit.tensor_value(node).shape]
            part[node] = tensor[tuple(slice(0, s) for s in shape)]
        (alone,) = Calm(fewer, part).run([new])
        self._expect(alone, whole[tuple(map(slice, alone.shape))], "output of a part of the tokens", new)

    def _other_tokens(self, new, drawn, symbols, whole, idx, token_side) -> None:
        """Every second token keeps its row when the others change. It shows what mixes tokens of a fixed number."""
        tokens = drawn[idx].shape[:-1].numel()
        kept = torch.arange(tokens) % 2 == 1
        other = dict(drawn)
        for node in token_side:
            flat = drawn[node].reshape(tokens, -1)
            fresh = flat.flip(0)
            fresh = fresh * 0.7 if flat.is_floating_point() else fresh  # sums over tokens change, too
            other[node] = torch.where(kept[:, None], flat, fresh).view_as(drawn[node])
        (out,) = Calm(symbols, other).run([new])
        self._expect(
            out.reshape(tokens, -1)[kept], whole.reshape(tokens, -1)[kept], "output with other tokens beside it", new
        )

    def _expect(self, new: Tensor, old: Tensor, what: str, node: Node) -> None:
        error = self._error(new, old)
        if not error <= self._tolerance(old):
            raise RaiseError(
                f"the raised region's {what} differs from the original by {error:.1e}",
                where=edit.place(node),
                hint="this way of writing experts is not understood; please report it",
            )

    def _error(self, new: Tensor, old: Tensor) -> float:
        """The largest difference, relative to the largest value."""
        if not old.numel():
            return 0.0
        new, old = new.double(), old.double()
        return ((new - old).abs().max() / old.abs().max().clamp_min(1e-6)).item()

    def _tolerance(self, old: Tensor) -> float:
        # Autocast rounds inside of both, not always at the same place.
        dtype = self.autocast[0][1] if self.autocast else old.dtype
        return _TOLERANCE.get(dtype, 1e-4)


@contextlib.contextmanager
def _told_off(node: Node) -> Iterator[None]:
    """A region that cannot be run is not understood, either."""
    try:
        yield
    except MoefxError:
        raise
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        why, hint = str(error), "see that the plain model runs with such inputs; if it does, please report it"
        if "ApplyTemplate" in why:  # autograd's name for the function
            why = "a custom autograd function gives one number of an expert a gradient, or one of another shape"
            hint = "multiply by the number outside of the function"
        raise RaiseError(f"the raised region cannot be run by itself: {why}", where=edit.place(node), hint=hint,
                         ) from error  # fmt: skip


class _Inside(Calm):
    """Sizes of what is `inside` a region are those of the values that it is run on."""

    def __init__(self, symbols: dict[sympy.Symbol, int], known: dict[Node, Any], inside: Collection[Node]) -> None:
        super().__init__(symbols, known)
        self.inside = inside

    def _is_given_size(self, node: Node) -> bool:
        return node not in self.inside and super()._is_given_size(node)


def _mixed(node: Node, what: str) -> RaiseError:
    return RaiseError(
        f"{op_name(node)} between the experts' ops {what}",
        where=edit.place(node),
        hint="between einsums with per-expert weights use elementwise ops and ops on the last dim",
    )


def _run(node: Node, symbols: dict, known: dict[Node, Tensor]) -> tuple[Tensor, dict[Node, Tensor | None]]:
    leaves = {n: v.clone().requires_grad_(v.dtype.is_floating_point and not _is_buffer(n)) for n, v in known.items()}
    (out,) = Calm(symbols, leaves).run([node])
    wanting = {n: v for n, v in leaves.items() if v.requires_grad}
    if not out.requires_grad:  # experts under no_grad
        return out, dict.fromkeys(wanting)
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    with torch.enable_grad():  # the user may compile for a call without gradients
        grads = torch.autograd.grad((out * weights).sum(), list(wanting.values()), allow_unused=True)
    return out.detach(), dict(zip(wanting, grads))


def _part(tensor: Tensor, layout: Layout | None, what: str, part: slice, is_param: bool = False) -> Tensor:
    """Some of the experts or rows of a block, or some of the experts of a parameter."""
    if layout is not None:
        dim = layout.expert_dim if what == "experts" else layout.row_dim
    elif is_param and what == "experts":
        dim = 0
    else:
        return tensor
    return tensor[(slice(None),) * dim + (part,)]


def _is_buffer(node: Node) -> bool:
    source = node.meta.get("moefx")
    return source is not None and source.kind == "buffer"
