"""What the backward reads of the forward, in classes, and what has to be kept of it.

Values of a class go one way: they are kept, computed (and sent) again in the backward, or wait elsewhere, see
`context.decisions.WAYS`. Classes follow from data flow and the module that a value comes from. In a region they are
the rows of each chunk (roles as MPipeMoE calls them): T_DI, those on their way to the experts; T_M, between the
experts' products; T_DO, results on their way back; R, those that are back. W are the weights that a region fetches
from other ranks; done again, they are fetched again. Everything else is dense: values of a layer (what stands behind
the first number of a module's path) by its parts, and the weights that were gathered for it, those of experts of which
ranks have parts among them. What is done again begins with what is kept, at the latest where the layer begins.
"""

from __future__ import annotations

import math
import operator
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import NamedTuple

import sympy
import torch
from torch.fx import Node
from torch.utils.checkpoint import CheckpointPolicy

from moefx import _torch_compat as compat
from moefx import rooms
from moefx.context.decisions import Restorable, Weighing
from moefx.context.pass_types import PassContext
from moefx.costmodel.amounts import Amounts, Kind, amounts_of, is_view
from moefx.ir import edit
from moefx.ir.describe import layer_of, module_path
from moefx.ir.op import Stage, Volume, argument, lookup, nbytes, value
from moefx.ir.regions import region_of
from moefx.options import WEIGHTS

_aten = torch.ops.aten
_VIEWS = {
    _aten.view, _aten.reshape, _aten.t, _aten.transpose, _aten.permute, _aten.expand, _aten.unsqueeze, _aten.squeeze,
    _aten.slice, _aten.select, _aten.split, _aten.split_with_sizes, _aten.alias, _aten.detach, _aten.unbind,
    _aten._unsafe_view, _aten.as_strided,
}  # fmt: skip
_ACTIVATIONS = {  # that cost about as little as to read a tensor; an error function (gelu) does not
    _aten.silu, _aten.sigmoid, _aten.tanh, _aten.relu, _aten.leaky_relu, _aten.softplus, _aten.hardswish, _aten.elu,
    _aten.clamp, _aten.neg,
}  # fmt: skip
_NEVER_AGAIN = {
    _aten.topk, _aten.sort, _aten.argsort, _aten.argmax, _aten.argmin, _aten.max, _aten.multinomial,
    _aten.native_dropout,
    _aten.bernoulli, _aten.rand_like, _aten.randn_like, _aten.rand, _aten.randn, _aten.nonzero,
    _aten._local_scalar_dense,
}  # fmt: skip
_PRODUCTS = {_aten.mm, _aten.bmm, _aten.addmm, _aten.baddbmm}
_FORCED = (CheckpointPolicy.PREFER_RECOMPUTE, CheckpointPolicy.MUST_RECOMPUTE)
_FORBIDDEN = (CheckpointPolicy.PREFER_SAVE, CheckpointPolicy.MUST_SAVE)
DENSE, FETCHED = "dense", "W"
GATHERED = "gathered weights"  # what their class is called, behind its layer: no module has this name


class Class(NamedTuple):
    """The class of a value, see `Restorable`. layer: the path of the layer that it belongs to."""

    name: str
    region: int
    role: str
    chunk: int
    layer: str


class Kept(NamedTuple):
    """What the forward keeps, in graph order, and what the backward computes again."""

    kept: list[Node]
    again: set[Node]


class Restorables:
    """What a joint graph's backward reads of its forward. order: all nodes, in graph order; inputs: the program's;
    after_tangents: what depends on a gradient of an output; of_forward: what outputs and changed inputs are computed
    from; grads: the gradients that the program gives."""

    def __init__(
        self, order: dict[Node, int], inputs: list[Node], after_tangents: set[Node], of_forward: set[Node],
        grads: list[Node], ctx: PassContext,
    ) -> None:  # fmt: skip
        self.order, self.inputs, self.of_forward, self.ctx = order, inputs, of_forward, ctx
        needed = edit.ancestors(grads) & after_tangents
        direct = {a for n in needed for a in n.all_input_nodes if a not in after_tangents}
        direct |= {n for n in grads if n not in after_tangents}
        self.pending = sorted(direct, key=order.__getitem__)
        self.classes = classes_of([n for n in order if n in of_forward], ctx)
        self.crossing = self._crossing()

    def keep(self, way_of: Callable[[Class], str]) -> Kept:
        """What is kept where every class goes its way."""
        ways: dict[Class, str] = {}
        return _Settlement(self, {n: ways.setdefault(c, way_of(c)) for n, c in self.classes.items()}).run()

    def moved(self, kept: list[Node], outputs: Iterable[Node], way_of: Callable[[Class], str]) -> dict[Node, str]:
        """Of what is kept, what waits elsewhere, and by which way of a room. What lies in memory that stays in any case
        does not go: inputs, outputs of the forward, and what is kept otherwise."""
        ways = {n: way_of(self.classes[n]) for n in kept if n in self.classes}
        going = {n: way for n, way in ways.items() if way in rooms.keepings() and _may_go(n)}
        stays = {_memory(n) for n in [*self.inputs, *outputs, *kept] if n not in going}
        return {n: way for n, way in going.items() if _memory(n) not in stays}

    def describe(self) -> list[Restorable]:
        """What each way costs, class by class and chunk by chunk, where all others of its role go the same way and
        everything else is kept."""
        kept = self.keep(lambda each: "keep")
        first = self._bytes(kept.kept)
        found: dict[Class, tuple[dict, dict]] = {c: ({"keep": size}, {"keep": ()}) for c, size in first.items()}
        for role in dict.fromkeys(c.role for c in found):
            for way in ("lean", "redo"):
                other = self.keep(lambda each, role=role, way=way: way if each.role == role else "keep")
                sizes, again = self._bytes(other.kept, {*kept.kept}, other.again), defaultdict(list)
                for node in sorted(other.again - kept.again, key=self.order.__getitem__):
                    if node in self.classes:
                        again[self.classes[node]].append(amounts_of(node))
                for each in (c for c in found if c.role == role):
                    found[each][0][way] = sizes.get(each, sympy.S.Zero)
                    found[each][1][way] = tuple(a for a in again[each] if a.kind is not Kind.FREE)
        for sizes, again in found.values():
            for way in rooms.keepings():
                sizes[way], again[way] = sizes["lean"], again["lean"]
            sizes["inside"], again["inside"] = sizes["keep"], again["keep"]  # what the pass left
        return [Restorable(c.name, c.region, c.role, c.chunk, *costs, self._weighing(c)) for c, costs in found.items()]

    def _weighing(self, of: Class) -> Weighing | None:
        """What it takes to apply scores before the last product, if that spares rows of this class."""
        if of.role != "R" or of.region not in self.ctx.decisions.weighable:
            return None
        mine = [(n, c.role) for n, c in self.classes.items() if (c.region, c.chunk) == (of.region, of.chunk)]
        hidden = next(n for n, role in reversed(mine) if role == "T_DO" and _multiplies(n)).args[0]
        sent = [n for n, role in mine if role == "T_DI" and getattr(lookup(n), "is_collective", False)]
        weighed = Amounts(Kind.MEMORY, Volume(hbm_bytes=2 * nbytes(hidden)))
        return Weighing(nbytes(hidden), (weighed, *map(_of_one_number, sent)))

    def _bytes(self, kept: Iterable[Node], before: set[Node] = frozenset(), again: set[Node] = frozenset()
               ) -> dict[Class, sympy.Expr]:  # fmt: skip
        """Bytes by class. What is kept only since `again` needs it counts for the class of its reader."""
        found: dict[Class, sympy.Expr] = {}
        for node in kept:
            if node in self.classes and isinstance(value(node), torch.Tensor) and not _is_lent(node):
                reader = next((u for u in node.users if u in again and u in self.classes), None)
                of = self.classes[node if reader is None or node in before else reader]
                found[of] = found.get(of, sympy.S.Zero) + nbytes(node)
        return found

    def _crossing(self) -> set[Node]:
        """Values that another layer reads."""
        readers: dict[Node, set[str]] = {}
        found = set()
        for node in reversed(self.classes):
            mine = readers[node] = set()
            for user in node.users:
                if user in self.classes:
                    mine |= readers[user] if _is_look(user) else {self.classes[user].layer}
            if mine - {self.classes[node].layer} and self.classes[node].role != WEIGHTS:
                found.add(node)
        return found


class _Settlement:
    """Decides value by value. A view, a cast, an activation of something kept is computed again, and what the user
    checkpointed; if lean, everything elementwise; if it is done again, everything else but choices and random numbers.
    """

    def __init__(self, values: Restorables, ways: dict[Node, str]) -> None:
        self.values, self.ways = values, ways
        self.again: set[Node] = set()
        self.kept: set[Node] = set()
        self.lean = {"lean", "redo", *rooms.keepings()}  # ways by which nothing elementwise is kept
        bases = {_base(n) for n in values.pending}
        self.available = {n for n in bases if not self._may_redo(n)} | set(values.inputs)

    def run(self) -> Kept:
        for node in self.values.pending:
            self._settle(node)
        return Kept(sorted(self.kept, key=self.values.order.__getitem__), self.again)

    def _settle(self, node: Node) -> None:
        """Keep `node`, or mark it and what it needs for the backward to compute."""
        pending = [node]
        while pending:
            node = pending.pop()
            if node in self.kept or node in self.again:
                continue
            if not self._may_redo(node) or not self._worthwhile(node):
                self.kept.add(node)
                self.available.add(node)
                continue
            self.again.add(node)
            pending.extend(reversed(node.all_input_nodes))

    def _may_redo(self, node: Node) -> bool:
        if node.op == "placeholder":
            return False
        if node.target is operator.getitem:  # so that never all of an op's results are kept for the sake of one
            return self._may_redo(node.args[0])
        if node not in self.values.of_forward:  # backward formulas compute some factors without the tangent
            return True
        if _never_again(node):
            return False
        packet, way = getattr(node.target, "overloadpacket", None), self.ways.get(node, "keep")
        if packet in _VIEWS or node.meta.get("recompute") in _FORCED:
            return True
        if way == "redo" and node in self.values.crossing:
            return False
        cheap = packet in _ACTIVATIONS or packet is _aten._to_copy
        op = lookup(node)
        acts = op.lean if op is not None else torch.Tag.pointwise in getattr(node.target, "tags", ())
        elementwise = way in self.lean and acts
        return cheap or elementwise or self._is_redone(node)

    def _is_redone(self, node: Node) -> bool:
        """Whether all of its class is done again; a value of another layer never is for the sake of this one."""
        return (
            self.ways.get(node) == "redo"
            and node not in self.values.crossing
            and not _is_small(node)
            and node.meta.get("recompute") not in _FORBIDDEN
        )

    def _worthwhile(self, node: Node) -> bool:
        """Views, checkpointed values and classes that are done again always; a cast, an activation or a size only from
        what is kept anyway."""
        packet = getattr(node.target, "overloadpacket", None)
        if not isinstance(value(node), torch.SymInt) and (
            node not in self.values.of_forward
            or node.meta.get("recompute") is not None
            or packet in _VIEWS
            or node.target is operator.getitem
            or self._is_redone(node)
        ):
            return True
        return all(
            _base(a) in self.available or (self._may_redo(_base(a)) and self._worthwhile(_base(a)))
            for a in node.all_input_nodes
        )


# ---- classes


def classes_of(nodes: list[Node], ctx: PassContext) -> dict[Node, Class]:
    """The class of every op among `nodes` (a forward, in graph order)."""
    nodes = [node for node in nodes if node.op == "call_function"]
    travelled, multiplied, returned = _passed(nodes)
    ahead: set[Node] = set()  # nodes with a product of their region ahead
    for node in reversed(nodes):
        if any(u in ahead or _multiplies(u) for u in node.users if region_of(u) == region_of(node)):
            ahead.add(node)
    found, layers = {}, {}
    for node in nodes:
        region, path = region_of(node), module_path(node)
        layer = layer_of(path)
        brings = _brings_weights(node)
        if brings is not None:
            found[node] = _of_weights(region if brings == FETCHED else None, layer, ctx)
            continue
        if node in returned:
            role = "R"
        elif node in multiplied:
            role = "T_M" if node in ahead else "T_DO"
        else:
            role = "T_DI" if node in travelled else DENSE
        if role == DENSE:
            part = path[len(layer) :].strip(".").split(".")[0]
            found[node] = Class(".".join(filter(None, (layer, part))) or "the model", -1, DENSE, 0, layer)
            continue
        chunk = ctx.decisions.chunks.get(region)
        of, index = (region, 0) if chunk is None else (chunk.of, chunk.index)
        # A region is of one layer, whatever numbers its experts and their parts have in the model.
        found[node] = Class(f"{of}.{role}", of, role, index, layers.setdefault(of, layer))
    for node in reversed(nodes):  # static blocks, which the model's own ops make of tokens, and only the experts read
        users = [u for u in node.users if u in found]
        if found[node].role == DENSE and users and all(_takes_blocks(u, found[u]) for u in users):
            found[node] = found[users[0]]
    return found


def _brings_weights(node: Node) -> str | None:
    """Weights that were gathered from all ranks that have parts of them, or that a region fetches for copies; None: it
    brings none."""
    op = lookup(node.args[0] if node.target is operator.getitem else node)
    if op is None or op.stage is not Stage.WEIGHTS:
        return None
    return WEIGHTS if op.along.gives == "R" else FETCHED


def _takes_blocks(node: Node, of: Class) -> bool:
    """Whether what it reads is on its way to experts, made by whom it may be."""
    op = lookup(node)
    begins = op is not None and op.tokens is not None and op.tokens.begins
    return of.role == "T_DI" and not begins and not _multiplies(node) and not isinstance(value(node), torch.SymInt)


def _passed(nodes: list[Node]) -> tuple[set[Node], set[Node], set[Node]]:
    """Rows of regions: those that are on their way at all, behind a product, and back from the experts."""
    travelled, multiplied, returned = set(), set(), set()
    for node in nodes:
        if region_of(node) is None or not isinstance(value(node), (torch.Tensor, tuple, list)):
            continue
        op, given = lookup(node), node.all_input_nodes
        stage = None if op is None else op.stage_of(node)
        if op is not None and op.tokens is not None and op.tokens.ends:
            continue
        if stage is Stage.OUT or (op is not None and op.tokens is not None and op.tokens.begins):
            travelled.add(node)
            continue
        for passed in (travelled, multiplied, returned):
            if any(a in passed and region_of(a) == region_of(node) for a in given):
                passed.add(node)
        if _multiplies(node):
            multiplied.add(node)
        if stage is Stage.BACK:
            returned.add(node)
    return travelled, multiplied, returned


def _multiplies(node: Node) -> bool:
    op = lookup(node)
    return op.gemm is not None if op is not None else getattr(node.target, "overloadpacket", None) in _PRODUCTS


# ---- single nodes


def _is_lent(node: Node) -> bool:
    """Whether it lies in the memory of a parameter, room for copies included."""
    op = lookup(node.args[0]) if node.target is operator.getitem else None
    if op is None or not op.is_collective or not op.is_view(node.args[0]):
        return False
    given = node.args[0].args[0][node.args[1]]
    return given.op == "placeholder" or _is_lent(given)


def _of_weights(region: int | None, layer: str, ctx: PassContext) -> Class:
    """Of those that a region fetches from other ranks, or of those that are gathered for a layer."""
    if region is None:
        return Class(f"{layer}.{GATHERED}".lstrip("."), -1, WEIGHTS, 0, layer)
    of = ctx.uncut(region)
    return Class(f"{of}.{FETCHED}", of, FETCHED, 0, layer)


def _of_one_number(node: Node) -> Amounts:
    """The amounts of an exchange if rows had one entry."""
    amounts, entries = amounts_of(node), math.prod(value(node).shape[1:])
    volume = Volume(amounts.volume.flops / entries, amounts.volume.hbm_bytes / entries)
    return replace(amounts, volume=volume, payload=amounts.payload / entries)


def _is_look(node: Node) -> bool:
    return node.target is operator.getitem or getattr(node.target, "overloadpacket", None) in _VIEWS


def _base(node: Node) -> Node:
    """The tensor whose memory a view lies in."""
    while _is_look(node):
        parent = node.args[0]
        if node.target is operator.getitem and getattr(parent.target, "overloadpacket", None) not in _VIEWS:
            return node  # one of several results, memory of its own
        node = parent
    return node


def _memory(node: Node) -> Node:
    """The op that made the memory in which a value lies, see `costmodel.amounts.is_view`."""
    while is_view(node.target) or (node.target is operator.getitem and is_view(node.args[0].target)):
        node = node.args[0]
    return node


def _may_go(node: Node) -> bool:
    """Whether a value can wait elsewhere: what a routing says is read where it is."""
    found, base = value(node), _memory(node)
    op = lookup(base.args[0] if base.target is operator.getitem else base)
    return not _is_small(node) and found.is_floating_point() and (op is None or op.again)


def _is_small(node: Node) -> bool:
    """Sizes, and numbers of which each row has one: nobody gains by sending them again."""
    found = value(node)
    return isinstance(found, torch.SymInt) or (isinstance(found, torch.Tensor) and found.dim() < 2)


def _never_again(node: Node) -> bool:
    """Choices that a second execution might make differently, and numbers that were drawn."""
    op, target = lookup(node), node.target
    if op is not None and not op.again:
        return True
    if not isinstance(target, compat.OpOverload):
        return False
    if torch.Tag.nondeterministic_seeded in target.tags:  # attention says how much it drops
        return not any(a.name == "dropout_p" and argument(node, a.name) == 0 for a in target._schema.arguments)
    return target.overloadpacket in _NEVER_AGAIN
