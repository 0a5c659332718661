"""Static blocks of rows per expert: which values of a graph carry experts and rows on which dims.

GShard's style holds the tokens of all experts in one tensor, [.., E, .., C, ..]: experts on one dim, places on another.
A block is recognised where it meets a parameter that has the experts on its first dim, in an einsum or a batched
matmul. From there the two dims are followed through the graph as far as every op keeps them apart.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field

from torch.fx import GraphModule, Node

from moefx.analysis.recognition.routings import choices_behind
from moefx.ir import edit
from moefx.ir.dims import is_reshape, tensor_of, trace
from moefx.ir.expert_weights import is_parameter
from moefx.ir.fates import Fate, How, Operand, shape_of
from moefx.ir.names import op_name


@dataclass(frozen=True)
class Dims:
    """The dim of the experts and the dim of independent rows, counted from 0."""

    expert: int
    row: int


@dataclass
class Region:
    """Ops on blocks that belong together: `core` use per-expert parameters; `dims` of every block they touch."""

    experts: int
    core: list[Node] = field(default_factory=list)
    params: list[Node] = field(default_factory=list)
    dims: dict[Node, Dims] = field(default_factory=dict)


@dataclass(frozen=True)
class _Meeting:
    """An op of a block and a parameter: what the block's dims are, and what they are in the result."""

    block: Node
    param: Node
    before: Dims
    after: Dims


def find(gm: GraphModule) -> list[Region]:
    """The regions of the graph, in its order."""
    regions: list[Region] = []
    of: dict[Node, Region] = {}
    for node in gm.graph.nodes:
        operands = _operands(node, of)
        meeting = _meets(operands, of) if op_name(node) != "baddbmm" else None
        if meeting is not None:
            region = of.get(meeting.block)
            if region is None:
                region = Region(int(edit.tensor_value(meeting.param).shape[0]))
                regions.append(region)
                region.dims[meeting.block] = meeting.before
                of[meeting.block] = region
            region.core.append(node)
            region.params.append(meeting.param)
            region.dims[node] = meeting.after
            of[node] = region
            continue
        _follow(node, operands, of)
    return [r for r in regions if len(r.core) > 0]


def _operands(node: Node, of: dict[Node, Region]) -> list[Operand] | None:
    """What an op on blocks or parameters does to their dims."""
    return trace(node) if any(a in of or is_parameter(a) for a in node.all_input_nodes) else None


def _meets(operands: list[Operand] | None, of: dict[Node, Region]) -> _Meeting | None:
    """A product of a block and a parameter; or a parameter that is broadcast over the rows of a block, experts aligned
    with those of the block."""
    if operands is None or len(operands) != 2:
        return None
    for block, param in (operands, operands[::-1]):
        if not is_parameter(param.node) or is_parameter(block.node) or not param.dims:
            continue
        expert, taken, places = _place(param.dims[0]), list(map(_place, param.dims)), list(map(_place, block.dims))
        if expert is None or expert not in places:
            continue
        if any(fate.how is How.CONTRACTED for fate in param.dims):
            rows = [dim for dim, place in enumerate(places) if place is not None and place not in taken]
            if len(param.dims) > 2 and rows:
                before = Dims(places.index(expert), rows[-1])
                return _Meeting(block.node, param.node, before, Dims(expert, places[rows[-1]]))
        elif block.node in of and of[block.node].experts == edit.tensor_value(param.node).shape[0] > 1:
            before = of[block.node].dims[block.node]
            if places[before.expert] == expert and places[before.row] is not None:
                return _Meeting(block.node, param.node, before, Dims(expert, places[before.row]))
    return None


def _place(fate: Fate) -> int | None:
    """The dim of the result that a dim becomes as it is."""
    return fate.to[0].dim if fate.is_whole else None


def _follow(node: Node, operands: list[Operand] | None, of: dict[Node, Region]) -> None:
    """If `node` keeps the dims of a block apart, its result is a block of the same region."""
    blocks = [a for a in node.all_input_nodes if a in of]
    if not blocks or any(of[b] is not of[blocks[0]] for b in blocks):
        return
    region = of[blocks[0]]
    found = {dims for b in blocks for dims in _after(node, operands, b, region.dims[b])}
    if len(found) == 1 and None not in found:
        of[node], region.dims[node] = region, found.pop()


def _after(node: Node, operands: list[Operand] | None, block: Node, before: Dims) -> list[Dims | None]:
    """What the dims of a block are in the result, for every time that the op takes it. An op that does not just keep
    them, or that nobody knows, may have them where it gives as many experts and rows: running it will tell."""
    old, new = tensor_of(block), tensor_of(node)
    if new is None or (is_reshape(node) and new.dim() != old.dim()):
        return [None]
    found = [(_place(o.dims[before.expert]), _place(o.dims[before.row])) for o in operands or () if o.node is block]
    if found and all(None not in each for each in found):
        return [Dims(*each) for each in found]
    alike = all(shape_of(old)[d] == shape_of(new)[d] for d in (before.expert, before.row) if old.dim() == new.dim())
    return [before if alike and old.dim() == new.dim() else None]


def count_blocks(gm: GraphModule, enter: Node) -> tuple[Node | None, tuple[Node, ...]]:
    """Filled places per expert [E], and the router's choices, if the user's code shows them: the one-hot operand of the
    einsum that fills the blocks, and the top-k or argmax behind it."""
    source, expert_dim, row_dim = enter.args[0], enter.args[2], enter.args[3]
    if source.target is operator.getitem and source.args[0].target == "split":  # the first chunk speaks for all
        source = source.args[0].args[0]
    while source.target in ("unsqueeze", "flatten", "movedim"):  # groups of rows that were merged into one
        source = source.args[0]
    if getattr(source.target, "__name__", "") != "einsum" or not isinstance(source.args[0], str):
        return None, ()
    subs, out = source.args[0].replace(" ", "").split("->")
    letters = out[expert_dim], out[row_dim]
    masks = [(s, n) for s, n in zip(subs.split(","), source.args[1:]) if all(c in s for c in letters)]
    if len(masks) != 1:
        return None, ()
    sub, mask = masks[0]
    dims = [i for i, c in enumerate(sub) if c != letters[0]]
    with edit.at(enter):
        filled = gm.graph.call_method("ne", (mask, 0))
        load = gm.graph.call_method("sum", (filled, dims))
    value_of = edit.tensor_value(mask)
    filled.meta["val"] = value_of.ne(0)
    load.meta["val"] = filled.meta["val"].sum(dims)
    return load, choices_behind(mask)
