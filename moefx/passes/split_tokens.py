"""Let ranks that read the same data share out the rows of every MoE region.

Contract
    takes  MOE   regions between enter_experts and leave_experts
    gives  MOE   the same regions: every rank along `mp` does the rows of its share, and gets the results of all
    never  changes what a token gets: choices and drops are those of the whole batch; a schedule that is asked for by
           name and cannot be is refused

Pseudo-code
    dropless regions are split by tokens, behind the gate: of T tokens rank r routes those from r*T//n to (r+1)*T//n
    capacity regions are split along their capacity in the same way, each chunk by itself
    the results of all ranks are gathered, and so is the gradient of what was split

    y = combine(leave(experts(enter(dispatch(x, perm)))), perm)
        ->  y = all_rows(combine(leave(experts(enter(dispatch(own_rows(x), perm)))), perm))
Source: Parm's schedule S2 (section 3.2), of which tokens are split where a layer has no capacity: then a rank adds up
the rows of a token before it sends them on, k times fewer. Of several
chunks, one is gathered while the next comes back.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from moefx.analysis.region_rows import BlockRows, RegionRows, TokenRows, rows_of
from moefx.context.pass_types import PassContext, PassResult
from moefx.errors import UnsupportedUse
from moefx.ir import edit
from moefx.ir.describe import module_path
from moefx.ir.op import expr, value
from moefx.ir.ops.dense import vary
from moefx.ir.ops.regions import enter_experts, expert_parameter
from moefx.ir.randomness import first_draw
from moefx.ir.writes import is_written

_ops = torch.ops.moefx


def run(gm: GraphModule, ctx: PassContext, *, kind: type[RegionRows] = TokenRows) -> PassResult:
    """kind: dropless regions are split before they are cut into chunks, those with capacities behind it."""
    result, n = PassResult(), ctx.mesh.size("mp")
    if ctx.decisions.whole:
        ctx.decisions.sharing = list(_readers(gm).values())
    if n == 1 or ctx.options.parallel.split == "baseline":
        return result
    enters = gm.graph.find_nodes(op="call_function", target=enter_experts)
    numbers = sorted({enter.args[-1] for enter in enters})
    found = {number: rows_of(gm, number) for number in numbers if ctx.uncut(number) not in ctx.decisions.batches}
    regions = {number: rows for number, rows in found.items() if isinstance(rows, kind)}
    chosen = {number for number in regions if ctx.split(number) == "baseline"}
    reasons = _agreed(gm, {number: "it was chosen" if number in chosen else rows.find() or _draws(rows)
                           for number, rows in regions.items()})  # fmt: skip
    inside = {n for number, rows in regions.items() if reasons[number] is None for n in rows.inner}
    for number, rows in regions.items():
        path, asked = module_path(rows.enters[0]), ctx.split(number)
        if asked == "s2-tokens" and kind is BlockRows:
            raise UnsupportedUse(f"the split '{asked}' splits tokens, and this layer fills blocks with those of all",
                                 where=path, hint="split='s2' splits capacities")  # fmt: skip
        if reasons[number] is not None and asked not in (None, "baseline"):
            raise UnsupportedUse(f"the split '{asked}' cannot be: {reasons[number]}", where=path,
                                 hint="split=None splits what can be split")  # fmt: skip
        if reasons[number] is not None:
            ctx.decisions.schedules[number] = "baseline"
            ctx.report.schedules[path] = f"baseline: {reasons[number]}"
            result.skip(rows.enters[0], reasons[number])
            continue
        _Split(gm, rows, inside, ctx).rewrite()
        ctx.decisions.split.add(number)
        ctx.report.schedules[path] = ctx.decisions.schedules[number] = "s2-tokens" if kind is TokenRows else "s2"
        result.changed(f"region {number} is split over {n} ranks")
    return result


def _draws(rows: RegionRows) -> str | None:
    """Ranks with other shares would draw more numbers or fewer, and have other generators ever after."""
    draw = first_draw(rows.inner)
    return None if draw is None else f"{draw.name} draws random numbers"


def _agreed(gm: GraphModule, reasons: dict[int, str | None]) -> dict[int, str | None]:
    """Why regions are not split. Gradients of a parameter are whole, or parts, in all regions that read it."""
    readers = {param: numbers & reasons.keys() for param, numbers in _readers(gm).items()}
    while True:
        pairs = ((param, a, b) for param, numbers in readers.items() for a in numbers for b in numbers)
        found = next((pair for pair in pairs if reasons[pair[1]] is None and reasons[pair[2]] is not None), None)
        if found is None:
            return reasons
        param, number, other = found
        reasons[number] = f"it shares {param.name} with another layer, of which {reasons[other]}"


def _readers(gm: GraphModule) -> dict[Node, set[int]]:
    """{parameter: the regions whose experts read it}."""
    readers: dict[Node, set[int]] = {}
    for marker in gm.graph.find_nodes(op="call_function", target=expert_parameter):
        for param in edit.ancestors([marker]):
            if param.op == "placeholder":
                readers.setdefault(param, set()).add(marker.args[-1])
    return readers


class _Split:
    """inside: what works on shares, in all regions. sizes: {(how many rows): this rank's share}. parts: {(value, dim):
    this rank's rows}."""

    def __init__(self, gm: GraphModule, rows: RegionRows, inside: set[Node], ctx: PassContext) -> None:
        self.gm, self.rows, self.inside, self.how = gm, rows, inside, (ctx.mesh.size("mp"), ctx.mesh.axis("mp"))
        self.sizes: dict[object, Node] = {}
        self.parts: dict[tuple[Node, int], Node] = {}

    def rewrite(self) -> None:
        inner = set(self.rows.inner)
        for node in self.rows.inner:
            cut = self.rows.arguments(node)
            for argument in node.all_input_nodes:
                if argument in cut:
                    node.replace_input_with(argument, self._own(node, argument, cut[argument]))
                elif argument not in inner and self._is_read_whole(argument):
                    node.replace_input_with(argument, self._varied(node, argument))
        for node, dim in self.rows.results.items():
            self._join(node, dim)
        edit.erase_unused(self.rows.dead)
        edit.move_in_order(self.gm)

    def _own(self, node: Node, whole: Node, dim: int) -> Node:
        """This rank's rows, taken once, right before their first use."""
        dim %= edit.tensor_value(whole).dim()
        if (whole, dim) not in self.parts or is_written(whole):
            with edit.at(node):
                size = self._size(whole, dim)
                self.parts[whole, dim] = edit.call(self.gm.graph, _ops.own_rows.default, whole, size, dim, *self.how,
                                                   name=f"{whole.name}_share")  # fmt: skip
        return self.parts[whole, dim]

    def _size(self, whole: Node, dim: int) -> Node:
        total = expr(edit.tensor_value(whole).shape[dim])
        if total not in self.sizes:
            self.sizes[total] = edit.call(self.gm.graph, _ops.num_own_rows.default, whole, dim, *self.how,
                                          name="share")  # fmt: skip
        return self.sizes[total]

    def _is_read_whole(self, argument: Node) -> bool:
        """Whether it has a gradient, which would be partial from here and whole from other readers."""
        found = value(argument)
        is_float = isinstance(found, torch.Tensor) and found.is_floating_point()
        return is_float and any(user not in self.inside for user in argument.users)

    def _varied(self, node: Node, given: Node) -> Node:
        with edit.at(node):
            new = edit.call(self.gm.graph, vary, given, self.how[1], name=f"{given.name}_varied")
        new.meta["val"] = edit.tensor_value(given)
        return new

    def _join(self, node: Node, dim: int) -> None:
        whole = edit.tensor_value(node)
        dim %= whole.dim()
        total = whole.shape[dim]
        with edit.at(node, after=True):
            if isinstance(total, torch.SymInt):
                total = self._total(total)
            joined = edit.call(self.gm.graph, _ops.all_rows.default, node, total, dim, *self.how,
                               name=f"{node.name}_all")  # fmt: skip
        joined.meta["val"] = whole
        node.replace_all_uses_with(joined, delete_user_cb=lambda user: user is not joined)

    def _total(self, total: torch.SymInt) -> Node:
        whole, dim = next((whole, dim) for whole, dim in self.parts
                          if expr(edit.tensor_value(whole).shape[dim]) == expr(total))  # fmt: skip
        size = self.gm.graph.call_method("size", (whole, dim))
        size.meta["val"] = edit.tensor_value(whole).shape[dim]
        return size
