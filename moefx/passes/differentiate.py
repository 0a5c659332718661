"""Trace the placed graph together with its gradients: AOTAutograd's joint graph.

Contract
    takes  PLACED     one graph at torch level, and the kinds of equal layers in it
    gives  PLACED     one graph at ATen level that also takes the gradients of outputs and gives those of inputs; every
                      collective, and every grouped matmul's input and weight gradient, is a node of its own
    never  keeps a tensor of literals: both the forward and the backward may need it, so ops make it

Pseudo-code
    AOTAutograd's trace (ir/joint.py); meta["desc"] says what its inputs and outputs are

    equal layers: of one per kind, its joint graph. Every layer becomes one call with an opaque forward and backward,
    and AOTAutograd traces what is left: which gradients meet, and in which order, is up to it. A copy of the kind's
    forward then takes the place of a call's forward, a copy of its backward that of its backward
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from moefx import _torch_compat as compat
from moefx.analysis.kinds import Block, Kind, Kinds
from moefx.context.pass_types import PassContext, PassResult
from moefx.errors import MoefxError
from moefx.ir import edit, joint, layer_calls
from moefx.ir.copies import Copies, Sizes
from moefx.ir.op import expr, value

_aten = torch.ops.aten
_OPS_OF_A_TRACE = 10**7  # more than autograd counts in one


def run(gm: GraphModule, ctx: PassContext, kinds: Kinds | None = None,
        result: PassResult | None = None) -> GraphModule:  # fmt: skip
    """kinds: of the graph, each of which is differentiated once; None: the graph is differentiated as a whole.
    result: is told which were, and why others were not."""
    result = PassResult() if result is None else result
    layers: dict[Kind, _Layer] = {}
    for kind in kinds.found if kinds is not None else ():
        try:
            layers[kind] = _Layer(kind, ctx)
        except _NotApart as error:
            result.skipped.append((str(kind), f"differentiated one by one: {error}"))
    while layers:
        outlined = _Outlined(gm, ctx, layers.values())
        found = outlined.traced()
        for layer, given in outlined.wanted:
            try:
                layer.joint(given)
            except _NotApart as error:
                outlined.unfit[layer] = str(error)
        for layer, reason in outlined.unfit.items():
            del layers[layer.kind]
            result.skipped.append((str(layer.kind), f"differentiated one by one: {reason}"))
        if not outlined.wanted and not outlined.unfit:
            outlined.fill(found)
            result.changes += [f"{kind}: differentiated once" for kind in layers]
            return found
    return _whole(gm, ctx)


def _whole(gm: GraphModule, ctx: PassContext) -> GraphModule:
    return joint.trace(gm, ctx.fake_mode, grad=ctx.grad, autocast=ctx.autocast)


# ---- equal layers


class _NotApart(Exception):
    """Why a layer cannot be differentiated apart from the others."""


@dataclass
class _Joint:
    """The joint graph of a layer. written: {place of an input: its new value}. gradients: of inputs, by place. Sizes
    have the symbols of the layer that was traced."""

    inputs: list[Node]
    tangents: list[Node]
    outputs: list[Node]
    written: dict[int, Node]
    gradients: dict[int, Node]
    differentiable: set[int]  # outputs that have a tangent
    forward: list[Node]
    backward: list[Node]
    sizes: list[sympy.Symbol]  # that data alone tells, which the layer as it was before did not show


class _Layer:
    """One layer of a kind, differentiated, for every set of outputs of which gradients come back."""

    def __init__(self, kind: Kind, ctx: PassContext) -> None:
        self.kind, self.ctx, self.block = kind, ctx, kind.blocks[0]
        self.gives = [self.block.nodes[place] for place in kind.gives]
        if not all(isinstance(value(node), Tensor) for node in self.gives):
            raise _NotApart("it gives others what is no tensor")
        self.handed = [place for place, node in enumerate(self.block.inputs)
                       if ctx.grad and _is_read_twice(node, self.block)
                       and any(each.inputs[place].users.keys() - {*each.nodes} for each in kind.blocks)]  # fmt: skip
        self.whole = self._traced(None)
        for place, node in enumerate(self.gives):
            if ctx.grad and value(node).requires_grad != (place in self.whole.differentiable):
                raise _NotApart(f"{node.name}, which others read, is a view of what it reads")
        self._joints = {frozenset(self.whole.differentiable): self.whole}

    def knows(self, given: frozenset[int]) -> bool:
        return given in self._joints

    def joint(self, given: frozenset[int]) -> _Joint:
        """given: the outputs of which gradients come back, those that are handed on included."""
        if given not in self._joints:
            self._joints[given] = self._traced(given)
        return self._joints[given]

    def _traced(self, given: frozenset[int] | None) -> _Joint:
        graph, new = Graph(), {}
        for place, node in enumerate(self.block.inputs):
            new[node] = graph.placeholder(f"input_{place}_of_layer")
            new[node].meta["val"] = value(node)
        for node in self.block.nodes:
            new[node] = graph.node_copy(node, new.__getitem__)
        outputs = [new[node] for node in self.gives]
        outputs += [graph.call_function(torch.ops.moefx.hand_on.default, (new[self.block.inputs[place]],))
                    for place in self.handed]  # fmt: skip
        if given is not None:
            outputs = [out if place in given else graph.call_method("detach", (out,))
                       for place, out in enumerate(outputs)]  # fmt: skip
        graph.output(tuple(outputs))
        try:
            gm = _whole(compat.LazyGraphModule(nn.Module(), graph, "Layer"), self.ctx)
        except MoefxError as error:
            raise _NotApart(error.what) from error
        return _read_joint(gm, _old_symbols(gm, {new[node].name: node for node in self.block.nodes}, self.ctx))


def _old_symbols(gm: GraphModule, sources: dict[str, Node], ctx: PassContext) -> list[sympy.Symbol]:
    """Tracing makes new symbols of sizes that data alone tells. Give nodes the old ones, of the nodes `sources` that
    they were traced from. Returns the symbols that are left: of sizes that only the trace shows."""
    old: dict[sympy.Symbol, sympy.Symbol] = {}
    known = {symbol for node in sources.values() for symbol in _data_sizes(value(node))}
    known |= {symbol for node in gm.graph.find_nodes(op="placeholder") for symbol in _data_sizes(value(node))}
    for node in _calls(gm):
        source = node.meta.get("from_node")
        before = sources.get(source[-1].name) if source else None
        if before is not None:
            for new, found in zip(_numbers(value(node)), _numbers(value(before))):
                if new.is_Symbol and found in known and new not in known:
                    old.setdefault(new, found)
    sizes, left = Sizes(ctx.fake_mode, old), {}
    for node in _calls(gm):
        node.meta["val"] = sizes.of(value(node))
        left.update(dict.fromkeys(symbol for symbol in _data_sizes(value(node)) if symbol not in known))
    return [*left]


def _calls(gm: GraphModule) -> list[Node]:
    return [node for node in gm.graph.nodes if node.op == "call_function"]


def _numbers(found: Any) -> list[sympy.Expr]:
    """The sizes of a tensor, or of all in a list; a number is one."""
    if isinstance(found, (tuple, list)):
        return [number for each in found for number in _numbers(each)]
    given = found.shape if isinstance(found, Tensor) else [found]
    return [expr(each) for each in given if isinstance(each, (int, torch.SymInt))]


def _data_sizes(found: Any) -> list[sympy.Symbol]:
    return [symbol for number in _numbers(found) for symbol in number.free_symbols if symbol.name.startswith("u")]


def _is_read_twice(node: Node, block: Block) -> bool:
    fake = value(node)
    return isinstance(fake, Tensor) and fake.requires_grad and len(node.users.keys() & {*block.nodes}) > 1


def _read_joint(gm: GraphModule, sizes: list[sympy.Symbol]) -> _Joint:
    kinds = compat.descriptors
    inputs, tangents = {}, {}
    for node in gm.graph.find_nodes(op="placeholder"):
        desc = node.meta["desc"]
        if isinstance(desc, kinds.PlainAOTInput):
            inputs[desc.idx] = node
        elif isinstance(desc, kinds.TangentAOTInput) and isinstance(desc.output, kinds.PlainAOTOutput):
            tangents[desc.output.idx] = node
        else:
            raise _NotApart("it writes to what wants a gradient, or to memory that inputs share")
    outputs, written, gradients = [], {}, {}
    for node, desc in zip(gm.graph.output_node().args[0], gm.graph.output_node().meta["desc"]):
        if isinstance(desc, kinds.PlainAOTOutput):
            outputs.append(node)
        elif isinstance(desc, kinds.InputMutationAOTOutput):
            written[desc.mutated_input.idx] = node
        elif isinstance(desc, kinds.GradAOTOutput):
            if node is not None:
                gradients[desc.grad_of.idx] = node
        elif node is not None:
            raise _NotApart("some of what others read of it share memory")
    body = _calls(gm)
    late = edit.descendants(tangents.values())
    cut = next((place for place, node in enumerate(body)
                if node in late or node.meta.get("partitioner_tag") == "is_backward"), len(body))  # fmt: skip
    if not {*outputs, *written.values()} - {*inputs.values()} <= {*body[:cut]}:
        raise _NotApart("what it gives is computed in its backward")
    return _Joint([inputs[place] for place in sorted(inputs)], [tangents[place] for place in sorted(tangents)], outputs,
                  written, gradients, set(tangents), body[:cut], body[cut:], sizes)  # fmt: skip


class _Outlined:
    """A graph in which every equal layer is one call, and what to put in the place of these once it is differentiated.

    wanted: joint graphs that the last trace has found missing. unfit: {layer: why it cannot be differentiated apart}.
    """

    def __init__(self, gm: GraphModule, ctx: PassContext, layers: Iterable[_Layer]) -> None:
        self.gm, self.ctx = gm, ctx
        self.calls = [(layer, block) for layer in layers for block in layer.kind.blocks]
        self._sizes: dict[tuple[int, int], Sizes] = {}
        self._given: dict[int, dict[sympy.Symbol, sympy.Expr]] = {}
        self.wanted: set[tuple[_Layer, frozenset[int]]] = set()
        self.unfit: dict[_Layer, str] = {}

    def traced(self) -> GraphModule:
        with layer_calls.answered_by(self):
            return _whole(compat.LazyGraphModule(self.gm, self._graph(), "Outlined"), self.ctx)

    def _graph(self) -> Graph:
        inside = {node for _, block in self.calls for node in block.nodes}
        ends = {block.nodes[-1]: call for call, (_, block) in enumerate(self.calls)}
        graph, new = Graph(), {}
        for node in self.gm.graph.nodes:
            if node not in inside:
                new[node] = graph.node_copy(node, new.__getitem__)
            elif node in ends:
                self._call(graph, ends[node], new)
        return graph

    def _call(self, graph: Graph, call: int, new: dict[Node, Node]) -> None:
        layer, block = self.calls[call]
        made = graph.call_function(layer_calls.call_layer, (call, *(new[each] for each in block.inputs)))
        edit.inherit(made, block.nodes[-1])
        parts = (graph.call_function(operator.getitem, (made, place)) for place in itertools.count())
        for place in layer.kind.gives:
            new[block.nodes[place]] = next(parts)
        for place in layer.handed:
            new[block.inputs[place]] = next(parts)
        for place in layer.whole.written:
            graph.call_function(_aten.copy_.default, (new[block.inputs[place]], next(parts)))

    # ---- what the trace asks for

    def outputs(self, call: int, tensors: list[Tensor], sizes: list[int]) -> list[Tensor]:
        layer, block = self.calls[call]
        self._learn(call, tensors, sizes)
        renamed = Sizes(self.ctx.fake_mode, self._given[call])
        read = [block.inputs[place] for place in (*layer.handed, *layer.whole.written)]
        return [_like(renamed.of(value(node)))
                for node in (*(block.nodes[place] for place in layer.kind.gives), *read)]  # fmt: skip

    def _learn(self, call: int, tensors: list[Tensor], sizes: list[int]) -> None:
        """The trace makes new symbols of sizes that data alone tells, as of samples in a part of the batch: the layer
        that is given some goes on with these."""
        given, found = (iter(tensors), iter(sizes)), {}
        for node in self.calls[call][1].inputs:
            new = next(given[not isinstance(value(node), Tensor)])
            found |= {a: b for a, b in zip(_numbers(value(node)), _numbers(new)) if a in _data_sizes(value(node))}
        if self._given.get(call) != found:
            self._given[call] = found
            self._sizes = {key: known for key, known in self._sizes.items() if key[0] != call}

    def differentiable(self, call: int) -> set[int]:
        return self.calls[call][0].whole.differentiable

    def with_gradient(self, call: int, given: frozenset[int]) -> list[int]:
        layer = self.calls[call][0]
        if not layer.knows(given):
            self.wanted.add((layer, given))
            return sorted(layer.whole.gradients)
        return sorted(layer.joint(given).gradients)

    def gradients(self, call: int, given: frozenset[int]) -> list[Tensor]:
        layer, _ = self.calls[call]
        known = layer.joint(given) if layer.knows(given) else layer.whole
        sizes = self._sizes_of(call, known)
        return [_like(sizes.of(value(known.gradients[place]))) for place in self.with_gradient(call, given)]

    def tangent(self, call: int, output: int, grad: Tensor) -> Tensor:
        layer, _ = self.calls[call]
        place = sorted(layer.whole.differentiable).index(output)
        wanted = self._sizes_of(call, layer.whole).of(value(layer.whole.tangents[place]))
        if _strides(grad) != _strides(wanted):
            grad = grad.contiguous()
            if _strides(grad) != _strides(wanted):
                self.unfit[layer] = "a gradient that comes back has other strides than what it is of"
        return grad

    def _sizes_of(self, call: int, of: _Joint) -> Sizes:
        """From the symbols of the layer that was traced to those of the one that is called."""
        if (call, id(of)) not in self._sizes:
            layer, block = self.calls[call]
            given = self._given[call]
            symbols = {old: given.get(new, new) for old, new in zip(layer.block.symbols, block.symbols)}
            if block is not layer.block:
                env = self.ctx.fake_mode.shape_env
                with env.ignore_fresh_unbacked_symbols():
                    symbols |= {old: expr(env.create_unbacked_symint()) for old in of.sizes}
            self._sizes[call, id(of)] = Sizes(self.ctx.fake_mode, symbols)
        return self._sizes[call, id(of)]

    # ---- what stands in for calls

    def fill(self, gm: GraphModule) -> None:
        """Put copies of the layers' joint graphs in the place of calls."""
        graph = gm.graph
        backwards = {node.args[1]: node for node in graph.find_nodes(
            op="call_function", target=torch.ops.moefx.layer_backward.default)}  # fmt: skip
        for node in graph.find_nodes(op="call_function", target=torch.ops.moefx.layer_forward.default):
            tensors, numbers, call = node.args
            backward = backwards.get(call)
            layer, block = self.calls[call]
            found = layer.whole if backward is None else layer.joint(frozenset(backward.args[2]))
            copies = Copies(layer.block.nodes, block.nodes, self._sizes_of(call, found),
                            dict(zip(layer.block.numbers, block.numbers)), _OPS_OF_A_TRACE * (call + 1))  # fmt: skip
            given = iter(tensors), iter(numbers)
            copies.new |= {mine: next(given[not isinstance(value(each), Tensor)])
                           for mine, each in zip(found.inputs, block.inputs)}  # fmt: skip
            copies.put(found.forward, node)
            _replace(node, [copies.new[each] for each in (*found.outputs, *found.written.values())])
            if backward is not None:
                copies.new |= zip(found.tangents, backward.args[0])
                copies.put(found.backward, backward)
                _replace(backward, [copies.new[found.gradients[place]] for place in sorted(found.gradients)])
        for node in graph.find_nodes(op="call_function", target=torch.ops.moefx.hand_on.default):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
        graph.eliminate_dead_code()


def _replace(node: Node, results: list[Node]) -> None:
    for part in list(node.users):
        new = results[part.args[1]]
        for user in list(part.users):
            if user.target is _aten.copy.default and user.args[1] is part:  # a buffer's new value
                user.replace_all_uses_with(new)
        part.replace_all_uses_with(new)
        node.graph.erase_node(part)
    node.graph.erase_node(node)


def _like(found: Tensor) -> Tensor:
    return torch.empty_strided(found.shape, found.stride(), dtype=found.dtype, device=found.device)


def _strides(found: Tensor) -> tuple:
    return tuple(map(expr, found.stride()))
