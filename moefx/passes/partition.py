"""Cut the joint graph into a forward and a backward graph.

Contract
    takes  PLACED     the joint graph of forward and backward
    gives  PLACED     two graphs, and what their inputs and outputs mean; the forward's own assertions stay in it
    never  recomputes a routing (scores' top-k, orders, counts, sizes) or a random number

Pseudo-code
    1. forward nodes: what does not depend on a tangent. The backward reads some of their values. Their class says
       what becomes of them (analysis/restorables.py): they are kept, or made again from what is kept
    2. what is made again is copied into the backward right before its first use, exchanges of rows included

    backward: reads grouped   ->   reads x; rows = dispatch(x, perm); arrived = all_to_all(rows); grouped = regroup(..)
"""

from __future__ import annotations

import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node

from moefx import _torch_compat as compat
from moefx import rooms
from moefx.analysis.restorables import Restorables
from moefx.context.pass_types import PassContext
from moefx.context.step_graphs import StepGraphs
from moefx.errors import UnsupportedUse
from moefx.ir import edit
from moefx.ir.op import value

_aten = torch.ops.aten


def run(joint: GraphModule, ctx: PassContext, names: list[str]) -> StepGraphs:
    """names: of the program's inputs, in order."""
    return _Partition(joint, ctx, names).build()


def _check_apart(inputs: list[Node], names: list[str]) -> None:
    for desc in (node.meta["desc"] for node in inputs):
        if isinstance(desc, compat.descriptors.ViewBaseAOTInput):
            raise UnsupportedUse(
                f"the input {names[desc.base_of.idx]} shares memory with another one, and the forward writes to it",
                hint="register one buffer, and read parts of it where they are wanted: self.load[i]")  # fmt: skip


class _Partition:
    """Decides for one joint graph what the forward keeps, and builds both graphs."""

    def __init__(self, joint: GraphModule, ctx: PassContext, names: list[str]) -> None:
        self.joint, self.ctx, self.num_user = joint, ctx, ctx.decisions.num_user_outputs
        output = joint.graph.output_node()
        self.outputs = list(output.args[0])
        self.descs = list(output.meta["desc"])
        self.inputs, self.tangents = [], []
        for node in joint.graph.find_nodes(op="placeholder"):
            is_tangent = isinstance(node.meta["desc"], compat.descriptors.TangentAOTInput)
            (self.tangents if is_tangent else self.inputs).append(node)
        _check_apart(self.inputs, names)
        self.inputs.sort(key=lambda n: n.meta["desc"].idx)
        if len(self.inputs) != len(names):
            raise UnsupportedUse(
                "torch loses an input of the model where it differentiates it",
                hint="ops of torch.linalg that return several tensors, such as solve, may be why",
            )
        self.names = dict(zip(self.inputs, names))
        self.after_tangents = edit.descendants(self.tangents)
        self.order = {n: i for i, n in enumerate(joint.graph.nodes)}
        grads = [n for n, d in zip(self.outputs, self.descs) if isinstance(d, compat.descriptors.GradAOTOutput)]
        self.of_forward = edit.ancestors(n for n in self.outputs if isinstance(n, Node) and n not in grads)

    def build(self) -> StepGraphs:
        mutated, users, grads = [], [], []
        for node, desc in zip(self.outputs, self.descs):
            if isinstance(desc, compat.descriptors.InputMutationAOTOutput):
                mutated.append((desc.mutated_input.idx, node))
            elif isinstance(desc, compat.descriptors.GradAOTOutput):
                grads.append((desc.grad_of.idx, node))
            elif isinstance(desc, compat.descriptors.PlainAOTOutput):
                users.append(node)
            elif node is not None:
                raise UnsupportedUse(
                    f"an output of kind {type(desc).__name__}",
                    hint="do not change the shape or strides of an input in place",
                )
        forward_outputs = [node for _, node in mutated] + users
        kept = self._keep([node for _, node in grads if node is not None], forward_outputs)
        forward = self._forward(forward_outputs, kept, [i for i, _ in mutated])
        grads = [(i, node) for i, node in grads if isinstance(node, Node)]
        tangent_outputs = [n.meta["desc"].output.idx for n in self.tangents]
        for node, output in zip(self.tangents, [users[i] for i in tangent_outputs]):
            self.names[node] = f"grad_{self.names.get(output, output.name)}"
        backward = self._backward(kept, [node for _, node in grads]) if grads else None
        return StepGraphs(
            forward=forward,
            backward=backward,
            mutated_inputs=[i for i, _ in mutated],
            num_user_outputs=self.num_user,
            num_statistics=len(users) - self.num_user,
            saved=[self.names.get(n, n.name) for n in kept] if backward is not None else [],
            tangent_outputs=tangent_outputs,
            grad_inputs=[i for i, _ in grads],
            differentiable_outputs=tangent_outputs,
        )

    def _keep(self, grads: list[Node], outputs: list[Node]) -> list[Node]:
        """The forward values that the backward graph takes as inputs, in graph order."""
        ctx = self.ctx
        values = Restorables(self.order, self.inputs, self.after_tangents, self.of_forward, grads, ctx)
        ctx.decisions.restorables = values.describe()
        ctx.decisions.rings = rooms.rings(ctx.options) or ctx.decisions.rings
        kept = values.keep(ctx.way_of).kept
        outputs = [node for node in outputs if isinstance(node, Node)]
        moved = values.moved(kept, outputs, ctx.way_of)
        ctx.decisions.moved |= {self.names.get(node, node.name): way for node, way in moved.items()}
        return kept

    # ---- the graphs

    def _forward(self, outputs: list[Node], kept: list[Node], mutated: list[int]) -> GraphModule:
        graph = Graph()
        new = {n: _copy_placeholder(graph, n, self.names[n]) for n in self.inputs}
        checks = [n for n in self.joint.graph.find_nodes(op="call_function", target=_aten._assert_async.msg)
                  if n not in self.after_tangents]  # fmt: skip
        wanted = edit.ancestors([*(n for n in [*outputs, *kept] if isinstance(n, Node)), *checks])
        for node in self.joint.graph.nodes:
            if node in wanted and node.op not in ("placeholder", "output"):
                new[node] = graph.node_copy(node, new.__getitem__)
        changed = {self.inputs[i] for i in mutated} | {n for n in self.inputs if self.names[n] in self.ctx.written}
        results = [new[n] if isinstance(n, Node) else n for n in outputs]
        for node in kept:  # the program writes to these inputs when it is done; the backward wants the old value
            saved = graph.call_function(_aten.clone.default, (new[node],)) if node in changed else new[node]
            saved.meta.setdefault("val", value(node))
            results.append(saved)
        graph.output(tuple(results))
        return compat.LazyGraphModule(nn.Module(), graph, "Forward")

    def _backward(self, kept: list[Node], grads: list[Node]) -> GraphModule:
        graph = Graph()
        new = {n: _copy_placeholder(graph, n, self.names.get(n, n.name)) for n in [*kept, *self.tangents]}
        wanted = edit.ancestors(grads) & self.after_tangents

        def emit(root: Node) -> None:
            stack = [root]
            while stack:
                node = stack[-1]
                missing = [a for a in node.all_input_nodes if a not in new]
                if node in new:
                    stack.pop()
                elif missing:
                    stack.extend(reversed(missing))
                else:
                    new[node] = graph.node_copy(node, new.__getitem__)
                    stack.pop()

        for node in self.joint.graph.nodes:
            if node in wanted and node not in new:
                emit(node)
        for node in grads:
            emit(node)
        graph.output(tuple(new[n] for n in grads))
        return compat.LazyGraphModule(nn.Module(), graph, "Backward")


def _copy_placeholder(graph: Graph, node: Node, name: str) -> Node:
    new = graph.placeholder(name)
    new.meta = dict(node.meta)
    return new
