"""Make a function of every run of ops that Inductor can fuse.

Contract
    takes  SCHEDULED   the copy of a graph that is linked next, in its final order
    gives  the same graph, where a node whose target is a `link.parts.Part` stands for the ops of a run
    never  moves an exchange, a wait, a read of the host, a random op or one that writes; moves an op past one of these;
           lets more memory be alive at once than the graph's peak; changes what the backward gets

Pseudo-code
    for every node in order:
        it can be fused: it joins the run
        it is a product, a view or a size that needs nothing of the run: it stays where it is, before the run
        anything else: the run is over
    of a run: two ops or more that pass over memory. Views that only they read join them. What others read is what the
    function gives

    pow = pow(x, 2); mean = mean(pow); r = rsqrt(mean); y = mul(x, r); z = mm(y, w)   ->   y = island(x); z = mm(y, w)
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from moefx._torch_compat import OpOverload
from moefx.analysis.sizes import typical_sizes
from moefx.context.pass_types import PassContext, PassResult
from moefx.errors import VerifyError
from moefx.features.islands.held import held, is_look, memory_of
from moefx.features.islands.parts import Parts
from moefx.ir import edit
from moefx.ir.op import nbytes, value
from moefx.ir.writes import is_view
from moefx.link.parts import Part
from moefx.planning.pricing import Prices

_aten = torch.ops.aten
_LEAST = 2  # ops that pass over memory: one alone has nothing to be fused with
# What Inductor fuses of ops that torch does not tag as elementwise. Sums whose order follows from data are not among
# them, nor is what sorts.
_OTHERS = frozenset((
    _aten.sum, _aten.mean, _aten.amax, _aten.amin, _aten.var_mean, _aten._softmax, _aten._log_softmax,
    _aten._softmax_backward_data, _aten._log_softmax_backward_data, _aten.native_layer_norm,
    _aten.native_layer_norm_backward, _aten._to_copy, _aten.clone, _aten.cat, _aten.slice_backward,
    _aten.select_backward, _aten.full, _aten.full_like, _aten.zeros_like, _aten.ones_like,
    _aten.arange,
))  # fmt: skip


_RESTLESS = frozenset((torch.Tag.nondeterministic_seeded, torch.Tag.data_dependent_output,
                       torch.Tag.dynamic_output_shape))  # fmt: skip


@dataclass
class Run:
    """ops: that join, in order. passed: what stands between them, and stays before them."""

    ops: list[Node] = field(default_factory=list)
    passed: list[Node] = field(default_factory=list)

    @property
    def given(self) -> list[Node]:
        """What the ops read, in order."""
        members = set(self.ops)
        return list(dict.fromkeys(each for node in self.ops for each in node.all_input_nodes if each not in members))

    @property
    def made(self) -> list[Node]:
        """What others read of them."""
        members = set(self.ops)
        return [node for node in self.ops if not members.issuperset(node.users)]


def run(gm: GraphModule, ctx: PassContext) -> PassResult:
    result = PassResult()
    if not ctx.options.islands.wanted:
        return result
    prices = ctx.decisions.time_of
    sizes = prices.sizes if isinstance(prices, Prices) else typical_sizes([gm], ctx)
    parts = Parts({node.name for node in gm.graph.nodes})
    for node in list(gm.graph.nodes):
        if node.target is operator.getitem and _joins(node):  # parts of a tuple belong to what makes it
            node.args[0].append(node)
    place = {node: i for i, node in enumerate(gm.graph.nodes)}
    alive = dict(zip(place, held([[node] for node in place], sizes, alone=True)))
    for found in list(_runs(gm)):
        _absorb_views(found, place)
        if sum(not is_look(node) for node in found.ops) < _LEAST:
            continue
        _check(found, place)
        reason = _cannot(found, alive, sizes)
        part = parts.of(found.given, found.ops, found.made, sizes) if reason is None else None
        if part is None:
            result.skip(found.ops[0], reason or "its inputs do not show all sizes that it needs")
            continue
        result.changed(f"{len(found.ops)} ops from {found.ops[0].name} on are {part}")
        _replace(found, part)
    return result


def _runs(gm: GraphModule) -> Iterator[Run]:
    """Runs that can be one function each."""
    found, members = Run(), set()
    for node in gm.graph.nodes:
        depends = not members.isdisjoint(node.all_input_nodes)
        is_looked_at = is_look(node) and not depends  # views of what is made before the run
        if _joins(node) and not is_looked_at:
            found.ops.append(node)
            members.add(node)
        elif not depends and (is_looked_at or _stays(node)):
            found.passed.append(node)
        else:
            yield found
            found, members = Run(), set()
    yield found


def _absorb_views(found: Run, place: Mapping[Node, int]) -> None:
    """What looks at something outside for the run alone is done in it."""
    members = set(found.ops)
    for node in reversed(found.passed):
        if is_look(node) and _joins(node) and node.users and members.issuperset(node.users):
            members.add(node)
    found.ops = sorted(members, key=place.__getitem__)
    found.passed = [node for node in found.passed if node not in members]


def _joins(node: Node) -> bool:
    """Whether an op may be a part of an island."""
    if node.target is operator.getitem:
        return isinstance(node.args[0], Node) and _joins(node.args[0])
    target = node.target
    if not isinstance(target, OpOverload) or not _follows_from_arguments(target) or not _on_one_device(node):
        return False
    return torch.Tag.pointwise in target.tags or is_view(target) or target.overloadpacket in _OTHERS


def _stays(node: Node) -> bool:
    """Whether an op that does not join may run before others that stood in front of it: it computes something of its
    arguments, here and now."""
    if node.op != "call_function" or "takes" in node.meta:
        return False
    if isinstance(node.target, OpOverload):
        return _follows_from_arguments(node.target)
    return getattr(operator, getattr(node.target, "__name__", ""), None) is node.target


def _follows_from_arguments(target: OpOverload) -> bool:
    """Whether an op of torch's writes nothing, draws nothing, and has the host read nothing."""
    return target.namespace == "aten" and not target._schema.is_mutable and _RESTLESS.isdisjoint(target.tags)


def _on_one_device(node: Node) -> bool:
    """Of tensors, all of one device, and whole numbers."""
    made, given = value(node), [value(each) for each in node.all_input_nodes]
    tensors = list(made) if isinstance(made, (tuple, list)) else [made]
    tensors += [each for each in given if isinstance(each, Tensor)]
    numbers = [each for each in given if not isinstance(each, (Tensor, tuple, list))]
    return (all(isinstance(each, Tensor) for each in tensors) and len({each.device.type for each in tensors}) == 1
            and all(isinstance(each, (int, torch.SymInt)) for each in numbers))  # fmt: skip


def _cannot(found: Run, alive: Mapping[Node, float], sizes: Mapping[str, float]) -> str | None:
    """Why a run stays as it is. alive: bytes while each node of the graph runs, in order."""
    if not found.made or not all(isinstance(value(node), Tensor) for node in found.made):
        return "nobody reads a tensor of it"
    members = {*found.ops, *found.passed}
    in_order = [node for node in alive if node in members]
    before = max(held([[node] for node in in_order], sizes, alone=True))
    after = max(held([*([node] for node in found.passed), found.ops], sizes, alone=False))
    more = after - before + max(alive[node] for node in in_order) - max(alive.values())
    return f"as one function it would hold {more:.0f} bytes more than the peak" if more > 0 else None


def _check(found: Run, place: Mapping[Node, int]) -> None:
    """Only ops of torch's own stand within an island: no exchange, no wait, no grouped product, no read of the host.
    Raises VerifyError."""
    first, last, members = place[found.ops[0]], place[found.ops[-1]], set(found.ops)
    for node, at in place.items():
        home = getattr(node.target, "namespace", getattr(node.target, "__module__", ""))
        if first <= at <= last and node not in members and home not in ("aten", operator.add.__module__):
            raise VerifyError(f"an island from {found.ops[0].name} to {found.ops[-1].name} spans {node.name}",
                              where=edit.place(node), hint="let a run end there")  # fmt: skip


def _replace(found: Run, part: Part) -> None:
    """One call in place of the ops, behind the last of them, and the values that others read by their names."""
    made, last = found.made, found.ops[-1]
    graph, shares = last.graph, Counter(map(memory_of, made))
    with graph.inserting_before(last.next):
        island = edit.call(graph, part, *found.given, name=f"joined_{made[0].name}")
        new = [island] if len(made) == 1 else [edit.call(graph, operator.getitem, island, i) for i in range(len(made))]
    edit.inherit(island, last)
    island.meta |= {"val": tuple(map(value, made)), "begins": found.ops[0].name}
    for old, out in zip(made, new):
        edit.inherit(out, old)
        is_alone = shares[memory_of(old)] == 1 and nbytes(memory_of(old)) == nbytes(old)
        out.meta |= {"val": value(old), "named": old.name, "is_alone": is_alone}
        old.replace_all_uses_with(out)
    for node in reversed(found.ops):
        graph.erase_node(node)
