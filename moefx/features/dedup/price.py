"""What a region would compute and send if its tokens crossed to a node once, from what it does without.

`alltoall="dedup"` sorts and combines twice (see `dedup_nodes`): tokens by nodes, and there pairs by experts. How many
tokens cross depends on choices, and no program says it: a token's k are taken to fall on any experts alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import sympy

from moefx.axes import MeshSpec
from moefx.context.pass_types import PassContext
from moefx.context.region_facts import RegionFacts
from moefx.costmodel.amounts import Amounts, Kind
from moefx.costmodel.ways import BETWEEN, FORMS, N_MP, WITHIN, Form, Leg, X, amounts_of_leg, chance_of_node
from moefx.features.dedup.options import DEDUP
from moefx.ir import edit
from moefx.ir.op import Volume
from moefx.planning.pieces import Piece

ID, PLACE, WEIGHT = 4, 8, 4  # bytes of an expert's number that travels, of a place in an order, of a weight
_SORTS = ("dispatch", "combine", "combine_backward")
Pieces = dict[str, list[Piece]]


def may_cross_once(region: int, schedule: str, ctx: PassContext) -> bool:
    """Whether tokens of a region could, by this schedule, and the options name it or leave it open."""
    is_open = region in ctx.decisions.nestable.get(DEDUP, ()) and ctx.options.alltoall.algorithm in (None, DEDUP)
    return is_open and schedule in (("s3",) if ctx.mesh.axis("esp") else ("s1", "s2-tokens"))


def rows_of_a_token(facts: RegionFacts, ctx: PassContext) -> sympy.Rational:
    """Rows per token that go to nodes, its own one included."""
    nodes = _nodes(ctx)
    return nodes * chance_of_node(facts.experts, _choices(facts), nodes)


def note(facts: RegionFacts, ctx: PassContext) -> str | None:
    if facts.number not in ctx.decisions.nestable.get(DEDUP, ()):
        return None
    rows = float(rows_of_a_token(facts, ctx))
    return (f"'{DEDUP}' is priced for tokens whose choices fall on any experts alike: {rows:.3g} rows of each go to "
            "nodes, its own one included")  # fmt: skip


def closed_form(experts: int, k: int, mesh: MeshSpec) -> tuple[str, Form] | None:
    """The schedule by which tokens could cross once, and its form if they do."""
    size, local = mesh.nodes_of("ep")
    if local in (None, size) or k == 1:
        return None
    schedule = "s3" if mesh.size("esp") > 1 else "s1"
    return schedule, with_dedup(FORMS[schedule], experts=experts, k=k, nodes=size // local)


def with_dedup(form: Form, *, experts: int, k: int, nodes: int) -> Form:
    """The same where a token crosses to a node once, whatever it chose there (balanced routing over all choices)."""
    crossing = X * nodes * chance_of_node(experts, k, nodes) / N_MP

    def legs(found: Iterable[Leg]) -> tuple[Leg, ...]:
        parts: list[Leg] = []
        for leg in found:
            exchange = [Leg("all_to_all", BETWEEN, crossing), Leg("all_to_all", WITHIN, leg.payload)]
            parts += exchange if leg.collective == "all_to_all" else [leg]
        return tuple(parts)

    return replace(form, name=f"{form.name} {DEDUP}", alltoall=DEDUP,
                   out=legs(form.out), back=legs(reversed(form.back))[::-1])  # fmt: skip


def crossings(*, experts: int, k: int, nodes: int) -> sympy.Rational:
    """Rows per token that cross between nodes, one way."""
    return (nodes - 1) * chance_of_node(experts, k, nodes)


def once_to_a_node(numbers: Mapping[str, Pieces], facts: RegionFacts, ctx: PassContext) -> dict[str, Pieces]:
    """The pieces of a region, by graph and kind, with the all-to-all "dedup" in the place of the direct one."""
    rows = next(p for p in numbers["forward"]["A1"] if p.amounts.collective == "all_to_all")
    tokens = rows.amounts.payload / (rows.width * rows.itemsize) / _choices(facts)
    return {graph: _of_graph(pieces, tokens, facts, ctx, is_forward=graph == "forward")
            for graph, pieces in numbers.items()}  # fmt: skip


def _of_graph(pieces: Pieces, tokens: float, facts: RegionFacts, ctx: PassContext, *, is_forward: bool) -> Pieces:
    """tokens: that this rank has."""
    sent = {kind: [p for p in pieces[kind] if p.amounts.collective == "all_to_all"] for kind in ("A1", "A2")}
    out, back = (sum(p.width * p.itemsize for p in sent[kind]) for kind in ("A1", "A2"))  # bytes of a row
    k = _choices(facts)
    pairs, places = tokens * k, tokens * min(k, _nodes(ctx))
    crossed = tokens * float(rows_of_a_token(facts, ctx))
    new = {kind: [p for p in found if p.op not in _SORTS and p not in sent.get(kind, ())]
           for kind, found in pieces.items()}  # fmt: skip
    masks = _moved(k * places * (2 * WEIGHT + 1))
    weights = _moved(WEIGHT * k * (tokens + places) + PLACE * places)
    new["C1"] += [_moved(out * (tokens + places) + PLACE * places)]
    new["R2"] += [_moved(back * (pairs + crossed) + PLACE * k * crossed)]
    new["D2"] += [_moved(back * (places + tokens) + PLACE * places)]
    if is_forward:
        ids = _moved(k * (PLACE * tokens + ID * places) + PLACE * places), _moved(k * places * (ID + 1))
        new["C1"] += [*ids, weights, masks]
        new["R1"] += [_moved((ID + PLACE) * k * crossed), _moved(out * (crossed + pairs) + PLACE * k * crossed)]
    else:
        new["R1"] += [_moved(out * (crossed + 2 * pairs) + (PLACE + 2 * WEIGHT) * k * crossed)]
        new["D2"] += [masks, weights]
    beside = {"A1": (ID, WEIGHT), "A2": ()} if is_forward else {"A1": (), "A2": (WEIGHT,)}
    for kind, exchanges in sent.items():
        crossing = [_exchange(BETWEEN, p, p.width * p.itemsize * crossed, ctx) for p in exchanges]
        crossing += [_exchange(BETWEEN, Piece(Amounts(Kind.COLLECTIVE)), each * k * crossed, ctx)
                     for each in beside[kind]]  # fmt: skip
        on_node = [_exchange(WITHIN, Piece(p.amounts), p.amounts.payload, ctx) for p in exchanges]  # without a codec
        new[kind] += [p for p in crossing + on_node if p is not None]
    return new


def _nodes(ctx: PassContext) -> int:
    size, local = ctx.mesh.nodes_of("ep")
    return size // local


def _choices(facts: RegionFacts) -> int:
    return int(edit.tensor_value(facts.choices[0]).shape[-1])


def _moved(nbytes: float) -> Piece:
    return Piece(Amounts(Kind.ROWS, Volume(hbm_bytes=nbytes)))


def _exchange(over: str, piece: Piece, payload: float, ctx: PassContext) -> Piece | None:
    amounts = amounts_of_leg(Leg("all_to_all", over, sympy.Float(payload)), ctx.mesh)
    return None if amounts is None else replace(piece, amounts=amounts)
