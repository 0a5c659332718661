"""Name the values of the joint graph after those of the graph that was differentiated.

Contract
    takes  PLACED   the joint graph, whose nodes know the node that they were traced from, or its gradient
    gives  PLACED   the same graph; what a reader of the code sees are the names of the model
    never  changes anything but names; inputs keep theirs

Pseudo-code
    forward: of the nodes traced from `router_logits`, the last tensor is router_logits, the others router_logits_t, ..;
        a value without a name of the model's, as `linear_3`, is named after the module that ends with it: q_proj
    sizes: the symbol that types show, s0, or n_s0_s1 for s0 * s1
    backward: what the gradient formula of x reads from others' is grad_x; within it, grad_x_mul, ..
    numbers: _1, _2, .. only where another value has the name

    mm_4 = mm(view_16, t_4)   ->   router_logits = mm(hidden_states, router_logits_t)
"""

from __future__ import annotations

import operator
import re
from collections import defaultdict
from typing import Any

import torch
from torch.fx import GraphModule, Node

from moefx.context.pass_types import PassContext, PassResult
from moefx.ir import edit
from moefx.ir.describe import Symbols, module_path, op_name
from moefx.ir.op import Stage, argument, lookup, value

_LONGEST = 60  # letters of a name


def run(gm: GraphModule, ctx: PassContext, placed: GraphModule) -> PassResult:
    """placed: the graph that was differentiated."""
    names = _forward_names(gm, placed)
    names |= _backward_names(gm, names, [_leaf_name(node) for node in placed.graph.find_nodes(op="placeholder")])
    edit.rename(gm, {node: name[:_LONGEST].rstrip("_") for node, name in names.items()})
    return PassResult([f"{len(names)} values named"])


# ---- forward


def _forward_names(gm: GraphModule, placed: GraphModule) -> dict[Node, str]:
    groups: dict[str, list[Node]] = defaultdict(list)
    symbols = Symbols()
    for node in gm.graph.nodes:
        source = node.meta.get("from_node")
        symbols.type_text(value(node))  # in the order in which the printed graph shows them
        if node.op == "call_function" and source:
            groups[source[-1].name].append(node)
    parts = {(node.args[0].name, node.args[1]): node.name for node in placed.graph.nodes
             if node.target is operator.getitem and isinstance(node.args[1], int)}  # fmt: skip
    names = {}
    for source, nodes in groups.items():
        result = _result_of(nodes)
        base = _own_name(source, result)
        for node in nodes:
            if isinstance(value(node), torch.SymInt):
                names[node] = _size_name(node, base, symbols)
            elif node is result:
                names[node] = base
            elif node.target is operator.getitem:
                names[node] = _part_name(node, source, base, parts)
            else:
                names[node] = f"{base}_{op_name(node).strip('_')}"
    return names


def _result_of(nodes: list[Node]) -> Node:
    """Of the nodes that were traced from one, the one that holds its value: the last one, but sizes and the parts of
    several results."""
    tensors = [node for node in nodes if not isinstance(value(node), torch.SymInt)]
    whole = [node for node in tensors if node.target is not operator.getitem or node.args[0] not in tensors]
    return (whole or tensors or nodes)[-1]


def _own_name(source: str, node: Node) -> str:
    """The name of the model's own variable, or of the module that gives the value back, or of the op."""
    base, path, op = edit.base_name(source), module_path(node), op_name(node).strip("_")
    if base not in ("linear", "embedding", "getitem", "getattr", op):
        return base
    leaf = path.rsplit(".", 1)[-1]
    if leaf.isidentifier() and node.users and not any(_within(user, path) for user in node.users):
        return leaf
    return op if base in ("getitem", "getattr") else base


def _within(node: Node, path: str) -> bool:
    found = module_path(node)
    return found == path or found.startswith(f"{path}.")


def _size_name(node: Node, base: str, symbols: Symbols) -> str:
    if getattr(node.target, "namespace", "") == "moefx":
        return base
    text = re.sub(r"\W+", "_", symbols.expr(value(node))).strip("_")
    return text if re.fullmatch(r"[su]\d+", text) else f"n_{text}"


def _part_name(node: Node, source: str, base: str, parts: dict[tuple[str, Any], str]) -> str:
    """One of several results: as the model calls it, or as torch does."""
    index = node.args[1]
    own = edit.base_name(parts.get((source, index), "getitem"))
    if own != "getitem":
        return own
    schema = getattr(node.args[0].target, "_schema", None)
    returns = schema.returns if schema is not None else ()
    return f"{base}_{(index < len(returns) and returns[index].name) or f'part{index}'}"


# ---- backward


def _backward_names(gm: GraphModule, names: dict[Node, str], inputs: list[str]) -> dict[Node, str]:
    """inputs: what to call the inputs of the program.

    autograd counts the forward's ops, and every node of a gradient formula has the number of its op. Ops without a
    gradient have the number of the one before them."""
    of_op: dict[int, Node] = {}
    for node in names:
        if not isinstance(value(node), torch.SymInt) and "seq_nr" in node.meta:
            of_op.setdefault(node.meta["seq_nr"], node)
    found: dict[Node, str] = {}
    aims: dict[Node, str] = {}  # {a gradient: the name of what it is the gradient of}
    for node in reversed(gm.graph.nodes):
        if node.op != "call_function" or node in names:
            continue
        mine = of_op.get(node.meta.get("seq_nr"))
        if _is_reduced(node):
            found[node] = f"reduced_grad_{inputs[argument(node, 'param')]}"
            continue
        for user in node.users:
            theirs = of_op.get(user.meta.get("seq_nr"))
            if user in aims and user.target is torch.ops.aten.add.Tensor:  # a sum of several gradients of one value
                aims[node] = aims[user]
            elif _is_reduced(user):
                aims[node] = inputs[argument(user, "param")]
            elif theirs is not None and theirs is not mine:
                aims[node] = names[theirs]
        if node in aims:
            found[node] = f"grad_{aims[node]}"
        elif mine is not None:
            found[node] = f"grad_{names[mine]}_{op_name(node).strip('_')}"
    return found | _input_gradients(gm, found)


def _leaf_name(node: Node) -> str:
    """The last two parts of a parameter's name: gate_weight."""
    key = node.meta["moefx"].key
    return "_".join(str(key[0] if isinstance(key, tuple) else key).split(".")[-2:])


def _is_reduced(node: Node) -> bool:
    op = lookup(node)
    return op is not None and op.stage is Stage.GRADIENT


def _input_gradients(gm: GraphModule, names: dict[Node, str]) -> dict[Node, str]:
    output = gm.graph.output_node()
    inputs = {node.meta["desc"]: node for node in gm.graph.find_nodes(op="placeholder")}
    return {node: f"grad_{inputs[desc.grad_of].name}" for node, desc in zip(output.args[0], output.meta["desc"])
            if isinstance(node, Node) and node in names and not _is_reduced(node)
            and getattr(desc, "grad_of", None) in inputs}  # fmt: skip
