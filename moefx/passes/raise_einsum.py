"""Raise experts on static blocks: GShard's one-hot einsums with a capacity.

Contract
    takes  CAPTURED or MOE   canonical
    gives  MOE               the ops between the first and the last use of per-expert parameters are marked as the
                             experts' side; how tokens are put into blocks and weighed stays the user's code
    never  changes a value (but by the order of an einsum of three operands, or of a product and its bias), or which
           tokens are dropped; ops that mix experts or rows are refused, or, where no experts are to be spread, left
           alone

Pseudo-code
    1. biases of baddbmm are added by themselves, and [1, E, 1, M] become [E, 1, M]; find einsums and batched matmuls of
       a block [.., E, .., C, ..] with a parameter [E, ..]; follow both dims
    2. per region: the hull of these ops is the experts' side; run it on a part of the experts and of the rows
    3. where blocks have groups of rows of any number, [E, G, C, M], the experts see [E, 1, G*C, M]: ranks with batches
       of other sizes have other numbers of groups
    4. mark what enters, what leaves, and the parameters

    h = einsum("ecd,edi->eci", rows, w)   ->   h = einsum("ecd,edi->eci", enter(rows), expert_parameter(w))
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from moefx.analysis.checking.raising import Raising
from moefx.analysis.checking.selfcheck import SelfCheck
from moefx.analysis.recognition import blocks, einsums
from moefx.context.pass_types import PassContext, PassResult
from moefx.errors import RaiseError
from moefx.ir import edit, ragged, regions
from moefx.ir.expert_weights import is_given, is_parameter, roots
from moefx.ir.infer import update
from moefx.ir.names import op_name
from moefx.ir.op import expr, value

_BROADCAST = ("add", "iadd", "add_", "sub", "mul", "imul", "mul_")


def run(gm: GraphModule, ctx: PassContext) -> PassResult:
    result = PassResult()
    einsums.by_pairs(gm, is_parameter, result)
    einsums.biases_apart(gm, is_parameter, result)
    _drop_leading_ones(gm, ctx, result)
    raising, check = Raising(gm, ctx, result), SelfCheck(gm, ctx.autocast)
    found = [region for region in blocks.find(gm) if _is_to_raise(region, check, raising)]
    for region in found:
        layouts = _layouts(region)
        if ctx.mesh.size("ep+esp") > 1 and _groups(region):
            layouts |= _merge_groups(gm, region, regions.hull(region.core), ctx)
        number = regions.mark(gm, regions.hull(region.core), layouts, region.params, region.experts)
        result.changed(f"region {number}: {region.experts} experts on static blocks ({edit.place(region.core[0])})")
    return result


def _drop_leading_ones(gm: GraphModule, ctx: PassContext, result: PassResult) -> None:
    """What is broadcast over blocks [.., E, C, M] has the experts first: [1, E, 1, M] becomes [E, 1, M]."""
    for region in blocks.find(gm):
        sums = {u for block in region.dims for u in block.users if u in region.dims and op_name(u) in _BROADCAST}
        broadcast = {(u, a) for u in sums for a in u.args[:2] if isinstance(a, Node) and is_parameter(a)}
        for node, param in sorted(broadcast):
            shape = edit.tensor_value(param).shape
            ones = next((i for i, size in enumerate(shape) if size != 1), 0)
            if not ones or ones + edit.tensor_value(node).dim() - len(shape) != region.dims[node].expert:
                continue
            source = _with_fewer_ones(param)
            if expr(edit.tensor_value(source).shape[0]) == region.experts:
                with edit.at(node):
                    emit = ragged.Rows(gm, ctx.fake_mode, param.name)
                    node.replace_input_with(param, emit.method("reshape", source, *map(int, shape[ones:])))
                result.changed(f"{param.name} has its experts first")


def _with_fewer_ones(param: Node) -> Node:
    """What has the same numbers, in their order, before dims of size 1 were added."""
    while op_name(param) in ("unsqueeze", "view", "reshape") or (
        op_name(param) == "getitem" and isinstance(param.args[1], tuple)
        and all(i in (None, slice(None), ...) for i in param.args[1])
    ):  # fmt: skip
        before = [s for s in edit.tensor_value(param.args[0]).shape if s != 1]
        if before != [s for s in edit.tensor_value(param).shape if s != 1]:
            break
        param = param.args[0]
    return param


def _is_to_raise(region: blocks.Region, check: SelfCheck, raising: Raising) -> bool:
    """Refuses a region that mixes experts or rows, unless all experts may stay where they are: every rank computes them
    for its own tokens."""
    if region.experts == 1:
        raising.result.skip(region.core[0], "a single block is not a mixture")
        return False
    for param in region.params:
        if (reason := _why_not_of_experts(param, region.experts)) is not None:
            raising.result.skip(region.core[0], reason)
            return False
    inside = regions.hull(region.core)
    try:
        _check_inside(inside, region)
        check.keeps_apart(inside, _layouts(region), region.params, region.experts)
        if _groups(region):
            _check_groups(inside, region, check)
    except RaiseError as error:
        dense = _computes_all(region) and _is_weighed_inside(region, inside)  # shared experts: nothing has to travel
        raising.result.skip(region.core[0], error.what)
        if raising.ctx.mesh.dims("ep+esp") and not dense:
            raising.refuse(region.core[0], error)
        return False
    return True


def _computes_all(region: blocks.Region) -> bool:
    """Whether every expert gets all tokens: the first block is the tokens, repeated."""
    block = next(iter(region.dims))
    while op_name(block) in ("reshape", "view", "contiguous", "to"):
        block = block.args[0]
    return op_name(block) in ("expand", "expand_as", "repeat")


def _is_weighed_inside(region: blocks.Region, inside: set[Node]) -> bool:
    """Whether the experts' ops read a value that the graph around them has for every expert."""
    read = {a for node in inside for a in node.all_input_nodes} - inside - set(region.dims)
    values = [edit.tensor_value(a) for a in read if not is_parameter(a)]
    return any(v is not None and v.dim() > 1 and v.shape[0] == region.experts for v in values)


def _why_not_of_experts(param: Node, experts: int) -> str | None:
    """What a weight is computed of has a row for every block, unlike projections by groups of heads."""
    try:
        found, _ = roots(param, experts)
    except RaiseError as error:
        return error.what
    given = [edit.tensor_value(node) for node in edit.ancestors(found, stop=is_given) if is_given(node)]
    if any(each.dim() and each.shape[0] == experts for each in given):
        return None
    return f"{found[0].name} has no row of its own for each of {experts} blocks"


def _layouts(region: blocks.Region) -> dict[Node, regions.Layout]:
    return {n: regions.Layout(None, d.expert, d.row) for n, d in region.dims.items()}


def _groups(region: blocks.Region) -> dict[Node, int]:
    """The dim of every block that counts groups of rows, the batch's rows in GShard's [E, G, C, M]: one that is neither
    the experts' nor the places' and has no fixed size. Ranks may have different numbers of groups."""
    found = {}
    for node, dims in _tensors(region).items():
        shape = edit.tensor_value(node).shape
        others = [d for d, s in enumerate(shape) if d not in (dims.expert, dims.row) and not expr(s).is_Integer]
        if len(others) > 1:
            raise RaiseError(
                f"the tokens of an expert's block stand on {1 + len(others)} dims",
                where=edit.place(node),
                hint="give the experts' ops blocks with the tokens on one dim or two",
            )
        found |= dict.fromkeys([node], *others) if others else {}
    return found


def _tensors(region: blocks.Region) -> dict[Node, blocks.Dims]:
    """The blocks but for tuples of them."""
    return {node: dims for node, dims in region.dims.items() if edit.tensor_value(node) is not None}


def _check_groups(inside: set[Node], region: blocks.Region, check: SelfCheck) -> None:
    """Groups are to be kept apart like rows, and nothing may depend on how many there are."""
    groups = _groups(region)
    if set(groups) != set(_tensors(region)):
        raise RaiseError("some of the experts' ops lose the groups of tokens", where=edit.place(region.core[0]))
    for node in inside:
        if any(isinstance(value(a), torch.SymInt) for a in node.all_input_nodes):
            raise RaiseError(
                f"{op_name(node)} between the experts' ops takes a size of the tokens",
                where=edit.place(node),
                hint="use -1 in views of the experts' blocks",
            )
    layouts = {n: regions.Layout(None, d.expert, groups[n]) for n, d in _tensors(region).items()}
    check.keeps_apart(inside, layouts, region.params, region.experts)


def _merge_groups(gm: GraphModule, region: blocks.Region, inside: set[Node],
                  ctx: PassContext) -> dict[Node, regions.Layout]:  # fmt: skip
    """The experts' side sees [E, 1, G*C, M] in place of [E, G, C, M]; returns the layouts of what enters it now."""
    groups, layouts = _groups(region), {}
    emit = ragged.Rows(gm, ctx.fake_mode, region.core[0].name)
    entering = [n for n in _tensors(region) if n not in inside and any(u in inside for u in n.users)]
    leaving = [n for n in inside if n in region.dims and any(u not in inside for u in n.users)]
    sizes = []
    for node in sorted(entering):
        row, group = region.dims[node].row, groups[node]
        users = [u for u in node.users if u in inside]
        place = row - (group < row)
        with edit.at(min(users)):
            sizes = sizes or [emit.method("size", node, group), emit.method("size", node, row)]
            flat = emit.method("flatten", emit.method("movedim", node, group, place), place, place + 1)
            merged = emit.method("unsqueeze", flat, group)
        for user in users:
            user.replace_input_with(node, merged)
        layouts[merged] = regions.Layout(None, region.dims[node].expert, row)
    for node in sorted(leaving):
        row, group = region.dims[node].row, groups[node]
        users = [u for u in node.users if u not in inside]
        place = row - (group < row)
        shape = [int(s) for d, s in enumerate(edit.tensor_value(node).shape) if d not in (group, row)]
        with edit.at(node, after=True):
            flat = gm.graph.call_method("squeeze", (node, group))
            split = gm.graph.call_method("reshape", (flat, *shape[:place], *sizes, *shape[place:]))
            restored = gm.graph.call_method("movedim", (split, place, group))
        restored.meta["val"] = edit.tensor_value(node)
        for user in users:
            user.replace_input_with(node, restored)
    for merged in layouts:
        update(merged, ctx.autocast)
    return layouts


def _check_inside(inside: set[Node], region: blocks.Region) -> None:
    """Everything between the experts' ops must keep experts and rows apart."""
    for node in inside:
        if node not in region.dims and edit.tensor_value(node) is not None and not is_parameter(node):
            raise RaiseError(
                f"{op_name(node)} between the experts' ops mixes experts or places",
                where=edit.place(node),
                hint="between einsums with per-expert weights use elementwise ops and ops on the last dim",
            )

