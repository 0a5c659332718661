"""Name the values of the joint graph after those of the graph that was differentiated.

Contract
    takes  PLACED   the joint graph, whose nodes know the node that they were traced from, or its gradient
    gives  PLACED   the same graph; what a reader of the code sees are the names of the model
    never  changes anything but names; inputs keep theirs

Pseudo-code
    forward: of the nodes traced from `router_logits`, the last tensor is router_logits, the others router_logits_t, ..;
        a value without a name of the model's, as `linear_3`, is named after the module that ends with it: q_proj
        `sum`, whose name is taken by Python, is named after what it is of: weights_sum
    sizes: tokens and pairs of a routing; the symbol that types show, s0; s1_plus1 for s1 + 1
    backward: what the gradient formula of x reads from others' is grad_x; within it, grad_x_mul, ..
    numbers: _1, _2, .. only where another value has the name

    mm_4 = mm(view_16, t_4)   ->   router_logits = mm(hidden_states, router_logits_t)
"""

from __future__ import annotations

import builtins
import operator
import re
from collections import defaultdict
from typing import Any

import torch
from torch.fx import GraphModule, Node

from moefx.context.pass_types import PassContext, PassResult
from moefx.ir import edit
from moefx.ir.describe import Symbols, module_path, op_name
from moefx.ir.op import Stage, argument, expr, lookup, value

_LONGEST = 60  # letters of a name
_LONGEST_SIZE = 24
_WORDS = {"*": "times", "+": "plus", "-": "minus"}


def run(gm: GraphModule, ctx: PassContext, placed: GraphModule) -> PassResult:
    """placed: the graph that was differentiated."""
    names = _forward_names(gm, placed)
    names |= _backward_names(gm, names, [_leaf_name(node) for node in placed.graph.find_nodes(op="placeholder")])
    edit.rename(gm, {node: name[:_LONGEST].rstrip("_") for node, name in names.items()})
    return PassResult([f"{len(names)} values named"])


# ---- forward


def _forward_names(gm: GraphModule, placed: GraphModule) -> dict[Node, str]:
    groups: dict[str, list[Node]] = defaultdict(list)
    symbols, routed = Symbols(), {}
    for node in gm.graph.nodes:
        source = node.meta.get("from_node")
        symbols.type_text(value(node))  # in the order in which the printed graph shows them
        op = lookup(node)
        if op is not None and op.tokens is not None and op.tokens.rule == "routing":
            routed.setdefault(expr(value(node)[0].shape[0]), "pairs")
            routed.setdefault(expr(value(argument(node, op.tokens.chosen)).shape[0]), "tokens")
        if node.op == "call_function" and source:
            groups[source[-1].name].append(node)
    parts = {(node.args[0].name, node.args[1]): node.name for node in placed.graph.nodes
             if node.target is operator.getitem and isinstance(node.args[1], int)}  # fmt: skip
    results = {source: _result_of(nodes) for source, nodes in groups.items()}
    ways_out = defaultdict(set)  # {path of a module: the ops that give its values back}
    for result in results.values():
        if _leaves(result):
            ways_out[module_path(result)].add(op_name(result))
    names: dict[Node, str] = {}
    for source, nodes in groups.items():
        result = results[source]
        base = _own_name(source, result, len(ways_out[module_path(result)]) == 1)
        if hasattr(builtins, base):
            base = _beside_builtin(base, result, nodes, names)
        for node in nodes:
            if isinstance(value(node), torch.SymInt):
                names[node] = _size_name(node, base, symbols, routed)
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


def _own_name(source: str, node: Node, alone: bool) -> str:
    """The name of the model's own variable, or of the module that gives the value back, and no other (`alone`), or of
    the op."""
    base, path, op = edit.base_name(source), module_path(node), op_name(node).strip("_")
    if base not in ("linear", "embedding", "getitem", "getattr", op):
        return base
    leaf = path.rsplit(".", 1)[-1]
    if alone and leaf.isidentifier() and _leaves(node):
        return leaf
    return op if base in ("getitem", "getattr") else base


def _leaves(node: Node) -> bool:
    """Whether nothing in its module reads a value, but something behind it does."""
    path = module_path(node)
    return bool(node.users) and not any(f"{module_path(user)}.".startswith(f"{path}.") for user in node.users)


def _beside_builtin(name: str, node: Node, nodes: list[Node], names: dict[Node, str]) -> str:
    """Python has the name: weights_sum for the op `sum`, input_value for a variable `input`."""
    operand = next((a for each in nodes for a in each.all_input_nodes if names.get(a, a.op) != a.op
                    and isinstance(value(a), torch.Tensor)), None)  # fmt: skip
    if operand is None:
        return f"{name}_value"
    return f"{names[operand].removesuffix(f'_{name}')}_{name}"


def _size_name(node: Node, base: str, symbols: Symbols, routed: dict[Any, str]) -> str:
    if getattr(node.target, "namespace", "") == "moefx":
        return base
    size = value(node)
    text = symbols.expr(size)
    if not expr(size).is_Symbol and expr(size) in routed:
        return routed[expr(size)]
    text = re.sub(r"^(\d+)\*(.+)$", r"\2*\1", text)  # a name begins with a letter
    text = re.sub(r" ?([*+-]) ?", lambda found: f"_{_WORDS[found.group(1)]}_", text)
    text = re.sub(r"_(\d)", r"\1", text)  # _1 is what a second value of the same name has
    return text if text.isidentifier() and len(text) <= _LONGEST_SIZE else f"{base}_size"


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
        if node.target is operator.getitem and _is_scattered(node.args[0]):
            found[node] = f"reduced_grad_{inputs[argument(node.args[0], 'inputs')[node.args[1]]]}"
            continue
        for user in node.users:
            theirs = of_op.get(user.meta.get("seq_nr"))
            if user in aims and user.target is torch.ops.aten.add.Tensor:  # a sum of several gradients of one value
                aims[node] = aims[user]
            elif _is_reduced(user):
                aims[node] = inputs[argument(user, "param")]
            elif _is_scattered(user):
                aims[node] = inputs[argument(user, "inputs")[argument(user, "grads").index(node)]]
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


def _is_scattered(node: Node) -> bool:
    op = lookup(node)
    return op is not None and op.stage is Stage.SHARDS


def _input_gradients(gm: GraphModule, names: dict[Node, str]) -> dict[Node, str]:
    output = gm.graph.output_node()
    inputs = {node.meta["desc"]: node for node in gm.graph.find_nodes(op="placeholder")}
    return {node: f"grad_{inputs[desc.grad_of].name}" for node, desc in zip(output.args[0], output.meta["desc"])
            if isinstance(node, Node) and node in names and not names[node].startswith("reduced_grad_")
            and getattr(desc, "grad_of", None) in inputs}  # fmt: skip
