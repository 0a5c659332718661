"""Cut products with parameters outside of the experts over the ranks that read the same data: tensor parallelism. The
first part of the step place-experts, before experts are cut and placed.

Contract
    takes  MOE   any graph
    gives        the same with weights cut by columns and rows over `mp`, and the sizes of a rank
    never  cuts what an output or the experts need whole; what stays whole is reported with its reason. What a
           program for another kind of call has cut, it gathers

Pseudo-code
    find products that can be cut by following the entries of their results (`analysis.sharding.dense_dims`)
    before those cut by columns, let the gradient be summed; behind those cut by rows, sum, then add the bias
    an embedding looks up its own rows, and sums; a loss sums what ranks know of their own logits

    y = linear(act(linear(x, up)), down, bias)
        ->  y = sum_parts(linear(act(linear(vary(x), up)), down)) + bias
    y = cross_entropy(linear(embedding(ids, table), head), labels)
        ->  y = loss_of_parts(linear(vary(sum_parts(own_embedding(table, ids))), head), labels)
"""

from __future__ import annotations

import operator

import torch
from torch import nn
from torch.fx import GraphModule, Node

from moefx import _torch_compat as compat
from moefx.analysis.sharding.dense_dims import plan
from moefx.analysis.sharding.dense_plan import Plan
from moefx.capture.trace import Source
from moefx.context.pass_types import PassContext, PassResult
from moefx.ir import edit
from moefx.ir.names import arg
from moefx.ir.ops.dense import vary
from moefx.ir.ops.vocabulary import loss_of_parts
from moefx.layout import Cut, Layout

_ops = torch.ops.moefx


def run(gm: GraphModule, ctx: PassContext) -> PassResult:
    result, n = PassResult(), ctx.mesh.size("mp")
    if n == 1:
        return result
    axis = ctx.mesh.dims("mp")
    whole = dict.fromkeys(ctx.whole_before, "another kind of call needs it whole")
    found = plan(gm, axis, n, whole, {name: cut for name, layout in ctx.layouts_before.items()
                                      for cut in layout.cuts if cut.axis == axis})  # fmt: skip
    for node, why in found.whole.items():
        for name in _parameters(node):
            ctx.report.whole_over_mp[name] = why
    if found.cuts:
        _Rewrite(gm, found, ctx).run()
        result.changed(f"{len(found.cuts)} parameters are cut over {n} ranks")
    return result


def _parameters(product: Node) -> list[str]:
    """The names of the parameters of a product."""
    roots = [a for a in edit.ancestors([product.args[1]] if len(product.args) > 1 else product.all_input_nodes[1:])
             if a.op == "placeholder" and a.meta["moefx"].kind == "param"]  # fmt: skip
    return sorted(str(root.meta["moefx"].key) for root in roots)


class _Rewrite:
    """varied: {value: what its readers on parts read}."""

    def __init__(self, gm: GraphModule, found: Plan, ctx: PassContext) -> None:
        self.gm, self.found, self.ctx, self.axis = gm, found, ctx, ctx.mesh.axis("mp")
        self.varied: dict[Node, Node] = {}

    def run(self) -> None:
        found = self.found
        for node, (args, kwargs) in found.arguments.items():
            node.args, node.kwargs = args, kwargs
        uses = [(node, node.all_input_nodes[0], None) for node in (*found.columns, *found.gathered)]
        uses += [(node, given, cut) for (node, given), cut in found.shared.items()]
        readers: dict[Node, set[Node]] = {}
        for node, given, _ in uses:
            readers.setdefault(given, set()).add(node)
        for node, given, cut in uses:
            is_of_parameter = given.op == "placeholder" and given.meta["moefx"].kind == "param"
            all_in_parts = is_of_parameter and readers[given] >= set(given.users)
            self._read(node, given, cut, is_varied=not all_in_parts)
        for node in found.rows:
            self._sum(node)
        for node, count in found.means:
            self._mean(node, count)
        for node, pieces in found.gathered.items():
            self._gather(node, pieces)
        for node in found.losses:
            self._lose(node)
        for node in found.tables:
            self._look_up(node)
        for param, cut in found.cuts.items():
            self._cut(param, cut)

    def _read(self, node: Node, given: Node, cut: Cut | None, *, is_varied: bool) -> None:
        """node reads what all ranks have, for a result of which every rank has another part."""
        x = given
        found = edit.tensor_value(given)
        if is_varied and found is not None and found.is_floating_point():
            x = self._varied(given)
        if cut is not None:
            with edit.at(node):
                x = edit.call(self.gm.graph, _ops.own_part.default, x, cut.dim, list(cut.pieces),
                              self.ctx.mesh.size("mp"), self.axis, name=f"{given.name}_part")  # fmt: skip
            edit.inherit(x, node)
            x.meta["val"] = self._fake(found, Layout((cut,)))
        if x is not given:
            node.replace_input_with(given, x)

    def _varied(self, given: Node) -> Node:
        if given not in self.varied:
            first = next(iter(given.users)) if given.op == "placeholder" else given
            with edit.at(first, after=given.op != "placeholder"):
                new = edit.call(self.gm.graph, vary, given, self.axis, name=f"{given.name}_varied")
            edit.inherit(new, first)
            new.meta["val"] = edit.tensor_value(given)
            self.varied[given] = new
        return self.varied[given]

    def _sum(self, node: Node) -> None:
        bias = arg(node, 2, "bias") if node.target is nn.functional.linear else None
        if bias is not None:
            node.args, node.kwargs = (node.args[0], arg(node, 1, "weight")), {}
        total = self._summed(node)
        if bias is not None:
            with edit.at(total, after=True):
                added = self.gm.graph.call_function(operator.add, (total, bias))
            edit.inherit(added, node)
            added.meta["val"] = edit.tensor_value(node)
            total.replace_all_uses_with(added, delete_user_cb=lambda user: user is not added)

    def _summed(self, node: Node) -> Node:
        with edit.at(node, after=True):
            total = edit.call(self.gm.graph, _ops.sum_parts.default, node, self.axis, name=f"{node.name}_sum")
        edit.inherit(total, node)
        total.meta["val"] = edit.tensor_value(node)
        node.replace_all_uses_with(total, delete_user_cb=lambda user: user is not total)
        return total

    def _mean(self, node: Node, count: int) -> None:
        """A mean is the sum of all entries over their number."""
        if count > 1:
            node.target = "sum" if node.op == "call_method" else torch.sum
        total = self._summed(node)
        if count > 1:
            with edit.at(total, after=True):
                mean = self.gm.graph.call_function(operator.truediv, (total, count))
            edit.inherit(mean, node)
            mean.meta["val"] = edit.tensor_value(node)
            total.replace_all_uses_with(mean, delete_user_cb=lambda user: user is not mean)

    def _gather(self, node: Node, pieces: tuple[int, ...]) -> None:
        """Every rank gets the columns of the others."""
        whole, last, n = edit.tensor_value(node), edit.tensor_value(node).dim() - 1, self.ctx.mesh.size("mp")
        node.meta["val"] = self._fake(whole, Layout((Cut(last, self.ctx.mesh.dims("mp"), pieces),)))
        with edit.at(node, after=True):
            padded = edit.call(self.gm.graph, _ops.own_part_backward.default, node, last, list(pieces), n, self.axis,
                               name=f"{node.name}_padded")  # fmt: skip
        edit.inherit(padded, node)
        padded.meta["val"] = whole
        node.replace_all_uses_with(padded, delete_user_cb=lambda user: user is not padded)
        self._summed(padded)

    def _lose(self, node: Node) -> None:
        given = [arg(node, *each) for each in ((0, "input"), (1, "target"))]
        how = [arg(node, 4, "ignore_index", -100), arg(node, 6, "reduction", "mean"),
               arg(node, 7, "label_smoothing", 0.0)]  # fmt: skip
        node.args = (*given, edit.tensor_value(node).dtype, *how, self.ctx.mesh.size("mp"), self.axis)
        node.target, node.kwargs = loss_of_parts, {}

    def _look_up(self, node: Node) -> None:
        ids, weight, padding = (arg(node, *each) for each in ((0, "input"), (1, "weight"), (2, "padding_idx")))
        padding = -1 if padding is None else padding % edit.tensor_value(weight).shape[0]
        node.args = (weight, ids, padding, self.ctx.mesh.size("mp"), self.axis)
        node.target, node.kwargs = _ops.own_embedding.default, {}
        self._summed(node)

    def _cut(self, param: Node, cut: Cut) -> None:
        layout, full = Layout((cut,)), edit.tensor_value(param)
        param.meta["moefx"] = Source("param", param.meta["moefx"].key, layout)
        is_table = any(u.target is _ops.own_embedding.default for u in param.users)
        how = "vocabulary" if is_table else ("columns", "rows")[min(cut.dim, 1)]
        self.ctx.report.cut_over_mp[param.meta["moefx"].key] = how
        param.meta["val"] = nn.Parameter(self._fake(full, layout), requires_grad=full.requires_grad)
        param.meta.pop("example_value", None)

    def _fake(self, full: torch.Tensor, layout: Layout) -> torch.Tensor:
        return compat.fake_like(self.ctx.fake_mode, full, layout.shape(full.shape, self.ctx.mesh.root))
