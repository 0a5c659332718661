"""Whether two programs compute the same, operation by operation, whatever their values are called and in which order
independent operations stand."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from moefx.context.step_graphs import StepGraphs
from moefx.ir import edit
from moefx.ir.forms import Word, data_symbols
from moefx.ir.names import called
from moefx.ir.op import expr, value
from moefx.ir.randomness import draws
from moefx.ir.writes import writes_to_input

# To the bit.
_COMMUTE = tuple(map(str, (torch.ops.aten.add.Tensor, torch.ops.aten.mul.Tensor, operator.add, operator.mul)))
_FACTS = ("mutated_inputs", "num_user_outputs", "num_statistics", "tangent_outputs", "grad_inputs")


def difference(step: StepGraphs, other: StepGraphs) -> str | None:
    """What `step` computes and `other` does not; None: both compute the same, to the bit."""
    for fact in _FACTS:
        if getattr(step, fact) != getattr(other, fact):
            return f"{fact} are {getattr(step, fact)}, not {getattr(other, fact)}"
    numbers: dict[str, str] = {}
    mine, results = _values(step, numbers)
    theirs, wanted = _values(other, numbers)
    known = {*theirs.values()}
    for node, word in mine.items():
        if word not in known:
            return _said(node)
    return None if results == wanted else "its outputs or gradients are other values"


def difference_of_graphs(graph: Graph, other: Graph) -> str | None:
    """The same of single graphs, as far as outputs depend on what they compute, and inputs are written to."""
    numbers: dict[str, str] = {}
    (mine, results), (theirs, wanted) = (
        _of_graph(each, {node: f"input {node.target}" for node in each.find_nodes(op="placeholder")}, numbers)
        for each in (graph, other)
    )
    known = {*theirs.values()}
    alive = edit.ancestors([graph.output_node(), *filter(writes_to_input, graph.nodes)])
    unknown = [node for node, word in mine.items() if word not in known and node in alive]
    if unknown:
        return _said(unknown[0])
    return None if results == wanted else "its outputs are other values"


def _said(node: Node) -> str:
    return f"{node.name}, {called(node)} of {', '.join(each.name for each in node.all_input_nodes)}"


def _values(step: StepGraphs, numbers: dict[str, str]) -> tuple[dict[Node, str], list[Any]]:
    """{what a node computes: a word for it}, and the words of outputs and gradients. numbers: the words so far."""
    given = {node: f"input {place}" for place, node in enumerate(step.forward.graph.find_nodes(op="placeholder"))}
    found, outputs = _of_graph(step.forward.graph, given, numbers)
    kept = outputs[len(step.mutated_inputs) + step.num_user_outputs + step.num_statistics :]
    results = outputs[: len(outputs) - len(kept)]
    if step.backward is not None:
        tangents = [f"gradient of output {place}" for place in step.tangent_outputs]
        given = dict(zip(step.backward.graph.find_nodes(op="placeholder"), [*kept, *tangents]))
        more, gradients = _of_graph(step.backward.graph, given, numbers)
        return found | more, [*results, *gradients]
    return found, results


def _of_graph(graph: Graph, given: Mapping[Node, Any], numbers: dict[str, str]) -> tuple[dict[Node, str], list[Any]]:
    words: dict[Node, Any] = dict(given)
    drawn = 0
    for node in graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        args = [*map_arg(node.args, lambda each: Word(words[each]))]
        if str(node.target) in _COMMUTE:
            args[:2] = sorted(args[:2], key=repr)
        place = ""
        if draws(node):
            drawn += 1
            place = f", draw {drawn}"
        text = f"{node.target}{args}{dict(map_arg(node.kwargs, lambda each: Word(words[each])))}{place}"
        if isinstance(value(node), torch.SymInt) and not data_symbols(expr(value(node))):
            text = f"size {expr(value(node))}"  # however it is come by
        words[node] = numbers.setdefault(text, f"value {len(numbers)}")
    outputs = [words[each] if isinstance(each, Node) else each for each in graph.output_node().args[0]]
    return {node: word for node, word in words.items() if node not in given}, outputs
