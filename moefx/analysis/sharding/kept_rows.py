"""Which values between products that are cut over ranks can stay cut along tokens (sequence parallelism: Korthikanti et
al. 2022, section 4.2), found as the token split of a region is: by what ops do to the dims of their operands.

A value has rows if its first dims, all together, run over the tokens: [T, D] and [B, S, D] do. Sums over ranks and the
results of regions have them, and what is added to those; from there on rows are followed through every op that treats
each by itself. What follows is done by shares, unless it makes of a row more than it takes and all ranks need it: then
fewer bytes travel if its operand is gathered.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch.fx import GraphModule, Node

from moefx.ir.dim_arguments import sizes_held
from moefx.ir.dims import is_reshape, tensor_of, trace
from moefx.ir.fates import How, Operand, Size, shape_of
from moefx.ir.names import op_name
from moefx.ir.op import expr, lookup, value
from moefx.ir.ops.dense import vary
from moefx.ir.randomness import is_random, never_drops
from moefx.ir.writes import is_written, writes

_ops = torch.ops.moefx
ALONE = "its rows meet no others"


class KeptRows:
    """Of all values with `total` rows: lead: {value that is done by shares: how many of its dims run over rows}; among
    them sources: sums over the ranks of `axis` and gathered results; given: those that every rank has whole anyhow, and
    takes its rows of. tokens: an input with as many rows. whole: what reads rows and is not done by shares, and why."""

    def __init__(self, gm: GraphModule, axis: str, total: Size) -> None:
        self.gm, self.axis, self.total = gm, axis, total
        self.inputs = [node for node in gm.graph.find_nodes(op="placeholder") if (
            node.meta["moefx"].kind == "input" and tensor_of(node) is not None)]  # fmt: skip
        self.tokens = next((node for node in self.inputs if self.leading(node)), None)
        self.sources = {node for node in gm.graph.nodes if rows_of_source(node, axis) == total}
        self.given: set[Node] = set()
        self.lead: dict[Node, int] = {}
        self.whole: dict[Node, str] = {}

    def find(self) -> None:
        if self.tokens is None:
            self.whole = dict.fromkeys(self.sources, "it has other rows than the inputs")
            self.sources = set()
            return
        self._follow()
        self._take_given()
        self._leave_out()
        self._leave_alone()
        self.sources &= self.lead.keys()
        self.given &= self.lead.keys()

    # ---- follow rows

    def _follow(self) -> None:
        self.lead, self.whole = {}, {}
        for node in self.gm.graph.nodes:
            if node in self.sources or node in self.given:
                found: int | str | None = self.leading(node)
            elif any(a in self.lead for a in node.all_input_nodes):
                found = self._against(node) or self._leading_behind(node)
            else:
                continue
            if isinstance(found, int) and not all(map(self._is_known, shape_of(tensor_of(node))[:found])):
                found = "its sizes are none of the inputs"
            if isinstance(found, int):
                self.lead[node] = found
            elif found and lookup(node) is None and not is_size(node):
                self.whole[node] = found

    def input_of(self, size: Size) -> Node | None:
        """The input that has a dim of this size."""
        return next((node for node in self.inputs if size in shape_of(tensor_of(node))), None)

    def _is_known(self, size: Size) -> bool:
        return isinstance(size, int) or size == self.total or self.input_of(size) is not None

    def leading(self, node: Node) -> int | None:
        """How many first dims run over rows, by their sizes."""
        shape = shape_of(tensor_of(node))
        return next((i for i in range(1, len(shape) + 1) if math.prod(shape[:i]) == self.total), None)

    def _against(self, node: Node) -> str | None:
        if lookup(node) is not None or not node.op.startswith("call") or tensor_of(node) is None:
            return "it is an output" if node.op == "output" else "it reads all rows"
        if writes(node) or is_written(node):
            return "it is written in place"
        if is_random(node) and not never_drops(node):
            return "it draws random numbers"
        if any(tensor_of(u) is None and u.op != "output" and not _reads_size(u) for u in node.users):
            return "its entries become numbers"
        return None

    def _leading_behind(self, node: Node) -> int | str:
        operands = trace(node)
        if is_reshape(node):
            lead = self.leading(node)
            is_known = lead is not None and all(isinstance(size, int) for size in shape_of(tensor_of(node))[lead:])
            return lead if is_known else "it does not keep rows apart"
        leads = {self.lead[o.node] for o in operands or () if o.node in self.lead and _is_read(o)}
        if len(leads) != 1:
            return "it does not treat every row by itself"
        (lead,) = leads
        held = {each.of(node) for dim, each in sizes_held(node).items() if dim < lead}
        sizes = [a for a in node.all_input_nodes if isinstance(value(a), torch.SymInt) and a not in held]
        if any(expr(value(a)).free_symbols & getattr(self.total, "free_symbols", set()) for a in sizes):
            return "it computes with the number of rows"
        shape = shape_of(tensor_of(node))
        if math.prod(shape[:lead]) != self.total:
            return "it does not treat every row by itself"
        rows = [o for o in operands if o.node in self.lead or met(o, lead)]
        if not all(_is_kept(o, dim, shape) for o in rows for dim in range(lead)):
            return "it does not treat every row by itself"
        return lead

    def _take_given(self) -> None:
        """What is added to rows and every rank has whole, as embeddings: its other readers are done by shares, too."""
        for node, lead in self.lead.items():
            if node not in self.sources:
                self.given |= {o.node for o in trace(node) or () if o.node not in self.lead and met(o, lead)
                               and o.node.op.startswith("call") and tensor_of(o.node).is_floating_point()
                               and _width(o.node, lead) == _width(node, lead) and not is_written(o.node)}  # fmt: skip
        if self.given:
            self._follow()

    # ---- choose

    def is_inside(self, user: Node, node: Node) -> bool:
        """Whether a reader takes the rows of a rank."""
        is_own = user.target is _ops.own_rows.default and _of_tokens(user, self.axis)
        takes = is_own and self.lead[node] == 1
        return takes or _reads_size(user) or self.is_done(user)

    def outside(self, node: Node) -> list[Node]:
        """The readers that need all rows of a value."""
        return [user for user in node.users if not self.is_inside(user, node)]

    def _leave_out(self) -> None:
        """Where the results of what reads one value alone are needed whole, and are wider than it: gather that."""
        order = {node: place for place, node in enumerate(self.gm.graph.nodes)}
        for node in sorted(self.lead, key=order.__getitem__, reverse=True):
            if not isinstance(value(node), torch.Tensor) and self.outside(node):
                self._drop([node])  # several tensors are not gathered at once
            if node not in self.lead:
                continue
            behind = self._behind(node, order)
            wide = sum(_width(each, self.lead[each]) for each in behind if self.outside(each))
            if wide > _width(node, self.lead[node]):
                self._drop(behind)

    def _behind(self, node: Node, order: dict[Node, int]) -> set[Node]:
        """What is made of a value alone, and of which nothing but whole results comes."""
        alone, waiting = {node}, {*node.users}
        while waiting:
            user = min(waiting, key=order.__getitem__)
            waiting.remove(user)
            if self.is_done(user) and all(a in alone for a in user.all_input_nodes if a in self.lead):
                alone.add(user)
                waiting |= {*user.users} - alone
        found: set[Node] = set()
        for each in sorted(alone - {node}, key=order.__getitem__, reverse=True):
            if all(user in found or is_size(user) or not self.is_inside(user, each) for user in each.users):
                found.add(each)
        return {each for each in found if all(a in found or isinstance(value(a), torch.Tensor)
                                              for a in each.all_input_nodes if a in self.lead)}  # fmt: skip

    def is_done(self, node: Node) -> bool:
        """Whether an op, and no source, is done by shares."""
        return node in self.lead and node not in self.sources and node not in self.given

    def _drop(self, nodes: Iterable[Node]) -> None:
        stack = [*nodes]
        while stack:
            node = stack.pop()
            if self.lead.pop(node, None) is not None:
                self.whole[node] = "its results are wider than what it reads"
                stack += [u for u in node.users if self.is_done(u)
                          and not any(a in self.lead for a in u.all_input_nodes)]  # fmt: skip

    def _leave_alone(self) -> None:
        """A sum whose rows meet no others is as cheap whole."""
        seen: set[Node] = set()
        for source in [node for node in self.lead if node in self.sources]:
            if source in seen:
                continue
            group, stack = set(), [source]
            while stack:
                node = stack.pop()
                if node in group:
                    continue
                group.add(node)
                around = [u for u in node.users if self.is_done(u)]
                around += [a for a in node.all_input_nodes if a in self.lead] if self.is_done(node) else []
                stack += around
            seen |= group
            owners = [u for node in group for u in node.users if u.target is _ops.own_rows.default]
            if len(group & self.sources) + len(owners) < 2:
                for node in group:
                    del self.lead[node]
                self.whole[source] = ALONE
        for node in [n for n in self.given if n in self.lead and n not in seen]:
            del self.lead[node]
        for node in [n for n in self.lead if n not in seen and n not in self.given]:
            del self.lead[node]


def rows_of_source(node: Node, axis: str) -> Size | None:
    """How many rows a sum over ranks has, or a gathered result; None: the node is neither."""
    shape = shape_of(tensor_of(node)) if tensor_of(node) is not None else ()
    is_sum = node.target is _ops.sum_parts.default and node.args[1] == axis and len(shape) > 1
    is_all = node.target is _ops.all_rows.default and _of_tokens(node, axis)
    if is_written(node) if is_sum or is_all else True:
        return None
    return math.prod(shape[:-1]) if is_sum else shape[0]


def _of_tokens(node: Node, axis: str) -> bool:
    """Whether `own_rows` or `all_rows` shares out the first dim, and not as batches of their own."""
    return node.args[2:] == (0, node.args[3], axis)


def is_size(node: Node) -> bool:
    """Whether a node reads the size of one dim."""
    return op_name(node) in ("size", "sym_size") and len(node.args) > 1 and isinstance(node.args[1], int)


def _reads_size(node: Node) -> bool:
    return is_size(node) or node.target is _ops.num_own_rows.default


def met(operand: Operand, lead: int) -> bool:
    """Whether some of an operand's entries belong to some rows alone."""
    shape = shape_of(tensor_of(operand.node))
    return any(place.dim < lead and fate.how is not How.SHARED and shape[dim] != 1
               for dim, fate in enumerate(operand.dims) for place in fate.to)  # fmt: skip


def is_varied(node: Node, axis: str) -> bool:
    return node.target is vary and node.args[1] == axis


def _is_read(operand: Operand) -> bool:
    return any(fate.how is not How.UNREAD for fate in operand.dims)


def _is_kept(operand: Operand, dim: int, shape: tuple[Size, ...]) -> bool:
    """Whether a dim over rows is the same dim of the result."""
    if not _is_read(operand):
        return True
    given = shape_of(tensor_of(operand.node))
    if dim >= len(given):
        return False
    fate = operand.dims[dim]
    return fate.is_whole and fate.to[0].dim == dim and given[dim] == shape[dim]


def _width(node: Node, lead: int) -> int:
    """Bytes of a row."""
    tensor = tensor_of(node)
    sizes = [size for size in shape_of(tensor)[lead:] if isinstance(size, int)]
    return math.prod(sizes) * tensor.element_size()
