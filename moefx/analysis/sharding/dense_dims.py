"""How products with parameters outside of the experts can be cut over ranks that read the same data: by columns, then
by rows (Megatron-LM, section 3), heads being columns that must stay together.

Every product whose operand all ranks have makes new entries, whose numbers are followed (see `entries`). What mixes a
dim (a softmax, a norm over the entries of a head) joins its entries. A product that sums over entries is cut by rows,
and its ranks' sums are added. Where entries go another way, or cannot be spread evenly, the products that made them
stay whole, with a reason, and all is followed again without them.

A loss over classes takes the entries of logits as they are, and the embedding of the same vocabulary has its rows cut
alike. Logits that are an output stay whole; where a program for another kind of call has cut their weight, every rank
gets those of the others.

What meets cut entries and is itself whole on every rank (masks, tables of angles, sinks, keys of too few heads) is cut
where it is read: a rank takes its part.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.fx import GraphModule, Node

from moefx.analysis.sharding.dense_plan import Plan
from moefx.analysis.sharding.entries import NotCut, pieces_of
from moefx.analysis.sharding.following import Following, Mixed, every
from moefx.ir import edit
from moefx.ir.dim_arguments import Held, sizes_held
from moefx.ir.dims import tensor_of, trace
from moefx.ir.fates import How, Operand
from moefx.ir.names import arg, op_name
from moefx.ir.op import expr, value
from moefx.ir.ops.regions import enter_experts, expert_parameter, leave_experts
from moefx.layout import Cut


def plan(gm: GraphModule, axis: tuple[str, ...], n: int, whole: Mapping[str, str], cut: Mapping[str, Cut]) -> Plan:
    """How a graph is cut over the n ranks of an axis. By name, whole: parameters that stay whole for other reasons;
    cut: those that programs for other kinds of calls have cut."""
    banned: dict[Node, str] = {}
    narrow: dict[Node, list[Node]] = {}
    while True:
        found = _Graph(gm, n, axis, whole, cut, banned, narrow)
        found.follow()
        if found.banned_now:
            banned |= found.banned_now
            continue
        again = [product for product, makers in narrow.items() if product in banned and makers]
        if not again:
            found.plan.whole = {node: why for node, why in banned.items() if not found.plan.is_cut(node)}
            return found.plan
        for product in again:  # it cannot be cut by columns: rather by rows, behind these
            for each in (product, *narrow[product]):
                banned.pop(each, None)
            narrow[product] = []


class _Graph(Following):
    """One attempt. made_by: {value: the products that made its entries}. banned: products that stay whole. narrow:
    {product that should rather be cut by columns: the products before it, of fewer columns than their operands have,
    that stay whole for it}; with an empty list, it is known that it cannot be."""

    def __init__(self, gm: GraphModule, n: int, axis: tuple[str, ...], whole: Mapping[str, str],
                 cut: Mapping[str, Cut], banned: dict[Node, str], narrow: dict[Node, list[Node]]) -> None:  # fmt: skip
        super().__init__(n)
        self.gm, self.n, self.axis, self.banned, self.narrow = gm, n, axis, banned, narrow
        self.named_whole, self.cut_before = whole, cut
        self.plan = Plan()
        self.made_by: dict[Node, list[Node]] = {}
        self.weights: dict[tuple[Node, int], tuple[Tensor, Node]] = {}  # (parameter, dim) -> numbers, a reader
        self.banned_now: dict[Node, str] = {}
        self.inside = _inside(gm)

    def follow(self) -> None:
        for node in self.gm.graph.nodes:
            try:
                self._follow(node)
                if node in self.ids:
                    self.made_by[node] = self._sources(a for a in node.all_input_nodes if a in self.ids) or [node]
            except Mixed as error:
                given = [a for a in node.all_input_nodes if a in self.ids]
                self._ban(self._sources(given), f"{error} ({edit.place(node)})")
        if not self.banned_now:
            self._spread()
        if not self.banned_now:
            self._finish()

    # ---- who stays whole

    def _ban(self, products: Iterable[Node], why: str) -> None:
        for product in products:
            self.banned_now.setdefault(product, why)

    def _sources(self, values: Iterable[Node]) -> list[Node]:
        """The products that made the entries of values, and those that these have met."""
        return list(dict.fromkeys(product for each in values for product in self.made_by.get(each, (each,))))

    def _narrowest(self, products: list[Node]) -> list[Node]:
        """Those of the fewest columns: without them, as keys and values of few heads, the others may be cut."""
        sizes = {product: tensor_of(product).shape[-1] for product in products}
        return [product for product, size in sizes.items() if size == min(sizes.values())]

    # ---- what ops do

    def _follow(self, node: Node) -> None:
        self.is_of_parameters(node)
        given = [a for a in node.all_input_nodes if a in self.ids]
        if node.op == "output" and given:
            for each in given:
                self._ban(self._sources([each]), "what it makes is an output")
            return
        if not node.op.startswith("call") or (not given and (node in self.inside or tensor_of(node) is None)):
            return
        if given and node.target in (operator.getitem, getattr) and isinstance(value(node.args[0]), (tuple, list)):
            several = self.ids[given[0]]
            self.ids[node] = several[node.args[1] if node.target is operator.getitem else 0]
            return
        if given and (node.target is operator.setitem or op_name(node).endswith("_")):
            raise Mixed(f"{op_name(node)} writes entries to where others are")
        if given and tensor_of(node) is None:
            self._read_size(node, given[0])
            return
        if given and op_name(node) == "cross_entropy":
            self._loss(node)
            return
        operands = trace(node)
        if not given:
            if op_name(node) == "embedding":
                self._table(node)
            elif operands is not None:
                self._seed(node, operands)
            return
        if node.target in (enter_experts, leave_experts):
            raise Mixed("it makes rows of experts")
        if any(isinstance(self.ids[a], tuple) for a in given):
            raise Mixed(f"{op_name(node)} reads several parts of entries at once")
        if operands is None:
            raise Mixed(f"nothing is known of {op_name(node)} on cut entries")
        self._of_entries(node, operands)

    def _read_size(self, node: Node, given: Node) -> None:
        dim = arg(node, 1, "dim") if op_name(node) in ("size", "sym_size") else None
        numbers = self.ids[given]
        if node.users and (not isinstance(dim, int) or isinstance(numbers, tuple) or numbers.shape[dim] > 1):
            raise Mixed(f"{op_name(node)} reads the size of what is cut")

    def _loss(self, node: Node) -> None:
        """A cross entropy needs no logits but a rank's own."""
        logits, labels = arg(node, 0, "input"), arg(node, 1, "target")
        shape, numbers = tensor_of(logits).shape, self.ids[logits]
        if any(arg(node, *each) is not None for each in ((2, "weight"), (3, "size_average"), (5, "reduce"))):
            raise Mixed("cross_entropy with weights of classes, or its old arguments, needs all entries at once")
        if expr(numbers.numel()) != expr(shape[min(len(shape) - 1, 1)]) or tensor_of(labels).is_floating_point():
            raise Mixed("cross_entropy needs all entries at once")
        self.plan.losses.append(node)

    def _table(self, node: Node) -> None:
        """An embedding may have a part of its rows, if it does nothing else to its weight."""
        weight, others = arg(node, 1, "weight"), ((3, "max_norm"), (5, "scale_grad_by_freq"), (6, "sparse"))
        name = weight.meta["moefx"].key if weight.op == "placeholder" and self.is_of_parameters(weight) else None
        if node not in self.banned and not any(arg(node, *each) for each in others) and name is not None and (
                name not in self.named_whole):  # fmt: skip
            self.plan.tables.append(node)

    def _seed(self, node: Node, operands: list[Operand]) -> None:
        """A product of what all ranks have with a parameter makes entries of its own."""
        weights = [o for o in operands if self.is_of_parameters(o.node)]
        others = [o for o in operands if o not in weights]
        if len(others) != 1 or not any(f.how is How.CONTRACTED for o in weights for f in o.dims):
            return
        taken = {p.dim for fate in others[0].dims for p in fate.to}
        columns = {p.dim for o in weights for fate in o.dims if fate.how is How.KEPT for p in fate.to} - taken
        last = tensor_of(node).dim() - 1
        if columns != {last}:
            return
        if node in self.banned:
            self._gather(node, weights, last)
            return
        count = tensor_of(node).shape[last]
        why = self._not_cut(weights, count)
        if why:
            self.banned.setdefault(node, why)
            return
        numbers = self.entries.fresh(count)
        self.ids[node] = numbers.view([1] * last + [-1])
        self.plan.columns.append(node)
        try:
            for o in weights:
                for dim in o.into(last)[:1]:
                    self._bind(o.node, dim, numbers, node)
        except Mixed as error:
            self._ban([node], f"{error} ({edit.place(node)})")

    def _gather(self, node: Node, weights: list[Operand], last: int) -> None:
        """It cannot be cut, but its weights are, for calls of another kind."""
        cuts = {o.node: self.cut_before.get(o.node.meta["moefx"].key) for o in weights if o.node.op == "placeholder"}
        is_cut = [cut is not None and cut.dim in o.into(last)
                  for o in weights for cut in [cuts.get(o.node)]]  # fmt: skip
        if all(is_cut):
            self.plan.cuts |= cuts
            self.plan.gathered[node] = next(iter(cuts.values())).pieces

    def _not_cut(self, weights: list[Operand], count: Any) -> str:
        for root in (root for o in weights for root in edit.ancestors([o.node]) if root.op == "placeholder"):
            if root.meta["moefx"].key in self.named_whole:
                return self.named_whole[root.meta["moefx"].key]
            if any(u.target is expert_parameter for u in root.users):
                return "experts have its weight, too"
        if not isinstance(count, int) or count % self.n:
            return f"its {count} columns do not divide over {self.n} ranks"
        return ""

    def _of_entries(self, node: Node, operands: list[Operand]) -> None:
        cut = [o for o in operands if o.node in self.ids]
        dims = self.dims(cut)
        hows = {o.dims[d].how for o, d in dims}
        weights = [o for o in operands if o.node not in self.ids and self.is_of_parameters(o.node)]
        if hows <= {How.UNREAD}:
            return
        are_summed = any(fate.how is How.CONTRACTED for o in weights for fate in o.dims)
        if hows == {How.CONTRACTED} and len(dims) == 1 and are_summed:
            self._rows(node, *dims[0], weights)
        elif hows == {How.REDUCED} and len(cut) == 1 and {cut[0].dims[d].by for _, d in dims} <= {"sum", "mean"}:
            self._reduce(node, cut[0], [d for _, d in dims])
        else:
            self.through(node, operands, cut)
        if node in self.ids and all(each.numel() == 1 for each in every(self.ids[node])):
            del self.ids[node]
            raise Mixed(f"{op_name(node)} needs all entries at once")
        if op_name(node).startswith("conv"):  # channel by channel: a rank has as many groups as channels
            groups = Held("groups" if "groups" in node.kwargs else 6)
            self.plan.arguments[node] = groups.put(node, groups.of(node) // self.n)

    def _rows(self, node: Node, given: Operand, dim: int, weights: list[Operand]) -> None:
        """A product that sums over entries: its weight is cut by rows."""
        numbers, rows = self.ids[given.node].flatten(), [
            (o, d) for o in weights for d, fate in enumerate(o.dims) if fate.how is How.CONTRACTED]  # fmt: skip
        if len(rows) != 1 or op_name(node) not in ("linear", "matmul", "mm"):
            raise Mixed(f"{op_name(node)} sums over entries in another way than a linear layer")
        makers = self._sources([given.node])
        if numbers.numel() < min(tensor_of(_operand(m)).shape[-1] for m in makers) and self.narrow.get(node) != []:
            self.narrow[node] = makers
            raise Mixed("a bottleneck: the product behind it is cut by columns instead")
        ((weight, row),) = rows
        self._bind(weight.node, row, numbers, node)
        self.plan.rows.append(node)

    def _reduce(self, node: Node, given: Operand, dims: list[int]) -> None:
        """A sum or mean over all entries: of those of a rank, and then over ranks."""
        numbers = self.ids[given.node]
        is_mean = given.dims[dims[0]].by == "mean"
        gone = [fate for fate in given.dims if fate.how is How.REDUCED]
        is_known = op_name(node) in ("sum", "mean") and not (is_mean and len(gone) > 1)  # else of more than entries
        if expr(numbers.numel()) != expr(tensor_of(given.node).shape[dims[0]]) or not is_known:
            raise Mixed(f"{op_name(node)} needs all entries at once")
        self.plan.means.append((node, numbers.numel() if is_mean else 1))

    # ---- parameters

    def _bind(self, weight: Node, dim: int, numbers: Tensor, reader: Node) -> None:
        """A dim of a weight has these entries: down to the parameter."""
        if weight.op == "placeholder":
            known = self.weights.get((weight, dim))
            if known is not None:
                self.entries.join(known[0], numbers)
            elif any(other is weight for other, _ in self.weights):
                raise Mixed(f"{weight.name} is cut in two ways")
            self.weights.setdefault((weight, dim), (numbers, reader))
            return
        found = trace(weight)
        mine = [(o, d) for o in found or () for d in o.into(dim)]
        if len(mine) != 1 or not mine[0][0].dims[mine[0][1]].is_whole or sizes_held(weight):
            raise Mixed(f"nothing is known of how its weight {weight.name} is computed")
        self._bind(mine[0][0].node, mine[0][1], numbers, reader)

    # ---- at the end

    def _spread(self) -> None:
        """Give ranks their entries: those of every product that is cut by rows, in order."""
        summed = [(node, self.ids[_operand(node)].flatten()) for node in (*self.plan.rows, *self.plan.losses)]
        for node, numbers in summed + self._bind_tables():
            try:
                self.entries.spread(numbers)
            except NotCut as error:
                products = [node] if node in self.plan.tables else self._narrowest(self._sources([_operand(node)]))
                self._ban(products, f"{error} ({edit.place(node)})")
        for node in self.plan.columns:
            if not self.banned_now:
                self._try([node], lambda n=node: self.entries.ranks(self.ids[n], n))

    def _bind_tables(self) -> list[tuple[Node, Tensor]]:
        """The embedding of a vocabulary whose logits are cut, or were before, is cut as these are."""
        sizes, found = {self.ids[_operand(node)].numel() for node in self.plan.losses}, []
        for node in list(self.plan.tables):
            weight = arg(node, 1, "weight")
            before, rows = self.cut_before.get(weight.meta["moefx"].key), tensor_of(weight).shape[0]
            if rows in sizes:
                found.append((node, self.entries.fresh(rows)))
                try:
                    self._bind(weight, 0, found[-1][1], node)
                except Mixed as error:
                    self._ban([node], f"{error} ({edit.place(node)})")
            elif before is not None and before.dim == 0:
                self.plan.cuts[weight] = before
            else:
                self.plan.tables.remove(node)
        return found

    def _try(self, products: Iterable[Node], check: Any) -> Any:
        try:
            return check()
        except NotCut as error:
            self._ban(products, str(error))
            return None

    def _finish(self) -> None:
        for (weight, dim), (numbers, reader) in self.weights.items():
            is_maker = reader in self.plan.columns or reader in self.plan.tables
            makers = [reader] if is_maker else self._sources([_operand(reader)])
            others = [u for u in weight.users if not self._is_read_cut(weight, u)]
            if others:
                self._ban(makers, f"{others[0].name} ({edit.place(others[0])}) reads {weight.name} whole")
                continue
            pieces = pieces_of(self.entries.ranks(numbers, reader).tolist(), self.n)
            if pieces is None:
                self._ban(makers, f"the entries of {weight.name} lie in no even pieces")
                continue
            self.plan.cuts[weight] = Cut(dim, self.axis, pieces)
        for node in self.moved:
            (given,) = [a for a in node.all_input_nodes if a in self.ids]
            found = self._try(self._sources([given]), lambda n=node, g=given: self.entries.arguments(
                n, self.ids[g], self.ids[n]))  # fmt: skip
            if found is not None and found != (node.args, node.kwargs):
                self.plan.arguments[node] = found
        for node, operands in self.met:
            if node in self.ids:
                self._try(self._sources([node]), lambda n=node, o=operands: self._take_parts(n, o))

    def _is_read_cut(self, weight: Node, user: Node) -> bool:
        """Whether a reader of a parameter is a product that is cut, or computes something for such."""
        if self.plan.is_cut(user):
            return True
        return self.is_of_parameters(user) and all(self._is_read_cut(user, u) for u in user.users) and bool(user.users)

    def _take_parts(self, node: Node, operands: list[Operand]) -> None:
        """Of what all ranks have, a rank takes the entries that meet its own."""
        for o in (o for o in operands if o.node not in self.ids):
            dim, ranks = self.entries.line(self.ids[node], node)
            sizes = {d: expr(tensor_of(o.node).shape[d]) for d in o.into(dim)}
            mine = [d for d, size in sizes.items() if size != 1]
            if any(sizes[d] != len(ranks) for d in mine):
                raise NotCut(f"it meets {o.node.name}, which every rank has whole ({edit.place(node)})")
            pieces = pieces_of(ranks.tolist(), self.n)
            if pieces is None:
                raise NotCut(f"the entries of {node.name} ({edit.place(node)}) lie in no even pieces")
            self.plan.shared[node, o.node] = Cut(mine[0], self.axis, pieces) if mine else None


def _inside(gm: GraphModule) -> set[Node]:
    """What computes with rows of experts, region by region."""
    enters, leaves = (gm.graph.find_nodes(op="call_function", target=t) for t in (enter_experts, leave_experts))
    found: set[Node] = set()
    for number in {node.args[-1] for node in enters}:
        found |= edit.descendants([n for n in enters if n.args[-1] == number], until=leave_experts) & edit.ancestors(
            [n for n in leaves if n.args[-1] == number])  # fmt: skip
    return found


def _operand(product: Node) -> Node:
    """What a linear layer, or a loss, is applied to."""
    if op_name(product) == "cross_entropy":
        return arg(product, 0, "input")
    return next(o.node for o in trace(product) or () if any(fate.how is How.CONTRACTED for fate in o.dims))
