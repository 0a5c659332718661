"""Let ranks that read the same data take their shares of tokens before the gate instead of behind it.

Contract
    takes  MOE   regions that are split by tokens: own_rows before their routing
    gives  MOE   the same with own_rows as far up as ops treat every row by itself
    never  changes choices: what orders rows, draws random numbers or writes in place stays whole, and so does all that
           somebody else reads, except for sums and means over rows

Pseudo-code
    backwards from own_rows: an op whose rows depend on the same rows of its arguments, and whose readers are all done
    by shares, is done by shares
    sums over rows, of a loss of the router or of statistics, become sums over the share, and a small sum over the ranks

    idx = topk(linear(x, gate)); mean = softmax(linear(x, gate)).mean(0); route(own_rows(idx))
        ->  s = linear(own_rows(x), gate); idx = topk(s); mean = sum_parts(softmax(s).sum(0)) / size(x, 0); route(idx)
Source: Parm's schedule S1 (section 3.2), which splits tokens before the gate.
"""

from __future__ import annotations

import operator
from typing import NamedTuple

import torch
from torch.fx import GraphModule, Node

from moefx.context.pass_types import PassContext, PassResult
from moefx.errors import UnsupportedUse
from moefx.ir import edit
from moefx.ir.describe import module_path
from moefx.ir.dim_arguments import sizes_held
from moefx.ir.dims import tensor_of, trace
from moefx.ir.fates import How
from moefx.ir.names import op_name
from moefx.ir.op import expr, lookup, value
from moefx.ir.ops.dense import vary
from moefx.ir.ops.regions import enter_experts
from moefx.ir.randomness import is_random
from moefx.ir.writes import is_written, writes

_ops = torch.ops.moefx


def run(gm: GraphModule, ctx: PassContext) -> PassResult:
    result = PassResult()
    numbers = {enter.args[1].args[0]: enter.args[-1] for enter in gm.graph.find_nodes(
        op="call_function", target=enter_experts) if enter.args[1] is not None}  # fmt: skip
    for share in gm.graph.find_nodes(op="call_function", target=_ops.num_own_rows.default):
        routes = [u for own in share.users for u in own.users if u.target is _ops.route.default]
        if not routes or ctx.split(numbers[routes[0]]) not in (None, "s1", "s3"):
            continue
        hoist = _Hoist(gm, share)
        hoist.find()
        path = module_path(routes[0])
        ctx.report.schedules[path] = found = hoist.schedule()
        ctx.decisions.schedules[numbers[routes[0]]] = found.partition(";")[0]
        if ctx.split(numbers[routes[0]]) == "s1" and not found.startswith("s1"):
            raise UnsupportedUse(f"the split 's1' cannot be: {found.partition('; ')[2]}", where=path,
                                 hint="split=None, or 's2-tokens', splits after the gate")  # fmt: skip
        if hoist.local:
            result.changed(f"{len(hoist.local)} ops of {path} are done by shares")
            hoist.rewrite()
        for node, why in hoist.whole.items():
            result.skip(node, why)
    if result.changes:
        edit.move_in_order(gm)
    return result


class _Rows(NamedTuple):
    """The dim of a value that runs over tokens, of so many entries."""

    node: Node
    dim: int


class _Hoist:
    """share: how many rows this rank has of those that `own` reads.

    wanted: {value: the dim of its rows}, of what somebody reads by shares. local: those of them that are done by
    shares. whole: the others, and why they are not; those that the experts read anyhow are not in it. sums: what reads
    rows of `local` and gives their sum or mean.
    """

    def __init__(self, gm: GraphModule, share: Node) -> None:
        self.gm, self.share, self.how = gm, share, share.args[2:]
        self.own = {_Rows(own.args[0], own.args[2]): own for own in share.users}
        self.total = expr(tensor_of(share.args[0]).shape[share.args[1]])
        self.wanted = {rows.node: rows.dim for rows in self.own}
        self.local: dict[Node, dict[Node, int]] = {}
        self.whole: dict[Node, str] = {}
        self.sums: dict[Node, Node] = {}

    # ---- find

    def find(self) -> None:
        for node in reversed(self.gm.graph.nodes):
            if node not in self.wanted:
                continue
            found = self._reason(node) or self._arguments(node)
            if isinstance(found, str):
                self.whole[node] = found
                continue
            self._do_by_shares(node, found)
        self._leave_picks()
        readers = {rows.node: own.users for rows, own in self.own.items()}
        for node in list(self.whole):
            if any(user.target is _ops.dispatch.default for user in readers.get(node, ())):
                del self.whole[node]

    def _leave_picks(self) -> None:
        """Of an op that gives several tensors and is not done by shares, each is split by itself."""
        for node, arguments in list(self.local.items()):
            given = next((a for a in arguments if a not in self.local and not isinstance(value(a), torch.Tensor)), None)
            if given is not None:
                self.whole[node] = self.whole.pop(given, f"{given.name} is whole")
                del self.local[node]
        self.sums = {user: node for user, node in self.sums.items() if node in self.local}

    def _do_by_shares(self, node: Node, arguments: dict[Node, int]) -> None:
        self.local[node] = arguments
        self.wanted |= arguments
        self.sums |= {user: node for user in node.users if self._sums(user, node)}

    def _reason(self, node: Node) -> str | None:
        """Why a value must be there whole."""
        reason = self._against(node)
        if reason is not None:
            return reason
        for user in node.users:
            if not (self._reads_share(user, node) or self._leads_to_sums(user, node)):
                return "it is an output" if user.op == "output" else f"{user.name} reads all rows of it"
        return None

    @staticmethod
    def _against(node: Node) -> str | None:
        """Why an op cannot be done by shares, whoever reads it."""
        op = lookup(node)
        if not node.op.startswith("call") or (op is not None and not op.of_user):
            return f"{node.name} is not computed here"
        if writes(node) or is_random(node):
            return f"{node.name} {'writes in place' if writes(node) else 'draws random numbers'}"
        return None

    def _reads_share(self, user: Node, node: Node) -> bool:
        is_own = user.target is _ops.own_rows.default and user.args[1] is self.share
        return is_own or user in self.local or user is self.share or self._sums(user, node) or (
            self._is_size(user, node))  # fmt: skip

    def _leads_to_sums(self, user: Node, node: Node) -> bool:
        """Whether a reader can be done by shares, since all that is made of it are sums over rows. Then it is."""
        operands = trace(user)
        fate = next((o.dims[self.wanted[node]] for o in operands or () if o.node is node), None)
        if self._against(user) or fate is None or not fate.to or user in self.wanted:
            return False
        self.wanted[user] = fate.to[0].dim
        found = self._arguments(user)
        if isinstance(found, dict) and all(self._reads_share(next_, user) or self._leads_to_sums(next_, user)
                                           for next_ in user.users):  # fmt: skip
            self._do_by_shares(user, found)
            return True
        del self.wanted[user]
        return False

    def _arguments(self, node: Node) -> dict[Node, int] | str:
        """The arguments of which rows are rows of the result, with their dims."""
        dim, operands, found = self.wanted[node], trace(node), {}
        for operand in operands or ():
            dims = operand.into(dim, shared=False)
            if not dims:
                continue
            fate = operand.dims[dims[0]]
            size = tensor_of(operand.node)
            is_same = size is not None and len(dims) == 1 and fate.is_whole and (
                expr(size.shape[dims[0]]) == self.total)  # fmt: skip
            if not is_same or self.wanted.get(operand.node, dims[0]) != dims[0] or operand.node in self.whole:
                return f"its rows are no rows of {operand.node.name}"
            found[operand.node] = dims[0]
        if not found:
            return f"{node.name} does not treat every row by itself"
        held = sizes_held(node).get(dim)
        sized = [a for a in node.all_input_nodes if isinstance(value(a), torch.SymInt)]
        if any(expr(value(a)).free_symbols & self.total.free_symbols and (held is None or held.of(node) is not a)
               for a in sized):  # fmt: skip
            return f"{node.name} computes with the number of rows"
        return found

    def _sums(self, user: Node, node: Node) -> bool:
        """Whether a reader gives the sum or the mean over the rows of a value, and over nothing whose size is not
        known."""
        operands = trace(user)
        if op_name(user) not in ("sum", "mean") or operands is None or [o.node for o in operands] != [node]:
            return False
        gone = [i for i, fate in enumerate(operands[0].dims) if fate.how is How.REDUCED]
        shape = tensor_of(node).shape
        return self.wanted[node] in gone and all(type(shape[i]) is int for i in gone if i != self.wanted[node])

    def _is_size(self, user: Node, node: Node) -> bool:
        return op_name(user) in ("size", "sym_size") and len(user.args) > 1 and isinstance(user.args[1], int)

    def schedule(self) -> str:
        """What is reported."""
        routed = [rows.node for rows, own in self.own.items() if any(u.target is _ops.route.default for u in own.users)]
        reasons = [f"{node.name}: {why}" for node, why in self.whole.items()]
        name = "s1" if all(node in self.local for node in routed) else "s2-tokens"
        return "; ".join([name, *reasons[:1]])

    # ---- rewrite

    def rewrite(self) -> None:
        first = next(_Rows(a, dim) for found in self.local.values() for a, dim in found.items() if a not in self.local)
        self.share.args = (*first, *self.how)
        with edit.at(self.share):
            rows = self.gm.graph.call_method("size", first)
        rows.meta["val"] = tensor_of(first.node).shape[first.dim]
        for node, dim in self.wanted.items():
            if node in self.local:
                for user in [u for u in node.users if self._is_size(u, node) and u.args[1] % _dims(node) == dim]:
                    user.replace_all_uses_with(rows)
                    self.gm.graph.erase_node(user)
        for node, cut in self.local.items():
            self._by_shares(node, cut)
        for user, node in self.sums.items():
            self._sum(user, node, rows)
        for given, own in list(self.own.items()):
            if given.node in self.local:
                own.replace_all_uses_with(given.node)
                self.gm.graph.erase_node(own)

    def _by_shares(self, node: Node, cut: dict[Node, int]) -> None:
        held = sizes_held(node).get(self.wanted[node])
        if held is not None and held.of(node) != -1:
            node.args, node.kwargs = held.put(node, self.share)
        for argument in node.all_input_nodes:
            if argument in self.local or argument is self.share:
                continue
            new = self._own(_Rows(argument, cut[argument]), node) if argument in cut else self._varied(argument, node)
            node.replace_input_with(argument, new)

    def _own(self, rows: _Rows, node: Node) -> Node:
        if rows not in self.own or is_written(rows.node):
            with edit.at(node):
                self.own[rows] = edit.call(self.gm.graph, _ops.own_rows.default, rows.node, self.share, rows.dim,
                                           *self.how[:2], name=f"{rows.node.name}_share")  # fmt: skip
        return self.own[rows]

    def _varied(self, given: Node, node: Node) -> Node:
        """What all rows read: its gradient from here is partial, that of other readers is whole."""
        found = tensor_of(given)
        if found is None or not found.is_floating_point() or all(user in self.local for user in given.users):
            return given
        with edit.at(node):
            return edit.call(self.gm.graph, vary, given, self.how[1], name=f"{given.name}_varied")

    def _sum(self, user: Node, node: Node, rows: Node) -> None:
        """Of this rank's rows, then of all ranks'."""
        graph, fates = self.gm.graph, trace(user)[0].dims
        others = 1
        for i, fate in enumerate(fates):
            if fate.how is How.REDUCED and i != self.wanted[node]:
                others *= int(tensor_of(node).shape[i])
        is_mean, dtype = op_name(user) == "mean", tensor_of(user).dtype
        is_half = is_mean and dtype.itemsize < 4  # the sum may be too large for it where the mean is not
        if is_mean:
            user.target = "sum" if user.op == "call_method" else torch.sum
        if is_half:
            user.kwargs = {**user.kwargs, "dtype": torch.float32}
        with edit.at(user, after=True):
            total = edit.call(graph, _ops.sum_parts.default, user, self.how[1], name=f"{user.name}_sum")
            if is_mean:
                count = rows if others == 1 else edit.call(graph, operator.mul, rows, others)
                total = edit.call(graph, operator.truediv, total, count, name=f"{user.name}_all")
            if is_half:
                total = graph.call_method("to", (total, dtype))
        user.replace_all_uses_with(total, delete_user_cb=lambda u: u.target is not _ops.sum_parts.default)


def _dims(node: Node) -> int:
    return tensor_of(node).dim()
