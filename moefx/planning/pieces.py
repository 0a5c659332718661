"""What a region of a program does, stage by stage: the nodes of every stage, with what each computes and moves."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import sympy
import torch
from torch.fx import Node

from moefx.analysis.tasks import Tasks, stage_of, tasks_of
from moefx.context.pass_types import PassContext
from moefx.costmodel.amounts import Amounts, amounts_of, at
from moefx.costmodel.machine import Machine
from moefx.costmodel.tasks import COMPUTE
from moefx.ir import edit
from moefx.ir.op import BACKGROUND, Volume, expr, lookup, value
from moefx.ir.ops.order import start, unsplit, wait
from moefx.ir.regions import region_of
from moefx.ir.ways import BLOCKS

STAGES = ("C1", "A1", "D1", "E", "C2", "A2", "D2", "W")
# What of a region is none of these: gathers of tokens before it and of results behind it, by every chunk ("G1", "G2")
# or at once ("G"), and the part of its router that works on a share of the tokens.
ROUTER, AT_ONCE, BY_CHUNK = "R", "G", ("G1", "G2")
GATHERED, SCATTERED = "GW", "SW"  # weights of experts, and their gradients, for all chunks together
REPACKS = ("R1", "R2")  # what a node computes of tokens that crossed to it once: between its exchanges, out and back
KINDS = (*STAGES, *BY_CHUNK, AT_ONCE, ROUTER, *REPACKS, GATHERED, SCATTERED)
_GATHERS = {"gather_rows": "G1", "scatter_rows": "G2", "all_rows": AT_ONCE}


@dataclass(frozen=True)
class Piece:
    """One node of a stage: its amounts, its op if it is one of the dialect and, of an exchange of rows, the row's
    entries and their bytes. entries: of a row of whatever it gives. early: a weight gradient that no exchange starts
    before where no scheduler orders (see `passes.order`)."""

    amounts: Amounts
    width: int = 0
    itemsize: int = 0
    op: str = ""
    entries: int = 0
    early: bool = False


@dataclass(frozen=True)
class Stages:
    """The pieces of every stage of a region in one graph and of what is around them; the stages of nodes, by name."""

    pieces: dict[str, list[Piece]]
    kinds: dict[str, str]


def stages_of(nodes: Iterable[Node], ctx: PassContext) -> dict[int, Stages]:
    """By region, of one graph."""
    body = [node for node in nodes if node.op not in ("placeholder", "output")]
    found = tasks_of(body, ctx, lambda node: 0.0)
    early = _early_wgrads(body, found)
    stages: dict[int, Stages] = {}
    for task in found.graph:
        if task.layer >= 0 and task.kind in STAGES:
            mine = stages.setdefault(task.layer, Stages({kind: [] for kind in KINDS}, {}))
            # Dense work before C1 and behind D2 belongs to their tasks; it is not cut with the region.
            inner = [node for node in found.nodes[task.name]
                     if task.kind not in ("C1", "D2") or region_of(node) == task.layer]
            mine.pieces[task.kind] += [replace(_piece(node), early=node in early) for node in inner]
            mine.kinds.update((node.name, task.kind) for node in inner)
    for node, (number, kind) in around(body, ctx).items():
        if number in stages:
            stages[number].pieces[kind].append(_piece(node))
    return stages


def _early_wgrads(body: Sequence[Node], found: Tasks) -> set[Node]:
    """Weight gradients that stand before the last product of their region that another one depends on."""
    index, early = {node: i for i, node in enumerate(body)}, set()
    of: dict[int, dict[str, list[Node]]] = {}
    for task in found.graph:
        if task.layer >= 0 and task.kind in ("E", "W"):
            of.setdefault(task.layer, {"E": [], "W": []})[task.kind] += found.nodes[task.name]
    for nodes in of.values():
        products = {node for node in nodes["E"] if nodes["W"] and amounts_of(node).gemm is not None}
        places = [index[node] for node in products]
        above: dict[Node, set[Node]] = {}  # the products that a node depends on
        for node in body[min(places, default=0) : max(places, default=-1) + 1]:
            above[node] = set().union(*(above.get(a, set()) | products & {a} for a in node.all_input_nodes))
        last = max((index[each] for node in products for each in above[node]), default=-1)
        early |= {node for node in nodes["W"] if index[node] < last}
    return early


def as_written(stages: Mapping[str, Mapping[str, list[Piece]]]) -> dict[str, dict[str, list[Piece]]]:
    """The pieces of a region that no scheduler orders: early weight gradients hide no exchange, they are computed with
    the experts."""
    return {name: {**found, "E": [*found["E"], *(p for p in found["W"] if p.early)],
                   "W": [p for p in found["W"] if not p.early]} for name, found in stages.items()}  # fmt: skip


def outside(nodes: Iterable[Node], ctx: PassContext, regions: Container[int]) -> list[Node]:
    """What is no piece of these regions in one graph, and no reduction of gradients, which run beside all else."""
    body = [node for node in nodes if node.op not in ("placeholder", "output")]
    inside = {name for number, found in stages_of(body, ctx).items() if number in regions for name in found.kinds}
    inside |= {node.name for node, (number, _) in around(body, ctx).items() if number in regions}
    starts = {node: node.args[0] if node.target is wait else node for node in body}
    return [node for node in body if starts[node].name not in inside and stage_of(starts[node]) not in BACKGROUND]


def seconds_outside(nodes: Iterable[Node], ctx: PassContext, machine: Machine, sizes: Mapping[str, float],
                    regions: Container[int]) -> float:  # fmt: skip
    """What is computed outside of these regions in one graph."""
    alone = [node for node in outside(nodes, ctx, regions) if start not in (node.target, *node.args[:1])]
    times = (machine.phases_of(amounts_of(node), sizes, ctx.mesh.root) for node in alone if node.target is not wait)
    return sum(seconds for phases in times for resource, seconds in phases if resource == COMPUTE)


def _piece(node: Node) -> Piece:
    rows = edit.tensor_value(node.args[1]) if node.target is start else None
    if rows is None or not isinstance(rows.shape[-1], int):
        op, made = lookup(node), edit.tensor_value(node)
        entries = made.shape[-1] if made is not None and made.dim() else 0
        return Piece(amounts_of(node), op="" if op is None else op.name,
                     entries=entries if isinstance(entries, int) else 0)  # fmt: skip
    return Piece(amounts_of(node), rows.shape[-1], rows.element_size())


def around(nodes: Sequence[Node], ctx: PassContext) -> dict[Node, tuple[int, str]]:
    """{node: (region, kind)} of what is around the regions of a graph, see `ROUTER`."""
    found: dict[Node, tuple[int, str]] = {}
    for node in nodes:
        op, _ = unsplit(node)
        kind = _GATHERS.get(op.name) if op is not None and node.target is start else None
        region = None if kind is None else _nearest(node, forward=kind == "G1")
        if region is not None and region in ctx.decisions.regions:
            is_by_blocks = any(hop.kind == BLOCKS for hop in ctx.decisions.regions[region].way.hops)
            found[node] = region, "G2" if kind == AT_ONCE and is_by_blocks else kind
    shares = {symbol: None for node in nodes if (op := lookup(node)) is not None and op.name == "num_own_rows"
              for symbol in expr(value(node)).free_symbols}  # fmt: skip
    sized = {node: _symbols(node) & shares.keys() for node in nodes} if shares else {}
    of = {symbol: region_of(node) for node, symbols in sized.items() for symbol in symbols
          if region_of(node) is not None}  # fmt: skip
    for node, symbols in sized.items():
        region = next((of[symbol] for symbol in symbols if symbol in of), None)
        if region is not None and region_of(node) is None and lookup(node) is None:
            found[node] = region, ROUTER
    return found


def _nearest(node: Node, *, forward: bool) -> int | None:
    """The region of the nearest node that leads here, or is led to."""
    near, seen = [node], {node}
    while near:
        regions = [region_of(each) for each in near[1 if near[0] is node else 0 :]]
        if region := [each for each in regions if each is not None]:
            return region[0]
        near = [each for here in near for each in (here.users if forward else here.all_input_nodes)
                if each not in seen and not seen.add(each)]  # fmt: skip
    return None


def _symbols(node: Node) -> set[sympy.Symbol]:
    """Those of the sizes of what a node gives."""
    found = value(node)
    tensors = found if isinstance(found, (tuple, list)) else [found]
    return {symbol for tensor in tensors if isinstance(tensor, torch.Tensor) for size in tensor.shape
            if isinstance(size, torch.SymInt) for symbol in expr(size).free_symbols}  # fmt: skip


def in_numbers(piece: Piece, sizes: Mapping[str, float]) -> Piece:
    """The piece with all its formulas worked out."""
    a = piece.amounts
    volume = Volume(at(a.volume.flops, sizes), at(a.volume.hbm_bytes, sizes))
    gemm = a.gemm and replace(a.gemm, **{each: at(getattr(a.gemm, each), sizes)
                                         for each in ("m", "n", "k", "batch", "beside")})  # fmt: skip
    sent = a.sent and tuple(replace(each, nbytes=at(each.nbytes, sizes)) for each in a.sent)
    return replace(piece, amounts=replace(a, volume=volume, gemm=gemm, sent=sent, payload=at(a.payload, sizes)))


def scaled(amounts: Amounts, share: float, *, kind: str = "E") -> Amounts:
    """The amounts of a chunk that has this share of the rows. A product has fewer rows and all of its weights; a weight
    gradient (stage W) sums over fewer rows."""
    if share == 1:
        return amounts
    if kind in (AT_ONCE, ROUTER, GATHERED, SCATTERED):
        return amounts
    volume = Volume(amounts.volume.flops * share, amounts.volume.hbm_bytes * share)
    rows = "k" if kind == "W" else "m"
    gemm = amounts.gemm and replace(amounts.gemm, **{rows: getattr(amounts.gemm, rows) * share},
                                    beside=amounts.gemm.beside * share)  # fmt: skip
    sent = amounts.sent and tuple(replace(each, nbytes=each.nbytes * share) for each in amounts.sent)
    return replace(amounts, volume=volume, gemm=gemm, sent=sent, payload=amounts.payload * share)
