"""Small graphs written as text, with all that a traced graph carries: fake values, and where inputs come from."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import GraphModule

import moefx.ir.ops
from moefx import rooms
from moefx.analysis.checking.compare import run
from moefx.axes import MeshSpec
from moefx.capture.trace import Source
from moefx.context.pass_types import PassContext
from moefx.ir.infer import infer
from moefx.ir.ops.dense import vary
from moefx.ir.ops.layers import layer_again, layer_edge
from moefx.ir.ops.order import start, wait
from moefx.ir.ops.regions import enter_experts, expert_parameter, leave_experts, stack_experts
from moefx.ir.ops.vocabulary import loss_of_parts
from moefx.ir.read import example_inputs, read, specs
from moefx.ir.text import text
from moefx.options import Options


def grouped_mm_fallback(rows: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """torch's grouped matmul in plain torch, for every dtype: [R, I], [E, I, O], [E] -> [R, O]."""
    ids = torch.bucketize(torch.arange(rows.shape[0]), offs, right=True)
    return torch.bmm(rows[:, None], weight[ids])[:, 0]


# What the texts of tests call by its bare name.
SHORT = {
    "enter": enter_experts, "leave": leave_experts, "expert_parameter": expert_parameter, "stack": stack_experts,
    "materialize": moefx.ir.ops.materialize, "start": start, "wait": wait, "vary": vary, "m": torch.ops.moefx,
    "layer_edge": layer_edge, "layer_again": layer_again, "loss_of_parts": loss_of_parts,
    "grouped_mm_fallback": grouped_mm_fallback,
    **{marker.__name__: marker for nesting in rooms.nestings() for marker in nesting.markers},
}  # fmt: skip


def graph(source: str, *, sizes: Mapping[str, int] | None = None, frozen: tuple[str, ...] = (),
          **sources: Source) -> tuple[GraphModule, Any]:
    """(the graph, its fake mode). Integer inputs are the user's, `table..` tables, `buffer..` buffers, floats called
    `x..` the user's and other floats parameters, trained unless frozen; `sources` overrides."""
    gm = read(textwrap.dedent(source), namespace=SHORT)
    found = {node.name: sources.get(node.name) or _guess(node, i)
             for i, node in enumerate(gm.graph.find_nodes(op="placeholder"))}
    trained = frozenset(n for n, s in found.items() if s.kind in ("param", "experts", "stack") and n not in frozen)
    mode = infer(gm, sizes, trained=trained)
    for node in gm.graph.find_nodes(op="placeholder"):
        node.meta["moefx"] = found[node.name]
    return gm, mode


def _guess(node: torch.fx.Node, index: int) -> Source:
    if node.name.startswith("table"):
        return Source("table", 0)
    if node.name.startswith("buffer"):
        return Source("buffer", node.name)
    is_float = node.meta["annotation"].startswith(("f", "bf"))
    return Source("param", node.name) if is_float and not node.name.startswith("x") else Source("input", index)


def context(mode: Any, options: Options | None = None, **axes: int) -> PassContext:
    """A context for a mesh of these axes; `ep` spreads the experts."""
    options = options or Options()
    return PassContext(MeshSpec.named(axes, options.parallel.ranks_per_node), options, mode)


def short(gm: GraphModule) -> str:
    """The text of a graph with the names of `SHORT`."""
    out = text(gm)
    for long, brief in (("moefx.ir.ops.order.", ""), ("moefx.ir.ops.dense.", ""), ("moefx.ir.ops.parameters.", ""),
                        ("moefx.ir.ops.regions.", ""), ("moefx.features.dedup.ops.", ""),
                        ("moefx.ir.ops.per_expert.", ""), ("enter_experts(", "enter("), ("leave_experts(", "leave("),
                        ("ops.moefx.", "m.")):
        out = out.replace(long, brief)
    return "".join(f"{line.split('  # ')[0].rstrip()}{_type(line)}\n" for line in out.splitlines())


def _type(line: str) -> str:
    return f"  # {line.split('  # ')[1].strip()}" if "  # " in line else ""


def assert_same_meaning(before: GraphModule, after: GraphModule, *, exact: bool = True, seeds: int = 3,
                        double: bool = False, **sizes: int) -> None:
    """Both graphs give the same results, and leave the same in what they write to, on the same random inputs. The
    graph after may have lost inputs that nobody read. double: in double precision, where results are large sums, which
    processors round in ways of their own."""
    names = [node.name for node in after.graph.find_nodes(op="placeholder")]
    for seed in range(seeds):
        inputs = dict(zip(specs(before), example_inputs(before, sizes, seed)))
        if double:
            inputs = {n: t.double() if t.is_floating_point() else t for n, t in inputs.items()}
        mine, other = ({n: t.clone() for n, t in inputs.items()} for _ in range(2))
        wanted = [*run(before, list(mine.values())), *(mine[n] for n in names)]
        found = [*run(after, [other[n] for n in names]), *(other[n] for n in names)]
        assert len(wanted) == len(found)
        tolerance = {"rtol": 0, "atol": 0} if exact else {"rtol": 1e-4, "atol": 1e-5}
        for one, two in zip(wanted, found):
            torch.testing.assert_close(two, one, **tolerance)
