"""Cut every expert over the ranks that share it. The first part of the step place-experts.

Contract
    takes  MOE   regions between enter_experts and leave_experts, with marked parameters
    gives        of the same graph regions whose ops are those of a rank that has a part of every hidden dim, and notes
                 which dims of parameters are cut; until `place_parameters` has run, parameters do not fit them
    never  touches regions that cannot be cut: their experts stay whole, and the context says why

Pseudo-code
    for every region, with those that share parameters with it
        find hidden dims by following their entries (`analysis.sharding`): columns, then rows
        write the sizes of a rank; what all ranks add to partial sums is divided by their number
    parameters live the same whoever gets rows: sizes are those of the ranks that do (`PassContext.tokens_over`), who
    have gathered what the others have

    h = grouped_linear(enter(x), up, counts); y = leave(grouped_linear(silu(h), down, counts, bias))
        ->  the same with up cut by columns, down by rows, and bias / n
"""

from __future__ import annotations

from torch.fx import GraphModule, Node

from moefx.analysis.recognition.kept_whole import why_whole
from moefx.analysis.sharding.entries import NotCut
from moefx.analysis.sharding.hidden_dims import Plan, plan
from moefx.context.pass_types import PassContext, PassResult
from moefx.errors import UnsupportedUse
from moefx.ir import edit
from moefx.ir.describe import module_path
from moefx.ir.ops.regions import enter_experts, expert_parameter


def run(gm: GraphModule, ctx: PassContext) -> PassResult:
    result, n = PassResult(), ctx.mesh.size("esp")
    enters = gm.graph.find_nodes(op="call_function", target=enter_experts)
    if n == 1 or not enters:
        return result
    markers = gm.graph.find_nodes(op="call_function", target=expert_parameter)
    regions: dict[int, Plan | str] = {}
    for number in sorted({enter.args[-1] for enter in enters}):
        regions[number] = _plan(gm, number, [m for m in markers if m.args[-1] == number], ctx)
    _agree(markers, regions, ctx)
    for number, found in regions.items():
        path = module_path(next(e for e in enters if e.args[-1] == number))
        if isinstance(found, str):
            ctx.report.whole_over_esp[number] = found
            result.skipped.append((path, f"its experts stay whole over '{ctx.mesh.axis('esp')}': {found}"))
            continue
        tokens = ctx.mesh.size(ctx.tokens_over(number))
        _rewrite(gm, found, found if tokens == n else _of_tokens(gm, number, found, path, ctx), tokens)
        rows = "" if tokens == n else f", and rows go to {tokens} of them"
        result.changed(f"the experts of region {number} are cut over {n} ranks{rows}")
    return result


def _of_tokens(gm: GraphModule, number: int, home: Plan, path: str, ctx: PassContext) -> Plan:
    """What to change in a region where rows go to fewer ranks than share its experts, which gather weights. Each of
    them has, of every piece of a hidden dim, the same entries as if the dim were cut over those ranks alone."""
    over = ctx.tokens_over(number)
    if not over:
        return Plan()
    found = plan(gm, number, ctx.mesh.dims(over), ctx.mesh.size(over))
    if {marker: cut.pieces for marker, cut in found.cuts.items()} != {m: cut.pieces for m, cut in home.cuts.items()}:
        raise UnsupportedUse(f"its experts are cut in other pieces over {ctx.mesh.size(over)} ranks than over "
                             f"{ctx.mesh.size('esp')}", where=path, hint="r=1, or r=None")  # fmt: skip
    return found


def _plan(gm: GraphModule, number: int, markers: list[Node], ctx: PassContext) -> Plan | str:
    """How the experts of a region are cut, or why not."""
    try:
        found = plan(gm, number, ctx.mesh.dims("esp"), ctx.mesh.size("esp"))
    except NotCut as error:
        return str(error)
    for marker in markers:
        reason = why_whole(marker.args[0], ctx.whole_before)
        if marker in found.cuts and reason is not None:
            return f"{reason.name or marker.args[0].name} is whole: {reason.why}"
    return found


def _agree(markers: list[Node], regions: dict[int, Plan | str], ctx: PassContext) -> None:
    """Regions that share a parameter cut it alike, or not at all; the chunks of a region read the same markers."""
    cuts: dict[Node, dict[int, object]] = {}
    for marker in markers:
        for number in (n for n in regions if marker.args[-1] in (n, ctx.uncut(n))):
            found = regions[number]
            cut = found.cuts.get(marker) if isinstance(found, Plan) else None
            cuts.setdefault(marker.args[0], {})[number] = cut
    changed = True
    while changed:
        changed = False
        for root, by_region in cuts.items():
            now = {number: cut if isinstance(regions[number], Plan) else None for number, cut in by_region.items()}
            if len(set(now.values())) > 1:
                why = {ctx.uncut(n): regions[n] for n in now if isinstance(regions[n], str)}
                for number in now:
                    if isinstance(regions[number], Plan):
                        other = f"another region uses {root.name} in another way"
                        regions[number] = why.get(ctx.uncut(number), other)
                        changed = True


def _rewrite(gm: GraphModule, home: Plan, found: Plan, n: int) -> None:
    """home: where parameters live; found: what n ranks compute."""
    for marker, cut in home.cuts.items():
        marker.meta["moefx_cut"] = cut
    for node, (args, kwargs) in found.arguments.items():
        node.args, node.kwargs = args, kwargs
    scaled: dict[Node, Node] = {}
    for user, given in dict.fromkeys(found.shared):
        if given not in scaled:
            with edit.at(given, after=True):
                scaled[given] = gm.graph.call_method("mul", (given, 1.0 / n))
            edit.inherit(scaled[given], given)
            scaled[given].meta["val"] = edit.tensor_value(given)
        user.replace_input_with(given, scaled[given])
