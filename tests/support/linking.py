"""The code of a step, and the graphs that it was made of."""

from __future__ import annotations

from dataclasses import replace

from torch.fx import GraphModule

from moefx.context.step_graphs import StepGraphs
from moefx.ir import edit
from moefx.link.emit import emit
from moefx.link.lower import Linker
from moefx.link.program import input_name


def code_of(gm: GraphModule, step: StepGraphs) -> tuple[StepGraphs, dict[str, str]]:
    """(the graphs before they were linked, {graph: its code}). gm: the whole graph that `step` was made of."""
    names = [input_name(node.meta["moefx"]) for node in gm.graph.find_nodes(op="placeholder")]
    scheduled = replace(step, **{name: edit.copy_of(each) for name, each in step.graphs.items()})
    code = {}
    for name, each in step.graphs.items():
        Linker(each, names, "cpu").run()
        code[name] = emit(each, name)
    return scheduled, code
