"""What a region would compute and send if its rows went to fewer of the ranks that share an expert (r of them).

From the one program that was compiled, in which they go to all: a rank gets r/N of the rows, for experts N/r times as
wide; weights are gathered over the other ranks before the layer, again in the backward, and their gradients are summed
and cut behind it. Without an exchange (r = 0) a rank's own rows meet all experts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch.fx import Node

from moefx.context.pass_types import PassContext
from moefx.context.step_graphs import StepGraphs
from moefx.costmodel.amounts import Amounts, Kind
from moefx.costmodel.memory import Storage
from moefx.costmodel.ways import FORMS
from moefx.features.adaptive.ranks import degrees, tokens_over, weights_over
from moefx.ir import edit
from moefx.ir.op import Gemm, Volume, lookup
from moefx.ir.ops.order import wait
from moefx.ir.ways import COMBINE, DUMP, GATHER, SCATTER, SUM, Way
from moefx.planning.pieces import AT_ONCE, GATHERED, SCATTERED, Piece, Stages
from moefx.planning.pricing import More

Pieces = dict[str, list[Piece]]
SUMMED = 4  # bytes of a gradient's entry on its way, at least
_OF_PARTS = (DUMP, COMBINE, GATHER, SCATTER, SUM)  # hops of rows to and from ranks that share experts
_OF_COPIES = ("dump", "dump_counts", "local_combine")
_OF_ARRIVED = ("regroup", "slot_counts", "received_rows")


def allowed(number: int, schedule: str, ctx: PassContext, has_limit: bool = False) -> tuple[int, ...]:
    """Every r that a region may have by a schedule, that of the program first; where the options name one, it alone.
    Tokens that are gathered, rows that are where they arrive, and those of a schedule that the options name, go to all
    ranks. All experts are gathered (r = 0) only where a limit of memory says whether they fit: whoever spreads them may
    have no room."""
    facts, asked, n = ctx.decisions.regions[number], ctx.options.parallel.r, ctx.mesh.size("esp")
    is_whole = ctx.mesh.axis("esp") != "" and all(hop.kind not in _OF_PARTS for hop in facts.way.hops)
    if is_whole or not facts.way.hops:
        return (n,)
    form = FORMS[schedule]
    if form.before or not form.is_split or form.out[0].over != "ep+esp":
        return (n,) if asked in (None, n) else ()
    if asked is not None or ctx.options.parallel.split is not None:
        return (n if asked is None else asked,)
    found = degrees(ctx.mesh)[::-1]
    return (*found, 0) if has_limit and ctx.slots(number) is None else found


def change(r: int, numbers: Mapping[str, Pieces], way: Way, ctx: PassContext) -> tuple[dict[str, Pieces], Way, str]:
    """Pieces and hops of a region with r, and the axis over which weights are gathered."""
    return numbers_with(r, numbers, ctx), way_with(r, way, ctx), weights_over(ctx.mesh, r)


def way_with(r: int, way: Way, ctx: PassContext) -> Way:
    """The hops of a region with r."""
    rows, parts = tokens_over(ctx.mesh, r), ctx.mesh.axis("+".join(ctx.mesh.token_dims(r)))

    def over(hops: Sequence) -> tuple:
        new = (replace(hop, axis=parts if hop.kind in (DUMP, COMBINE) else rows) for hop in hops)
        return tuple(hop for hop in new if hop.axis)

    return Way(over(way.out), over(way.back))


@dataclass(frozen=True)
class Weights:
    """Of a region's experts, of a rank: bytes of each parameter as experts multiply by it, and of its gradient."""

    used: tuple[float, ...]
    summed: tuple[float, ...]

    @classmethod
    def of(cls, forward: Pieces) -> Weights:
        """forward: in numbers, of the program."""
        gemms = [piece.amounts.gemm for piece in forward["E"] if piece.amounts.gemm is not None]
        entries = [gemm.batch * gemm.n * gemm.k for gemm in gemms]
        each = [getattr(torch, gemm.dtype).itemsize for gemm in gemms]
        return cls(tuple(n * size for n, size in zip(entries, each)),
                   tuple(n * max(size, SUMMED) for n, size in zip(entries, each)))  # fmt: skip


def numbers_with(r: int, numbers: Mapping[str, Pieces], ctx: PassContext) -> dict[str, Pieces]:
    """The pieces of a region with r. numbers: by graph, with r of all ranks."""
    if r == ctx.mesh.size("esp") or "forward" not in numbers:
        return dict(numbers)
    weights, change = Weights.of(numbers["forward"]), _Change(r, numbers["forward"], ctx)
    return {graph: change.all(pieces) | _moved(graph, r, pieces, weights, ctx) for graph, pieces in numbers.items()}


def more(r: int, numbers: Mapping[str, Pieces], ctx: PassContext) -> More:
    """What a rank holds more with r than with all ranks: weights that were gathered, which chunks read in turn, and the
    next parameter's; and their gradients."""
    over = weights_over(ctx.mesh, r)
    if r == ctx.mesh.size("esp") or "forward" not in numbers:
        return More()
    weights, ranks = Weights.of(numbers["forward"]), ctx.mesh.size(over)
    sums = sum(weights.summed) if numbers.get("backward", {}).get("W") else 0.0
    return More(ranks * (sum(weights.used) + max(weights.used, default=0.0) + sums), share_of(r, ctx))


def arrived(graphs: StepGraphs, stages: Mapping[str, Mapping[int, Stages]]) -> Callable[[Storage], int | None]:
    """Says of which region a piece of memory has rows, whole ones, of which fewer arrive with fewer ranks: from what is
    made to be sent to what came back. stages: by graph and region."""
    found: dict[Node, int] = {}
    for name, gm in graphs.graphs.items():
        of = {node: (number, kind) for number, mine in stages[name].items() for node, kind in mine.kinds.items()}
        widths = {number: {piece.width for piece in mine.pieces["A1"] if piece.width}
                  for number, mine in stages[name].items()}  # fmt: skip
        for node in gm.graph.nodes:
            number, kind = of.get(node.args[0].name if node.target is wait else node.name, (None, ""))
            op, made = lookup(node), edit.tensor_value(node)
            is_sent = kind in ("A1", "D1", "E", "C2", "A2") or (op is not None and op.name in _OF_COPIES)
            if number is None or not is_sent or made is None or not made.dim() or _is_of_weights(node):
                continue
            if isinstance(made.shape[-1], int) and made.shape[-1] in widths[number]:
                found[node] = number
    return lambda storage: found.get(storage[0])


def _is_of_weights(node: Node) -> bool:
    """A cast of a parameter, say."""
    return all(each.op == "placeholder" for each in node.all_input_nodes)


def share_of(r: int, ctx: PassContext) -> float:
    """Of the rows that arrive at a rank, those that do with r."""
    return max(r, 1) / ctx.mesh.size("esp")


def _moved(graph: str, r: int, pieces: Pieces, weights: Weights, ctx: PassContext) -> Pieces:
    """What gathers weights and sums their gradients, and what puts together what arrived."""
    over = weights_over(ctx.mesh, r)
    ranks, axes = ctx.mesh.size(over), ctx.mesh.dims(over)
    if not axes:
        return {}
    is_kept = graph == "backward" and ctx.options.keep == "eager"
    used = () if is_kept else tuple(ranks * nbytes for nbytes in weights.used)
    summed = tuple(ranks * nbytes for nbytes in weights.summed) if graph == "backward" and pieces["W"] else ()

    def sends(collective: str, found: Sequence[float]) -> list[Piece]:
        return [Piece(Amounts(Kind.COLLECTIVE, collective=collective, axes=axes, payload=each)) for each in found]

    copied = Piece(Amounts(Kind.MEMORY, Volume(hbm_bytes=2 * sum(used + summed))))
    return {GATHERED: sends("all_gather", used), SCATTERED: sends("reduce_scatter", summed),
            AT_ONCE: [*pieces[AT_ONCE], copied]}  # fmt: skip


class _Change:
    """From r of all N ranks to r. width: entries of a row."""

    def __init__(self, r: int, forward: Pieces, ctx: PassContext) -> None:
        self.r, self.n = r, ctx.mesh.size("esp")
        self.share, self.places = share_of(r, ctx), 1 if r else ctx.mesh.size("ep")
        self.axes = tuple(dim for dim in ctx.mesh.dims(tokens_over(ctx.mesh, r)) if ctx.mesh.root[dim] > 1)
        self.width = max((piece.width for piece in forward["A1"]), default=0)

    def all(self, pieces: Pieces) -> Pieces:
        return {kind: [new for piece in found if (new := self._piece(kind, piece)) is not None]
                for kind, found in pieces.items()}  # fmt: skip

    def _piece(self, kind: str, piece: Piece) -> Piece | None:
        amounts = piece.amounts
        if amounts.kind is Kind.COLLECTIVE:
            if amounts.collective != "all_to_all" or kind not in ("A1", "A2"):
                return piece
            return _with(piece, payload=amounts.payload * self.share, axes=self.axes) if self.axes else None
        if piece.op in _OF_COPIES:
            return self._times(piece, (1 + self.r) / (1 + self.n)) if self.r > 1 else None
        if piece.op in _OF_ARRIVED:
            return self._times(piece, self.share) if self.axes else None
        if kind == "W":
            return self._product(piece, "k", "mn") if amounts.gemm else self._times(piece, self.places / self.share)
        if kind not in ("E", "D1", "C2"):
            return piece
        if amounts.gemm:
            return self._product(piece, "m", "nk")
        return self._times(piece, self.share) if piece.entries == self.width else piece

    def _times(self, piece: Piece, factor: float) -> Piece:
        volume = piece.amounts.volume
        return _with(piece, volume=Volume(volume.flops * factor, volume.hbm_bytes * factor))

    def _product(self, piece: Piece, rows: str, others: str) -> Piece:
        """rows: the dim that rows are; others: those of the weight, of which one is cut."""
        gemm: Gemm = piece.amounts.gemm
        cut = next((dim for dim in others if getattr(gemm, dim) != self.width), others[0])
        sizes = {rows: getattr(gemm, rows) * self.share / self.places, cut: getattr(gemm, cut) / self.share,
                 "batch": gemm.batch * self.places}  # fmt: skip
        # As many entries are computed as before, of fewer rows; weights are read whole.
        weights = math.prod(getattr(gemm, dim) for dim in others) * gemm.batch * getattr(torch, gemm.dtype).itemsize
        volume = piece.amounts.volume
        moved = volume.hbm_bytes + weights * (self.places / self.share - 1)
        return _with(piece, gemm=replace(gemm, **sizes), volume=Volume(volume.flops, moved))


def _with(piece: Piece, **changes: object) -> Piece:
    return replace(piece, amounts=replace(piece.amounts, **changes))
